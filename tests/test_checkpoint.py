"""Checkpoints: what is saved is restored, what does not fit is refused, and files are put in place whole."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcppo import checkpoint
from funcppo.core import tree


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor


class State(NamedTuple):
    layers: tuple[Layer, ...]
    update: Tensor


META = {"fingerprint": "abc", "score": "success"}


def state(n_layers=2, width=3):
    layers = [
        Layer(torch.randn(width, 2), torch.zeros(2, dtype=torch.float64))
        for _ in range(n_layers)
    ]
    return State(tuple(layers), torch.tensor(7))


DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]


@given(
    leaves=st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)
        ),
        min_size=1,
    )
)
def test_what_is_restored_is_what_was_saved(leaves, tmp_path_factory):
    """Every dtype and shape, those without an entry and without an axis included."""
    path = tmp_path_factory.getbasetemp() / "any.npz"
    saved = tuple(
        (torch.arange(math.prod(shape)) % 3).view(shape).to(dtype)
        for dtype, shape in leaves
    )
    checkpoint.save(path, saved, META)
    restored, meta = checkpoint.restore(path, tree.zeros_like(saved), "abc")
    assert meta["score"] == "success"
    for a, b in zip(restored, saved):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(
    ("like", "fingerprint", "problem"),
    [
        (state(), "x", "another data set: expected fingerprint x, got abc"),
        (state(n_layers=1), "abc", r"got layers\.1\.bias in the file only"),
        (
            state(n_layers=3),
            "abc",
            r"got layers\.2\.bias in this configuration",
        ),
        (
            state(width=4),
            "abc",
            r"0\.weight: expected .* \[4, 2\], got .* \[3, 2",
        ),
        (
            state()._replace(update=torch.tensor(7.0)),
            "abc",
            r"update: expected torch.float32 \[\], got torch.int64 \[\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(like, fingerprint, problem, tmp_path):
    path = tmp_path / "c.npz"
    checkpoint.save(path, state(), META)
    with pytest.raises(ValueError, match=rf"c\.npz: .*{problem}"):
        checkpoint.restore(path, like, fingerprint)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c.npz"
    problem = r"c\.npz: expected a checkpoint, got no file"
    with pytest.raises(ValueError, match=problem):
        checkpoint.read(path)
    checkpoint.save(path, state(), META)
    cut = lambda: path.write_bytes(path.read_bytes()[:200])
    for damage in (cut, lambda: np.savez(path, update=np.zeros(3))):
        damage()
        problem = r"c\.npz: expected a checkpoint, got none or a damaged one"
        with pytest.raises(ValueError, match=problem):
            checkpoint.read(path)


def write_two(tmp_path):
    """A checkpoint and the one before it."""
    path = tmp_path / "c.npz"
    for note in ("first", "second"):
        checkpoint.save(path, state(), {**META, "note": note})
    return path


def test_the_latest_checkpoint_is_read_if_it_can_be(tmp_path):
    path = write_two(tmp_path)
    assert checkpoint.find_readable(path) == (path, [])
    assert checkpoint.read(path)[1]["note"] == "second"
    assert checkpoint.read(tmp_path / "previous-c.npz")[1]["note"] == "first"


@pytest.mark.parametrize("damage", [None, b"", b"PK", "cut", "flip"])
def test_the_one_before_serves_where_the_latest_is_damaged(damage, tmp_path):
    path = write_two(tmp_path)
    contents = path.read_bytes()
    path.unlink()
    if damage == "cut":
        damage = contents[:-100]
    elif damage == "flip":
        middle = len(contents) // 2
        flipped = bytes([contents[middle] ^ 255])
        damage = contents[:middle] + flipped + contents[middle + 1 :]
    if damage is not None:
        path.write_bytes(damage)
    found, (note,) = checkpoint.find_readable(path)
    assert found == tmp_path / "previous-c.npz"
    assert note.startswith(f"{path}: expected a checkpoint, got ")
    assert note.endswith("previous-c.npz is used in its place")


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(tmp_path):
    path = write_two(tmp_path)
    checkpoint.save(path, state(), {**META, "format": 99})
    with pytest.raises(ValueError, match="format"):
        checkpoint.find_readable(path)


def test_bfloat16_is_restored_and_no_data_set_is_needed(tmp_path):
    path = tmp_path / "c.npz"
    saved = (
        torch.tensor([1.5, torch.nan], dtype=torch.bfloat16),
        torch.ones(1),
    )
    checkpoint.save(path, saved, {"settings": "kept"})
    restored, meta = checkpoint.restore(path, tree.zeros_like(saved))
    assert meta["settings"] == "kept"
    for got, want in zip(restored, saved):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    other = (torch.zeros(3, dtype=torch.bfloat16), torch.ones(1))
    problem = r"0: expected .*bfloat16 \[3\], got .*bfloat16 \[2\]$"
    with pytest.raises(ValueError, match=problem):
        checkpoint.restore(path, other)
