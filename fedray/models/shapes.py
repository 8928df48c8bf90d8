"""What models take as inputs."""

from __future__ import annotations


def image_shape(input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Returns channels, height and width; raises ``ValueError`` unless inputs are images of at least ``least x least``
    pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"it takes images [channels, height, width] of at least {least} x {least}, not inputs {input_shape}"
        )
    channels, height, width = input_shape
    return channels, height, width
