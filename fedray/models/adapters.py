"""Models of the libraries transformers and timm, by the names ``transformers:NAME`` and ``timm:NAME``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fedray.errors import UserError, near_miss
from fedray.models.small import image_shape

TRANSFORMERS, TIMM = "transformers:", "timm:"


def transformers_model(name: str) -> Callable[..., nn.Module]:
    """Returns a function that makes the model ``name`` of transformers: a folder of ``save_pretrained``, or one with a
    ``config.json`` alone, or a name on the hub. Its options are those of :func:`_of_transformers`."""
    made = partial(_of_transformers, name)
    made.__doc__ = f"{name} of transformers."
    return made


def timm_model(name: str) -> Callable[..., nn.Module]:
    """Returns a function that makes the model ``name`` of timm. Its options are those of :func:`_of_timm`. Raises
    :class:`UserError` if there is no such model."""
    known = _library("timm").list_models()
    if name not in known:
        raise UserError(f"model.name={TIMM}{name}: timm has no such model{near_miss(name, known)}")
    made = partial(_of_timm, name)
    made.__doc__ = f"{name} of timm."
    return made


class Logits(nn.Module):
    """A model of transformers that returns its logits alone. Inputs with names are its arguments of these names; a
    single array is its first argument, such as ``input_ids`` or ``pixel_values``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        logits: Tensor = self.model(*inputs, **named).logits
        return logits


def _of_transformers(
    name: str,
    input_shape: Any,
    classes: int,
    kind: Literal["auto", "sequence", "image", "token", "causal"] = "auto",
    pretrained: bool | None = None,
) -> nn.Module:
    """Makes a model of transformers.

    Args:
        name: A folder, or a name on the hub.
        input_shape: The shape of a sample's inputs; images have three dimensions.
        classes: The number of classes: of a sequence or an image, or of each token.
        kind: What is classified: a ``sequence`` (text), an ``image``, each ``token``, or with ``causal`` the next token
            after each; ``auto`` is an image or a sequence, as the inputs are.
        pretrained: Whether weights are read; otherwise they are drawn. Unset: if the folder has some, or the name is on
            the hub.
    """
    library = _library("transformers")
    autos = {
        "sequence": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification",
        "token": "AutoModelForTokenClassification", "causal": "AutoModelForCausalLM",
    }  # fmt: skip
    if kind not in ("auto", *autos):
        raise ValueError(f"kind must be one of auto, {', '.join(autos)}, not {kind!r}")
    is_image = not isinstance(input_shape, Mapping) and len(input_shape) == 3
    auto = getattr(library, autos[("image" if is_image else "sequence") if kind == "auto" else kind])
    folder = Path(name).expanduser()
    has_weights = not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    size = {} if kind == "causal" else {"num_labels": classes}
    with _quiet(library):
        if has_weights if pretrained is None else pretrained:
            return Logits(auto.from_pretrained(name, ignore_mismatched_sizes=True, **size))
        return Logits(auto.from_config(library.AutoConfig.from_pretrained(name, **size)))


def _of_timm(
    name: str, input_shape: tuple[int, ...], classes: int, pretrained: bool = False, **options: Any
) -> nn.Module:
    """Makes a model of timm for images of any number of channels. ``pretrained`` fetches weights from the hub;
    ``model.weights`` reads them from a file."""
    channels, height, width = image_shape(input_shape, 1)
    library = _library("timm")
    about = library.get_pretrained_cfg(name)
    if about is not None and about.fixed_input_size:
        options = {"img_size": (height, width), **options}
    module: nn.Module = library.create_model(
        name, pretrained=pretrained, num_classes=classes, in_chans=channels, **options
    )
    return module


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"model.name={name}:... needs the library {name}: pip install 'fedray[{name}]'") from None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hides the progress bars of transformers, and the lines in which it says which layers are new."""
    say = transformers.utils.logging
    before, bars = say.get_verbosity(), say.is_progress_bar_enabled()
    say.set_verbosity_error()
    say.disable_progress_bar()
    try:
        yield
    finally:
        say.set_verbosity(before)
        if bars:
            say.enable_progress_bar()
