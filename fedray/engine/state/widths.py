"""How many numbers a client keeps under each name from one participation to the next."""

from __future__ import annotations

from fedray.algorithms import Algorithm
from fedray.core.vectors import Layout


def state_widths(algorithm: Algorithm, layout: Layout) -> dict[str, int]:
    """Returns how many float32 numbers each value of a client's state has, by the names that ``algorithm`` declares.
    ``layout`` is that of the model."""
    widths = dict.fromkeys(algorithm.client_state, layout.width)
    widths |= dict.fromkeys(algorithm.client_models, layout.row_width)
    return widths | dict.fromkeys(algorithm.client_numbers, 1)
