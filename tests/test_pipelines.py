"""What users already do with a checkpoint in a folder, done with every family, through the libraries' own calls."""

from pathlib import Path
from threading import Thread

import pytest
import torch
from checkpoint_folders import CHAT, LONGER_CHAT, PROMPTS, SENTENCES, SYSTEM, write_checkpoints
from conftest import TINY_MODELS
from datasets import Dataset
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging


pytestmark = pytest.mark.slow  # the whole of it takes a minute
SHORT = {"max_new_tokens": 12, "do_sample": False}
every_family = pytest.mark.parametrize("family", TINY_MODELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def load(folder: Path, auto_class: type = AutoModelForCausalLM, **kwargs):
    return AutoTokenizer.from_pretrained(folder), auto_class.from_pretrained(folder, **kwargs)


def continued(tokenizer, model, prompt: str | list[dict], **kwargs) -> str:
    """What `generate` writes after one prompt or chat, without padding."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    output = model.generate(**inputs, **{**SHORT, **kwargs})
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# Generation


@every_family
def test_the_pipeline_writes_for_a_padded_batch_what_generate_writes_for_each_prompt_at_every_depth(family, folders):
    logger = logging.get_logger("transformers.pipelines.base")
    with CaptureLogger(logger) as said:
        generator = pipeline("text-generation", str(folders[family]))
    assert "not supported" not in said.out
    tokenizer, model = load(folders[family])
    texts = {}
    for depth in ({}, {"num_recurrences": 1}, {"num_recurrences": 2}):
        expected = [continued(tokenizer, model, prompt, **depth) for prompt in PROMPTS]
        batch = generator(PROMPTS, batch_size=len(PROMPTS), return_full_text=False, **SHORT, **depth)
        assert [row[0]["generated_text"] for row in batch] == expected
        alone = [generator(prompt, return_full_text=False, **SHORT, **depth) for prompt in PROMPTS]
        assert [row[0]["generated_text"] for row in alone] == expected
        texts[depth.get("num_recurrences")] = expected
    assert len(set(texts[None])) == len(PROMPTS)
    assert all(one != three for one, three in zip(texts[1], texts[None]))


@every_family
def test_a_streamer_hands_out_piece_by_piece_the_text_that_generate_returns(family, folders):
    tokenizer, model = load(folders[family])
    for depth in (1, 3):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        inputs = tokenizer(PROMPTS[0], return_tensors="pt")
        arguments = {**inputs, **SHORT, "max_new_tokens": 40, "num_recurrences": depth, "streamer": streamer}
        writer = Thread(target=model.generate, kwargs=arguments)
        writer.start()
        pieces = list(streamer)
        writer.join()
        expected = continued(tokenizer, model, PROMPTS[0], max_new_tokens=40, num_recurrences=depth)
        assert "".join(pieces) == expected
        assert len([piece for piece in pieces if piece]) > 1


@every_family
def test_chats_with_a_system_prompt_are_answered_as_their_template_is_continued(family, folders):
    generator = pipeline("text-generation", str(folders[family]))
    tokenizer, model = load(folders[family])
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith(f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n")
    expected = [continued(tokenizer, model, chat) for chat in (CHAT, LONGER_CHAT)]
    (found,) = generator(CHAT, **SHORT)
    assert found["generated_text"] == [*CHAT, {"role": "assistant", "content": expected[0]}]
    assert expected[0] == continued(tokenizer, model, text)
    batch = generator([CHAT, LONGER_CHAT], batch_size=2, **SHORT)
    assert [row[0]["generated_text"][-1]["content"] for row in batch] == expected
    assert continued(tokenizer, model, CHAT[1:]) != expected[0], "the system prompt changes the answer"
    (shallow,) = generator(CHAT, num_recurrences=1, **SHORT)
    assert shallow["generated_text"][-1]["content"] == continued(tokenizer, model, CHAT, num_recurrences=1)
    assert shallow["generated_text"][-1]["content"] != expected[0]


@every_family
@torch.no_grad()
def test_a_decoding_loop_of_one_s_own_over_a_left_padded_batch_writes_what_generate_writes(family, folders):
    tokenizer, model = load(folders[family], generation_config=None)
    tokenizer.padding_side = "left"
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False, suppress_tokens=None, eos_token_id=None)
    tokens, mask, cache, written = inputs["input_ids"], inputs["attention_mask"], None, []
    for _ in range(6):
        output = model(tokens, attention_mask=mask, cache=cache, use_cache=True)
        tokens, cache = output.logits[:, -1:].argmax(-1), output.cache
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        written.append(tokens)
    assert torch.equal(torch.cat(written, dim=1), expected[:, inputs["input_ids"].shape[1] :])


# Scores


@torch.no_grad()
def sentence_scores(tokenizer, model, texts: list[str], embedded: bool = False, **kwargs) -> list[float]:
    """Log-likelihood of each text after its first token; all texts in one batch."""
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    given = {"inputs_embeds": model.get_input_embeddings()(ids)} if embedded else {"input_ids": ids}
    logits = model(**given, attention_mask=mask, **kwargs).logits
    nats = logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (nats * (mask[:, 1:] * mask[:, :-1])).sum(-1).tolist()


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sentence_has_one_log_likelihood_by_embeddings_or_ids_in_a_batch_or_alone(family, side, folders):
    tokenizer, model = load(folders[family])
    tokenizer.padding_side = side
    scores = {}
    for depth in (1, 3):
        alone = [sentence_scores(tokenizer, model, [text], num_recurrences=depth)[0] for text in SENTENCES]
        for batch in (1, 6):
            for embedded in (False, True):
                found = []
                for start in range(0, len(SENTENCES), batch):
                    texts = SENTENCES[start : start + batch]
                    found += sentence_scores(tokenizer, model, texts, embedded, num_recurrences=depth)
                assert found == pytest.approx(alone, abs=1e-3), (depth, batch, embedded)
        scores[depth] = alone
    assert max(abs(a - b) for a, b in zip(scores[1], scores[3])) > 0.1


# Heads


def with_head(folder: Path, out: Path, auto_class: type, **fields) -> Path:
    """The checkpoint with a new head, saved as a user would after fine-tuning it."""
    torch.manual_seed(0)
    tokenizer, model = load(folder, auto_class, **fields)
    for name, parameter in model.named_parameters():
        if name.split(".")[0] in ("score", "qa_outputs"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@every_family
def test_text_classification_gives_every_sentence_of_a_batch_the_probabilities_of_its_own_logits(
    family, folders, tmp_path
):
    labels = {0: "weather", 1: "people", 2: "places"}
    path = with_head(folders[family], tmp_path, AutoModelForSequenceClassification, id2label=labels)
    classifier = pipeline("text-classification", str(path), top_k=None)
    tokenizer, model = load(path, AutoModelForSequenceClassification)
    expected = []
    for text in SENTENCES:
        with torch.no_grad():
            chances = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        expected.append({labels[i]: chance.item() for i, chance in enumerate(chances)})
    for batch in (1, len(SENTENCES)):
        found = classifier(SENTENCES, batch_size=batch)
        for scores, chances in zip(found, expected, strict=True):
            assert {one["label"]: one["score"] for one in scores} == pytest.approx(chances, abs=1e-4)
    assert len({max(chances, key=chances.get) for chances in expected}) > 1


@every_family
def test_token_classification_labels_the_tokens_of_a_batch_as_those_of_each_sentence(family, folders, tmp_path):
    labels = {0: "O", 1: "B-PLACE", 2: "I-PLACE"}
    path = with_head(folders[family], tmp_path, AutoModelForTokenClassification, id2label=labels)
    tagger = pipeline("token-classification", str(path), ignore_labels=[])
    tokenizer, model = load(path, AutoModelForTokenClassification)
    batch = tagger(SENTENCES, batch_size=len(SENTENCES))
    found = set()
    for text, tokens in zip(SENTENCES, batch, strict=True):
        with torch.no_grad():
            chances = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        assert [token["entity"] for token in tokens] == [labels[i] for i in chances.argmax(-1).tolist()]
        assert [token["score"] for token in tokens] == pytest.approx(chances.amax(-1).tolist(), abs=1e-4)
        found |= {token["entity"] for token in tokens}
    assert len(found) > 1


@every_family
def test_feature_extraction_gives_the_last_hidden_states_of_the_base_model(family, folders):
    extractor = pipeline("feature-extraction", str(folders[family]))
    tokenizer, model = load(folders[family], AutoModel)
    tokenizer.padding_side = "right"
    batch = extractor(PROMPTS, batch_size=len(PROMPTS), return_tensors=True)
    for text, features in zip(PROMPTS, batch, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(extractor(text, return_tensors=True), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(features[:, : expected.shape[1]], expected, rtol=0, atol=1e-4)


@every_family
def test_zero_shot_classification_is_the_entailment_logit_of_each_hypothesis(family, folders, tmp_path):
    labels = {"contradiction": 0, "neutral": 1, "entailment": 2}
    names = {"label2id": labels, "id2label": {number: label for label, number in labels.items()}}
    path = with_head(folders[family], tmp_path, AutoModelForSequenceClassification, **names)
    classifier = pipeline("zero-shot-classification", str(path))
    tokenizer, model = load(path, AutoModelForSequenceClassification)
    candidates = ["weather", "the harbour of a town"]
    found = classifier(SENTENCES[2], candidates, hypothesis_template="It is about {}.", batch_size=2)
    entailed = []
    for candidate in candidates:
        inputs = tokenizer(SENTENCES[2], f"It is about {candidate}.", return_tensors="pt")
        with torch.no_grad():
            entailed.append(model(**inputs).logits[0, 2])
    expected = dict(zip(candidates, torch.stack(entailed).softmax(-1).tolist()))
    assert dict(zip(found["labels"], found["scores"])) == pytest.approx(expected, abs=1e-4)


@every_family
def test_question_answering_has_a_head_and_transformers_no_pipeline_for_it_any_more(family, folders, tmp_path):
    path = with_head(folders[family], tmp_path, AutoModelForQuestionAnswering)
    with pytest.raises(Exception, match="(?s)question-answering.*removed"):
        pipeline("question-answering", str(path))
    tokenizer, model = load(path, AutoModelForQuestionAnswering)
    tokenizer.padding_side = "right"
    pairs = (["What stands on the tower?", "Where do the boats go?"], [SENTENCES[1], SENTENCES[4]])
    with torch.no_grad():
        batch = model(**tokenizer(*pairs, padding=True, return_tensors="pt"))
        for row, pair in enumerate(zip(*pairs)):
            one = model(**tokenizer(*pair, return_tensors="pt"))
            for name in ("start_logits", "end_logits"):
                length = one[name].shape[1]
                torch.testing.assert_close(batch[name][row, :length], one[name][0], rtol=0, atol=1e-3)


# Training


def tokens_of(tokenizer, texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts}).map(
        lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text"
    )


@every_family
def test_the_trainer_measures_the_loss_of_the_sentences_lowers_it_and_leaves_a_folder_to_use(family, folders, tmp_path):
    tokenizer, model = load(folders[family])
    nats = -sum(sentence_scores(tokenizer, model, [text])[0] for text in SENTENCES)
    count = sum(len(tokenizer(text)["input_ids"]) - 1 for text in SENTENCES)
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=12,
        learning_rate=3e-3,
        per_device_train_batch_size=len(SENTENCES),
        per_device_eval_batch_size=len(SENTENCES),
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = tokens_of(tokenizer, SENTENCES)
    trainer = Trainer(
        model,
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(nats / count, abs=1e-4)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.5
    trainer.save_model(tmp_path / "out")
    tokenizer, loaded = load(tmp_path / "out")
    inputs = tokenizer(SENTENCES[0], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)
    generator = pipeline("text-generation", str(tmp_path / "out"))
    (written,) = generator(PROMPTS[2], return_full_text=False, **SHORT)
    assert written["generated_text"] == continued(tokenizer, model, PROMPTS[2])


# Where a model lies, and what becomes of it


@every_family
def test_device_map_auto_gives_every_bit_of_the_plain_model_and_its_texts(family, folders):
    tokenizer, plain = load(folders[family])
    _, placed = load(folders[family], device_map="auto")
    inputs = tokenizer(SENTENCES[4], return_tensors="pt")
    for depth in (1, 3):
        with torch.no_grad():
            expected = plain(**inputs, num_recurrences=depth).logits
            assert torch.equal(placed(**inputs, num_recurrences=depth).logits, expected)
    generator = pipeline("text-generation", str(folders[family]), device_map="auto")
    (written,) = generator(PROMPTS[0], return_full_text=False, num_recurrences=2, **SHORT)
    assert written["generated_text"] == continued(tokenizer, plain, PROMPTS[0], num_recurrences=2)


@pytest.mark.slow
@every_family
def test_an_exported_forward_equals_the_eager_one_at_its_depth_for_every_batch_and_length(family, folders):
    tokenizer, model = load(folders[family])
    batch, length = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    shapes |= {"use_cache": None, "num_recurrences": None}
    example = dict(tokenizer(SENTENCES[:3], padding=True, return_tensors="pt"))
    settings = {"use_cache": False, "num_recurrences": 2}
    program = torch.export.export(model, (), {**example, **settings}, dynamic_shapes=shapes)
    for texts in (SENTENCES[:3], SENTENCES[4:5], SENTENCES):
        inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
        with torch.no_grad():
            expected = model(**inputs, **settings).logits
            found = program.module()(**inputs, **settings).logits
            assert (expected - model(**inputs, num_recurrences=1).logits).abs().max() > 0.05
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-4)
