"""KnowledgeBase: facts and rules as sorted, indexed tensors.

Ids: 0 is padding, 1..C are constants, above C are variables; predicates count from 1 in an id space of their own.
An atom is `[predicate, argument...]`, padded with 0 to the width W of the widest predicate.

Facts are distinct and sorted, so a fact's id is its row. Two hash tables answer every lookup, at a cost that hardly
depends on the number of facts: `fact_index` by the whole atom, `argument_index` by (argument position, predicate,
argument).

A ranking query is a triple and a side: `HEAD` replaces its first argument, `TAIL` its second. `TripleIndex` tells for
many queries at once which entities complete a query to a triple of the index (`list_answers`), and whether a triple is
in the index (`contains_triple`). `FilterIndex` holds the two indices that filtered ranking needs.

Entry points: `build` and `from_dataset` make a knowledge base; `contains`, `fact_id`, `lookup_facts` and `lookup_rules`
read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo.core import tree
from funcppo.core.types import F32, I32, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.row_index import (
    HashTable,
    Lookup,
    count_to,
    from_numpy,
    int_list,
    row_numbers,
    rule_tuples,
    value_counts,
)

if TYPE_CHECKING:
    from funcppo.kg.graph.dataset import Dataset

HEAD, TAIL = 1, 2  # sides of a ranking query: the argument that is replaced
SIDE_NAMES = {HEAD: "head", TAIL: "tail"}
# Keys that a CPU looks up in one call, in half a second: a signal waits for its end.
MAX_SEARCHED_AT_ONCE = 1 << 22
_NO_LIMIT = 1 << row_index.ROW_COUNT_BITS  # more facts than there can be
_KEY_PREFIX = "key_prefix_"  # names of prefix tables in `index_facts`
# a predicate, and which of its arguments are bound
BindingPattern = tuple[int, tuple[bool, ...]]


def other_side(side: int) -> int:
    """Return the side of a binary atom that a side is not."""
    return HEAD + TAIL - side


@dataclass(frozen=True, kw_only=True, slots=True)
class KBSizes:
    """Static sizes of a knowledge base; changing them recompiles compiled functions."""

    n_constants: int  # C
    n_predicates: int  # P
    atom_width: int  # W, 1 + the largest arity
    n_facts: int  # N
    n_rules: int  # R
    max_rule_atoms: int  # M, atoms of the longest rule, head included
    max_rules_per_predicate: int  # the most rules that share a head predicate

    @property
    def atom_bits(self) -> list[int]:
        """Return how many bits hold each column of an atom."""
        of_argument = self.n_constants.bit_length()
        n_arguments = self.atom_width - 1
        return [self.n_predicates.bit_length()] + [of_argument] * n_arguments


class KnowledgeBase(NamedTuple):
    """Facts, rules and their indices; every leaf is fixed while a policy is trained."""

    facts: I32[Tensor, "N W"]  # distinct, in lexicographic order
    # prefix tables of the atoms' keys, see `row_index`; none unless atoms are wide
    key_prefixes: tuple[Tensor, ...]
    fact_index: HashTable  # the key of each fact -> its id
    # (argument position, predicate, argument) -> span of its facts in argument_postings
    argument_index: HashTable
    # fact ids, ascending within a span; one 0 at the end
    argument_postings: I32[Tensor, "JN1"]
    # facts of predicate p: rows fact_offsets[p] to fact_offsets[p + 1]
    fact_offsets: I32[Tensor, "P2"]
    # head first, then the body; missing atoms are 0
    rules: I32[Tensor, "R M W"]
    # rules of predicate p: rule_offsets[p] to rule_offsets[p + 1] of the next field
    rule_offsets: I64[Tensor, "P1"]
    # rule ids grouped by head predicate, in file order
    rule_ids_by_predicate: I64[Tensor, "R"]
    support: F32[Tensor, "R"]  # number of known atoms that the rule derives
    body_pairs: F32[Tensor, "R"]  # number of atoms that the rule derives


class _FactTables(NamedTuple):
    """The first fields of a `KnowledgeBase`, which follow from its facts alone."""

    facts: Tensor
    key_prefixes: tuple[Tensor, ...]
    fact_index: HashTable
    argument_index: HashTable
    argument_postings: Tensor
    fact_offsets: Tensor


class AtomIndex(NamedTuple):
    """Sorted keys of distinct atoms: the row of an atom is the position of its key."""

    key_prefixes: tuple[Tensor, ...]
    keys: I64[Tensor, "N"]


def build(
    facts: np.ndarray,
    rules: np.ndarray,
    *,
    n_constants: int,
    n_predicates: int,
    device: torch.device | str = "cpu",
    tables: Mapping[str, np.ndarray] | None = None,
) -> tuple[KnowledgeBase, KBSizes]:
    """Build the knowledge base of a fact table and a rule table.

    `support` and `body_pairs` start at 0; `fixpoint.with_confidence` sets them.

    Args:
      facts: integers [N, W], ground, in any order; duplicates are merged.
      rules: integers [R, M, W], head first; an id above `n_constants` is a variable. A rule without a body atom for a
        variable of its head would derive infinitely many atoms: readers of rules refuse it.
      tables: `index_facts` of these facts, whose memory the knowledge base shares; None to make them.

    Returns:
      The knowledge base on `device`, and its static sizes.

    Raises:
      ValueError: there are too many facts.
    """
    facts = np.asarray(facts)
    rules = np.asarray(rules)

    # Rules, grouped by head predicate.
    rule_table = from_numpy(np.ascontiguousarray(rules, dtype=np.int32))
    rule_table = rule_table.to(device)
    heads = rule_table[:, 0, 0].long()
    rule_order = torch.argsort(heads, stable=True)
    rule_offsets = torch.searchsorted(
        heads[rule_order], torch.arange(n_predicates + 2, device=device)
    )
    zeros = torch.zeros(len(rules), device=device)
    sizes = KBSizes(
        n_constants=n_constants,
        n_predicates=n_predicates,
        atom_width=facts.shape[1],
        n_facts=len(facts),
        n_rules=len(rules),
        max_rule_atoms=rules.shape[1],
        max_rules_per_predicate=int(torch.diff(rule_offsets).max()),
    )
    indexed = (
        _sort_and_index_facts(facts, sizes, device)
        if tables is None
        else _from_arrays(tables, device)
    )
    kb = KnowledgeBase(
        *indexed,
        rules=rule_table,
        rule_offsets=rule_offsets,
        rule_ids_by_predicate=rule_order,
        support=zeros,
        body_pairs=zeros,
    )
    return kb, replace(sizes, n_facts=len(kb.facts))


def from_dataset(dataset: Dataset) -> tuple[KnowledgeBase, KBSizes]:
    """Build the knowledge base of a data set on the CPU; see `build`."""
    return build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
        tables=dataset.fact_tables,
    )


def index_facts(
    facts: np.ndarray, *, n_constants: int, n_predicates: int
) -> dict[str, np.ndarray]:
    """Return the sorted facts and their indices, which `build` makes of facts alone, as {name: array}.

    Arguments and errors are those of `build`.
    """
    no_rules = np.zeros((0, 1, facts.shape[1]), np.int32)
    kb, _ = build(
        facts, no_rules, n_constants=n_constants, n_predicates=n_predicates
    )
    tensors: dict[str, Tensor] = {}
    for name in _FactTables._fields:
        part: object = getattr(kb, name)
        if isinstance(part, HashTable):
            parts = part._asdict().items()
            tensors |= {f"{name}.{field}": tensor for field, tensor in parts}
        elif isinstance(part, Tensor):
            tensors |= {name: part}
    for i, prefix in enumerate(kb.key_prefixes):
        tensors |= {f"{_KEY_PREFIX}{i}": prefix}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def contains(
    kb: KnowledgeBase, sizes: KBSizes, atom: I64[Tensor, "... W"]
) -> Bool[Tensor, "..."]:
    """Check, per atom, whether it is a fact."""
    return fact_id(kb, sizes, atom) >= 0


def fact_id(
    kb: KnowledgeBase, sizes: KBSizes, atom: I64[Tensor, "... W"]
) -> I64[Tensor, "..."]:
    """Return the row of each atom in `facts`; -1 for an atom that is no fact (one with a variable never is)."""
    key, is_valid = _encode_atoms(kb.key_prefixes, sizes, atom)
    row, found = row_index.hash_lookup(kb.fact_index, key)
    return torch.where(is_valid & found, row, -1)


def _encode_atoms(
    key_prefixes: tuple[Tensor, ...], sizes: KBSizes, atom: Tensor
) -> Lookup:
    """Compute the key of each atom.

    Returns:
      value: the key.
      found: whether the atom has one: it is ground, its ids are in range, and the prefix tables hold it.
    """
    is_valid = atom[..., 0] > 0
    columns: list[Tensor] = []
    for place, column in enumerate(atom.unbind(-1)):
        largest = sizes.n_constants if place else sizes.n_predicates
        is_valid = is_valid & (column <= largest)
        columns.append(torch.where(is_valid, column, 0).to(torch.int64))

    key, found = row_index.encode_with_prefixes(
        key_prefixes, columns, sizes.atom_bits
    )
    return Lookup(key, is_valid & found)


def find_atoms(
    atom_index: AtomIndex, sizes: KBSizes, atom: I64[Tensor, "... W"]
) -> I64[Tensor, "..."]:
    """Return the row of each atom in the indexed table; -1 for an atom that is not in the table."""
    key, is_valid = _encode_atoms(atom_index.key_prefixes, sizes, atom)
    row, found = row_index.binary_search(atom_index.keys, key)
    return torch.where(is_valid & found, row, -1)


def sort_and_index_atoms(
    table: I64[Tensor, "N W"], sizes: KBSizes
) -> tuple[I64[Tensor, "n"], AtomIndex]:
    """Sort the atoms of a table, drop duplicates and index them for `find_atoms`.

    Returns:
      The first row of each distinct atom, in lexicographic order of the atoms, and the index of these.
    """
    index = index_sorted_atoms(table, sizes)
    key, order = row_index.sort_keys(index.keys)
    first = row_index.first_of_run(key)
    return order[first], index._replace(keys=key[first])


def index_sorted_atoms(atoms: I32[Tensor, "N W"], sizes: KBSizes) -> AtomIndex:
    """Index distinct atoms that are in lexicographic order already."""
    return AtomIndex(*row_index.encode_rows(atoms.unbind(1), sizes.atom_bits))


def lookup_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    goal: I64[Tensor, "... W"],
    max_fanout: int,
) -> tuple[I64[Tensor, "... F"], Bool[Tensor, "... F"], I64[Tensor, "..."]]:
    """Look up the facts that may match a goal: those that agree in predicate and in the most selective argument.

    A goal without a constant argument is looked up by its predicate alone.

    Args:
      max_fanout: F, the number of facts that a row can hold.

    Returns:
      Ids in ascending order, which of the F slots are filled, and the number of facts in all. If it is more than F, the
      caller must flag it.
    """
    in_range = (goal[..., 0] > 0) & (goal[..., 0] <= sizes.n_predicates)
    predicate = torch.where(in_range, goal[..., 0], 0)
    argument = goal[..., 1:].movedim(-1, 0)
    is_constant = (argument > 0) & (argument <= sizes.n_constants)

    # The span of facts for each constant argument; the shortest is the most selective.
    position = row_numbers(argument)
    span_start, span_count = find_postings(
        kb,
        sizes,
        position.view(-1, *[1] * predicate.dim()),
        predicate,
        torch.where(is_constant, argument, 0),
    )
    count, position = torch.where(is_constant, span_count, _NO_LIMIT).min(0)

    # Without a constant: all facts of the predicate. Postings of position 0 are in the order of all facts.
    first = kb.fact_offsets[predicate].to(torch.int64)
    last = kb.fact_offsets[predicate + 1].to(torch.int64)
    no_constant = count == _NO_LIMIT
    count = torch.where(no_constant, last - first, count)
    start = torch.where(
        no_constant, first, span_start.gather(0, position[None]).squeeze(0)
    )

    slot = count_to(max_fanout, goal)
    mask = slot < count[..., None]
    row = torch.where(mask, start[..., None] + slot, 0)
    fact = kb.argument_postings.index_select(0, row.reshape(-1)).reshape(
        row.shape
    )
    return fact.to(torch.int64), mask, count


def find_postings(
    kb: KnowledgeBase,
    sizes: KBSizes,
    position: I64[Tensor, "n"],
    predicate: I64[Tensor, "n"],
    argument: I64[Tensor, "n"],
) -> row_index.Span:
    """Return the span of `argument_postings` with the facts of a predicate that have a given argument.

    The argument position counts from 0. Facts of a span are in the order of `facts`; without such facts the span is
    empty.
    """
    key = _argument_key(position, predicate, argument, sizes)
    span, _ = row_index.hash_lookup(kb.argument_index, key)
    return row_index.decode_span(span)


def lookup_rules(
    kb: KnowledgeBase, sizes: KBSizes, predicate: I64[Tensor, "..."]
) -> tuple[I64[Tensor, "... H"], Bool[Tensor, "... H"]]:
    """Look up the rules whose head has a given predicate.

    Returns:
      Ids in file order, and which of the H slots are filled, H being the most rules that share a predicate.
    """
    start = kb.rule_offsets[predicate]
    stop = kb.rule_offsets[predicate + 1]
    row = start[..., None] + count_to(sizes.max_rules_per_predicate, predicate)
    mask = row < stop[..., None]
    return kb.rule_ids_by_predicate[torch.where(mask, row, 0)], mask


def rule_confidence(
    kb: KnowledgeBase, leave_one_out: bool = False
) -> F32[Tensor, "R"]:
    """Compute the confidence of each rule, support / body pairs; 0 for a rule that derives nothing.

    Args:
      leave_one_out: the query is itself a known fact: it counts neither as support nor as a body pair.
    """
    excluded = float(leave_one_out)
    support = (kb.support - excluded).clamp_min(0.0)
    pairs = (kb.body_pairs - excluded).clamp_min(0.0)
    return torch.where(pairs > 0, support / pairs.clamp_min(1.0), 0.0)


def compute_max_fanout(
    kb: KnowledgeBase, sizes: KBSizes, max_height: int
) -> int:
    """Return the most facts that one lookup can return in a search from a ground query.

    Goals are solved left to right. Answers are ground, so which arguments of a body atom are bound follows from which
    arguments of its head are. The binding patterns reached in `max_height` rule applications are few, and each has a
    widest lookup.
    """
    rules = rule_tuples(kb.rules)
    all_bound = (True,) * (sizes.atom_width - 1)
    frontier = {(rule[0][0], all_bound) for rule in rules}
    reached: set[BindingPattern] = set()

    for _ in range(max_height):
        patterns: set[BindingPattern] = set()
        for rule in rules:
            for predicate, is_bound in frontier:
                if predicate == rule[0][0]:
                    patterns |= _body_patterns(rule, is_bound, sizes)
        frontier = patterns - reached
        reached |= frontier
    return max((_max_lookup(kb, *pattern) for pattern in reached), default=1)


def max_known_fanout(kb: KnowledgeBase) -> int:
    """Return the most facts of a predicate that have one argument in common."""
    predicate, *columns = kb.facts.long().unbind(1)
    found = [value_counts(predicate << 32 | column) for column in columns]
    return max((int(x.max()) for x in found if len(x)), default=1)


def n_bytes(kb: KnowledgeBase) -> int:
    """Return the memory that a knowledge base holds, in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(kb))


