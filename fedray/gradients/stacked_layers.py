"""Faster layers on GPUs for stacks (clients that are computed at once): convolutions as batched products, and fewer
operations.

torch.func.vmap combines the clients' convolutions into one grouped convolution, for which cuDNN is slow: on an H200 it
took three quarters of LeNet-5's time. Here the windows of an image are copied side by side, and a convolution is one
batched product of the windows with the clients' kernels. Its gradients are two more such products. All sums are taken
in a fixed order, so each run gives the same bits, as with torch's deterministic kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

MOST = 2**28
"""The largest number of entries in the windows of a layer at a time (1 GiB of float32). The clients of a larger layer
are computed in parts."""

LEAST_PLACES = 64
"""The number of pixels of an output image from which on each sample has a matrix product of its own. One product for
many samples has to be transposed, but products with few pixels leave most of a GPU's tiles empty."""


Mapped = tuple[tuple[Tensor, ...], tuple[int, ...]]
"""The type of what ``torch.autograd.Function.vmap`` returns: the outputs, and in which dimension of each the clients
are."""


class StackedLayers(TorchFunctionMode):
    """A context for forward passes and losses of many clients at once, within torch.func.vmap, that makes some layers
    faster. Convolutions whose weights differ between clients become batched products of matrices. Linear layers and
    cross-entropy take fewer operations than vmap would make of them.

    With ``traced``, convolutions consist of operations that a compiler can fuse, and otherwise of as few operations as
    possible. Grouped and three-dimensional convolutions are left to torch.
    """

    def __init__(self, traced: bool = False) -> None:
        super().__init__()
        self._traced = traced

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        ours: dict[Any, Callable[..., Any]] = {
            torch.conv2d: self._conv2d,
            torch.conv1d: self._conv1d,
            F.linear: _linear,
            F.cross_entropy: _cross_entropy,
        }
        return ours.get(func, func)(*args, **(kwargs or {}))

    def _conv2d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        if not _is_ours(input, weight, groups, 4):
            return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
        geometry = _Geometry(weight.shape[2:], _pair(stride), (0, 0), _pair(dilation), self._traced)
        if padding == "same":
            input = F.pad(input, geometry.same_padding())
        elif padding != "valid":
            geometry = replace(geometry, padding=_pair(padding))
        return _convolution(input, weight, bias, geometry)

    def _conv1d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        if not _is_ours(input, weight, groups, 3):
            return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
        flat = (1, _single(stride)), padding if isinstance(padding, str) else (0, _single(padding))
        return self._conv2d(input[:, :, None], weight[:, :, None], bias, *flat, (1, _single(dilation)))[:, :, 0]


