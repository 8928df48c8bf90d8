"""The steps of uploads that come with fedray (``train.upload``), by the names that the configuration gives them."""

from __future__ import annotations

from fedray.core.upload import UploadStep
from fedray.uploads.clip import Clip
from fedray.uploads.noise import Noise
from fedray.uploads.qsgd import QSGD
from fedray.uploads.quantize import Quantize
from fedray.uploads.randk import RandK
from fedray.uploads.sign import Sign
from fedray.uploads.topk import TopK

STEPS: dict[str, type[UploadStep]] = {
    "clip": Clip, "topk": TopK, "randk": RandK, "qsgd": QSGD, "quantize": Quantize, "sign": Sign, "noise": Noise,
}  # fmt: skip
