"""Reports of lm-eval runs: their numbers against independent ones, their marks, baselines, figures and errors."""

import json
import math
import random

import numpy as np
import pytest
from test_eval_sets import AXIS_MEANS, TABLE_9

from modeling_looped.eval import report as module
from modeling_looped.eval.report import MARKER, Comparison, plot_group, read_runs, report, write_report


DATE = "2026-01-02T03-04-05.{:06d}"


def sample(number: int, doc: dict | None = None, target: str = "yes", **scores) -> dict:
    """A line of samples_*.jsonl. Our tasks have every score twice, for the error that lm-eval prints."""
    doc = doc or {"index": number, "context": f"question {number}", "continuation": target}
    scores |= {f"{name}_stderr": score for name, score in scores.items()}
    hashed = f"{json.dumps(doc, sort_keys=True)}"
    fields = {"doc_id": number, "doc": doc, "target": target, "arguments": {"gen_args_0": {"arg_0": "", "arg_1": ""}}}
    return fields | {"filter": "none", "metrics": list(scores), "doc_hash": hashed, **scores}


def write_run(folder, tasks, groups=None, number=0, types=None, shots=5, model_args=None, **config):
    """A results file and its samples, as lm-eval's EvaluationTracker writes them. `tasks` has samples by task."""
    folder.mkdir(parents=True, exist_ok=True)
    date = DATE.format(number)
    for task, samples in tasks.items():
        lines = "".join(json.dumps(line) + "\n" for line in samples)
        (folder / f"samples_{task}_{date}.jsonl").write_text(lines)
    results = {
        "results": {task: {"alias": task} for task in tasks},
        "group_subtasks": groups or {},
        "configs": {task: {"task": task, "output_type": (types or {}).get(task, "loglikelihood")} for task in tasks},
        "n-shot": dict.fromkeys(tasks, shots),
        "n-samples": {task: {"original": len(samples), "effective": len(samples)} for task, samples in tasks.items()},
        "config": {"model": "looped", "model_args": model_args or {"pretrained": "runs/tiny"}, "limit": None, **config},
    }
    path = folder / f"results_{date}.json"
    path.write_text(json.dumps(results))
    return path


def losses(seed: int, count: int = 200, shift: float = 0.0) -> list[dict]:
    """Items of 1 to 6 tokens. The same seed has the same items, and the same losses but for `shift` nats a token."""
    generator = random.Random(seed)
    samples = []
    for number in range(count):
        tokens = generator.randint(1, 6)
        nats = tokens * (generator.gauss(2, 0.5) + shift * generator.gauss(1, 1))
        samples.append(sample(number, continuation_loss=[nats, tokens], acc=float(nats < 2 * tokens)))
    return samples


def table(text: str, group: str, metric: str) -> dict[str, dict[str, str]]:
    """Cells by row and column."""
    section = text.split(f"\n## {group}\n")[1].split("\n## ")[0].split(f"\n### {metric} ")[1].split("\n### ")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    return {row[0]: dict(zip(rows[0][1:], row[1:])) for row in rows[2:]}


def test_axis_means_are_those_that_the_papers_table_implies(tmp_path):
    groups = {"five": list(TABLE_9)} | {axis: list(tasks) for axis, tasks in TABLE_9.items()}
    for column, count in enumerate((1, 2, 4, 8)):
        tasks = {
            task: [sample(0, continuation_loss=[value[column] * 2, 2]), sample(1, continuation_loss=[value[column], 1])]
            for tasks in TABLE_9.values()
            for task, value in tasks.items()
        }
        write_run(tmp_path, tasks, groups, column, num_recurrences=count)
    runs = read_runs([tmp_path])
    comparison = Comparison(runs)
    for column, run in enumerate(runs):
        means = [comparison.value(run, axis, "continuation_loss") for axis in TABLE_9]
        for axis, mean in zip(TABLE_9, means):
            assert abs(mean - AXIS_MEANS[axis][column]) < 5.1e-5, (axis, column)
        assert comparison.value(run, "five", "continuation_loss") == pytest.approx(sum(means) / 5, abs=1e-12)
    text = report(runs)
    assert list(comparison.groups) == ["five", *TABLE_9]  # the summary stands first
    summary = table(text, "five", "continuation_loss")
    assert list(summary["tiny r=8"]) == [*TABLE_9, "mean"]
    assert summary["tiny r=8"]["parametric_knowledge"].startswith("3.440 ")
    assert table(text, "reading_comprehension", "continuation_loss")["tiny r=4"]["squadv2"].startswith("0.924 ")


