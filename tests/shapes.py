"""The shapes and dtypes that annotations of records state, and those of their tensors."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import torch

from funcppo.core.types import TensorSpec


def check_shapes_and_dtypes(
    tree: tuple[Any, ...],
    axis_sizes: dict[str, int] | None = None,
    path: str = "",
) -> dict[str, int]:
    """Check every annotated leaf of a NamedTuple, and of the NamedTuples in it, against its dtype and axes.

    An axis name has one size in the whole tree. F32 admits float64, so that parity tests may run in it.

    Args:
      axis_sizes: sizes that are already fixed; extended in place.
      path: name of the tree in error texts; by default its class.

    Returns:
      The size of each named axis, e.g. {"B": 128}.

    Raises:
      TypeError: names the field, its expected dtype and axes, and the dtype and shape that it has.
    """
    axis_sizes = {} if axis_sizes is None else axis_sizes
    path = path or type(tree).__name__
    for name, hint in get_type_hints(type(tree), include_extras=True).items():
        value = getattr(tree, name)
        field_path = f"{path}.{name}"
        spec = _tensor_spec(hint)
        if spec is not None and isinstance(value, torch.Tensor):
            _check_leaf(value, spec, axis_sizes, field_path)
        elif hasattr(value, "_fields"):
            check_shapes_and_dtypes(value, axis_sizes, field_path)
    return axis_sizes


def _tensor_spec(hint: Any) -> TensorSpec | None:
    """The spec that an annotation, or a member of a union, carries; None if it carries none."""
    for member in (hint, *get_args(hint)):
        for metadata in getattr(member, "__metadata__", ()):
            if isinstance(metadata, TensorSpec):
                return metadata
    return None


def _check_leaf(
    value: torch.Tensor, spec: TensorSpec, axis_sizes: dict[str, int], path: str
) -> None:
    axes = spec.axes
    shape = tuple(value.shape)
    if axes and axes[0] == "...":
        axes = axes[1:]
        shape = shape[max(len(shape) - len(axes), 0) :]

    # The first tensor that has an axis fixes its size for all others.
    expected_shape = tuple(
        int(axis) if axis.isdigit() else axis_sizes.setdefault(axis, size)
        for axis, size in zip(axes, shape)
    )
    is_float64_for_float32 = (
        spec.dtype == torch.float32 and value.dtype == torch.float64
    )
    dtype_fits = value.dtype == spec.dtype or is_float64_for_float32
    if not dtype_fits or len(shape) != len(axes) or shape != expected_shape:
        raise TypeError(
            f"{path}: expected {spec.dtype} [{' '.join(spec.axes)}] with {axis_sizes}, "
            f"got {value.dtype} {list(value.shape)}"
        )
