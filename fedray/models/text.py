"""Recurrent networks for texts: the next character of Shakespeare's plays, the next word of StackOverflow's posts."""

from __future__ import annotations

from torch import Tensor, nn


class ShakespeareLSTM(nn.Module):
    """A network that predicts the next character of a text: an embedding of 8 numbers, two LSTM layers of 100, and a
    linear layer on the output of the last step; 133,520 parameters for 80 characters.

    It is LEAF's and GHBM's network (Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018; Zaccone et al., TMLR
    2025). Inputs are whole numbers ``[b, length]``, one for each character, and outputs are logits ``[b, classes]``,
    where ``classes`` is the number of different characters. ``input_shape`` is (length,).
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        _text(input_shape)
        self.embedding = nn.Embedding(classes, 8)
        self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.linear = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.lstm(self.embedding(x))[0][:, -1])
        return logits


class StackOverflowLSTM(nn.Module):
    """A network that predicts the next word after each word of a text: an embedding of 96 numbers, an LSTM layer of
    670, and linear layers of 96 and as many outputs as words; 4,053,428 parameters for 10,004 words.

    It is the network of S. J. Reddi et al.: Adaptive Federated Optimization, ICLR 2021 (with torch's two biases for
    each gate, where theirs has one: 2,680 parameters more). Inputs are whole numbers ``[b, length]``, one for each
    word, and outputs are logits ``[b, length, classes]``, where ``classes`` is the number of different words.
    ``input_shape`` is (length,).
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        _text(input_shape)
        self.embedding = nn.Embedding(classes, 96)
        self.lstm = nn.LSTM(96, 670, batch_first=True)
        self.narrow = nn.Linear(670, 96)
        self.linear = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.narrow(self.lstm(self.embedding(x))[0]))
        return logits


def _text(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 1:
        raise ValueError(f"it takes texts as whole numbers [length], not inputs {input_shape}")
