"""Atoms, clauses, and the one grammar that every rule format shares.

    clause = atom [arrow atom {, atom}]        atom = name [( argument {, argument} )]

The parser is a loop, so no depth of nesting can exhaust the stack.
"""

from __future__ import annotations

from typing import NamedTuple

from funcppo.data.lexer import SPACED_PAREN, Token, is_integer, shorten, unquote


class Variable(NamedTuple):
    """A variable; two are the same within a clause when their names are."""

    name: str


class Atom(NamedTuple):
    """predicate(args...); a constant is a plain string."""

    predicate: str
    args: tuple[Variable | str, ...]


class Clause(NamedTuple):
    """head :- body; a fact has no body."""

    head: Atom
    body: tuple[Atom, ...]
    weight: float  # nan where the file gives none
    line: int  # where it starts in its file, from 1


_CONTROL = {"\\+": "negation", "not": "negation", "!": "a cut", ";": "a disjunction", "|": "a disjunction"}
_CONTROL |= {"->": "an if-then-else", "[": "a list", "{": "a term in braces", '"': "a string", "-->": "a grammar rule"}
_CONTROL |= {
    "?-": "a query mark",
    "'": "a quote that is never closed",
    "}": "a term in braces",
    "]": "a list",
    "-": "a sign or an operator",
}
_ARITHMETIC = {"is", "mod", "rem", "=", "<", ">", "=<", ">=", "=:=", "=\\=", "==", "\\=", "\\==", "=..", "@<", "@>"}
_BUILT_INS = """
    true/0 fail/0 false/0 not/1 call/1 call/2 call/3 once/1 ignore/1 findall/3 bagof/3 setof/3 forall/2 aggregate_all/3
    var/1 nonvar/1 atom/1 number/1 integer/1 float/1 atomic/1 compound/1 callable/1 ground/1 is_list/1 functor/3 arg/3
    copy_term/2 assert/1 asserta/1 assertz/1 retract/1 abolish/1 write/1 write/2 writeln/1 print/1 nl/0 nl/1 halt/0
    halt/1 between/3 dif/2 repeat/0 throw/1 catch/3 op/3 read/1 consult/1 atom_length/2 atom_concat/3 succ/2 plus/3 is/2
    dynamic/1 discontiguous/1 table/1 initialization/1 multifile/1 ensure_loaded/1 include/1 set_prolog_flag/2
    current_prolog_flag/2 call/4 call/5 call/6 call/7 call/8 unify_with_occurs_check/2 compare/3 subsumes_term/2
    acyclic_term/1 term_variables/2 numbervars/3 sort/2 msort/2 keysort/2 length/2 sub_atom/5 atom_chars/2 atom_codes/2
    char_code/2 number_chars/2 number_codes/2 char_conversion/2 current_char_conversion/2 current_op/3 clause/2
    current_predicate/1 predicate_property/2 retractall/1 phrase/2 phrase/3 writeq/1 writeq/2 write_canonical/1
    write_canonical/2 write_term/2 write_term/3 read/2 read_term/2 read_term/3 open/3 open/4 close/1 close/2
    current_input/1 current_output/1 set_input/1 set_output/1 set_stream_position/2 stream_property/2 flush_output/0
    flush_output/1 at_end_of_stream/0 at_end_of_stream/1 get_char/1 get_char/2 peek_char/1 peek_char/2 put_char/1
    put_char/2 get_code/1 get_code/2 peek_code/1 peek_code/2 put_code/1 put_code/2 get_byte/1 get_byte/2 peek_byte/1
    peek_byte/2 put_byte/1 put_byte/2
"""
_BUILT_IN_SET = frozenset(_BUILT_INS.split())


def is_built_in(predicate: str, arity: int) -> bool:
    """Whether Prolog gives this predicate a meaning of its own."""
    return f"{predicate}/{arity}" in _BUILT_IN_SET


def parse_clause(tokens: list[Token], arrow: str, *, prolog: bool) -> tuple[Atom, tuple[Atom, ...]]:
    """Head and body; the body is empty for a fact.

    Args:
      arrow: the token between head and body.
      prolog: names follow Prolog: a predicate cannot start with a capital, nor be a built-in.
    Errors: ValueError saying what was expected and found.
    """
    head, at = parse_atom(tokens, 0, prolog=prolog)
    body: list[Atom] = []
    separator = arrow
    while tokens[at].kind == separator:
        atom, at = parse_atom(tokens, at + 1, prolog=prolog)
        body.append(atom)
        separator = ","
    if tokens[at].kind != "end":
        raise _wanted("`,` or the end of the clause" if body else f"`{arrow}` or the end of the clause", tokens[at])
    return head, tuple(body)


