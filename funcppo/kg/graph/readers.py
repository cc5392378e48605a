"""Rule files of four formats as clauses; `detect_format` tells the formats apart by their content.

    weighted   weight<TAB>head(X,Y) :- body(X,Z), body(Z,Y)          more columns may stand between the two, or none
    AnyBURL    predictions<TAB>support<TAB>confidence<TAB>h(X,Y) <= b(X,A), c(A,Y)       (PyClause too)
    AMIE       ?a  b  ?c  ?c  d  ?e   => ?a  h  ?e<TAB>head coverage<TAB>confidence<TAB>...
    Prolog     facts and rules, each ended by a full stop

The first three are line formats. In these, lines that start with `#` and AMIE's header line are comments. What AMIE
prints around its table is skipped, and so are declarations of a Prolog program; a note counts each.

AnyBURL's zero rules, `h(X,c) <= ` without a body, hold of every constant. They are read as clauses without a body, and
`dataset.with_rules` leaves them out with a note. In AnyBURL's `h(X,me_myself_i)` the second name stands for X.

Sources: Meilicke et al. 2019, "Anytime bottom-up rule learning" (AnyBURL); Lajus et al. 2020, "Fast and exact rule
mining with AMIE 3"; ISO/IEC 13211-1 (Prolog).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from funcppo.core.files import shorten
from funcppo.kg.graph import prolog
from funcppo.kg.graph.lexer import (
    QUOTED_PATTERN,
    Token,
    is_anyburl_variable,
    tokenize_line,
    tokenize_prolog,
    unquote,
)
from funcppo.kg.graph.parser import (
    Atom,
    Clause,
    FileFormat,
    Variable,
    check_safe,
    has_variables,
    parse_clause,
)

_COMMENT_PREFIXES = ("#", "Rule\t")  # the second starts AMIE's header line
_AMIE_HEADER = re.compile("^Rule\t", re.MULTILINE)
_QUOTED = re.compile(QUOTED_PATTERN)
# a name may hold single spaces
_AMIE_SPACED_WORD = re.compile(
    rf"{QUOTED_PATTERN}|=>|\?\S++|\S+(?: (?!=>|\?)\S+)*+"
)
_AMIE_PLAIN_WORD = re.compile(rf"{QUOTED_PATTERN}|\S+")
_AMIE_VARIABLE = re.compile(r"\w+")
_ANYBURL_SAME_ENTITY = "me_myself_i"
_NO_LINE = 0  # of a clause whose line is not yet set


class ClauseFile(NamedTuple):
    """The clauses of a file, in its order, and what was left out."""

    clauses: list[Clause]
    notes: list[str]  # one line each


class LineReader(Protocol):
    """Reads one line of a line format; the clause it returns has no line number yet."""

    def __call__(self, line: str, /) -> Clause: ...


def detect_format(text: str) -> FileFormat:
    """The format that the first line with content is written in, quoted names left aside.

    A file with AMIE's header line is AMIE's, whatever its first line is.

    Args:
      text: content of a rule file; without any line of content it counts as weighted.
    """
    first_line = _first_line(text)
    if not first_line:
        return "weighted"

    if _AMIE_HEADER.search(text):
        return "AMIE"

    # A quoted name may hold any of the symbols below.
    unquoted = _QUOTED.sub("q", first_line).strip()
    if "=>" in unquoted:
        return "AMIE"
    if "<=" in unquoted and ":-" not in unquoted:
        return "AnyBURL"

    clause = unquoted.split("%")[0].rstrip()
    before_arguments, _, _ = clause.partition("(")
    if "\t" in before_arguments:
        return "weighted"

    # A rule without weight on one line. In Prolog it would end with a full stop, or go on after the arrow.
    starts_with_comment = clause.startswith("/*")
    is_whole_line = not clause.endswith((".", ":-"))
    if ":-" in clause and is_whole_line and not starts_with_comment:
        return "weighted"
    return "Prolog"


def _first_line(text: str) -> str:
    """The first line that is neither blank nor a comment; "" if there is none."""
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            return line
    return ""


def read_clauses(text: str, path: str, file_format: FileFormat) -> ClauseFile:
    """The clauses of a file.

    Args:
      text: content of the file.
      path: name of the file, for messages.
      file_format: as `detect_format` returns it.

    Raises:
      ValueError: the file has no clause, or a line that is none; names file, line, format and what was expected.
    """
    if not text.strip():
        raise ValueError(f"{path}: empty: expected facts or rules")

    read = _read_prolog if file_format == "Prolog" else _read_lines
    clauses, notes = read(text, path, file_format)
    if not clauses:
        # Without a line of content the format is a default, which says nothing.
        kind = "" if file_format == "weighted" else f"as {file_format}: "
        raise ValueError(
            f"{path}: {kind}expected at least one clause, got none"
        )
    return ClauseFile(clauses, notes)


def _read_prolog(text: str, path: str, file_format: FileFormat) -> ClauseFile:
    """The clauses of a Prolog program."""
    clauses: list[Clause] = []
    # clauses with goals that must be defined somewhere in the program, and their text
    library_users: list[tuple[Clause, str]] = []
    declarations: list[str] = []

    for line, source, tokens in tokenize_prolog(text):
        with _located_errors(f"{path}:{line}: as {file_format}", source):
            if tokens[0].kind == ":-":
                declarations.append(prolog.declared_by(tokens))
                continue
            clause = _prolog_clause(tokens)._replace(line=line)
        clauses.append(clause)
        if any(map(prolog.is_library_predicate, clause.body)):
            library_users.append((clause, source))

    defined = {prolog.indicator(clause.head) for clause in clauses}
    for clause, source in library_users:
        place = f"{path}:{clause.line}: as {file_format}"
        with _located_errors(place, source):
            for goal in clause.body:
                if prolog.indicator(goal) not in defined:
                    prolog.check_goal(goal)

    notes: list[str] = []
    if declarations:
        names = ", ".join(dict.fromkeys(declarations))
        notes.append(
            f"{path}: {len(declarations)} directives skipped, which change no answer here: {names}"
        )
    return ClauseFile(clauses, notes)


def _read_lines(text: str, path: str, file_format: FileFormat) -> ClauseFile:
    """The clauses of a file in a line format, one for each line that is no comment."""
    read_line = _LINE_READERS[file_format]
    clauses: list[Clause] = []
    n_columns = None
    n_skipped = 0
    for number, line in _lines_with_content(text):
        # What AMIE prints before and after its table.
        if file_format == "AMIE" and "=>" not in _QUOTED.sub("q", line):
            n_skipped += 1
            continue

        with _located_errors(f"{path}:{number}: as {file_format}", line):
            # All lines have as many columns as the first.
            n_line_columns = line.count("\t") + 1
            if n_columns is None:
                n_columns = n_line_columns
            if n_line_columns != n_columns:
                raise ValueError(
                    f"expected {n_columns} columns, got {n_line_columns}"
                )
            clause = read_line(line)
            # A zero rule of AnyBURL is never safe; `with_rules` leaves it out.
            if clause.body or file_format != "AnyBURL":
                check_safe(clause.head, clause.body)
        clauses.append(clause._replace(line=number))

    notes = [f"{path}: {n_skipped} lines without => skipped"]
    return ClauseFile(clauses, notes if n_skipped else [])


def _lines_with_content(text: str) -> Iterator[tuple[int, str]]:
    """The number and text of each line that is neither blank nor a comment."""
    for number, full_line in enumerate(text.split("\n"), 1):
        line = full_line.rstrip("\r")
        if line.strip() and not line.startswith(_COMMENT_PREFIXES):
            yield number, line


@contextmanager
def _located_errors(place: str, source: str) -> Iterator[None]:
    """Put the place before, and the text of a clause behind, the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        text = shorten(source.strip())
        raise ValueError(f"{place}: {error}, in {text}") from None


