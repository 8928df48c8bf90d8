"""The objects that a user hands over from Python instead of naming them in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fedray.config import Given
from fedray.core.copying import Portable
from fedray.core.transform import SeededTransform
from fedray.data.sources.source import Source

if TYPE_CHECKING:
    from fedray.algorithms import Algorithm
    from fedray.core.task import Loss
    from fedray.core.transform import Transform
    from fedray.core.upload import UploadStep
    from fedray.robust import Attack, Rule
    from fedray.selection import Selection
    from fedray.usercode.extensions import Entry


@dataclass(frozen=True)
class CustomObjects:
    """The objects that a user hands to :func:`fedray.simulate` or :func:`fedray.tuning.tune`, instead of naming them in
    the configuration. An object that is None or empty was not handed over.

    ``source`` has the data. With ``preloaded`` it is not the user's, but the source that the configuration names, read
    once for several runs. ``model`` is a module, or a class or function that makes one. ``loss`` and the ``metrics``,
    by name, are functions of the model's outputs and the targets. ``transform`` is a function that changes the inputs
    of a mini-batch, and ``algorithm`` a class. ``upload`` has the steps of uploads, of which some may be named as in
    the configuration. ``sampling`` is a selection, ``aggregation`` a rule and ``attack`` an attack; these may be
    classes, too. ``callbacks`` are functions and objects that follow all runs of a sweep.
    """

    source: Source | None = None
    model: Callable[..., nn.Module] | nn.Module | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    transform: Transform | None = None
    algorithm: type[Algorithm] | None = None
    upload: Sequence[Entry | UploadStep | type[UploadStep]] | None = None
    sampling: Selection | type[Selection] | None = None
    aggregation: Rule | type[Rule] | None = None
    attack: Attack | type[Attack] | None = None
    preloaded: bool = False
    callbacks: Sequence[Any] = ()

    def __getstate__(self) -> dict[str, Any]:
        model = Portable(self.model) if isinstance(self.model, nn.Module) else self.model
        kinds = [each if isinstance(each, type) else type(each) for each in (self.algorithm, self.sampling)]
        return {**vars(self), "model": model, "permissions": [(kind, _permissions_of(kind)) for kind in kinds]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["model"]
        # cloudpickle leaves out what a class says again although it inherits it, and a permission is not inherited
        for kind, permissions in state.pop("permissions"):
            for name, value in permissions.items():
                setattr(kind, name, value)
        self.__dict__.update(state, model=model.module if isinstance(model, Portable) else model)

    @property
    def names(self) -> list[Given]:
        """The names of the objects that the user passed, such as ``data`` and ``model``. A run records them as
        ``run.given``, because its configuration without these objects would describe another run."""
        there: dict[Given, bool] = {
            "data": self.source is not None and not self.preloaded,
            "model": self.model is not None,
            "loss": self.loss is not None,
            "metrics": bool(self.metrics),
            "transform": self.transform is not None,
            "algorithm": self.algorithm is not None,
            "upload": self.upload is not None,
            "sampling": self.sampling is not None,
            "aggregation": self.aggregation is not None,
            "attack": self.attack is not None,
        }
        return [name for name, is_there in there.items() if is_there]

    @property
    def code(self) -> list[Any]:
        """The objects whose code every process needs that makes runs with them, apart from the data."""
        changes = () if self.transform is None else SeededTransform(self.transform).code
        passed = (self.model, self.loss, self.algorithm, self.sampling, self.aggregation, self.attack)
        others = (*(self.upload or ()), *changes, *self.metrics.values(), *self.callbacks)
        return [thing for thing in (*passed, *others) if thing is not None]

    def notes(self, seeds: int) -> list[str]:
        """Returns warnings for the user, as lines, about using these objects in runs with ``seeds`` different seeds.

        There is one warning if the model is a module, which has the same initial weights in all of the runs.
        """
        if seeds == 1 or not isinstance(self.model, nn.Module):
            return []
        return [
            f"warning: model= is a module, so all {seeds} seeds start from the same initial weights; to draw them from "
            "each seed, give its class or a function that makes one"
        ]


def _permissions_of(kind: type) -> dict[str, bool]:
    """Returns what a class says itself that its instances are allowed (:mod:`fedray.experiment.permissions`)."""
    return {name: value for name, value in vars(kind).items() if isinstance(value, bool)}
