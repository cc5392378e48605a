"""Dataset: the ids of a knowledge graph, its splits and its rules, as plain arrays; and what its triples are like.

`from_splits` makes one of triples and `from_clauses` of a program. `with_rules` replaces the rules.

Ids: 0 is padding, 1..C are constants, above C are variables; predicates count from 1 in a space of their own.
An atom is `[predicate, argument...]`, padded with 0 to the width W of the widest predicate.

Leaks between splits are held-out triples that are known, that repeat each other, or whose inverse is known. A relation
is a near-inverse of another if most triples of each, over all splits, are triples of the other with exchanged
arguments; a symmetric relation is its own near-inverse.

Source: Toutanova and Chen 2015, "Observed versus latent features for knowledge base and text inference"; the share is
that of Akrami et al. 2020, "Realistic re-evaluation of knowledge graph completion methods" (arXiv:2003.08001).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.text import (
    COMPARED,
    COMPARISONS,
    Atom,
    Clause,
    Variable,
    indicator,
    is_anonymous,
    is_negated,
    read_number,
    unknown_name_message,
)
from funcppo.kg.graph.triples import (
    NameNumbers,
    Triple,
    drop_duplicates,
    order_of_occurrence,
    row_codes,
)

PredicateKey = tuple[str, int]  # name and arity
NameT = TypeVar("NameT", str, PredicateKey)
SPLITS = ("train", "valid", "test")
_TABLES = (*SPLITS, "facts")
MAX_BODY_ATOMS = 100  # the work of a join grows with their cube
# Operators of comparisons by the ids that stand for them in rules, below those of negated predicates, -1 to -P.
OPERATORS = {
    -(1 << 30) - i: name
    for i, name in enumerate(dict.fromkeys(COMPARISONS.values()))
}
_OPERATOR_IDS = {name: i for i, name in OPERATORS.items()}


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
    # int32 [R, M, W]: head first, then the body, padded with 0; variables from C + 1 on; conditions last, a predicate
    # -p for the negation of p, in which 0 stands for any constant, or one of `OPERATORS`
    rules: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 1, 3), np.int32)
    )
    # float64 [R], nan where the file gives none; stored as given, not used to prove
    rule_weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # int64 [R, 3]: support, body pairs and circular support of each rule over the facts, as a miner has counted them,
    # -1 where it has not; None where nothing is known
    rule_counts: np.ndarray | None = None
    n_duplicates: int = 0  # lines of train dropped because they repeat another
    # one line each on what is unusual but allowed; to print, not to act on
    notes: tuple[str, ...] = ()
    # a Prolog program: in queries, names are read as in Prolog
    is_program: bool = False
    # triples that are known to be true beside those of all splits: they are no wrong answers; None for none
    known: np.ndarray | None = None
    # ids of the entities that queries are ranked against, ascending; None for all
    candidates: np.ndarray | None = None
    # a query is ranked against the entities that known triples of its relation have in the asked place
    by_type: bool = False
    # what people call entities and relations, by name; files hold names
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    # what a folder of `funcppo data --index` holds beside the data set; None where it was read from elsewhere
    stored: StoredParts | None = None

    def entity_name(self, number: int) -> str:
        """Return the name of an entity by its id."""
        return self.entities[number - 1]

    def predicate_name(self, number: int) -> str:
        """Return the name of a predicate by its id."""
        return self.predicates[number - 1]

    @property
    def n_constants(self) -> int:
        """Return the number of entities, C."""
        return len(self.entities)

    @property
    def n_predicates(self) -> int:
        """Return the number of predicates, P."""
        return len(self.predicates)

    @property
    def atom_width(self) -> int:
        """Return the length of an atom's row, W: 1 + the largest arity, at least 2."""
        return self.facts.shape[1]

    def describe(self) -> str:
        """Return the name and the sizes on one line."""
        sizes = (
            f"{self.n_constants:,} entities, {self.n_predicates:,} relations"
        )
        splits = f"{len(self.train):,} train / {len(self.valid):,} valid / {len(self.test):,} test"
        return f"{self.name}: {sizes}, {splits}, {len(self.rules):,} rules"

    @property
    def shown(self) -> Dataset:
        """Return the data set with labels in place of names, to print; one of several names is followed by its name."""
        if not self.labels:
            return self
        if self not in _SHOWN:
            names = [*self.entities, *dict.fromkeys(self.predicates)]
            counts = Counter(self.labels.get(name, name) for name in names)

            def label(name: str) -> str:
                text = self.labels.get(name, name)
                is_unique = text == name or counts[text] == 1
                return text if is_unique else f"{text} ({name})"

            _SHOWN[self] = replace(
                self,
                entities=tuple(map(label, self.entities)),
                predicates=tuple(map(label, self.predicates)),
                labels={},
            )
        return _SHOWN[self]

    @property
    def fingerprint(self) -> str:
        """Return a hash of names, splits and rules, 16 hexadecimal digits; weights of rules do not count.

        Where it differs, ids or facts mean something else.
        """
        names = [list(self.entities), self.predicates, self.arities]
        digest = hashlib.sha256(json.dumps(names).encode())
        for name in (*_TABLES, "rules", "known", "candidates"):
            table: np.ndarray | None = getattr(self, name)
            if table is None:
                continue
            digest.update(json.dumps(table.shape).encode())
            digest.update(np.ascontiguousarray(table, dtype="<i4").data)
        digest.update(b"by type" * self.by_type)
        return digest.hexdigest()[:16]

    @property
    def fact_tables(self) -> Mapping[str, np.ndarray] | None:
        """Return the stored index of the facts, as `logic.kb.build` takes it; None if no index is stored for them."""
        if self.stored is None:
            return None
        original = self.stored.dataset
        is_same = self.facts is original.facts
        is_same = is_same and self.entities is original.entities
        is_same = is_same and self.predicates == original.predicates
        return self.stored.fact_tables if is_same else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredParts:
    """Index of the facts in a folder of `funcppo data --index`, and the data set that it is of."""

    dataset: Dataset  # as it was stored
    fact_tables: Mapping[str, np.ndarray]  # `logic.kb.index_facts` of the facts


