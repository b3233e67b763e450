"""`looped diagnose`: the page, its numbers, and how it looks on a phone and on a desk."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

import looped_cli
from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM, RecurrentGPTConfig, RecurrentGPTForCausalLM
from modeling_looped.growth import grow


pd = pytest.importorskip("pandas")
report = pytest.importorskip("modeling_looped.diagnostics.report")

TEXT = "The gardener watered the tomatoes before the heat of noon, and the beans after it. " * 3
EVERYONE = {"residual", "contributions", "depth_score", "skip_local", "skip_future", "lens", "order", "repeats"}
LOOPED = {"exits", "fixed_point", "similarity"}
GATED = {"gates", "attribution", "interventions", "difficulty", "contrast"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A grown stack and a gated loop with a tokenizer, and a looped stack without one."""
    from modeling_looped.recipes.tokens import train_tokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer([TEXT, TEXT.upper()], 300)
    tiny = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
    grown = GrownLlamaForCausalLM(GrownLlamaConfig(**tiny, intermediate_size=48, depth_plan="2x1"))
    grow(grown, "lidas", 2)
    looped = GrownLlamaForCausalLM(GrownLlamaConfig(**tiny, intermediate_size=48, depth_plan="Loop(1-1x3-1)"))
    parts = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1, "num_recurrences": 2}
    gated = RecurrentGPTForCausalLM(RecurrentGPTConfig(**tiny, **parts))
    for name, model in (("grown", grown), ("gated", gated), ("looped", looped)):
        model.save_pretrained(folder / name)
        if name != "looped":
            tokenizer.save_pretrained(folder / name)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"{n}. {TEXT}"}) + "\n" for n in range(6)))
    return folder


def invoke(*arguments):
    result = CliRunner().invoke(looped_cli.app, ["diagnose", *map(str, arguments)])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def pages(checkpoints, tmp_path_factory):
    """One page of each checkpoint, and one of two."""
    folder = tmp_path_factory.mktemp("pages")
    data = ["--data", checkpoints / "texts.jsonl", "--quick"]
    for name in ("grown", "gated", "looped"):
        code, printed, said = invoke(checkpoints / name, "--out", folder / name, *data)
        assert code == 0, said
        assert f"{folder / name}/index.html" in printed
    code, _, said = invoke("--compare", checkpoints / "grown", checkpoints / "gated", "--out", folder / "both", *data)
    assert code == 0, said
    return folder


def measured(folder, name):
    return {path.stem for path in (folder / "csv" / name).glob("*.csv")}


@pytest.mark.slow
def test_each_model_gets_the_measurements_that_apply(pages):
    assert measured(pages / "grown", "grown") == EVERYONE | {"block_similarity", "ancestry"}
    assert measured(pages / "gated", "gated") >= EVERYONE | LOOPED | GATED
    assert measured(pages / "looped", "looped") >= EVERYONE | LOOPED


@pytest.mark.slow
def test_what_was_not_measured_is_said_with_the_reason(pages):
    page = (pages / "grown" / "index.html").read_text()
    rest = page[page.index("Not measured") :]
    for name in LOOPED | GATED:
        assert f"<td>{name}</td>" in rest
    assert "no gate" in rest and "no loop" in rest


@pytest.mark.slow
def test_the_page_says_what_it_was_measured_on(pages, checkpoints):
    assert str(checkpoints / "texts.jsonl") in html.unescape((pages / "grown" / "index.html").read_text())
    assert "random token ids: there is no tokenizer" in (pages / "looped" / "index.html").read_text()


@pytest.mark.slow
def test_the_page_needs_nothing_from_a_network(pages):
    for path in pages.glob("*/index.html"):
        page = path.read_text()
        assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page), path
        assert "<script" not in page and "@import" not in page
        links = re.findall(r'href="(csv/[^"]+)"', page)
        assert links and all((path.parent / link).exists() for link in links)
        anchors = re.findall(r'href="#([^"]+)"', page)
        assert all(f'id="{anchor}"' in page for anchor in anchors)
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_numbers_on_the_page_are_those_of_the_tables(pages):
    page = html.unescape((pages / "grown" / "index.html").read_text())
    norms = pd.read_csv(pages / "grown" / "csv" / "grown" / "residual.csv")["norm"]
    assert f"From {norms.iloc[0]:.3g} in front of the first layer to {norms.iloc[-1]:.3g}" in page


