"""T_P to height 1 for given queries alone: what one rule application derives of the candidates that they rank.

Where the whole of it is too much to hold, this is enough to rank with: of another atom the model tells nothing.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from funcppo.logic import kb as kb_
from funcppo.logic.consequences import each_consequence
from funcppo.logic.fixpoint import Model
from funcppo.logic.kb import KnowledgeBase, Sizes
from funcppo.types import I64


def one_step(
    kb: KnowledgeBase, sizes: Sizes, queries: I64[Tensor, "Q W"], budget: int, object_identity: bool = False
) -> Model | None:
    """The facts, and the consequences of one step that agree with a query in its predicate and in some argument.

    Args:
      budget: the most atoms to hold; None is returned when there are more.
      object_identity: different variables of a rule bind different constants.
    """
    start = time.perf_counter()
    wanted = torch.zeros((sizes.width - 1, sizes.n_predicates + 1, sizes.n_constants + 1), dtype=torch.bool)
    table = wanted.to(kb.facts.device).view(-1)
    table = table.index_fill(0, _places(queries, sizes), True)
    parts, held, limit = [kb.facts], len(kb.facts), 2 * len(kb.facts)
    for part in each_consequence(kb, sizes, object_identity=object_identity):
        atoms = part.atoms[part.fact < 0]
        near = table[_places(atoms.long(), sizes).view(sizes.width - 1, -1)].any(0)
        parts.append(atoms[near])
        held += len(parts[-1])
        if held > limit:
            parts = [_distinct(parts, sizes)]
            held = len(parts[0])
            limit = 2 * held
            if held > budget:
                return None
    atoms = _distinct(parts, sizes)
    if len(atoms) > budget:
        return None
    derived = kb_.fact_id(kb, sizes, atoms.long()) < 0
    return Model(
        atoms=atoms,
        height=derived.to(torch.int32),
        index=kb_.index_sorted(atoms, sizes.n_predicates, sizes.n_constants),
        counts=(len(kb.facts), len(atoms)),
        complete=False,  # of an atom that is not asked for, nothing is known
        fixpoint=False,
        stopped="derived only as far as the queries ask",
        seconds=time.perf_counter() - start,
        predicates=frozenset(range(1, sizes.n_predicates + 1)),
        object_identity=object_identity,
        sizes=sizes,
    )


def _places(atoms: Tensor, sizes: Sizes) -> Tensor:
    """Where each argument of each atom stands in a table by place, predicate and constant."""
    place = torch.arange(sizes.width - 1, device=atoms.device)[:, None]
    return ((place * (sizes.n_predicates + 1) + atoms[:, 0]) * (sizes.n_constants + 1) + atoms[:, 1:].T).reshape(-1)


def _distinct(parts: list[Tensor], sizes: Sizes) -> Tensor:
    atoms = torch.cat(parts)
    return atoms[kb_.index_atoms(atoms, sizes.n_predicates, sizes.n_constants)[0]]
