"""Arrays and tables of odd kinds: bytes, other orders of bytes, masks, numbers of several types."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from fedray import UserError
from fedray.data.sources.source import load_source
from fedray.data.sources.user_data import user_source

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
XT, YT = X[:12], Y[:12]


def test_bytes_are_scaled_however_they_are_given(tmp_path):
    """An image of bytes is the same whether it is in a file or in an array."""
    from fedray.data.sources.npz import npz

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 1, 4, 4), dtype=np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    of_file, of_arrays = npz(str(tmp_path / "images.npz")), user_source((x, y), (x, y))
    assert of_file.scale == of_arrays.scale == np.float32(1 / 255)


def test_a_list_of_a_few_items_is_a_data_set():
    items = [(np.full(3, k, np.float32), k % 2) for k in range(3)]
    source = user_source(items, items[:2])
    assert source.y_train.tolist() == [0, 1, 0]
    assert source.x_test.shape == (2, 3)


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i4", np.longdouble, ">u2"])
def test_other_orders_of_bytes_and_long_numbers(kind):
    """FITS, netCDF and HDF5 give such arrays, and torch takes none of them."""
    x = (np.abs(X) * 100).astype(kind)
    read = user_source((x, Y), (x[:12], YT)).x_train
    assert torch.from_numpy(read).shape == (60, 5)
    np.testing.assert_allclose(read.astype(np.float64), x.astype(np.float64), rtol=1e-6)


def test_what_is_masked_is_missing():
    with pytest.raises(UserError, match="x_train has nothing in row 3, where it is masked"):
        user_source((np.ma.masked_equal(np.where(np.arange(60)[:, None] == 3, -9.0, X), -9.0), Y), (XT, YT))
    with pytest.raises(UserError, match="y_train has nothing in row 2, where it is masked"):
        user_source((X, np.ma.masked_where(np.arange(60) % 9 == 2, Y)), (XT, YT))
    assert user_source((np.ma.masked_array(X), Y), (XT, YT)).x_train.dtype == np.float32


def test_numbers_of_several_types():
    """pandas' own numbers, booleans beside floats, and whole numbers beside others are numbers."""
    table = pd.DataFrame(X, columns=list("abcde")).assign(f=Y == 0).convert_dtypes()
    read = user_source((table, Y), (table[:12], YT)).x_train
    np.testing.assert_allclose(read, np.column_stack([X, Y == 0]), rtol=1e-6)
    mixed = [value if place % 2 else int(value) for place, value in enumerate(X[:, 0].tolist())]
    for y in (pd.Series(mixed, dtype=object), np.array(mixed, dtype=object)):
        assert user_source((X, y), (XT, y[:12])).task == "regression"
    assert user_source((X, np.array(Y.tolist(), dtype=object)), (XT, YT)).task == "classification"


def test_arrays_of_a_file_that_are_not_read_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=XT, y_test=YT, clients_train=Y, more=X)
    notes = load_source("npz", str(tmp_path / "a.npz")).notes
    assert any("not read: clients_train, more (did you mean 'client_train'?)" in note for note in notes)
