"""Clauses and ids as text, in each rule format, quoted so that reading gives the same clauses back.

`format_atom` and `format_rule` are for people; `proof_names` binds both to a data set. `format_clauses` makes the text
of a file in a format that `funcppo.kg.graph.readers` reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.dataset import Dataset, index_entities
from funcppo.kg.graph.lexer import (
    is_anyburl_variable,
    is_bare_name,
    is_integer,
    is_prolog_name,
    is_variable,
    quote,
)
from funcppo.kg.graph.parser import Atom, Clause, FileFormat, Variable
from funcppo.kg.graph.prolog import indicator, is_built_in

# all but X and Y, which are those of the head
_ANYBURL_INNER_VARIABLES = "ABCDEFGHIJKLMNOPQRSTUVWZ"
_ARROWS: dict[FileFormat, str] = {
    "weighted": ":-",
    "AnyBURL": "<=",
    "AMIE": "=>",
    "Prolog": ":-",
}


class AtomFormatter(Protocol):
    """Formats the ids of an atom."""

    def __call__(self, atom: Sequence[int] | np.ndarray, /) -> str: ...


class RuleFormatter(Protocol):
    """Formats the rule of an index into the rules of a data set."""

    def __call__(self, rule: int, /) -> str: ...


class NameFormatter(Protocol):
    """Formats the id of a predicate, or that of a constant or variable."""

    def __call__(self, number: int, /) -> str: ...


class ProofNames(NamedTuple):
    """What `logic.proof` needs to print a proof in names: `to_json(proof, *proof_names(dataset))`."""

    format_atom: AtomFormatter
    format_rule: RuleFormatter
    format_predicate: NameFormatter
    format_term: NameFormatter


class ClauseLists(NamedTuple):
    """Facts and rules of a data set in names."""

    facts: list[Clause]
    rules: list[Clause]


def format_atom(dataset: Dataset, atom: Sequence[int] | np.ndarray) -> str:
    """The text of an atom's ids, as `parse_query` reads it; `locatedIn(france, X)`."""
    return _format_named_atom(_decode_atom(dataset, atom), "weighted")


def format_rule(dataset: Dataset, rule: np.ndarray) -> str:
    """The text of a rule's ids, as a weighted rule file has it; `h(X, Y) :- b(X, Z), c(Z, Y)`."""
    head, *body = [format_atom(dataset, atom) for atom in rule if atom[0]]
    conditions = ", ".join(body)
    return f"{head} :- {conditions}"


def proof_names(dataset: Dataset) -> ProofNames:
    """The functions that format the atoms, rules and names of proofs over a data set."""

    def format_rule_of_index(rule: int) -> str:
        return format_rule(dataset, dataset.rules[rule])

    def format_predicate(predicate: int) -> str:
        return dataset.predicates[predicate - 1]

    def format_term(term: int) -> str:
        decoded = _decode_term(dataset, term)
        return decoded.name if isinstance(decoded, Variable) else decoded

    return ProofNames(
        partial(format_atom, dataset),
        format_rule_of_index,
        format_predicate,
        format_term,
    )


def to_clauses(dataset: Dataset) -> ClauseLists:
    """Decode the facts and the rules of a data set.

    Returns:
      Both lists in the order of the data set. In each, `Clause.line` counts from 1.
    """
    facts: list[Clause] = []
    for line, row in enumerate(dataset.facts, 1):
        head = _decode_atom(dataset, row)
        fact = Clause(head, body=(), weight=math.nan, line=line)
        facts.append(fact)
    return ClauseLists(facts, rule_clauses(dataset))


def rule_clauses(dataset: Dataset) -> list[Clause]:
    """Decode the rules of a data set, in its order; `Clause.line` counts from 1."""
    rules: list[Clause] = []
    weights = dataset.rule_weights.tolist()
    for i, rows in enumerate(dataset.rules):
        head, *body = [_decode_atom(dataset, row) for row in rows if row[0]]
        rule = Clause(
            head=head,
            body=tuple(body),
            weight=weights[i],
            line=i + 1,
        )
        rules.append(rule)
    return rules