@pytest.mark.slow
def test_two_models_share_figures_of_curves_and_have_heatmaps_of_their_own(pages):
    page = (pages / "both" / "index.html").read_text()

    def figures(name):
        section = re.search(rf'<section id="{name}".*?</section>', page, re.S).group()
        return section.count("<svg")

    assert figures("residual") == 1 and figures("skip_local") == 2
    files = {path.name for path in (pages / "both" / "figures").iterdir()}
    assert files >= {"residual.png", "skip_local-grown.png", "skip_local-gated.png"}
    assert page.count("<td>RecurrentGPTForCausalLM</td>") == 1 and measured(pages / "both", "gated") >= GATED


@pytest.mark.slow
def test_the_same_call_writes_the_same_page(checkpoints, tmp_path):
    asked = [checkpoints / "grown", "--quick", "--data", checkpoints / "texts.jsonl", "--only", "residual"]
    assert invoke(*asked, "--out", tmp_path / "a")[0] == invoke(*asked, "--out", tmp_path / "b")[0] == 0
    assert (tmp_path / "a" / "index.html").read_text() == (tmp_path / "b" / "index.html").read_text()
    assert invoke(*asked, "--out", tmp_path / "a")[0] == 0  # ours may be written again


def test_refusals_come_before_any_work(checkpoints, tmp_path):
    grown = checkpoints / "grown"
    assert "only='norms' is no measurement: choose from residual" in invoke(grown, "--only", "norms")[2]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    code, _, said = invoke(grown, "--out", tmp_path / "mine", "--quick")
    assert code == 2 and "holds files not made by looped diagnose" in said
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep" and len(list((tmp_path / "mine").iterdir())) == 1
    assert "exclude each other" in invoke(grown, "--quick", "--full")[2]
    assert "share a page with --compare" in invoke(grown, checkpoints / "gated")[2]
    code, _, said = invoke(grown, "--data", tmp_path / "absent.jsonl", "--out", tmp_path / "out")
    assert code == 2 and "absent.jsonl" in said and not (tmp_path / "out").exists()
    assert "cannot be told apart" in invoke("--compare", grown, grown, "--out", tmp_path / "out")[2]


def test_names_are_the_parts_of_paths_that_differ():
    assert report._short_names(["runs/a/step-400"]) == ["a"]
    assert report._short_names(["runs/a-0/step-400", "runs/b-0/step-400"]) == ["a-0", "b-0"]
    assert report._short_names(["a/x", "b/x", "b/y"]) == ["a-x", "b-x", "b-y"]
    assert report._short_names(["org/model"]) == ["model"]


PROBE = """
<script>
const small = [...document.querySelectorAll("svg")].map(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return Math.min(...[...svg.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize) * scale));
});
const found = {width: innerWidth, page: document.documentElement.scrollWidth, text: Math.min(...small)};
const outside = [...document.querySelectorAll("svg text")].filter(t => {
  const box = t.getBoundingClientRect(), of = t.closest("svg").getBoundingClientRect();
  return box.width && (box.left < of.left - 2 || box.right > of.right + 2);
});
found.outside = outside.map(t => t.textContent);
document.body.innerHTML = "";
document.title = JSON.stringify(found);
</script>
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["gated", "both"])
def test_a_browser_shows_the_page_without_sideways_scrolling_or_tiny_text(pages, page, width, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium")
    # A frame has the width that is asked for, whatever the least width of a window is.
    (tmp_path / "page.html").write_text((pages / page / "index.html").read_text() + PROBE)
    (tmp_path / "frame.html").write_text(
        f'<iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe><script>onload = () => '
        "document.body.append(document.querySelector('iframe').contentDocument.title)</script>"
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    run = subprocess.run(
        [
            browser,
            *options,
            "--virtual-time-budget=10000",
            "--window-size=1400,1000",
            "--dump-dom",
            tmp_path / "frame.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(html.unescape(re.search(r"\{.*\}", run.stdout.split("</iframe>")[-1]).group()))
    assert found["width"] == width
    assert found["page"] <= width
    assert found["text"] >= 8
    assert found["outside"] == []
