"""Small models of the papers: linear and logistic regression, MLP, LeNet-5 and FedTrip's CNN.

Convolutions keep their weights channels-last, because most kernels on a CPU are fastest with that layout.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.models.pooling import conv_relu_pool


def image_shape(input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Checks that a model's inputs are images, and returns their numbers of channels, rows (height) and columns
    (width). Raises ``ValueError`` if ``input_shape`` is not ``(channels, height, width)`` with at least ``least`` x
    ``least`` pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"it takes images [channels, height, width] of at least {least} x {least}, not inputs {input_shape}"
        )
    channels, height, width = input_shape
    return channels, height, width


class Logistic(nn.Module):
    """Multinomial logistic regression: one linear layer, whose loss is cross-entropy.

    Inputs ``[b, *input_shape]`` are flattened; outputs are logits ``[b, classes]``.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.flatten(1))
        return x


class Linear(Logistic):
    """Linear regression on one-hot labels, as in the paper of pFedMo: one linear layer, whose loss is the mean squared
    error over classes. For targets that are no classes (``task.kind=regression``) it is linear regression on these.

    Inputs ``[b, *input_shape]`` are flattened; outputs are ``[b, classes]``.
    """

    @staticmethod
    def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return (logits.view(targets.shape) - targets).square().view(len(targets), -1).mean(1)
        one_hot = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
        return (logits - one_hot.to(logits.dtype)).square().mean(1)


class MLP(nn.Module):
    """A multi-layer perceptron with ReLU. By default it has one hidden layer of 100 units, like the MLP of FedTrip's
    paper: 784-100-10 for MNIST, 79,510 parameters.

    ``hidden`` lists the sizes of the layers between input and output. Inputs ``[b, *input_shape]`` are flattened;
    outputs are logits ``[b, classes]``.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: list[int] | None = None) -> None:
        super().__init__()
        hidden = [100] if hidden is None else hidden
        if not isinstance(hidden, list) or not all(type(size) is int and size > 0 for size in hidden):
            raise ValueError(f"hidden must be a list of positive whole numbers, not {hidden!r}")
        sizes = [math.prod(input_shape), *hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x


class LeNet5(nn.Module):
    """LeNet-5: two convolutions with 5 x 5 kernels, then linear layers of 120, 84 and as many outputs as classes.

    It maps images ``[b, channels, height, width]`` of at least 12 x 12 pixels to logits ``[b, classes]``. The
    convolutions have 6 and 16 channels, and each is followed by ReLU and 2 x 2 max-pooling. The first one pads its
    input by two pixels on each side. The network is that of LeCun et al.: Gradient-Based Learning Applied to Document
    Recognition, 1998, with ReLU and max-pooling in place of its activations and subsampling.

    Inputs that are not images, such as the 561 features of UCI-HAR, are laid out row by row in the smallest square that
    holds them. The rest of the square is 0. The paper of pFedMo trains LeNet-5 on them, but does not say how.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.side = 0 if len(input_shape) == 3 else math.ceil(math.sqrt(math.prod(input_shape)))
        channels, height, width = image_shape((1, self.side, self.side) if self.side else input_shape, least=12)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
        self.fc1 = nn.Linear(features, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        if self.side:
            x = x.flatten(1)
            x = F.pad(x, (0, self.side**2 - x.shape[1])).view(-1, 1, self.side, self.side)
        x = conv_relu_pool(x, self.conv1)
        x = conv_relu_pool(x, self.conv2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc3(F.relu(self.fc2(x)))
        return x


class FedTripCNN(nn.Module):
    """The CNN of FedTrip's paper (lenet5 in the framework Plato): LeNet-5 whose third layer is a convolution, of 120
    channels and 5 x 5 kernels.

    It maps images of at least 28 x 28 pixels to logits ``[b, classes]``. ``input_shape`` is (channels, height, width).
    For 28 x 28 pixels it has as many parameters as LeNet-5.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, least=28)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.conv3 = nn.Conv2d(16, 120, 5)
        height, width = (height // 2 - 4) // 2 - 4, (width // 2 - 4) // 2 - 4
        self.fc1 = nn.Linear(120 * height * width, 84)
        self.fc2 = nn.Linear(84, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = conv_relu_pool(x, self.conv1)
        x = conv_relu_pool(x, self.conv2)
        x = F.relu(_conv(x, self.conv3))
        x = self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))
        return x


def _conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns ``conv(x)``. If the images are as large as the kernels, it is computed as a linear layer.

    In training the linear layer takes 0.4 of the time. Without gradients, ``conv`` itself is called.
    """
    if x.shape[2:] != conv.kernel_size or not torch.is_grad_enabled():
        x = conv(x)
        return x
    rows, weight = (tensor.permute(0, 2, 3, 1).flatten(1) for tensor in (x, conv.weight))
    return F.linear(rows, weight, conv.bias)[:, :, None, None]
