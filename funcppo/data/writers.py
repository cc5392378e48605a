"""Clauses as text in each format, quoted so that reading gives the same clauses back; queries from text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from funcppo.data.dataset import Dataset, assign_ids, encode_atom
from funcppo.data.lexer import (
    is_anyburl_variable,
    is_bare_name,
    is_integer,
    is_prolog_name,
    is_variable,
    quote,
    shorten,
    tokenize_line,
)
from funcppo.data.parser import Atom, Clause, Variable, is_built_in, parse_atom


def parse_query(dataset: Dataset, text: str) -> np.ndarray:
    """int64 [W]: the atom that a text such as `locatedIn(france, X)` stands for, variables from C + 1 on.

    Errors: ValueError, one line, for text that is no atom, an unknown name, a wrong number of arguments, or a
      predicate that no fact and no rule's head has.
    """
    try:
        tokens = tokenize_line(text)
        atom, at = parse_atom(tokens, 0, prolog=False)
        if tokens[at].kind != "end":
            raise ValueError(f"want one atom, got {shorten(tokens[at].text)} after it")
        if tokens[0] == ("name", "not") and len(atom.args) == 1 and "not" not in dataset.predicates:
            raise ValueError("want one atom, got negation not(...)")
        ids = encode_atom(dataset, atom, assign_ids(dataset.entities), assign_ids(dataset.predicates), {})
        tables = (dataset.facts, dataset.valid, dataset.test, dataset.rules[:, 0])
        if not any((table[:, 0] == ids[0]).any() for table in tables):
            raise ValueError(f"want a predicate of some fact or of a rule's head, got {shorten(atom.predicate)}")
    except ValueError as error:
        raise ValueError(f"query {shorten(text)}: {error}") from None
    return np.array(ids + [0] * (dataset.width - len(ids)), np.int64)


def format_atom(dataset: Dataset, atom: np.ndarray) -> str:
    """The text of an atom's ids, as `parse_query` reads it; `locatedIn(france, X)`."""
    return _atom_text(_atom(dataset, atom), "weighted")


def format_rule(dataset: Dataset, rule: np.ndarray) -> str:
    """The text of a rule's ids, as a weighted rule file holds it; `h(X, Y) :- b(X, Z), c(Z, Y)`."""
    head, *body = (format_atom(dataset, atom) for atom in rule if atom[0])
    return f"{head} :- {', '.join(body)}"


def to_clauses(dataset: Dataset) -> tuple[list[Clause], list[Clause]]:
    """The facts and the rules of a data set as clauses; `line` counts each from 1."""
    facts = [Clause(_atom(dataset, row), (), math.nan, i) for i, row in enumerate(dataset.facts, 1)]
    rules = []
    for i, (table, weight) in enumerate(zip(dataset.rules, dataset.rule_weights), 1):
        head, *body = (_atom(dataset, row) for row in table if row[0])
        rules.append(Clause(head, tuple(body), float(weight), i))
    return facts, rules


def format_clauses(clauses: Iterable[Clause], file_format: str) -> str:
    """The text of a file of that format; `read_clauses` gives the clauses back, but for the names of variables.

    Args:
      form: weighted, AnyBURL, AMIE or Prolog. Prolog has no place for weights; the counts that AnyBURL and AMIE
        print are not in a clause and left 0.
    Errors: ValueError for a clause that the format cannot say: a fact outside Prolog, an atom that is not binary in
      AMIE, or more variables than AnyBURL has letters.
    """
    return "".join(_WRITERS[file_format](clause) + "\n" for clause in clauses)


def format_rule_clause(clause: Clause, file_format: str) -> str:
    """The text of a rule alone, without weight and counts."""
    if file_format == "AMIE":
        return _amie_rule(clause)
    return _rule_text(clause, file_format, "<=" if file_format == "AnyBURL" else ":-")


def _atom(dataset: Dataset, row: np.ndarray) -> Atom:
    predicate, *args = (int(i) for i in row[: 1 + dataset.arities[int(row[0]) - 1]])
    c = dataset.n_constants
    terms = tuple(dataset.entities[t - 1] if t <= c else Variable(_variable_name(t - c - 1)) for t in args)
    return Atom(dataset.predicates[predicate - 1], terms)


def _variable_name(index: int) -> str:
    """X, Y, Z, W, V1, V2, ... for index 0, 1, ..."""
    return "XYZW"[index] if index < 4 else f"V{index - 3}"


