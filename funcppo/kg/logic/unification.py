"""Unification, substitution and canonical renaming of function-free atoms, batched over any leading axes.

A term is an id: 0 padding, 1..C a constant, above C a variable. Without compound terms no occurs check is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, Bool
from funcppo.kg.logic.typed_torch import broadcast


class Substitution(NamedTuple):
    """J = W - 1 bindings, applied one after another (a triangular substitution)."""

    variable: I32[Tensor, "... J"]  # 0 binds nothing
    term: I32[Tensor, "... J"]  # what replaces the variable


class Unification(NamedTuple):
    """The result of unifying pairs of atoms."""

    unifies: Bool[Tensor, "..."]
    # the most general unifier; meaningless where the atoms do not unify
    substitution: Substitution


def unify(
    a: I32[Tensor, "... W"], b: I32[Tensor, "... W"], n_constants: int
) -> Unification:
    """Compute the most general unifier of two atoms.

    Arguments are solved left to right, each equation rewritten by the bindings before it. Where both sides are
    variables, the variable of `a` is replaced by that of `b`.

    Returns:
      unifies: whether there is a unifier.
      substitution: the most general one.

    Source: Martelli & Montanari 1982, "An efficient unification algorithm", rules (c) and (d), for flat terms.
    """
    left, right = broadcast(a[..., 1:], b[..., 1:])
    unifies = a[..., 0] == b[..., 0]
    variables: list[Tensor] = []
    terms: list[Tensor] = []
    for j in range(left.shape[-1]):
        x = left[..., j]
        y = right[..., j]
        x_is_variable = x > n_constants
        y_is_variable = y > n_constants
        unifies = unifies & ((x == y) | x_is_variable | y_is_variable)

        # Bind a variable to the other side; variable 0 where there is nothing to bind.
        binds = (x != y) & (x_is_variable | y_is_variable)
        variable = torch.where(binds, torch.where(x_is_variable, x, y), 0)
        term = torch.where(binds, torch.where(x_is_variable, y, x), 0)

        # Apply the binding to all arguments, so that later equations see it.
        left = torch.where(left == variable[..., None], term[..., None], left)
        right = torch.where(
            right == variable[..., None], term[..., None], right
        )
        variables.append(variable)
        terms.append(term)
    return Unification(
        unifies,
        Substitution(torch.stack(variables, -1), torch.stack(terms, -1)),
    )


def substitute(
    terms: I32[Tensor, "... L"], substitution: Substitution
) -> I32[Tensor, "... L"]:
    """Replace every bound variable. Pass arguments only: the id of a predicate may equal that of a variable."""
    for j in range(substitution.variable.shape[-1]):
        is_bound = terms == substitution.variable[..., j, None]
        terms = torch.where(is_bound, substitution.term[..., j, None], terms)
    return terms


def canonicalize(
    terms: I32[Tensor, "... L"], n_constants: int
) -> I32[Tensor, "... L"]:
    """Number the variables of each row C + 1, C + 2, ... by first occurrence.

    Two rows are equal up to renaming exactly when their canonical forms are equal.
    """
    length = terms.shape[-1]
    slots = torch.arange(length, device=terms.device)

    # The slot in which each term occurs first.
    is_same = terms[..., :, None] == terms[..., None, :]
    first = torch.where(is_same, slots, length).amin(-1)

    # The rank of a variable is the number of distinct variables up to its first occurrence.
    is_variable = terms > n_constants
    rank = ((first == slots) & is_variable).cumsum(-1)
    number = (n_constants + rank.gather(-1, first)).to(terms.dtype)
    return torch.where(is_variable, number, terms)
