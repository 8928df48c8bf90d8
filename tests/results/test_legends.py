"""The legends of pictures."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from fedray.results.style import legend, styled


@pytest.mark.parametrize("lines", [2, 3, 5])
def test_a_legend_below_is_read_row_by_row(lines: int) -> None:
    with styled("paper"):
        figure = Figure()
        axes = figure.subplots()
        for number in range(lines):
            axes.plot([0, 1], label=f"line {number}")
        legend(axes)
        figure.draw_without_rendering()
        places = {text.get_text(): text.get_window_extent() for text in axes.get_legend().get_texts()}
    read = sorted(places, key=lambda name: (-round(places[name].y0 / 5), places[name].x0))
    assert read == [f"line {number}" for number in range(lines)]
