"""Queries: an atom that a user wrote, as the ids of a data set.

What an argument without quotes stands for:

    data set    `?x` and `_` are variables. A name of the data is that entity. A single capital, perhaps with digits (X,
                Y2), is a variable if no entity is called so, with digits only if no entity looks like it (Q42). Any
                other name is an error that suggests names of similar spelling.
    program     names that start with a capital or `_` are variables, as in Prolog, and so is `?x`. A constant that the
                program does not have is one of which nothing holds.

A name in single quotes is always an entity. `read_query` reads a query, `parse_query` its ids alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.dataset import (
    Dataset,
    encode_atom,
    index_entities,
    predicate_ids,
)
from funcppo.kg.graph.lexer import (
    Token,
    is_bare_name,
    is_variable,
    tokenize_line,
)
from funcppo.kg.graph.parser import Atom, Variable, parse_atom
from funcppo.kg.graph.similar_names import (
    similar_names_hint,
    unknown_name_message,
)

_MARKED_VARIABLE = re.compile(r"\?\w+")
_WORDS = ("name", "quoted", "variable", "integer")  # kinds of tokens
_CAPITAL_WITH_DIGITS = re.compile(r"([A-Z])[0-9]*")


class Query(NamedTuple):
    """A query over a data set."""

    # the data set; of a program, with the constants that only the query has
    dataset: Dataset
    atom: np.ndarray  # int64 [W], variables from C + 1 on
    # names of the variables in the order of their ids; each `_` is _0, _1, ...
    variables: tuple[str, ...]
    notes: tuple[str, ...]  # one line each on how names were read


def parse_query(dataset: Dataset, text: str) -> np.ndarray:
    """Encode an atom that a user wrote, such as `locatedIn(france, X)`.

    Returns:
      int64 [W], variables from C + 1 on.

    Raises:
      ValueError: as `read_query` does.
    """
    return read_query(dataset, text).atom


def read_query(dataset: Dataset, text: str) -> Query:
    """Read an atom that a user wrote, such as `locatedIn(france, X)`.

    Raises:
      ValueError: text that is no atom, an unknown predicate, a wrong number of arguments, a predicate that no fact and
        no rule's head has, or, unless the data set is a program, an unknown entity. The message is one line.
    """
    try:
        atom = _parse_atom(dataset, text)
        notes = _ambiguity_notes(dataset, atom, text)
        dataset, unknown_notes = _with_constants_of(dataset, atom)
        ids, variables = _encode(dataset, atom)
    except ValueError as error:
        raise ValueError(f"query {shorten(text)}: {error}") from None

    padding = [0] * (dataset.atom_width - len(ids))
    row = np.array(ids + padding, np.int64)
    return Query(dataset, row, variables, (*notes, *unknown_notes))


def _parse_atom(dataset: Dataset, text: str) -> Atom:
    """The atom of a query, in names."""
    tokens = tokenize_line(text, partial(_is_variable, dataset))
    try:
        atom, next_index = parse_atom(tokens, 0, prolog=dataset.is_program)
        next_token = tokens[next_index]
        if next_token.kind != "end":
            raise ValueError(
                f"expected one atom, got {shorten(next_token.text)} after it"
            )
    except ValueError as error:
        raise ValueError(f"{error}{_quoting_hint(dataset, tokens)}") from None

    starts_with_not = tokens[0] == ("name", "not")
    is_negation = starts_with_not and len(atom.args) == 1
    if is_negation and "not" not in dataset.predicates:
        raise ValueError("expected one atom, got negation not(...)")
    return atom


def _quoting_hint(dataset: Dataset, tokens: Sequence[Token]) -> str:
    """How a name of several words is written, if a query to a data set has words side by side; otherwise nothing."""
    has_neighbours = any(
        first.kind in _WORDS and second.kind in _WORDS
        for first, second in pairwise(tokens)
    )
    if dataset.is_program or not has_neighbours:
        return ""
    return "; a name with spaces is written in single quotes, with \\' for a quote in it"


def _is_variable(dataset: Dataset, word: str) -> bool:
    """Whether a word without quotes is a variable."""
    if _MARKED_VARIABLE.fullmatch(word) or word == "_":
        return True
    if dataset.is_program:
        return is_variable(word)
    if word in index_entities(dataset):
        return False

    match = _CAPITAL_WITH_DIGITS.fullmatch(word)
    if match is None or len(word) == 1:
        return match is not None
    similar = re.compile(f"{match[1]}[0-9]+")
    return not any(map(similar.fullmatch, dataset.entities))


def _ambiguity_notes(dataset: Dataset, atom: Atom, text: str) -> list[str]:
    """A note on each name without quotes that is a variable and could be an entity, or the other way round."""
    known = index_entities(dataset)
    words = {
        token.text
        for token in tokenize_line(text, lambda word: False)
        if token.kind == "name"
    }

    notes: list[str] = []
    for term in dict.fromkeys(atom.args):
        name = term.name if isinstance(term, Variable) else term
        if name not in known:
            continue
        if isinstance(term, Variable):
            notes.append(
                f"{name} is a variable here; the entity is '{name}', in single quotes"
            )
        elif len(name) == 1 and name.isupper() and name in words:
            notes.append(
                f"{name} is an entity here; write ?{name.lower()} for a variable"
            )
    return notes


def _with_constants_of(
    dataset: Dataset, atom: Atom
) -> tuple[Dataset, list[str]]:
    """The data set with the constants of an atom, and notes on those that it did not have.

    Raises:
      ValueError: the data set is no program, and has not all of the entities.
    """
    names = [term for term in atom.args if not isinstance(term, Variable)]
    known = index_entities(dataset)
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if not unknown:
        return dataset, []

    if not dataset.is_program:
        first = unknown[0]
        message = unknown_name_message("entity", first, dataset.entities)
        has_similar = "close: " in message
        if is_variable(first) or (is_bare_name(first) and not has_similar):
            message += "; a variable is ?x or a single capital"
        raise ValueError(message)

    notes: list[str] = []
    for name in unknown:
        hint = similar_names_hint(name, dataset.entities)
        notes.append(f"no fact and no rule has {shorten(name)} ({hint})")

    # Ids of variables follow those of the constants.
    rules = dataset.rules.copy()
    rules[:, :, 1:] += np.int32(len(unknown)) * (
        rules[:, :, 1:] > dataset.n_constants
    )
    entities = (*dataset.entities, *unknown)
    return replace(dataset, entities=entities, rules=rules), notes


def _encode(dataset: Dataset, atom: Atom) -> tuple[list[int], tuple[str, ...]]:
    """The ids of an atom, and the names of its variables."""
    variables: dict[Variable, int] = {}
    ids = encode_atom(
        dataset,
        atom,
        index_entities(dataset),
        predicate_ids(dataset),
        variables,
    )

    # A relation that only bodies of rules have cannot be derived; most likely the user meant another.
    tables = (
        dataset.facts,
        dataset.valid,
        dataset.test,
        dataset.rules[:, 0],
    )
    if not any((table[:, 0] == ids[0]).any() for table in tables):
        predicate = shorten(atom.predicate)
        raise ValueError(
            f"expected a predicate of some fact or of a rule's head, got {predicate}"
        )

    # The parser gives each `_` a name of its own, with a space in it.
    names = [variable.name for variable in variables]
    names = [f"_{i}" if " " in name else name for i, name in enumerate(names)]
    return ids, tuple(names)