def _prolog_clause(tokens: list[Token]) -> Clause:
    """The clause of the tokens between two full stops of a Prolog program, without goals `true`."""
    if tokens[0].kind == "?-":
        raise ValueError("expected a fact or a rule, got a query ?-")

    head, goals = parse_clause(tokens, ":-", prolog=True)
    prolog.check_head(head)
    body = tuple(goal for goal in goals if goal != prolog.TRUE)
    for goal in body:
        # Whether the program defines a library predicate is known at its end.
        if not prolog.is_library_predicate(goal):
            prolog.check_goal(goal)
    check_safe(head, body)
    return Clause(head, body, math.nan, _NO_LINE)


def _weighted_clause(line: str) -> Clause:
    """The clause of a line of the weighted format: the weight stands in the first column, the rule in the last."""
    other_columns, _, rule = line.rpartition("\t")
    tokens = tokenize_line(rule)
    head, body = parse_clause(tokens, ":-", prolog=False)
    if not body:
        raise _missing_body(":-")

    first_column, *_ = other_columns.split("\t")
    weight = _parse_weight(first_column)
    return Clause(head, body, weight, _NO_LINE)


def _anyburl_clause(line: str) -> Clause:
    """The clause of a line of AnyBURL; a zero rule has no body."""
    columns = line.split("\t")
    if len(columns) != 4:
        raise ValueError(
            f"expected predictions, support, confidence and rule in 4 columns, got {len(columns)}"
        )

    confidence, rule = columns[2:]
    tokens = tokenize_line(rule, is_anyburl_variable)
    kinds = [token.kind for token in tokens]
    is_zero_rule = kinds[-2:] == ["<=", "end"] and kinds.count("<=") == 1
    if is_zero_rule:
        del tokens[-2]
    atoms = parse_clause(tokens, "<=", prolog=False)
    head = _with_same_entity(atoms.head)
    body = tuple(map(_with_same_entity, atoms.body))

    # A zero rule whose head has no variables would be a fact.
    if not body and not (is_zero_rule and has_variables(head)):
        raise _missing_body("<=")
    return Clause(head, body, _parse_weight(confidence), _NO_LINE)


