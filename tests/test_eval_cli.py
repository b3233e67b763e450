"""`looped eval-report` and `looped contamination` as a user calls them."""

import json

import pytest
from test_eval_report import losses, write_run
from typer.testing import CliRunner

from looped_cli import app


ITEMS = [
    {"context": f"The harbour master of town {i} wrote in his book that evening that", "continuation": "rain fell"}
    for i in range(4)
]


def looped(*arguments: str):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_a_report_is_written_where_it_is_asked_for_and_named(tmp_path):
    write_run(tmp_path / "results", {"one": losses(1, 20)}, number=1, num_recurrences=1)
    write_run(tmp_path / "results", {"one": losses(1, 20, shift=0.5)}, number=2, num_recurrences=2)
    done = looped("eval-report", tmp_path / "results", "--output", tmp_path / "out", "--reference", "tiny r=2")
    assert done.exit_code == 0, done.output
    assert done.output.split() == [str(tmp_path / "out" / "report.md")]
    assert "against `tiny r=2`" in (tmp_path / "out" / "report.md").read_text()
    failed = looped("eval-report", tmp_path / "results", "--output", tmp_path / "other", "--reference", "none")
    assert failed.exit_code == 2 and "No run has the label 'none'" in failed.output
    assert not (tmp_path / "other").exists()


def test_contamination_counts_the_items_that_a_text_has(tmp_path):
    (tmp_path / "bigbench_qa_wikidata.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    text = f"Before. {ITEMS[2]['context'].upper()}, rain fell, and after. The harbour master of another town slept."
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    asked = ["--tasks", "looped_bigbench_qa_wikidata", "--data-dir", tmp_path]
    done = looped("contamination", tmp_path / "text.jsonl", *asked)
    assert done.exit_code == 0, done.output
    assert "| looped_bigbench_qa_wikidata | 4 | 0 | 13 | 1 | 25.0% |" in done.output
    done = looped("contamination", tmp_path / "text.jsonl", *asked, "--ngram", "5")
    assert (
        "| 4 | 0 | 5 | 4 | 100.0% |" in done.output
    )  # "the harbour master of town" is in none, "his book that evening" in all


@pytest.mark.parametrize(
    "asked, words",
    [
        (["--tasks", "looped_bigbench_qa_wikidata"], "no data set of the Hub: name its folder with --data-dir"),
        (["--tasks", "looped_nq", "--data-dir", "."], "looped_nq: . has no"),
    ],
)
def test_what_contamination_cannot_look_at_is_said(asked, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Some words.")
    done = looped("contamination", "text.txt", *asked)
    assert done.exit_code == 2 and words in " ".join(done.output.split())
