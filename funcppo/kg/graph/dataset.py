"""Dataset: the ids of a knowledge graph, its splits and its rules, as plain arrays.

`from_splits` makes one of triples and `from_clauses` of a program. `with_rules` replaces the rules.

Ids: 0 is padding, 1..C are constants, above C are variables; predicates count from 1 in a space of their own.
An atom is `[predicate, argument...]`, padded with 0 to the width W of the widest predicate.

Leakage between splits: held-out triples that are known, that repeat each other, or whose inverse is known.

A relation is a near-inverse of another if most triples of each, over all splits, are triples of the other with
exchanged arguments; a symmetric relation is its own near-inverse.

Source: Toutanova and Chen 2015, "Observed versus latent features for knowledge base and text inference"; the share is
that of Akrami et al. 2020, "Realistic re-evaluation of knowledge graph completion methods" (arXiv:2003.08001).

The known facts of a data set in an order that depends on their names alone, and a hash of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.text import (
    Atom,
    Clause,
    Variable,
    indicator,
    unknown_name_message,
)
from funcppo.kg.graph.triples import (
    MappedNames,
    NameIds,
    NameTable,
    Triple,
    drop_duplicates,
    order_of_occurrence,
)

# share of the triples of each relation that the other one has with exchanged arguments
NEAR_INVERSE_SHARE = 0.8
# pairs of a triple and one of its inverses beyond which no near-inverses are searched, and how many are held at a time
MAX_PAIRS = 30_000_000
PAIRS_PER_CHUNK = 2_000_000
# known facts beyond which no leaks are searched: the search sorts them twice
MAX_TRIPLES = 50_000_000
MAX_LISTED = 3  # pairs of relations that a note names


class IndexedTriples(NamedTuple):
    """The distinct triples of all splits, sorted by their pair of entities."""

    relation: np.ndarray  # int64 [n], from 0
    is_loop: np.ndarray  # bool [n], head and tail are one entity
    # int64 [n], the first triple of the inverse pair of entities, and how many have that pair; 0 for loops
    inverse_start: np.ndarray
    inverse_count: np.ndarray
    rows: list[np.ndarray]  # of each table: its rows as indices of these
    n_relations: int


class InversePairs(NamedTuple):
    """Triples and their inverses, as indices."""

    triple: np.ndarray
    inverse: np.ndarray


def leakage_notes(
    known: np.ndarray,
    held_out: Mapping[str, np.ndarray],
    relations: Sequence[str],
) -> list[str]:
    """One line on each way in which a split leaks into the known facts, or repeats triples.

    Args:
      known: int [n, 3], the known facts, as (relation, head, tail) from 1.
      held_out: the held-out splits by name, of the same form.
      relations: names of the relations, relation r at r - 1.
    """
    splits = {name: table for name, table in held_out.items() if len(table)}
    if not splits:
        return []
    if len(known) > MAX_TRIPLES:
        return [
            f"leaks between the splits were not searched: {len(known):,} known facts, over {MAX_TRIPLES:,}"
        ]
    triples = index_triples([known, *splits.values()], len(relations))
    is_known = np.zeros(len(triples.relation), bool)
    is_known[triples.rows[0]] = True

    notes: list[str] = []
    earlier: dict[str, np.ndarray] = {}
    for name, rows in zip(splits, triples.rows[1:]):
        notes += _count_notes(name, rows, is_known, earlier)
        earlier[name] = rows
    return notes + _inverse_notes(triples, is_known, list(splits), relations)


def _count_notes(
    name: str,
    rows: np.ndarray,
    is_known: np.ndarray,
    earlier: Mapping[str, np.ndarray],
) -> list[str]:
    """The notes on triples of a split that are known, in an earlier split, or repeated."""
    n = len(rows)
    counts = {
        "are known facts (train or facts)": int(is_known[rows].sum()),
        "repeat another and are ranked again": n - len(np.unique(rows)),
    }
    for other, other_rows in earlier.items():
        counts[f"are in {other} too"] = int(np.isin(rows, other_rows).sum())
    return [
        f"{name}: {count} of {n} triples {what}"
        for what, count in counts.items()
        if count
    ]


def index_triples(
    tables: Sequence[np.ndarray], n_relations: int
) -> IndexedTriples:
    """Number the distinct triples of some tables, and find the triples of each inverse pair of entities."""
    rows = np.concatenate(tables).astype(np.int64)
    relation, head, tail = rows[:, 0] - 1, rows[:, 1], rows[:, 2]
    n_entities = 1 + int(rows[:, 1:].max())

    # Pairs are numbered first: a code of all three ids could overflow.
    pair_code, pair = np.unique(head * n_entities + tail, return_inverse=True)
    code, triple = np.unique(pair * n_relations + relation, return_inverse=True)
    pair_of_triple = code // n_relations
    pair_start = np.searchsorted(pair_of_triple, np.arange(len(pair_code) + 1))

    pair_head, pair_tail = np.divmod(pair_code, n_entities)
    inverse_code = pair_tail * n_entities + pair_head
    inverse = np.searchsorted(pair_code, inverse_code)
    inverse = np.minimum(inverse, len(pair_code) - 1)
    is_loop = pair_head == pair_tail
    has_inverse = (pair_code[inverse] == inverse_code) & ~is_loop
    count = pair_start[inverse + 1] - pair_start[inverse]
    count[~has_inverse] = 0

    ends = np.cumsum([len(table) for table in tables])[:-1]
    return IndexedTriples(
        relation=code % n_relations,
        is_loop=is_loop[pair_of_triple],
        inverse_start=pair_start[inverse][pair_of_triple],
        inverse_count=count[pair_of_triple],
        rows=np.split(triple, ends),
        n_relations=n_relations,
    )


def iter_inverse_pairs(
    triples: IndexedTriples, subset: np.ndarray
) -> Iterator[InversePairs]:
    """Pairs of each triple of a subset and each triple of its inverse pair of entities, chunk by chunk."""
    counts = triples.inverse_count[subset]
    subset = subset[counts > 0]
    counts = counts[counts > 0]
    chunk = np.cumsum(counts) // PAIRS_PER_CHUNK
    starts = np.flatnonzero(np.diff(chunk, prepend=-1))
    for part, n in zip(
        np.split(subset, starts[1:]), np.split(counts, starts[1:])
    ):
        triple = np.repeat(part, n)
        first = np.repeat(np.cumsum(n) - n, n)
        offset = np.arange(len(triple)) - first
        yield InversePairs(triple, triples.inverse_start[triple] + offset)


def _near_inverses(triples: IndexedTriples) -> np.ndarray:
    """The pairs of relations that are near-inverses, sorted, each as relation * n_relations + inverse."""
    n_relations = triples.n_relations
    size = np.bincount(
        triples.relation[~triples.is_loop], minlength=n_relations
    )
    pairs: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for part in iter_inverse_pairs(triples, np.arange(len(triples.relation))):
        a, b = triples.relation[part.triple], triples.relation[part.inverse]
        # Others are too different in size to be near-inverses.
        larger = np.maximum(size[a], size[b])
        is_close = np.minimum(size[a], size[b]) >= NEAR_INVERSE_SHARE * larger
        pair, count = np.unique(
            (a * n_relations + b)[is_close], return_counts=True
        )
        pairs.append(pair)
        counts.append(count)
    pair, index = np.unique(np.concatenate(pairs), return_inverse=True)
    n_common = np.bincount(index, np.concatenate(counts), len(pair))
    larger = np.maximum(size[pair // n_relations], size[pair % n_relations])
    return pair[n_common >= NEAR_INVERSE_SHARE * larger]


def _inverse_notes(
    triples: IndexedTriples,
    is_known: np.ndarray,
    names: Sequence[str],
    relations: Sequence[str],
) -> list[str]:
    """The notes on triples of each held-out split that are the inverse of a known fact."""
    n_pairs = int(triples.inverse_count.sum())
    if n_pairs > MAX_PAIRS:
        return [
            f"inverse triples between the splits were not searched: {n_pairs:,} pairs of triples, over {MAX_PAIRS:,}"
        ]
    near_inverses = _near_inverses(triples)

    notes: list[str] = []
    for name, rows in zip(names, triples.rows[1:]):
        leaked: list[np.ndarray] = []
        found: list[np.ndarray] = []
        for part in iter_inverse_pairs(triples, np.unique(rows)):
            a, b = triples.relation[part.triple], triples.relation[part.inverse]
            # A pair of relations counts the same either way round.
            pair = np.minimum(a, b) * triples.n_relations + np.maximum(a, b)
            is_leak = is_known[part.inverse] & np.isin(pair, near_inverses)
            leaked.append(part.triple[is_leak])
            found.append(pair[is_leak])
        if not any(map(len, leaked)):
            continue
        n_leaked = int(np.isin(rows, np.concatenate(leaked)).sum())
        pair, count = np.unique(np.concatenate(found), return_counts=True)
        listed = pair[np.argsort(-count, kind="stable")]
        text = _format_pairs(listed, [shorten(name) for name in relations])
        notes.append(
            f"{name}: {n_leaked} of {len(rows)} triples are inverses of known facts: {text}"
        )
    return notes


def _format_pairs(pairs: np.ndarray, relations: list[str]) -> str:
    """Pairs of relations in names; a relation alone is symmetric."""
    texts: list[str] = []
    for pair in pairs[:MAX_LISTED].tolist():
        a, b = divmod(pair, len(relations))
        is_symmetric = a == b
        texts.append(
            f"{relations[a]} is symmetric"
            if is_symmetric
            else f"{relations[a]} and {relations[b]}"
        )
    if len(pairs) > MAX_LISTED:
        texts.append(f"{len(pairs) - MAX_LISTED} more")
    return ", ".join(texts)


PredicateKey = tuple[str, int]  # name and arity
NameT = TypeVar("NameT", str, PredicateKey)
MAX_BODY_ATOMS = 100  # the work of a join grows with their cube
_BLOCK_NAMES = 1 << 16  # that are hashed at a time
_MAX_LISTED = 5  # predicates that a note names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Dataset:
    """Known facts, held-out facts and rules of a knowledge graph; compare two by `fingerprint`."""

    name: str
    entities: Sequence[str]  # constant id c is entities[c - 1]
    # predicate id p is predicates[p - 1]; in a program, two may differ in arity only
    predicates: tuple[str, ...]
    arities: tuple[int, ...]  # of each predicate
    train: np.ndarray  # int32 [n, W], in the order of the file, distinct
    valid: np.ndarray  # int32 [n, W]
    test: np.ndarray  # int32 [n, W]
    facts: np.ndarray  # int32 [N, W]: train, then what facts.txt adds; distinct
    # int32 [R, M, W]: head first, then the body, padded with 0; variables from C + 1 on
    rules: np.ndarray
    # float64 [R], nan where the file gives none; stored as given, not used to prove
    rule_weights: np.ndarray
    # int64 [R, 3]: support, body pairs and circular support of each rule over the facts, as a miner has counted them
    # exactly, -1 where it has not; None where nothing is known
    rule_counts: np.ndarray | None = None
    # the same as the miner has estimated them, -1 where it has counted exactly
    rule_estimates: np.ndarray | None = None
    n_duplicates: int  # lines of train dropped because they repeat another
    # one line each on what is unusual but allowed; to print, not to act on
    notes: tuple[str, ...]
    # a Prolog program: in queries, names are read as in Prolog
    is_program: bool = False
    # what a folder of `funcppo data --index` holds beside the data set; None where it was read from elsewhere
    stored: StoredParts | None = None

    @property
    def n_constants(self) -> int:
        """Number of entities, C."""
        return len(self.entities)

    @property
    def n_predicates(self) -> int:
        """Number of predicates, P."""
        return len(self.predicates)

    @property
    def atom_width(self) -> int:
        """Length of an atom's row, W: 1 + the largest arity, at least 2."""
        return self.facts.shape[1]

    @property
    def n_unseen_entities(self) -> int:
        """Number of entities that only valid or test mention."""
        held_out = np.concatenate([self.valid, self.test])
        unseen = np.setdiff1d(held_out[:, 1:], self.facts[:, 1:])
        return len(unseen)

    @property
    def fingerprint(self) -> str:
        """Hash of names, splits and rules, 16 hexadecimal digits; weights of rules do not count.

        Where it differs, ids or facts mean something else.
        """
        stored = self.stored
        if stored is not None and self._has_stored("rules"):
            return stored.fingerprint
        digest = hashlib.sha256()
        for part in _iter_names_json(self):
            digest.update(part.encode())
        for table in (
            self.train,
            self.valid,
            self.test,
            self.facts,
            self.rules,
        ):
            shape = json.dumps(table.shape)
            digest.update(shape.encode())
            content = np.ascontiguousarray(table, dtype="<i4")
            digest.update(content.data)
        return digest.hexdigest()[:16]

    @property
    def fact_tables(self) -> Mapping[str, np.ndarray] | None:
        """The index of the facts, as `logic.kb.build` takes it; None where there is none for these facts and names."""
        if self.stored is None or not self._has_stored():
            return None
        return self.stored.fact_tables

    def _has_stored(self, *fields: str) -> bool:
        """Whether facts, splits, names and further fields are still those that were stored."""
        assert self.stored is not None
        original = self.stored.dataset
        fields += ("entities", "train", "valid", "test", "facts")
        is_same = all(getattr(self, f) is getattr(original, f) for f in fields)
        return is_same and self.predicates == original.predicates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredParts:
    """What a folder of `funcppo data --index` holds beside a data set."""

    dataset: Dataset  # as it was stored
    fingerprint: str  # of the data set
    fact_tables: Mapping[str, np.ndarray]  # `logic.kb.index_facts` of the facts


