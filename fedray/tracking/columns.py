"""The names of everything that a run records, in the order of its files. The glossary in README.md explains them."""

from __future__ import annotations

METRICS = (
    "round", "iterations", "cohort_size", "train_loss", "train_accuracy", "test_loss", "test_accuracy",
    "validation_accuracy", "personalized_accuracy", "representation_accuracy", "bytes_down", "bytes_up", "flops",
    "virtual_seconds", "round_seconds", "wall_seconds",
)  # fmt: skip
"""The columns of every metrics.csv. The algorithm and the configuration may add others after them."""

CLIENT_FACTS = ("round", "client", "client_name", "samples", "steps", "outcome")
"""The columns of clients.parquet that identify the client, and say what it trained on. TensorBoard shows all others."""

DIAGNOSTICS = ("drift", "spread", "alignment")
"""With run.diagnostics, the columns of clients.parquet whose means over the cohort are in metrics.csv."""

SERVER_DIAGNOSTICS = ("update_norm", "cohort_error", "momentum_error", "virtual_distance")
"""The other columns that run.diagnostics adds to metrics.csv. The last three need ``all_clients`` or ``virtual``."""

PURPOSES = {
    "data": "batches gathered and normalised",
    "gradient": "forward and backward passes",
    "algorithm": "the algorithm's arithmetic and the sums over clients",
    "compilation": "gradients compiled, which each process does once (engine.compile)",
    "transport": "broadcasts and clients' states, read and written",
    "evaluation": "losses and metrics of evaluated models",
    "waiting": "actors without work: Ray's own time, the first task and the last of a phase",
    "server": "the server's rule, broadcasts and records, while actors have nothing to do",
    "checkpoint": "checkpoints",
}
"""The columns of profile.csv after ``round``: the seconds that a round spent on each purpose. They add up to its
time."""

TAGS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/test",
    "validation_accuracy": "accuracy/validation",
    "personalized_accuracy": "accuracy/personalized",
    "representation_accuracy": "accuracy/representation",
    "bytes_down": "cost/bytes_down",
    "bytes_up": "cost/bytes_up",
    "flops": "cost/flops",
    "virtual_seconds": "time/virtual_seconds",
    "joules": "cost/joules",
    "clip_norm": "privacy/clip_norm",
    "epsilon": "privacy/epsilon",
    "round_seconds": "time/round_seconds",
    "wall_seconds": "time/wall_seconds",
}
"""The TensorBoard tags of columns of metrics.csv. A scalar's value is the number in the column, and its step is the
round."""


def tag(column: str) -> str:
    """Returns the TensorBoard tag under which a column of metrics.csv is shown: ``loss/test`` for ``test_loss``."""
    # a column that begins with test_ and is not in TAGS can only be a user's metric
    if column in TAGS or column.startswith("test_"):
        return TAGS.get(column, f"metrics/{column}")
    if column in (*DIAGNOSTICS, *SERVER_DIAGNOSTICS):
        return f"diagnostics/{column}"
    if column.startswith(("clients_", "cohort_")):
        return f"clients/{column}"
    return f"accuracy/{column.removesuffix('_accuracy')}" if column.endswith("_accuracy") else f"metrics/{column}"
