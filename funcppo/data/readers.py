"""Rules from outside: four formats told apart by their content, each read into clauses.

    weighted   weight<TAB>head(X,Y) :- body(X,Z), body(Z,Y)          more columns may stand between the two, or none
    AnyBURL    predictions<TAB>support<TAB>confidence<TAB>h(X,Y) <= b(X,A), c(A,Y)       (PyClause too)
    AMIE       ?a  b  ?c  ?c  d  ?e   => ?a  h  ?e<TAB>head coverage<TAB>confidence<TAB>...
    Prolog     facts and rules, each ended by a full stop

In the line formats, lines that start with `#` and AMIE's header line are comments. AnyBURL's zero rules, `h(X,c) <= `
without a body, are read as clauses that `with_rules` leaves out and tells of: they hold of every constant.

Sources: Meilicke et al. 2019, "Anytime bottom-up rule learning" (AnyBURL); Lajus et al. 2020, "Fast and exact rule
mining with AMIE 3"; ISO/IEC 13211-1 (Prolog).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

from funcppo.data.lexer import (
    QUOTED_PATTERN,
    Token,
    is_anyburl_variable,
    shorten,
    tokenize_line,
    tokenize_prolog,
    unquote,
)
from funcppo.data.parser import Atom, Clause, Variable, check_safe, has_variables, parse_clause

_COMMENT = ("#", "Rule\t")
_QUOTED = re.compile(QUOTED_PATTERN)
_AMIE_SPACED = re.compile(rf"{QUOTED_PATTERN}|=>|\?\S++|\S+(?: (?!=>|\?)\S+)*+")  # a name may hold single spaces
_AMIE_PLAIN = re.compile(rf"{QUOTED_PATTERN}|\S+")
_AMIE_VARIABLE = re.compile(r"\w+")


def detect_format(text: str) -> str:
    """The format that the first line with content is written in, quoted names left aside."""
    first = next((line for line in text.split("\n") if line.strip() and line[0] != "#"), "")
    bare = _QUOTED.sub("q", first).strip()
    if bare.startswith(_COMMENT) or "=>" in bare:
        return "AMIE"
    if "<=" in bare and ":-" not in bare:
        return "AnyBURL"
    clause = bare.split("%")[0].rstrip()
    if "\t" in clause.partition("(")[0]:
        return "weighted"
    rule = ":-" in clause and not clause.startswith("/*") and not clause.endswith((".", ":-"))
    return "weighted" if rule or not first else "Prolog"


def read_clauses(text: str, path: str, file_format: str) -> list[Clause]:
    """The clauses of a file, in its order.

    Args:
      path: the file's name, for messages.
      form: a format's name, as `detect` gives it.
    Errors: ValueError naming file, line, format, text and what was expected; also for an empty file.
    """
    if not text.strip():
        raise ValueError(f"{path}: empty: want facts or rules")
    clauses = list(_READERS[file_format](text, path))
    if not clauses:
        raise ValueError(f"{path}: as {file_format}: want at least one clause, got none")
    return clauses


def _checked(form: str, path: str, line: int, text: str, read: Callable[[], Clause]) -> Clause:
    try:
        clause = read()
        if clause.body or form != "AnyBURL":
            check_safe(clause.head, clause.body)
    except ValueError as error:
        raise ValueError(f"{path}:{line}: as {form}: {error}, in {shorten(text.strip())}") from None
    return clause._replace(line=line)


def _prolog(text: str, path: str) -> Iterator[Clause]:
    for line, source, tokens in tokenize_prolog(text):
        yield _checked("Prolog", path, line, source, partial(_prolog_clause, tokens))


def _prolog_clause(tokens: list[Token]) -> Clause:
    if tokens[0].kind in (":-", "?-"):
        raise ValueError(f"want a fact or a rule, got the directive or query {tokens[0].text}")
    head, body = parse_clause(tokens, ":-", prolog=True)
    return Clause(head, body, math.nan, 0)


def _lines(form: str, read: Callable[[str], Clause]) -> Callable[[str, str], Iterator[Clause]]:
    """The reader of a line format, given how to read one line."""

    def reader(text: str, path: str) -> Iterator[Clause]:
        lines = [(at, line.rstrip("\r")) for at, line in enumerate(text.split("\n"), 1)]
        lines = [(at, line) for at, line in lines if line.strip() and not line.startswith(_COMMENT)]
        for at, line in lines:
            want, got = lines[0][1].count("\t") + 1, line.count("\t") + 1
            if want != got:
                raise ValueError(f"{path}:{at}: as {form}: want {want} columns, got {got}, in {shorten(line)}")
            yield _checked(form, path, at, line, partial(read, line))

    return reader


def _weighted(line: str) -> Clause:
    weight, _, rest = line.rpartition("\t")
    head, body = parse_clause(tokenize_line(rest), ":-", prolog=False)
    return Clause(head, _body(body, ":-"), _number(weight.split("\t")[0]), 0)


def _anyburl(line: str) -> Clause:
    columns = line.split("\t")
    if len(columns) != 4:
        raise ValueError(f"want predictions, support, confidence and rule in 4 columns, got {len(columns)}")
    tokens = tokenize_line(columns[3], is_anyburl_variable)
    if [token.kind for token in tokens[-2:]] == ["<=", "end"]:
        head, _ = parse_clause([*tokens[:-2], tokens[-1]], "<=", prolog=False)
        return Clause(head, () if has_variables(head) else _body((), "<="), _number(columns[2]), 0)
    head, body = parse_clause(tokens, "<=", prolog=False)
    return Clause(head, _body(body, "<="), _number(columns[2]), 0)


def _amie(line: str) -> Clause:
    rule, *columns = line.split("\t")
    found = (_AMIE_SPACED if "  " in rule else _AMIE_PLAIN).findall(rule)
    arrow = found.index("=>") if "=>" in found else len(found)
    body, head = found[:arrow], found[arrow + 1 :]
    if len(head) != 3 or len(body) % 3 or not body:
        raise ValueError("want triples `?a  relation  ?b`, then `=>` and one triple")
    atoms = [_amie_atom(body[i : i + 3]) for i in range(0, len(body), 3)]
    return Clause(_amie_atom(head), tuple(atoms), _number(columns[1] if len(columns) > 1 else ""), 0)


def _amie_atom(triple: list[str]) -> Atom:
    head, relation, tail = (
        unquote(t) if _QUOTED.fullmatch(t) else Variable(t[1:]) if t[0] == "?" else t for t in triple
    )
    names = [t.name for t in (head, tail) if isinstance(t, Variable)]
    if isinstance(relation, Variable) or not all(map(_AMIE_VARIABLE.fullmatch, names)):
        raise ValueError(f"want a relation between two constants or variables, got {shorten(' '.join(triple))}")
    return Atom(relation, (head, tail))


def _body(body: tuple[Atom, ...], arrow: str) -> tuple[Atom, ...]:
    if not body:
        raise ValueError(f"want `{arrow}` and a body after the head: facts belong in facts.txt")
    return body


def _number(text: str) -> float:
    try:
        return float(text) if text.strip() else math.nan
    except ValueError:
        raise ValueError(f"want a number as the weight, got {shorten(text)}") from None


_READERS: dict[str, Callable[[str, str], Iterator[Clause]]] = {
    "weighted": _lines("weighted", _weighted),
    "AnyBURL": _lines("AnyBURL", _anyburl),
    "AMIE": _lines("AMIE", _amie),
    "Prolog": _prolog,
}