# -- names and ids

_ENTITY_IDS: WeakKeyDictionary[Dataset, Mapping[str, int]] = WeakKeyDictionary()
_SHOWN: WeakKeyDictionary[Dataset, Dataset] = WeakKeyDictionary()


def index_entities(dataset: Dataset) -> Mapping[str, int]:
    """Return {entity name: id}, made once for each data set."""
    ids = _ENTITY_IDS.get(dataset)
    if ids is None:
        ids = _ENTITY_IDS[dataset] = assign_ids(dataset.entities)
    return ids


def predicate_ids(dataset: Dataset) -> dict[PredicateKey, int]:
    """Return {(name, arity): id} of the predicates."""
    return assign_ids(zip(dataset.predicates, dataset.arities))


def assign_ids(names: Iterable[NameT]) -> dict[NameT, int]:
    """Return {name: id} of the distinct names: 1, 2, ... in the order of first occurrence."""
    distinct = dict.fromkeys(names)
    return {name: i for i, name in enumerate(distinct, 1)}


def _predicate_key(atom: Atom) -> PredicateKey:
    """Return the name and the arity of an atom's predicate."""
    return atom.predicate, len(atom.args)


def _constants(atom: Atom) -> list[str]:
    """Return the constants among the arguments of an atom."""
    return [term for term in atom.args if not isinstance(term, Variable)]


def encode_atom(
    dataset: Dataset,
    atom: Atom,
    entity_ids: Mapping[str, int],
    predicate_ids: dict[PredicateKey, int],
    variables: dict[Variable, int],
) -> list[int]:
    """Return the ids of an atom: [predicate, argument...].

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
    if atom.sign == COMPARED:
        predicate = _OPERATOR_IDS[atom.predicate]
    if predicate is None:
        raise ValueError(_unknown_predicate_message(dataset, atom))

    ids = [-predicate if atom.sign and predicate > 0 else predicate]
    for term in atom.args:
        if isinstance(term, Variable) and is_anonymous(term) and ids[0] < 0:
            ids.append(0)
        elif isinstance(term, Variable):
            next_variable = dataset.n_constants + 1 + len(variables)
            ids.append(variables.setdefault(term, next_variable))
        elif term in entity_ids:
            ids.append(entity_ids[term])
        else:
            raise ValueError(
                unknown_name_message("entity", term, dataset.entities)
            )
    return ids


def _unknown_predicate_message(dataset: Dataset, atom: Atom) -> str:
    """Return the message for an atom with an unknown predicate or a wrong number of arguments."""
    predicates = zip(dataset.predicates, dataset.arities)
    arities = [n for name, n in predicates if name == atom.predicate]
    if not arities:
        return unknown_name_message(
            "relation", atom.predicate, dataset.predicates
        )
    name = shorten(atom.predicate)
    expected = " or ".join(map(str, arities))
    return f"arity clash: expected {expected} arguments for {name}, as elsewhere, got {len(atom.args)}"


# -- data sets of triples


def from_splits(name: str, splits: dict[str, list[Triple]]) -> Dataset:
    """Build a data set from (head, relation, tail) triples, without rules; ids follow first occurrence.

    Args:
      name: name of the data set.
      splits: triples of train, valid, test, and perhaps of facts, which are known beside train. Ids follow the order of
        the dictionary.
    """
    numbers = NameNumbers()
    tables = {
        split: numbers.number(chain.from_iterable(triples))
        for split, triples in splits.items()
    }
    return from_tables(name, list(numbers), tables)


def from_tables(
    name: str, names: Sequence[str], splits: Mapping[str, np.ndarray]
) -> Dataset:
    """Build a data set from triples of numbered names, without rules; ids follow first occurrence.

    Args:
      name: name of the data set.
      names: of entities and relations; those that no triple has are left out.
      splits: as in `from_splits`; each int [n, 3], head, relation and tail as indices of names.
    """
    entities, entity_ids = _assign_ids_in_order(splits, [0, 2], names)
    predicates, relation_ids = _assign_ids_in_order(splits, [1], names)
    tables: dict[str, np.ndarray] = {}
    for split, table in splits.items():
        # a column at a time: a table may have hundreds of millions of rows
        encoded = tables[split] = np.empty((len(table), 3), np.int32)
        encoded[:, 0] = relation_ids[table[:, 1]]
        encoded[:, 1] = entity_ids[table[:, 0]]
        encoded[:, 2] = entity_ids[table[:, 2]]

    train = drop_duplicates(tables["train"])
    facts = train
    if "facts" in tables:
        facts = drop_duplicates(np.concatenate([train, tables["facts"]]))

    n_duplicates = len(tables["train"]) - len(train)
    notes = [duplicate_note(n_duplicates)] if n_duplicates else []
    for known, ids, one, many in (
        (entities, facts[:, 1:], "entity occurs", "entities occur"),
        (predicates, facts[:, :1], "relation occurs", "relations occur"),
    ):
        is_in_fact = np.bincount(ids.ravel(), minlength=len(known) + 1) > 0
        n_unseen = len(known) - int(is_in_fact.sum())
        if n_unseen:
            what, verb = (many, "are") if n_unseen > 1 else (one, "is")
            notes.append(
                f"valid, test: {n_unseen} {what} in no known fact and {verb} kept"
            )
    held_out = {split: tables[split] for split in SPLITS[1:]}
    notes += leakage_notes(facts, held_out, predicates)
    return Dataset(
        name=name,
        entities=entities,
        predicates=predicates,
        arities=(2,) * len(predicates),
        train=facts[: len(train)],
        valid=tables["valid"],
        test=tables["test"],
        facts=facts,
        n_duplicates=n_duplicates,
        notes=tuple(notes),
    )


def _assign_ids_in_order(
    splits: Mapping[str, np.ndarray], columns: list[int], names: Sequence[str]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names that some columns hold, by first occurrence, and the id of each number.

    Ids count from 1; a number that the columns do not hold has id 0.
    """
    numbers = np.concatenate([t[:, columns].ravel() for t in splits.values()])
    order = order_of_occurrence(numbers, len(names))
    ids = np.zeros(len(names), np.int32)
    ids[order] = np.arange(1, len(order) + 1)
    return tuple(map(names.__getitem__, order.tolist())), ids


