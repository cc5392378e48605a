"""PyTorch calls whose results its type stubs leave unknown, with the types that a strict checker needs."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import I32, I64


def from_numpy(array: np.ndarray) -> Tensor:
    """The host tensor that shares the memory of an array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors as views of the shape that both broadcast to."""
    views = torch.broadcast_tensors(a, b)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", views)


def int_list(values: I64[Tensor, "n"]) -> list[int]:
    """The integers of a one-dimensional tensor, as Python values of the host."""
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def atom_tuples(atoms: I32[Tensor, "n W"]) -> list[tuple[int, ...]]:
    """The atoms of a table as tuples of ids, padding included."""
    rows = cast("list[list[int]]", atoms.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [tuple(row) for row in rows]


def rule_tuples(
    rules: I32[Tensor, "R M W"],
) -> list[list[tuple[int, ...]]]:
    """The rules of a table as lists of atoms, head first, missing atoms included."""
    tables = cast("list[list[list[int]]]", rules.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [[tuple(atom) for atom in table] for table in tables]


def unique_rows(table: Tensor) -> Tensor:
    """The distinct rows of a table, in lexicographic order."""
    return cast("Tensor", torch.unique(table, dim=0))  # pyright: ignore[reportUnknownMemberType]


def unique_rows_with_inverse(
    table: Tensor,
) -> tuple[Tensor, I64[Tensor, "n"]]:
    """The distinct rows of a table, in lexicographic order, and the place of each row of the table among them."""
    result = torch.unique(table, dim=0, return_inverse=True)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", result)


def runs(values: Tensor) -> tuple[Tensor, I64[Tensor, "r"]]:
    """The value and the length of each run of equal consecutive values."""
    result = torch.unique_consecutive(values, return_counts=True)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", result)
