"""Dataset: the ids of a knowledge graph, its splits and its rules, as plain arrays.

`from_splits` makes one of triples and `from_clauses` of a program. `with_rules` replaces the rules. `parse_query`
encodes an atom that a user wrote.

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

from funcppo.data.lexer import shorten, tokenize_line
from funcppo.data.parser import Atom, Clause, Variable, parse_atom

Triple = tuple[str, str, str]  # head, relation, tail
MAX_BODY_ATOMS = 100  # the work of a join grows with their cube
# characters of a name for which similar names are searched
_MAX_SUGGESTION_LENGTH = 100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """Known facts, held-out facts and rules of a knowledge graph; compare two by `fingerprint`."""

    name: str
    entities: tuple[str, ...]  # constant id c is entities[c - 1]
    predicates: tuple[str, ...]  # predicate id p is predicates[p - 1]
    arities: tuple[int, ...]  # of each predicate
    train: np.ndarray  # int32 [n, W], in the order of the file, distinct
    valid: np.ndarray  # int32 [n, W]
    test: np.ndarray  # int32 [n, W]
    facts: np.ndarray  # int32 [N, W]: train, then what facts.txt adds; distinct
    # int32 [R, M, W]: head first, then the body, padded with 0; variables from C + 1 on
    rules: np.ndarray
    # float64 [R], nan where the file gives none; stored as given, not used to prove
    rule_weights: np.ndarray
    n_duplicates: int  # lines of train dropped because they repeat another
    # one line each on what is unusual but allowed; to print, not to act on
    notes: tuple[str, ...]

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
        names = json.dumps([self.entities, self.predicates, self.arities])
        digest = hashlib.sha256(names.encode())
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
            digest.update(content.tobytes())
        return digest.hexdigest()[:16]


def from_splits(name: str, splits: dict[str, list[Triple]]) -> Dataset:
    """The data set of (head, relation, tail) triples, without rules; ids follow first occurrence.

    Args:
      name: name of the data set.
      splits: triples of train, valid, test, and perhaps of facts, which are known beside train. Ids follow the order of
        the dictionary.
    """
    triples: list[Triple] = []
    for split in splits.values():
        triples += split
    entity_ids = assign_ids(_entity_names(triples))
    predicate_ids = assign_ids(_relation_names(triples))

    train = list(dict.fromkeys(splits["train"]))
    more_facts = splits.get("facts", [])
    facts = list(dict.fromkeys([*train, *more_facts]))

    notes = []
    n_duplicates = len(splits["train"]) - len(train)
    if n_duplicates:
        notes.append(_duplicate_note(n_duplicates))
    n_unseen_entities = len(entity_ids) - len(set(_entity_names(facts)))
    if n_unseen_entities:
        notes.append(_unseen_note(n_unseen_entities, "entities"))
    n_unseen_relations = len(predicate_ids) - len(set(_relation_names(facts)))
    if n_unseen_relations:
        notes.append(_unseen_note(n_unseen_relations, "relations"))

    return Dataset(
        name=name,
        entities=tuple(entity_ids),
        predicates=tuple(predicate_ids),
        arities=(2,) * len(predicate_ids),
        train=_encode_triples(train, entity_ids, predicate_ids),
        valid=_encode_triples(splits["valid"], entity_ids, predicate_ids),
        test=_encode_triples(splits["test"], entity_ids, predicate_ids),
        facts=_encode_triples(facts, entity_ids, predicate_ids),
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
      ValueError: a predicate has different arities, or a rule is too long; names file and line.
    """
    entities, arities = _vocabulary(clauses, path)
    entity_ids = assign_ids(entities)
    predicate_ids = assign_ids(arities)
    atom_width = 1 + max([1, *arities.values()])

    stated_facts = [clause.head for clause in clauses if not clause.body]
    distinct_facts = list(dict.fromkeys(stated_facts))
    facts = np.zeros((len(distinct_facts), atom_width), np.int32)
    for row, atom in zip(facts, distinct_facts):
        args = [entity_ids[str(term)] for term in atom.args]
        ids = [predicate_ids[atom.predicate], *args]
        row[: len(ids)] = ids

    n_duplicates = len(stated_facts) - len(distinct_facts)
    dataset = Dataset(
        name=name,
        entities=tuple(entities),
        predicates=tuple(arities),
        arities=tuple(arities.values()),
        train=facts,
        valid=facts[:0],
        test=facts[:0],
        facts=facts,
        rules=np.zeros((0, 1, atom_width), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=n_duplicates,
        notes=(_duplicate_note(n_duplicates),) if n_duplicates else (),
    )
    return with_rules(
        dataset, [clause for clause in clauses if clause.body], path
    )


def with_rules(
    dataset: Dataset, clauses: Sequence[Clause], path: str
) -> Dataset:
    """The data set with these rules in place of its own.

    The head of a rule may define a relation that the data do not have, as in Datalog; `notes` says which. A rule
    without a body (AnyBURL's zero rules) would derive its head for every constant whatever the facts are. Such rules
    are left out, and `notes` says how many.

    Args:
      dataset: its own rules are dropped.
      clauses: the rules, in names.
      path: file of the rules, for messages.

    Raises:
      ValueError: a relation that neither the data nor any head has, an entity that the data do not have, a wrong
        arity, or a body of more than `MAX_BODY_ATOMS`; names file and line.
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

    # Predicates first: a rule may use a relation that the head of a later rule defines.
    dataset = _with_head_predicates(dataset, rules, path)
    table = _encode_rules(dataset, rules, path)
    weights = np.array([rule.weight for rule in rules], np.float64)
    return replace(dataset, rules=table, rule_weights=weights)


def parse_query(dataset: Dataset, text: str) -> np.ndarray:
    """Encode an atom that a user wrote, such as `locatedIn(france, X)`.

    Returns:
      int64 [W], variables from C + 1 on.

    Raises:
      ValueError: text that is no atom, an unknown name, a wrong number of arguments, or a predicate that no fact and no
        rule's head has. The message is one line.
    """
    try:
        ids = _parse_query_ids(dataset, text)
    except ValueError as error:
        raise ValueError(f"query {shorten(text)}: {error}") from None

    padding = [0] * (dataset.atom_width - len(ids))
    return np.array(ids + padding, np.int64)


def _parse_query_ids(dataset: Dataset, text: str) -> list[int]:
    """`parse_query` without padding."""
    tokens = tokenize_line(text)
    atom, next_index = parse_atom(tokens, 0, prolog=False)
    next_token = tokens[next_index]
    if next_token.kind != "end":
        raise ValueError(
            f"expected one atom, got {shorten(next_token.text)} after it"
        )

    starts_with_not = tokens[0] == ("name", "not")
    is_negation = starts_with_not and len(atom.args) == 1
    if is_negation and "not" not in dataset.predicates:
        raise ValueError("expected one atom, got negation not(...)")

    entity_ids = assign_ids(dataset.entities)
    predicate_ids = assign_ids(dataset.predicates)
    ids = encode_atom(dataset, atom, entity_ids, predicate_ids, variables={})

    # A relation that only bodies of rules have cannot be derived; most likely the user meant another.
    heads = dataset.rules[:, 0]
    for table in (dataset.facts, dataset.valid, dataset.test, heads):
        predicates = table[:, 0]
        if (predicates == ids[0]).any():
            return ids
    predicate = shorten(atom.predicate)
    raise ValueError(
        f"expected a predicate of some fact or of a rule's head, got {predicate}"
    )


def encode_atom(
    dataset: Dataset,
    atom: Atom,
    entity_ids: dict[str, int],
    predicate_ids: dict[str, int],
    variables: dict[Variable, int],
) -> list[int]:
    """The ids of an atom: [predicate, argument...].

    Args:
      dataset: where names and arities are looked up.
      atom: in names.
      entity_ids: `assign_ids` of the entities.
      predicate_ids: `assign_ids` of the predicates.
      variables: ids of the variables of the clause so far; grows by those that occur here for the first time.

    Raises:
      ValueError: an unknown relation or entity, or a wrong number of arguments; suggests names of similar spelling.
    """
    predicate = predicate_ids.get(atom.predicate)
    if predicate is None:
        raise ValueError(
            unknown_name_message("relation", atom.predicate, dataset.predicates)
        )
    arity = dataset.arities[predicate - 1]
    if arity != len(atom.args):
        raise ValueError(_arity_message(atom.predicate, arity, len(atom.args)))

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


def unknown_name_message(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among the known ones; suggests some of similar spelling.

    Args:
      kind: relation or entity.
      name: the unknown name.
      known: all names of this kind.
    """
    similar = []
    if len(name) <= _MAX_SUGGESTION_LENGTH:
        similar = difflib.get_close_matches(name, known, n=3)

    hint = f"none of {len(known)} is spelled like it"
    if similar:
        hint = "close: " + ", ".join(map(shorten, similar))
    return (
        f"unknown {kind} {shorten(name)}: expected one of the data's ({hint})"
    )


def assign_ids(names: Iterable[str]) -> dict[str, int]:
    """Ids from 1 of distinct names, in the order of first occurrence."""
    distinct = dict.fromkeys(names)
    return {name: i for i, name in enumerate(distinct, 1)}


def _entity_names(triples: Iterable[Triple]) -> list[str]:
    """Heads and tails of triples, in their order."""
    names = []
    for head, _, tail in triples:
        names += [head, tail]
    return names


def _relation_names(triples: Iterable[Triple]) -> list[str]:
    """Relations of triples, in their order."""
    return [relation for _, relation, _ in triples]


def _encode_triples(
    triples: list[Triple],
    entity_ids: dict[str, int],
    predicate_ids: dict[str, int],
) -> np.ndarray:
    """The ids of triples, int32 [n, 3]: predicate, head, tail."""
    rows: list[tuple[int, int, int]] = []
    for head, relation, tail in triples:
        row = (
            predicate_ids[relation],
            entity_ids[head],
            entity_ids[tail],
        )
        rows.append(row)
    table = np.array(rows, np.int32)
    return table.reshape(-1, 3)  # [0, 3] for no triples


def _duplicate_note(n_duplicates: int) -> str:
    """The note on lines of train that were dropped."""
    return f"train: {n_duplicates} lines repeat another and were dropped"


def _unseen_note(n_unseen: int, kind: str) -> str:
    """The note on entities or relations that only held-out triples have."""
    return (
        f"valid, test: {n_unseen} {kind} occur in no known fact; they are kept"
    )


def _vocabulary(
    clauses: Sequence[Clause], path: str
) -> tuple[dict[str, None], dict[str, int]]:
    """Constants as keys, and the arity of each predicate, in the order of the program."""
    entities: dict[str, None] = {}
    arities: dict[str, int] = {}
    for clause in clauses:
        for predicate, args in (clause.head, *clause.body):
            n_args = len(args)
            arity = arities.setdefault(predicate, n_args)
            if arity != n_args:
                problem = _arity_message(predicate, arity, n_args)
                raise ValueError(f"{path}:{clause.line}: {problem}")
            for term in args:
                if not isinstance(term, Variable):
                    entities[term] = None
    return entities, arities


def _check_body_length(clause: Clause, path: str) -> None:
    """Raise ValueError for a clause that is too long."""
    n_atoms = len(clause.body)
    if n_atoms > MAX_BODY_ATOMS:
        problem = f"expected at most {MAX_BODY_ATOMS} atoms in the body of a rule, got {n_atoms}"
        head = shorten(clause.head.predicate)
        raise ValueError(
            f"{path}:{clause.line}: {problem}, in a rule for {head}"
        )


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
    padding = ((0, 0), (0, atom_width - dataset.atom_width))
    return replace(
        dataset,
        predicates=dataset.predicates + tuple(first_rules),
        arities=tuple(arities),
        train=np.pad(dataset.train, padding),
        valid=np.pad(dataset.valid, padding),
        test=np.pad(dataset.test, padding),
        facts=np.pad(dataset.facts, padding),
        notes=tuple(notes),
    )


def _encode_rules(
    dataset: Dataset, rules: Sequence[Clause], path: str
) -> np.ndarray:
    """The ids of rules, int32 [R, M, W], M the number of atoms of the longest."""
    body_lengths = [len(rule.body) for rule in rules]
    n_atoms = 1 + max(body_lengths, default=0)
    table = np.zeros((len(rules), n_atoms, dataset.atom_width), np.int32)
    entity_ids = assign_ids(dataset.entities)
    predicate_ids = assign_ids(dataset.predicates)

    for i, rule in enumerate(rules):
        variables: dict[Variable, int] = {}  # numbered from C + 1 in each rule
        atoms = (rule.head, *rule.body)
        for j, atom in enumerate(atoms):
            try:
                ids = encode_atom(
                    dataset, atom, entity_ids, predicate_ids, variables
                )
            except ValueError as error:
                head = shorten(rule.head.predicate)
                raise ValueError(
                    f"{path}:{rule.line}: {error}, in a rule for {head}"
                ) from None
            n_ids = len(ids)
            table[i, j, :n_ids] = ids
    return table


def _arity_message(predicate: str, expected: int, n_args: int) -> str:
    """The message for an atom with another number of arguments than its predicate has elsewhere."""
    name = shorten(predicate)
    return f"arity clash: expected {expected} arguments for {name}, as elsewhere, got {n_args}"