def duplicate_note(n_duplicates: int) -> str:
    """Return the note on lines of train that were dropped as duplicates."""
    return f"train: {n_duplicates} lines repeat another and were dropped"


# -- programs and rules


def from_clauses(name: str, clauses: Sequence[Clause], path: str) -> Dataset:
    """Build the data set of a program: its facts are train, and nothing is held out.

    Args:
      name: name of the data set.
      clauses: facts and rules, in the order of the program.
      path: file of the program, for messages.

    Raises:
      ValueError: a rule is too long; names file and line.
    """
    atoms = [atom for clause in clauses for atom in (clause.head, *clause.body)]
    entities = assign_ids(chain.from_iterable(map(_constants, atoms)))
    predicates = assign_ids(
        _predicate_key(atom) for atom in atoms if atom.sign != COMPARED
    )
    arities = tuple(arity for _, arity in predicates)

    stated_facts = [clause.head for clause in clauses if not clause.body]
    distinct_facts = list(dict.fromkeys(stated_facts))
    facts = np.zeros((len(distinct_facts), 1 + max((1, *arities))), np.int32)
    for row, atom in zip(facts, distinct_facts):
        args = [entities[term] for term in _constants(atom)]
        row[: 1 + len(args)] = [predicates[_predicate_key(atom)], *args]

    notes = _undefined_notes(clauses, path)
    n_duplicates = len(stated_facts) - len(distinct_facts)
    if n_duplicates:
        notes.append(duplicate_note(n_duplicates))
    dataset = Dataset(
        name=name,
        entities=tuple(entities),
        predicates=tuple(predicate for predicate, _ in predicates),
        arities=arities,
        train=facts,
        valid=facts[:0],
        test=facts[:0],
        facts=facts,
        n_duplicates=n_duplicates,
        notes=tuple(notes),
        is_program=True,
    )
    return with_rules(
        dataset, [clause for clause in clauses if clause.body], path
    )


def _undefined_notes(clauses: Sequence[Clause], path: str) -> list[str]:
    """Return a note on predicates that occur in bodies but in no head; most likely they are misspelled."""
    defined = {_predicate_key(clause.head) for clause in clauses}
    first_lines: dict[str, int] = {}  # by predicate indicator
    for clause in clauses:
        for goal in clause.body:
            is_known = goal.sign == COMPARED or _predicate_key(goal) in defined
            if not is_known:
                first_lines.setdefault(indicator(goal), clause.line)
    if not first_lines:
        return []
    listed = [
        f"{shorten(name)} (line {line})" for name, line in first_lines.items()
    ]
    names = ", ".join(_shorten_list(listed, 5))
    return [f"{path}: no fact and no rule defines {names}: nothing proves it"]


def _shorten_list(texts: list[str], n_listed: int) -> list[str]:
    """Return the first texts, and how many more follow."""
    n_more = len(texts) - n_listed
    return texts[:n_listed] + [f"{n_more} more"] * (n_more > 0)


