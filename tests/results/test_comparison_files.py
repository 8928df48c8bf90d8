"""The files that fedray compare writes, and those that it replaces, removes or leaves alone."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pandas as pd
from pages import Page

import fedray
from fedray.cli.main import main
from fedray.results import comparison_files
from fedray.results.comparison_files import write
from fedray.results.style import paths_of_picture


def test_the_files(runs, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["compare", str(runs), "--output", str(output), "--target", "0.3"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "alpha=0.1" in out
    assert "what it took to reach 30.00 %" in out
    names = {path.name for path in output.iterdir()}
    tables = {"comparison.csv", "targets.csv", "comparison.md", "comparison.tex"}
    assert names == {"comparison.json", "curves.png", "curves.svg", "report.html", *tables}
    assert len(pd.read_csv(output / "comparison.csv")) == 4
    tex = (output / "comparison.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 8
    assert re.search(r"(?<!\\)%", tex) is None
    assert "±" not in tex
    page = Page((output / "report.html").read_text())
    page.check()
    assert len(page.all("table")) == 8
    # the accuracy, two losses and the distribution over clients of each environment; over alpha the accuracy, the
    # rounds to the target, and the seconds
    assert len(page.all("img")) == 11
    # the baseline's paired difference is told in the page as in the command's table
    assert "difference to fedavg, points" in page.text
    # the same comparison again replaces its files; another one does not
    before = (output / "report.html").read_bytes()
    assert main(command) == 0
    assert (output / "report.html").read_bytes() == before
    capsys.readouterr()
    assert main([*command, "--by", "data.partition.alpha"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "holds something else than this comparison" in said.err
    assert (output / "report.html").read_bytes() == before


def test_what_only_an_older_result_had_is_removed(runs, tmp_path, monkeypatch):
    """Pictures of another style, or of more environments, stayed from other runs; here without drawing them."""
    comparison, out = fedray.compare(runs), tmp_path / "out"
    monkeypatch.setattr(comparison_files, "curves_figure", lambda comparison: None)
    monkeypatch.setattr(comparison_files, "page_of", lambda comparison: SimpleNamespace(html=lambda: ""))
    monkeypatch.setattr(
        comparison_files, "save", lambda figure, *place: [path.touch() for path in paths_of_picture(*place)]
    )

    def written(style: str, figures: int) -> set[str]:
        monkeypatch.setattr(comparison_files, "figures_of", lambda comparison: [("", None)] * figures)
        paths = write(comparison, out, style)
        assert all(path.exists() for path in paths)
        return {path.name for path in out.iterdir()} - {path.name for path in paths}

    assert written("paper", 3) == set()
    # not what the comparison has written
    mine = {"figure-9.png", "notes.md"}
    for name in mine:
        (out / name).touch()
    assert written("paper", 1) == mine
    assert (out / "figure-1.pdf").exists()
    assert written("page", 1) == mine
    assert not (out / "curves.pdf").exists()


def test_no_folder_is_named_and_none_is_overwritten(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for x in ("rounds", "flops", "rounds"):
        assert main(["compare", "runs", "--x", x]) == 0
    assert "into comparison-2" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("comparison*")) == ["comparison", "comparison-2"]
