"""The result of a run, read from its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the final metrics in a ``summary`` (the content of summary.json), by names in words, the one that says
    most about the run first. It is the main metric on the test set, of the global model. With private layers that of
    the clients' personal models comes before it."""
    metric, of_global = str(summary.get("metric")), summary.get("final")
    words = metric.replace("_", " ")
    found = {words: of_global}
    if "private_parameters" in summary:
        personal = summary.get(f"final_personalized_{metric}")
        found = {f"personal {words}": personal, f"{words} of the global model": of_global}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run that has ended, whether it was completed, diverged or was interrupted (``status``).

    ``folder`` is the run's folder, from which all results are read. ``module`` is a function without arguments that
    makes the model with its initial weights. The results are the properties ``status``, ``summary``, ``metrics``,
    ``clients``, ``evaluation`` and ``profile``. :meth:`model` returns the trained model.

    Example:
        best = result.metrics["test_accuracy"].max()
        logits = result.model()(images)
    """

    folder: Path
    module: Callable[[], nn.Module]

    def __repr__(self) -> str:
        found: dict[str, Any] = {}
        # a run that failed has no results, and the folder may be gone
        with contextlib.suppress(OSError, ValueError):
            found = self.summary
        parts = [repr(str(self.folder)), *([found["status"]] if "status" in found else [])]
        if found.get("rounds") is not None:
            parts[-1] += f" after {found['rounds']:,} round{'' if found['rounds'] == 1 else 's'}"
        parts += [f"{words} {value:.4g}" for words, value in final_metrics(found).items()][:1]
        return f"RunResult({', '.join(parts)})"

    def __fspath__(self) -> str:
        """The path of the folder, so that a result can be handed over in its place, as in ``fedray.compare(a, b)``."""
        return str(self.folder)

    @property
    def status(self) -> str:
        """How the run ended: ``completed``, ``diverged`` or ``interrupted``."""
        return str(self.summary["status"])

    @property
    def summary(self) -> dict[str, Any]:
        """The results of the run in a dict, such as ``final_accuracy`` and ``rounds``. It is the content
        of summary.json.

        ``final`` is about the global model. With private layers look at ``final_personalized_accuracy``, that of the
        clients' personal models. The glossary in ``fedray/tracking/README.md`` explains the keys.
        """
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    @property
    def metrics(self) -> pd.DataFrame:
        """A DataFrame with a row for each round, and columns such as ``round``, ``train_loss`` and ``test_accuracy``.

        It is the table metrics.csv. The glossary in ``fedray/tracking/README.md`` explains the columns.
        """
        from fedray.tracking.tables import read_metrics

        return read_metrics(self.folder)

    @property
    def clients(self) -> pd.DataFrame:
        """A DataFrame with a row for each round and each client that took part in it, sorted by round and client.

        It is the table clients.parquet, with columns such as ``round``, ``client``, ``samples`` and ``steps``. Runs
        with ``run.log_clients: false`` do not have it, and raise :class:`UserError`.
        """
        from fedray.tracking.tables import read_parts

        table = read_parts(self._table("clients.parquet", "run.log_clients=true makes it"))
        return table.sort_values(["round", "client"], ignore_index=True)

    @property
    def evaluation(self) -> pd.DataFrame:
        """A DataFrame with the scores of single clients: a row for each evaluated round and each client that is scored
        on its own test samples.

        It is the table evaluation.parquet, with the columns ``round``, ``client``, ``test_samples`` and a score for
        each model, such as ``personal_accuracy``. Raises :class:`UserError` if no clients were scored
        (``has_evaluation`` is false).
        """
        from fedray.tracking.tables import read_parts

        if not self.has_evaluation:
            raise UserError(f"{self.folder} has no scores of single clients: run.eval_clients=all asks for them")
        table = read_parts(self._evaluation)
        return table.sort_values(["round", "client"], ignore_index=True)

    @property
    def has_evaluation(self) -> bool:
        """Whether single clients were scored on their own test samples, so that there is a table :attr:`evaluation`.

        This needs personal models (an algorithm's model for each client), ``run.finetune_steps`` or
        ``run.eval_clients``. Runs with ``run.log_clients: false`` do not have the table.
        """
        return any(self._evaluation.glob("part-*.parquet"))

    @property
    def _evaluation(self) -> Path:
        return self.folder / "evaluation.parquet"

    @property
    def profile(self) -> pd.DataFrame:
        """A DataFrame that shows how the time was spent: a row for each round, and a column for each purpose, such as
        ``gradient``, with the seconds spent on it.

        It is the table profile.csv. Raises :class:`UserError` for a run without ``engine.profile``.
        """
        import pandas as pd

        return pd.read_csv(self._table("profile.csv", "engine.profile=true makes it"))

    def model(self) -> nn.Module:
        """Returns the final model of the run, a ``torch.nn.Module`` in evaluation mode.

        Raises :class:`UserError` if the file of the model is damaged.
        """
        return self._loaded("model.safetensors")

    def client_model(self, client: int) -> nn.Module:
        """Returns the personal model of a client at the end of the run, a ``torch.nn.Module`` in evaluation mode.

        Raises :class:`UserError` if it was not saved (``run.personal_models_of``), or if its file is damaged.
        """
        from fedray.tracking.folder import PERSONAL

        name = f"{PERSONAL}/client-{client}.safetensors"
        if not (self.folder / name).exists():
            saved = len([*(self.folder / PERSONAL).glob("client-*.safetensors")])
            raise UserError(
                f"{self.folder} has no personal model of client {client}, but of {saved} clients: "
                "run.personal_models_of names those that are saved, as a list of numbers or all"
            )
        return self._loaded(name)

    def _table(self, name: str, key: str) -> Path:
        if not (self.folder / name).exists():
            raise UserError(f"{self.folder} has no {name}: {key}")
        return self.folder / name

    def _loaded(self, name: str) -> nn.Module:
        from safetensors.torch import load_file

        from fedray.core.places import for_user
        from fedray.core.torch_state import neutral
        from fedray.tracking.records import check_file

        check_file(self.folder, name)
        with neutral():
            return for_user(self.module(), load_file(self.folder / name))