def with_rules(
    dataset: Dataset, clauses: Sequence[Clause], path: str
) -> Dataset:
    """Return the data set with the given rules in place of its own.

    The head of a rule may define a relation that the data do not have, as in Datalog; `notes` says which.

    Three kinds of rules are left out, and `notes` says how many. A rule without a body (AnyBURL's zero rules) would
    derive its head for every constant whatever the facts are. A rule with an entity that the data do not have, or with
    a relation that neither the data nor any head has, says nothing of the data. A rule that repeats an earlier one
    would count twice; the first one stays, with its weight.

    Args:
      dataset: its own rules are dropped.
      clauses: the rules, in names.
      path: file of the rules, for messages.

    Raises:
      ValueError: a wrong arity, a body of more than `MAX_BODY_ATOMS`, a negated head, a relation that depends on its
        own negation, or every rule has an unknown name; names file and line.
    """
    for clause in clauses:
        n_atoms = len(clause.body)
        if n_atoms > MAX_BODY_ATOMS:
            problem = f"expected at most {MAX_BODY_ATOMS} atoms in the body of a rule, got {n_atoms}"
            raise _rule_error(path, clause, problem)

    rules = [clause for clause in clauses if clause.body]
    notes: list[str] = []
    zero_rules = [clause for clause in clauses if not clause.body]
    if zero_rules:
        notes.append(
            f"{path}:{zero_rules[0].line}: {len(zero_rules)} rules without a body hold of every constant and were "
            "left out"
        )
    rules, unknown_notes = _drop_rules_of_unknown_names(dataset, rules, path)
    rules, repeat_notes = _drop_repeated_rules(rules, path)
    _check_strata(rules, path)
    notes = [*dataset.notes, *notes, *unknown_notes, *repeat_notes]
    numbers = _new_numbers(dataset, rules)
    if numbers:  # else an index of the facts holds for the same names
        entities = (*dataset.entities, *numbers)
        dataset = replace(dataset, entities=entities)
        notes.append(
            f"{path}: no triple has {len(numbers)} numbers of comparisons"
        )
    dataset = replace(dataset, notes=tuple(notes))

    # Predicates first: a rule may use a relation that the head of a later rule defines.
    dataset = _with_head_predicates(dataset, rules, path)
    return replace(
        dataset,
        rules=_encode_rules(dataset, rules, path),
        rule_weights=np.array([rule.weight for rule in rules], np.float64),
        rule_counts=None,
    )


def _rule_error(path: str, rule: Clause, problem: object) -> ValueError:
    """Return the error for a rule; it names file, line and head."""
    head = shorten(rule.head.predicate)
    return ValueError(f"{path}:{rule.line}: {problem}, in a rule for {head}")


def _check_strata(rules: Sequence[Clause], path: str) -> None:
    """Check that no predicate depends on its own negation.

    Raises:
      ValueError: one does; names a cycle of rules through the negation.
    """
    uses: dict[PredicateKey, dict[PredicateKey, None]] = {}
    for rule in rules:
        used = uses.setdefault(_predicate_key(rule.head), {})
        used |= {
            _predicate_key(a): None for a in rule.body if a.sign != COMPARED
        }

    # by negated predicate: all that it depends on, each with its user on a shortest way
    user_of: dict[PredicateKey, dict[PredicateKey, PredicateKey]] = {}
    for rule in rules:
        head = _predicate_key(rule.head)
        for negated in (
            _predicate_key(a) for a in rule.body if a.sign == "not"
        ):
            if negated not in user_of:
                user_of[negated] = _find_users(uses, negated)
            if head not in user_of[negated]:
                continue
            names = [head]
            while names[-1] != negated:
                names.append(user_of[negated][names[-1]])
            pairs = pairwise(shorten(name) for name, _ in reversed(names))
            links = [f"{user} :- {used}" for user, used in pairs]
            cycle = [f"{shorten(head[0])} :- not {shorten(negated[0])}", *links]
            problem = (
                f"expected no cycle through a negation, got {', '.join(cycle)}"
            )
            raise _rule_error(path, rule, problem)


def _find_users(
    uses: Mapping[PredicateKey, Iterable[PredicateKey]], start: PredicateKey
) -> dict[PredicateKey, PredicateKey]:
    """Return all predicates that one depends on, and itself, each with the predicate by which it was reached."""
    user_of = {start: start}
    found = [start]
    for user in found:  # grows while it is traversed
        for used in uses.get(user, ()):
            if used not in user_of:
                user_of[used] = user
                found.append(used)
    return user_of


def _new_numbers(dataset: Dataset, rules: Sequence[Clause]) -> list[str]:
    """Return the numbers that rules compare with and that the data do not have."""
    atoms = (a for r in rules for a in r.body if a.sign == COMPARED)
    names = dict.fromkeys(chain.from_iterable(map(_constants, atoms)))
    known = index_entities(dataset) if names else {}
    return [name for name in names if name not in known]


