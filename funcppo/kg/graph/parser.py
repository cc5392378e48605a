"""Atoms, clauses, and the one grammar that every rule format shares.

    clause = atom [arrow atom {, atom}]        atom = name [( argument {, argument} )]

`parse_clause` and `parse_atom` read tokens of `lexer`. The parser is a loop, so no depth of nesting can
exhaust the stack. What is outside Datalog (negation, operators, compound terms) is an error that names it; built-ins
of Prolog are the subject of `prolog`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from funcppo.core.files import shorten
from funcppo.kg.graph.lexer import SPACED_PAREN, Token, is_integer, unquote

# of a rule file; `funcppo.kg.graph.readers` shows each
FileFormat = Literal["weighted", "AnyBURL", "AMIE", "Prolog"]


class Variable(NamedTuple):
    """A variable; within a clause, two of the same name are the same variable."""

    name: str


class Atom(NamedTuple):
    """predicate(args...), in names."""

    predicate: str
    args: tuple[Variable | str, ...]  # a constant is a plain string


class Clause(NamedTuple):
    """head :- body; a fact has no body."""

    head: Atom
    body: tuple[Atom, ...]
    weight: float  # nan where the file gives none
    line: int  # where it starts in its file, from 1


class ParsedClause(NamedTuple):
    """Head and body of a clause; the body is empty for a fact."""

    head: Atom
    body: tuple[Atom, ...]


class ParsedAtom(NamedTuple):
    """An atom read from tokens."""

    atom: Atom
    next_index: int  # of the token after it


# tokens that an atom, or what looks like one, starts with
_ATOM_KINDS = ("name", "quoted", "variable")
_ARGUMENT_KINDS = ("name", "quoted", "variable", "integer")
_NEGATIONS = ("not", "\\+")

# What Prolog calls the symbols that Datalog does not have, for messages.
_SYMBOL_MEANINGS = {
    "\\+": "negation",
    "not": "negation",
    "!": "a cut",
    ";": "a disjunction",
    "|": "a disjunction",
    "->": "an if-then-else",
    "[": "a list",
    "]": "a list",
    "{": "a term in braces",
    "}": "a term in braces",
    '"': "a string",
    "'": "a quote that is never closed",
    "-->": "a grammar rule",
    "?-": "a query mark",
    "-": "a sign or an operator",
}
_OPERATORS = {
    "is",
    "mod",
    "rem",
    "=",
    "<",
    ">",
    "=<",
    ">=",
    "=:=",
    "=\\=",
    "==",
    "\\=",
    "\\==",
    "=..",
    "@<",
    "@>",
}


def has_variables(head: Atom) -> bool:
    """Whether the atom has a variable; as the head of a clause without a body it would hold of every constant."""
    return any(isinstance(term, Variable) for term in head.args)


def check_safe(head: Atom, body: tuple[Atom, ...]) -> None:
    """Check that the body binds every variable of the head.

    Args:
      head: head of a clause.
      body: its body; empty for a fact.

    Raises:
      ValueError: it does not; names the variable.
    """
    bound: set[Variable | str] = set()
    for atom in body:
        bound.update(atom.args)

    for term in head.args:
        if isinstance(term, Variable) and term not in bound:
            # Leave out the number of an anonymous variable.
            name = shorten(term.name.split()[0])
            raise ValueError(
                f"unsafe: expected every variable of the head in the body, got {name} only in the head"
            )


def parse_clause(
    tokens: list[Token], arrow: str, *, prolog: bool
) -> ParsedClause:
    """Parse the tokens of one clause, the `end` token included.

    Args:
      arrow: kind of the token between head and body.
      prolog: names follow Prolog: a predicate cannot start with a capital, and an integer is no quoted name.

    Raises:
      ValueError: the tokens are no clause; says what was expected and what was read.
    """
    head, index = parse_atom(tokens, 0, prolog=prolog)
    body: list[Atom] = []
    separator = arrow
    while tokens[index].kind == separator:
        atom, index = parse_atom(tokens, index + 1, prolog=prolog)
        body.append(atom)
        separator = ","

    if tokens[index].kind != "end":
        separator = "," if body else arrow
        raise _unexpected_token_error(
            f"`{separator}` or the end of the clause", tokens[index]
        )
    return ParsedClause(head, tuple(body))


def parse_atom(tokens: list[Token], start: int, *, prolog: bool) -> ParsedAtom:
    """Parse the atom that starts at a token.

    Args:
      start: index of the atom's first token.
      prolog: as in `parse_clause`.

    Raises:
      ValueError: no atom starts there; says what was expected and what was read.
    """
    predicate = tokens[start]
    has_args = (
        not predicate.kind.startswith("end") and tokens[start + 1].kind == "("
    )
    _check_predicate(tokens, start, has_args, prolog)

    args: list[Variable | str] = []
    index = start + 1
    if has_args:
        args, index = _parse_arguments(tokens, index, prolog)

    atom = Atom(_token_name(predicate), tuple(args))
    return ParsedAtom(atom, index)


def _check_predicate(
    tokens: list[Token], start: int, has_args: bool, prolog: bool
) -> None:
    """Raise ValueError unless the token at `start` can be a predicate."""
    predicate = tokens[start]
    if _is_operator(tokens, start):
        raise _unexpected_token_error("a predicate", predicate)

    # In `X < 3` the operator is what surprises, not the variable before it.
    if predicate.kind in ("variable", "integer"):
        next_token = tokens[start + 1]
        if next_token.text in _OPERATORS:
            raise _unexpected_token_error("a predicate", next_token)

    # In a line format `P31(X, Y)` is an atom: with arguments, a capital does not make a variable.
    capital_allowed = predicate.kind == "variable" and has_args and not prolog
    if predicate.kind not in ("name", "quoted") and not capital_allowed:
        raise _unexpected_token_error("a predicate", predicate)

    if tokens[start + 1].kind == SPACED_PAREN:
        name = shorten(predicate.text)
        raise ValueError(
            f"expected `(` right after {name}, got a space before it"
        )


def _is_operator(tokens: list[Token], index: int) -> bool:
    """Whether a negation or `?-` stands where an atom should: before a name, or around an atom with arguments."""
    kind, text = tokens[index]
    if kind != "name" or text not in (*_NEGATIONS, "?-"):
        return False
    if tokens[index + 1].kind in _ATOM_KINDS:
        return True

    # not(p(...)): the three next tokens are a parenthesis, a name and a parenthesis, with or without white space.
    following = [token.kind.strip() for token in tokens[index + 1 : index + 4]]
    if text not in _NEGATIONS or len(following) < 3:
        return False
    first, second, third = following
    return first == "(" and second in _ATOM_KINDS and third == "("


def _parse_arguments(
    tokens: list[Token], start: int, prolog: bool
) -> tuple[list[Variable | str], int]:
    """The arguments after the opening parenthesis at `start`, and the index of the token after the closing one."""
    args: list[Variable | str] = []
    index = start

    # Each turn reads an opening parenthesis or a comma, and the argument after it.
    while tokens[index].kind in ("(", ","):
        argument = _parse_argument(tokens, index + 1, prolog)
        args.append(argument)
        index += 2

    if tokens[index].kind != ")":
        raise _unexpected_token_error(
            "`,` or `)` after an argument", tokens[index]
        )
    return args, index + 1


def _parse_argument(
    tokens: list[Token], index: int, prolog: bool
) -> Variable | str:
    """The argument at a token: a variable, or the name of a constant."""
    token = tokens[index]
    if token.kind not in _ARGUMENT_KINDS:
        raise _unexpected_token_error("a constant or a variable", token)
    if tokens[index + 1].kind == "(":
        term = shorten(token.text + "(...)")
        raise ValueError(
            f"expected a constant or a variable, got the compound term {term}"
        )

    # Each `_` is a variable of its own. No other variable has a name with a space.
    if token.kind == "variable" and token.text == "_":
        return Variable(f"_ {index}")
    if token.kind == "variable":
        return Variable(token.text.removeprefix("?"))

    name = _token_name(token)
    is_quoted = token.kind == "quoted"
    if prolog and is_quoted and is_integer(name):
        quoted = shorten(token.text)
        raise ValueError(
            f"expected the number {name} without quotes: to Prolog, {quoted} is another constant"
        )
    return name


def _token_name(token: Token) -> str:
    """The name that a token stands for."""
    if token.kind == "quoted":
        return unquote(token.text)
    return token.text


def _unexpected_token_error(expected: str, token: Token) -> ValueError:
    """The error for a token that is not what was expected; names what Prolog has and Datalog has not."""
    is_end = token.kind.startswith("end") and token.text != "."
    text = token.text if is_end else shorten(token.text)

    if token.kind.startswith("/*"):
        meaning = "a comment that is never closed"
    elif token.text in _OPERATORS:
        meaning = "a built-in"
    else:
        meaning = _SYMBOL_MEANINGS.get(token.text, "")

    if meaning:
        text = f"{meaning} {text}"
    return ValueError(f"expected {expected}, got {text}")
