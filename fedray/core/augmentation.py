"""Crops and mirrors the images of clients' mini-batches at random. The random numbers of a client do not depend on the
other clients that are trained together with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.seeds import Purpose, stream

Augmentation = Callable[[Any, Sequence[int], Sequence[int], int, int, int], Any]
"""A function that changes the training samples of C clients at random: ``augmentation(x, counts, ids, seed, round,
step)`` returns changed copies of the stored inputs ``x [C, b, ...]`` of their mini-batches. The first ``counts[i]``
samples of client ``ids[i]`` are real; its other samples are padding. The changes of a sample depend only on seed,
round, client and local step."""

BORDER = 4
"""The width in pixels of the black border that is put around an image before it is cropped to its original size."""


def crop_flip(x: Tensor, counts: Sequence[int], ids: Sequence[int], seed: int, round: int, step: int) -> Tensor:
    """Augments images in training: returns copies of the images of C clients' mini-batches, in the same shape, each of
    which is shifted by up to four pixels and, with probability 1/2, mirrored.

    A black border of four pixels is put around each image, from which a random window of the original size is cut.

    Args:
        x: images ``[C, b, channels, height, width]`` in their stored form, such as uint8, in which 0 is black.
        counts: for each client how many of its b images are real; the images after these are padding.
        ids: the clients' numbers.
        seed: ``run.seed``. The random numbers depend only on seed, round, client and local step.
        round: the number of the round.
        step: the number of the local step.
    """
    samples, _, height, width = x.shape[1:]
    draws = [_windows(seed, round, client, step, count, samples) for client, count in zip(ids, counts, strict=True)]
    top, left, mirrored = (np.concatenate(drawn)[:, None] for drawn in zip(*draws, strict=True))
    across = np.where(mirrored, np.arange(width)[::-1], np.arange(width)) + left
    lines, columns = (torch.from_numpy(places).to(x.device) for places in (top + np.arange(height), across))
    image = torch.arange(len(lines), device=x.device)[:, None, None]
    padded = torch.nn.functional.pad(x.flatten(0, 1), (BORDER,) * 4)
    cropped = padded.permute(0, 2, 3, 1)[image, lines[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous().view_as(x)


def _windows(
    seed: int, round: int, client: int, step: int, count: int, samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draws how the images of one client's mini-batch are cropped and mirrored. Returns three arrays ``[samples]``: the
    top and the left edge of each image's window (0 to 2 * :data:`BORDER` pixels), and whether the image is mirrored.
    Only the first ``count`` samples are real; the padding after them gets zeros."""
    rng = stream(seed, Purpose.AUGMENTATION, round, client, step)
    padding = (0, samples - count)
    top, left = (np.pad(rng.integers(0, 2 * BORDER + 1, count), padding) for _ in range(2))
    return top, left, np.pad(rng.random(count) < 0.5, padding)