def _drop_rules_of_unknown_names(
    dataset: Dataset, rules: list[Clause], path: str
) -> tuple[list[Clause], list[str]]:
    """Return the rules whose names the data or other rules have, and a note on the dropped rules.

    Raises:
      ValueError: a relation stands after a sign of negation; or there are rules, and each has an unknown name.
    """
    entities = index_entities(dataset)
    of_data = {*dataset.predicates}
    kept: list[Clause] = rules
    first: ValueError | None = None
    while True:
        # A rule that is dropped defines no relation for the others.
        relations = of_data | {rule.head.predicate for rule in kept}
        unknown = [_unknown_name(r, of_data, relations, entities) for r in kept]
        for rule, found in zip(kept, unknown):
            is_negation = found is not None and is_negated(*found, relations)
            if found is None or not (is_negation or first is None):
                continue
            is_relation = found[0] == "relation"
            known = sorted(relations) if is_relation else dataset.entities
            problem = unknown_name_message(*found, known)
            first = _rule_error(path, rule, problem)
            if is_negation:
                raise first
        if not any(unknown):
            break
        kept = [r for r, found in zip(kept, unknown) if found is None]

    if first is not None and not kept:
        raise first
    n_dropped = len(rules) - len(kept)
    return kept, [] if first is None else [
        f"{first}; {n_dropped} of {len(rules)} rules have unknown names and were left out"
    ]


def _unknown_name(
    rule: Clause,
    of_data: set[str],
    relations: set[str],
    entities: Collection[str],
) -> tuple[str, str] | None:
    """Return kind and name of a rule's first unknown relation or entity; None if all are known.

    Args:
      of_data: relations of the data.
      relations: these and those of heads, which may not be the negation of another.
    """
    atoms = [a for a in (rule.head, *rule.body) if a.sign != COMPARED]
    for name in [atom.predicate for atom in atoms]:
        is_new = name not in of_data
        if is_new and is_negated("relation", name, relations):
            return "relation", name
        if name not in relations:
            return "relation", name
    for atom in (rule.head, *rule.body):
        for name in _constants(atom):
            is_number = atom.sign == COMPARED and read_number(name) is not None
            if name not in entities and not is_number:
                return "entity", name
    return None


def _drop_repeated_rules(
    rules: list[Clause], path: str
) -> tuple[list[Clause], list[str]]:
    """Return the first of all rules that are equal, and a note on the dropped ones."""
    shapes = [_shape(rule) for rule in rules]
    counts = Counter(shapes)
    first_of: dict[object, Clause] = {}
    repeats: list[tuple[Clause, Clause]] = []  # first one, and its repetition
    for rule, shape in zip(rules, shapes):
        key = _canonical_rule(rule) if counts[shape] > 1 else shape
        first = first_of.setdefault(key, rule)
        if first is not rule:
            repeats.append((first, rule))
    if not repeats:
        return rules, []

    first, rule = repeats[0]
    note = (
        f"{path}:{rule.line}: {len(repeats)} rules repeat an earlier one, as this one line {first.line}, and were "
        "dropped"
    )
    n_reweighted = sum(str(a.weight) != str(b.weight) for a, b in repeats)
    if n_reweighted:
        note += f"; {n_reweighted} of them have another weight: that of the first one stays"
    return list(first_of.values()), [note]


def _shape(rule: Clause) -> tuple[object, ...]:
    """Return a rule without the names of its variables, which rules that are equal have in common."""
    head, *body = (
        (
            a.sign + a.predicate,
            *(repr(x) if isinstance(x, str) else "" for x in a.args),
        )
        for a in (rule.head, *{*rule.body})
    )
    return head, *sorted(body)


def _canonical_rule(rule: Clause) -> tuple[object, ...]:
    """Return a key that equal rules share: variables have other names, and the body is a set.

    Rules are equal if one becomes the other by new names of variables, another order of the body, and repeated atoms.
    Rules of one key are equal. Equal ones have one key unless the body is such a graph, of variables as nodes, that
    colour refinement cannot tell nodes apart that no symmetry exchanges, as in regular graphs of six variables.

    Source: Weisfeiler and Leman 1968, on the reduction of a graph to canonical form.
    """
    atoms = [rule.head, *{*rule.body}]
    terms = chain.from_iterable(atom.args for atom in atoms)
    colour = {t: 0 for t in terms if isinstance(t, Variable)}
    n_colours = 0
    while n_colours < len(colour):
        colour = _refine_colours(colour, atoms)
        n_before, n_colours = n_colours, len({*colour.values()})
        if n_colours == n_before:
            # Of variables that are still alike any one may come first.
            counts = Counter(colour.values())
            alike = min(c for c in counts if counts[c] > 1)
            variable = next(v for v in colour if colour[v] == alike)
            colour[variable] = hash((alike,))

    # Each variable has a colour of its own, which serves as its name.
    head, *body = (_colour_atom(atom, colour) for atom in atoms)
    return head, frozenset(body)


def _colour_atom(
    atom: Atom, colour: Mapping[Variable, int]
) -> tuple[object, ...]:
    """Return an atom with the colours of its variables in their place."""
    args = (colour[t] if isinstance(t, Variable) else t for t in atom.args)
    return atom.sign + atom.predicate, *args


