"""The representations of samples in a model, and a picture of them in two dimensions (t-SNE)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray

from fedray.core.samples import Samples
from fedray.core.seeds import SERVER, Purpose, stream
from fedray.core.structure import leaves
from fedray.engine.clients import Clients
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.errors import UserError
from fedray.results.style import BESIDE, escaped, figure_of, save_png
from fedray.util.files import replacement_of

MOST_CLASSES = 20
"""The largest number of classes that the picture shows in different colours and markers."""

LEAST = 10
"""The smallest number of samples for which a picture is drawn."""


@dataclass(frozen=True)
class Features:
    """The representations of n samples, which are the inputs of the model's last Linear layer.

    ``values`` float32 [n, d] has the representations, and ``samples`` int64 [n] the position of each sample in the
    split that was evaluated, such as the test set. ``targets`` int64 [n] are the samples' classes, or None if they have
    none.
    """

    samples: NDArray[np.int64]
    values: NDArray[np.float32]
    targets: NDArray[np.int64] | None

    def write(self, path: Path) -> Path:
        """Writes the representations to the NumPy file ``path`` (npz), and returns ``path``.

        The file has the arrays ``samples`` [n], ``features`` [n, d], which are the representations, and, if there are
        classes, ``targets`` [n].
        """
        arrays: dict[str, Any] = {"samples": self.samples, "features": self.values}
        arrays |= {} if self.targets is None else {"targets": self.targets}
        with replacement_of(path) as staging, staging.open("wb") as file:
            np.savez(file, **arrays)
        return path


@torch.no_grad()
def features_of(clients: Clients, samples: Samples, indices: NDArray[np.int64], number: int) -> Features:
    """Draws samples by ``run.seed``, runs a model over them, and returns their representations, which are the inputs of
    the model's last Linear layer.

    ``clients`` holds the model. ``number`` samples are drawn from ``indices``, which are indices into ``samples``; all
    are taken if there are fewer. Raises :class:`UserError` if the model has no Linear layer, or its representation is
    not a vector for each sample.
    """
    rng = stream(clients.experiment.training.seed, Purpose.EVALUATION)
    places = np.sort(rng.permutation(len(indices))[:number])
    evaluator, network = Evaluator(clients), clients.network
    network.mode(training=False)
    values, targets = [], []
    with evaluator.draws(0, SERVER, 0):
        for start in range(0, len(places), evaluator.size):
            x, y = samples.gather(indices[places[start : start + evaluator.size]])
            z = network.outputs(x).features
            if z is None or z.dim() != 2 or len(z) != len(leaves(y)[0]):
                raise UserError("--features: the model has no Linear layer whose input is a vector for each sample")
            values.append(z.cpu().numpy())
            targets.append(y.cpu().numpy())
    has_classes = clients.experiment.task.kind == "classification"
    return Features(places, np.concatenate(values), np.concatenate(targets) if has_classes else None)


def write_tsne(found: Features, names: tuple[str, ...] | None, path: Path) -> Path | None:
    """Draws the representations of samples in two dimensions by t-SNE, with a colour and a marker for each class.

    The picture is written to ``path``, which is returned. ``names`` are the names of the classes, or None if they have
    none. Returns None, and draws nothing, if scikit-learn (the extra ``tsne``) is not installed, or if there are fewer
    than :data:`LEAST` samples.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None
    if len(found.values) < LEAST:
        return None
    perplexity = min(30.0, (len(found.values) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(found.values)
    figure, (axes,) = figure_of(1, panel=(6.4, 5))
    classes = [] if found.targets is None else np.unique(found.targets).tolist()
    if 1 < len(classes) <= MOST_CLASSES:
        colours = colormaps["tab10" if len(classes) <= 10 else "tab20"]
        for place, number in enumerate(classes):
            own = points[found.targets == number]
            marker, label = "osD^v<>PX*"[place % 10], names[number] if names else str(number)
            axes.scatter(
                own[:, 0], own[:, 1], s=14, color=colours(place), marker=marker, label=escaped(label), linewidths=0
            )
        axes.legend(**BESIDE, title="class")
    else:
        axes.scatter(points[:, 0], points[:, 1], s=14, c=found.targets, cmap="viridis", linewidths=0)
    axes.set(xticks=[], yticks=[], title=f"t-SNE of the representations of {len(points):,} samples")
    return save_png(figure, path)
