"""Queries and rules as text, read and written in each format.

Queries: an atom that a user wrote, as the ids of a data set.

What an argument without quotes stands for:

    data set    `?x` and `_` are variables. A name of the data is that entity. A single capital, perhaps with digits (X,
                Y2), is a variable if no entity is called so, with digits only if no entity looks like it (Q42). Any
                other name is an error that suggests names of similar spelling.
    program     names that start with a capital or `_` are variables, as in Prolog, and so is `?x`. A constant that the
                program does not have is one of which nothing holds.

A name in single quotes is always an entity. `read_query` reads a query, `parse_query` its ids alone.

Rule files of four formats as clauses; `detect_format` tells the formats apart by their content.

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

Clauses and ids as text, in each rule format, quoted so that reading gives the same clauses back.

`format_atom` and `format_rule` are for people; `proof_names` binds both to a data set. `format_clauses` makes the text
of a file in a format that `parse_rules` reads.

Rules with their statistics as text: this project's table, AnyBURL (which PyClause reads too) and AMIE.

    tsv       weight, support, body pairs, confidence, PCA confidence, head coverage, leave-one-out support and
              confidence, standard errors of the confidence and of the PCA confidence (0: exact), rule
    AnyBURL   predictions, support, confidence, rule
    AMIE      rule, head coverage, confidence, PCA confidence, support, body pairs, PCA pairs, functional variable

`format_rule_table` makes the text of a file. `readers` reads each of them back, into the same rules in the
same order.

The last line of a tsv is a comment that says which facts its counts are of, and what the lines above it are:

    #counts<TAB>hash of the facts<TAB>hash of all lines above

`with_read_counts` takes the counts from a file whose facts and lines are these.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.dataset import (
    Dataset,
    encode_atom,
    facts_digest,
    index_entities,
    predicate_ids,
)
from funcppo.kg.graph.text import (
    QUOTED_PATTERN,
    TRUE,
    Atom,
    Clause,
    FileFormat,
    Token,
    Variable,
    check_goal,
    check_head,
    check_safe,
    declared_by,
    has_variables,
    indicator,
    is_anyburl_variable,
    is_bare_name,
    is_built_in,
    is_integer,
    is_library_predicate,
    is_prolog_name,
    is_variable,
    parse_atom,
    parse_clause,
    quote,
    similar_names_hint,
    tokenize_line,
    tokenize_prolog,
    unknown_name_message,
    unquote,
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
                declarations.append(declared_by(tokens))
                continue
            clause = _prolog_clause(tokens)._replace(line=line)
        clauses.append(clause)
        if any(map(is_library_predicate, clause.body)):
            library_users.append((clause, source))

    defined = {indicator(clause.head) for clause in clauses}
    for clause, source in library_users:
        place = f"{path}:{clause.line}: as {file_format}"
        with _located_errors(place, source):
            for goal in clause.body:
                if indicator(goal) not in defined:
                    check_goal(goal)

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
    check_head(head)
    body = tuple(goal for goal in goals if goal != TRUE)
    for goal in body:
        # Whether the program defines a library predicate is known at its end.
        if not is_library_predicate(goal):
            check_goal(goal)
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


RuleTableFormat = Literal["tsv", "AnyBURL", "AMIE"]
RULE_FILE_FORMATS: tuple[RuleTableFormat, ...] = ("tsv", "AnyBURL", "AMIE")
_RULE_SYNTAX: dict[RuleTableFormat, FileFormat] = {
    "tsv": "weighted",
    "AnyBURL": "AnyBURL",
    "AMIE": "AMIE",
}

TSV_HEADER = (
    "#source_weight train_support train_body_pairs train_conf pca_conf head_coverage "
    "loo_support loo_conf std_error pca_std_error rule"
)
_COUNT_COLUMNS = (
    "train_support",
    "train_body_pairs",
    "loo_support",
    "std_error",
)
# starts the line that says what the counts of a tsv are of
COUNTS_PREFIX = "#counts\t"
AMIE_HEADER = (
    "Rule,Head Coverage,Std Confidence,PCA Confidence,"
    "Positive Examples,Body size,PCA Body size,Functional variable"
)
_AMIE_FUNCTIONAL_VARIABLE = "?x"
_ANYBURL_ARGUMENT = re.compile(r"(?<=[(,])[^,()]+(?=[,)])")
# PyClause takes any part of this for a variable, as DE or NO
_PYCLAUSE_VARIABLES = "XABCDEFGHIJKLMNOPQRSTUVWY"


class RuleStatistics(NamedTuple):
    """Statistics of each rule, float64 [R]; estimates where a standard error is not 0."""

    weight: np.ndarray  # by which the rules are ranked
    support: np.ndarray  # right predictions: facts that the rule derives
    body_pairs: np.ndarray  # predictions: distinct heads that the body derives
    # facts of the support whose every derivation uses the fact itself
    circular_support: np.ndarray
    # predictions counted by the PCA confidence (partial completeness assumption)
    pca_pairs: np.ndarray
    head_facts: np.ndarray  # facts of the head's predicate
    std_error: np.ndarray  # standard error of the confidence
    pca_std_error: np.ndarray  # standard error of the PCA confidence


class _RuleNumbers(NamedTuple):
    """Statistics of one rule, and what follows from them, before rounding."""

    weight: float
    support: float
    body_pairs: float
    pca_pairs: float
    confidence: float
    pca_confidence: float
    head_coverage: float
    leave_one_out_support: float
    leave_one_out_confidence: float
    std_error: float
    pca_std_error: float


def with_encoded_rules(
    dataset: Dataset, atoms: np.ndarray, counts: RuleStatistics
) -> Dataset:
    """The data set with these rules in place of its own.

    Args:
      dataset: its own rules are dropped.
      atoms: int [R, M, 3], head first, padded with 0; variables from C + 1 on.
      counts: statistics of the rules; their weights become those of the data set.
    """
    predicates = atoms[:, :, 0]
    rule_lengths = (predicates > 0).sum(1)
    n_atoms = int(rule_lengths.max(initial=1))
    atom_width = dataset.atom_width
    n_columns = min(3, atom_width)

    shape = (len(atoms), n_atoms, atom_width)
    table = np.zeros(shape, np.int32)
    table[:, :, :n_columns] = atoms[:, :n_atoms, :n_columns]
    return replace(
        dataset,
        rules=table,
        rule_weights=counts.weight,
        rule_counts=_whole_counts(counts, counts.std_error == 0),
        rule_estimates=_whole_counts(counts, counts.std_error > 0),
    )


def format_rule_table(
    dataset: Dataset, counts: RuleStatistics, file_format: RuleTableFormat
) -> str:
    """The text of a file that holds the rules of a data set; only its header where there is none.

    Args:
      dataset: its rules are written, in their order.
      counts: statistics of the rules.
      file_format: format of the file.
    """
    lines = []
    if file_format == "tsv":
        lines.append(TSV_HEADER.replace(" ", "\t"))
    elif file_format == "AMIE":
        lines.append(AMIE_HEADER.replace(",", "\t"))

    syntax = _RULE_SYNTAX[file_format]
    rules = rule_clauses(dataset)
    statistics = zip(*(column.tolist() for column in counts))
    for clause, row in zip(rules, statistics):
        text = format_rule_clause(clause, syntax)
        numbers = _file_columns(_rule_numbers(*row), file_format)
        columns = [_format_number(number) for number in numbers]
        if file_format == "AMIE":
            columns.insert(0, text)
            columns.append(_AMIE_FUNCTIONAL_VARIABLE)
        else:
            columns.append(text)
        lines.append("\t".join(columns))
    table = "".join(line + "\n" for line in lines)
    if file_format != "tsv" or not len(dataset.rules):
        return table
    return with_counts_line(table, dataset)


def with_counts_line(table: str, dataset: Dataset) -> str:
    """The text of a tsv with the line that says that its counts are of the facts of a data set."""
    facts, lines = facts_digest(dataset), _lines_digest(table)
    return f"{table}{COUNTS_PREFIX}{facts}\t{lines}\n"


def with_read_counts(
    text: str, dataset: Dataset, lines: Sequence[int]
) -> Dataset:
    """The data set with the counts of rules in a tsv of this project, if they are of its facts and nobody edited it.

    Args:
      text: content of the file.
      dataset: the data set that its rules are read for.
      lines: where the rules stand, line numbers from 1.
    """
    table, mark, last_line = text.rpartition(COUNTS_PREFIX)
    digests = last_line.removesuffix("\n").split("\t")
    if not mark or digests != [facts_digest(dataset), _lines_digest(table)]:
        return dataset
    header, *rows = table.splitlines()
    names = header.lstrip("#").split("\t")
    columns = [names.index(name) for name in _COUNT_COLUMNS]
    counts = np.full((len(lines), 3), -1, np.int64)
    estimates = counts.copy()
    for row, line in enumerate(lines):
        values = rows[line - 2].split("\t")
        support, body_pairs, other_support, error = (
            float(values[column]) for column in columns
        )
        of_kind = estimates if error else counts
        of_kind[row] = np.rint((support, body_pairs, support - other_support))
    return replace(dataset, rule_counts=counts, rule_estimates=estimates)


def is_mined_with_held_out(text: str, dataset: Dataset) -> bool:
    """Whether a tsv of this project says that its rules were mined from the held-out triples of a data set too."""
    _, mark, last_line = text.rpartition(COUNTS_PREFIX)
    if not mark or not len(dataset.valid) + len(dataset.test):
        return False
    splits = (dataset.facts, dataset.valid, dataset.test)
    everything = replace(dataset, facts=np.concatenate(splits))
    digest, _, _ = last_line.partition("\t")
    # A split whose triples are all known facts was not held out.
    return digest == facts_digest(everything) != facts_digest(dataset)


def _lines_digest(table: str) -> str:
    """A hash of the lines of a table."""
    return hashlib.sha256(table.encode()).hexdigest()[:16]


def _whole_counts(counts: RuleStatistics, is_kept: np.ndarray) -> np.ndarray:
    """The counts that `Dataset.rule_counts` holds, int64 [R, 3], of some rules; -1 of the others."""
    columns = (counts.support, counts.body_pairs, counts.circular_support)
    table = np.stack([np.rint(column) for column in columns], axis=1)
    return np.where(is_kept[:, None], table, -1).astype(np.int64)


def compatibility_notes(
    dataset: Dataset, file_format: RuleTableFormat
) -> list[str]:
    """Notes on names in rules that the tool of a format reads otherwise than this project; empty if there are none.

    Neither AnyBURL nor AMIE has quotes; in AnyBURL a name of one character is a variable, and in PyClause capitals that
    follow each other in the alphabet are.

    Args:
      dataset: its rules are looked at.
      file_format: format that they are written in.
    """
    if file_format == "tsv":
        return []

    syntax = _RULE_SYNTAX[file_format]
    texts = [
        format_rule_clause(clause, syntax) for clause in rule_clauses(dataset)
    ]
    n_affected = sum(_is_read_otherwise(text, file_format) for text in texts)
    if not n_affected:
        return []
    names, tools = "in quotes", str(file_format)
    if file_format == "AnyBURL":
        names += (
            ", of one character or of capitals in the order of the alphabet"
        )
        tools += " or PyClause"
    return [
        f"{n_affected} rules hold names {names}: this project reads them back, {tools} takes them for others"
    ]


def _is_read_otherwise(text: str, file_format: RuleTableFormat) -> bool:
    """Whether the tool of a format takes a name in the text of a rule for another name or for a variable."""
    if "'" in text:
        return True
    if file_format != "AnyBURL":
        return False
    return any(
        name in _PYCLAUSE_VARIABLES if len(name) > 1 else not name.isupper()
        for name in _ANYBURL_ARGUMENT.findall(text)
    )


def _rule_numbers(
    weight: float,
    support: float,
    body_pairs: float,
    circular_support: float,
    pca_pairs: float,
    head_facts: float,
    std_error: float,
    pca_std_error: float,
) -> _RuleNumbers:
    """The statistics of one rule, and what follows from them; the arguments are a row of `RuleStatistics`."""
    # Leave one out: a prediction that only the fact itself supports counts neither as made nor as right.
    other_support = support - circular_support
    other_body_pairs = body_pairs - circular_support
    return _RuleNumbers(
        weight=weight,
        support=support,
        body_pairs=body_pairs,
        pca_pairs=pca_pairs,
        confidence=support / max(body_pairs, 1),
        pca_confidence=support / max(pca_pairs, 1),
        head_coverage=support / max(head_facts, 1),
        leave_one_out_support=other_support,
        leave_one_out_confidence=other_support / max(other_body_pairs, 1),
        std_error=std_error,
        pca_std_error=pca_std_error,
    )


def _file_columns(
    numbers: _RuleNumbers, file_format: RuleTableFormat
) -> list[float]:
    """The numbers of one rule in the order of a format; counts are integers there."""
    if file_format == "AnyBURL":
        return [
            round(numbers.body_pairs),
            round(numbers.support),
            numbers.confidence,
        ]

    if file_format == "AMIE":
        return [
            numbers.head_coverage,
            numbers.confidence,
            numbers.pca_confidence,
            round(numbers.support),
            round(numbers.body_pairs),
            round(numbers.pca_pairs),
        ]

    return [
        numbers.weight,
        round(numbers.support),
        round(numbers.body_pairs),
        numbers.confidence,
        numbers.pca_confidence,
        numbers.head_coverage,
        round(numbers.leave_one_out_support),
        numbers.leave_one_out_confidence,
        numbers.std_error,
        numbers.pca_std_error,
    ]


def _format_number(value: float) -> str:
    """All digits of an integer, six of any other number."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"
