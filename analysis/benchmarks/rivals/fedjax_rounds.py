"""FedJAX's Mime, for ``analysis/examples/fedjax_mime.py``: makes the rounds that a file describes.

python fedjax_rounds.py GIVEN.npz RESULT.npz
"""

from __future__ import annotations

import sys

import fedjax
import jax
import jax.numpy as jnp
import numpy as np


def logits(parameters, x):
    """The example's CNN, with the names and shapes of its parameters."""
    for name in ("conv1", "conv2"):
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        x = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = jax.nn.relu(x + bias[:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ parameters["fc1.weight"].T + parameters["fc1.bias"])
    return x @ parameters["fc2.weight"].T + parameters["fc2.bias"]


def losses(parameters, batch, rng):
    likelihoods = jax.nn.log_softmax(logits(parameters, batch["x"]))
    return -jnp.take_along_axis(likelihoods, batch["y"][:, None], axis=1)[:, 0]


class Client(fedjax.ClientDataset):
    """A client's samples, in another order in each round. With ``full`` all of them are one batch."""

    def __init__(self, samples, seeds, full):
        super().__init__(samples)
        self.seeds, self.full = seeds, full

    def shuffle_repeat_batch(self, hparams):
        changed = {"batch_size": len(self)} if self.full else {}
        return super().shuffle_repeat_batch(hparams.replace(seed=self.seeds.randint(2**31), **changed))


def main(given, result):
    data = np.load(given)
    start = {name.split()[1]: jnp.asarray(data[name]) for name in data.files if name.startswith("parameter ")}
    clients = {i: {"x": data[f"x {i}"], "y": data[f"y {i}"]} for i in range(int(data["clients"]))}
    largest = max(len(each["y"]) for each in clients.values())
    seeds, steps = np.random.RandomState(int(data["seed"])), int(data["steps"]) if data["full"] else None
    sets = {i: Client(each, seeds, bool(data["full"])) for i, each in clients.items()}
    algorithm = fedjax.algorithms.mime.mime(
        losses,
        fedjax.optimizers.sgd(float(data["lr"]), momentum=float(data["beta"])),
        fedjax.ShuffleRepeatBatchHParams(int(data["batch_size"]), num_epochs=None if steps else 1, num_steps=steps),
        fedjax.PaddedBatchHParams(batch_size=largest),
        server_learning_rate=1.0,
    )
    state, accuracies, models = algorithm.init(start), [], []
    predictions = jax.jit(lambda parameters: logits(parameters, data["x_test"]).argmax(1))
    for number, cohort in enumerate(data["cohorts"]):
        keys = jax.random.split(jax.random.PRNGKey(number), len(cohort))
        state, _ = algorithm.apply(state, [(i, sets[i], key) for i, key in zip(cohort.tolist(), keys, strict=True)])
        accuracies.append(float((predictions(state.params) == data["y_test"]).mean()))
        models.append(np.concatenate([np.ravel(state.params[name]) for name in start]))
    np.savez(result, accuracies=accuracies, models=models)


if __name__ == "__main__":
    main(*sys.argv[1:])
