"""Unification, substitution and canonical renaming of function-free atoms, batched over any leading axes.

A term is an id: 0 padding, 1..C a constant, above C a variable. Without compound terms no occurs check is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.types import I32, Bool


class Substitution(NamedTuple):
    """W - 1 bindings, applied one after another (a triangular substitution); variable 0 binds nothing."""

    variable: I32[Tensor, "... J"]
    term: I32[Tensor, "... J"]


def unify(
    a: I32[Tensor, "... W"], b: I32[Tensor, "... W"], n_constants: int
) -> tuple[Bool[Tensor, "..."], Substitution]:
    """Whether two atoms have a unifier, and their most general one.

    Arguments are solved left to right, each equation rewritten by the bindings before it; where both sides are
    variables, that of `a` is replaced by that of `b`. Where the atoms do not unify the substitution means nothing.

    Source: Martelli & Montanari 1982, "An efficient unification algorithm", rules (c) and (d), for flat terms.
    """
    left, right = torch.broadcast_tensors(a[..., 1:], b[..., 1:])
    unifies = a[..., 0] == b[..., 0]
    variables, terms = [], []
    for j in range(left.shape[-1]):
        x, y = left[..., j], right[..., j]
        x_is_variable, y_is_variable = x > n_constants, y > n_constants
        unifies = unifies & ((x == y) | x_is_variable | y_is_variable)
        binds = (x != y) & (x_is_variable | y_is_variable)
        variable = torch.where(binds, torch.where(x_is_variable, x, y), 0)
        term = torch.where(binds, torch.where(x_is_variable, y, x), 0)
        left = torch.where(left == variable[..., None], term[..., None], left)
        right = torch.where(right == variable[..., None], term[..., None], right)
        variables.append(variable)
        terms.append(term)
    return unifies, Substitution(torch.stack(variables, -1), torch.stack(terms, -1))


def substitute(terms: I32[Tensor, "... L"], substitution: Substitution) -> I32[Tensor, "... L"]:
    """`terms` with every bound variable replaced. Pass arguments only: a predicate's id may equal a variable's."""
    for j in range(substitution.variable.shape[-1]):
        bound = terms == substitution.variable[..., j, None]
        terms = torch.where(bound, substitution.term[..., j, None], terms)
    return terms


def canonicalize(terms: I32[Tensor, "... L"], n_constants: int) -> I32[Tensor, "... L"]:
    """`terms` with its variables numbered C + 1, C + 2, ... by first occurrence.

    Two rows are equal up to renaming exactly when their canonical forms are equal.
    """
    length = terms.shape[-1]
    same = terms[..., :, None] == terms[..., None, :]
    slots = torch.arange(length, device=terms.device)
    first = torch.where(same, slots, length).amin(-1)  # where each term occurs first
    is_variable = terms > n_constants
    rank = ((first == slots) & is_variable).cumsum(-1)
    number = (n_constants + rank.gather(-1, first)).to(terms.dtype)
    return torch.where(is_variable, number, terms)
