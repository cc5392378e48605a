"""Shape-and-dtype annotations, readable by people, type checkers and tests.

`F32[Tensor, "B A"]` is `typing.Annotated` to a type checker; at run time it carries a `Spec` that
`check` enforces at the library's boundary. Nothing here is ever called inside a compiled function.

Axes, one letter each:

    B  environments (rows of a batch)    A  goals of a conjunction       S  successors of a goal list
    T  time steps of a rollout           W  atom width: 1 + arity        K  partial proofs of a beam
    N  facts                             R  rules                        M  atoms of the longest rule, head included
    E  entities                          Q  queries                      V  visited states kept per row
    D  width of an embedding             P  predicates                   C  constants
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as F32
    from typing import Annotated as F64
    from typing import Annotated as I32
    from typing import Annotated as I64
else:
    from typing import Annotated

    class _Dtype:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def __getitem__(self, item: tuple[type, str]) -> Any:
            return Annotated[item[0], TensorSpec(self.dtype, tuple(item[1].split()))]

    Bool, I32, I64 = _Dtype(torch.bool), _Dtype(torch.int32), _Dtype(torch.int64)
    F32, F64 = _Dtype(torch.float32), _Dtype(torch.float64)


class TensorSpec(NamedTuple):
    """dtype and named axes of one tensor; an axis is a name ("B"), a number ("3") or "..." for any leading axes."""

    dtype: torch.dtype
    axes: tuple[str, ...]


def check_shapes_and_dtypes(
    tree: tuple[Any, ...], axis_sizes: dict[str, int] | None = None, path: str = ""
) -> dict[str, int]:
    """The sizes bound, e.g. {"B": 128}, when every annotated leaf of a NamedTuple has its dtype and axes.

    Axis names agree across the whole tree; F32 admits float64, so that parity tests may run in it.

    Errors: TypeError naming the field, the dtype and shape expected, and those found.
    """
    axis_sizes = {} if axis_sizes is None else axis_sizes
    path = path or type(tree).__name__
    for name, hint in get_type_hints(type(tree), include_extras=True).items():
        value, where = getattr(tree, name), f"{path}.{name}"
        spec = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, TensorSpec)), None)
        if spec is not None:
            _check_leaf(value, spec, axis_sizes, where)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            check_shapes_and_dtypes(value, axis_sizes, where)
    return axis_sizes


def _check_leaf(value: torch.Tensor, spec: TensorSpec, sizes: dict[str, int], where: str) -> None:
    axes, got = spec.axes, tuple(value.shape)
    if axes and axes[0] == "...":
        axes = axes[1:]
        got = got[max(len(got) - len(axes), 0) :]
    want = tuple(int(a) if a.isdigit() else sizes.setdefault(a, n) for a, n in zip(axes, got))
    dtype_ok = value.dtype == spec.dtype or (spec.dtype == torch.float32 and value.dtype == torch.float64)
    if not dtype_ok or len(got) != len(axes) or got != want:
        raise TypeError(
            f"{where}: want {spec.dtype} [{' '.join(spec.axes)}] with {sizes}, got {value.dtype} {list(value.shape)}"
        )
