"""FLOPs of attention and recurrence against counts by hand, and layers that cannot be counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.models.inspection import ModelFacts, inspect_model
from fedray.testing.contracts import SETTINGS, small_source

TOKENS, WIDTH, HIDDEN, CLASSES = 5, 8, 6, 4
SHAPE = (TOKENS, WIDTH)


def product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a matrix product: a multiplication and an addition for each of its terms."""
    return 2 * rows * inner * columns


def facts(module: nn.Module, shape: tuple[int, ...] = SHAPE) -> ModelFacts:
    return inspect_model(module, torch.zeros(2, *shape), "it")


class Reader(nn.Module):
    """A recurrent layer over the tokens, and a Linear on what it gives last."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


def recurrence(gates: int, layers: int = 1, directions: int = 1) -> int:
    """Each gate of each token, layer and direction multiplies its input and the hidden state by a matrix each."""
    inputs = [WIDTH, *[directions * HIDDEN] * (layers - 1)]
    per_token = sum(gates * (product(1, width, HIDDEN) + product(1, HIDDEN, HIDDEN)) for width in inputs)
    return TOKENS * directions * per_token


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_recurrence(kind, gates, layers, directions):
    layer = kind(WIDTH, HIDDEN, layers, batch_first=True, bidirectional=directions == 2)
    found = facts(Reader(layer, directions * HIDDEN))
    assert found.flops == recurrence(gates, layers, directions) + product(1, directions * HIDDEN, CLASSES)
    assert found.uncounted == ()


def test_an_lstm_with_a_projection():
    """The hidden state that the gates see is the projected one."""
    found = facts(Reader(nn.LSTM(WIDTH, HIDDEN, batch_first=True, proj_size=3), 3))
    per_token = 4 * (product(1, WIDTH, HIDDEN) + product(1, 3, HIDDEN)) + product(1, HIDDEN, 3)
    assert found.flops == TOKENS * per_token + product(1, 3, CLASSES)


class Stepping(nn.Module):
    """A recurrent cell that its module calls for each token."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.last = cell, nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for token in x.unbind(1):
            state = self.cell(token, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_cells(kind, gates):
    assert facts(Stepping(kind(WIDTH, HIDDEN))).flops == recurrence(gates) + product(1, HIDDEN, CLASSES)


class Encoder(nn.Module):
    """A transformer encoder, whose tokens' mean is classified."""

    def __init__(self, dropout: float, bias: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True, bias=bias)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean(1))


