"""The count of published numbers that come out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from published_rows import OUTCOMES, RESULTS, count, every

from fedray.results.tables import markdown

HEAD = "row,column,measured,margin,published,deviation,runs,diverged,reached\n"


def store(folder: Path, *cells: str) -> None:
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text(HEAD + "".join(f"{cell}\n" for cell in cells))


@pytest.fixture
def papers(mine: Path) -> Path:
    """A table of four accuracies and another reading of it."""
    column = {"experiment": "paper/small", "published": [60, 50, 40, "diverged"]}
    rows = ["fedavg", "fedprox", "moon", "feddyn"]
    table = {"title": "T", "measure": "final", "seeds": 3, "rows": rows, "columns": {"a": column}}
    for path in (mine / "experiments/paper/published").iterdir():
        path.unlink()
    for name in ("table1", "table1_authors"):
        (mine / f"experiments/paper/published/{name}.yaml").write_text(yaml.safe_dump(table))
    return mine / "reproduced"


def test_each_outcome(papers):
    """60 ± 3 covers 62, 40.5 alone is within 5 % of 40, and 48 ± 1 is second as 50 is, but does not cover it."""
    assert count(every(papers)).set_index("table").loc["all", list(OUTCOMES)].tolist() == [0, 0, 0, 4]
    store(papers / "paper/table1", "fedavg,a,62,3,,,3,0,", "fedprox,a,48,1,,,3,0,", "moon,a,40.5,,,,1,0,")
    counted = count(every(papers)).set_index("table")
    assert counted.loc["paper/table1", ["numbers", *OUTCOMES]].tolist() == [4, 2, 1, 0, 1]
    assert counted.loc["all"].tolist() == counted.loc["paper/table1"].tolist()


def test_a_single_row_has_no_place(papers):
    store(papers / "paper/table1", "fedavg,a,20,3,,,3,0,")
    assert count(every(papers)).set_index("table").loc["all", list(OUTCOMES)].tolist() == [0, 0, 1, 3]


def test_the_best_reading_counts(papers):
    store(papers / "paper/table1", "fedavg,a,20,3,,,3,0,", "fedprox,a,48,1,,,3,0,", "feddyn,a,,,,,3,3,")
    # the first two have changed places, and the last diverged as it should
    assert count(every(papers)).set_index("table").loc["all", list(OUTCOMES)].tolist() == [1, 0, 2, 1]
    store(papers / "paper/table1_authors", "fedavg,a,61,3,,,3,0,", "fedprox,a,40,1,,,3,0,", "feddyn,a,30,1,,,3,0,")
    assert count(every(papers)).set_index("table").loc["all", list(OUTCOMES)].tolist() == [2, 1, 0, 1]
    # what was made with fewer rounds says nothing of the published ones
    store(papers / "paper/table1-quick", "moon,a,40,3,,,3,0,")
    assert count(every(papers)).set_index("table").loc["all", "not run"] == 1


def test_the_stored_count_is_that_of_the_stored_results():
    stored = (RESULTS.parent / "published_rows.md").read_text()
    numbers = every(RESULTS)
    assert markdown(count(numbers)).strip() in stored
    assert numbers.to_csv(index=False, float_format="%.6g") == (RESULTS.parent / "published_rows.csv").read_text()


def test_every_number_has_what_it_counts_by(papers):
    """The reading that counts, and what was measured in it."""
    store(papers / "paper/table1", "fedavg,a,20,3,,,3,0,")
    store(papers / "paper/table1_authors", "fedavg,a,61,3,,,3,1,")
    first, *others = every(papers).to_dict("records")
    assert (first["row"], first["published"], first["outcome"], first["reading"]) == (
        "fedavg", 60, "reproduced", "paper/table1_authors",
    )  # fmt: skip
    assert (first["measured"], first["margin"], first["runs"], first["diverged"]) == (61, 3, 3, 1)
    assert {each["outcome"] for each in others} == {"not run"}
