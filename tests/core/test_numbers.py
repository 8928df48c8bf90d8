"""Numbers of any type go into rows of float32 and come out again as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedray.core.numbers import join, parts_of, split

WHOLE = {
    torch.bool: (0, 1), torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: (-(2**31), 2**31 - 1), torch.int64: (-(2**63), 2**63 - 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", WHOLE)
@settings(deadline=None)
@given(data=st.data())
def test_whole_numbers(dtype, data):
    least, most = WHOLE[dtype]
    edges = [least, most, 0, *(edge for edge in (2**24 + 1, -(2**44) - 1, 2**22) if least <= edge <= most)]
    values = torch.tensor([*edges, *data.draw(st.lists(st.integers(least, most), max_size=5))]).to(dtype)
    parts = split(values)
    assert parts.shape == (parts_of(dtype), len(values))
    assert parts.dtype is torch.float32
    # a sum in double precision and back changes nothing
    found = join(parts.double().float(), dtype)
    assert found.dtype is dtype
    assert torch.equal(found, values)


@settings(deadline=None)
@given(st.lists(st.floats(min_value=-1e38, max_value=1e38).filter(lambda x: x == 0 or abs(x) > 1e-20), min_size=1))
def test_double_precision(values):
    expected = torch.tensor([*values, np.inf, -np.inf, np.nan], dtype=torch.float64)
    found = join(split(expected), torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype):
    values = torch.tensor([1 + 2j, 1 / 3 - 1j, complex(np.inf, -0.0)], dtype=dtype)
    assert len(split(values)) == parts_of(dtype)
    assert torch.equal(join(split(values), dtype), values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_numbers_are_one_part(dtype):
    values = torch.tensor([1.5, -torch.inf, 0.0078125]).to(dtype)
    assert torch.equal(join(split(values), dtype), values)


@given(st.integers(0, 2**22 - 1), st.integers(0, 2**22 - 1), st.floats(0, 1))
def test_the_mean_of_parts_is_that_of_numbers(a, b, weight):
    one, other = (split(torch.tensor([value])) for value in (a, b))
    mean = weight * a + (1 - weight) * b
    found = int(join(weight * one + (1 - weight) * other, torch.int64))
    # a part is a mean in float32
    assert abs(found - mean) <= 1 + 1e-6 * max(a, b)