def test_cells_are_value_and_bootstrap_error_of_items(tmp_path):
    groups = {"both": ["one", "two"]}
    tasks = {"one": losses(1, 300), "two": losses(2, 120)}
    write_run(tmp_path, tasks, groups)
    (run,) = read_runs([tmp_path])
    rows = table(report([run]), "both", "continuation_loss")["tiny"]
    errors = []
    for task, samples in tasks.items():
        pairs = np.array([line["continuation_loss"] for line in samples])
        ratio = pairs[:, 0].sum() / pairs[:, 1].sum()
        # The delta method, instead of a bootstrap.
        residuals = (pairs[:, 0] - ratio * pairs[:, 1]) / pairs[:, 1].mean()
        errors.append(residuals.std() / math.sqrt(len(pairs)))
        value, error = map(float, rows[task].split(" ± "))
        assert abs(value - ratio) < 5.1e-4 and abs(error - errors[-1]) < 0.1 * errors[-1] + 5e-4
    value, error = map(float, rows["mean"].split(" ± "))
    # Tasks are resampled each for itself: their errors add as squares.
    expected = math.hypot(*errors) / 2
    assert abs(error - expected) < 0.1 * expected + 5e-4
    accuracy = table(report([run]), "both", "acc")["tiny"]
    hits = [line["acc"] for line in tasks["one"]]
    share = sum(hits) / 300
    value, error = map(float, accuracy["one"].split(" ± "))
    assert abs(value - share) < 5.1e-4 and abs(error - math.sqrt(share * (1 - share) / 300)) < 0.004


def test_equal_sizes_do_not_make_tasks_draw_alike(tmp_path):
    write_run(tmp_path, {"one": losses(1), "two": losses(1)}, {"both": ["one", "two"]})
    (run,) = read_runs([tmp_path])
    comparison = Comparison([run])
    single = comparison.error(run, "one", "continuation_loss")
    assert abs(comparison.error(run, "both", "continuation_loss") / single - math.sqrt(0.5)) < 0.08


def test_a_planted_difference_is_marked_and_identical_runs_are_not(tmp_path):
    groups = {"both": ["one", "two"]}
    equal = {"one": losses(1), "two": losses(2)}
    write_run(tmp_path / "a", equal, groups, model_args="pretrained=runs/a,dtype=float32")
    write_run(tmp_path / "b", equal, groups, model_args="pretrained=runs/b")
    write_run(tmp_path / "c", {"one": losses(1, shift=0.1), "two": losses(2)}, groups, model_args="pretrained=c/")
    runs = read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert [run.label for run in runs] == ["a", "b", "c"]
    rows = table(report(runs), "both", "continuation_loss")
    assert not any("*" in cell for row in ("a", "b") for cell in rows[row].values())
    assert rows["c"]["one"].endswith("**") and rows["c"]["mean"].endswith("**") and "*" not in rows["c"]["two"]
    rows = table(report(runs, reference="c"), "both", "continuation_loss")
    assert "*" not in rows["c"]["one"] and rows["a"]["one"].endswith("**") and rows["b"]["one"].endswith("**")
    assert "against `c`" in report(runs, reference="c")
    comparison = Comparison(runs)
    assert comparison.p(runs[1], "both", "continuation_loss") == 1
    with pytest.raises(ValueError, match="No run has the label 'd': choose of 'a', 'b', 'c'"):
        report(runs, reference="d")


