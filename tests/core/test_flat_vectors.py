"""A flat vector holds all that is trained of a module, and gives back the bits that were packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_modules import IMAGE, Normed, Tied, made
from torch import nn

from fedray.core.places import frozen
from fedray.core.vectors import ROW, Layout
from fedray.gradients.loop import LoopNetwork
from fedray.models.small import LeNet5

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=5).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=5), st.randoms())
def test_a_layout_gives_back_what_was_packed(shapes, random):
    module = nn.Module()
    for number, (shape, permuted) in enumerate(shapes):
        value = torch.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape) + 1000 * number
        if permuted:
            order = list(range(len(shape)))
            random.shuffle(order)
            inverse = sorted(order, key=order.__getitem__)
            value = value.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
            assert value.shape == shape
            assert inverse is not None
        module.register_parameter(f"p{number}", nn.Parameter(value))
    layout = Layout(module)
    model = layout.pack(module)
    vector = model.parameters
    total = sum(p.numel() for p in module.parameters())
    assert layout.parameters == total
    assert len(vector) == layout.width >= total
    assert layout.width % ROW == 0
    assert layout.width - total < ROW
    assert not vector[total:].any()
    assert len(model.buffers) == layout.buffers == 0
    for named in (layout.named(model), layout.unflatten(vector)):
        for name, p in module.named_parameters():
            assert torch.equal(named[name], p)
            assert torch.equal(
                layout.slots[int(name[1:])].flat(p.detach()), layout.slots[int(name[1:])].flat(named[name])
            )
    # views of it, and nothing lies twice
    for tensor in layout.named(model).values():
        tensor.zero_()
    assert not vector.any()


def test_buffers_come_after_the_parameters_and_frozen_parameters_are_in_no_row():
    module = made(Normed)
    module.last.requires_grad_(False)
    layout = Layout(module)
    model = layout.pack(module)
    assert model.row.shape == (layout.row_width,)
    assert layout.parameters == 12 * 7 + 7 + 7 + 7
    assert layout.buffers == 7 + 7 + 2 + 2 + 3 * (1 + 3)
    state = module.state_dict()
    named = layout.named(model)
    assert frozen(module).keys() == {"last.weight", "last.bias"}
    assert named.keys() | frozen(module).keys() == state.keys()
    for name, value in {**frozen(module), **named}.items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_modules_memory_format_is_kept(memory_format):
    module = made(lambda: LeNet5(IMAGE, 10)).to(memory_format=memory_format)
    strides = {name: p.stride() for name, p in module.named_parameters()}
    before = {name: p.clone() for name, p in module.named_parameters()}
    network = LoopNetwork(module)
    for name, p in module.named_parameters():
        assert p.stride() == strides[name]
        assert torch.equal(p, before[name])
    # the module's parameters are the flat vector: loading a model is one copy
    layout = network.layout
    network.load(layout.model(torch.arange(float(layout.row_width))))
    numbers = torch.cat([slot.flat(p.detach()) for slot, p in zip(layout.slots, module.parameters(), strict=True)])
    assert torch.equal(numbers, torch.arange(float(layout.parameters)))


def test_tied_parameters_are_one():
    module = made(Tied)
    layout = Layout(module)
    assert layout.parameters == 12 * 12 + 12 + 12 + 12 * 4 + 4
    assert "again.weight" not in [slot.name for slot in layout.slots]
    LoopNetwork(module).load(layout.model(torch.zeros(layout.row_width)))
    assert module.again.weight is module.inner.weight
    assert not module.again.weight.any()
