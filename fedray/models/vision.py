"""Larger networks for images: AlexNet, FireNet, and torchvision's VGG-16, ResNets, MobileNetV2 and ViT-B/16.

``torchvision:NAME`` is any other classifier of torchvision. All models have random initial weights; ``model.weights``
loads trained ones. torchvision is imported only when such a model is made, because the import takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedray.errors import UserError, near_miss
from fedray.models.small import image_shape

TORCHVISION = "torchvision:"
"""The beginning of the names of torchvision's models in configurations."""

TWO_OUTPUTS = ("googlenet", "inception_v3")
"""The classifiers that return further outputs in training unless ``aux_logits`` is false."""


class AlexNet(nn.Module):
    """AlexNet for small images, 2,729,290 parameters for CIFAR-10.

    It maps images of at least 9 x 9 pixels to logits ``[b, classes]``; ``input_shape`` is (channels, height, width). It
    has five convolutions, of which the first has 7 x 7 kernels and the first two are followed by max-pooling, then the
    mean over all pixels, and two linear layers with dropout before each. A. Krizhevsky: One weird trick for
    parallelizing convolutional neural networks. arXiv 1404.5997, 2014, with the layers of the code of FedTrip's
    authors.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, *_ = image_shape(input_shape, least=9)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 7, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, classes)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class FireNet(nn.Module):
    """FireNet, three convolutions and three linear layers for photographs of fire, 646,818 parameters for 2 classes.

    It maps images of at least 22 x 22 pixels (64 x 64 in the paper) to logits ``[b, classes]``; ``input_shape`` is
    (channels, height, width). Each convolution has 3 x 3 kernels, ReLU, 2 x 2 average-pooling and dropout. A. Jadon, M.
    Omama, A. Varshney, M. S. Ansari, R. Sharma: FireNet: A Specialized Lightweight Fire & Smoke Detection Model for
    Real-Time IoT Applications. arXiv 1905.11922, 2019.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, least=22)
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(0.5)]
            height, width = (height - 2) // 2, (width - 2) // 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * height * width, 256), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def vgg16(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-16 of torchvision, without BatchNorm, 134,301,514 parameters for 10 classes.

    The function returns the network with random initial weights, for images of at least 32 x 32 pixels; ``input_shape``
    is (channels, height, width). Features of images smaller than 224 x 224 are scaled to 7 x 7 by average-pooling. K.
    Simonyan, A. Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition. ICLR 2015, configuration
    D.
    """
    return _made("vgg16", input_shape, classes, least=32)


def resnet18(input_shape: tuple[int, ...], classes: int, stem: Literal["small", "imagenet"] = "small") -> nn.Module:
    """ResNet-18 with BatchNorm, 11,173,962 parameters for 10 classes, with first layers for small images unless
    ``stem=imagenet``.

    The function returns the network with random initial weights, for ``input_shape`` (channels, height, width). For
    small images, the first layers (the stem) are one convolution with 3 x 3 kernels, which keeps the image's size.
    ImageNet's stem halves the size twice, by a convolution with 7 x 7 kernels and max-pooling; then the network is
    torchvision's, 11,181,642 parameters. K. He, X. Zhang, S. Ren, J. Sun: Deep Residual Learning for Image Recognition.
    CVPR 2016.
    """
    return _with_stem(_made("resnet18", input_shape, classes, least=8), stem)


def resnet50(input_shape: tuple[int, ...], classes: int, stem: Literal["small", "imagenet"] = "small") -> nn.Module:
    """ResNet-50 with BatchNorm, 23,520,842 parameters for 10 classes, with first layers for small images unless
    ``stem=imagenet``.

    The function returns the network with random initial weights, for ``input_shape`` (channels, height, width). The
    paper and the stems (first layers) are those of ``resnet18``. MOON and FedSiam-DA train it on CIFAR with further
    heads (``model.head``).
    """
    return _with_stem(_made("resnet50", input_shape, classes, least=8), stem)


def mobilenet_v2(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """MobileNetV2 of torchvision, with BatchNorm and dropout, 3,504,872 parameters for 1,000 classes.

    The function returns the network with random initial weights, for images of at least 32 x 32 pixels, whose height
    and width it divides by 32; ``input_shape`` is (channels, height, width). M. Sandler, A. Howard, M. Zhu, A.
    Zhmoginov, L.-C. Chen: MobileNetV2: Inverted Residuals and Linear Bottlenecks. CVPR 2018.
    """
    return _made("mobilenet_v2", input_shape, classes, least=32)


def vit_b_16(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Vision Transformer ViT-B/16 of torchvision for square images of any multiple of 16 pixels, 86 million parameters.

    The function returns the network with random initial weights, for ``input_shape`` (channels, size, size). A.
    Dosovitskiy et al.: An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale. ICLR 2021.
    """
    return _made("vit_b_16", input_shape, classes, least=16)


def torchvision_model(name: str) -> Callable[..., nn.Module]:
    """Returns a function that makes the torchvision classifier ``name``, such as ``resnet34``, which configurations
    name ``torchvision:resnet34``. The function takes ``input_shape`` (channels, height, width), ``classes`` (their
    number) and the arguments of the classifier's class in torchvision as options. The module that it returns has random
    initial weights.

    Raises :class:`UserError` if torchvision has no such classifier.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model.name={TORCHVISION}{name}: torchvision has no such classifier{near_miss(name, known)}")
    made = partial(_classifier, name)
    made.__doc__ = f"{name} of torchvision, as it is there. Its options are those of its class."
    return made


def _classifier(name: str, input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    return _made(name, input_shape, classes, **options)


def _made(name: str, input_shape: tuple[int, ...], classes: int, least: int = 1, **options: Any) -> nn.Module:
    """Makes a torchvision classifier for images of at least ``least`` x ``least`` pixels, with random initial
    weights."""
    from torchvision.models import get_model_builder

    channels, height, width = image_shape(input_shape, least)
    builder = get_model_builder(name)
    if name in TWO_OUTPUTS:
        options = {"aux_logits": False, "init_weights": True, **options}
    if name.startswith("vit_"):
        if height != width:
            raise ValueError(f"it takes square images, not {height} x {width}")
        options = {"image_size": height, **options}
    module: nn.Module = builder(weights=None, num_classes=classes, **options)
    if channels != 3:
        _take_channels(module, channels)
    return module


def _take_channels(module: nn.Module, channels: int) -> None:
    """Replaces the weights of the first convolution of ``module``, which is made for colour images, so that it takes
    ``channels`` input channels. The new weights are random."""
    first = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    first.in_channels = channels
    first.weight = nn.Parameter(first.weight.new_empty(first.out_channels, channels, *first.kernel_size))
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")


def _with_stem(module: nn.Module, stem: str) -> nn.Module:
    if stem not in ("small", "imagenet"):
        raise ValueError(f"stem must be small or imagenet, not {stem!r}")
    if stem == "small":
        before = module.conv1
        assert isinstance(before, nn.Conv2d)
        module.conv1 = nn.Conv2d(before.in_channels, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
        module.maxpool = nn.Identity()
    return module
