"""The tables and pictures of what was measured, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from common import QUIET

from fedray.results.style import save
from fedray.results.tables import markdown
from fedray.util.files import write_whole
from round_time.model import (
    COHORT,
    PROJECTED,
    TERMS,
    Check,
    Fit,
    Measured,
    amounts,
    checks,
    fit,
    interval,
    projected,
    resampled,
)
from round_time.pictures import figures
from round_time.points import WORKS, Point
from round_time.records import Row, on_cpus, point_of
from round_time.traffic import sent

NODES = (1, 3, 10, 30, 100)
"""The numbers of nodes in the table of the projection."""


def write(rows: Sequence[Row], folder: Path, node_processors: int | None, gbit: float) -> list[Path]:
    """Writes scaling.md and its pictures into ``folder``, and returns their paths.

    The projection is for nodes with ``node_processors`` processors, by default as many as were measured on, and a
    network of ``gbit`` Gb/s. With too few points for the model there are only the tables of what was measured.
    """
    measured = on_cpus(rows)
    parts = [_about(rows), "## Measured\n\n" + _measured_table(rows) + _key(rows)]
    fitted = fit(measured) if len(measured) > len(TERMS) else None
    if fitted is not None:
        bandwidth = gbit * 1e9 / 8
        processors = node_processors or measured[0].processors
        network = fitted.with_network(bandwidth)
        others = resampled(measured)
        parts += [_model_section(measured, fitted, others), _checks_section(rows, measured, fitted)]
        parts.append(_projection_section(network, [each.with_network(bandwidth) for each in others], processors, gbit))
        drawn = figures(rows, measured, fitted, network, processors)
    else:
        drawn = figures(rows, measured, None, None, 1)
    paths = [path for name, figure in drawn for path in save(figure, folder, name)]
    write_whole(folder / "scaling.md", "\n\n".join(parts) + "\n")
    return [folder / "scaling.md", *paths]


def _about(rows: Sequence[Row]) -> str:
    """Returns the heading, with a line for each machine and version of fedray that the rows are from."""
    seen = {
        f"* {row['machine']['cpu']}, {row['machine']['cores']} processors, {row['machine']['memory_gib']} GiB; "
        + ", ".join(f"{name} {version}" for name, version in row["versions"].items()): None
        for row in rows
    }
    shared = [row for row in rows if row["point"]["hosts"] > row["machines"]]
    note = (
        "\n\nThe hosts were containers on one machine and shared its processors, so that more hosts could not be "
        "faster: their points say what hosts cost in bytes and tasks, and nothing of speed-up."
        if shared
        else ""
    )
    return (
        "# How rounds grow\n\nFedAvg on made-up data, each point in a fresh process (`analysis/scaling.py`), on\n\n"
        + "\n".join(seen)
        + note
        + "\n\n![](time.png)\n\n![](resources.png)"
    )


def _measured_table(rows: Sequence[Row]) -> str:
    """Returns the table with a row for each point, of which the turns are put together as their median."""
    groups: dict[Point, list[Row]] = {}
    order = list(WORKS)
    for row in sorted(rows, key=lambda row: (order.index(row["point"]["model"]), *list(row["point"].values())[1:])):
        groups.setdefault(point_of({"point": row["point"] | {"turn": 0}}), []).append(row)
    return markdown(pd.DataFrame([_cells(point, turns) for point, turns in groups.items()]).fillna(""))


def _cells(point: Point, turns: Sequence[Row]) -> dict[str, str]:
    def median(name: str) -> float:
        return float(statistics.median(row[name] for row in turns))

    memory = {kind: max(row["memory"].get(kind, 0.0) for row in turns) for kind in turns[0]["memory"]}
    seconds = median("seconds")
    low, high = (statistics.median(row["quartiles"][end] for row in turns) for end in (0, 1))
    busy = any((row["foreign"] or 0) > QUIET for row in turns)
    several = point.hosts > 1
    return {
        "model": point.work.name + (" (GPU)" if point.device == "cuda" else ""),
        "cohort": f"{point.cohort:,}",
        "of": f"{point.clients:,}",
        "steps": str(point.steps),
        "actors": str(point.actors),
        "hosts": str(point.hosts),
        "rounds/s": f"{shown(1 / seconds)}" + (" *" if busy else ""),
        "a round, ms": f"{shown(1e3 * seconds)} ({shown(1e3 * low)} to {shown(1e3 * high)})",
        "tasks": f"{median('tasks'):.0f}",
        "sums, MB": shown(median("sum_bytes") / 1e6),
        "network in, out, MB": f"{shown(median('received') / 1e6)}, {shown(median('sent') / 1e6)}" if several else "",
        "algorithm, MB": shown((median("bytes_up") + median("bytes_down")) / 1e6),
        **{f"{kind}, MiB": f"{memory.get(kind, 0.0):,.0f}" for kind in ("driver", "server", "actor", "shared", "all")},
        **({"GPU, MiB": f"{memory['gpu']:,.0f}"} if "gpu" in memory else {}),
    }


def shown(value: float, digits: int = 3) -> str:
    """Returns a number with about ``digits`` digits, and without an exponent."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def _key(rows: Sequence[Row]) -> str:
    lines = [
        "a round: the median from the end of a round to the end of the next one, without the first two, and quartiles",
        "tasks, sums: what comes back to the server in a round, and the bytes of the clients' sums in it",
        "network: what the server's host receives and sends in a round",
        "algorithm: what all clients would receive and send in a round (`bytes_down`, `bytes_up`)",
        "driver, server, actor: the most memory that one such process had, with pages that it shares; shared: what "
        "Ray's object store holds in /dev/shm; all: all processes together, where shared pages count once, sampled "
        "every two seconds",
    ]
    if any((row["foreign"] or 0) > QUIET for row in rows):
        lines.append(f"\\*: other programs used more than {QUIET} of a processor")
    return "\n\n" + "\n".join(f"* {line}" for line in lines)


