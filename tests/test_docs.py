"""
The documentation is run. Every fenced block of README.md, CONTRIBUTING.md and docs/ is executed, in the order in which the
blocks of a page stand, in a folder of the page's own:

- `python` in one namespace a page, `sh` under `bash -euo pipefail`, `pycon` (sessions with `>>>`) against what it shows;
- `json`, `jsonl`, `toml` and `yaml` must parse; `text` and `console` are output. Any other info string, or none, fails.

A page says what has to lie in its folder in a comment at its top, `<!-- needs: demo-output, configuration -->`:
`tests/docs_needs.py` has the names, and paths of the repository are copied. No block is left out, except one under
`<!-- shown: REASON -->`, for what no machine of ours can run (a GPU, an upload): a test prints these and counts them.
`<!-- slow: ... -->` says that a block takes long, to readers only. A block that calls make is a dry run: `MAKEFLAGS=n`, so
that the target and its files are looked at. Commands start by a fork of `tests/docs_server.py`.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import yaml
from docs_needs import NEEDS
from docs_server import CLIENT
from filelock import FileLock
from markdown_it import MarkdownIt

from looped_cli import _FitByDefault, app


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
RUN = {"python", "pycon", "sh"}
PARSED = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
OUTPUT = {"text", "console"}
MOST_SHOWN = 12


@dataclass(frozen=True)
class Block:
    """One fenced block: its info string, the page's line on which its code begins, and the reason not to run it."""

    language: str
    line: int
    code: str
    shown: str | None = None


@dataclass
class Page:
    needs: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)  # (line, target), of links and images
    inline_code: list[tuple[int, str]] = field(default_factory=list)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def read(path: Path) -> Page:
    page, shown = Page(), None
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    line = 0
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None]):
        if token.map:
            line = token.map[0] + 1
        if token.type == "fence":
            page.blocks.append(Block(token.info.strip(), line + 1, token.content, shown))
            shown = None
        elif token.type == "code_block":
            raise AssertionError(f"{name_of(path)}:{line}: an indented code block: fence it and name its language")
        elif token.type == "html_block":
            for word, text in re.findall(r"<!--\s*(\w+):(.*?)-->", token.content, re.DOTALL):
                where, text = f"{name_of(path)}:{line}", " ".join(text.split())
                assert word in ("needs", "slow", "shown"), f"{where}: {word} is no directive"
                assert text, f"{where}: {word} says nothing"
                if word == "needs":
                    assert not page.blocks, f"{where}: needs belong at the top of the page"
                    page.needs += [need.strip() for need in text.split(",")]
                else:
                    assert after is not None and after.type in ("fence", "html_block"), f"{where}: no block follows"
                    shown = text if word == "shown" else shown
        elif token.type == "inline":
            if before is not None and before.type == "heading_open":
                page.headings.append("".join(child.content for child in token.children if child.content))
            for child in token.children:
                if child.type == "code_inline":
                    page.inline_code.append((line, child.content))
                elif child.type in ("link_open", "image"):
                    page.links.append((line, child.attrs.get("href") or child.attrs.get("src")))
    return page


# ---- What every page has to be ----


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_names_a_language_that_is_run_or_parsed_or_is_output(path):
    for block in read(path).blocks:
        where = f"{name_of(path)}:{block.line}"
        known = RUN | PARSED.keys() | OUTPUT
        assert block.language in known, f"{where}: {block.language!r} is none of {', '.join(sorted(known))}"
        if block.language in PARSED:
            try:
                PARSED[block.language](block.code)
            except (ValueError, yaml.YAMLError) as error:
                pytest.fail(f"{where}: no {block.language}: {error}")
        if block.shown is not None:
            assert block.language in RUN, f"{where}: a {block.language} block is not run anyway"
    for need in read(path).needs:
        assert need in NEEDS or (ROOT / need).exists(), f"{name_of(path)} needs {need!r}, which nothing makes"


