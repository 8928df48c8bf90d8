"""Next characters of Shakespeare's plays; each speaker is a client (tinyshakespeare, with `NAME:` before a speech).

python analysis/examples/shakespeare.py tinyshakespeare/input.txt lstm
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedray

LENGTH = 40


class LSTM(nn.Module):
    def __init__(self, classes: int, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(classes, 32), nn.LSTM(32, width, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(classes, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        before = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.layers(self.embedding(x) + self.places(torch.arange(LENGTH)), before, is_causal=True))


def speeches(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns pieces of 40 characters ``x [n, 40]``, the characters that follow each of them, and the speakers.

    The ends of short pieces are filled up with -100, which does not count.
    """
    text = file.read_text()
    code, said = {each: number for number, each in enumerate(sorted(set(text)))}, {}
    for speech in text.strip().split("\n\n"):
        name, _, words = speech.partition(":\n")
        said[name] = said.get(name, "") + words + "\n"
    x, y, speakers = [], [], []
    for name, words in said.items():
        for start in range(0, len(words) - 1, LENGTH):
            piece = np.array([code[each] for each in words[start : start + LENGTH + 1]])
            x.append(np.pad(piece[:-1], (0, LENGTH + 1 - len(piece))))
            y.append(np.pad(piece[1:], (0, LENGTH + 1 - len(piece)), constant_values=-100))
            speakers.append(name)
    return np.stack(x), np.stack(y), np.array(speakers)


def main(file: Path, model: type[nn.Module], **settings: Any) -> fedray.RunResult:
    x, y, speaker = speeches(file)
    test = np.arange(len(x)) % 10 == 9
    keys = {
        "algorithm.name": "fedavg", "run.name": model.__name__, "run.rounds": 200, "run.eval_every": 20,
        "train.cohort_size": 10, "train.local_steps": 10, "train.batch_size": 32, "train.lr": 2.0,
        "train.grad_clip": 1.0,
    }  # fmt: skip
    data, held_out = (x[~test], y[~test], speaker[~test]), (x[test], y[test], speaker[test])
    return fedray.simulate({**keys, **settings}, data=data, test=held_out, model=model, verbose=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"lstm": LSTM, "transformer": Transformer}[sys.argv[2]])