def _renamed(clause: Clause, form: str) -> list[Atom]:
    """Head and body with variables named X, Y, ... by first occurrence, in AnyBURL as it names them."""
    atoms = (clause.head, *clause.body)
    found = list(dict.fromkeys(t for atom in atoms for t in atom.args if isinstance(t, Variable)))
    names = {var: Variable(_variable_name(i)) for i, var in enumerate(found)}
    if form == "AnyBURL":
        names = _anyburl_names(clause.head, found)
    return [
        Atom(atom.predicate, tuple(names[t] if isinstance(t, Variable) else t for t in atom.args)) for atom in atoms
    ]


def _anyburl_names(head: Atom, found: list[Variable]) -> dict[Variable, Variable]:
    """X and Y for the first and second argument of the head, A, B, ... for the others: PyClause takes no other names.

    Source: PyClause, "Rule types and syntax" (docs/data/rule_types.rst).
    """
    ends = dict(zip(head.args[1::-1], "YX" if len(head.args) > 1 else "X"))  # X for both of h(X, X)
    rest = [var for var in found if var not in ends]
    if len(rest) > len(_INNER):
        raise ValueError(f"want at most {len(_INNER)} variables beside the head's to write as AnyBURL, got {len(rest)}")
    return {var: Variable(name) for var, name in [*((v, ends[v]) for v in found if v in ends), *zip(rest, _INNER)]}


def _atom_text(atom: Atom, form: str) -> str:
    name = atom.predicate if _bare_predicate(atom, form) else quote(atom.predicate)
    terms = ((t.name if isinstance(t, Variable) else t if _bare_constant(t, form) else quote(t)) for t in atom.args)
    separator = "," if form == "AnyBURL" else ", "
    return f"{name}({separator.join(terms)})" if atom.args else name


def _bare_predicate(atom: Atom, form: str) -> bool:
    name, arity = atom
    if form == "Prolog":
        return is_prolog_name(name) and name != "not" and not is_built_in(name, len(arity))
    return is_bare_name(name) and (len(arity) > 0 or _bare_constant(name, form))


def _bare_constant(name: str, form: str) -> bool:
    if form == "Prolog":
        return is_prolog_name(name) or is_integer(name)
    variable = is_anyburl_variable if form == "AnyBURL" else is_variable
    return is_bare_name(name) and not variable(name)


def _weight(clause: Clause) -> str:
    return "" if math.isnan(clause.weight) else repr(clause.weight)


def _weighted(clause: Clause) -> str:
    return f"{_weight(clause)}\t{_rule_text(clause, 'weighted', ':-')}"


def _anyburl(clause: Clause) -> str:
    return f"0\t0\t{_weight(clause)}\t{_rule_text(clause, 'AnyBURL', '<=')}"


def _prolog(clause: Clause) -> str:
    return _rule_text(clause, "Prolog", ":-") + "."


def _rule_text(clause: Clause, form: str, arrow: str) -> str:
    head, *body = (_atom_text(atom, form) for atom in _renamed(clause, form))
    if not body and form != "Prolog":
        raise ValueError(f"want a rule with a body to write as {form}, got the fact {head}")
    return f"{head} {arrow} {', '.join(body)}" if body else head


def _amie(clause: Clause) -> str:
    return f"{_amie_rule(clause)}\t0\t{_weight(clause)}"


def _amie_rule(clause: Clause) -> str:
    head, *body = (_amie_triple(atom) for atom in _renamed(clause, "AMIE"))
    return f"{'  '.join(body)}   => {head}"


def _amie_triple(atom: Atom) -> str:
    if len(atom.args) != 2:
        raise ValueError(f"want binary atoms to write as AMIE, got {shorten(_atom_text(atom, 'weighted'))}")
    name = lambda t: f"?{t.name.lower()}" if isinstance(t, Variable) else t if is_bare_name(t) else quote(t)
    return "  ".join((name(atom.args[0]), name(atom.predicate), name(atom.args[1])))


_INNER = "ABCDEFGHIJKLMNOPQRSTUVWZ"
_WRITERS = {"weighted": _weighted, "AnyBURL": _anyburl, "AMIE": _amie, "Prolog": _prolog}


class ProofNames(NamedTuple):
    """The texts of the parts of a proof, as `logic.proof` takes them to print it."""

    format_atom: Callable[[Sequence[int]], str]
    """From the ids of an atom to its text."""
    format_rule: Callable[[int], str]
    """From the row of a rule in the data set to its text."""


def proof_names(dataset: Dataset) -> ProofNames:
    """The texts of a data set's atoms and rules, to be unpacked: `proof.to_text(found, *proof_names(dataset))`."""

    def atom_text(atom: Sequence[int]) -> str:
        return format_atom(dataset, np.asarray(atom))

    def rule_text(rule: int) -> str:
        return format_rule(dataset, dataset.rules[rule])

    return ProofNames(atom_text, rule_text)