def _from_arrays(
    arrays: Mapping[str, np.ndarray], device: torch.device | str
) -> _FactTables:
    """Return the tables that `index_facts` gave as arrays; on a CPU they share their memory."""
    tensors = {name: from_numpy(a).to(device) for name, a in arrays.items()}
    prefixes = sorted(name for name in tensors if name.startswith(_KEY_PREFIX))
    fact_index, argument_index = (
        HashTable(*(tensors[f"{name}.{part}"] for part in HashTable._fields))
        for name in ("fact_index", "argument_index")
    )
    return _FactTables(
        tensors["facts"],
        tuple(tensors[name] for name in prefixes),
        fact_index,
        argument_index,
        tensors["argument_postings"],
        tensors["fact_offsets"],
    )


def _sort_and_index_facts(
    facts: np.ndarray, sizes: KBSizes, device: torch.device | str
) -> _FactTables:
    """Index facts that come in any order; duplicates are merged."""
    if len(facts) >= _NO_LIMIT:
        raise ValueError(
            f"expected fewer than {_NO_LIMIT:,} facts, got {len(facts):,}"
        )
    unsorted = from_numpy(np.ascontiguousarray(facts, dtype=np.int32))
    unsorted = unsorted.to(device)
    rows, (prefixes, keys) = sort_and_index_atoms(unsorted, sizes)
    table = unsorted[rows]
    del unsorted, rows

    ids = torch.arange(len(table), device=table.device, dtype=torch.int32)
    entries = torch.stack([keys, ids], dim=1)
    del keys, ids
    fact_index = row_index.build_hash_table(entries)
    del entries
    predicates = torch.arange(
        sizes.n_predicates + 2, device=table.device, dtype=torch.int32
    )
    fact_offsets = torch.searchsorted(
        table[:, 0].contiguous(), predicates, out_int32=True
    )
    argument_index, postings = _index_arguments(table, sizes)
    return _FactTables(
        table, prefixes, fact_index, argument_index, postings, fact_offsets
    )


