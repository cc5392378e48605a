"""Shape-and-dtype annotations, readable by people, type checkers and tests; and the type variables of the package.

`F32[Tensor, "B A"]` is `typing.Annotated` to a type checker; at run time it carries a `TensorSpec` that tests enforce.
Nothing here runs inside a compiled function: `check_tensor` is evaluated when one is traced.

Axes; the single letters:

    B  environments (rows of a batch)    A  goals of a conjunction       S  actions; successors of a goal list
    T  time steps of a rollout           W  atom width: 1 + arity        K  partial proofs of a beam
    N  facts                             R  rules                        M  atoms of the longest rule, head included
    E  entities                          Q  queries                      V  visited states stored for each row
    D  width of an embedding             P  predicates                   C  constants
    F  numbers in an observation         U  components of a continuous action
    L  learners that train side by side under vmap

and those of two letters: TB transitions of a batch (T * B), MB rows of a minibatch, NP parameters of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    TypeAlias,
)

import torch
from typing_extensions import TypeVar

__all__ = [
    "F32",
    "F64",
    "I32",
    "I64",
    "Bool",
    "Carry",
    "Obs",
    "Params",
    "ResetSample",
    "Scan",
    "ScanBody",
    "State",
    "TensorSpec",
    "Tree",
    "World",
    "X",
    "Y",
    "check_tensor",
]

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as F32
    from typing import Annotated as F64
    from typing import Annotated as I32
    from typing import Annotated as I64
else:
    from typing import Annotated

    class _Dtype:
        """Dtype that turns `[Tensor, "B A"]` into an annotation."""

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def __getitem__(self, item: tuple[type, str]) -> Any:
            tensor_type, axes = item
            return Annotated[
                tensor_type, TensorSpec(self.dtype, tuple(axes.split()))
            ]

    Bool = _Dtype(torch.bool)
    I32 = _Dtype(torch.int32)
    I64 = _Dtype(torch.int64)
    F32 = _Dtype(torch.float32)
    F64 = _Dtype(torch.float64)

# Type variables, defined once. Each stands for a tensor or a tree of tensors, except Y, which may be anything.
Tree = TypeVar("Tree", infer_variance=True)
# Tensors of an environment that no step changes.
World = TypeVar("World", infer_variance=True)
State = TypeVar("State", infer_variance=True)  # state of an environment
Obs = TypeVar("Obs", infer_variance=True)  # observation
# Random part of a reset.
ResetSample = TypeVar("ResetSample", infer_variance=True)
Params = TypeVar("Params", infer_variance=True)  # parameters of a network
Carry = TypeVar("Carry", infer_variance=True)  # what a loop threads
X = TypeVar("X", infer_variance=True)  # what a turn of a loop reads
Y = TypeVar("Y", infer_variance=True)  # what a turn of a loop returns


# One turn of a loop: the next carry and an output, from the carry and an element of the inputs.
ScanBody: TypeAlias = Callable[[Carry, X], tuple[Carry, Y]]


class Scan(Protocol):
    """Function that loops over the leading axis of `xs`; it returns the last carry and the stacked outputs."""

    def __call__(
        self, body: ScanBody[Carry, X, Y], carry: Carry, xs: X, /
    ) -> tuple[Carry, Y]: ...


class TensorSpec(NamedTuple):
    """Dtype and named axes of a tensor."""

    dtype: torch.dtype
    # Each a name ("B"), a number ("3"), or "..." for any leading axes.
    axes: tuple[str, ...]


def check_pair(
    value: object,
    kind: type,
    expected: str,
    error: type[Exception] = TypeError,
) -> None:
    """Check that a user's function returns a pair whose second part is of a class.

    Args:
      expected: the beginning of the error, such as "loss: expected (loss, fp.losses.LossMetrics)".
      error: what is raised.

    Raises:
      TypeError: it is something else.
    """
    parts: list[Any] = [*value] if isinstance(value, tuple) else [value]
    if len(parts) != 2 or not isinstance(parts[1], kind):
        kinds = ", ".join(type(x).__name__ for x in parts)
        raise error(f"{expected}, got {kinds}")


def check_tensor(
    tensor: object,
    shape: Sequence[int],
    dtype: torch.dtype,
    name: str,
    error: type[Exception] = TypeError,
) -> None:
    """Check shape and dtype of a tensor from a user's function; broadcasting and promotion would hide errors.

    Args:
      error: what is raised.

    Raises:
      TypeError: one line that names the tensor, and says what was expected and what came.
    """
    if isinstance(tensor, torch.Tensor):
        if tensor.shape == torch.Size(shape) and tensor.dtype == dtype:
            return
        got = f"{tensor.dtype} {list(tensor.shape)}"
    else:
        got = type(tensor).__name__
    raise error(f"{name}: expected {dtype} {list(shape)}, got {got}")
