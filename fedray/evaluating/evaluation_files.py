"""Shows an evaluation as lines, and writes it to files: tables, and a picture of the confusion matrix."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from fedray.config import plain
from fedray.errors import UserError
from fedray.evaluating.features import write_tsne
from fedray.evaluating.tables import Evaluation
from fedray.results.output_folder import Output
from fedray.results.style import figure_of, save_png
from fedray.tracking.progress import number_text
from fedray.util.files import write_whole

MARK = "evaluation.json"
"""The file that marks a folder as the output of an evaluation."""

SHOWN = 30
"""The largest number of classes that the terminal shows. If there are more, it shows the worst ones."""

WORST = 10

MATRIX = 1000
"""The largest number of classes in a confusion matrix. If there are more, the pairs that occur are listed and not
drawn."""

NAMED, NUMBERED = 100, 12
"""The largest numbers of classes for which the picture shows names beside the matrix, and shares in its fields."""

LONGEST = 16
"""The number of characters after which a name in the picture is cut off."""


def lines(found: Evaluation) -> Iterator[str]:
    """Yields the lines about an evaluation that ``fedray evaluate`` prints: the metrics, the classes and
    the clients."""
    yield "  ".join(f"{name.replace('_', ' ')} {number_text(value)}" for name, value in found.metrics.items())
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
    tenth = np.sort(kept if found.mode == "max" else -kept)[: -(-len(kept) // 10)].mean()
    worst = number_text(tenth if found.mode == "max" else 0.0 - tenth)
    return (
        f"{len(kept):,} clients: mean {found.main.replace('_', ' ')} {number_text(kept.mean())}, that of the worst "
        f"tenth {worst}, standard deviation {number_text(kept.std())}"
    )


def output_of(found: Evaluation) -> Output:
    """Returns a description of an evaluation's output folder. With it, a folder that holds an older result of the same
    evaluation is recognised, and no other folder is overwritten.

    Two evaluations are the same if they have the same model, data, split and settings.
    """
    identity = {
        "model_sha256": found.model_sha256,
        "source": found.source,
        "split": found.split,
        "settings": dict(found.settings),
    }
    return Output("evaluation", MARK, identity)


def default_folder(found: Evaluation, beside: Path) -> Path:
    """Returns the folder for the files of an evaluation if the user names none, such as ``mnist-test`` in ``beside``.

    The folder does not exist yet, or holds an older result of the same evaluation. If another evaluation has taken the
    name, a number is added to it.
    """
    return output_of(found).folder_for(beside / plain(f"{found.source}-{found.split}"))


def write(found: Evaluation, folder: Path) -> list[Path]:
    """Writes an evaluation into ``folder``, and returns the paths of the files.

    These are evaluation.json and, as far as the evaluation has such results, tables (classes.csv, clients.csv,
    confusion.csv), the representations (features.npz) and pictures. Raises :class:`UserError` if the folder can't be
    written to, or holds anything but an older result of the same evaluation.
    """
    output_of(found).check(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("classes.csv", "clients.csv", "confusion.csv", "confusion.png", "features.npz", "tsne.png"):
            (folder / name).unlink(missing_ok=True)
        return list(_write_files(found, folder))
    except OSError as error:
        raise UserError(f"can't write {folder}: {error.strerror or error}") from None


def _write_files(found: Evaluation, folder: Path) -> Iterator[Path]:
    facts = {
        "model": str(found.file),
        "model_sha256": found.model_sha256,
        "source": found.source,
        "split": found.split,
        "samples": found.samples,
        "metric": found.main,
        "metrics": {name: value if math.isfinite(value) else None for name, value in found.metrics.items()},
        "settings": dict(found.settings),
        "features": 0 if found.features is None else len(found.features.values),
    }
    texts = {MARK: json.dumps(facts, indent=2) + "\n"}
    for name, table in {"classes.csv": found.classes, "clients.csv": found.clients}.items():
        texts |= {} if table is None else {name: table.to_csv(index=False)}
    draws = found.classes is not None and len(found.classes) <= MATRIX
    if found.confusion is not None:
        table = found.confusion_matrix() if draws else found.confusion
        texts["confusion.csv"] = table.to_csv(index=draws)
    for name, text in texts.items():
        write_whole(folder / name, text)
        yield folder / name
    if draws:
        yield _draw_confusion(found, folder / "confusion.png")
    if found.features is not None:
        yield found.features.write(folder / "features.npz")
        names = None if found.classes is None else tuple(map(str, found.classes["name"]))
        if picture := write_tsne(found.features, names, folder / "tsne.png"):
            yield picture


def _draw_confusion(found: Evaluation, path: Path) -> Path:
    """Draws the confusion matrix into the file ``path``.

    A row shows, for the samples of one class, the shares of the predicted classes.
    """
    matrix = found.confusion_matrix()
    counts = matrix.to_numpy()
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = min(11.0, max(4.5, 2.5 + 0.32 * classes))
    figure, (axes,) = figure_of(1, panel=(size + 1, size))
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
            text, color = f"{100 * share:.0f}" if share >= 0.005 else "<1", "white" if share > 0.5 else "black"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the class's samples", format=PercentFormatter(1, 0), shrink=0.8)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def _short(name: str) -> str:
    """Returns a class's name as the picture shows it: cut off if it is long, visible, and not read by matplotlib
    as mathematics."""
    name = name if name.strip() else repr(name)
    return (name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…").replace("$", r"\$")
