"""Flower's rounds, for ``compare.py``: its simulation on Ray, with 2 client actors of 1 CPU.

Clients are as fast as they get with Flower's own interface: data and model are made once per actor, and batches are cut
from tensors without a DataLoader.
"""

from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from gate import Gate, arguments, workload
from problems import MODELS, drawn, load, shares
from torch import Tensor, nn
from workloads import Workload

client_app = ClientApp()


@cache
def actor(name: str, clients: int) -> tuple[Workload, Tensor, Tensor, Tensor, nn.Module]:
    """What an actor keeps from client to client."""
    torch.set_num_threads(1)
    work = workload(name, clients)
    x, y = load(work.source)
    return work, x, y, shares(work), MODELS[work.model]()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    settings = message.content["settings"]
    work, x, y, owned, model = actor(settings["workload"], settings["clients"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    samples = drawn(work, owned[context.node_config["partition-id"]])
    steps = 0
    for inputs, labels in zip(x[samples].split(work.batch), y[samples].split(work.batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(samples), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class GatedFedAvg(FedAvg):
    """FedAvg that waits at the gate before each round but the first."""

    def __init__(self, work: Workload, gate: Gate) -> None:
        super().__init__(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
            configrecord_key="settings",
        )
        self.gate, self.steps = gate, 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round > 1 and self.gate():
            self.gate.leave(self.steps, "flwr", "ray", "torch")
            raise SystemExit  # of the server's thread: the simulation ends when it does
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.steps += sum(reply.content["metrics"]["steps"] for reply in replies if not reply.has_error())
        return super().aggregate_train(server_round, replies)


def main() -> None:
    args = arguments()
    work, gate = workload(args.workload, args.clients), Gate(args.address)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        GatedFedAvg(work, gate).start(
            grid,
            ArrayRecord(MODELS[work.model]().state_dict()),
            num_rounds=1_000_000,
            train_config=ConfigRecord({"workload": args.workload, "clients": args.clients}),
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.clients,
        backend_config={"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # once more as a module: the actors import what they run, and could not from a script
    import flower_rounds

    flower_rounds.main()
