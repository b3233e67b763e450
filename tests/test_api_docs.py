"""The API reference is what the docstrings say, the docstrings' examples run, and the site builds without a dead link."""

import doctest
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import griffe
import pytest


ROOT = Path(__file__).resolve().parents[1]


def _make_api():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api = _make_api()
SHOWN = [
    (f"{module}.{name}", found)
    for _, _, _, modules in make_api.PAGES
    for module, names in modules
    for name, found in make_api.public_objects(module, names)
]
METHODS = [
    (f"{path}.{method.name}", method)
    for path, found in SHOWN
    if found.is_class
    for method in make_api.members(found)[1]
]


def test_the_pages_are_what_the_docstrings_say():
    made, folder = make_api.pages(), ROOT / "docs" / "api"
    there = {path.name: path.read_text() for path in folder.glob("*.md")}
    differing = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
    assert not differing, f"docs/api differs in {', '.join(differing)}: run python docs/make_api.py"


def test_everything_on_the_pages_has_a_docstring():
    missing = [path for path, found in SHOWN if not found.docstring and not found.is_attribute]
    assert not missing, f"no docstring: {', '.join(missing)}"


def test_every_argument_of_a_public_function_is_explained_in_its_docstring_or_once_for_all():
    unexplained = []
    for path, function in [*((path, found) for path, found in SHOWN if found.is_function), *METHODS]:
        said = function.docstring.value
        for parameter in function.parameters:
            name = parameter.name
            is_own = name not in ("self", "cls", *make_api.COMMON) and not parameter.kind.value.startswith("variadic")
            if is_own and not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said):
                unexplained.append(f"{path}({name})")
    assert not unexplained, f"arguments that no docstring explains: {', '.join(unexplained)}"


def _examples():
    """`(path, docstring, line, file)` of every docstring with an interactive session, public or not."""
    for top in ("modeling_looped", "recipes", "eval", "hub_cards"):
        todo = [griffe.load(top, search_paths=[ROOT], allow_inspection=False)]
        while todo:
            one = todo.pop()
            if one.docstring and ">>>" in one.docstring.value:
                yield one.path, one.docstring
            todo += [member for member in one.members.values() if not member.is_alias]


def _without_fences(docstring: str) -> str:
    return re.sub(r"^\s*```.*$", "", docstring, flags=re.MULTILINE)


@pytest.mark.parametrize(("path", "docstring"), [pytest.param(*one, id=one[0]) for one in _examples()])
def test_the_examples_of_docstrings_run(path, docstring):
    text = _without_fences(inspect.cleandoc(docstring.value))
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, path, path, docstring.lineno)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
    assert runner.tries > 0


# ---- The site ----


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(target),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, text=True, capture_output=True, timeout=300, env=environment, cwd=target.parent)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_nothing_of_a_network(tmp_path):
    built = build(tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the changelog, and the page for a dead link
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:)?//|<link[^>]*rel=["']?(?:stylesheet|preconnect)["']?[^>]*href=["']?(?:https?:)?//"""
    )
    for page in pages:
        assert not loads.search(page.read_text()), f"{page.name} loads something from elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](concepts.md#gone)", "gone"),
        ("[gone](../recipes/gone.yaml)", "not in the repository"),
        ("![gone](gone.png)", "gone.png"),
    ],
    ids=["page", "anchor", "file", "image"],
)
def test_a_dead_link_fails_the_site(text, said, tmp_path):
    for name in ("index.md", "concepts.md"):
        (tmp_path / "copy" / "docs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / "docs" / name).write_text(f"# {name}\n\n{text if name == 'index.md' else ''}\n")
    (tmp_path / "copy" / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "copy" / "docs" / "site_hooks.py").write_text((ROOT / "docs" / "site_hooks.py").read_text())
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "copy" / "mkdocs.yml").write_text(config + "\nnav: [index.md, concepts.md, changelog.md]\n")
    built = build(tmp_path / "site", tmp_path / "copy" / "mkdocs.yml")
    assert built.returncode != 0 and said in built.stderr, built.stderr


def test_the_site_s_navigation_has_every_page_once():
    import yaml

    class Loader(yaml.SafeLoader):
        """Of mkdocs.yml, whose one Python tag is not looked at."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    entries = [yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]]
    listed = []
    while entries:
        entry = entries.pop()
        if isinstance(entry, str):
            listed.append(entry)
        else:
            entries += entry.values() if isinstance(entry, dict) else entry
    docs = ROOT / "docs"
    there = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")] + ["changelog.md"]
    assert sorted(listed) == sorted(there)