def entity_ids(entities: Sequence[str]) -> Mapping[str, int]:
    """Ids of the entities by name; they are looked up in the file where names are mapped from one."""
    if isinstance(entities, MappedNames):
        return NameIds(entities)
    return assign_ids(entities)


_ENTITY_IDS: WeakKeyDictionary[Dataset, Mapping[str, int]] = WeakKeyDictionary()


def from_splits(name: str, splits: dict[str, list[Triple]]) -> Dataset:
    """The data set of (head, relation, tail) triples, without rules; ids follow first occurrence.

    Args:
      name: name of the data set.
      splits: triples of train, valid, test, and perhaps of facts, which are known beside train. Ids follow the order of
        the dictionary.
    """
    names = NameTable()
    tables = {
        split: names.number_triples(triples)
        for split, triples in splits.items()
    }
    return from_tables(name, names.names(), tables)


def from_tables(
    name: str, names: Sequence[str], splits: Mapping[str, np.ndarray]
) -> Dataset:
    """The data set of triples of numbered names, without rules; ids follow first occurrence.

    Args:
      name: name of the data set.
      names: of entities and relations; those that no triple has are left out.
      splits: as in `from_splits`; each int [n, 3], head, relation and tail as indices of names.
    """
    entities, relations = (
        order_of_occurrence(
            np.concatenate([t[:, columns].ravel() for t in splits.values()]),
            len(names),
        )
        for columns in ([0, 2], [1])
    )
    entity_ids = _number_from_one(entities, len(names))
    relation_ids = _number_from_one(relations, len(names))
    tables = {
        split: _encode_triples(table, relation_ids, entity_ids)
        for split, table in splits.items()
    }

    train = drop_duplicates(tables["train"])
    facts = train
    if "facts" in tables:
        facts = drop_duplicates(np.concatenate([train, tables["facts"]]))

    n_duplicates = len(tables["train"]) - len(train)
    notes = [duplicate_note(n_duplicates)] if n_duplicates else []
    n_unseen_entities = len(entities) - _count_distinct(facts[:, 1:])
    n_unseen_relations = len(relations) - _count_distinct(facts[:, :1])
    notes += _unseen_notes(n_unseen_entities, n_unseen_relations)
    predicates = tuple(map(names.__getitem__, relations.tolist()))
    held_out = {split: tables[split] for split in ("valid", "test")}
    notes += leakage_notes(facts, held_out, predicates)
    return Dataset(
        name=name,
        entities=tuple(map(names.__getitem__, entities.tolist())),
        predicates=predicates,
        arities=(2,) * len(predicates),
        train=facts[: len(train)],
        valid=held_out["valid"],
        test=held_out["test"],
        facts=facts,
        rules=np.zeros((0, 1, 3), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=n_duplicates,
        notes=tuple(notes),
    )


def from_clauses(name: str, clauses: Sequence[Clause], path: str) -> Dataset:
    """The data set of a program: its facts are train, and nothing is held out.

    Args:
      name: name of the data set.
      clauses: facts and rules, in the order of the program.
      path: file of the program, for messages.

    Raises:
      ValueError: a rule is too long; names file and line.
    """
    entity_ids, predicate_ids = _vocabulary(clauses)
    arities = tuple(arity for _, arity in predicate_ids)
    atom_width = 1 + max((1, *arities))

    stated_facts = [clause.head for clause in clauses if not clause.body]
    distinct_facts = list(dict.fromkeys(stated_facts))
    facts = np.zeros((len(distinct_facts), atom_width), np.int32)
    for row, atom in zip(facts, distinct_facts):
        args = [entity_ids[str(term)] for term in atom.args]
        ids = [predicate_ids[_predicate_key(atom)], *args]
        row[: len(ids)] = ids

    notes = _undefined_notes(clauses, path)
    n_duplicates = len(stated_facts) - len(distinct_facts)
    if n_duplicates:
        notes.append(duplicate_note(n_duplicates))
    dataset = Dataset(
        name=name,
        entities=tuple(entity_ids),
        predicates=tuple(predicate for predicate, _ in predicate_ids),
        arities=arities,
        train=facts,
        valid=facts[:0],
        test=facts[:0],
        facts=facts,
        rules=np.zeros((0, 1, atom_width), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=n_duplicates,
        notes=tuple(notes),
        is_program=True,
    )
    return with_rules(
        dataset, [clause for clause in clauses if clause.body], path
    )


def with_rules(
    dataset: Dataset, clauses: Sequence[Clause], path: str
) -> Dataset:
    """The data set with these rules in place of its own.

    The head of a rule may define a relation that the data do not have, as in Datalog; `notes` says which.

    Two kinds of rules are left out, and `notes` says how many. A rule without a body (AnyBURL's zero rules) would
    derive its head for every constant whatever the facts are. A rule with an entity that the data do not have, or with
    a relation that neither the data nor any head has, says nothing of the data.

    Args:
      dataset: its own rules are dropped.
      clauses: the rules, in names.
      path: file of the rules, for messages.

    Raises:
      ValueError: a wrong arity, a body of more than `MAX_BODY_ATOMS`, or every rule has an unknown name; names file and
        line.
    """
    for clause in clauses:
        _check_body_length(clause, path)

    rules = [clause for clause in clauses if clause.body]
    zero_rules = [clause for clause in clauses if not clause.body]
    if zero_rules:
        line = zero_rules[0].line
        n_dropped = len(zero_rules)
        note = f"{path}:{line}: {n_dropped} rules without a body hold of every constant and were left out"
        notes = (*dataset.notes, note)
        dataset = replace(dataset, notes=notes)

    rules, notes = _drop_rules_of_unknown_names(dataset, rules, path)
    dataset = replace(dataset, notes=(*dataset.notes, *notes))

    # Predicates first: a rule may use a relation that the head of a later rule defines.
    dataset = _with_head_predicates(dataset, rules, path)
    table = _encode_rules(dataset, rules, path)
    weights = np.array([rule.weight for rule in rules], np.float64)
    return replace(
        dataset,
        rules=table,
        rule_weights=weights,
        rule_counts=None,
        rule_estimates=None,
    )


def encode_atom(
    dataset: Dataset,
    atom: Atom,
    entity_ids: Mapping[str, int],
    predicate_ids: dict[PredicateKey, int],
    variables: dict[Variable, int],
) -> list[int]:
    """The ids of an atom: [predicate, argument...].

    Args:
      dataset: where names and arities are looked up.
      atom: in names.
      entity_ids: `assign_ids` of the entities.
      predicate_ids: `predicate_ids` of the data set.
      variables: ids of the variables of the clause so far; grows by those that occur here for the first time.

    Raises:
      ValueError: an unknown relation or entity, or a wrong number of arguments; suggests names of similar spelling.
    """
    predicate = predicate_ids.get(_predicate_key(atom))
    if predicate is None:
        raise ValueError(_unknown_predicate_message(dataset, atom))

    ids = [predicate]
    for term in atom.args:
        if isinstance(term, Variable):
            next_variable = dataset.n_constants + 1 + len(variables)
            ids.append(variables.setdefault(term, next_variable))
        elif term in entity_ids:
            ids.append(entity_ids[term])
        else:
            raise ValueError(
                unknown_name_message("entity", term, dataset.entities)
            )
    return ids


_BLOCK_NAMES = 1 << 16  # that are hashed at a time


def predicate_ids(dataset: Dataset) -> dict[PredicateKey, int]:
    """Ids of the predicates by name and arity."""
    return assign_ids(zip(dataset.predicates, dataset.arities))


def index_entities(dataset: Dataset) -> Mapping[str, int]:
    """Ids of the entities by name, made once for each data set."""
    ids = _ENTITY_IDS.get(dataset)
    if ids is None:
        ids = _ENTITY_IDS[dataset] = entity_ids(dataset.entities)
    return ids


def assign_ids(names: Iterable[NameT]) -> dict[NameT, int]:
    """Ids from 1 of distinct names, in the order of first occurrence."""
    distinct = dict.fromkeys(names)
    return {name: i for i, name in enumerate(distinct, 1)}


def _iter_names_json(dataset: Dataset) -> Iterator[str]:
    """The JSON of entities, predicates and arities, some entities at a time."""
    yield "[["
    separator = ""
    for first in range(0, dataset.n_constants, _BLOCK_NAMES):
        block = list(dataset.entities[first : first + _BLOCK_NAMES])
        yield separator + json.dumps(block)[1:-1]
        separator = ", "
    rest = json.dumps([dataset.predicates, dataset.arities])
    yield f"], {rest[1:]}"


def _number_from_one(order: np.ndarray, n_names: int) -> np.ndarray:
    """The ids of names by their number, int32 [n_names]: 1 for the first of an order of numbers."""
    ids = np.zeros(n_names, np.int32)
    ids[order] = np.arange(1, len(order) + 1)
    return ids


def _encode_triples(
    triples: np.ndarray, relation_ids: np.ndarray, entity_ids: np.ndarray
) -> np.ndarray:
    """Triples of numbered names as (relation, head, tail) ids, int32 [n, 3]."""
    # a column at a time: a table may have hundreds of millions of rows
    table = np.empty((len(triples), 3), np.int32)
    table[:, 0] = relation_ids[triples[:, 1]]
    table[:, 1] = entity_ids[triples[:, 0]]
    table[:, 2] = entity_ids[triples[:, 2]]
    return table


def _count_distinct(ids: np.ndarray) -> int:
    """How many different ids there are in a table."""
    is_known = np.zeros(1 + int(ids.max(initial=0)), bool)
    for column in ids.T:
        is_known[column] = True
    return int(is_known.sum())


def duplicate_note(n_duplicates: int) -> str:
    """The note on lines of train that were dropped."""
    return f"train: {n_duplicates} lines repeat another and were dropped"


def _unseen_notes(n_entities: int, n_relations: int) -> list[str]:
    """The notes on entities and relations that only held-out triples have."""
    counts = {
        ("entity occurs", "entities occur"): n_entities,
        ("relation occurs", "relations occur"): n_relations,
    }
    return [
        f"valid, test: {n_unseen} {words[n_unseen > 1]} in no known fact and {'are' if n_unseen > 1 else 'is'} kept"
        for words, n_unseen in counts.items()
        if n_unseen
    ]


def _predicate_key(atom: Atom) -> PredicateKey:
    """Name and arity of the predicate of an atom."""
    return atom.predicate, len(atom.args)


def _vocabulary(
    clauses: Sequence[Clause],
) -> tuple[dict[str, int], dict[PredicateKey, int]]:
    """The ids of constants, and of predicates by name and arity, in the order of the program."""
    entities: dict[str, None] = {}
    predicates: dict[PredicateKey, None] = {}
    for clause in clauses:
        for atom in (clause.head, *clause.body):
            predicates[_predicate_key(atom)] = None
            for term in atom.args:
                if not isinstance(term, Variable):
                    entities[term] = None
    return assign_ids(entities), assign_ids(predicates)


def _undefined_notes(clauses: Sequence[Clause], path: str) -> list[str]:
    """The note on predicates that bodies have and no head has; most likely they are misspelled."""
    defined = {_predicate_key(clause.head) for clause in clauses}
    first_lines: dict[str, int] = {}  # by predicate indicator
    for clause in clauses:
        for goal in clause.body:
            if _predicate_key(goal) not in defined:
                first_lines.setdefault(indicator(goal), clause.line)
    if not first_lines:
        return []

    listed = [
        f"{shorten(name)} (line {line})" for name, line in first_lines.items()
    ]
    if len(listed) > _MAX_LISTED:
        n_more = len(listed) - _MAX_LISTED
        listed[_MAX_LISTED:] = [f"{n_more} more"]
    names = ", ".join(listed)
    return [f"{path}: no fact and no rule defines {names}: nothing proves it"]


def _check_body_length(clause: Clause, path: str) -> None:
    """Raise ValueError for a clause that is too long."""
    n_atoms = len(clause.body)
    if n_atoms > MAX_BODY_ATOMS:
        problem = f"expected at most {MAX_BODY_ATOMS} atoms in the body of a rule, got {n_atoms}"
        head = shorten(clause.head.predicate)
        raise ValueError(
            f"{path}:{clause.line}: {problem}, in a rule for {head}"
        )


def _first_unknown_name(
    dataset: Dataset,
    rules: list[Clause],
    entities: Collection[str],
    relations: set[str],
    path: str,
) -> str:
    """The message on the first rule with an unknown name.

    Args:
      relations: those of the data, and of the rules that are left.
    """
    # Named first: a rule whose names no rule at all has. Others may lack only
    # what such a rule would define.
    defined = relations | {rule.head.predicate for rule in rules}
    if any(_unknown_names(rule, entities, defined) for rule in rules):
        relations = defined
    first = next(r for r in rules if _unknown_names(r, entities, relations))
    kind, name = _unknown_names(first, entities, relations)[0]
    known = dataset.entities if kind == "entity" else sorted(relations)
    problem = unknown_name_message(kind, name, known)
    head = shorten(first.head.predicate)
    return f"{path}:{first.line}: {problem}, in a rule for {head}"


def _drop_rules_of_unknown_names(
    dataset: Dataset, rules: list[Clause], path: str
) -> tuple[list[Clause], list[str]]:
    """The rules whose names the data or other rules have, and a note on the rest.

    Raises:
      ValueError: there are rules, and each has an unknown name.
    """
    entities = entity_ids(dataset.entities)
    relations = set(dataset.predicates)
    kept = rules
    n_before = -1

    # A rule that is dropped defines no relation for the others.
    while len(kept) != n_before:
        n_before = len(kept)
        relations = {*dataset.predicates}
        relations.update(rule.head.predicate for rule in kept)
        kept = [
            rule
            for rule in kept
            if not _unknown_names(rule, entities, relations)
        ]
    if len(kept) == len(rules):
        return rules, []

    message = _first_unknown_name(dataset, rules, entities, relations, path)
    if not kept:
        raise ValueError(message)
    n_dropped = len(rules) - len(kept)
    return kept, [
        f"{message}; {n_dropped} of {len(rules)} rules have unknown names and were left out"
    ]


def _unknown_names(
    rule: Clause, entities: Collection[str], relations: set[str]
) -> list[tuple[str, str]]:
    """The relations and entities of a rule that are not among these, each with its kind."""
    unknown: list[tuple[str, str]] = []
    for atom in (rule.head, *rule.body):
        if atom.predicate not in relations:
            unknown.append(("relation", atom.predicate))
        for term in atom.args:
            if not isinstance(term, Variable) and term not in entities:
                unknown.append(("entity", term))
    return unknown


def _with_head_predicates(
    dataset: Dataset, rules: Sequence[Clause], path: str
) -> Dataset:
    """The data set with the relations that only heads of rules have, and atoms wide enough for these."""
    # Backwards, so that the first rule of a predicate is the one that stays. Ids follow this order.
    data_predicates = set(dataset.predicates)
    first_rules: dict[str, Clause] = {}  # by new predicate
    for rule in reversed(rules):
        predicate = rule.head.predicate
        if predicate not in data_predicates:
            first_rules[predicate] = rule

    arities = list(dataset.arities)
    notes = list(dataset.notes)
    for predicate, rule in first_rules.items():
        arities.append(len(rule.head.args))
        name = shorten(predicate)
        notes.append(
            f"{path}:{rule.line}: only rules derive {name}, no triple has it"
        )

    atom_width = 1 + max([1, *arities])
    n_added = atom_width - dataset.atom_width
    if n_added:
        padding = ((0, 0), (0, n_added))
        splits = ("train", "valid", "test", "facts")
        tables = {s: np.pad(getattr(dataset, s), padding) for s in splits}
        dataset = replace(dataset, **tables)
    return replace(
        dataset,
        predicates=dataset.predicates + tuple(first_rules),
        arities=tuple(arities),
        notes=tuple(notes),
    )


def _encode_rules(
    dataset: Dataset, rules: Sequence[Clause], path: str
) -> np.ndarray:
    """The ids of rules, int32 [R, M, W], M the number of atoms of the longest."""
    body_lengths = [len(rule.body) for rule in rules]
    n_atoms = 1 + max(body_lengths, default=0)
    table = np.zeros((len(rules), n_atoms, dataset.atom_width), np.int32)
    ids_of_entities = entity_ids(dataset.entities)
    ids_of_predicates = predicate_ids(dataset)

    for i, rule in enumerate(rules):
        variables: dict[Variable, int] = {}  # numbered from C + 1 in each rule
        atoms = (rule.head, *rule.body)
        for j, atom in enumerate(atoms):
            try:
                ids = encode_atom(
                    dataset, atom, ids_of_entities, ids_of_predicates, variables
                )
            except ValueError as error:
                head = shorten(rule.head.predicate)
                raise ValueError(
                    f"{path}:{rule.line}: {error}, in a rule for {head}"
                ) from None
            n_ids = len(ids)
            table[i, j, :n_ids] = ids
    return table


def _unknown_predicate_message(dataset: Dataset, atom: Atom) -> str:
    """The message for an atom whose predicate the data set has not, or not with this number of arguments."""
    predicates = zip(dataset.predicates, dataset.arities)
    arities = [n for name, n in predicates if name == atom.predicate]
    if not arities:
        return unknown_name_message(
            "relation", atom.predicate, dataset.predicates
        )
    name = shorten(atom.predicate)
    expected = " or ".join(map(str, arities))
    return f"arity clash: expected {expected} arguments for {name}, as elsewhere, got {len(atom.args)}"


class OrderedFacts(NamedTuple):
    """The known facts of a data set with the names in use numbered in the order of names."""

    facts: np.ndarray  # int32 [N, W], in lexicographic order
    # ids in the data set of numbers 0, 1, ...; of 0 it is 0
    predicates: np.ndarray
    entities: np.ndarray  # the same


def order_facts(dataset: Dataset) -> OrderedFacts:
    """The known facts in an order that depends on their names alone."""
    predicates = _ids_by_name(dataset.facts[:, 0], dataset.predicates)
    entities = _ids_by_name(dataset.facts[:, 1:], dataset.entities)
    predicate_number = np.zeros(dataset.n_predicates + 1, np.int32)
    predicate_number[predicates] = np.arange(len(predicates))
    entity_number = np.zeros(dataset.n_constants + 1, np.int32)
    entity_number[entities] = np.arange(len(entities))

    columns = (
        predicate_number[dataset.facts[:, :1]],
        entity_number[dataset.facts[:, 1:]],
    )
    facts = np.unique(np.concatenate(columns, axis=1), axis=0)
    return OrderedFacts(facts, predicates, entities)


def facts_digest(dataset: Dataset) -> str:
    """A hash of the names and the known facts, 16 hexadecimal digits; neither order nor held-out triples count."""
    ordered = order_facts(dataset)
    described = [
        [dataset.predicates[i - 1] for i in ordered.predicates[1:]],
        [dataset.entities[i - 1] for i in ordered.entities[1:]],
        ordered.facts.shape,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(np.ascontiguousarray(ordered.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]


def _ids_by_name(ids: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The distinct ids of a table in the order of their names, after the 0 of padding."""
    in_use = np.unique(ids[ids > 0]).tolist()

    def name_of(i: int) -> str:
        return names[i - 1]

    return np.array([0, *sorted(in_use, key=name_of)])
