"""The shapes and dtypes that annotations of records state, and those of their tensors."""

from typing import Any, get_args, get_type_hints

import torch

from funcppo.core.types import TensorSpec


def check_shapes_and_dtypes(
    record: tuple[Any, ...], sizes: dict[str, int] | None = None
) -> dict[str, int]:
    """Check each tensor of a NamedTuple, and of those in it; an axis name has one size in all. Return these sizes."""
    sizes = {} if sizes is None else sizes
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        value, where = getattr(record, name), f"{type(record).__name__}.{name}"
        notes = [
            note
            for member in (hint, *get_args(hint))
            for note in getattr(member, "__metadata__", ())
            if isinstance(note, TensorSpec)
        ]
        if notes and isinstance(value, torch.Tensor):
            axes, shape = notes[0].axes, tuple(value.shape)
            if axes[:1] == ("...",):
                axes = axes[1:]
                shape = shape[len(shape) - len(axes) :]
            assert value.dtype == notes[0].dtype, (where, value.dtype)
            # The first tensor that has an axis fixes its size for all others.
            expected = tuple(
                int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
                for axis, size in zip(axes, shape, strict=True)
            )
            assert shape == expected, (where, axes, shape, expected)
        elif hasattr(value, "_fields"):
            check_shapes_and_dtypes(value, sizes)
    return sizes
