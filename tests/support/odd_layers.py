"""The zoo of ``test_odd_modules.py``: kinds of layers and tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from odd_buffers import WithBuffer
from odd_modules import CLASSES, LENGTH, WIDTH, WORDS, Ours, odd
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@odd("tokens")
def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6, sparse=True), nn.Flatten(), nn.Linear(6 * LENGTH, CLASSES))


@odd()
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES))


@odd(refused="is of complex numbers")
class ComplexParameter(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def between(self, h: Tensor) -> Tensor:
        return (h * self.phase).real


@odd()
def double_module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()


@odd(refused="has parameters of float64, which are trained as float32")
class DoublePart(Ours):
    """Computes a part in float64, with a layer of that type."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(8, 8).double()

    def between(self, h: Tensor) -> Tensor:
        return self.fine(h.double()).float()


@odd(refused="its attribute turned is a view of its parameter ")
class ViewKept(Ours):
    """Keeps a view of a parameter, which plain torch would train along with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(8, 8)
        self.turned = [self.fine.weight.t()]

    def between(self, h: Tensor) -> Tensor:
        return h @ self.turned[0]


@odd()
class DoubleInside(Ours):
    """Computes a part in float64, with tensors of its own."""

    def between(self, h: Tensor) -> Tensor:
        return torch.logsumexp(h.double(), 1, keepdim=True).float() * h


@odd(refused="its buffer kept is of torch.complex128")
class ComplexDouble(WithBuffer):
    value = torch.zeros(3, dtype=torch.complex128)


@odd(refused="its buffer kept is sparse")
class SparseBuffer(WithBuffer):
    value = torch.eye(8).to_sparse()

    def between(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(self.kept, h.t()).t()


@odd()
class ExpandedBuffer(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(1).expand(8))

    def between(self, h: Tensor) -> Tensor:
        return h * self.kept


@odd()
class NotRegistered(Ours):
    """Has a layer in a list, of which torch's optimizers know nothing either."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8)]

    def between(self, h: Tensor) -> Tensor:
        return self.layers[0](h)


@odd(refused="its parameters() leaves out first.weight, first.bias, which fedray would train too")
class PartForOptimizers(Ours):
    """Gives optimizers its last layer only."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.last.parameters(recurse)


@odd()
class InAListToo(Ours):
    """Takes the weights of its layers from a list in which they are a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.weight for layer in (self.first, self.last)]

    def between(self, h: Tensor) -> Tensor:
        return h @ self.weights[0] @ self.weights[0].t()


@odd()
class ScalarParameter(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


@odd()
class Strided(Ours):
    """Has a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(-1, 1, 128).view(8, 16)[:, ::2])

    def between(self, h: Tensor) -> Tensor:
        return h @ self.mix


@odd("tokens")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, 6), nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(self.words(x))[0][:, -1])


@odd("tokens")
class PackedRecurrent(nn.Module):
    """Words of number 0 at the end are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, 6, padding_idx=0), nn.GRU(6, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return self.last(found.sum(1))


@odd("tokens")
class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(WORDS, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, CLASSES)
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.last(self.heads(h, h, h, attn_mask=self.mask, need_weights=False)[0].mean(1))
