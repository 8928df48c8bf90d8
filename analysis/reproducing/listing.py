"""Lists what can be repeated, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reproducing.costs import Costs, TableCost
from reproducing.published import known_tables, read_table
from reproducing.request import Request


def listing(requests: Sequence[Request], output: Path) -> tuple[list[tuple[str, str, TableCost]], float | None]:
    """Returns the name and title of each table that is asked for, and what its runs take that have not ended.

    ``output`` is the folder of all requests. Raises :class:`UserError` if there is no such table or column. The second
    value says how many times as long as expected the runs took that have ended in ``output`` (:class:`Costs`).
    """
    asked = [(request, request.table()) for request in requests]
    known = [read_table(name) for name in known_tables()]
    costs = Costs(output / "runs", [(cell, table.seeds) for table in known for cell in table.cells])
    found = [
        (table.name, table.title, costs.of(table.cells, request.seeds_of(table), request.runs, request.rounds))
        for request, table in asked
    ]
    return found, costs.slowness
