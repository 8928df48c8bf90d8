"""The selections that come with fedray, which choose the clients of a round (``train.sampling``), by the names that the
configuration gives them; and what one of yours is made of."""

from __future__ import annotations

from fedray.selection.cyclic import Cyclic
from fedray.selection.known import LOSS, NOTED, ROOT_MEAN_SQUARE, SECONDS, Known, Losses
from fedray.selection.oort import Oort
from fedray.selection.power_of_choice import PowerOfChoice
from fedray.selection.selection import Chosen, Selection
from fedray.selection.uniform import Uniform
from fedray.selection.weighted import Weighted

SELECTIONS: dict[str, type[Selection]] = {
    "uniform": Uniform, "cyclic": Cyclic, "weighted": Weighted, "power_of_choice": PowerOfChoice, "oort": Oort,
}  # fmt: skip

__all__ = ["LOSS", "NOTED", "ROOT_MEAN_SQUARE", "SECONDS", "SELECTIONS", "Chosen", "Known", "Losses", "Selection"]
