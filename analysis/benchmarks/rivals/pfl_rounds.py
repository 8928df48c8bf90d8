"""pfl-research's rounds, for ``compare.py``: one process, or several under torchrun.

No evaluation, and no metrics printed. A user's samples are in random order, and as many as its steps take.
"""

import numpy as np
import torch
import torch.nn.functional as F
from gate import Gate, arguments, workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from problems import MODELS, drawn, load, shares
from torch import Tensor


class GateOfAll(Gate):
    """The first process asks and tells the others, which would run ahead otherwise."""

    def ask(self, seconds: float) -> int:
        wanted = torch.tensor(super().ask(seconds) if distributed.global_rank == 0 else 0)
        if distributed.world_size > 1:
            torch.distributed.broadcast(wanted, 0)
        return int(wanted)


class Waiting(TrainingProcessCallback):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        return self.gate(), Metrics()


def main() -> None:
    args = arguments()
    work, gate = workload(args.workload, args.clients), GateOfAll(args.address)
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002  pfl draws users from it, which must be the same in all processes
    torch.manual_seed(0)
    model = MODELS[work.model]()
    x, y = load(work.source)
    owned = shares(work)
    steps = 0

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return F.cross_entropy(model(inputs), labels)

    def user(client: int) -> PyTorchTensorDataset:
        samples = drawn(work, owned[client])
        return PyTorchTensorDataset((x[samples], y[samples]), user_id=client)

    model.loss, model.metrics = loss, lambda inputs, labels: {}
    users = FederatedDataset(user, get_user_sampler("minimize_reuse", range(work.clients)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1_000_000,
            # round i is evaluated if i % frequency == 0, which is true of round 0 for all numbers but this one
            evaluation_frequency=float("nan"),
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr
        ),
        callbacks=[Waiting(gate)],
        send_metrics_to_platform=False,
    )
    (total,) = distributed.all_reduce([torch.tensor([float(steps)])])
    if distributed.global_rank == 0:
        gate.leave(int(total), "pfl", "torch")


if __name__ == "__main__":
    main()
