"""PyTorch calls whose results its type stubs leave unknown, with the types that a strict checker needs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from funcppo.types import I32, I64


def int_list(values: I64[Tensor, "n"]) -> list[int]:
    """The integers of a one-dimensional tensor, as Python values of the host."""
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def atom_tuples(atoms: I32[Tensor, "n W"]) -> list[tuple[int, ...]]:
    """The atoms of a table as tuples of ids, padding included."""
    rows = cast("list[list[int]]", atoms.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [tuple(row) for row in rows]


def unique_values(values: Tensor) -> Tensor:
    """The distinct values of a tensor, ascending."""
    return cast("Tensor", torch.unique(values))  # pyright: ignore[reportUnknownMemberType]


def unique_rows(table: Tensor) -> Tensor:
    """The distinct rows of a table, in lexicographic order."""
    return cast("Tensor", torch.unique(table, dim=0))  # pyright: ignore[reportUnknownMemberType]


def run_lengths(values: I64[Tensor, "n"]) -> I64[Tensor, "r"]:
    """The length of each run of equal consecutive values."""
    runs = torch.unique_consecutive(values, return_counts=True)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", runs)[1]
