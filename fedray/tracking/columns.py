"""Says what every number that a run records means, with its unit.

The writers of the files take the names and their order from here, and the glossary in the documentation is checked
against it. A name such as ``test_<metric>`` stands for all names of that form. Accuracies are fractions from 0 to 1.
"""

from __future__ import annotations

METRICS = {
    "round": "the number of the round, from 1",
    "iterations": "local steps so far: of each round, the most that a client of its cohort made",
    "cohort_size": "clients of the round's cohort",
    "train_loss": "mean over the cohort's clients of each one's mean task loss (without an algorithm's own terms) on "
    "the mini-batches of its local steps; of the clients that took a gradient, and empty if none did",
    "train_accuracy": "accuracy of the evaluated model on run.eval_train_samples training samples",
    "test_loss": "mean loss of the evaluated model on the whole test set",
    "test_accuracy": "accuracy of the evaluated model on the whole test set",
    "validation_accuracy": "accuracy of the evaluated model on the data.validation_samples that were held out of the "
    "training set",
    "personalized_accuracy": "mean over the cohort's clients, each counting the same, of the accuracy of the client's "
    "personal model on its own test share; of algorithms that have personal models",
    "representation_accuracy": "accuracy of the algorithm's representation model on the whole test set; of algorithms "
    "that train one",
    "bytes_down": "bytes that all clients have received from the server so far",
    "bytes_up": "bytes that all clients have sent to the server so far",
    "flops": "floating-point operations that the clients and the server have spent on training so far",
    "virtual_seconds": "seconds of a virtual clock; empty, because no such clock is implemented yet",
    "round_seconds": "seconds that this round took, without its evaluation and its checkpoint",
    "wall_seconds": "seconds of the run so far, including those before it was resumed",
}
"""The columns of every metrics.csv, in their order. A cell is empty where nothing was evaluated."""

FURTHER_METRICS = {
    "test_<metric>": "the evaluated model's metric on the whole test set: of the task (`f1`, `mean_squared_error`, "
    "`mean_absolute_error`, `perplexity`), or one that was given to simulate(metrics=...)",
    "validation_<metric>": "the task's main metric of the evaluated model on the validation samples, where that is not "
    "the accuracy",
    "train_<metric>": "the same on run.eval_train_samples training samples",
    "<what>_<metric>": "any column below or above whose name has `accuracy`, in a task with another main metric",
    "<model>_accuracy": "accuracy on the whole test set of a further model of the algorithm, such as `averaged` (the "
    "mean of the clients' models of FedDyn and AdaBest) or `server`",
    "global_on_shares_accuracy": "mean over the cohort's clients, each counting the same, of the accuracy of the "
    "evaluated model on the client's own test share",
    "<model>_on_shares_accuracy": "the same of a further model of the algorithm",
    "finetuned_accuracy": "the same of the evaluated model after run.finetune_steps plain local steps on the client",
    "cohort_with_shares": "clients of the cohort that have a test share; the means over the cohort are over these",
    "cohort_least_share": "test samples in the smallest of their test shares",
    "clients_accuracy_mean": "mean over the clients of run.eval_clients, each counting the same, of the accuracy of "
    "the evaluated model on the client's own test share",
    "clients_accuracy_worst_tenth": "the same mean over the worst tenth of these clients, rounded up",
    "clients_accuracy_std": "standard deviation of these clients' accuracies",
    "clients_with_shares": "clients of run.eval_clients that have a test share",
    "clients_least_share": "test samples in the smallest of their test shares",
    "drift": "mean over the cohort's clients, each counting the same, of the length of a local update",
    "spread": "the same mean of the distance of a client's model from the mean of the cohort's models",
    "alignment": "the same mean of the cosine of a local update and the cohort's mean update",
    "update_norm": "length of the round's change of the server's model x",
    "cohort_error": "length of the difference of the cohort's mean update and that of all clients, over the length of "
    "the latter; with run.diagnostics=all_clients",
    "momentum_error": "the same of the mean of the server's updates in the last tau rounds, of algorithms whose "
    "clients follow it (GHBM); from round tau + 1 on",
    "virtual_distance": "distance of the cohort's mean model from a virtual one, which makes the round's local steps "
    "on the mini-batches of all its clients together; with run.diagnostics=virtual",
}
"""The columns that a metrics.csv also has if the algorithm or the configuration asks for them."""

CLIENT_FACTS = {
    "round": "the number of the round, from 1",
    "client": "the number of the client, from 0",
    "client_name": "what the data call the client; only where they name clients",
    "samples": "training samples that the client holds",
    "steps": "local steps that the client made in the round",
}
"""The columns of every clients.parquet: which client it is, and what it trained on."""

CLIENT_SCORES = {
    "loss": "mean task loss of the client's mini-batches over its local steps",
    "accuracy": "accuracy on the client's mini-batches over its local steps; of tasks that have one",
    "mean_squared_error": "the same error on these mini-batches; of regressions",
    "score": "pFedMo: the client's score 1 - l / u, by which its momentum is weighted; 0 to 1",
    "drift": "length (Euclidean norm) of the client's local update: its model after its local steps minus the model "
    "that the server sent; with run.diagnostics, as the next two",
    "spread": "distance of its model from the mean of the cohort's models, by their aggregation weights",
    "alignment": "cosine of its update and the mean of the cohort's updates",
    "similarity": "FedSiam-DA: cosine similarity of the client's model and the mean model, at least 0",
}
"""Further columns of clients.parquet, which TensorBoard shows as histograms. An algorithm of the user's own may add
others."""

