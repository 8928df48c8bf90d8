"""Published tables fit their experiments; tables of given values: ranks, ratios, and the pictures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from reproducing.measure import Measured, on_one_scale
from reproducing.pictures import picture
from reproducing.provenance import made_by
from reproducing.published import UNTIL_TARGET, known_tables, read_table
from reproducing.report import text_of
from scipy import stats

from fedray.algorithms import find_algorithm
from fedray.data.sources.registry import SOURCES

TABLES = known_tables()
ASKED = {"command": "python analysis/reproduce.py x", "seeds": 2}


@pytest.mark.parametrize("name", TABLES)
def test_each_table_fits_its_experiments(name):
    """Its files are there, take what rows and columns set, and have what is measured of them."""
    table = read_table(name)
    assert table.title.startswith(("FedSiam-DA (", "FedTrip (", "GHBM (", "pFedMo ("))
    assert len(table.cells) == len(table.rows) * len(table.columns)
    for cell in table.cells:
        config = cell.config({})
        find_algorithm(config.algorithm.name)
        if table.measure in ("rounds", "ratio", "gflops"):
            assert config.run.targets, cell
        if config.data.source in SOURCES:
            assert config.data.normalization in SOURCES[config.data.source].normalizations
        if table.measure in UNTIL_TARGET and table.until == "target" and cell.of == "test":
            assert config.run.stop_at == config.run.targets[-1]
        if cell.of == "train":
            assert config.run.eval_train_samples, cell
        if table.measure == "at_round":
            assert cell.round is not None
            assert cell.round % config.run.eval_every == 0
        if cell.of == "local":
            assert config.run.eval_local_models, cell
        if table.measure == "last":
            assert config.run.last_rounds, cell
    names = {(cell.name, cell.of, cell.round) for cell in table.cells}
    assert len(names) == len(table.cells), "two cells are the same runs"


def test_numbers_of_the_papers():
    """A few cells, looked up in the papers by hand."""
    cells = {(name, c.row, c.column): c.published for name in TABLES for c in read_table(name).cells}
    assert cells["fedtrip/table4", "slowmo", "CNN EMNIST 62 %"] == 92
    assert cells["fedtrip/table6", "moon", "MNIST Dir-0.5 90 %"] == 1.32
    assert cells["fedtrip/table7", "slowmo", "5 epochs, round 10"] == 84.55
    assert cells["pfedmo/table2", "mimemom", "LeNet5 UCI-HAR"] == 76.75
    assert cells["ghbm/table2", "feddyn", "C100 CNN non-IID"] == "diverged"
    assert cells["ghbm/c6", "fedhbm", "alpha = 0.6"] == 82.96


def some_values(table, rows: int) -> list[Measured]:
    """Values of a table of which only the first ``rows`` rows have been run."""
    return [
        Measured(cell, 50.0 + place, 2.0, [None], 0, values=(48.0, 50.0, 52.0)) if cell.row in table.rows[:rows]
        else Measured(cell, math.nan, math.nan, [], 0)
        for place, cell in enumerate(table.cells)
    ]  # fmt: skip


def test_columns_that_are_values_of_a_number_are_drawn_as_curves():
    table = read_table("pfedmo/fig6")
    (axes,) = picture(table, some_values(table, 2)).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*table.rows[:2]]
    curve = axes.get_lines()[0]
    assert list(curve.get_xdata()) == [0.05, 0.1, 1]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "xi\nband: 95 % interval, ◇ published")
    assert axes.get_ylabel() == "training accuracy, %"


def test_rows_that_are_values_of_a_number_are_drawn_as_curves_of_the_columns():
    table = read_table("fedtrip/fig7")
    (axes,) = picture(table, some_values(table, 99)).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*table.columns]
    assert list(axes.get_lines()[0].get_xdata()) == [float(row.removeprefix("mu = ")) for row in table.rows]
    assert axes.get_xlabel() == "mu\nband: 95 % interval"


def test_a_wide_band_does_not_stretch_the_axis():
    table = read_table("pfedmo/fig6")
    found = [replace(one, margin=40.0) for one in some_values(table, 2)]
    (axes,) = picture(table, found).axes
    ends = [value for one in found if one.runs for value in (one.value, one.cell.published) if value is not None]
    room = 0.2 * (max(ends) - min(ends))
    low, high = axes.get_ylim()
    assert min(ends) - room < low < min(ends)
    assert max(ends) < high <= 100


def test_without_published_values_a_cell_has_what_was_measured_only():
    table = read_table("pfedmo/fig2a")
    text = text_of(table, some_values(table, 99), made_by(ASKED, []))
    assert "Measured; no such numbers are published." in text
    assert "(-)" not in text


def test_a_panel_has_nine_curves_at_most():
    table = read_table("pfedmo/fig2a")
    first, second = picture(table, some_values(table, 99)).axes
    named = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (first, second)]
    assert (len(named[0]), named[1][0]) == (9, table.rows[0])
    assert {*named[0], *named[1]} == {*table.rows}
    assert first.get_ylim() == second.get_ylim()
    assert "published" not in first.get_xlabel()


def test_what_has_no_value_is_in_the_picture():
    table = read_table("fedtrip/table4")
    found = [replace(one, value=math.inf, bound=100) for one in some_values(table, 1)]
    assert [text.get_text() for text in picture(table, found).axes[0].texts] == ["> 100"]
    curves = read_table("pfedmo/fig6")
    found = [replace(one, value=math.nan) if one.cell.column == "xi = 1" else one for one in some_values(curves, 1)]
    (axes,) = picture(curves, found).axes
    assert "×: diverged" in axes.get_xlabel()
    assert [list(line.get_xdata()) for line in axes.get_lines() if line.get_marker() == "x"] == [[1]]


def test_other_columns_have_a_panel_each():
    table = read_table("fedtrip/table4")
    panels = picture(table, some_values(table, 99)).axes
    assert [axes.get_title(loc="left") for axes in panels if axes.get_visible() and axes.axison] == [*table.columns]
    assert picture(table, some_values(table, 0)) is None


def test_rows_that_diverged_rank_last():
    """The agreement of the order counts them, though they have no value."""
    table = read_table("fedtrip/table7")
    found = [
        replace(one, value=math.nan, margin=math.nan, diverged=1) if one.cell.row == "fedtrip" else one
        for one in some_values(table, 99)
    ]
    text = text_of(table, found, made_by(ASKED, []))
    for column in table.columns:
        own = [one for one in found if one.cell.column == column]
        values = [-1 if one.cell.row == "fedtrip" else one.value for one in own]
        order = stats.kendalltau(values, [one.cell.published for one in own]).statistic
        assert f"{column} {order:.2f}" in text
    assert "| fedtrip | 1 of 1 diverged" in text


def test_the_first_row_of_ratios_counts_as_one():
    table = read_table("fedtrip/table6")
    first, *others = [one for one in some_values(table, 99) if one.cell.column == table.columns[0]]
    column = [replace(first, value=80.0), *(replace(one, value=0.9) for one in others)]
    assert [on_one_scale(table, one)[0] for one in column] == [1, 0.9, 0.9, 0.9, 0.9, 0.9]
    assert [on_one_scale(table, one)[1] for one in column] == [1, 1.6, 1.8, 1.87, 2.33, 2.17]
    never = next(one for one in some_values(table, 99) if one.cell.published == "never")
    assert on_one_scale(table, never)[1] == math.inf
