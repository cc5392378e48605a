"""Dataset: the ids of a knowledge graph, its splits and its rules, as plain arrays.

Ids: 0 is padding, 1..C are constants, above C are variables; predicates count from 1 in a space of their own.
An atom is `[predicate, argument...]`, padded with 0 to the width W of the widest predicate.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcppo.data.lexer import shorten
from funcppo.data.parser import Atom, Clause, Variable

Triple = tuple[str, str, str]  # head, relation, tail
MAX_BODY_ATOMS = 100  # the work of a join grows with their cube


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """What is known, what is held out, and the rules; compare two by `fingerprint`."""

    name: str
    entities: tuple[str, ...]  # constant id c is entities[c - 1]
    predicates: tuple[str, ...]  # predicate id p is predicates[p - 1]
    arities: tuple[int, ...]  # of each predicate
    train: np.ndarray  # int32 [n, W], in the order of the file, distinct
    valid: np.ndarray  # int32 [n, W]
    test: np.ndarray  # int32 [n, W]
    facts: np.ndarray  # int32 [N, W]: train, then what facts.txt adds; distinct
    rules: np.ndarray  # int32 [R, M, W]: head first, then the body, padded with 0; variables from C + 1 on
    rule_weights: np.ndarray  # float64 [R], nan where the file gives none; kept, not trusted
    n_duplicates: int  # lines of train dropped because they repeat another
    notes: tuple[str, ...]  # one line each on what is unusual but allowed: to be shown, not to be acted on

    @property
    def n_constants(self) -> int:
        """C."""
        return len(self.entities)

    @property
    def n_predicates(self) -> int:
        """P."""
        return len(self.predicates)

    @property
    def atom_width(self) -> int:
        """W, 1 + the largest arity, at least 2."""
        return self.facts.shape[1]

    @property
    def n_unseen_entities(self) -> int:
        """Entities that only valid or test mention."""
        held_out = np.concatenate([self.valid[:, 1:].ravel(), self.test[:, 1:].ravel()])
        return len(np.setdiff1d(held_out, self.facts[:, 1:]))

    @property
    def fingerprint(self) -> str:
        """A hash of names, splits and rules: another value means that ids or facts mean something else."""
        digest = hashlib.sha256(json.dumps([self.entities, self.predicates, self.arities]).encode())
        for table in (self.train, self.valid, self.test, self.facts, self.rules):
            digest.update(json.dumps(table.shape).encode() + np.ascontiguousarray(table, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]


def from_splits(name: str, splits: dict[str, list[Triple]]) -> Dataset:
    """The data set of (head, relation, tail) triples, no rules yet; ids follow first occurrence.

    Args:
      splits: train, valid, test, and perhaps facts: what is known beside train.
    """
    rows = [triple for split in splits.values() for triple in split]
    entities, predicates = assign_ids(t for h, _, tail in rows for t in (h, tail)), assign_ids(r for _, r, _ in rows)
    train = list(dict.fromkeys(splits["train"]))
    facts = dict.fromkeys([*train, *splits.get("facts", [])])
    encode = lambda split: np.array([(predicates[r], entities[h], entities[t]) for h, r, t in split], np.int32).reshape(
        -1, 3
    )
    n_duplicates = len(splits["train"]) - len(train)
    unseen = {
        "entities": len(entities) - len({t for h, _, tail in facts for t in (h, tail)}),
        "relations": len(predicates) - len({r for _, r, _ in facts}),
    }
    return Dataset(
        name=name,
        entities=tuple(entities),
        predicates=tuple(predicates),
        arities=(2,) * len(predicates),
        train=encode(train),
        valid=encode(splits["valid"]),
        test=encode(splits["test"]),
        facts=encode(facts),
        rules=np.zeros((0, 1, 3), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=n_duplicates,
        notes=_notes(n_duplicates, unseen),
    )


def _notes(n_duplicates: int, unseen: dict[str, int]) -> tuple[str, ...]:
    dropped = [f"train: {n_duplicates} lines repeat another and were dropped"] if n_duplicates else []
    kept = [f"valid, test: {n} {what} occur in no known fact; they are kept" for what, n in unseen.items() if n]
    return (*dropped, *kept)


def from_clauses(name: str, clauses: Sequence[Clause], path: str) -> Dataset:
    """The data set of a program: its facts are train, and nothing is held out.

    Errors: ValueError naming file and line of a predicate that has another arity elsewhere.
    """
    entities, arities = _vocabulary(clauses, path)
    entity_ids, predicate_ids = assign_ids(entities), assign_ids(arities)
    stated = [clause.head for clause in clauses if not clause.body]
    facts = np.zeros((len(dict.fromkeys(stated)), 1 + max([1, *arities.values()])), np.int32)
    for row, atom in zip(facts, dict.fromkeys(stated)):
        row[: 1 + len(atom.args)] = [predicate_ids[atom.predicate], *(entity_ids[str(t)] for t in atom.args)]
    dataset = Dataset(
        name=name,
        entities=tuple(entities),
        predicates=tuple(arities),
        arities=tuple(arities.values()),
        train=facts,
        valid=facts[:0],
        test=facts[:0],
        facts=facts,
        rules=np.zeros((0, 1, facts.shape[1]), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=len(stated) - len(facts),
        notes=_notes(len(stated) - len(facts), {}),
    )
    return with_rules(dataset, [clause for clause in clauses if clause.body], path)


def _vocabulary(clauses: Sequence[Clause], path: str) -> tuple[dict[str, None], dict[str, int]]:
    """Constants, and the arity of each predicate, in the order of the program."""
    entities: dict[str, None] = {}
    arities: dict[str, int] = {}
    for clause in clauses:
        for predicate, args in (clause.head, *clause.body):
            want = arities.setdefault(predicate, len(args))
            if want != len(args):
                raise ValueError(f"{path}:{clause.line}: {_clash(predicate, want, len(args))}")
            entities.update((t, None) for t in args if not isinstance(t, Variable))
    return entities, arities


def with_rules(dataset: Dataset, clauses: Sequence[Clause], path: str) -> Dataset:
    """The same data with these rules in place of its own.

    The head of a rule may define a relation that the data does not have, as in Datalog; `notes` tells which. A rule
    without a body (AnyBURL's zero rules) would derive its head for every constant whatever the facts: such rules are
    left out, and `notes` tells how many.

    Args:
      path: where the rules stand, for messages.
    Errors: ValueError naming file and line of a relation that neither the data nor any head has, an entity that the
      data does not have, a wrong arity, or a body of more than `MOST_BODY_ATOMS`.
    """
    for clause in clauses:
        if len(clause.body) > MAX_BODY_ATOMS:
            problem = f"want at most {MAX_BODY_ATOMS} atoms in the body of a rule, got {len(clause.body)}"
            raise ValueError(f"{path}:{clause.line}: {problem}, in a rule for {shorten(clause.head.predicate)}")
    dataset, clauses = _without_zero_rules(dataset, clauses, path)
    dataset = _with_derived(dataset, clauses, path)
    longest = max((1 + len(clause.body) for clause in clauses), default=1)
    table = np.zeros((len(clauses), longest, dataset.atom_width), np.int32)
    entity_ids, predicate_ids = assign_ids(dataset.entities), assign_ids(dataset.predicates)
    for row, clause in zip(table, clauses):
        variables: dict[Variable, int] = {}
        for slot, atom in zip(row, (clause.head, *clause.body)):
            try:
                ids = encode_atom(dataset, atom, entity_ids, predicate_ids, variables)
            except ValueError as error:
                head = shorten(clause.head.predicate)
                raise ValueError(f"{path}:{clause.line}: {error}, in a rule for {head}") from None
            slot[: len(ids)] = ids
    weights = np.array([clause.weight for clause in clauses], np.float64)
    return replace(dataset, rules=table, rule_weights=weights)


def _without_zero_rules(dataset: Dataset, clauses: Sequence[Clause], path: str) -> tuple[Dataset, Sequence[Clause]]:
    kept = [clause for clause in clauses if clause.body]
    dropped = len(clauses) - len(kept)
    if not dropped:
        return dataset, kept
    first = next(clause.line for clause in clauses if not clause.body)
    note = f"{path}:{first}: {dropped} rules without a body hold of every constant and were left out"
    return replace(dataset, notes=(*dataset.notes, note)), kept


def _with_derived(dataset: Dataset, clauses: Sequence[Clause], path: str) -> Dataset:
    """The same data, its vocabulary and width enlarged by the relations that only heads of rules have."""
    known = assign_ids(dataset.predicates)
    new = {c.head.predicate: c for c in reversed(clauses) if c.head.predicate not in known}
    arities = dataset.arities + tuple(len(c.head.args) for c in new.values())
    widen = ((0, 0), (0, max((1, *arities)) + 1 - dataset.atom_width))
    return replace(
        dataset,
        predicates=dataset.predicates + tuple(new),
        arities=arities,
        train=np.pad(dataset.train, widen),
        valid=np.pad(dataset.valid, widen),
        test=np.pad(dataset.test, widen),
        facts=np.pad(dataset.facts, widen),
        notes=dataset.notes
        + tuple(f"{path}:{c.line}: only rules derive {shorten(p)}, no triple has it" for p, c in new.items()),
    )


def encode_atom(
    dataset: Dataset,
    atom: Atom,
    entity_ids: dict[str, int],
    predicate_ids: dict[str, int],
    variables: dict[Variable, int],
) -> list[int]:
    """[predicate, argument...] of an atom; `variables` grows by those met for the first time.

    Errors: ValueError for an unknown relation or entity, with close spellings, or a wrong number of arguments.
    """
    predicate = predicate_ids.get(atom.predicate)
    if predicate is None:
        raise ValueError(unknown_name_message("relation", atom.predicate, dataset.predicates))
    arity = dataset.arities[predicate - 1]
    if arity != len(atom.args):
        raise ValueError(_clash(atom.predicate, arity, len(atom.args)))
    ids = [predicate]
    for term in atom.args:
        if isinstance(term, Variable):
            ids.append(variables.setdefault(term, dataset.n_constants + 1 + len(variables)))
        elif term in entity_ids:
            ids.append(entity_ids[term])
        else:
            raise ValueError(unknown_name_message("entity", term, dataset.entities))
    return ids


def unknown_name_message(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among those known, with close spellings."""
    close = difflib.get_close_matches(name, known, n=3) if len(name) <= 100 else []
    hint = "close: " + ", ".join(map(shorten, close)) if close else f"none of {len(known)} is spelled like it"
    return f"unknown {kind} {shorten(name)}: want one of the data's ({hint})"


def _clash(predicate: str, want: int, got: int) -> str:
    return f"arity clash: want {want} arguments for {shorten(predicate)}, as elsewhere, got {got}"


def assign_ids(names: Iterable[str]) -> dict[str, int]:
    """Ids from 1 in the order of first occurrence."""
    return {name: i for i, name in enumerate(dict.fromkeys(names), 1)}