DIAGNOSTICS = ("drift", "spread", "alignment")
"""The columns of clients.parquet whose means over the cohort are in metrics.csv, with run.diagnostics."""

OF_THE_SERVER = ("update_norm", "cohort_error", "momentum_error", "virtual_distance")
"""The other columns of metrics.csv with run.diagnostics; the last three with all_clients or virtual alone."""

LAYERS = {
    "round": "the number of the round, from 1",
    "layer": "the name of a tensor of parameters, as in model.safetensors",
    "update_norm": "length (Euclidean norm) of its change in the round, in the server's model x",
    "norm": "its length after the round",
}
"""The columns of layers.parquet, with run.diagnostics."""

EVALUATION = {
    "round": "the number of the round after which the client was scored",
    "client": "the number of the client, from 0",
    "client_name": "what the data call the client; only where they name clients",
    "in_cohort": "whether the client was in the round's cohort, and the cohort is scored",
    "in_eval_clients": "whether the client is one of run.eval_clients",
    "test_samples": "samples of the client's own test share",
    "global_accuracy": "accuracy of the evaluated model on the client's own test share; NaN if the share is empty",
    "<model>_accuracy": "the same of a further model of the algorithm",
    "personal_accuracy": "the same of the client's personal model; of algorithms that have personal models",
    "<model>_<metric>": "any column here whose name has `accuracy`, in a task with another main metric",
    "finetuned_accuracy": "the same of the evaluated model after run.finetune_steps plain local steps on the client",
}
"""The columns of evaluation.parquet."""

SUMMARY = {
    "status": "completed, diverged (the loss or the model is not finite any more) or interrupted",
    "metric": "the task's main metric, by which models are compared",
    "mode": "max if more of it is better, min if less is",
    "final": "the main metric on the test set at the last evaluation; null if there was none, or it is not finite",
    "best": "the best of all evaluations",
    "last10": "the mean over the last ten evaluations",
    "last_rounds": "the mean over the evaluations of the last run.last_rounds rounds, with `from_round`, `to_round`, "
    "`evaluations` and `mean`; null unless that key is set",
    "final_accuracy": "test accuracy of the last evaluation; null if there was none, or it is not finite",
    "best_accuracy": "the highest test accuracy of all evaluations",
    "last10_accuracy": "mean test accuracy of the last ten evaluations",
    "rounds": "rounds that the run has made",
    "targets": "for each value of run.targets, the first round whose main metric reached it, with the `bytes` (down "
    "and up), `flops` and `seconds` (of the wall clock) up to its end; null if no round did",
    "parameters": "trainable parameters of the model",
    "model_sha256": "sha256 over the evaluated model's trainable parameters, then its buffers, as float32 bytes in the "
    "module's order",
    "partition_hash": "sha256 of which client holds which training samples",
    "class_names": "names of the classes, in the order of their numbers; only where the data name them",
    "stopped_by": "run.stop_at or run.patience if one of them has ended the run before run.rounds; null if not",
    "records": "digests (sha256) of the tables and models in the folder, by which damage is noticed",
    "versions": "versions of Python, fedray, torch, numpy and Ray",
    "machine": "`bits_promised`: whether the same configuration gives the same bits again; `nondeterministic`: "
    "operations for which it does not; `processes`: node, pid, device, instruction set and torch version of each "
    "computing process",
}
"""The keys of summary.json, in their order."""

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
"""The columns of profile.csv after ``round``: the seconds of a round that went into each; they add up to its time."""

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
    "round_seconds": "time/round_seconds",
    "wall_seconds": "time/wall_seconds",
}
"""The TensorBoard tags of columns of METRICS: each scalar is the column's number, its step the round."""

FURTHER_TAGS = {
    "metrics/<column>": "a column of another metric than the accuracy",
    "accuracy/<model>": "the column <model>_accuracy, also of names that end in _on_shares, and of finetuned",
    "clients/<column>": "the columns of metrics.csv that begin with clients_ or cohort_",
    "clients/<score>": "histogram over the cohort's clients of a score of clients.parquet, in evaluated rounds",
    "diagnostics/<column>": "drift, spread, alignment, update_norm, cohort_error, momentum_error and virtual_distance "
    "of metrics.csv",
    "profile/<purpose>": "a column of profile.csv, in seconds",
    "final/final_<metric>": "the `final` of summary.json; of the HParams table",
    "final/best_<metric>": "the `best` of summary.json; of the HParams table",
}
"""All other tags."""


def tag(column: str) -> str:
    """Returns the TensorBoard tag of a column of metrics.csv."""
    # a column that begins with test_ and is not in TAGS can only be a user's metric
    if column in TAGS or column.startswith("test_"):
        return TAGS.get(column, f"metrics/{column}")
    if column in (*DIAGNOSTICS, *OF_THE_SERVER):
        return f"diagnostics/{column}"
    if column.startswith(("clients_", "cohort_")):
        return f"clients/{column}"
    return f"accuracy/{column.removesuffix('_accuracy')}" if column.endswith("_accuracy") else f"metrics/{column}"
