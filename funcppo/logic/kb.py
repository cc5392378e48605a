"""KnowledgeBase: facts and rules as sorted index tensors.

Ids: 0 is padding, 1..C are constants, above C are variables; predicates count from 1 in a space of their own.
An atom is `[predicate, argument...]`, padded with 0 to the width W of the widest predicate.

Facts are distinct and sorted, so a fact's id is its row. Two hash tables answer every lookup, at a cost that hardly
depends on how many facts there are: `atoms` by the whole atom, `pairs` by (argument place, predicate, argument).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo import tree
from funcppo.logic import hugepages, row_index
from funcppo.logic.row_index import HashTable
from funcppo.types import F32, I32, I64, Bool

_NO_LIMIT = 1 << row_index.ROW_COUNT_BITS  # more facts than there can be
BindingPattern = tuple[int, tuple[bool, ...]]  # a predicate, and which of its arguments are bound


@dataclass(frozen=True, kw_only=True, slots=True)
class KBSizes:
    """What is static about a knowledge base: a new value is a new graph."""

    n_constants: int  # C
    n_predicates: int  # P
    atom_width: int  # W, 1 + the largest arity
    n_facts: int  # N
    n_rules: int  # R
    max_rule_atoms: int  # M, atoms of the longest rule, head included
    max_rules_per_predicate: int  # the most rules that share a head predicate


class KnowledgeBase(NamedTuple):
    """Facts, rules and their indices; every leaf is fixed while a policy is trained."""

    facts: I32[Tensor, "N W"]  # distinct, in lexicographic order
    key_prefixes: tuple[Tensor, ...]  # of the atoms' keys, see `keys`; none unless atoms are wide
    fact_index: HashTable  # the key of each fact -> its id
    argument_index: (
        HashTable  # each (argument place, predicate, argument) -> start and number of its facts in `pair_facts`
    )
    argument_postings: I32[Tensor, "JN1"]  # fact ids, ascending within a pair; 0 at the end
    fact_offsets: I32[Tensor, "P2"]  # facts of predicate p: fact_start[p] to fact_start[p + 1]
    rules: I32[Tensor, "R M W"]  # head first, then the body; empty atoms are 0
    rule_offsets: I64[Tensor, "P1"]  # rules of predicate p: rule_order[rule_start[p] : rule_start[p + 1]]
    rule_ids_by_predicate: I64[Tensor, "R"]  # rule ids grouped by head predicate, in file order
    support: F32[Tensor, "R"]  # known pairs that the rule derives
    body_pairs: F32[Tensor, "R"]  # pairs that the rule derives


def build(
    facts: np.ndarray,
    rules: np.ndarray,
    *,
    n_constants: int,
    n_predicates: int,
    device: torch.device | str = "cpu",
) -> tuple[KnowledgeBase, KBSizes]:
    """The knowledge base of a fact table and a rule table, and its static sizes.

    `support` and `body_pairs` start at 0; `consequences.with_confidence` fills them.

    Args:
      facts: integers [N, W], ground, in any order; duplicates are merged.
      rules: integers [R, M, W], head first; a variable is an id above `n_constants`.
    Errors: ValueError naming the row when an id is out of range, a fact is not ground, or a head variable
      is missing from the body (an unsafe rule derives infinitely many atoms).
    """
    facts, rules = np.asarray(facts), np.asarray(rules)
    _validate(facts, rules, n_constants, n_predicates)
    table = torch.from_numpy(np.ascontiguousarray(facts, dtype=np.int32)).to(device)
    table = table[sort_and_index_atoms(table, n_predicates, n_constants)[0]]
    heads = torch.from_numpy(np.ascontiguousarray(rules[:, 0, 0], dtype=np.int64)).to(device)
    rule_order = torch.argsort(heads, stable=True)
    rule_start = torch.searchsorted(heads[rule_order], torch.arange(n_predicates + 2, device=device))
    zeros = torch.zeros(len(rules), device=device)
    kb = KnowledgeBase(
        **_fact_index(table, n_predicates, n_constants),
        rules=torch.from_numpy(np.ascontiguousarray(rules, dtype=np.int32)).to(device),
        rule_offsets=rule_start,
        rule_ids_by_predicate=rule_order,
        support=zeros,
        body_pairs=zeros,
    )
    sizes = KBSizes(
        n_constants=n_constants,
        n_predicates=n_predicates,
        atom_width=table.shape[1],
        n_facts=table.shape[0],
        n_rules=len(rules),
        max_rule_atoms=rules.shape[1],
        max_rules_per_predicate=int((rule_start[1:] - rule_start[:-1]).max()) if len(rules) else 0,
    )
    return kb, sizes


def fact_id(kb: KnowledgeBase, sizes: KBSizes, atom: I64[Tensor, "... W"]) -> I64[Tensor, "..."]:
    """The row of each atom in `facts`, -1 where it is not a fact (an atom with a variable never is)."""
    key, known = encode_atoms(kb.key_prefixes, sizes, atom)
    row, found = row_index.hash_lookup(kb.fact_index, key)
    return torch.where(known & found, row, -1)


def encode_atoms(levels: tuple[Tensor, ...], sizes: KBSizes, atom: Tensor) -> tuple[Tensor, Tensor]:
    """The key of each atom, and whether it has one: a ground atom whose ids are in range."""
    known, columns = atom[..., 0] > 0, []
    for column, top in zip(atom.unbind(-1), [sizes.n_predicates] + [sizes.n_constants] * (sizes.atom_width - 1)):
        known = known & (column <= top)
        columns.append(torch.where(known, column, 0).to(torch.int64))
    key, found = row_index.encode_with_prefixes(
        levels, columns, _atom_bits(sizes.n_predicates, sizes.n_constants, sizes.atom_width)
    )
    return key, known & found


def find_atoms(atom_index: tuple[Tensor, ...], sizes: KBSizes, atom: I64[Tensor, "... W"]) -> I64[Tensor, "..."]:
    """The row of each atom in a table that `index_atoms` sorted, -1 where it is not there."""
    key, known = encode_atoms(atom_index[:-1], sizes, atom)
    row, hit = row_index.binary_search(atom_index[-1], key)
    return torch.where(known & hit, row, -1)


def sort_and_index_atoms(
    table: I64[Tensor, "N W"], n_predicates: int, n_constants: int
) -> tuple[I64[Tensor, "n"], tuple[Tensor, ...]]:
    """The rows of the distinct atoms of a table in lexicographic order, and the index that `locate` reads."""
    levels, key = row_index.encode_rows(table.unbind(1), _atom_bits(n_predicates, n_constants, table.shape[1]))
    key, order = torch.sort(key, stable=True)
    first = torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]])
    return order[first], (*levels, key[first])


def contains(kb: KnowledgeBase, sizes: KBSizes, atom: I64[Tensor, "... W"]) -> Bool[Tensor, "..."]:
    """Whether each atom is a fact."""
    return fact_id(kb, sizes, atom) >= 0


def index_sorted_atoms(atoms: I32[Tensor, "N W"], n_predicates: int, n_constants: int) -> tuple[Tensor, ...]:
    """The index that `locate` reads, of distinct atoms in lexicographic order."""
    levels, key = row_index.encode_rows(atoms.unbind(1), _atom_bits(n_predicates, n_constants, atoms.shape[1]))
    return (*levels, key)


def remove_fact(kb: KnowledgeBase, sizes: KBSizes, fact: I64[Tensor, "W"]) -> tuple[KnowledgeBase, KBSizes]:
    """The knowledge base less one fact, for a query that must not prove itself; as it is when the fact is not there.

    `support` and `body_pairs` stay those of all facts: see `confidence`.
    """
    row = int(fact_id(kb, sizes, fact))
    if row < 0:
        return kb, sizes
    facts = torch.cat([kb.facts[:row], kb.facts[row + 1 :]])
    kb = kb._replace(**_fact_index(facts, sizes.n_predicates, sizes.n_constants))
    return kb, replace(sizes, n_facts=sizes.n_facts - 1)


def lookup_facts(
    kb: KnowledgeBase, sizes: KBSizes, goal: I64[Tensor, "... W"], max_fanout: int
) -> tuple[I64[Tensor, "... F"], Bool[Tensor, "... F"], I64[Tensor, "..."]]:
    """Facts that may match a goal: those that agree with it in its predicate and its most selective argument.

    A goal without a constant argument is looked up by its predicate alone.

    Args:
      width: F, how many facts a row can hold.
    Returns:
      fact ids in ascending order, which of them are filled, and how many there are in all; more than F
      is the caller's to flag, never to ignore.
    """
    predicate = torch.where((goal[..., 0] > 0) & (goal[..., 0] <= sizes.n_predicates), goal[..., 0], 0)
    argument = goal[..., 1:].movedim(-1, 0)
    bound = (argument > 0) & (argument <= sizes.n_constants)
    key = _pair_keys(predicate, torch.where(bound, argument, 0), sizes.n_predicates, sizes.n_constants)
    span, _ = row_index.hash_lookup(kb.argument_index, key)
    count, place = torch.where(bound, span & ((1 << row_index.ROW_COUNT_BITS) - 1), _NO_LIMIT).min(0)
    first, last = kb.fact_offsets[predicate].to(torch.int64), kb.fact_offsets[predicate + 1].to(torch.int64)
    unbound = count == _NO_LIMIT  # the facts of the first place are in the order of all facts
    count = torch.where(unbound, last - first, count)
    start = torch.where(unbound, first, span.gather(0, place[None]).squeeze(0) >> row_index.ROW_COUNT_BITS)
    slot = torch.arange(max_fanout, device=goal.device)
    filled = slot < count[..., None]
    row = torch.where(filled, start[..., None] + slot, 0)
    fact = kb.argument_postings.index_select(0, row.reshape(-1)).reshape(row.shape)
    return fact.to(torch.int64), filled, count


def lookup_rules(
    kb: KnowledgeBase, sizes: KBSizes, predicate: I64[Tensor, "..."]
) -> tuple[I64[Tensor, "... H"], Bool[Tensor, "... H"]]:
    """Ids of the rules whose head has this predicate, in file order, and which of the H slots are filled."""
    start, stop = kb.rule_offsets[predicate], kb.rule_offsets[predicate + 1]
    row = start[..., None] + torch.arange(sizes.max_rules_per_predicate, device=predicate.device)
    filled = row < stop[..., None]
    return kb.rule_ids_by_predicate[torch.where(filled, row, 0)], filled


def rule_confidence(kb: KnowledgeBase, leave_one_out: bool = False) -> F32[Tensor, "R"]:
    """support / body pairs of each rule, 0 where a rule has no pair.

    Args:
      left_out: the query is itself a known fact: it counts neither as support nor as a pair.
    """
    less = float(leave_one_out)
    support, pairs = (kb.support - less).clamp_min(0.0), (kb.body_pairs - less).clamp_min(0.0)
    return torch.where(pairs > 0, support / pairs.clamp_min(1.0), 0.0)


def compute_max_fanout(kb: KnowledgeBase, sizes: KBSizes, max_height: int) -> int:
    """The most facts that one lookup can return in a search from a ground query, goals solved left to right.

    Answers are ground, so which arguments of a body atom are bound follows from which arguments of its head are. The
    binding patterns reached in `max_height` rule applications are few, and each has a widest lookup.
    """
    rules_of: dict[int, list[np.ndarray]] = {}
    for rule in kb.rules.cpu().numpy():
        rules_of.setdefault(int(rule[0, 0]), []).append(rule)
    frontier = {(predicate, (True,) * (sizes.atom_width - 1)) for predicate in rules_of}
    reached: set[BindingPattern] = set()
    for _ in range(max_height):
        rules = [(rule, bound) for predicate, bound in frontier for rule in rules_of.get(predicate, [])]
        frontier = {p for rule, bound in rules for p in _body_patterns(rule, bound, sizes.n_constants)} - reached
        reached |= frontier
    return max((_widest(kb, sizes, predicate, bound) for predicate, bound in reached), default=1)


def n_bytes(kb: KnowledgeBase) -> int:
    """The memory that a knowledge base holds, in bytes."""
    return sum(t.numel() * t.element_size() for t in tree.leaves(kb))


def _atom_bits(n_predicates: int, n_constants: int, width: int) -> list[int]:
    return [n_predicates.bit_length()] + [n_constants.bit_length()] * (width - 1)


def _pair_keys(predicate: Tensor, arguments: Tensor, n_predicates: int, n_constants: int) -> Tensor:
    """The key of each argument [J, ...]: ascending by place, then predicate, then argument."""
    place = torch.arange(len(arguments), device=arguments.device).view(-1, *[1] * predicate.dim())
    return (place * (n_predicates + 1) + predicate) * (n_constants + 1) + arguments


def _fact_index(table: I32[Tensor, "N W"], n_predicates: int, n_constants: int) -> dict[str, Any]:
    """The fields of a KnowledgeBase that follow from its facts, which are distinct and in order."""
    *levels, atom_keys = index_sorted_atoms(table, n_predicates, n_constants)
    ids, edges = (torch.arange(n, device=table.device, dtype=torch.int32) for n in (len(table), n_predicates + 2))
    return {
        "facts": table,
        "key_prefixes": tuple(levels),
        "fact_index": row_index.build_hash_table(torch.stack([atom_keys, ids], dim=1)),
        "fact_offsets": torch.searchsorted(table[:, 0].contiguous(), edges, out_int32=True),
        **_pair_index(table, n_predicates, n_constants),
    }


def _pair_index(table: I32[Tensor, "N W"], n_predicates: int, n_constants: int) -> dict[str, Any]:
    """The fields that find facts by one argument; large tables are let go as soon as they are used."""
    predicate, arguments = table[:, 0].to(torch.int64), table[:, 1:].T
    key, order = torch.sort(_pair_keys(predicate, arguments, n_predicates, n_constants).view(-1), stable=True)
    order = (order % max(len(table), 1)).to(torch.int32)
    return {
        "argument_index": row_index.build_hash_table(row_index.run_length_encode(key)),
        "argument_postings": hugepages.on_huge_pages(pad(order, (0, 1))),
    }


def _validate(facts: np.ndarray, rules: np.ndarray, n_constants: int, n_predicates: int) -> None:
    if facts.ndim != 2 or facts.shape[1] < 2 or rules.ndim != 3 or rules.shape[2] != facts.shape[1]:
        raise ValueError(f"want facts [N, W] and rules [R, M, W] of one width, got {facts.shape} and {rules.shape}")
    names, arguments = facts[:, 0], facts[:, 1:]
    for i in np.flatnonzero(((arguments < 0) | (arguments > n_constants)).any(1))[:1]:
        raise ValueError(f"fact {i} {facts[i].tolist()}: want constants from 1 to {n_constants}")
    for i in np.flatnonzero((names < 1) | (names > n_predicates))[:1]:
        raise ValueError(f"fact {i} {facts[i].tolist()}: want a predicate from 1 to {n_predicates}")
    if len(rules) and (rules[:, 0, 0].min() < 1 or rules[..., 0].max() > n_predicates):
        raise ValueError(f"rules: want predicates from 1 to {n_predicates}")
    for i, rule in enumerate(rules):
        head, body = set(rule[0, 1:].tolist()), set(rule[1:, 1:].ravel().tolist())
        if {v for v in head if v > n_constants} - body:
            raise ValueError(f"rule {i} {rule.tolist()}: every variable of the head must occur in the body")


def _body_patterns(rule: np.ndarray, bound: tuple[bool, ...], n_constants: int) -> list[BindingPattern]:
    known = {int(v) for v, b in zip(rule[0, 1:], bound) if b}
    found = []
    for atom in rule[1:]:
        if atom[0]:
            found.append((int(atom[0]), tuple(int(t) <= n_constants or int(t) in known for t in atom[1:])))
            known |= {int(t) for t in atom[1:]}
    return found


def _widest(kb: KnowledgeBase, sizes: KBSizes, predicate: int, bound: tuple[bool, ...]) -> int:
    """An upper bound of `facts_for`'s count for goals of this pattern: the best of their single-argument lookups."""
    low, high = kb.fact_offsets[predicate : predicate + 2].tolist()
    if low == high:
        return 1
    columns = kb.facts[low:high, 1:].unbind(1)
    widths = [int(torch.unique(c, return_counts=True)[1].max()) for c, is_bound in zip(columns, bound) if is_bound]
    return min([high - low, *widths])