def test_p_values_are_uniform_where_there_is_no_difference(tmp_path):
    generator = np.random.default_rng(0)
    tasks = {"a": {}, "b": {}}
    for task in range(100):
        items, noise = generator.normal(2, 1, 60), generator.normal(0, 1, (2, 60))
        for side, name in enumerate(tasks):
            tasks[name][f"t{task}"] = [
                sample(i, nats_per_byte=[float(items[i] + noise[side, i]), 1.0]) for i in range(60)
            ]
    for name in tasks:
        write_run(tmp_path / name, tasks[name], model_args={"pretrained": name})
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    comparison = Comparison(runs)
    p = np.sort([comparison.p(runs[1], task, "nats_per_byte") for task in tasks["a"]])
    distance = np.abs(p - (np.arange(100) + 0.5) / 100).max()
    assert distance < 1.63 / math.sqrt(100), distance  # Kolmogorov-Smirnov, 1 %
    assert (p < 0.05).mean() < 0.12


def test_few_items_and_numbers_that_are_none_get_no_mark(tmp_path):
    groups = {"all": ["single", "five", "broken"]}
    tasks = {"single": [(1.0,), (5.0,)], "five": [(1.0,) * 5, (2.0,) * 5], "broken": [(1.0,) * 50, (math.nan,) * 50]}
    for side, name in enumerate("ab"):
        samples = {
            task: [sample(i, continuation_loss=[value, 1]) for i, value in enumerate(values[side])]
            for task, values in tasks.items()
        }
        write_run(tmp_path / name, samples, groups, model_args={"pretrained": name})
    runs = read_runs([tmp_path])
    rows = table(report(runs), "all", "continuation_loss")
    assert rows["b"]["single"] == "5.000"  # one item has no error
    assert rows["b"]["five"] == "2.000 ± 0.000"  # of 5 items that agree, p is 1/16
    assert Comparison(runs).p(runs[1], "five", "continuation_loss") == 1 / 16
    assert "*" not in rows["b"]["broken"] and plot_group(Comparison(runs), "all") is None


def test_other_items_or_other_tokens_get_a_note_instead_of_a_mark(tmp_path):
    groups = {"both": ["one", "two"]}
    write_run(tmp_path / "a", {"one": losses(1), "two": losses(2)}, groups, model_args={"pretrained": "a"})
    fewer = {"one": losses(1, shift=1.0)[:100], "two": losses(2, shift=1.0)}
    write_run(tmp_path / "b", fewer, groups, model_args={"pretrained": "b"}, limit=100, truncated_requests=7)
    tokens = [{**line, "continuation_loss": [3 * part for part in line["continuation_loss"]]} for line in losses(1)]
    write_run(tmp_path / "c", {"one": tokens}, groups, model_args={"pretrained": "c"}, shots=0)
    text = report(read_runs([tmp_path]))
    rows = table(text, "both", "continuation_loss")
    assert "*" not in rows["b"]["one"] + rows["b"]["mean"] + rows["c"]["one"] and rows["b"]["two"].endswith("**")
    assert "`b`: the items of one differ from those of `a`; no marks there." in text
    assert "`c`: the tokens of one are not those of `a`; no marks there." in text
    assert rows["c"]["two"] == rows["c"]["mean"] == "—"
    assert "`c` lacks tasks of this table, and so has no mean." in text
    assert "Items: one 100 or 200 of 200 (0 or 5 shots), two 200 (5 shots)." in text
    assert "Limited by --limit: b 100." in text and "of all tasks that were run: b 7." in text


def test_order_of_samples_on_several_ranks_does_not_matter(tmp_path):
    samples = losses(1)
    write_run(tmp_path / "a", {"one": samples}, model_args={"pretrained": "a"})
    write_run(tmp_path / "b", {"one": samples[::2] + samples[1::2]}, model_args={"pretrained": "b"})
    one, two = read_runs([tmp_path])
    assert one.tasks["one"].items == two.tasks["one"].items
    assert np.array_equal(one.tasks["one"].scores["acc"], two.tasks["one"].scores["acc"])


