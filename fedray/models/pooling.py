"""Convolution, ReLU and max-pooling of small images on a CPU. With them, rounds of LeNet-5 take 0.75 of the time.

torch's kernels put the channels of a pixel into a vector register, which holds 16 numbers, but a LeNet has one channel
in its first layer and six in the next. Here neighbouring pixels fill the register: a convolution with stride 2 and
shifted copies of the kernels computes two rows (or columns, or both) as different channels. So max-pooling after the
first layer is a maximum of four images, and the gradient of the second layer's input is computed two rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

REGISTER = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0
"""The number of channels that fill a register, or 0 on processors on which torch's own kernels are faster."""

_positive = torch.ops.aten.threshold_backward.default
"""``_positive(y, x, 0)`` is y where x > 0, else 0. Multiplying by a mask takes three times as long."""
_pool = torch.ops.aten.max_pool2d_with_indices.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default
_convolution_backward = torch.ops.aten.convolution_backward.default


def conv_relu_pool(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns ``max_pool2d(relu(conv(x)), 2)`` of images ``x [b, c, h, w]``, for a convolution ``conv`` of stride 1
    with bias. In training of small networks on a CPU, this is faster than the three operations of torch.

    If entries of a pooling window are equal, the gradient may go to another one of them than in torch.
    """
    # ReLU comes last, on the smaller image: it gives the same as before the maxima
    if not torch.is_grad_enabled() or not _is_supported(x, conv):
        return F.relu(_max_pool2(conv(x)))
    weight, bias, padding = conv.weight, conv.bias, conv.padding
    if not x.requires_grad:
        pooled: Tensor = _FirstLayer.apply(x, weight, bias, padding)
    else:
        pooled = _Layer.apply(x.contiguous(memory_format=torch.channels_last), weight, bias, padding)
    return pooled


def _is_supported(x: Tensor, conv: nn.Conv2d) -> bool:
    _, channels, height, width = x.shape
    even = height % 2 == width % 2 == 0 and conv.kernel_size[0] % 2 == conv.kernel_size[1] % 2 == 1
    ours = even and channels < REGISTER and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    # a function that torch.func could transform would take 50 us longer
    return ours and not torch._C._are_functorch_transforms_active()


def _max_pool2(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.shape[2] % 2 or x.shape[3] % 2:
        return F.max_pool2d(x, 2)
    rows = torch.maximum(x[:, :, 0::2], x[:, :, 1::2])
    return torch.maximum(rows[..., 0::2], rows[..., 1::2])


def _contiguous_copy(weight: Tensor) -> Tensor:
    """Returns a copy of ``weight`` in contiguous layout. ``contiguous()`` would keep the strides of weights with a
    single channel."""
    return weight.clone(memory_format=torch.contiguous_format)


def _kernels_of_two_rows(weight: Tensor) -> Tensor:
    """Returns kernels ``[2 * out, in, k + 1, k]``, made of ``weight [out, in, k, k]``, with which a convolution of
    stride 2 computes two rows of the image at once; the lower row is in the second half of the channels."""
    return torch.cat((F.pad(weight, (0, 0, 0, 1)), F.pad(weight, (0, 0, 1, 0))))


def _kernels_of_two_columns(weight: Tensor) -> Tensor:
    """Returns kernels ``[2 * out, in, k, k + 1]``, made of ``weight [out, in, k, k]``, with which a convolution of
    stride 2 computes two columns of the image at once; the right column is in the second half of the channels."""
    return torch.cat((F.pad(weight, (0, 1)), F.pad(weight, (1, 0))))


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]) -> Tensor:
    """Returns the gradient of a convolution's weights; ``grad`` is the gradient of the convolution's output."""
    options = [stride, stride], padding, [1, 1], False, [0, 0], 1, [False, True, False]
    gradient: Tensor = _convolution_backward(grad, x, weight, None, *options)[1]
    return gradient


class _FirstLayer(Function):
    """The autograd function of :func:`conv_relu_pool` for a network's first layer, whose images are samples and need no
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        kernels = _kernels_of_two_columns(_kernels_of_two_rows(_contiguous_copy(weight)))
        four = F.conv2d(x, kernels, stride=2, padding=padding)
        two = torch.maximum(*four.chunk(2, 1))
        pooled: Tensor = torch.maximum(*two.chunk(2, 1)).add_(bias.view(-1, 1, 1)).relu_()
        ctx.save_for_backward(x, kernels, four, two, pooled)
        ctx.padding = padding
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x, kernels, four, two, pooled = ctx.saved_tensors
        grad = _positive(grad, pooled, 0)
        of_bias = grad.sum((0, 2, 3))
        for parts in (two, four):
            first, second = parts.chunk(2, 1)
            of_first = _positive(grad, first - second, 0)
            grad = torch.cat((of_first, grad - of_first), 1)
        left, right = _weight_gradient(grad, x, kernels, 2, ctx.padding).chunk(2)
        upper, lower = (left[..., :-1] + right[..., 1:]).chunk(2)
        return None, upper[:, :, :-1] + lower[:, :, 1:], of_bias, None


class _Layer(Function):
    """The autograd function of :func:`conv_relu_pool` for later layers: images are channels-last, and their gradient is
    computed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        image = F.conv2d(x, weight, padding=padding)
        pooled: Tensor
        pooled, places = _pool(image, [2, 2])
        pooled.add_(bias.view(-1, 1, 1)).relu_()
        ctx.save_for_backward(x, weight, image, places, pooled)
        ctx.padding = padding
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, image, places, pooled = ctx.saved_tensors
        grad = _positive(grad, pooled, 0)
        of_bias = grad.sum((0, 2, 3))
        grad = _pool_backward(grad, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        of_weight = _weight_gradient(grad, x, weight, 1, ctx.padding)
        kernels = _kernels_of_two_rows(_contiguous_copy(weight.flip(2, 3).transpose(0, 1)))
        padding = weight.shape[2] - 1 - ctx.padding[0], weight.shape[3] - 1 - ctx.padding[1]
        rows = F.conv2d(grad.contiguous(), kernels, stride=(2, 1), padding=padding).chunk(2, 1)
        return torch.stack(rows, 3).flatten(2, 3), of_weight, of_bias, None
