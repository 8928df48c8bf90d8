"""How fast images reach the model: from fedray's mapped files, and through torchvision's ImageFolder and a DataLoader.

Both make the same: batches of 64 images in random order, scaled, cropped, and normalised as float32. fedray has read
and scaled the files before, once and for all runs (``mapping_seconds``); its batches are gathered in this process by
one thread, as each of its actors does it. The DataLoader reads the files anew in each epoch, in two processes, which
stay from epoch to epoch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import QUIET, ProcessTree, Usage, median_ratio

BATCH, WORKERS = 64, 2
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def class_folders(data: Path, count: int, target: Path) -> Path:
    """Returns a folder with a folder for each class: ``data`` itself, or its ``train``, or one in ``target`` with links
    to the first ``count`` photographs of ``train.csv``."""
    if not (data / "train.csv").exists():
        return data / "train" if (data / "train").is_dir() else data
    table = pd.read_csv(data / "train.csv", dtype=str).iloc[:count]
    for image, label in zip(table["image_id"], table["class"], strict=True):
        (target / label).mkdir(exist_ok=True)
        found = data / "train" / image[0] / image[1] / image[2] / f"{image}.jpg"
        os.symlink(found.resolve(), target / label / f"{image}.jpg")
    return target


class Mapped:
    """fedray's way: the same files, mapped once in a cache of their own."""

    def __init__(self, files: Any, size: int) -> None:
        from fedray.core.samples import Samples
        from fedray.data.sources.federated_csv import SCALE, SHIFT
        from fedray.data.sources.images import ImageFiles
        from fedray.data.storage.lazy import LazyItems
        from fedray.data.storage.mapping import folder_of, map_arrays
        from fedray.engine.state.packing import tensor_over

        paths, labels = [path for path, _ in files.samples], np.array(files.targets)
        items = LazyItems(
            ImageFiles(Path(files.root), [os.path.relpath(p, files.root) for p in paths], labels, size), ""
        )
        began = time.perf_counter()
        found = map_arrays({"x": items, "y": labels}, folder_of(f"input-rates-{os.getpid()}"))
        self.mapping_seconds = time.perf_counter() - began
        scale, shift = (torch.from_numpy(each.astype(np.float32)) for each in (SCALE, SHIFT))
        self.samples = Samples(tensor_over(found["x"]), tensor_over(found["y"]), scale, shift)
        self.rng = np.random.default_rng(0)

    def epoch(self) -> Iterator[Any]:
        order = self.rng.permutation(len(self.samples.y))
        for start in range(0, len(order), BATCH):
            raw, y = self.samples.raw(order[start : start + BATCH])
            yield self.samples.inputs(raw), y


class Loader:
    """torchvision's and torch's way."""

    def __init__(self, files: Any) -> None:
        self.loader = torch.utils.data.DataLoader(
            files, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
        )

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)


def seconds_of(epoch: Callable[[], Iterator[Any]], images: int, least: float) -> float:
    """Returns the seconds of an epoch, in the mean of as many as last ``least`` seconds."""
    began, epochs = time.perf_counter(), 0
    while epochs == 0 or time.perf_counter() - began < least:
        seen = 0
        for x, _ in epoch():
            seen += len(x)
        if seen != images:
            raise RuntimeError(f"{seen} of {images} images came")
        epochs += 1
    return (time.perf_counter() - began) / epochs


def compare(data: Path, size: int, count: int, repeats: int, row: Callable[..., None]) -> dict[str, Any]:
    """Measures both in alternating order, hands each sample to ``row``, and returns the summary."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as links, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        folder = class_folders(data, count, Path(links))
        files = ImageFolder(str(folder), transforms.Compose([*steps, transforms.Normalize(MEAN, DEVIATION)]))
        mapped = Mapped(files, size)
        systems = {"mapped": mapped.epoch, "loader": Loader(files).epoch}
        usage, pairs = Usage(ProcessTree()), []
        for repeat in range(-1, repeats):  # the first pair is the warm-up
            pair: dict[str, Any] = {"kept": repeat >= 0}
            for name in list(systems)[:: 1 if repeat % 2 else -1]:
                usage.start()
                seconds = seconds_of(systems[name], len(files), 1.0)
                foreign = usage.stop()["foreign"]
                pair[name], pair["kept"] = seconds, pair["kept"] and foreign <= QUIET
                row(system=name, repeat=repeat, images_per_second=len(files) / seconds, foreign=foreign)
            if repeat >= 0:
                pairs.append(pair)
    found: dict[str, Any] = {
        "data": str(data), "images": len(files), "size": size, "mapping_seconds": mapped.mapping_seconds
    }  # fmt: skip
    for name, chosen in (("kept", [pair for pair in pairs if pair["kept"]]), ("all", pairs)):
        found[name] = {"pairs": len(chosen)}
        if chosen:
            each = {system: [len(files) / pair[system] for pair in chosen] for system in systems}
            medians = {f"{system}_images_per_second": float(np.median(each[system])) for system in systems}
            found[name] |= medians | {"mapped_over_loader": median_ratio(each["mapped"], each["loader"])}
    return found