def format_clauses(clauses: Iterable[Clause], file_format: FileFormat) -> str:
    """The text of a file; `read_clauses` gives the clauses back, but for the names of variables.

    Prolog has no place for weights. AnyBURL and AMIE print counts that a clause does not hold; they are written as 0.

    Args:
      clauses: facts are possible in Prolog only.
      file_format: format of the file.

    Raises:
      ValueError: a clause that the format cannot express: a fact outside Prolog, a predicate that is a built-in of
        Prolog, an atom that is not binary in AMIE, or more variables than AnyBURL has letters.
    """
    lines = [_format_line(clause, file_format) for clause in clauses]
    return "".join(line + "\n" for line in lines)


def format_rule_clause(clause: Clause, file_format: FileFormat) -> str:
    """The text of a clause alone, without weight, counts and full stop.

    Args:
      clause: a fact is possible in Prolog only.
      file_format: format whose syntax is used.

    Raises:
      ValueError: as in `format_clauses`.
    """
    if not clause.body and file_format != "Prolog":
        fact = _format_named_atom(clause.head, file_format)
        raise ValueError(
            f"expected a rule with a body to write as {file_format}, got the fact {fact}"
        )

    atoms = _with_named_variables(clause, file_format)
    arrow = _ARROWS[file_format]
    if file_format == "AMIE":
        head, *body = map(_format_amie_triple, atoms)
        conditions = "  ".join(body)
        return f"{conditions}   {arrow} {head}"

    head, *body = [_format_named_atom(atom, file_format) for atom in atoms]
    conditions = ", ".join(body)
    return f"{head} {arrow} {conditions}" if body else head


def _format_line(clause: Clause, file_format: FileFormat) -> str:
    """The line of a file for a clause."""
    text = format_rule_clause(clause, file_format)
    weight = "" if math.isnan(clause.weight) else repr(clause.weight)
    if file_format == "weighted":
        return f"{weight}\t{text}"
    if file_format == "AnyBURL":
        return f"0\t0\t{weight}\t{text}"
    if file_format == "AMIE":
        return f"{text}\t0\t{weight}"
    return text + "."


def _decode_atom(dataset: Dataset, ids: Sequence[int] | np.ndarray) -> Atom:
    """The atom that a row of ids stands for."""
    predicate = int(ids[0])
    arity = dataset.arities[predicate - 1]
    args: list[Variable | str] = []
    for term in ids[1 : 1 + arity]:
        args.append(_decode_term(dataset, int(term)))
    return Atom(dataset.predicates[predicate - 1], tuple(args))


def _decode_term(dataset: Dataset, term: int) -> Variable | str:
    """The constant or variable that an id stands for."""
    if term <= dataset.n_constants:
        return dataset.entities[term - 1]
    index = term - dataset.n_constants - 1
    return Variable(variable_name(index))


def variable_name(index: int) -> str:
    """X, Y, Z, W, V1, V2, ... for index 0, 1, ..."""
    letters = "XYZW"
    if index < len(letters):
        return letters[index]
    return f"V{index - len(letters) + 1}"


def free_variable(dataset: Dataset) -> int:
    """The id of the first variable whose name no entity has, so that a query with it is read as it was written."""
    entities = index_entities(dataset)
    index = next(
        i for i in itertools.count() if variable_name(i) not in entities
    )
    return dataset.n_constants + 1 + index


def _with_named_variables(
    clause: Clause, file_format: FileFormat
) -> list[Atom]:
    """Head and body, the variables renamed as the format has it: X, Y, ... by first occurrence, but for AnyBURL."""
    atoms = (clause.head, *clause.body)
    variables = _distinct_variables(atoms)
    if file_format == "AnyBURL":
        new_variables = _anyburl_variables(clause.head, variables)
    else:
        new_variables = {
            variable: Variable(variable_name(i))
            for i, variable in enumerate(variables)
        }

    renamed: list[Atom] = []
    for atom in atoms:
        args = tuple(_rename(term, new_variables) for term in atom.args)
        renamed.append(Atom(atom.predicate, args))
    return renamed