def test_baselines_read_no_question(tmp_path):
    golds = [0, 1, 1, 1, 2, 0]
    chosen = [
        sample(i, {"choices": ["x"] * (2 + 2 * (i % 2)), "gold": gold}, str(gold), acc=1.0, continuation_loss=[1, 1])
        for i, gold in enumerate(golds)
    ]
    schema = [
        sample(i, {"contexts": ["x", "y", "z"], "gold": 2, "continuation": "c"}, "2", acc=0.0, continuation_loss=[1, 1])
        for i in range(4)
    ]
    requests = {"arguments": {f"gen_args_{i}": {} for i in range(5)}}
    foreign = [sample(i, {"query": i}, str(i % 2), acc=1.0) | requests for i in range(4)]
    answer = [sample(i, target=target, acc=0.0, continuation_loss=[1, 1]) for i, target in enumerate("77897")]
    several = [
        sample(i, {"answers": answers}, str(answers), f1=0.5, exact_match=0.0)
        for i, answers in enumerate((["a", "b"], ["b"], ["c", "b", "b"], ["d"]))
    ]
    tasks = {"chosen": chosen, "schema": schema, "foreign": foreign, "answer": answer, "several": several}
    types = {name: "multiple_choice" for name in ("chosen", "schema", "foreign")} | {"several": "generate_until"}
    write_run(tmp_path, tasks, {"all": list(tasks)}, types=types, vocab_size=97)
    text = report(read_runs([tmp_path]))
    accuracy = table(text, "all", "acc")
    assert accuracy["random guess"] == {
        "chosen": "0.375", "schema": "0.333", "foreign": "0.200", "answer": "0.000", "mean": "0.227"
    }  # fmt: skip
    assert accuracy["majority answer"] == {
        "chosen": "0.500", "schema": "1.000", "foreign": "0.500", "answer": "0.600", "mean": "0.650"
    }  # fmt: skip
    overlap = table(text, "all", "f1")
    assert overlap["majority answer"] == {"several": "0.750", "mean": "0.750"}
    assert overlap["random guess"]["several"] == "0.000"
    loss = table(text, "all", "continuation_loss")
    assert loss["random guess"]["answer"] == loss["random guess"]["mean"] == f"{math.log(97):.3f}"
    assert set(loss["majority answer"].values()) == {"—"}


def test_loss_of_a_random_guess_needs_one_known_vocabulary(tmp_path):
    for name, config in (("a", {"vocab_size": 97}), ("b", {"vocab_size": 98}), ("c", {})):
        write_run(tmp_path / name, {"one": losses(1, 20)}, model_args={"pretrained": name}, **config)
    for names in ("ab", "ac", "c"):
        text = report(read_runs([tmp_path / name for name in names]))
        assert table(text, "other tasks", "continuation_loss")["random guess"]["one"] == "—"


def test_labels_say_model_depth_and_exit(tmp_path):
    tasks = {"one": losses(1, 5)}
    given = [
        ({"pretrained": "org/model", "dtype": "float32"}, {"num_recurrences": 4}),
        ("pretrained=org/model/,num_recurrences=2", {"num_recurrences": None}),
        ({"pretrained": "org/model", "dtype": "float32"}, {"num_recurrences": 4}),
        ({"pretrained": "other/model"}, {"num_recurrences": 3, "exit": 3}),
        ({"pretrained": "dense"}, {}),
    ]
    for number, (arguments, config) in enumerate(given):
        write_run(tmp_path, tasks, number=number, model_args=arguments, **config)
    runs = read_runs([tmp_path])
    assert [run.label for run in runs] == ["model r=4", "model r=2", "model r=4 (2)", "model r=3 exit=3", "dense"]
    assert [run.name for run in runs] == ["model", "model (2)", "model", "model (exits)", "dense"]
    assert len(read_runs([tmp_path, runs[0].path, tmp_path / "." / runs[1].path.name])) == 5  # each once