def check_safe(head: Atom, body: tuple[Atom, ...]) -> None:
    """Errors: ValueError naming a variable of the head that the body does not bind."""
    bound = {t for atom in body for t in atom.args}
    for term in head.args:
        if isinstance(term, Variable) and term not in bound:
            name = term.name.split()[0]
            raise ValueError(
                f"unsafe: want every variable of the head in the body, got {shorten(name)} only in the head"
            )


def has_variables(head: Atom) -> bool:
    """Whether a head without a body would hold of every constant: it has a variable."""
    return any(isinstance(t, Variable) for t in head.args)


def parse_atom(tokens: list[Token], start: int, *, prolog: bool) -> tuple[Atom, int]:
    """The atom that starts at a token, and where the next one stands."""
    predicate = tokens[start]
    opened = not predicate.kind.startswith("end") and tokens[start + 1].kind == "("
    if _is_operator(tokens, start):
        raise _wanted("a predicate", predicate)
    if predicate.kind in ("variable", "integer") and tokens[start + 1].text in _ARITHMETIC:
        raise _wanted("a predicate", tokens[start + 1])
    if predicate.kind not in ("name", "quoted") and not (predicate.kind == "variable" and opened and not prolog):
        raise _wanted("a predicate", predicate)
    if tokens[start + 1].kind == SPACED_PAREN:
        raise ValueError(f"want `(` right after {shorten(predicate.text)}, got a space before it")
    args: list[Variable | str] = []
    start += 1
    while opened and tokens[start].kind in ("(", ","):
        args.append(_argument(tokens, start + 1, prolog=prolog))
        start += 2
    if opened and tokens[start].kind != ")":
        raise _wanted("`,` or `)` after an argument", tokens[start])
    if prolog and predicate == ("name", "not") and len(args) == 1:
        raise _wanted("a predicate", predicate)
    if prolog and predicate.kind == "name" and is_built_in(predicate.text, len(args)):
        raise ValueError(f"want a predicate of facts and rules, got the built-in {predicate.text}/{len(args)}")
    return Atom(_name(predicate), tuple(args)), start + opened


def _is_operator(tokens: list[Token], at: int) -> bool:
    """Whether a negation or `?-` stands where an atom should: before a name, or around an atom with arguments."""
    kind, text = tokens[at]
    names = ("name", "quoted", "variable")
    if kind == "name" and text in ("not", "\\+", "?-") and tokens[at + 1].kind in names:
        return True
    around = [token.kind.strip() for token in tokens[at + 1 : at + 4]]
    return kind == "name" and text in ("not", "\\+") and around[:1] + around[2:] == ["(", "("] and around[1] in names


def _argument(tokens: list[Token], at: int, *, prolog: bool) -> Variable | str:
    token = tokens[at]
    if token.kind not in ("name", "quoted", "variable", "integer"):
        raise _wanted("a constant or a variable", token)
    if tokens[at + 1].kind == "(":
        raise ValueError(f"want a constant or a variable, got the compound term {shorten(token.text + '(...)')}")
    if token.kind == "variable":
        return Variable(token.text if token.text != "_" else f"_ {at}")  # a space: no other variable is called so
    name = _name(token)
    if prolog and token.kind == "quoted" and is_integer(name):
        raise ValueError(f"want the number {name} without quotes: to Prolog, {shorten(token.text)} is another constant")
    return name


def _name(token: Token) -> str:
    return unquote(token.text) if token.kind == "quoted" else token.text


def _wanted(expected: str, token: Token) -> ValueError:
    got = token.text if token.kind.startswith("end") and token.text != "." else shorten(token.text)
    kind = _CONTROL.get(token.text) or ("a built-in" if token.text in _ARITHMETIC else "")
    kind = "a comment that is never closed" if token.kind.startswith("/*") else kind
    return ValueError(f"want {expected}, got {kind + ' ' if kind else ''}{got}")
