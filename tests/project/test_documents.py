"""What the documents say of the project is so: links, names of files, layers, keys, versions."""

from __future__ import annotations

import ast
import re

import pytest
import yaml
from documents import ROOT, TEXTS
from layers import LAYERS

import fedray
from fedray.config import documented_keys
from fedray.tuning.settings import TuneConfig


def test_every_key_of_tune_is_described() -> None:
    section = TEXTS["tune_spaces/README.md"].partition("## Keys of tune")[2].partition("\n## ")[0]
    known = {key for key, *_ in documented_keys(TuneConfig, "tune.")}
    assert set(re.findall(r"^\| `(tune\.[\w.]+)`", section, re.MULTILINE)) == known


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", TEXTS)
def test_links(document: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[document]):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_messages_that_are_explained_exist() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "fedray").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    code = "\n".join(node.value for node in texts if id(node) not in documented)
    table = TEXTS["docs/errors.md"].partition("| the line has |")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) > 10
    assert [text for text in quoted if text not in code] == []


def test_names_in_the_round() -> None:
    """The table that follows a client's data through a round names files, and in them functions and classes."""
    rows = re.findall(r"^\| [^|]* \| ([^|]*) \| ([^|]*) \| [^|]*\|$", TEXTS["fedray/README.md"], re.MULTILINE)
    rows = [(re.findall("`(.*?)`", files), re.findall("`(.*?)`", names)) for files, names in rows]
    assert len(rows) > 20
    for files, names in rows:
        code = "".join((ROOT / "fedray" / file).read_text() for file in files)
        for name in names:
            # a name with a class is that of a method; one without is defined or used
            assert name in code or all(re.search(rf"(class|def) {part}\b", code) for part in name.split(".")), name


def test_layers() -> None:
    """The table of layers has all of them, in their order."""
    section = TEXTS["fedray/README.md"].partition("## Layers")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE)[2:]]
    ranks = [rank for names in rows for name in names for rank, layer in enumerate(LAYERS) if name in layer]
    assert ranks == sorted(ranks, reverse=True)
    assert sorted(name for names in rows for name in names) == sorted(name for layer in LAYERS for name in layer)


def test_files_that_are_named_exist() -> None:
    """The table of where a change is made, and that of what is tested where."""
    changes = TEXTS["fedray/README.md"].partition("## Where a change is made")[2]
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", changes):
        home = [ROOT / name, ROOT / "fedray" / name, *(ROOT / "fedray").rglob(name)]
        assert any(path.exists() for path in home), name
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", TEXTS["tests/README.md"]))
    tests = ROOT / "tests"
    for name in named:
        assert (tests / name).exists() or (ROOT / name).exists(), name
    files = {str(path.relative_to(tests)) for path in tests.rglob("test_*.py") if path.parent.name != "references"}
    assert not files - named


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fedray.__version__
    # the first section of the changes is that of this version
    assert re.findall(r"^## (\S+)", TEXTS["CHANGELOG.md"], re.MULTILINE)[0] == fedray.__version__


def test_length_of_the_first_page() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150
