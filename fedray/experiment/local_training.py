"""Reads from a configuration how clients train: their optimizer, and what is done to their mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

from fedray.config import Config
from fedray.core.augmentation import Augmentation, crop_flip
from fedray.core.local_training import LocalTraining
from fedray.core.transform import SeededTransform
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.experiment import Own
from fedray.usercode.importing import home_of, import_object

EXAMPLES = 16
"""The number of samples on which a transform is tried."""


def own_transform(config: Config, own: Own, data: FederatedData) -> tuple[list[SeededTransform], list[str]]:
    """Returns the user's transform of mini-batches, if there is one, and lines for the user about it."""
    asked = config.data.transform
    if own.transform is not None:
        transform = SeededTransform(own.transform)
    elif asked is not None:
        key = "data.transform"
        transform = SeededTransform(import_object(asked, key), f"{key}={asked}", home_of(asked, key))
    else:
        return [], []
    if not callable(transform.function) or isinstance(transform.function, type):
        what = "a class" if isinstance(transform.function, type) else type(transform.function).__name__
        raise UserError(f"{transform.name} must be a function of a batch of inputs, not {what}")
    return [transform], transform.check(data.stored_examples(min(len(data.y), EXAMPLES)).x)


def local_training(config: Config, transform: Sequence[SeededTransform]) -> LocalTraining:
    """Returns the settings of local training. ``transform`` is the user's own, after that of ``data.augment``."""
    augment: list[Augmentation] = [crop_flip] if config.data.augment == "crop_flip" else []
    train = config.train
    return LocalTraining(
        seed=config.run.seed,
        batch_size=None if train.batch_size == "full" else train.batch_size,
        local_steps=train.steps,
        local_epochs=train.local_epochs,
        momentum=train.momentum,
        nesterov=train.nesterov,
        weight_decay=train.weight_decay,
        decay_norms_and_biases=train.decay_norms_and_biases,
        grad_clip=train.grad_clip,
        optimizer=train.optimizer,
        **train.adam,
        augment=(*augment, *transform),
    )