def _index_arguments(
    facts: I32[Tensor, "N W"], sizes: KBSizes
) -> tuple[HashTable, Tensor]:
    """Build the index of facts by (argument position, predicate, argument), and its postings.

    Large temporaries are freed as soon as they are used.
    """
    predicate = facts[:, 0].to(torch.int64)
    spans: list[Tensor] = []
    postings: list[Tensor] = []

    # Keys of a position follow those of the position before, so each is sorted by itself.
    for position, argument in enumerate(facts[:, 1:].unbind(1)):
        key, order = row_index.sort_keys(
            _argument_key(position, predicate, argument, sizes)
        )
        postings.append(order.to(torch.int32))
        del order
        start = position * len(facts) << row_index.ROW_COUNT_BITS
        span = row_index.run_length_encode(key)
        spans.append(span + span.new_tensor([0, start]))
        del key, span
    del predicate

    argument_postings = row_index.on_huge_pages(
        pad(torch.cat(postings), (0, 1))
    )
    del postings
    return row_index.build_hash_table(torch.cat(spans)), argument_postings


def _argument_key(
    position: Tensor | int,
    predicate: Tensor,
    argument: Tensor,
    sizes: KBSizes,
) -> Tensor:
    """Return the key of each argument: ascending by position, then predicate, then argument."""
    of_position = position * (sizes.n_predicates + 1) + predicate
    return of_position * (sizes.n_constants + 1) + argument