@dataclass(frozen=True)
class _Geometry:
    """How the windows of a 2-d convolution lie in an image. Each pair has a value for rows and a value for columns.
    ``traced`` says that a compiler traces the operations."""

    kernel: Sequence[int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    traced: bool

    def same_padding(self) -> list[int]:
        """Returns how many pixels must be added on each side of an image, in the order of ``F.pad``, so that the
        convolution's output has the size of its input (``padding="same"``)."""
        whole = [reach * (size - 1) for reach, size in zip(self.dilation, self.kernel, strict=True)]
        return [part for total in reversed(whole) for part in (total // 2, total - total // 2)]

    def output_size(self, image: Sequence[int]) -> tuple[int, int]:
        """Returns the number of rows and columns of the convolution's output for an ``image`` with these numbers of
        rows and columns."""
        rows, columns = (
            (image[d] + 2 * self.padding[d] - self.dilation[d] * (self.kernel[d] - 1) - 1) // self.stride[d] + 1
            for d in (0, 1)
        )
        return rows, columns

    def windows(self, x: Tensor, joined: int) -> Tensor:
        """Copies the windows of images (the parts of an image under the kernel) side by side, as columns of matrices,
        so that a convolution becomes a product of matrices.

        ``x [C, n, channels, h, w]`` are the images of C clients. The result is
        ``[C, n / joined, channels * kernel, joined * places]``, where ``kernel`` is the number of pixels in a window
        and ``places`` the number of windows in an image. Each matrix has the windows of ``joined`` images.
        """
        if any(self.padding):
            x = F.pad(x, (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        for d in (0, 1):
            x = x.unfold(3 + d, self.dilation[d] * (self.kernel[d] - 1) + 1, self.stride[d])
        x = torch.unflatten(x[..., :: self.dilation[0], :: self.dilation[1]], 1, (-1, joined))
        return x.permute(0, 1, 3, 6, 7, 2, 4, 5).flatten(2, 4).flatten(3)

    def fold(self, columns: Tensor, image: Sequence[int]) -> Tensor:
        """Adds up windows to images, which is the gradient of :meth:`windows`: returns images ``[m, channels, *image]``
        in which each pixel is the sum of its entries in ``columns [m, channels * kernel, places]``."""
        if not self.traced:
            folded: Tensor = torch.ops.aten.col2im(
                columns, image, self.kernel, self.dilation, self.padding, self.stride
            )
            return folded
        # a compiler's own col2im adds atomically, or is slow where atomic additions are forbidden
        parts = torch.unflatten(torch.unflatten(columns, 1, (-1, *self.kernel)), -1, self.output_size(image))
        (row, is_row), (column, is_column) = (self._window_of(d, image, columns.device) for d in (0, 1))
        rows, offsets = row[:, None, :, None], [torch.arange(size, device=columns.device) for size in self.kernel]
        found = parts[:, :, offsets[0][:, None], offsets[1], rows, column[None, :, None, :]]
        return torch.where(is_row[:, None, :, None] & is_column[:, None, :], found, 0).sum((-2, -1))

    def _window_of(self, d: int, image: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns for each row of an image, and each row of the kernel (columns if ``d`` is 1), which window has that
        row of the kernel at that row of the image: the number of the window, and whether there is such a window, both
        ``[size, kernel]``."""
        begins = torch.arange(image[d], device=device)[:, None] + self.padding[d]
        begins = begins - self.dilation[d] * torch.arange(self.kernel[d], device=device)
        window, last = begins // self.stride[d], self.output_size(image)[d] - 1
        return window.clamp(0, last), (begins % self.stride[d] == 0) & (window >= 0) & (window <= last)


class _Convolution(Function):
    """The autograd function of the convolutions of C clients at once: of images ``x [C, n, channels, h, w]`` with
    ``weight [C, out, channels, kernel_h, kernel_w]``.

    The windows of the images, as columns, are a second output, which the backward pass uses. They are empty if they are
    too large to keep.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, geometry: _Geometry) -> tuple[Tensor, Tensor]:
        joined, results = _joined(x, weight, geometry), []
        for part in _parts(x, weight, geometry):
            columns = geometry.windows(x[part], joined)
            product = torch.bmm(_kernels(weight[part], columns), columns.flatten(0, 1))
            results.append(_as_images(product, columns.shape[:2], joined, geometry.output_size(x.shape[3:])))
        return _together(results), columns if len(results) == 1 else x.new_empty(len(x), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.geometry = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, Tensor, None]:
        x, weight, columns = ctx.saved_tensors
        of_x, of_weight = _Backward.apply(grad, x, weight, columns, ctx.geometry, ctx.needs_input_grad[0])
        return of_x if ctx.needs_input_grad[0] else None, of_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Mapped:
        return _mapped(_Convolution, info, in_dims, args)


class _Backward(Function):
    """The autograd function that computes the gradients of :class:`_Convolution`: of the images and of the weights.
    Second derivatives are not supported."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor, columns: Tensor, geometry: _Geometry, of_images: bool
    ) -> tuple[Tensor, Tensor]:
        joined, image, of_x, of_weight = _joined(x, weight, geometry), list(x.shape[3:]), [], []
        for part in _parts(x, weight, geometry):
            windows = columns if columns.numel() else geometry.windows(x[part], joined)
            grads = torch.unflatten(grad[part].flatten(3), 1, (-1, joined)).transpose(2, 3).flatten(3).flatten(0, 1)
            products = torch.bmm(grads, windows.flatten(0, 1).transpose(1, 2))
            products = torch.unflatten(products, 0, windows.shape[:2])
            of_weight.append(products.sum(1).view(len(windows), *weight.shape[1:]))
            if of_images:
                columns_of_x = torch.bmm(_kernels(weight[part], windows).transpose(1, 2), grads)
                separate = torch.unflatten(columns_of_x, -1, (joined, -1)).transpose(1, 2).flatten(0, 1)
                of_x.append(torch.unflatten(geometry.fold(separate, image), 0, x[part].shape[:2]))
        return _together(of_x) if of_images else x.new_empty(len(x), 0), _together(of_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("convolutions of stacks on a GPU have no second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Mapped:
        return _mapped(_Backward, info, in_dims, args)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
    """Returns the convolution of one client's images ``x [n, channels, h, w]``, within torch.func.vmap over clients."""
    if torch.is_autocast_enabled(x.device.type):
        lower = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(lower), weight.to(lower)
    if min(geometry.output_size(x.shape[2:])) < 1:
        # its message says best what is wrong
        return torch.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation)
    result: Tensor = _Convolution.apply(x.unsqueeze(0), weight.unsqueeze(0), geometry)[0].squeeze(0)
    return result if bias is None else result + bias.to(result.dtype)[:, None, None]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``F.linear(input, weight, bias)``. Under vmap it takes fewer operations than F.linear, which multiplies
    the product by 1 before it adds the bias."""
    if input.dim() != 2 or bias is None:
        return F.linear(input, weight, bias)
    product = input @ weight.t()
    return product + bias.to(product.dtype)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Returns what F.cross_entropy returns for these arguments. Under vmap, F.cross_entropy takes three times as many
    operations, because it looks for targets to ignore. Here a negative target matches no class, so its loss is 0."""
    others = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if others or reduction != "none" or ignore_index >= 0 or input.dim() != 2 or target.dim() != 1:
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    is_class = target[:, None] == torch.arange(input.shape[1], device=input.device)
    return -torch.where(is_class, F.log_softmax(input, 1), 0).sum(1)


def _mapped(function: type[Function], info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> Mapped:
    """Applies ``function`` to arguments ``args`` that vmap has stacked: tensors ``[C, ...]`` with one more dimension,
    at the places ``in_dims``. This dimension is merged with the clients' dimension, and separated again in the outputs.
    Returns the outputs, and for each of them the place of this dimension, 0."""
    size = info.batch_size
    tensors = [
        arg if not isinstance(arg, Tensor) else
        (arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)
        for arg, dim in zip(args, in_dims, strict=True)
    ]  # fmt: skip
    outputs = function.apply(*tensors)
    return tuple(torch.unflatten(each, 0, (size, -1)) for each in outputs), (0,) * len(outputs)


def _joined(x: Tensor, weight: Tensor, geometry: _Geometry) -> int:
    """Returns how many samples of a client are computed by one product of matrices: one, or all samples of its
    mini-batch."""
    # the kernels are copied for each product
    return 1 if math.prod(geometry.output_size(x.shape[3:])) >= max(LEAST_PLACES, weight.shape[1]) else x.shape[1]


def _parts(x: Tensor, weight: Tensor, geometry: _Geometry) -> Iterator[slice]:
    """Yields slices of the C clients, so that the windows of the clients in one slice fit into memory. Their
    convolutions are computed slice by slice."""
    clients, samples = x.shape[:2]
    columns = samples * math.prod(geometry.output_size(x.shape[3:])) * math.prod(weight.shape[2:])
    kernels = samples // _joined(x, weight, geometry) * math.prod(weight.shape[1:])
    size = max(1, MOST // max(1, columns, kernels))
    return (slice(start, start + size) for start in range(0, clients, size))


def _kernels(weight: Tensor, columns: Tensor) -> Tensor:
    """Returns the clients' kernels ``weight [C, out, ...]``, repeated for each product with ``columns [C, products,
    ...]``: ``[C * products, out, channels * kernel]``."""
    rows = weight.flatten(2)[:, None]
    return rows.expand(-1, columns.shape[1], -1, -1).flatten(0, 1)


def _as_images(product: Tensor, products: Sequence[int], joined: int, size: Sequence[int]) -> Tensor:
    """Returns the results of products of matrices, ``product [C * products, out, joined * places]``, as images ``[C, n,
    out, *size]``. Here ``products`` has C and the number of products of each client, ``joined`` is the number of
    samples in one product, and ``size`` has the rows and columns of an image."""
    images = torch.unflatten(torch.unflatten(product, 0, products), -1, (joined, -1)).transpose(2, 3)
    return torch.unflatten(images.flatten(1, 2), -1, size).contiguous()


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_ours(input: Tensor, weight: Tensor, groups: int, dims: int) -> bool:
    # with the same weights for all clients, a stack is one ordinary convolution
    ours = groups == 1 and input.dim() == dims == weight.dim() and input.shape[1] == weight.shape[1]
    return ours and torch._C._functorch.is_functorch_wrapped_tensor(weight)


def _pair(value: Any) -> tuple[int, int]:
    each = [value] * 2 if isinstance(value, int) else [*value]
    return each[0], each[-1]


def _single(value: Any) -> int:
    return value if isinstance(value, int) else value[0]
