"""Measures what LoRA takes beside training a whole model: trained numbers, bytes, memory and seconds.

    python analysis/lora.py OUTPUT

A BERT of 4 layers of width 256 (11 million parameters), made from a configuration, classifies texts of 64 tokens; 5 of
20 clients make 4 local steps of 16 texts in a round. Three ways: the whole model is trained; LoRA of width 8 beside all
linear layers, and the last layer; the last layer alone. Each way runs in a process of its own, one after another, three
times in turn; seconds are medians over all rounds but the first, and memory is the largest that the process had.

Writes runs.csv and lora.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedray import simulate
from fedray.data.sources.source import Source
from fedray.results.tables import markdown

WAYS: Mapping[str, Mapping[str, Any]] = {
    "the whole model": {},
    "LoRA, r = 8": {"peft": {"kind": "lora", "r": 8, "alpha": 16}},
    "the last layer": {"trainable": ["head"]},
}
REPEATS, ROUNDS = 3, 4


def texts() -> Source:
    """1,000 texts of 64 tokens in 4 classes; a token says which."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 1000)
    ids = rng.integers(10, 30_000, (1000, 64))
    ids[:, 5] = 1000 + y
    x = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    train, test = ({name: part[rows] for name, part in x.items()} for rows in (slice(900), slice(900, 1000)))
    return Source("texts", train, y[:900], test, y[900:], 4)


def run(way: str, folder: str) -> None:
    """Runs one of :data:`WAYS`, and prints what it took."""
    settings: dict[str, Any] = {
        "run": {"rounds": ROUNDS, "eval_every": 0, "checkpoint_every": 0, "output": folder, "resume": False},
        "algorithm": {"name": "fedavg"},
        "data": {"clients": 20},
        "model": {"name": f"transformers:{folder}/bert", **WAYS[way]},
        "train": {"cohort_size": 5, "local_steps": 4, "batch_size": 16, "lr": 0.05},
        "engine": {"kind": "local"},
    }
    result = simulate(settings, data=texts())
    rows = result.metrics
    found = {
        "way": way,
        "trained": result.summary["parameters"],
        "bytes up": float(rows["bytes_up"].iloc[0]),
        "seconds": rows["round_seconds"].iloc[1:].tolist(),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(found))


def measure(way: str, folder: str) -> dict[str, Any]:
    # its errors are printed as they are
    command = [sys.executable, __file__, folder, "--way", way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        return run(options.way, options.output)
    import transformers

    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
        ).save_pretrained(f"{folder}/bert")
        runs = pd.DataFrame([measure(way, folder) for _ in range(REPEATS) for way in WAYS])
    runs.to_csv(output / "runs.csv", index=False)
    rows = [
        {
            "": way,
            "trained numbers": f"{some['trained'].iloc[0]:,}",
            "MB sent in a round": f"{some['bytes up'].iloc[0] / 1e6:.2f}",
            "seconds of a round": f"{np.median(np.concatenate(some['seconds'].tolist())):.2f}",
            "peak memory, MB": f"{some['peak'].median():,.0f}",
        }
        for way, some in runs.groupby("way", sort=False)
    ]
    setting = (
        "A BERT of 4 layers of width 256 classifies texts of 64 tokens; 5 of 20 clients make 4 local steps of 16 texts "
        f"in a round, on {os.cpu_count()} processors. `python analysis/lora.py OUTPUT`."
    )
    (output / "lora.md").write_text(f"# What LoRA takes\n\n{setting}\n\n{markdown(pd.DataFrame(rows))}\n")
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