def _distinct_variables(atoms: Iterable[Atom]) -> list[Variable]:
    """The variables of atoms, each once, by first occurrence."""
    variables: dict[Variable, None] = {}
    for atom in atoms:
        for term in atom.args:
            if isinstance(term, Variable):
                variables[term] = None
    return list(variables)


def _rename(
    term: Variable | str, new_variables: dict[Variable, Variable]
) -> Variable | str:
    """The term, renamed if it is a variable."""
    return new_variables[term] if isinstance(term, Variable) else term


def _anyburl_variables(
    head: Atom, variables: list[Variable]
) -> dict[Variable, Variable]:
    """New variables: X and Y for the first and second argument of the head, A, B, ... for the others.

    PyClause takes no other names.

    Source: PyClause, "Rule types and syntax" (docs/data/rule_types.rst).
    """
    # The first argument is set last: both arguments of h(X, X) are X.
    head_names: dict[Variable | str, str] = {}
    if len(head.args) > 1:
        head_names[head.args[1]] = "Y"
    if head.args:
        head_names[head.args[0]] = "X"

    n_letters = len(_ANYBURL_INNER_VARIABLES)
    n_inner = sum(variable not in head_names for variable in variables)
    if n_inner > n_letters:
        problem = f"at most {n_letters} variables beside the head's to write as AnyBURL"
        raise ValueError(f"expected {problem}, got {n_inner}")

    new_variables: dict[Variable, Variable] = {}
    letters = iter(_ANYBURL_INNER_VARIABLES)
    for variable in variables:
        name = head_names[variable] if variable in head_names else next(letters)
        new_variables[variable] = Variable(name)
    return new_variables


def _format_named_atom(atom: Atom, file_format: FileFormat) -> str:
    """The text of an atom in any format but AMIE, with quotes where the format needs them."""
    predicate = atom.predicate
    if not _is_bare_predicate(atom, file_format):
        predicate = quote(predicate)
    if not atom.args:
        return predicate

    separator = "," if file_format == "AnyBURL" else ", "
    args = [_format_term(term, file_format) for term in atom.args]
    return f"{predicate}({separator.join(args)})"


def _format_term(term: Variable | str, file_format: FileFormat) -> str:
    """The text of an argument in any format but AMIE."""
    if isinstance(term, Variable):
        return term.name
    return term if _is_bare_constant(term, file_format) else quote(term)


def _is_bare_predicate(atom: Atom, file_format: FileFormat) -> bool:
    """Whether the predicate of an atom needs no quotes."""
    name, args = atom
    if file_format == "Prolog" and is_built_in(atom):
        raise ValueError(
            f"expected a predicate that Prolog lets a program define, got {indicator(atom)}"
        )
    if file_format == "Prolog":
        return is_prolog_name(name) and name != "not"

    # Without arguments a capital would read as a variable.
    if not args:
        return _is_bare_constant(name, file_format)
    return is_bare_name(name)


def _is_bare_constant(name: str, file_format: FileFormat) -> bool:
    """Whether a constant needs no quotes: without them it would be no other token, and no variable."""
    if file_format == "Prolog":
        return is_prolog_name(name) or is_integer(name)
    reads_as_variable = (
        is_anyburl_variable if file_format == "AnyBURL" else is_variable
    )
    return is_bare_name(name) and not reads_as_variable(name)


def _format_amie_triple(atom: Atom) -> str:
    """The text of a binary atom in AMIE: `?x  relation  ?y`."""
    if len(atom.args) != 2:
        text = _format_named_atom(atom, "weighted")
        raise ValueError(
            f"expected binary atoms to write as AMIE, got {shorten(text)}"
        )
    head, tail = atom.args
    words = (head, atom.predicate, tail)
    return "  ".join(map(_format_amie_word, words))


def _format_amie_word(word: Variable | str) -> str:
    """The text of a variable, constant or relation in AMIE."""
    if isinstance(word, Variable):
        return f"?{word.name.lower()}"
    return word if is_bare_name(word) else quote(word)