def _with_same_entity(atom: Atom) -> Atom:
    """The atom with its other argument in place of AnyBURL's name for it: h(X,me_myself_i) is h(X,X)."""
    others = [term for term in atom.args if term != _ANYBURL_SAME_ENTITY]
    if len(others) == len(atom.args):
        return atom
    if len(atom.args) != 2 or not others:
        problem = f"one argument beside {_ANYBURL_SAME_ENTITY}, which repeats it, got {len(others)}"
        raise ValueError(f"expected {problem}")
    return Atom(atom.predicate, (others[0], others[0]))


def _amie_clause(line: str) -> Clause:
    """The clause of a line of AMIE; its weight is the confidence, in the third column."""
    rule, *columns = line.split("\t")
    confidence = columns[1] if len(columns) > 1 else ""

    # AMIE puts two spaces between words, so that names may hold one; other tools put one.
    word_pattern = _AMIE_SPACED_WORD if "  " in rule else _AMIE_PLAIN_WORD
    words = word_pattern.findall(rule)
    arrow = words.index("=>") if "=>" in words else len(words)
    body_words = words[:arrow]
    head_words = words[arrow + 1 :]
    is_rule = len(head_words) == 3 and len(body_words) % 3 == 0 and body_words
    if not is_rule:
        raise ValueError(
            "expected triples `?a  relation  ?b`, then `=>` and one triple"
        )

    body: list[Atom] = []
    for start in range(0, len(body_words), 3):
        triple = body_words[start : start + 3]
        body.append(_amie_atom(triple))
    head = _amie_atom(head_words)
    weight = _parse_weight(confidence)
    return Clause(head, tuple(body), weight, _NO_LINE)


def _amie_atom(triple: list[str]) -> Atom:
    """The atom of three words: head, relation, tail."""
    head, relation, tail = map(_amie_term, triple)
    ends_are_valid = _is_amie_argument(head) and _is_amie_argument(tail)
    if isinstance(relation, Variable) or not ends_are_valid:
        text = " ".join(triple)
        raise ValueError(
            f"expected a relation between two constants or variables, got {shorten(text)}"
        )
    return Atom(relation, (head, tail))


def _is_amie_argument(term: Variable | str) -> bool:
    """Whether the term is a constant or a variable with a proper name."""
    if isinstance(term, Variable):
        return _AMIE_VARIABLE.fullmatch(term.name) is not None
    return True


def _amie_term(word: str) -> Variable | str:
    """The variable or the name that a word of AMIE stands for."""
    if _QUOTED.fullmatch(word):
        return unquote(word)
    if word[0] == "?":
        return Variable(word[1:])
    return word


def _missing_body(arrow: str) -> ValueError:
    """The error for a fact where only rules may stand."""
    return ValueError(
        f"expected `{arrow}` and a body after the head: facts belong in facts.txt"
    )


def _parse_weight(text: str) -> float:
    """The number in a column; nan where the column is empty."""
    if not text.strip():
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"expected a number as the weight, got {shorten(text)}"
        ) from None


_LINE_READERS: dict[FileFormat, LineReader] = {
    "weighted": _weighted_clause,
    "AnyBURL": _anyburl_clause,
    "AMIE": _amie_clause,
}
