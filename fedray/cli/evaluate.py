"""The command ``fedray evaluate``: evaluates a saved model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedray.cli.settings import local
from fedray.errors import UserError
from fedray.evaluating import SPLITS
from fedray.util.files import is_there
from fedray.util.uris import is_uri

DESCRIPTION = """\
Evaluate a saved model: its loss and metrics, those of each class and each
client, and the confusion matrix.

A run's folder, or its URI, stands for its final model. A file in it, such as
model-best.safetensors, is evaluated by the run's configuration too. For a file
from elsewhere, say what it is: model.name=... data.source=...

With another data.source than the run's, data.* are what you say here. The keys
that count are data.*, task.*, model.*, run.seed (by which clients get their
shares of the test set), train.precision, and engine.device, threads,
portable_bits and channels_last."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray evaluate`` to the command line, with its arguments and help. The command evaluates a
    saved model. ``commands`` is what ``add_subparsers`` of argparse has returned."""
    parser = commands.add_parser(
        "evaluate",
        help="evaluate a saved model on any data",
        description=DESCRIPTION,
        usage="fedray evaluate RUN | FILE [CONFIG.yaml] [key=value ...] [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--split", choices=SPLITS, default="test", help="the samples: test (default), train, validation"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=local,
        help="folder of the results; unless set, one in evaluations/, beside the model or, if that has a URI, here",
    )
    parser.add_argument(
        "--features", metavar="N", type=int, default=0,
        help="also write the representations of N samples, and draw them by t-SNE (needs scikit-learn)",
    )  # fmt: skip
    parser.set_defaults(function=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    words = [word for word in options.settings if "=" not in word or is_there(word) or is_uri(word)]
    overrides = [word for word in options.settings if word not in words]
    if not words or len(words) > 2:
        given = f"; not {' '.join(words)}" if words else ""
        raise UserError(f"give a run's folder or a model's file, and one config file at most{given}")
    from fedray.tracking.progress import Display

    display = Display()
    display.say("fedray: loading ...")
    from fedray.evaluating.evaluate import evaluate
    from fedray.evaluating.evaluation_files import default_folder, lines, write

    found = evaluate(
        words[0], *words[1:], split=options.split, overrides=overrides, features=options.features, say=display.say
    )
    for line in lines(found):
        print(line)
    beside = Path("evaluations") if is_uri(words[0]) else found.folder
    folder = options.output or default_folder(found, beside)
    names = [path.name for path in write(found, folder)]
    print(f"wrote {', '.join(names)} into {folder}")
    if options.features and "tsne.png" not in names:
        print("no picture of the features: it needs scikit-learn (pip install 'fedray[tsne]') and 10 samples")
    return 0
