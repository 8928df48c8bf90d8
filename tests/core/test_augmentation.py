"""crop_flip is what plain loops over numpy arrays give, and normalisation has the constants that it should have."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from cifar_files import write
from client_stacks import client_phase, data
from small_modules import made

from fedray import UserError, simulate
from fedray.client.local_data import LocalData
from fedray.core.augmentation import crop_flip
from fedray.core.local_training import LocalTraining
from fedray.core.samples import Samples
from fedray.core.seeds import Purpose, stream
from fedray.data.sources.cifar import MEAN, TEN
from fedray.data.sources.source import Source, load_source
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models.small import Logistic
from fedray.testing.contracts import small_source

MEANS, DEVIATIONS = np.array([0.5, 0.25, 0.1]), np.array([0.2, 0.5, 0.4])


def pixels(dtype):
    values = np.random.default_rng(3).integers(1, 256, (30, 3, 10, 12))
    return values.astype(np.uint8) if dtype == "uint8" else (values / 255).astype(np.float32)


def batches_of(x, sizes, training):
    scale = 1 / ((255 if x.dtype == np.uint8 else 1) * DEVIATIONS)
    constants = (torch.from_numpy(c.astype(np.float32)) for c in (scale, -MEANS / DEVIATIONS))
    samples = Samples(torch.from_numpy(x), torch.arange(len(x)), *constants)
    ends = np.cumsum([0, *sizes])
    indices = [np.arange(a, b) for a, b in pairwise(ends)]
    steps = [2 * -(-size // 4) for size in sizes]
    return LocalData(samples, training, range(len(sizes)), indices, steps, round=2).batches()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_are_padded_black_and_then_normalised(dtype):
    x, sizes = pixels(dtype), [9, 4, 17]
    training = LocalTraining(8, batch_size=4, local_steps=None, local_epochs=2, augment=(crop_flip,))
    black = -MEANS / DEVIATIONS
    borders = 0
    for batch in batches_of(x, sizes, training):
        assert (batch.x.dtype, batch.x.is_contiguous(), batch.x.data_ptr() % 16) == (torch.float32, True, 0)
        for client in range(3):
            count = batch.y.shape[1] if batch.counts is None else batch.counts[client]
            if 2 * -(-sizes[client] // 4) <= batch.step:
                continue
            rng = stream(8, Purpose.AUGMENTATION, 2, client, batch.step)
            top, left, mirrored = rng.integers(0, 9, count), rng.integers(0, 9, count), rng.random(count) < 0.5
            for s in range(count):
                image = x[batch.y[client, s]].astype(float) / (255 if dtype == "uint8" else 1)
                window = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, top[s] : top[s] + 10, left[s] : left[s] + 12]
                window = window[:, :, ::-1] if mirrored[s] else window
                expected = (window - MEANS[:, None, None]) / DEVIATIONS[:, None, None]
                np.testing.assert_allclose(batch.x[client, s].numpy(), expected, atol=2e-6)
                if top[s] < 4:
                    borders += 1
                    np.testing.assert_allclose(batch.x[client, s, :, 0, 5].numpy(), black, rtol=1e-6)
    assert borders > 10


def test_inside_the_border_bits_are_those_of_the_untouched_image():
    """A window at (4, 4) that is not mirrored is the image itself."""
    x = pixels("uint8")
    plain, cropped = (
        list(batches_of(x, [30], LocalTraining(8, batch_size=None, local_steps=200, augment=augment)))
        for augment in ((), (crop_flip,))
    )
    same = [torch.equal(a.x[0, i], b.x[0, i]) for a, b in zip(plain, cropped, strict=True) for i in range(30)]
    assert 1 <= sum(same) < len(same) / 20


def test_cifar_has_the_deviations_of_ghbm(batches, tmp_path):
    write(tmp_path, batches, TEN.binary)
    for name, deviations in (("default", (0.2470, 0.2435, 0.2616)), ("ghbm", (0.2023, 0.1994, 0.2010))):
        source = load_source("cifar10", str(tmp_path), name)
        normalised = source.x_train[0].astype(float) * source.scale[:, None, None] + source.shift[:, None, None]
        expected = (source.x_train[0] / 255 - MEAN[:, None, None]) / np.array(deviations)[:, None, None]
        np.testing.assert_allclose(normalised, expected, rtol=1e-5, atol=1e-6)


def test_pixels_from_0_to_1(batches, tmp_path):
    write(tmp_path, batches, TEN.binary)
    for name, root in (("sample", None), ("cifar10", str(tmp_path))):
        source = load_source(name, root, "unit")
        assert source.x_train.dtype == np.uint8
        np.testing.assert_allclose(255 * source.scale, 1, rtol=1e-6)
        np.testing.assert_array_equal(source.shift, 0)


def own(root, normalization):
    x = np.zeros((4, 2), np.float32)
    return Source(f"{root}-{normalization}", x, np.arange(4) % 2, x, np.arange(4) % 2, 2)


def rooted(root=None):
    return own(root, "none")


def test_a_source_without_such_an_option_refuses_it():
    with pytest.raises(
        UserError, match=r"data.normalization: the source sample has no 'ghbm' .there are: default, unit"
    ):
        load_source("sample", None, "ghbm")
    with pytest.raises(UserError, match=r"data.normalization: the source cifar10 has no 'gbhm' .did you mean 'ghbm'"):
        load_source("cifar10", None, "gbhm")
    assert load_source("test_augmentation:own", "here", "unit").name == "here-unit"
    assert load_source("test_augmentation:rooted", "here").name == "here-none"
    with pytest.raises(UserError, match="the source test_augmentation:rooted has no 'unit'"):
        load_source("test_augmentation:rooted", "here", "unit")
    with pytest.raises(UserError, match=r"data.normalization=ghbm is for sources that know it"):
        simulate({"data.normalization": "ghbm", "engine.kind": "local"}, data=small_source())


def cropped(image: np.ndarray, top: int, left: int, mirrored: bool) -> np.ndarray:
    """Returns a window of the image's size, at (top, left) of the image with 4 zeros around it, then mirrored."""
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for k in range(width):
                line, column = i + top - 4, (width - 1 - k if mirrored else k) + left - 4
                if 0 <= line < height and 0 <= column < width:
                    result[c, i, k] = image[c, line, column]
    return result


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_crop_and_flip_is_what_a_plain_loop_gives(kind):
    """Clients of unequal size make ragged epochs. Each client's draws are its own, whoever shares its stack."""
    shape, sizes = (2, 12, 14), [7, 3, 1]
    samples = data(shape, 11)
    network = kind(made(lambda: Logistic(shape, 4)))
    training = LocalTraining(5, batch_size=4, local_steps=None, local_epochs=2, augment=(crop_flip,))
    plain = LocalTraining(5, batch_size=4, local_steps=None, local_epochs=2)
    together = list(client_phase(network, samples, sizes, training).data.batches())
    untouched = list(client_phase(network, samples, sizes, plain).data.batches())
    assert len(together) == 4
    drawn = set()
    for row in range(3):
        steps = (4, 2, 2)[row]
        alone = list(client_phase(network, samples, sizes, training, rows=[row]).data.batches())
        for j in range(steps):
            count = 4 if together[j].counts is None else together[j].counts[row]
            assert together[j].x.shape == untouched[j].x.shape
            rng = stream(5, Purpose.AUGMENTATION, 3, 10 + row, j)
            top, left = rng.integers(0, 9, count), rng.integers(0, 9, count)
            mirrored = rng.random(count) < 0.5
            for s in range(count):
                expected = cropped(untouched[j].x[row, s].numpy(), top[s], left[s], mirrored[s])
                np.testing.assert_array_equal(together[j].x[row, s].numpy(), expected)
                np.testing.assert_array_equal(alone[j].x[0, s].numpy(), expected)
                drawn.add((top[s], left[s], mirrored[s]))
            assert torch.equal(together[j].y, untouched[j].y)
    assert len(drawn) > 15


def test_augmentation_is_for_training_alone():
    shape = (1, 12, 12)
    samples = data(shape, 9)
    network = LoopNetwork(made(lambda: Logistic(shape, 4)))
    with_it, without = (
        client_phase(network, samples, [9], LocalTraining(0, batch_size=4, local_steps=2, augment=augment))
        for augment in ((crop_flip,), ())
    )
    at = with_it.start("x")
    assert torch.equal(with_it.objective.full_gradient(at), without.objective.full_gradient(at))
    assert not torch.equal(next(with_it.data.batches()).x, next(without.data.batches()).x)