def test_figures_have_a_line_for_each_model_and_a_panel_for_what_is_known(tmp_path):
    groups = {"both": ["one", "two"]}
    counts, number = (1, 2, 4), 0
    for name, flops in (("small", 1e15), ("large", 1e17)):
        for count in counts:
            tasks = {"one": losses(1, 50, shift=0.1 / count), "two": losses(2, 50, shift=0.2)}
            fields = {"model_args": {"pretrained": name}, "num_recurrences": count, "training_flops": flops}
            write_run(tmp_path / name, tasks, groups, number := number + 1, **fields)
    tasks = {"one": losses(1, 50), "two": losses(2, 50)}
    write_run(tmp_path / "dense", tasks, groups, model_args={"pretrained": "dense"})
    runs = read_runs([tmp_path / "small", tmp_path / "large", tmp_path / "dense"])
    comparison = Comparison(runs)
    left, right = plot_group(comparison, "both").axes
    assert [bars.get_label() for bars in left.containers] == ["small", "large"]
    for bars, model in zip(left.containers, ("small", "large")):
        here = [run for run in runs if run.name == model]
        assert list(bars.lines[0].get_xdata()) == list(counts)
        expected = [comparison.value(run, "both", "continuation_loss") for run in here]
        assert bars.lines[0].get_ydata() == pytest.approx(expected)
        (segments,) = (collection.get_segments() for collection in bars.lines[2])
        errors = [comparison.error(run, "both", "continuation_loss") for run in here]
        assert [(end - start)[1] / 2 for start, end in segments] == pytest.approx(errors)
    assert [line.get_label() for line in left.lines if line.get_linestyle() == "--"] == ["dense"]
    assert right.get_xscale() == "log"
    assert [line.get_label() for line in right.lines if line.get_label().startswith("r=")] == ["r=1", "r=2", "r=4"]
    assert [sorted(set(bars.lines[0].get_xdata())) for bars in right.containers] == [[1e15], [1e17]]

    only = Comparison([run for run in runs if run.name != "dense"][:1])
    assert len(plot_group(only, "both").axes) == 1  # one budget makes no curve
    assert plot_group(Comparison(runs[-1:]), "both") is None

    path = write_report(runs, tmp_path / "out")
    assert path == tmp_path / "out" / "report.md" and "![both](report_both.png)" in path.read_text()
    assert (tmp_path / "out" / "report_both.png").read_bytes()[:4] == b"\x89PNG"
    write_report(runs[-1:], tmp_path / "plain")
    assert [file.name for file in (tmp_path / "plain").iterdir()] == ["report.md"]


def test_only_reports_are_overwritten(tmp_path):
    write_run(tmp_path, {"one": losses(1, 5)})
    runs = read_runs([tmp_path])
    path = write_report(runs, tmp_path / "out")
    first = path.read_text()
    assert first.startswith(MARKER + "\n")
    assert write_report(runs, tmp_path / "out").read_text() == first
    path.write_text("# My notes\n")
    with pytest.raises(ValueError, match="is no report of looped eval-report.*--overwrite"):
        write_report(runs, tmp_path / "out")
    assert path.read_text() == "# My notes\n"
    assert write_report(runs, tmp_path / "out", overwrite=True).read_text() == first


