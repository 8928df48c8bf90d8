"""Image files in the formats of federated splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

USERS, CLASSES, SIZE = 6, 4, 16


def picture(path: Path, number: int, side: tuple[int, int] = (40, 28), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 60, (*side[::-1], 3)) + 40 * (number % CLASSES)
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(path)


def split(folder: Path, deep: bool = True, images: int = 60) -> Path:
    """Writes a federated split; every sixth image is a test image."""
    rows: dict[str, list[str]] = {"train": ["user_id,image_id,class"], "test": ["image_id,class"]}
    for i in range(images):
        name, part = f"{i:03x}{'9' * 13}", "test" if i % 6 == 5 else "train"
        picture(folder / part / ("/".join([*name[:3], name]) + ".jpg" if deep else f"{name}.jpg"), i)
        rows[part].append(f"u{i % USERS},{name},{i % CLASSES}" if part == "train" else f"{name},{i % CLASSES}")
    for part, lines in rows.items():
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return folder