def _body_patterns(
    rule: Sequence[tuple[int, ...]],
    is_bound: tuple[bool, ...],
    sizes: KBSizes,
) -> set[BindingPattern]:
    """Return the binding pattern of each body atom of a rule, given which head arguments are bound.

    Body atoms are solved left to right.
    """
    (_, *head), *body = rule
    bound = {term for term, is_known in zip(head, is_bound) if is_known}
    patterns: set[BindingPattern] = set()
    for predicate, *terms in body:
        if predicate:
            known = (t <= sizes.n_constants or t in bound for t in terms)
            patterns.add((predicate, tuple(known)))
            bound.update(terms)
    return patterns


def _max_lookup(
    kb: KnowledgeBase, predicate: int, is_bound: tuple[bool, ...]
) -> int:
    """Return an upper bound of the facts that `lookup_facts` returns for goals of a binding pattern."""
    first, last = int_list(kb.fact_offsets[predicate : predicate + 2])
    if first == last:
        return 1
    widths = [last - first]
    for column, bound in zip(kb.facts[first:last, 1:].unbind(1), is_bound):
        if bound:
            widths.append(int(value_counts(column).max()))
    return min(widths)


# -- triples by the two sides of a ranking query


class TripleIndex(NamedTuple):
    """Distinct triples as ascending integer keys, one table of keys for each side of a ranking query.

    The key of a triple for a side is (predicate, given argument, replaced argument) in base C + 1, so that all answers
    to one query are neighbours.
    """

    base: I64[Tensor, ""]  # C + 1
    head_query_keys: I64[Tensor, "N"]  # keys (predicate, tail, head)
    tail_query_keys: I64[Tensor, "N"]  # keys (predicate, head, tail)