def test_what_is_no_result_is_said_with_its_remedy(tmp_path):
    with pytest.raises(ValueError, match="nothing is neither a results file nor a folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="has no results_.*json"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="nothing to report on"):
        read_runs([])
    other = tmp_path / "results_of_mine.json"
    for text, message in (("{", "is not JSON"), ("[1]", "is no result of"), ('{"results": {}}', "is no result of")):
        other.write_text(text)
        with pytest.raises(ValueError, match=f"results_of_mine.json {message}"):
            read_runs([tmp_path])
    other.unlink()
    path = write_run(tmp_path, {"one": losses(1, 5)})
    samples = next(tmp_path.glob("samples_*"))
    lines = samples.read_text()
    samples.write_text("")
    with pytest.raises(ValueError, match="has no samples"):
        read_runs([path])
    wrong = lines.split("\n")[0].replace('"continuation_loss": [', '"continuation_loss": ["x", ')
    for broken, what in (("{}", "KeyError"), ("[]", "AttributeError"), (wrong, "ValueError")):
        samples.write_text(lines + broken + "\n")
        with pytest.raises(ValueError, match=f"line 6: no sample as lm-eval 0.4.13 logs them .{what}"):
            read_runs([path])
    samples.unlink()
    with pytest.raises(ValueError, match="results_2026.*has no samples of one .*--log_samples; python -m "):
        read_runs([path])


def test_filters_and_incomplete_metrics_are_said(tmp_path):
    strict = [{**sample(i, exact_match=float(i)), "filter": "strict"} for i in range(2)]
    loose = [{**sample(i, exact_match=1.0), "filter": "loose"} for i in range(2)]
    partial = [sample(0, acc=1.0, f1=0.5), sample(1, acc=0.0)]
    write_run(tmp_path, {"one": [strict[0], strict[1], *loose], "two": partial, "none": [sample(0)]})
    text = report(read_runs([tmp_path]))
    assert table(text, "other tasks", "exact_match")["tiny"]["one"].startswith("0.500 ")
    assert "one: answers as the filter strict finds them, not loose." in text
    assert "two: no f1, which 1 of 2 items lack." in text and "### f1" not in text
    write_run(tmp_path / "bare", {"none": [sample(0)]})
    assert "None of its tasks measures continuation_loss, acc" in report(read_runs([tmp_path / "bare"]))


def test_runs_that_lm_eval_itself_wrote_are_read(tmp_path):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.dummy import DummyLM
    from lm_eval.tasks import TaskManager

    class Model(DummyLM):
        def get_model_info(self):
            return {"num_recurrences": 2, "vocab_size": 97}

    items = [{"q": f"q {i}?", "choices": ["a", "b", "c"], "gold": i % 3, "answers": ["yes"]} for i in range(12)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    chosen = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    until = {"generation_kwargs": {"until": ["."]}}
    written = {"output_type": "generate_until", "doc_to_target": "{{answers[0]}}", **until}
    tasks = {
        "chosen": {**shared, **chosen, "metric_list": [{"metric": "acc"}]},
        "written": {**shared, **written, "metric_list": [{"metric": "exact_match"}]},
        "_group": {
            "group": "top",
            "task": [{"group": "axis", "task": ["chosen"]}, {"group": "other", "task": ["written"]}],
        },
    }
    (tmp_path / "tasks").mkdir()
    for name, task in tasks.items():
        fields = task if name == "_group" else {"task": name, **task}
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(fields))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    expected = []
    for _ in range(2):
        results = evaluator.simple_evaluate(
            Model(), "pretrained=runs/tiny", ["top"], task_manager=manager, limit=10, bootstrap_iters=0
        )
        expected.append(results["results"]["chosen"]["acc,none"])
        tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
        tracker.general_config_tracker.log_experiment_args("hf", "pretrained=runs/tiny", "", None, False)
        samples = results.pop("samples")
        tracker.save_results_aggregated(results, samples)
        for name in results["configs"]:
            tracker.save_results_samples(name, samples[name])
    runs = read_runs([tmp_path / "out"])
    assert [run.label for run in runs] == ["tiny r=2", "tiny r=2 (2)"]
    assert [run.tasks["chosen"].scores["acc"].mean() for run in runs] == pytest.approx(expected)
    text = report(runs)
    assert "\n## top\n\n### acc" in text and "Items: chosen 10 of 12 (0 shots), written 10 of 12 (0 shots)." in text
    assert "Limited by --limit: each run 10." in text
    rows = table(text, "axis", "acc")
    assert rows["random guess"] == {"chosen": "0.333", "mean": "0.333"} and rows["majority answer"]["chosen"] == "0.400"
    assert "differ" not in text


def test_metrics_are_those_that_tasks_of_this_package_measure():
    task = pytest.importorskip("modeling_looped.eval.task")
    assert set(module.METRICS) == set(task.METRICS)
    assert set(module.LOSSES) == {name for name, better in task.METRICS.items() if not better}


def test_reports_carry_no_path_of_the_machine(tmp_path):
    model = str(tmp_path / "checkpoints" / "tiny")
    write_run(tmp_path / "results", {"one": losses(1, 20)}, model_args={"pretrained": model, "dtype": "float32"})
    text = write_report(read_runs([tmp_path / "results"]), tmp_path / "out").read_text()
    assert str(tmp_path) not in text and "| tiny |" in text and "dtype=float32" in text


def test_what_a_task_calls_chance_is_its_random_guess(tmp_path):
    path = write_run(tmp_path, {"one": losses(1, 20)})
    results = json.loads(path.read_text())
    results["configs"]["one"]["metadata"] = {"version": 1.0, "chance": 0.2}
    path.write_text(json.dumps(results))
    assert table(report(read_runs([tmp_path])), "other tasks", "acc")["random guess"]["one"] == "0.200"
