"""Models of the libraries transformers and timm, by the names ``transformers:NAME`` and ``timm:NAME``."""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from fedray.errors import UserError, near_miss
from fedray.models.small import image_shape
from fedray.util.files import in_home

TRANSFORMERS, TIMM = "transformers:", "timm:"

OF_THE_HUB = {"token", "cache_dir", "local_files_only", "force_download", "proxies", "trust_remote_code"}
"""Arguments of the library that it would take for no key of a model's configuration."""

DRAWN = "_drawn_for_fedray"
"""The attribute of a model of transformers with the names of its weights that were drawn at random beside others."""


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
    if name.partition(".")[0] not in known:
        raise UserError(f"model.name={TIMM}{name}: timm has no such model{near_miss(name, known)}")
    made = partial(_of_timm, name)
    made.__doc__ = f"{name} of timm."
    return made


class LogitsOnly:
    """Makes a model of transformers return its logits alone. It is a base class beside that of the model, so that the
    names of layers stay those of the library."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        logits: Tensor = super().forward(*inputs, **named).logits  # type: ignore[misc]
        return logits


def _of_transformers(
    name: str,
    input_shape: Any,
    classes: int,
    kind: Literal["auto", "sequence", "image", "token", "causal"] = "auto",
    pretrained: bool | None = None,
    **options: Any,
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
        **options: Further keys of the model's configuration, such as ``pad_token_id``.
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
    folder, size = in_home(name), {} if kind == "causal" else {"num_labels": classes}
    if name.startswith(("/", "~", ".")) and not folder.is_dir():
        raise ValueError(f"there is no folder {folder} on {platform.node()}")
    name = str(folder) if folder.is_dir() else name
    if isinstance(pretrained, str):
        raise ValueError(f"model.pretrained must be true or false, not {pretrained!r}")
    for key in OF_THE_HUB & options.keys():
        raise ValueError(f"model.{key} is for the library itself: set it up outside")
    # which of several models the folder or name means, for the configuration as for the weights
    which = {key: options.pop(key) for key in ("revision", "subfolder") if key in options}
    inner = folder / which.get("subfolder", "")
    has_weights = not folder.is_dir() or any(inner.glob("*.safetensors")) or any(inner.glob("pytorch_model*.bin"))
    with _quiet(library):
        config, unknown = library.AutoConfig.from_pretrained(
            name, trust_remote_code=False, return_unused_kwargs=True, **which, **size, **options
        )
        for key in unknown:
            raise ValueError(f"model.{key}: its configuration has no such key{near_miss(key, config.to_dict())}")
        drawn: list[str] = []
        if not (has_weights if pretrained is None else pretrained):
            module: nn.Module = auto.from_config(config, trust_remote_code=False)
        else:
            module, found = auto.from_pretrained(
                name, config=config, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True,
                **which,
            )  # fmt: skip
            drawn = _drawn(module, found)
    # of a class of transformers
    kind_of = type(module)
    parts = {"__module__": kind_of.__module__, DRAWN: tuple(drawn)}
    module.__class__ = type(kind_of.__name__, (LogitsOnly, kind_of), parts)
    return module


def _drawn(module: nn.Module, found: Mapping[str, Any]) -> list[str]:
    """Returns the names of those of a module's weights that a folder lacks, or has in other shapes, and that are
    therefore drawn at random: the layers for a task, behind the model's body. ``found`` is what transformers says about
    them. Raises ValueError if the body itself lacks some."""
    drawn = [key if isinstance(key, str) else key[0] for key in (*found["missing_keys"], *found["mismatched_keys"])]
    # without a name for the body all of the model is
    body = f"{module.base_model_prefix}." if getattr(module, "base_model_prefix", "") else ""
    if lacking := sorted(name for name in drawn if name.startswith(body)):
        raise ValueError(
            f"its weights do not fit: {lacking[0]}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''} would "
            "be drawn at random; model.pretrained=false draws all"
        )
    return sorted(drawn)


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