class FilterIndex(NamedTuple):
    """Known and derivable triples, in which the candidates of a filtered ranking are looked up."""

    # the known triples, of all splits and of facts.txt, which are filtered from the candidates
    true_triples: TripleIndex
    # the triples that T_P derives, without facts that no other facts prove if they are asked
    derivable_triples: TripleIndex


class Answers(NamedTuple):
    """Answers to a batch of queries, in ascending order of query and entity."""

    query_row: I64[Tensor, "L"]  # row of the query in the batch
    triple_key: I64[Tensor, "L"]  # key of the answering triple
    entity: I64[Tensor, "L"]  # its replaced argument


def build_triple_index(
    atoms: I64[Tensor, "N W"],
    n_constants: int,
    pool: I64[Tensor, "E"] | None = None,
) -> TripleIndex:
    """Build the index of the binary atoms of a table of ground atoms.

    Args:
      atoms: in any order, repetitions allowed. Atoms of other than two arguments answer no ranking query and are left
        out.
      pool: index on each side only triples whose replaced argument is one of these entities, which ascend; None indexes
        all.

    Raises:
      ValueError: the keys of so many predicates and constants exceed 63 bits.
    """
    atoms = atoms.to(torch.int64)
    base = n_constants + 1
    n_predicates = int(atoms[:, 0].max()) if len(atoms) else 0
    if (n_predicates + 1) * base * base >= 1 << row_index.KEY_BITS:
        raise ValueError(
            f"expected triples whose keys fit {row_index.KEY_BITS} bits, "
            f"got {n_predicates} predicates and {n_constants} constants"
        )

    triples = binary_atoms(atoms)
    return TripleIndex(
        base=torch.tensor(base, device=atoms.device),
        head_query_keys=_sorted_keys(triples, base, HEAD, pool),
        tail_query_keys=_sorted_keys(triples, base, TAIL, pool),
    )


