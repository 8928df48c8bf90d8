"""pfl-research's private rounds, for ``analysis/private_cifar10.py``: writes the accuracy of some rounds to a file.

python pfl_private.py SETTINGS.json OUTPUT.csv
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism, PLDPrivacyAccountant

sys.path.insert(0, str(Path(__file__).parents[1]))
from problems import MODELS, drawn, load, shares
from workloads import WORKLOADS

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
EVERY = SETTINGS["every"]


class Evaluating(TrainingProcessCallback):
    def __init__(self, network: torch.nn.Module) -> None:
        self.network, (self.x, self.y) = network, load("cifar10", train=False)

    @torch.no_grad()
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if (central_iteration + 1) % EVERY == 0 or central_iteration + 1 == SETTINGS["rounds"]:
            right = sum(int((self.network(x).argmax(1) == y).sum()) for x, y in self._batches())
            with Path(sys.argv[2]).open("a") as file:
                file.write(f"{central_iteration + 1},{right / len(self.y)}\n")
        return False, Metrics()

    def _batches(self):
        return zip(self.x.split(1000), self.y.split(1000), strict=True)


def mechanism() -> CentrallyAppliedPrivacyMechanism:
    accountant = PLDPrivacyAccountant(
        num_compositions=SETTINGS["rounds"],
        sampling_probability=SETTINGS["cohort"] / SETTINGS["clients"],
        mechanism="gaussian",
        epsilon=SETTINGS["epsilon"],
        delta=SETTINGS["delta"],
        noise_scale=WORKLOADS["D"].cohort / SETTINGS["cohort"],
    )
    print(f"noise z={accountant.noise_parameter:.4f}", flush=True)
    return CentrallyAppliedPrivacyMechanism(GaussianMechanism.from_privacy_accountant(accountant, SETTINGS["clip"]))


def main() -> None:
    work, seed = WORKLOADS["D"], SETTINGS["seed"]
    torch.set_num_threads(1)
    np.random.seed(seed)  # noqa: NPY002  pfl draws users and noise from it
    torch.manual_seed(seed)
    network = MODELS[work.model]()
    x, y = load(work.source)
    owned = shares(work)

    def user(client: int) -> PyTorchTensorDataset:
        samples = drawn(work, owned[client])
        return PyTorchTensorDataset((x[samples], y[samples]), user_id=client)

    network.loss = lambda inputs, labels: F.cross_entropy(network(inputs), labels)
    network.metrics = lambda inputs, labels: {}
    users = FederatedDataset(user, get_user_sampler("random", range(work.clients)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=SETTINGS["rounds"],
            evaluation_frequency=float("nan"),
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser(), mechanism()]),
        model=PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr
        ),
        callbacks=[Evaluating(network)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
