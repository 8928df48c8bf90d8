"""Shows an evaluation as lines, and writes it as files: tables, and a picture of the confusion matrix."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedray.config import plain
from fedray.errors import UserError
from fedray.evaluating.features import write_tsne
from fedray.evaluating.tables import Evaluation
from fedray.tracking.progress import figure as figure_of
from fedray.util.files import replacement_of, write_whole

MARK = "evaluation.json"
"""The file by which a folder of an evaluation is known."""

SHOWN = 30
"""The most classes that are shown on the terminal. Of more, the worst are shown."""

WORST = 10

MATRIX = 1000
"""The most classes of a confusion matrix. With more, the pairs that occur are listed instead, and not drawn."""

NAMED, NUMBERED = 100, 12
"""The most classes whose names stand beside the picture, and whose shares stand in its fields."""

LONGEST = 16
"""The number of characters after which a name in the picture is cut off."""


def lines(found: Evaluation) -> Iterator[str]:
    """Yields lines about an evaluation."""
    yield "  ".join(f"{name.replace('_', ' ')} {figure_of(value)}" for name, value in found.metrics.items())
    if found.classes is not None:
        yield from _lines_about_classes(found.classes)
    if found.clients is not None:
        yield _line_about_clients(found)


def _lines_about_classes(classes: pd.DataFrame) -> Iterator[str]:
    shown = classes
    if len(classes) > SHOWN:
        shown = classes[classes["samples"] > 0].nsmallest(WORST, "accuracy")
        yield f"the {len(shown)} worst of {len(classes):,} classes:"
    columns = ["name", "samples", "predicted", "accuracy", "precision", "f1"]
    formats = dict.fromkeys(columns[3:], "{:.3f}".format)
    shown = shown.assign(name=[name if name.strip() else repr(name) for name in shown["name"]])
    text = shown[columns].rename(columns={"name": "class"}).to_string(index=False, formatters=formats, na_rep="-")
    yield from text.splitlines()


def _line_about_clients(found: Evaluation) -> str:
    assert found.clients is not None
    values = found.clients[found.main].to_numpy()
    kept = values[~np.isnan(values)]
    if not len(kept):
        return "clients: none has samples"
    tenth = np.sort(kept if found.mode == "max" else -kept)[: -(-len(kept) // 10)]
    worst = abs(tenth.mean()) if found.mode == "min" else tenth.mean()
    return (
        f"{len(kept):,} clients: mean {found.main.replace('_', ' ')} {figure_of(kept.mean())}, that of the worst tenth "
        f"{figure_of(worst)}, standard deviation {figure_of(kept.std())}"
    )


def place_of(found: Evaluation) -> Path:
    """Returns a folder beside the model in which there is nothing yet, or an older result of the same evaluation."""
    for number in itertools.count(1):
        name = plain(f"{found.source}-{found.split}") + (f"-{number}" if number > 1 else "")
        if not (found.folder / name).exists() or _holds(found.folder / name, found):
            return found.folder / name
    raise AssertionError


def _holds(folder: Path, found: Evaluation) -> bool:
    """Returns whether there is a result in ``folder`` of the same model, data and settings."""
    try:
        there = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return False
    facts = json.loads(json.dumps(_facts(found)))
    return all(there.get(key) == facts[key] for key in ("model_sha256", "source", "split", "settings"))


def write(found: Evaluation, folder: Path) -> list[Path]:
    """Writes an evaluation into ``folder``, and returns the paths of the files.

    Raises :class:`UserError` if the folder can't be written to, or holds something else than this evaluation.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not _holds(folder, found):
        raise UserError(f"{folder} holds something else than this evaluation: name another folder by --output")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("classes.csv", "clients.csv", "confusion.csv", "confusion.png", "features.npz", "tsne.png"):
            (folder / name).unlink(missing_ok=True)
        written.append(folder / MARK)
        write_whole(written[0], json.dumps(_facts(found), indent=2) + "\n")
        tables = {"classes.csv": found.classes, "clients.csv": found.clients}
        for name, table in tables.items():
            if table is not None:
                written.append(_csv(table, folder / name, index=False))
        if found.confusion is not None and found.classes is not None:
            small = len(found.classes) <= MATRIX
            table = found.confusion_matrix() if small else found.confusion
            written.append(_csv(table, folder / "confusion.csv", index=small))
            if small:
                written.append(_picture(found, folder / "confusion.png"))
        if found.features is not None:
            written.append(found.features.write(folder / "features.npz"))
            names = None if found.classes is None else tuple(map(str, found.classes["name"]))
            if picture := write_tsne(found.features, names, folder / "tsne.png"):
                written.append(picture)
    except OSError as error:
        raise UserError(f"can't write {folder}: {error.strerror or error}") from None
    return written


def _facts(found: Evaluation) -> dict[str, Any]:
    numbers = {name: value if math.isfinite(value) else None for name, value in found.metrics.items()}
    return {
        "model": str(found.file),
        "model_sha256": found.model_sha256,
        "source": found.source,
        "split": found.split,
        "samples": found.samples,
        "metric": found.main,
        "metrics": numbers,
        "settings": dict(found.settings),
        "features": 0 if found.features is None else len(found.features.values),
    }


def _csv(table: pd.DataFrame, path: Path, index: bool) -> Path:
    with replacement_of(path) as staging:
        table.to_csv(staging, index=index)
    return path


def _picture(found: Evaluation, path: Path) -> Path:
    """Draws the confusion matrix: in each row the shares of the classes for which samples of one class are taken."""
    matrix = found.confusion_matrix()
    counts = matrix.to_numpy()
    classes, totals = len(counts), counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    size = min(11.0, max(4.5, 2.5 + 0.32 * classes))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    # not through pyplot, which needs a display and has global state
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="predicted class", ylabel="class of the target")
    if classes <= NAMED:
        names = [_short(str(name)) for name in matrix.index]
        small = 9 if classes <= SHOWN else 5.5
        axes.set_xticks(range(classes), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=small)
        axes.set_yticks(range(classes), names, fontsize=small)
    if classes <= NUMBERED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            share = shares[row, column]
            text = f"{100 * share:.0f}" if share >= 0.005 else "<1"
            axes.text(
                column, row, text, ha="center", va="center", color="white" if share > 0.5 else "black", fontsize=8
            )
    figure.colorbar(image, ax=axes, label="share of the class's samples", format=PercentFormatter(1, 0), shrink=0.8)
    with replacement_of(path) as staging:
        figure.savefig(staging, dpi=150, format="png", bbox_inches="tight", pad_inches=0.15)
    return path


def _short(name: str) -> str:
    """Returns a name that is short enough and visible, and in which matplotlib finds no mathematics."""
    name = name if name.strip() else repr(name)
    return (name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…").replace("$", r"\$")