def test_few_blocks_are_shown_and_not_run(capsys):
    shown = [(name_of(path), block) for path in PAGES for block in read(path).blocks if block.shown is not None]
    with capsys.disabled():
        for name, block in shown:
            print(f"\nnot run: {name}:{block.line}: {block.shown}", end="")
    assert len(shown) <= MOST_SHOWN, f"{len(shown)} blocks are not run: make them runnable, or raise MOST_SHOWN"
    assert all(len(block.shown.split()) >= 3 for _, block in shown), "a reason has three words at least"


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", LINKING, ids=name_of)
def test_every_relative_link_points_at_something(path):
    for line, target in read(path).links:
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "mailto:")), f"{name_of(path)}:{line}: {target}"
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name_of(path)}:{line}: {target} does not exist"
        assert found.is_relative_to(ROOT), f"{name_of(path)}:{line}: {target} is outside the repository"
        if anchor:
            anchors = [slug(heading) for heading in read(found).headings]
            assert anchors.count(anchor) == 1, (
                f"{name_of(path)}:{line}: #{anchor} is no heading of {file or 'the page'}"
            )


def test_every_page_is_reached_from_the_index():
    index = DOCS / "index.md"
    if not index.exists():
        pytest.skip("docs/index.md is not written yet")
    reached, left = set(), [index]
    while left:
        path = left.pop()
        if path in reached:
            continue
        reached.add(path)
        files = [(path.parent / target.partition("#")[0]).resolve() for _, target in read(path).links]
        left += [file for file in files if file.suffix == ".md" and file.is_relative_to(DOCS) and file.exists()]
    missing = {name_of(path) for path in DOCS.rglob("*.md")} - {name_of(path) for path in reached}
    assert not missing, f"no link leads to {', '.join(sorted(missing))}"


# ---- Commands that prose names ----


def commands(path: Path):
    """`(where, words)` of the calls of `looped` in prose, and in blocks that are not run."""
    for line, code in read(path).inline_code:
        yield f"{name_of(path)}:{line}", " ".join(code.split())
    for block in read(path).blocks:
        if block.shown is not None:
            for number, line in enumerate(block.code.replace("\\\n", "  ").splitlines()):
                yield f"{name_of(path)}:{block.line + number}", line.partition(" #")[0].strip()


@functools.cache
def script_options(name: str) -> set[str]:
    """Of the commands that have a parser of their own, what their `--help` lists."""
    import io
    from contextlib import redirect_stdout, suppress

    from typer.testing import CliRunner

    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
        printed.write(shown.output)
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", printed.getvalue()))


def check_command(words: list[str]) -> str | None:
    """What is wrong with a call of `looped`, if anything."""
    command, named = typer.main.get_command(app), ["looped"]
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] in command.commands:
            named.append(rest.pop(0))
            command = command.commands[named[-1]]
        elif isinstance(command, _FitByDefault):
            command = command.commands["fit"]
        elif rest[0] == "|" or re.fullmatch(r"[A-Z_.]+", rest[0]):  # a synopsis
            return None
        else:
            return f"{' '.join(named)} has no command {rest[0]}"
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help"}
    if command.context_settings.get("ignore_unknown_options"):
        options |= script_options(named[-1])
    for word in rest:
        option = word.partition("=")[0]
        if (
            option.startswith("--")
            and option not in options
            and option.replace("-", "_").replace("__", "--", 1) not in options
        ):
            return f"{' '.join(named)} has no option {option}"
    return None


def test_a_command_or_option_that_does_not_exist_is_found():
    assert check_command(["looped", "no-such"]) == "looped has no command no-such"
    assert check_command("looped eval X Y --recurrence 1".split()) == "looped eval has no option --recurrence"
    assert check_command("looped pretrain --configuration x".split()) == "looped pretrain has no option --configuration"
    assert check_command("looped phi runs.csv --variant a".split()) is None
    assert check_command("looped pretrain --config iso_depth --total_steps 4 --dry-run".split()) is None


@pytest.mark.parametrize("path", LINKING, ids=name_of)
def test_every_command_that_prose_names_exists(path):
    for where, code in commands(path):
        code = re.sub(r"^(\w+=\S+ )+|^\$ ", "", code)
        if re.match(r"looped [a-z-]", code) and not code.endswith("."):  # an error's sentence may begin so
            wrong = check_command(code.split())
            assert wrong is None, f"{where}: `{code}`: {wrong}"
        for module in re.findall(r"-m (modeling_looped[\w.]*)", code):
            assert find_spec(module) is not None, f"{where}: there is no module {module}"