def _refine_colours(
    colour: Mapping[Variable, int], atoms: Sequence[Atom]
) -> dict[Variable, int]:
    """Return the next colours of variables, which tell where each stands beside which others.

    Args:
      colour: a number for each variable.
      atoms: of a rule, its head first.
    """
    places: dict[Variable, list[int]] = {v: [] for v in colour}
    for i, atom in enumerate(atoms):
        coloured = _colour_atom(atom, colour)
        for variable in {*atom.args}:
            if isinstance(variable, Variable):
                own = [t == variable for t in atom.args]
                places[variable].append(hash((i > 0, *coloured, *own)))
    return {v: hash((colour[v], *sorted(places[v]))) for v in colour}


def _with_head_predicates(
    dataset: Dataset, rules: Sequence[Clause], path: str
) -> Dataset:
    """Return the data set with the relations that only heads of rules have, and atoms wide enough for them."""
    # Backwards, so that the first rule of a predicate is the one that stays. Ids follow this order.
    known = set(dataset.predicates)
    first_rules = {
        rule.head.predicate: rule
        for rule in reversed(rules)
        if rule.head.predicate not in known
    }
    new_arities = [len(rule.head.args) for rule in first_rules.values()]
    new_notes = [
        f"{path}:{rule.line}: only rules derive {shorten(predicate)}, no triple has it"
        for predicate, rule in first_rules.items()
    ]
    arities = (*dataset.arities, *new_arities)
    lengths = (len(a.args) for rule in rules for a in rule.body)
    n_added = 1 + max((1, *arities, *lengths)) - dataset.atom_width
    tables: dict[str, Any] = {}
    if n_added:
        padding = ((0, 0), (0, n_added))
        tables = {s: np.pad(getattr(dataset, s), padding) for s in _TABLES}
    return replace(
        dataset,
        predicates=(*dataset.predicates, *first_rules),
        arities=arities,
        notes=(*dataset.notes, *new_notes),
        **tables,
    )


def _encode_rules(
    dataset: Dataset, rules: Sequence[Clause], path: str
) -> np.ndarray:
    """Return the ids of rules, int32 [R, M, W], M the number of atoms of the longest rule."""
    n_atoms = 1 + max((len(rule.body) for rule in rules), default=0)
    table = np.zeros((len(rules), n_atoms, dataset.atom_width), np.int32)
    ids_of_entities = index_entities(dataset)
    ids_of_predicates = predicate_ids(dataset)
    for encoded, rule in zip(table, rules):
        variables: dict[Variable, int] = {}  # numbered from C + 1 in each rule
        for row, atom in zip(encoded, (rule.head, *rule.body)):
            try:
                ids = encode_atom(
                    dataset, atom, ids_of_entities, ids_of_predicates, variables
                )
            except ValueError as error:
                raise _rule_error(path, rule, error) from None
            row[: len(ids)] = ids
    return table


def training_part(dataset: Dataset) -> Dataset:
    """Return the data set whose facts are those of train, from which rules are mined and questions are asked."""
    if len(dataset.train) == len(dataset.facts):
        return dataset
    return replace(
        dataset,
        facts=dataset.train,
        rule_counts=None,
    )


# -- known facts in an order that depends on their names alone


class OrderedFacts(NamedTuple):
    """Known facts of a data set, with predicates and entities numbered in the order of their names."""

    facts: np.ndarray  # int32 [N, W], in lexicographic order
    # ids in the data set of numbers 0, 1, ...; of 0 it is 0
    predicates: np.ndarray
    entities: np.ndarray  # the same


def order_facts(dataset: Dataset) -> OrderedFacts:
    """Return the known facts in an order that depends on their names alone."""
    parts = (
        (dataset.facts[:, :1], dataset.predicates),
        (dataset.facts[:, 1:], dataset.entities),
    )
    orders: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    for ids, names in parts:
        in_use = np.unique(ids[ids > 0]).tolist()
        by_name = sorted((names[i - 1], i) for i in in_use)
        orders.append(np.array([0, *(i for _, i in by_name)]))
        number = np.zeros(len(names) + 1, np.int32)
        number[orders[-1]] = np.arange(len(orders[-1]))
        columns.append(number[ids])
    facts = np.unique(np.concatenate(columns, axis=1), axis=0)
    return OrderedFacts(facts, *orders)


