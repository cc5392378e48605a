"""Atoms and rules as text that reads back as the same, and queries from text."""

from __future__ import annotations

import numpy as np

from funcppo.data.clauses import parse_atom
from funcppo.data.dataset import Dataset, atom_ids, number
from funcppo.data.tokens import is_bare, is_variable, line_tokens, quote, shorten


def parse_query(dataset: Dataset, text: str) -> np.ndarray:
    """int64 [W]: the atom that a text such as `locatedIn(france, X)` stands for, variables from C + 1 on.

    Errors: ValueError, one line, for text that is no atom, an unknown name, a wrong number of arguments, or a
      predicate that no fact and no rule's head has.
    """
    try:
        tokens = line_tokens(text)
        atom, at = parse_atom(tokens, 0, prolog=False)
        if tokens[at].kind != "end":
            raise ValueError(f"want one atom, got {shorten(tokens[at].text)} after it")
        ids = atom_ids(dataset, atom, number(dataset.entities), number(dataset.predicates), {})
        tables = (dataset.facts, dataset.valid, dataset.test, dataset.rules[:, 0])
        if not any((table[:, 0] == ids[0]).any() for table in tables):
            raise ValueError(f"want a predicate of some fact or of a rule's head, got {shorten(atom.predicate)}")
    except ValueError as error:
        raise ValueError(f"query {shorten(text)}: {error}") from None
    return np.array(ids + [0] * (dataset.width - len(ids)), np.int64)


def show_atom(dataset: Dataset, atom: np.ndarray) -> str:
    """The text of an atom's ids, as `parse_query` reads it; `locatedIn(france, X)`."""
    ids = [int(i) for i in atom]
    name, arity = dataset.predicates[ids[0] - 1], dataset.arities[ids[0] - 1]
    name = name if is_bare(name) and (arity or not is_variable(name)) else quote(name)
    return f"{name}({', '.join(_term(dataset, i) for i in ids[1 : 1 + arity])})" if arity else name


def show_rule(dataset: Dataset, rule: np.ndarray) -> str:
    """The text of a rule's ids; `h(X, Y) :- b(X, Z), c(Z, Y)`."""
    head, *body = (show_atom(dataset, atom) for atom in rule if atom[0])
    return f"{head} :- {', '.join(body)}"


def variable_name(index: int) -> str:
    """X, Y, Z, W, V1, V2, ... for index 0, 1, ..."""
    return "XYZW"[index] if index < 4 else f"V{index - 3}"


def _term(dataset: Dataset, term: int) -> str:
    if term > dataset.n_constants:
        return variable_name(term - dataset.n_constants - 1)
    name = dataset.entities[term - 1]
    return name if is_bare(name) and not is_variable(name) else quote(name)
