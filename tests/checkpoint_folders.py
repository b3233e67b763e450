"""What a user has on disk: a checkpoint of each family, with a tokenizer that chats and a generation config."""

import string
from pathlib import Path

from conftest import TINY_MODELS
from transformers import GenerationConfig, PreTrainedTokenizerBase

from modeling_looped.looping import unroll
from modeling_looped.recipes.tokens import train_tokenizer


VOCABULARY = 320
LONGEST = 256  # positions
SENTENCES = [
    "The river of the north runs to the sea.",
    "A tern stands on the old tower, and the lake is grey.",
    "Four boats came to the town in the morning.",
    "Who wrote the red almanac?",
    "The mayor of the town counts the boats in the harbour every evening, and writes the number into a book.",
    "Rain.",
]
PROMPTS = ["A tern stands on the", "Rain", "The mayor of the town counts the boats in the harbour"]  # of three lengths
SYSTEM = {"role": "system", "content": "You answer in one word."}
CHAT = [SYSTEM, {"role": "user", "content": "What stands on the tower?"}]
LONGER_CHAT = [*CHAT, {"role": "assistant", "content": "A tern."}, {"role": "user", "content": "Where is the lake?"}]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE of `VOCABULARY` tokens, with a token of its own for the end of a turn."""
    tokenizer = train_tokenizer(SENTENCES * 2, VOCABULARY - 2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCABULARY
    return tokenizer


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """
    Loop(1-2x3-1) of each family, width 64, and `llama`: the unrolled GrownLlama. Random weights, large enough for every
    layer and every pass to count.
    """
    tokenizer = chat_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    models = {
        family: build(vocab_size=VOCABULARY, max_position_embeddings=LONGEST, **ids)
        for family, build in TINY_MODELS.items()
    }
    models["llama"] = unroll(models["grown_llama"])
    # Half a character has no text: with ASCII alone, and the end of a turn, equal texts are equal tokens.
    letters = [i for i in range(VOCABULARY) if set(tokenizer.decode([i])) <= set(string.printable)]
    silent = [i for i in range(VOCABULARY) if i not in letters and i != tokenizer.eos_token_id]
    for name, model in models.items():
        model.generation_config = GenerationConfig(suppress_tokens=silent, **ids)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}