# ---- The blocks themselves ----


@pytest.fixture(scope="session")
def executables(tmp_path_factory) -> Path:
    """A folder with `looped`, `python` and `lm_eval`, which fork from one process that has the libraries loaded."""
    folder = tmp_path_factory.mktemp("bin")
    address, server = folder / "socket", str(ROOT / "tests" / "docs_server.py")
    text = CLIENT.format(python=sys.executable, server=server, socket=str(address))
    for name in ("looped", "python", "lm_eval"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    process = subprocess.Popen([sys.executable, server, "serve", str(address)], env=environment(folder), cwd=folder)
    try:
        while not address.exists():
            assert process.poll() is None, "the server of the commands does not start"
            time.sleep(0.2)
        yield folder
    finally:
        process.terminate()
        process.wait()


def environment(first: Path) -> dict[str, str]:
    """Of commands: nothing from a network, one thread, and the folder `first` before the environment's own commands."""
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MAKEFLAGS": "n", "PIP_NO_INDEX": "1"}
    path = os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **fixed, "PATH": path, "MPLBACKEND": "agg"}


@pytest.fixture(scope="session")
def provide(tmp_path_factory):
    """Puts a need into a folder. Each is made once, whatever the number of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    store = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-needs"
    store.mkdir(exist_ok=True)

    def put(need: str, folder: Path) -> None:
        source, target = ROOT / need, folder / need
        if need in NEEDS:
            source = store / need
            with FileLock(store / f"{need}.lock"):
                if not source.exists():
                    making = store / f"making-{need}"
                    NEEDS[need](making)
                    making.rename(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)

    return put


def runnable(path: Path) -> list[Block]:
    return [block for block in read(path).blocks if block.language in RUN and block.shown is None]


def as_parameter(path: Path):
    marks = [pytest.mark.slow]
    try:
        needs, blocks = read(path).needs, runnable(path)
    except AssertionError:  # the test of the page's blocks says what is wrong
        needs, blocks = [], [None]
    marks += [pytest.mark.smollm2] if any("SmolLM2" in need for need in needs) else []
    return pytest.param(path, marks=marks, id=name_of(path)) if blocks else None


@pytest.mark.parametrize("path", [one for one in map(as_parameter, PAGES) if one is not None])
def test_the_blocks_of_the_page_run(path, executables, provide, tmp_path):
    for need in read(path).needs:
        provide(need, tmp_path)
    keys = ("language", "line", "code")
    blocks = [{key: getattr(block, key) for key in keys} for block in runnable(path)]
    (tmp_path / ".page.json").write_text(json.dumps({"page": name_of(path), "blocks": blocks}))
    command = [str(executables / "python"), str(ROOT / "tests" / "docs_server.py"), "page", ".page.json"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(executables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(ran.stdout)
    assert ran.returncode == 0, f"\n{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"


FAILING = """
# A page

```python
number = 1
```

- In a list:

  ```python
  number += 1
  raise KeyError(number)
  ```
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (FAILING, ['"PAGE", line 12', "raise KeyError(number)", "KeyError: 2", "PAGE:11: this block failed"]),
        ("```sh\ntrue\nfalse | cat\necho never\n```\n", ["PAGE:3: exit status 1", "PAGE:2: this block failed"]),
        ("```sh\nlooped eval --no-such\n```\n", ["No such option", "PAGE:2: exit status 2"]),
        ("```pycon\n>>> 1 + 1\n3\n```\n", ["Expected:", "PAGE:2: this session gives something else"]),
    ],
    ids=["python", "sh", "looped", "pycon"],
)
def test_a_block_that_fails_is_named_by_its_line(code, said, executables, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(code)
    blocks = []
    for token in MarkdownIt("commonmark").parse(code):
        if token.type == "fence":
            blocks.append({"language": token.info, "line": token.map[0] + 2, "code": token.content})
    (tmp_path / ".page.json").write_text(json.dumps({"page": "PAGE", "blocks": blocks}))
    command = [str(executables / "python"), str(ROOT / "tests" / "docs_server.py"), "page", ".page.json"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment(executables), capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 1
    for part in said:
        assert part in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    assert "never" not in ran.stdout
