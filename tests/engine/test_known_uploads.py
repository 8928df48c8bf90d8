"""The steps of uploads that come with fedray: each rule against numpy, what is sent and kept, and bytes on the wire."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_runs import run

from fedray import UserError
from fedray.core.upload import UploadRows
from fedray.testing import UploadContract
from fedray.testing.contracts import assert_same
from fedray.uploads import STEPS
from fedray.uploads.topk import count_of
from fedray.usercode.extensions import make

D = 40
U = np.random.default_rng(8).normal(size=(3, D)).astype(np.float32)
KEPT = np.random.default_rng(9).normal(size=(3, D)).astype(np.float32)
ENTRIES = {
    "clip": {"clip": 0.5}, "topk": {"topk": 0.1}, "topk_forgets": {"topk": {"k": 7, "error_feedback": False}},
    "randk": {"randk": 5}, "qsgd": {"qsgd": 4}, "quantize": {"quantize": 3}, "sign": "sign",
}  # fmt: skip
SEVERAL = {"noise": [{"clip": 0.5}, {"noise": 0.3}], "topk_quantize": [{"clip": 0.5}, {"topk": 0.2}, {"quantize": 4}]}
for name, entries in ({name: [entry] for name, entry in ENTRIES.items()} | SEVERAL).items():
    members = {"before": entries[:-1], "step": entries[-1]}
    globals()[f"Test{name}"] = type(f"Test{name}", (UploadContract,), members)


def steps_of(entries):
    steps = [make(entry, "train.upload", STEPS) for entry in entries]
    for number, step in enumerate(steps):
        step.follows(steps[:number])
    return steps


def applied(entries, rows=U, kept=None, round=1, clients=(3, 1, 8)):
    """What one step sends and keeps, or several one after another; ``kept`` is of the one that keeps something."""
    sent, left = torch.from_numpy(rows.copy()), None
    for place, step in enumerate(steps_of(entries if isinstance(entries, list) else [entries])):
        of_step = torch.from_numpy(kept.copy()) if kept is not None and step.keeps else None
        upload = UploadRows("y", "train", round, clients, 5, place, of_step)
        sent = step(sent, upload)
        left = left if upload.kept is None else upload.kept
    return sent.double().numpy(), None if left is None else left.double().numpy()


def test_clip():
    rows = U * np.array([[10.0], [1.0], [0.01]], np.float32)
    expected = [u * min(1, 2.5 / np.linalg.norm(u)) for u in rows.astype(np.float64)]
    np.testing.assert_allclose(applied({"clip": 2.5}, rows)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("k", "count"), [(1, 1), (7, 7), (D, D), (10 * D, D), (0.1, 4), (0.11, 5), (0.999, D)])
def test_topk(k, count):
    sent, kept = applied({"topk": k}, kept=KEPT)
    whole = U.astype(np.float64) + KEPT
    for row, out in zip(whole, sent, strict=True):
        largest = np.argsort(-abs(row), kind="stable")[:count]
        np.testing.assert_allclose(out[largest], row[largest], rtol=1e-6)
        assert (np.delete(out, largest) == 0).all()
    # in float32, in which they are sent and kept
    assert (sent + kept == (U + KEPT).astype(np.float64)).all()


def test_topk_of_equal_numbers_takes_the_first():
    rows = np.array([[1, -1, 0, 1, 2, -1]], np.float32)
    sent, _ = applied({"topk": {"k": 3, "error_feedback": False}}, rows, clients=[0])
    assert sent.tolist() == [[1, -1, 0, 0, 2, 0]]


def test_sign():
    sent, kept = applied("sign", kept=KEPT)
    whole = U.astype(np.float64) + KEPT
    expected = np.where(whole < 0, -1, 1) * abs(whole).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(sent, expected, rtol=1e-5)
    np.testing.assert_allclose(kept, whole - expected, atol=1e-5)


def exact_topk(u, k):
    largest = sorted(range(len(u)), key=lambda place: (-abs(u[place]), place))[:k]
    return [each if place in largest else 0 for place, each in enumerate(u)]


def exact_sign(u):
    size = sum(map(abs, u)) / len(u)
    return [-size if each < 0 else size for each in u]


@pytest.mark.parametrize(("entry", "rule"), [({"topk": 3}, lambda u: exact_topk(u, 3)), ("sign", exact_sign)])
def test_what_is_sent_and_kept_is_exactly_the_sum_of_the_updates(entry, rule):
    """In fractions, of numbers that float64 holds: multiples of 1/64, of which there are a power of two."""
    updates = np.random.default_rng(3).integers(-512, 512, (10, 3, 8)) / 64
    kept = np.zeros((3, 8))
    sent, left = np.full((3, 8), Fraction(0)), np.full((3, 8), Fraction(0))
    for rows in updates:
        of_round, kept = applied(entry, rows, kept)
        whole = left + np.vectorize(Fraction)(rows)
        expected = np.array([rule(row) for row in whole])
        assert (of_round == expected).all()
        sent, left = sent + expected, whole - expected
        assert (kept == left).all()
    assert (sent + kept == np.vectorize(Fraction)(updates).sum(axis=0)).all()
    assert (kept != 0).any()


def test_randk_sends_exactly_what_it_draws():
    """It keeps nothing: k / d of what is sent, and what is not, are the update."""
    updates, drawn = np.random.default_rng(3).integers(-512, 512, (10, 3, 8)) / 64 + 1 / 128, set()
    for round, rows in enumerate(updates):
        sent, kept = applied({"randk": 2}, rows, round=round)
        assert kept is None
        assert ((sent != 0).sum(axis=1) == 2).all()
        assert (np.where(sent != 0, sent / 4, rows) == rows).all()
        drawn.add(tuple(map(tuple, sent != 0)))
    assert len(drawn) > 5


def drawn(clients, count, place, round=1):
    upload = UploadRows("y", "train", round, clients, 5, place)
    return [torch.rand(count, generator=upload.generator(row)).double().numpy() for row in range(len(clients))]


def quantized(v, xi):
    step = (v.max() - v.min()) / (2**3 - 1)
    return v.min() + np.floor((v - v.min()) / step + xi) * step


def in_levels(v, xi):
    length = np.linalg.norm(v)
    return np.sign(v) * length * np.floor(abs(v) / length * 4 + xi) / 4


@pytest.mark.parametrize(("entry", "rule"), [({"quantize": 3}, quantized), ({"qsgd": 4}, in_levels)])
def test_what_topk_sends_is_rounded_and_what_it_leaves_out_is_kept(entry, rule):
    """The rounding is among the numbers that are sent alone, and nothing of it is kept."""
    sent, kept = applied([{"topk": 9}, entry], kept=KEPT)
    alone, left = applied({"topk": 9}, kept=KEPT)
    for row, whole, xi in zip(sent, U.astype(np.float64) + KEPT, drawn((3, 1, 8), 9, 1), strict=True):
        places = np.sort(np.argsort(-abs(whole))[:9])
        np.testing.assert_allclose(row[places], rule(whole[places], xi), rtol=1e-5, atol=1e-6)
        assert (np.delete(row, places) == 0).all()
    assert (kept == left).all()
    assert (alone != sent).any()


@pytest.mark.parametrize(
    "entry",
    [
        {"randk": 5}, {"randk": 0.5}, {"qsgd": 1}, {"qsgd": 4}, {"quantize": 1}, {"quantize": 3},
        [{"randk": 20}, {"quantize": 2}],
    ],
)  # fmt: skip
def test_draws_have_the_mean_of_what_is_sent(entry):
    found = np.array([applied(entry, round=round)[0] for round in range(4000)])
    error = found.std(axis=0) / math.sqrt(len(found))
    # numbers that are seldom sent have not shown yet how far they are spread
    assert (abs(found.mean(axis=0) - U) <= 5 * error + 0.01).all()
    assert error.max() > 0


def test_randk_sends_so_many():
    sent, _ = applied({"randk": 5})
    assert [(row != 0).sum() for row in sent] == [5, 5, 5]
    chosen = sent != 0
    np.testing.assert_allclose(sent[chosen], (U * (D / 5))[chosen], rtol=1e-6)


@pytest.mark.parametrize("length", [0.01, 1.0])
@pytest.mark.parametrize("levels", [1, 4])
def test_qsgd_sends_levels(levels, length):
    rows = U * np.float32(length)
    sent, _ = applied({"qsgd": levels}, rows)
    steps = abs(sent) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) * levels
    np.testing.assert_allclose(steps, steps.round(), atol=1e-5)
    assert (abs(steps.round() - abs(rows) / np.linalg.norm(rows, axis=1, keepdims=True) * levels) <= 1 + 1e-5).all()
    assert (np.sign(sent) * np.sign(rows) >= 0).all()


@pytest.mark.parametrize("step", [{"qsgd": 4096}, {"qsgd": 65535}, {"quantize": 16}])
def test_the_last_level_is_never_passed(step):
    """Not with the largest of the numbers that are drawn either, which float32 can't add to a level without rounding
    it up."""
    (made,) = steps_of([step])
    numbers, drawn = torch.tensor([0.7, 0.0]), torch.full((2,), 1 - 2**-24)
    assert made.rounded(numbers, drawn).tolist() == numbers.tolist()


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_quantize_sends_points_of_a_grid(bits):
    sent, _ = applied({"quantize": bits})
    least, greatest = U.min(axis=1, keepdims=True), U.max(axis=1, keepdims=True)
    steps = (sent - least) / (greatest - least) * (2**bits - 1)
    np.testing.assert_allclose(steps, steps.round(), atol=2e-5 * 2**bits)
    assert (abs(sent - U) <= (greatest - least) / (2**bits - 1) * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    "entry",
    [
        {"qsgd": 4}, {"quantize": 3}, {"clip": 1.0}, {"topk": 3}, {"randk": 3}, "sign",
        [{"topk": 3}, {"quantize": 3}], [{"randk": 3}, {"qsgd": 4}],
    ],
)  # fmt: skip
def test_nothing_but_zeros_stays_so(entry):
    assert (applied(entry, np.zeros((1, D), np.float32), clients=[0])[0] == 0).all()


def test_noise(tmp_path):
    """Of the width that the clip before it says, other for each client and round, and the same bits anywhere."""
    from fedray.uploads.clip import Clip
    from fedray.uploads.noise import Noise

    step = Noise(0.5)
    step.follows([Clip(9.0), Clip(4.0)])
    zeros = torch.zeros(2, 100_000)
    sent = step(zeros.clone(), UploadRows("y", "train", 1, [0, 1], 0, 0))
    assert sent.std(dim=1).tolist() == pytest.approx([2.0, 2.0], rel=0.02)
    assert abs(float((sent[0] * sent[1]).mean())) < 0.1
    upload = [{"clip": 1.0}, {"noise": 0.01}]
    whole = run(tmp_path / "whole", train__upload=upload)
    assert_same(whole, run(tmp_path / "chunks", train__upload=upload, engine__chunk=1))
    assert whole.summary["model_sha256"] != run(tmp_path / "clip", train__upload=upload[:1]).summary["model_sha256"]


def test_no_noise_is_clipping_alone(tmp_path):
    clipped, both = applied([{"clip": 0.5}])[0], applied([{"clip": 0.5}, {"noise": 0.0}])[0]
    assert (both == clipped).all()
    upload = [{"clip": 0.5}, {"noise": 0.0}]
    alone, silent = (run(tmp_path / str(k), train__upload=upload[:k]) for k in (1, 2))
    assert_same(alone, silent)


def test_all_of_an_upload_is_no_step_at_all(tmp_path):
    plain = run(tmp_path / "plain")
    made = run(tmp_path / "all", train__upload=[{"topk": 10**9}, {"clip": 1e9}])
    assert made.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-4)
    assert made.metrics.bytes_up.tolist() > plain.metrics.bytes_up.tolist()


BYTES = {
    "clip": lambda d: 4 * d, "topk": lambda d: math.ceil(0.1 * d) * (4 + math.ceil(math.log2(d) / 8)),
    "topk_forgets": lambda d: 7 * (4 + math.ceil(math.log2(d) / 8)), "randk": lambda d: 5 * 4 + 8,
    "qsgd": lambda d: d * 4 / 8 + 4, "quantize": lambda d: d * 3 / 8 + 8, "sign": lambda d: d / 8 + 4,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name, tmp_path):
    made = run(tmp_path, train__upload=[ENTRIES[name]])
    d = sum(p.numel() for p in made.model().parameters())
    assert made.metrics.bytes_up[0] == made.metrics.cohort_size[0] * round(BYTES[name](d))
    assert made.metrics.bytes_down[0] == made.metrics.cohort_size[0] * 4 * d


@pytest.mark.parametrize(
    ("entry", "numbers", "bytes"),
    [
        # the place of one of 256 numbers needs a byte, of 257 two, of 65,537 three
        ({"topk": 7}, 256, 7 * 5), ({"topk": 7}, 257, 7 * 6), ({"topk": 7}, 65_537, 7 * 7), ({"topk": 1}, 1, 5),
        # 3, 7, 9 and 511 values
        ({"qsgd": 1}, 80, 80 * 2 / 8 + 4), ({"qsgd": 3}, 80, 80 * 3 / 8 + 4), ({"qsgd": 4}, 80, 80 * 4 / 8 + 4),
        ({"qsgd": 255}, 80, 80 * 9 / 8 + 4),
        # a number has four bytes, and the seed by which places are drawn eight
        ({"randk": 5}, 80, 28), ({"randk": 0.25}, 80, 88), ({"randk": 1}, 1, 12),
        # bits of all numbers, and both ends of the range
        ({"quantize": 1}, 80, 18), ({"quantize": 3}, 80, 38), ({"quantize": 8}, 80, 88), ({"quantize": 16}, 10, 28),
        # seven places of a byte, and seven numbers of half a byte; or a seed in place of places
        ([{"topk": 7}, {"quantize": 4}], 256, 7 + 3.5 + 8), ([{"topk": 7}, {"qsgd": 4}], 256, 7 + 3.5 + 4),
        ([{"randk": 6}, {"quantize": 8}], 80, 8 + 6 + 8), ([{"clip": 1.0}, {"topk": 0.1}, {"qsgd": 1}], 80, 8 + 2 + 4),
    ],
)  # fmt: skip
def test_bytes_by_hand(entry, numbers, bytes):
    sent = 4.0 * numbers
    for step in steps_of(entry if isinstance(entry, list) else [entry]):
        sent = step.wire_bytes(numbers, sent)
    assert sent == bytes


@pytest.mark.parametrize(
    ("k", "numbers", "count"),
    [
        # as floats 7.000000000000001, 55.00000000000001, 14000000.000000002
        (0.07, 100, 7), (0.55, 100, 55), (0.07, 200_000_000, 14_000_000), (0.071, 100, 8), (1e-12, 5, 1), (3, 2, 2),
    ],
)  # fmt: skip
def test_a_fraction_is_rounded_up_as_it_is_written(k, numbers, count):
    assert count_of(k, numbers) == count
    for entry in ({"topk": k}, {"randk": k}):
        sent = make(entry, "train.upload", STEPS).wire_bytes(numbers, 4.0 * numbers)
        assert sent == (4 * count + 8 if "randk" in entry else count * (4 + math.ceil(math.log2(max(numbers, 2)) / 8)))


def test_noise_after_compression_is_sent_whole(tmp_path):
    made = run(tmp_path, train__upload=[{"clip": 1.0}, {"topk": 3}, {"noise": 0.1}])
    assert made.metrics.bytes_up.tolist() == made.metrics.bytes_down.tolist()


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        ([{"clip": 0}], r"train\.upload=clip can't be made: .*norm must be above 0, not 0"),
        ([{"topk": 2.5}], "k must be a whole number, or a fraction between 0 and 1"),
        ([{"topk": 1.5}], "k must be a whole number, or a fraction between 0 and 1"),
        ([{"qsgd": 0}], "levels must be a whole number"),
        ([{"quantize": 17}], "bits must be a whole number from 1 to 16"),
        ([{"noise": 1.0}, {"clip": 1.0}], "put a clip before it"),
        ([{"topk": 3}, {"clip": 1.0}, {"qsgd": 2}], "topk and qsgd both make uploads smaller; .* right after topk or"),
        ([{"qsgd": 2}, {"topk": 3}], "qsgd and topk both make uploads smaller"),
        ([{"topk": 3}, {"quantize": 2}, {"qsgd": 2}], "topk and qsgd both make uploads smaller"),
        (["clip"], r"train\.upload=clip needs the option norm$"),
        (["clp"], r"train\.upload: there is no 'clp' \(did you mean 'clip'\?\)"),
        ([{"topk": {"k": 3, "feedback": True}}], "feedback"),
    ],
)
def test_bad_steps(upload, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, train__upload=upload)