HEADS = 2
ATTENTION = HEADS * (product(TOKENS, WIDTH // HEADS, TOKENS) + product(TOKENS, TOKENS, WIDTH // HEADS))
"""Q K^T and its softmax times V, of each head."""

ENCODER_LAYER = (
    product(TOKENS, WIDTH, 3 * WIDTH)  # Q, K and V
    + ATTENTION
    + product(TOKENS, WIDTH, WIDTH)  # what leaves the heads
    + product(TOKENS, WIDTH, 16)
    + product(TOKENS, 16, WIDTH)
)


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["fused kernel", "dropout"])
def test_a_transformer_encoder(dropout):
    found = facts(Encoder(dropout))
    assert found.flops == 2 * ENCODER_LAYER + product(1, WIDTH, CLASSES)
    assert found.uncounted == ()
    assert found.draws == (dropout > 0)


class Resting(Encoder):
    """A frozen encoder, which its owner keeps in evaluation mode: torch then takes another, faster way through it."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.layers.requires_grad_(False)

    def train(self, mode: bool = True) -> Resting:
        super().train(mode)
        self.layers.eval()
        return self


def test_a_frozen_encoder_in_evaluation_mode():
    assert facts(Resting()).flops == 2 * ENCODER_LAYER + product(1, WIDTH, CLASSES)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_ones_own(causal):
    """torch's counter counts a causal mask's zeros too."""

    class CustomObjects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.project(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=causal)
            return self.last(mixed.transpose(1, 2).flatten(2).mean(1))

    assert facts(CustomObjects()).flops == product(TOKENS, WIDTH, 3 * WIDTH) + ATTENTION + product(1, WIDTH, CLASSES)


def test_a_matrix_times_a_vector():
    class Scored(nn.Module):
        """Tokens are weighted by a score each, x v."""

        def __init__(self) -> None:
            super().__init__()
            self.v, self.last = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(((x @ self.v)[..., None] * x).sum(1))

    assert facts(Scored()).flops == product(TOKENS, WIDTH, 1) + product(1, WIDTH, CLASSES)


class Paired(nn.Module):
    """A layer whose kernel no counter knows, beside elementwise layers and look-ups, which count as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"pair": nn.Bilinear(12, 12, 8), "norm": nn.LayerNorm(8), "act": nn.PReLU()})
        self.words, self.batch, self.last = nn.Embedding(3, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.scale, self.unused = nn.Parameter(torch.ones(8)), nn.Bilinear(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layers["act"](self.layers["norm"](self.layers["pair"](x, x)))
        return self.last(self.scale * self.batch(z + self.words((x[:, 0] > 0).long())))


class Distant(nn.Module):
    """Its own weights are used by an operation that is not counted, its child's by one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.last = nn.Parameter(torch.randn(8, 12)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cdist(x, self.centres))


def test_a_layer_is_not_excused_by_its_children():
    found = facts(Distant(), (12,))
    assert found.flops == product(1, 8, CLASSES)
    assert found.uncounted == ("own parameters (Distant)",)


def test_a_layer_that_counts_zero_is_named():
    found = facts(Paired(), (12,))
    assert found.flops == product(1, 8, CLASSES)
    assert found.uncounted == ("layers.pair (Bilinear)",)
    experiment, _ = resolve(
        load({k: v for k, v in SETTINGS.items() if not k.startswith("model.")}), CustomObjects(small_source(), Paired)
    )
    lines = [line for line in experiment.notes if "FLOPs" in line]
    assert len(lines) == 1
    assert "FLOPs of the model's layers.pair (Bilinear) are not counted" in lines[0]


@pytest.mark.parametrize("make", [lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 8)),
                                  lambda: nn.Linear(12, 8)], ids=["weight norm", "plain"])  # fmt: skip
def test_ordinary_layers_are_not_named(make):
    found = facts(nn.Sequential(make(), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, CLASSES)), (12,))
    assert (found.flops, found.uncounted) == (product(1, 12, 8) + product(1, 8, CLASSES), ())


@pytest.mark.parametrize("constrained", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal])
def test_what_is_computed_of_weights_alone_counts_zero(constrained):
    found = facts(nn.Sequential(constrained(nn.Linear(12, 8)), nn.ReLU(), nn.Linear(8, CLASSES)), (12,))
    assert (found.flops, found.uncounted) == (product(1, 12, 8) + product(1, 8, CLASSES), ())


class Placed(nn.Module):
    """A vision transformer's beginning: tokens, one of the model's own before them, and their places added."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, TOKENS + 1, WIDTH))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((torch.cat([self.own.expand(len(x), -1, -1), x], 1) + self.places)[:, 0])


class Elementwise(nn.Module):
    """A matrix product that is written as elementwise operations, which are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(1)[:, :, None] * self.matrix).sum(1)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_normalisation_over_several_dimensions_is_not_named(norm):
    found = facts(nn.Sequential(norm((TOKENS, WIDTH)), nn.Flatten(), nn.Linear(TOKENS * WIDTH, CLASSES)))
    assert (found.flops, found.uncounted) == (product(1, TOKENS * WIDTH, CLASSES), ())


def test_parameters_that_are_added_are_not_named_and_those_that_are_multiplied_are():
    found = facts(Placed())
    assert (found.flops, found.uncounted) == (product(1, WIDTH, CLASSES), ())
    assert facts(Elementwise()).uncounted == ("own parameters (Elementwise)",)


class Alone(nn.Module):
    """A layer that normalises by the batch in evaluation too: it needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 7), nn.BatchNorm1d(7, track_running_stats=False)
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Tracking(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(7), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


@pytest.mark.parametrize("kind", [Alone, Tracking])
def test_a_model_is_tried_as_it_is_trained_and_left_as_it_was(kind):
    module = kind()
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    found = facts(module, (12,))
    assert found.flops == product(1, 12, 7) + product(1, 7, CLASSES)
    assert found.draws == (kind is Tracking)
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(state, torch.random.get_rng_state())


class SkippedAtRandom(nn.Module):
    """Stochastic depth: whether a layer is run is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(12, 12) for _ in range(16)]), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else x
        return self.last(x)


def test_a_model_that_skips_layers_at_random_counts_the_same_each_time():
    """What clients are trained in depends on it, and is the same in every process."""
    module, counts = SkippedAtRandom(), set()
    for seed in range(5):
        torch.manual_seed(seed)
        counts.add(facts(module, (12,)).flops)
    assert len(counts) == 1
    (count,) = counts
    layers, left = divmod(count - product(1, 12, CLASSES), product(1, 12, 12))
    assert 0 < layers < 16
    assert left == 0


class Graph(nn.Module):
    """Multiplies by a sparse matrix that is no parameter."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.edges = torch.eye(WIDTH).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sparse.mm(self.edges, x.t()).t())


def test_a_sparse_matrix():
    assert facts(Graph(), (WIDTH,)).flops >= product(1, WIDTH, CLASSES)
