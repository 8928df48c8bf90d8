"""The base class of selections, which choose the clients that take part in a round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedray.errors import UserError
from fedray.selection.known import Known, checked_ids
from fedray.usercode.importing import as_user_error


class Chosen(NamedTuple):
    """The clients that a selection has chosen for a round.

    Attributes:
        ids: their numbers, int64 ``[known.count]``, sorted.
        why: the number by which each of them was chosen, float64 ``[known.count]``, NaN for one that was not chosen by
            a number. It is None if the selection has no column for it (:attr:`Selection.why`).
    """

    ids: NDArray[np.int64]
    why: NDArray[np.float64] | None = None


class Selection:
    """The base class of selections, which choose the clients that take part in a round (``train.sampling``). The
    arguments of the class are options in the configuration, as in ``{kind: file.py:Name, option: 3}``.

    A choice must follow from ``known`` alone: an object that remembers something of earlier rounds would choose others
    in a run that is resumed. :class:`fedray.testing.SelectionContract` tests this. The attributes below may be set for
    the class, or by its ``__init__`` if they depend on options.

    Example:
        class Waiting(Selection):
            def choose(self, known):
                longest = np.argsort(known.last_round, kind="stable")[: known.count]
                return Chosen(known.ids[np.sort(longest)])
    """

    why: str | None = None
    """The column of clients.parquet for the numbers by which clients were chosen. It begins with ``selection_``."""

    columns: tuple[str, ...] = ()
    """The server's columns that the choice uses (:meth:`Known.column`). fedray fills ``LOSS``,
    ``ROOT_MEAN_SQUARE`` and ``SECONDS`` of :mod:`fedray.selection` after each round, if they are named here;
    ``ROOT_MEAN_SQUARE`` takes a further pass over the clients' samples, and ``SECONDS`` a virtual clock. Others are
    those of the algorithm."""

    asks: int = 0
    """How many clients compute their losses before the choice, at most (:meth:`Known.losses`)."""

    by_samples: bool = False
    """Whether clients are the more likely the more samples they hold. Their weights p_i are equal then, unless
    ``train.weighting`` says otherwise."""

    uniform: bool = False
    """Whether all clients are equally likely in each round, independently of the others, as ``privacy`` and
    ``system.mode=buffered`` assume. A subclass does not inherit it."""

    def choose(self, known: Known) -> Chosen:
        """Returns the clients that take part in a round: ``known.count`` of ``known.ids``."""
        raise NotImplementedError

    def check(self, count: int, clients: int) -> None:
        """Is called once, before the run. Override it for a selection that needs more clients than others, and raise
        an error that says so.

        Args:
            count: how many clients are chosen in each round.
            clients: how many hold samples.
        """


def check_declared(selection: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``selection`` is a selection whose attributes are of the right form. ``where``
    is the beginning of the message."""
    if not isinstance(selection, Selection) or type(selection).choose is Selection.choose:
        what = "is no subclass of fedray.selection.Selection" if not isinstance(selection, Selection) else "lacks it"
        raise UserError(f"{where} must be a selection, a class with the method choose(known): it {what}")
    why, columns, asks = selection.why, selection.columns, selection.asks
    if why is not None and not (isinstance(why, str) and why.startswith("selection_")):
        raise UserError(f"{where}: `why` is the name of a column and must begin with selection_, not be {why!r}")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise UserError(f"{where}: `columns` must be a tuple of names, not {columns!r}")
    if not isinstance(asks, int) or asks < 0:
        raise UserError(f"{where}: `asks` must be a number of clients, not {asks!r}")


def chosen_by(selection: Selection, known: Known) -> Chosen:
    """Returns the clients that ``selection`` chooses of those that are ``known``. Raises :class:`UserError` if it
    fails, or returns anything but so many clients that hold samples."""
    where = f"train.sampling: {type(selection).__name__}.choose"
    with as_user_error(f"{where} failed in round {known.round}"):
        found: Any = selection.choose(known)
    try:
        return _checked(found, known, selection.why)
    except ValueError as error:
        raise UserError(f"{where} of round {known.round}: {error}") from None


def _checked(found: Any, known: Known, column: str | None) -> Chosen:
    if not isinstance(found, Chosen):
        raise ValueError(f"it must return Chosen(ids), not {type(found).__name__}")
    ids = checked_ids(found.ids, known.ids)
    if len(ids) != known.count:
        raise ValueError(f"it chose {len(ids)} clients instead of {known.count}")
    if (found.why is None) != (column is None):
        raise ValueError("Chosen needs numbers `why` if the class names a column `why` for them, and none otherwise")
    if column is None:
        return Chosen(ids)
    why = np.asarray(found.why)
    if why.shape != ids.shape or why.dtype.kind not in "iuf":
        raise ValueError(
            f"`why` must be a number for each of the {len(ids)} clients, not {list(why.shape)} {why.dtype}"
        )
    return Chosen(ids, why.astype(np.float64))
