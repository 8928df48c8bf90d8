"""GHBM's models for CIFAR-10 and CIFAR-100: a CNN like LeNet-5, and ResNet-20 with GroupNorm.

Sizes, norm and initial weights are those of the authors' code (R. Zaccone et al.: Communication-Efficient Heterogeneous
Federated Learning with Generalized Heavy-Ball Momentum, TMLR 2025). Weights are kept channels-last: with that layout
a step on a CPU takes 0.7 (CNN) and 0.8 to 0.9 (ResNet-20) of the time, as long as gradients keep it too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.models.small import image_shape

GROUPS = 2
"""The number of groups of each GroupNorm."""


class GHBMCNN(nn.Module):
    """The CNN that the authors of GHBM (Zaccone et al., TMLR 2025) use for CIFAR: two convolutions of 64 channels, each
    with 5 x 5 kernels, ReLU and 2 x 2 max-pooling, then three linear layers.

    It maps images of at least 16 x 16 pixels to logits ``[b, classes]``. ``input_shape`` is (channels, height, width).
    The linear layers have 384, 192 and ``classes`` outputs. It has 797,962 parameters for CIFAR-10.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, least=16)
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        features = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
        self.fc1 = nn.Linear(features, 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU after max-pooling gives the same numbers as before it, with a quarter of the work
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc3(F.relu(self.fc2(x)))
        return x


class ResNet20(nn.Module):
    """ResNet-20 for small images, with channels 16, 32 and 64, and with GroupNorm of two groups in place of BatchNorm.

    It maps images of at least 4 x 4 pixels to logits ``[b, classes]``. ``input_shape`` is (channels, height, width). It
    is the network of K. He et al.: Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2: a convolution,
    three stages of three blocks, shortcuts without parameters (option A), the mean over the image, and one linear
    layer. Weights are drawn from N(0, 2 / fan-in). It has 269,722 parameters for CIFAR-10.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, least=4)
        self.conv = _conv3(channels, 16)
        self.norm = nn.GroupNorm(GROUPS, 16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(before, width) for before, width in pairwise(widths)))
        self.linear = nn.Linear(64, classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        x = self.linear(x.mean((2, 3)))
        return x


class Block(nn.Module):
    """A block of ResNet-20: two 3 x 3 convolutions with a shortcut around them. It maps ``channels`` input channels to
    ``width`` output channels; if these numbers differ, it also halves the height and width of the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = _conv3(channels, width, stride=1 if channels == width else 2)
        self.norm1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = _conv3(width, width)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.new = width - channels

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.new:
            # every second pixel, and channels of zeros before and behind; it is pooled with windows of 1 x 1, because
            # the gradient of a slice would not be channels-last
            x = F.pad(F.avg_pool2d(x, 1, stride=2), (0, 0, 0, 0, self.new // 2, self.new // 2))
        return F.relu(y + x)


def _conv3(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