def _model_section(measured: Sequence[Measured], fitted: Fit, others: Sequence[Fit]) -> str:
    """Returns the section about the model of a round's time: its coefficients and its errors. ``others`` are models of
    resampled points, for intervals."""
    cells = []
    for term, seconds in fitted.seconds_of.items():
        low, high = interval(each.seconds_of[term] for each in others)
        shares = [fitted.parts(row.point, row.processors).get(term, 0.0) / row.seconds for row in measured]
        cells.append(
            {
                "term": term,
                "microseconds": f"{shown(1e6 * seconds)} ({shown(1e6 * low, 2)} to {shown(1e6 * high, 2)})",
                "largest share": f"{max(shares):.0%}",
                "what it stands for": TERMS.get(term, "a local step, times those that one processor makes in a row"),
            }
        )
    errors = [abs(fitted.seconds(row.point, row.processors) / row.seconds - 1) for row in measured]
    return (
        "## A model of a round's time\n\nThe time of a round on Ray is a sum of terms, each of which is a number that "
        "follows from the configuration times a fitted number of seconds. Least squares of logarithmic errors, no "
        "term below zero; in brackets the 95 % interval of resampled points. *Largest share* is the largest part of a "
        f"measured round that the term explains.\n\n{markdown(pd.DataFrame(cells))}\n\nOn the {len(measured)} points "
        f"that it is fitted to the model is wrong by {statistics.median(errors):.0%} in the median and by "
        f"{max(errors):.0%} at most.\n\n![](model.png)"
    )


def _checks_section(rows: Sequence[Row], measured: Sequence[Measured], fitted: Fit) -> str:
    """Returns the section about predictions of points that had no part in the fit, and about predicted traffic."""
    found = pd.DataFrame([*map(_check_cells, checks(measured)), *_traffic_cells(rows, fitted)])
    return (
        "## Checks\n\nIn the rows about seconds the named points were left out of the fit, and then predicted. What "
        "reaches the server is predicted from the configuration alone, for actors of equal speed.\n\n" + markdown(found)
    )


def _check_cells(check: Check) -> dict[str, str]:
    return _error_cells(f"seconds of a round: {check.name}", check.errors)


def _error_cells(name: str, errors: Sequence[float]) -> dict[str, str]:
    worst = max(errors, key=abs)
    return {
        "predicted": name,
        "points": str(len(errors)),
        "error, median": f"{statistics.median(map(abs, errors)):.0%}",
        "error, largest": f"{worst:+.0%}",
    }


def _traffic_cells(rows: Sequence[Row], fitted: Fit) -> Iterator[dict[str, str]]:
    """Yields rows about the predicted tasks, bytes of sums and bytes on the network."""
    known = fitted.known
    cpu = [(row, point_of(row)) for row in rows if row["point"]["device"] == "cpu"]
    arriving = {point: sent(point, known[point.model]) for _, point in cpu}
    tasks = [arriving[point].tasks / row["tasks"] - 1 for row, point in cpu]
    sums = [8 * row["parameters"] * arriving[point].nodes / row["sum_bytes"] - 1 for row, point in cpu]
    yield _error_cells("tasks of a round", tasks)
    yield _error_cells("bytes of sums", sums)
    network = [
        amounts(point, known[point.model], 1)["MB between hosts"] * 1e6 / (row["received"] + row["sent"]) - 1
        for row, point in cpu
        if point.hosts > 1
    ]
    if network:
        yield _error_cells("bytes on the network of the server's host, in and out", network)


def _projection_section(network: Fit, others: Sequence[Fit], processors: int, gbit: float) -> str:
    """Returns the section with the projection to more nodes, with ``network`` as the model on their network, and
    ``others`` as those of resampled points."""
    cells = []
    for model, steps in PROJECTED:
        if model not in network.known:
            continue
        row = {"model": Point(model).work.name, "local steps": str(steps)}
        for nodes in NODES:
            point, all_processors = projected(model, nodes, processors, steps=steps, **COHORT)
            parts = network.parts(point, all_processors)
            low, high = interval(each.seconds(point, all_processors) for each in others)
            row[f"{nodes} node{'s' if nodes > 1 else ''}"] = (
                f"{shown(sum(parts.values()))} ({shown(low, 2)} to {shown(high, 2)})"
            )
        row["most of it on 100 nodes"] = max(parts, key=lambda term: parts[term])
        cells.append(row)
    return (
        f"## 100 nodes\n\nSeconds of a round with {COHORT['cohort']:,} of {COHORT['clients']:,} clients, on nodes of "
        f"{processors} processors with an actor each, and {gbit:g} Gb/s into the server.\n\n"
        f"{markdown(pd.DataFrame(cells))}\n\n![](projection.png)\n\n"
        "This is arithmetic, no measurement. It assumes that nodes are as fast as this machine and equally fast, that "
        "a task, an actor and a MB of sums cost the server as much with a hundred hosts as with those that were "
        "measured, that the wire is as fast as its nominal speed, and that the terms add up, though the server adds up "
        "sums while clients train. It knows nothing of lost packets, slow nodes and failures. The intervals are those "
        "of resampled points; they say nothing of these assumptions."
    )
