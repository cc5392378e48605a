"""T_P to height 1 in part: what one rule application derives of the candidates of given queries, and a sample besides.

Where the whole of it is too much to hold, the candidates are enough to rank with, and the sample to learn from: of
another atom nothing is known. What is held, is held with every rule that derives it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from funcppo.logic import kb as kb_
from funcppo.logic.consequences import iter_consequences
from funcppo.logic.derivability import DerivabilityIndex
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.types import F64, I32, I64

_ODD = 0x2545F4914F6CDD1D, 0x1F83D9ABFB41BD6B  # multipliers of `_uniform`


def priority_sample(
    kb: KnowledgeBase, sizes: KBSizes, max_atoms: int, object_identity: bool = False
) -> I32[Tensor, "n W"]:
    """At most `n` atoms that one step derives and that are no facts, in lexicographic order; the same ones always.

    They come in proportion to the largest confidence c of a rule that derives them, so that rules compete over many of
    them: those of the smallest u / c, with u uniform on [0, 1) for each atom. One of confidence 0 never comes.

    Source: Duffield, Lund and Thorup 2007, "Priority sampling for estimation of arbitrary subset sums", JACM 54(6).
    """
    confidence = kb_.rule_confidence(kb).to(torch.float64)
    parts, held, bound = [(kb.facts[:0], confidence[:0])], 0, torch.inf
    for found in iter_consequences(kb, sizes, object_identity=object_identity):
        rank = _uniform(found.atoms) / confidence[found.rule]
        low = (found.fact < 0) & (rank < bound)
        parts.append((found.atoms[low], rank[low]))
        held += len(parts[-1][1])
        if held > 2 * max_atoms:
            parts = [_smallest(parts, max_atoms, sizes)]
            held = len(parts[0][1])
            bound = float(parts[0][1].max()) if held == max_atoms > 0 else bound
    return _smallest(parts, max_atoms, sizes)[0]


def restricted_step(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    sample: I32[Tensor, "n W"],
    max_derivations: int,
    object_identity: bool = False,
) -> tuple[LeastModel, DerivabilityIndex] | None:
    """The facts, the sample, the consequences of one step that agree with a query in its predicate and some argument.

    Args:
      sample: derived atoms, distinct, in lexicographic order.
      budget: the most pairs to hold of an atom and a rule that derives it; None is returned when there are more.
      object_identity: different variables of a rule bind different constants.
    """
    start = time.perf_counter()
    n_places = (sizes.atom_width - 1) * (sizes.n_predicates + 1) * (sizes.n_constants + 1)
    asked = torch.zeros(n_places, dtype=torch.bool, device=kb.facts.device)
    asked = asked.index_fill(0, _places(queries, sizes).view(-1), True)
    index = kb_.index_sorted_atoms(sample, sizes.n_predicates, sizes.n_constants)
    parts, held = [(kb.facts[:0], kb.rule_ids_by_predicate[:0])], 0
    for found in iter_consequences(kb, sizes, leave_one_out=True, object_identity=object_identity):
        wanted = (found.fact >= 0) | asked[_places(found.atoms, sizes)].any(0)
        wanted = wanted | (kb_.find_atoms(index, sizes, found.atoms) >= 0)
        parts.append((found.atoms[wanted], found.rule[wanted]))
        held += len(parts[-1][1])
        if held > max_derivations:
            return None
    atoms, rule = (torch.cat(columns) for columns in zip(*parts))
    model = _model(kb, sizes, atoms, start, object_identity)
    row = kb_.find_atoms(model.atom_index, sizes, atoms)
    return model, DerivabilityIndex(model.atom_index, model.height, torch.sort(row * sizes.n_rules + rule).values)


def _model(
    kb: KnowledgeBase, sizes: KBSizes, derived: I32[Tensor, "n W"], start: float, object_identity: bool
) -> LeastModel:
    """The facts and some atoms derived from them, in any order and perhaps more than once."""
    atoms = torch.cat([kb.facts, derived])
    atoms = atoms[kb_.sort_and_index_atoms(atoms, sizes.n_predicates, sizes.n_constants)[0]]
    return LeastModel(
        atoms=atoms,
        height=(kb_.fact_id(kb, sizes, atoms) < 0).to(torch.int32),
        atom_index=kb_.index_sorted_atoms(atoms, sizes.n_predicates, sizes.n_constants),
        n_atoms_after_step=(len(kb.facts), len(atoms)),
        complete=False,  # of an atom that is not asked for, nothing is known
        reached_fixpoint=False,
        stop_reason="derived only as far as the queries ask",
        seconds=time.perf_counter() - start,
        predicates=frozenset(range(1, sizes.n_predicates + 1)),
        object_identity=object_identity,
        sizes=sizes,
    )


def _places(atoms: I32[Tensor, "n W"], sizes: KBSizes) -> I64[Tensor, "J n"]:
    """Where each argument of each atom stands in a table by place, predicate and constant."""
    place = torch.arange(sizes.atom_width - 1, device=atoms.device)[:, None]
    return (place * (sizes.n_predicates + 1) + atoms[:, 0]) * (sizes.n_constants + 1) + atoms[:, 1:].T


def _uniform(atoms: I32[Tensor, "n W"]) -> F64[Tensor, "n"]:
    """A number on [0, 1) that looks random and depends on the atom alone."""
    word = torch.zeros_like(atoms[:, 0], dtype=torch.int64)
    for column in atoms.unbind(1):
        word = (word ^ column) * _ODD[0]
        word = (word ^ (word >> 32)) * _ODD[1]
    return ((word >> 32) & 0x7FFFFFFF) * 2.0**-31


def _smallest(parts: list[tuple[Tensor, Tensor]], n: int, sizes: KBSizes) -> tuple[Tensor, Tensor]:
    """The `n` distinct atoms of the smallest ranks, in order, and these; an atom counts by its smallest."""
    atoms, rank = (torch.cat(columns) for columns in zip(*parts))
    rank, order = torch.sort(rank)
    atoms = atoms[order]
    row = kb_.sort_and_index_atoms(atoms, sizes.n_predicates, sizes.n_constants)[0]
    if len(row) > n:
        row = row[torch.sort(torch.topk(rank[row], n, largest=False, sorted=False).indices).values]
    return atoms[row], rank[row]