def facts_digest(dataset: Dataset) -> str:
    """Return a hash of the names and the known facts, 16 hexadecimal digits.

    Neither the order of the facts nor held-out triples count.
    """
    ordered = order_facts(dataset)
    described = [
        [dataset.predicate_name(i) for i in ordered.predicates[1:]],
        [dataset.entity_name(i) for i in ordered.entities[1:]],
        ordered.facts.shape,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(np.ascontiguousarray(ordered.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]


# -- triples and their inverses

# pairs of a triple and one of its inverses beyond which no near-inverses are searched
MAX_PAIRS = 30_000_000
# share of the triples of each relation that the other one has with exchanged arguments
NEAR_INVERSE_SHARE = 0.8


def find_inverses(
    triples: np.ndarray,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the pairs of a triple and a triple with exchanged arguments, as two arrays of rows; loops have none.

    Args:
      triples: int [n, 3], distinct, as (relation, head, tail).

    Returns:
      The pairs, by the first row; None if there are more than MAX_PAIRS.
    """
    _, head, tail = triples.T.astype(np.int64)
    n_entities = 1 + int(triples[:, 1:].max(initial=0))
    key = head * n_entities + tail
    order = np.argsort(key, kind="stable")
    inverse_key = tail * n_entities + head
    start, end = (
        np.searchsorted(key[order], inverse_key, side)
        for side in ("left", "right")
    )
    count = np.where(head == tail, 0, end - start)
    if count.sum() > MAX_PAIRS:
        return None
    triple = np.repeat(np.arange(len(key)), count)
    shift = np.repeat(np.cumsum(count) - count - start, count)
    return triple, order[np.arange(len(triple)) - shift]


def leakage_notes(
    known: np.ndarray,
    held_out: Mapping[str, np.ndarray],
    relations: Sequence[str],
) -> list[str]:
    """Return one note per way in which a split leaks into the known facts, or repeats triples.

    Args:
      known: int [n, 3], the known facts, as (relation, head, tail) from 1.
      held_out: the held-out splits by name, of the same form.
      relations: names of the relations, relation r at r - 1.
    """
    splits = {name: table for name, table in held_out.items() if len(table)}
    if not splits:
        return []
    # The search sorts the known facts twice.
    if len(known) > 50_000_000:
        return [
            f"leaks between the splits were not searched: {len(known):,} known facts, over 50,000,000"
        ]
    tables = [known, *splits.values()]
    everything = np.concatenate(tables)
    _, first, rows = np.unique(
        row_codes(everything), return_index=True, return_inverse=True
    )
    triples = everything[first]
    ends = np.cumsum([len(table) for table in tables])[:-1]
    known_rows, *split_rows = np.split(rows, ends)
    is_known = np.zeros(len(triples), bool)
    is_known[known_rows] = True

    notes: list[str] = []
    rows_by_split: dict[str, np.ndarray] = {}
    for name, rows in zip(splits, split_rows):
        counts = {
            "are known facts (train or facts)": is_known[rows].sum(),
            "repeat another and are ranked again": len(rows)
            - len(np.unique(rows)),
        }
        for other, others in rows_by_split.items():
            counts[f"are in {other} too"] = np.isin(rows, others).sum()
        rows_by_split[name] = rows
        notes += [
            f"{name}: {count} of {len(rows)} triples {what}"
            for what, count in counts.items()
            if count
        ]
    return notes + _inverse_notes(triples, is_known, rows_by_split, relations)


def _inverse_notes(
    triples: np.ndarray,
    is_known: np.ndarray,
    rows_by_split: Mapping[str, np.ndarray],
    relations: Sequence[str],
) -> list[str]:
    """Return notes on the triples of each held-out split that are the inverse of a known fact."""
    pairs = find_inverses(triples)
    if pairs is None:
        return [
            f"inverse triples between the splits were not searched: over {MAX_PAIRS:,} pairs of triples"
        ]
    triple, inverse = pairs
    is_loop = triples[:, 1] == triples[:, 2]
    size = np.bincount(triples[~is_loop, 0], minlength=len(relations) + 1)
    base, relation = len(relations) + 1, triples[:, 0].astype(np.int64)
    code = relation[triple] * base + relation[inverse]
    distinct, n_common = np.unique(code, return_counts=True)
    larger = size[np.stack(np.divmod(distinct, base))].max(0)
    near = distinct[n_common >= NEAR_INVERSE_SHARE * larger]
    is_leak = np.isin(code, near) & is_known[inverse]

    notes: list[str] = []
    for name, rows in rows_by_split.items():
        is_of_split = is_leak & np.isin(triple, rows)
        n_leaked = int(np.isin(rows, triple[is_of_split]).sum())
        if not n_leaked:
            continue
        # A pair of relations counts the same either way round.
        both = [sorted(divmod(x, base)) for x in code[is_of_split].tolist()]
        names = [str(relations[i - 1]) for pair in both for i in pair]
        pairs = Counter(zip(names[::2], names[1::2]))
        texts = [
            f"{shorten(x)} {'is symmetric' if x == y else 'and ' + shorten(y)}"
            for (x, y), _ in pairs.most_common()
        ]
        listed = ", ".join(_shorten_list(texts, 3))
        notes.append(
            f"{name}: {n_leaked} of {len(rows)} triples are inverses of known facts: {listed}"
        )
    return notes


# -- what a data set is like


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe the binary facts of a data set and its held-out triples.

    Args:
      dataset: has such facts.

    Returns:
      A JSON object: `splits`, of each the numbers of `_describe_split`; `relations`, the largest first, with counts and
      shares over the known facts, None where nothing is counted; `degree_quantiles` of the number of known facts of an
      entity; `n_other_atoms`, facts that do not have two arguments and are left out; `notes`.

    Raises:
      ValueError: it has none.
    """
    is_binary = np.array([False, *(n == 2 for n in dataset.arities)])
    tables: dict[str, np.ndarray] = {}
    for name in _TABLES:
        table: np.ndarray = getattr(dataset, name)
        tables[name] = table[is_binary[table[:, 0]]][:, :3]
    facts = tables["facts"]
    if not len(facts):
        raise ValueError(
            f"{dataset.name}: expected facts of two arguments to describe, got none"
        )
    n_facts_of = np.bincount(
        facts[:, 1:].ravel(), minlength=dataset.n_constants + 1
    )[1:]
    shares = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    relations, notes = _describe_relations(dataset, tables)
    return {
        "n_other_atoms": len(dataset.facts) - len(facts),
        "splits": {
            split: _describe_split(tables[split], facts, split == "train")
            for split in SPLITS
        },
        "relations": relations,
        "degree_quantiles": {
            f"{share:g}": float(np.quantile(n_facts_of, share))
            for share in shares
        },
        "notes": [*dataset.notes, *notes],
    }


def _describe_split(
    table: np.ndarray, facts: np.ndarray, is_train: bool
) -> dict[str, int]:
    """Count the triples, entities and relations of a split, also compared with the known facts.

    Returns:
      Triples, their entities and relations; `n_known`, triples that are known facts; `n_linked`, triples whose two
      entities a known fact links, either way round, of train: another fact; entities and relations that no fact has.
    """
    both = np.concatenate([facts, table])
    ends = np.sort(both[:, 1:], 1)
    code, pair = (
        np.split(row_codes(rows), [len(facts)])
        for rows in (both, ends[:, [0, 1, 1]])
    )
    distinct, count = np.unique(pair[0], return_counts=True)
    # Of a fact the pair must be linked by another fact too.
    linked = distinct[count > 1] if is_train else distinct
    return {
        "n_triples": len(table),
        "n_entities": len(np.unique(table[:, 1:])),
        "n_relations": len(np.unique(table[:, 0])),
        "n_known": int(np.isin(code[1], code[0]).sum()),
        "n_linked": int(np.isin(pair[1], linked).sum()),
        "n_unseen_entities": len(np.setdiff1d(table[:, 1:], facts[:, 1:])),
        "n_unseen_relations": len(np.setdiff1d(table[:, 0], facts[:, 0])),
    }


def _describe_relations(
    dataset: Dataset, tables: Mapping[str, np.ndarray]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Describe all binary relations, the largest first; return a note too if inverses were not searched."""
    facts, size = tables["facts"], dataset.n_predicates + 1
    n = {
        split: np.bincount(table[:, 0], minlength=size).tolist()
        for split, table in tables.items()
    }
    by_relation = facts[np.argsort(facts[:, 0], kind="stable")]
    parts = np.split(by_relation, np.cumsum(n["facts"]))
    inverses = _count_inverses(facts)
    notes: list[str] = []
    if inverses is None:
        notes.append(
            f"symmetric and inverse relations were not searched: over {MAX_PAIRS:,} pairs of inverse triples"
        )

    relations: list[dict[str, Any]] = []
    for i in sorted(range(1, size), key=lambda i: -n["facts"][i]):
        if dataset.arities[i - 1] != 2:
            continue
        (_, head, tail), name = parts[i].T, dataset.predicate_name(i)
        _, n_tails = np.unique(head, return_counts=True)
        _, n_heads = np.unique(tail, return_counts=True)
        found = (inverses or {}).get(i, {})
        others = {j: count for j, count in found.items() if j != i}
        inverse = max(others, key=others.__getitem__, default=None)
        n_proper = int(np.count_nonzero(head != tail))
        n_symmetric = None if inverses is None else found.get(i, 0)
        n_inverse = others.get(inverse or 0)
        relations.append(
            {
                "name": name,
                **{f"n_{x}": n[x][i] for x in ("facts", "valid", "test")},
                # means over the heads, or tails, that it has
                "tails_per_head": _mean(n_tails),
                "heads_per_tail": _mean(n_heads),
                # of its heads that have one tail, and the other way round
                "functional_share": _mean(n_tails == 1),
                "inverse_functional_share": _mean(n_heads == 1),
                # of its facts whose inverse it has too, loops left out
                "symmetric_share": _share(n_symmetric, n_proper),
                # the other relation that has most of its facts with exchanged arguments
                "inverse": inverse and dataset.predicate_name(inverse),
                "inverse_share": _share(n_inverse, n_proper),
            }
        )
    return relations, notes


def _share(count: int | None, n: int) -> float | None:
    """Return a count divided by another; None where nothing is counted."""
    return None if count is None or not n else count / n


def _mean(values: np.ndarray) -> float | None:
    """Return the mean; None without values."""
    return float(values.mean()) if len(values) else None


def _count_inverses(facts: np.ndarray) -> dict[int, dict[int, int]] | None:
    """Count, per relation, its facts that each relation has with exchanged arguments; None if they are too many."""
    pairs = find_inverses(facts)
    if pairs is None:
        return None
    size = 1 + int(facts[:, 0].max())
    relation, other = facts[:, 0][np.stack(pairs)].astype(np.int64)
    codes, counts = np.unique(relation * size + other, return_counts=True)
    found: dict[int, dict[int, int]] = {}
    for code, count in zip(codes.tolist(), counts.tolist()):
        found.setdefault(code // size, {})[code % size] = count
    return found