def contains_triple(
    index: TripleIndex, atoms: I64[Tensor, "... W"], side: int
) -> Bool[Tensor, "..."]:
    """Check, per atom, whether the index of a side holds it.

    The index holds only triples with a replaced argument in its pool.
    """
    return contains_key(
        index, _query_key(index, atoms, side) + atoms[..., side], side
    )


def contains_key(
    index: TripleIndex, triple_key: I64[Tensor, "..."], side: int
) -> Bool[Tensor, "..."]:
    """Check, per triple key, whether the index of a side holds it."""
    keys = _side_keys(index, side)
    parts = torch.split(triple_key.flatten(), MAX_SEARCHED_AT_ONCE)
    found = [row_index.binary_search(keys, part).found for part in parts]
    return torch.cat(found).view(triple_key.shape)


def answer_range(
    index: TripleIndex, queries: I64[Tensor, "Q W"], side: int
) -> tuple[I64[Tensor, "Q"], I64[Tensor, "Q"]]:
    """Return where the answers to each query start and stop among the keys of a side."""
    keys = _side_keys(index, side)
    query_key = _query_key(index, queries, side)
    start = torch.searchsorted(keys, query_key)
    return start, torch.searchsorted(keys, query_key + index.base)


def list_answers(
    index: TripleIndex, queries: I64[Tensor, "Q W"], side: int
) -> Answers:
    """Return all triples of the index that answer each query."""
    start, stop = answer_range(index, queries, side)
    query_row, position = row_index.expand_ranges(start, stop - start)
    triple_key = _side_keys(index, side)[position]
    return Answers(query_row, triple_key, triple_key % index.base)


def binary_atoms(atoms: Tensor) -> Tensor:
    """Return the atoms with exactly two arguments."""
    if atoms.shape[1] <= TAIL:
        return atoms.new_zeros((0, TAIL + 1))
    return atoms[is_binary(atoms)]


def is_binary(atoms: Tensor) -> Tensor:
    """Check, per atom, whether it has exactly two arguments."""
    if atoms.shape[1] <= TAIL:
        return torch.zeros_like(atoms[:, 0], dtype=torch.bool)
    has_second_argument = atoms[:, TAIL] > 0
    has_no_third_argument = (atoms[:, TAIL + 1 :] == 0).all(1)
    return has_second_argument & has_no_third_argument


def _sorted_keys(
    triples: Tensor, base: int, side: int, pool: Tensor | None
) -> Tensor:
    """Return the ascending, distinct keys of triples for a side; only those with a replaced argument in the pool."""
    given, replaced = triples[:, other_side(side)], triples[:, side]
    keys = (triples[:, 0] * base + given) * base + replaced
    if pool is not None:
        keys = keys[row_index.binary_search(pool, replaced.contiguous()).found]
    return row_index.unique_values(keys)


def _side_keys(index: TripleIndex, side: int) -> Tensor:
    """Return the keys of the index for a side."""
    return index.head_query_keys if side == HEAD else index.tail_query_keys


def _query_key(index: TripleIndex, queries: Tensor, side: int) -> Tensor:
    """Return the key of each query with 0 as its replaced argument: all answers lie within `base` above it."""
    predicate = queries[..., 0].to(torch.int64)
    given = queries[..., other_side(side)]
    return (predicate * index.base + given) * index.base
