"""Queries and rules as text, read and written in each format.

Queries: an atom that a user wrote, as the ids of a data set. What an argument without quotes stands for:

    data set    `?x` and `_` are variables. A name of the data is that entity. A single capital, perhaps with digits (X,
                Y2), is a variable if no entity is called so, with digits only if no entity looks like it (Q42). Any
                other name is an error that suggests names of similar spelling.
    program     names that start with a capital or `_` are variables, as in Prolog, and so is `?x`. A constant that the
                program does not have is one of which nothing holds.

A name in single quotes is always an entity.

Rule files of four formats; `detect_format` tells the formats apart by their content:

    weighted   weight<TAB>head(X,Y) :- body(X,Z), body(Z,Y)          more columns may stand between the two, or none
    AnyBURL    predictions<TAB>support<TAB>confidence<TAB>h(X,Y) <= b(X,A), c(A,Y)       (PyClause too)
    AMIE       ?a  b  ?c  ?c  d  ?e   => ?a  h  ?e<TAB>head coverage<TAB>confidence<TAB>...
    Prolog     facts and rules, each ended by a full stop

The first three are line formats. In these, lines that start with `#` and AMIE's header line are comments. What AMIE
prints around its table is skipped, and so are declarations of a Prolog program; a note counts each.

AnyBURL's zero rules, `h(X,c) <= ` without a body, hold of every constant. They are read as clauses without a body, and
`dataset.with_rules` leaves them out with a note. In AnyBURL's `h(X,me_myself_i)` the second name stands for X.

Rules with their statistics are written as this project's table (tsv, weighted rules) and as AnyBURL. Each is
read back into the same rules in the same order. The last line of a tsv is a comment that says which facts its counts
are of, and what the lines above it are. `with_read_counts` takes the counts from a file whose facts and lines they are:

    #counts<TAB>hash of the facts<TAB>hash of all lines above

Sources: Meilicke et al. 2019, "Anytime bottom-up rule learning" (AnyBURL); Lajus et al. 2020, "Fast and exact rule
mining with AMIE 3"; ISO/IEC 13211-1 (Prolog).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from functools import cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from funcppo.core.files import Json, shorten
from funcppo.kg.graph.dataset import (
    OPERATORS,
    Dataset,
    encode_atom,
    facts_digest,
    index_entities,
    predicate_ids,
    training_part,
)
from funcppo.kg.graph.text import (
    COMPARED,
    QUOTED_PATTERN,
    TESTS,
    Atom,
    Clause,
    FileFormat,
    Token,
    Variable,
    as_prolog_number,
    check_goal,
    check_head,
    check_safe,
    declared_by,
    format_name,
    has_surrogates,
    has_variables,
    indicator,
    is_anyburl_variable,
    is_bare_name,
    is_library_predicate,
    is_variable,
    parse_atom,
    parse_clause,
    quote,
    read_number,
    similar_names_hint,
    tokenize_line,
    tokenize_prolog,
    unknown_name_message,
    unquote,
)

# -- queries


class Query(NamedTuple):
    """A query over a data set, in ids, with the names of its variables."""

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
        atom = _without_labels(dataset, _parse_query_atom(dataset, text))
        notes = _ambiguity_notes(dataset, atom, text)
        dataset, unknown_notes = _with_constants_of(dataset, atom)
        ids, variables = _encode(dataset, atom)
    except ValueError as error:
        raise ValueError(f"query {shorten(text)}: {error}") from None

    row = np.zeros(dataset.atom_width, np.int64)
    row[: len(ids)] = ids
    return Query(dataset, row, variables, (*notes, *unknown_notes))


def _parse_query_atom(dataset: Dataset, text: str) -> Atom:
    """Parse the atom of a query, in names."""
    if has_surrogates(text):
        raise ValueError("expected UTF-8, got other bytes")
    tokens = tokenize_line(text, partial(_is_query_variable, dataset))
    if dataset.is_program:
        tokens = [*map(as_prolog_number, tokens)]
    try:
        atom, index = parse_atom(tokens, 0, prolog=dataset.is_program)
        if tokens[index].kind != "end":
            raise ValueError(
                f"expected one atom, got {shorten(tokens[index].text)} after it"
            )
    except ValueError as error:
        words = ("name", "quoted", "variable", "integer")
        has_neighbours = any(
            first.kind in words and second.kind in words
            for first, second in pairwise(tokens)
        )
        hint = "; a name with spaces is written in single quotes, with \\' for a quote in it"
        is_hinted = has_neighbours and not dataset.is_program
        raise ValueError(f"{error}{hint if is_hinted else ''}") from None

    starts_with_not = tokens[0] == ("name", "not")
    is_negation = starts_with_not and len(atom.args) == 1
    if is_negation and "not" not in dataset.predicates:
        raise ValueError("expected one atom, got negation not(...)")
    return atom


def _without_labels(dataset: Dataset, atom: Atom) -> Atom:
    """Return an atom with names in place of labels that are no names of the data set."""
    shown = dataset.shown
    if shown is dataset:
        return atom
    entities, relations = index_entities(shown), predicate_ids(shown)

    def name_of(term: str | Variable) -> str | Variable:
        if isinstance(term, Variable) or term in index_entities(dataset):
            return term
        if term not in entities:
            return term
        return dataset.entity_name(entities[term])

    predicate, key = atom.predicate, (atom.predicate, len(atom.args))
    if predicate not in dataset.predicates and key in relations:
        predicate = dataset.predicate_name(relations[key])
    args = tuple(map(name_of, atom.args))
    return atom._replace(predicate=predicate, args=args)


def _is_query_variable(dataset: Dataset, word: str) -> bool:
    """Check whether a word without quotes is a variable in a query."""
    if word == "_" or re.fullmatch(r"\?\w+", word):
        return True
    if dataset.is_program:
        return is_variable(word)
    if any(word in index_entities(x) for x in (dataset, dataset.shown)):
        return False

    match = re.fullmatch(r"([A-Z])[0-9]*", word)
    if match is None or len(word) == 1:
        return match is not None
    similar = re.compile(f"{match[1]}[0-9]+")
    return not any(map(similar.fullmatch, dataset.entities))


def _ambiguity_notes(dataset: Dataset, atom: Atom, text: str) -> list[str]:
    """Return notes on unquoted names that could be read both as a variable and as an entity."""
    known = index_entities(dataset)
    tokens = tokenize_line(text, lambda word: False)
    words = {token.text for token in tokens if token.kind == "name"}
    notes: list[str] = []
    for term in dict.fromkeys(atom.args):
        name = term.name if isinstance(term, Variable) else term
        if name not in known:
            continue
        if isinstance(term, Variable):
            notes.append(_variable_note(name))
        elif len(name) == 1 and name.isupper() and name in words:
            notes.append(
                f"{name} is an entity here; write ?{name.lower()} for a variable"
            )
    return notes


def _with_constants_of(
    dataset: Dataset, atom: Atom
) -> tuple[Dataset, list[str]]:
    """Return the data set extended by an atom's unknown constants, with a note on each (programs only).

    Raises:
      ValueError: the data set is no program, and has not all of the entities.
    """
    known = index_entities(dataset)
    names = [term for term in atom.args if not isinstance(term, Variable)]
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
    terms = rules[:, :, 1:]
    terms += np.int32(len(unknown)) * (terms > dataset.n_constants)
    entities = (*dataset.entities, *unknown)
    return replace(dataset, entities=entities, rules=rules), notes


def _encode(dataset: Dataset, atom: Atom) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids of an atom, and the names of its variables."""
    variables: dict[Variable, int] = {}
    entity_ids = index_entities(dataset)
    ids = encode_atom(
        dataset, atom, entity_ids, predicate_ids(dataset), variables
    )

    # A relation that only bodies of rules have cannot be derived; most likely the user meant another.
    tables = (dataset.facts, dataset.valid, dataset.test, dataset.rules[:, 0])
    if not any((table[:, 0] == ids[0]).any() for table in tables):
        predicate = shorten(atom.predicate)
        raise ValueError(
            f"expected a predicate of some fact or of a rule's head, got {predicate}"
        )

    # The parser gives each `_` a name of its own, with a space in it.
    names = [variable.name for variable in variables]
    names = [f"_{i}" if " " in name else name for i, name in enumerate(names)]
    return ids, tuple(names)


# -- reading rules


def variable_notes(
    dataset: Dataset,
    clauses: Sequence[Clause],
    path: str,
    file_format: FileFormat,
) -> list[str]:
    """Return a note on the first variable of rules that has the name of an entity, with the number of such names."""
    known = index_entities(dataset)
    lines = {
        term.name: clause.line
        for clause in reversed(clauses)
        for atom in (clause.head, *clause.body)
        for term in atom.args
        if isinstance(term, Variable) and term.name in known
    }
    # AMIE marks its variables.
    if not lines or file_format == "AMIE":
        return []
    name = min(lines, key=lines.__getitem__)
    more = f" ({len(lines)} names of this kind)" if len(lines) > 1 else ""
    place = f"{path}:{lines[name]}"
    return [f"{place}: {_variable_note(name)}{more}"]


def _variable_note(name: str) -> str:
    """Return the note on a variable that has the name of an entity."""
    return (
        f"{name} is a variable here; the entity is '{name}', in single quotes"
    )


_QUOTED = re.compile(QUOTED_PATTERN)
# a name may hold single spaces
_AMIE_SPACED_WORD = re.compile(
    rf"{QUOTED_PATTERN}|=>|\?\S++|\S+(?: (?!=>|\?)\S+)*+"
)
_AMIE_PLAIN_WORD = re.compile(rf"{QUOTED_PATTERN}|\S+")
_ANYBURL_SAME_ENTITY = "me_myself_i"
_Rule = tuple[Atom, tuple[Atom, ...], float]  # head, body and weight


def detect_format(text: str) -> FileFormat:
    """Detect the format of a rule file from its first line with content, quoted names left aside.

    A file with AMIE's header line is AMIE's, whatever its first line is.

    Args:
      text: content of a rule file; without any line of content it counts as weighted.
    """
    lines = text.split("\n")
    with_content = (x for x in lines if x.strip() and not x.startswith("#"))
    first_line = next(with_content, "")
    if not first_line:
        return "weighted"
    if re.search("^Rule\t", text, re.MULTILINE):
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


def read_clauses(
    text: str, path: str, file_format: FileFormat
) -> tuple[list[Clause], list[str]]:
    """Parse the clauses of a file, in its order; also return notes on what was left out.

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
    return clauses, notes


@contextmanager
def _located_errors(place: str, source: str) -> Iterator[None]:
    """Add the place and the text of a clause to the message of any ValueError."""
    try:
        yield
    except ValueError as error:
        text = shorten(source.strip())
        raise ValueError(f"{place}: {error}, in {text}") from None


def _read_prolog(
    text: str, path: str, file_format: FileFormat
) -> tuple[list[Clause], list[str]]:
    """Parse the clauses of a Prolog program; also return a note on skipped directives."""
    clauses: list[Clause] = []
    # clauses with goals that must be defined somewhere in the program, and their text
    library_users: list[tuple[Clause, str]] = []
    declarations: list[str] = []
    for line, source, tokens in tokenize_prolog(text):
        with _located_errors(f"{path}:{line}: as {file_format}", source):
            if tokens[0].kind == ":-":
                declarations.append(declared_by(tokens))
                continue
            clauses.append(_prolog_clause(tokens, line))
        if any(map(is_library_predicate, clauses[-1].body)):
            library_users.append((clauses[-1], source))

    defined = {indicator(clause.head) for clause in clauses}
    for clause, source in library_users:
        place = f"{path}:{clause.line}: as {file_format}"
        with _located_errors(place, source):
            for goal in clause.body:
                if indicator(goal) not in defined:
                    check_goal(goal)
    names = ", ".join(dict.fromkeys(declarations))
    note = f"{path}: {len(declarations)} directives skipped, which change no answer here: {names}"
    return clauses, [note] if declarations else []


def _prolog_clause(tokens: list[Token], line: int) -> Clause:
    """Parse the tokens between two full stops of a Prolog program as one clause, without goals `true`."""
    if tokens[0].kind == "?-":
        raise ValueError("expected a fact or a rule, got a query ?-")
    head, goals = parse_clause(tokens, ":-", prolog=True)
    check_head(head)
    body = tuple(goal for goal in goals if goal != Atom("true", ()))
    for goal in body:
        # Whether the program defines a library predicate is known at its end.
        if not is_library_predicate(goal):
            check_goal(goal)
    check_safe(head, body)
    return Clause(head, body, math.nan, line)


def _read_lines(
    text: str, path: str, file_format: FileFormat
) -> tuple[list[Clause], list[str]]:
    """Parse the clauses of a file in a line format, one per line that is no comment; also return notes."""
    read_line = _LINE_READERS[file_format]
    clauses: list[Clause] = []
    n_columns = None
    n_skipped = 0
    for number, full_line in enumerate(text.split("\n"), 1):
        line = full_line.rstrip("\r")
        # "Rule" starts AMIE's header line.
        if not line.strip() or line.startswith(("#", "Rule\t")):
            continue
        # What AMIE prints before and after its table.
        if file_format == "AMIE" and "=>" not in _QUOTED.sub("q", line):
            n_skipped += 1
            continue

        with _located_errors(f"{path}:{number}: as {file_format}", line):
            # All lines have as many columns as the first.
            n_line_columns = line.count("\t") + 1
            n_columns = n_columns or n_line_columns
            if n_line_columns != n_columns:
                raise ValueError(
                    f"expected {n_columns} columns, got {n_line_columns}"
                )
            head, body, weight = read_line(line)
            # A zero rule of AnyBURL is never safe; `with_rules` leaves it out.
            if body or file_format != "AnyBURL":
                check_safe(head, body)
        clauses.append(Clause(head, body, weight, number))
    note = f"{path}: {n_skipped} lines without => skipped"
    return clauses, [note] if n_skipped else []


def _read_weighted(line: str) -> _Rule:
    """Parse a line of the weighted format: the weight in the first column, the rule in the last."""
    columns, _, rule = line.rpartition("\t")
    head, body = parse_clause(tokenize_line(rule), ":-", prolog=False)
    if not body:
        raise _missing_body(":-")
    return head, body, _parse_weight(columns.split("\t")[0])


def _read_anyburl(line: str) -> _Rule:
    """Parse a line of AnyBURL as a rule; a zero rule has no body."""
    columns = line.split("\t")
    if len(columns) != 4:
        raise ValueError(
            f"expected predictions, support, confidence and rule in 4 columns, got {len(columns)}"
        )
    tokens = tokenize_line(columns[3], is_anyburl_variable)
    kinds = [token.kind for token in tokens]
    is_zero_rule = kinds[-2:] == ["<=", "end"] and kinds.count("<=") == 1
    if is_zero_rule:
        del tokens[-2]
    head, body = parse_clause(tokens, "<=", prolog=False)
    head, *atoms = map(_with_same_entity, (head, *body))

    # A zero rule whose head has no variables would be a fact.
    if not atoms and not (is_zero_rule and has_variables(head)):
        raise _missing_body("<=")
    return head, tuple(atoms), _parse_weight(columns[2])


def _with_same_entity(atom: Atom) -> Atom:
    """Replace AnyBURL's `me_myself_i` by the atom's other argument: h(X,me_myself_i) becomes h(X,X)."""
    others = [term for term in atom.args if term != _ANYBURL_SAME_ENTITY]
    if len(others) == len(atom.args):
        return atom
    if len(atom.args) != 2 or not others:
        problem = f"one argument beside {_ANYBURL_SAME_ENTITY}, which repeats it, got {len(others)}"
        raise ValueError(f"expected {problem}")
    return Atom(atom.predicate, (others[0], others[0]))


def _read_amie(line: str) -> _Rule:
    """Parse a line of AMIE as a rule; its weight is the confidence in the third column, NaN without one."""
    rule, *columns = line.split("\t")
    # AMIE puts two spaces between words, so that names may hold one; other tools put one.
    word_pattern = _AMIE_SPACED_WORD if "  " in rule else _AMIE_PLAIN_WORD
    words = word_pattern.findall(rule)
    arrow = words.index("=>") if "=>" in words else len(words)
    body_words = words[:arrow]
    head_words = words[arrow + 1 :]
    if len(head_words) != 3 or len(body_words) % 3 or not body_words:
        raise ValueError(
            "expected triples `?a  relation  ?b`, then `=>` and one triple"
        )
    starts = range(0, arrow, 3)
    body = tuple(_amie_atom(body_words[i : i + 3]) for i in starts)
    head = _amie_atom(head_words)
    return head, body, _parse_weight(columns[1] if len(columns) > 1 else "")


def _amie_atom(triple: list[str]) -> Atom:
    """Build the atom of three words: head, relation, tail."""
    terms: list[Variable | str] = []
    for word in triple:
        is_named = re.fullmatch(r"\?\w+", word) is not None
        if _QUOTED.fullmatch(word):
            terms.append(unquote(word))
        elif is_named or word[0] != "?":
            terms.append(Variable(word[1:]) if is_named else word)
    if len(terms) < 3 or isinstance(terms[1], Variable):
        text = " ".join(triple)
        raise ValueError(
            f"expected a relation between two constants or variables, got {shorten(text)}"
        )
    head, relation, tail = terms
    return Atom(str(relation), (head, tail))


def _missing_body(arrow: str) -> ValueError:
    """Return the error for a fact where only rules may stand."""
    return ValueError(
        f"expected `{arrow}` and a body after the head: facts belong in facts.txt"
    )


def _parse_weight(text: str) -> float:
    """Parse the number in a column; NaN if the column is empty."""
    if not text.strip():
        return math.nan
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"expected a number from 0 on as the weight, got {shorten(text)}"
        )
    return weight


_LINE_READERS: dict[FileFormat, Callable[[str], _Rule]] = {
    "weighted": _read_weighted,
    "AnyBURL": _read_anyburl,
    "AMIE": _read_amie,
}


# -- text of atoms and rules

RuleTableFormat = Literal["tsv", "AnyBURL"]
RULE_FILE_FORMATS: tuple[RuleTableFormat, ...] = ("tsv", "AnyBURL")
_ARROWS: dict[RuleTableFormat, str] = {"tsv": " :- ", "AnyBURL": " <= "}


class ProofNames(NamedTuple):
    """Formatting functions that `logic.proof` needs to print a proof: `to_json(proof, *proof_names(dataset))`."""

    format_atom: Callable[[Sequence[int] | np.ndarray], str]
    format_rule: Callable[[int], str]  # of the index of a rule
    format_predicate: Callable[[int], str]
    format_term: Callable[[int], str]  # of the id of a constant or variable


def proof_names(dataset: Dataset) -> ProofNames:
    """Return the functions that format the atoms, rules and names of proofs over a data set."""

    def format_term(number: int) -> str:
        term = _decode_term(dataset, number)
        return term.name if isinstance(term, Variable) else term

    return ProofNames(
        partial(format_atom, dataset),
        lambda rule: format_rule(dataset, dataset.rules[rule]),
        partial(_format_predicate, dataset),
        format_term,
    )


def _format_predicate(dataset: Dataset, predicate: int) -> str:
    """Format a predicate's id; of a condition with its sign."""
    if predicate in OPERATORS:
        return OPERATORS[predicate]
    sign = "not " if predicate < 0 else ""
    return sign + dataset.predicate_name(abs(predicate))


def format_atom(dataset: Dataset, atom: Sequence[int] | np.ndarray) -> str:
    """Format an atom's ids as text that `parse_query` reads, such as `locatedIn(france, X)`."""
    return _format_atom(_decode_atom(dataset, atom), "tsv")


def format_rule(dataset: Dataset, rule: np.ndarray) -> str:
    """Format a rule's ids as in a weighted rule file: `h(X, Y) :- b(X, Z), c(Z, Y)`."""
    head, *body = [format_atom(dataset, atom) for atom in rule if atom[0]]
    return f"{head} :- {', '.join(body)}"


def describe_failures(
    dataset: Dataset,
    rules: Sequence[tuple[int, Sequence[Sequence[int]]]],
    key: str,
) -> list[Json]:
    """Return as JSON values the rules that match an atom, each with its goals that nothing satisfies under a key."""
    return [
        {
            "rule": rule,
            "rule_text": format_rule(dataset, dataset.rules[rule]),
            key: [format_atom(dataset, goal) for goal in goals],
        }
        for rule, goals in rules
    ]


def comparison_tests(
    dataset: Dataset,
) -> dict[int, Callable[[int, int], bool]]:
    """Return the tests of the comparisons in rules, by the id of the operator: of two constants, read by their names.

    A comparison of numbers does not hold of names that are none.
    """

    @cache
    def number(constant: int) -> Decimal | None:
        """Return the value of a constant's name."""
        return read_number(dataset.entity_name(constant))

    def test(name: str, left: int, right: int) -> bool:
        if name in ("=", "!="):
            return TESTS[name](left, right)
        values = number(left), number(right)
        return None not in values and TESTS[name](*values)

    return {i: partial(test, name) for i, name in OPERATORS.items()}


def check_horn(dataset: Dataset) -> None:
    """Check that no rule has a negation or a comparison, which evidence and confidences do not count.

    Raises:
      ValueError: one has; the message shows the first.
    """
    rows = np.flatnonzero((dataset.rules[:, :, 0] < 0).any(1))
    if len(rows):
        text = shorten(format_rule(dataset, dataset.rules[rows[0]]))
        problem = "without negation and comparison, which only `funcppo prove` and `check PROOF.json` take"
        raise ValueError(
            f"{dataset.name}: expected rules {problem}, got {len(rows)} of {len(dataset.rules)} with, as {text}"
        )


def format_clause(
    head: Atom, body: Sequence[Atom], file_format: RuleTableFormat
) -> str:
    """Format a rule in a rule file format, its variables renamed.

    Raises:
      ValueError: more variables than AnyBURL has letters.
    """
    atoms = (head, *body)
    terms = (term for atom in atoms if not atom.sign for term in atom.args)
    variables = [t for t in dict.fromkeys(terms) if isinstance(t, Variable)]
    names = {v: variable_name(i) for i, v in enumerate(variables)}
    if file_format == "AnyBURL":
        names = _anyburl_names(head, variables)
    texts: list[str] = []
    for atom in atoms:
        args = tuple(
            Variable(names.get(t, "_")) if isinstance(t, Variable) else t
            for t in atom.args
        )
        texts.append(_format_atom(atom._replace(args=args), file_format))
    return texts[0] + _ARROWS[file_format] + ", ".join(texts[1:])


def _format_atom(atom: Atom, file_format: RuleTableFormat) -> str:
    """Format an atom in a rule file format, with quotes where the format needs them."""
    if atom.sign == COMPARED:
        left, right = (_format_word(term, "tsv") for term in atom.args)
        return f"{left} {atom.predicate} {right}"
    if atom.sign:
        return f"not {_format_atom(atom._replace(sign=''), file_format)}"

    # Without arguments a capital would read as a variable.
    if not atom.args:
        return _format_word(atom.predicate, file_format)
    predicate = format_name(atom.predicate)
    separator = "," if file_format == "AnyBURL" else ", "
    args = [_format_word(term, file_format) for term in atom.args]
    return f"{predicate}({separator.join(args)})"


def _format_word(word: Variable | str, file_format: RuleTableFormat) -> str:
    """Format a variable or a name; a name is quoted if it would read as something else without quotes."""
    if isinstance(word, Variable):
        return word.name
    is_anyburl = file_format == "AnyBURL"
    reads_as_variable = is_anyburl_variable if is_anyburl else is_variable
    return quote(word) if reads_as_variable(word) else format_name(word)


def _anyburl_names(
    head: Atom, variables: list[Variable]
) -> dict[Variable | str, str]:
    """Name variables for AnyBURL: X and Y for the head's arguments, A, B, ... for all other variables.

    PyClause takes no other names.

    Source: PyClause, "Rule types and syntax" (docs/data/rule_types.rst).
    """
    # The first argument is set last: both arguments of h(X, X) are X.
    names = dict(zip(reversed(head.args[:2]), "YX"[-len(head.args) :]))
    inner = [variable for variable in variables if variable not in names]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWZ"
    if len(inner) > len(letters):
        problem = f"at most {len(letters)} variables beside the head's to write as AnyBURL"
        raise ValueError(f"expected {problem}, got {len(inner)}")
    return names | dict(zip(inner, letters))


def _decode_atom(dataset: Dataset, ids: Sequence[int] | np.ndarray) -> Atom:
    """Return the atom that a row of ids stands for."""
    predicate = int(ids[0])
    operator = OPERATORS.get(predicate)
    arity = 2 if operator else dataset.arities[abs(predicate) - 1]
    args = tuple(_decode_term(dataset, int(t)) for t in ids[1 : 1 + arity])
    if operator:
        return Atom(operator, args, COMPARED)
    sign = "not" if predicate < 0 else ""
    return Atom(dataset.predicate_name(abs(predicate)), args, sign)


def _decode_term(dataset: Dataset, term: int) -> Variable | str:
    """Return the constant or variable that an id stands for."""
    if not term:
        return Variable("_")
    if term <= dataset.n_constants:
        return dataset.entity_name(term)
    return Variable(variable_name(term - dataset.n_constants - 1))


def variable_name(index: int) -> str:
    """Return the name of variable 0, 1, ...: X, Y, Z, W, V1, V2, ..."""
    return "XYZW"[index] if index < 4 else f"V{index - 3}"


def free_variable(dataset: Dataset) -> int:
    """Return the id of the first variable whose name no entity has, so that a query with it reads as written."""
    entities = index_entities(dataset)
    index = next(
        i for i in itertools.count() if variable_name(i) not in entities
    )
    return dataset.n_constants + 1 + index


# -- tables of rules

# columns of each format; the rule stands last
_COLUMNS: dict[RuleTableFormat, tuple[str, ...]] = {
    "tsv": (
        "source_weight",
        "train_support",
        "train_body_pairs",
        "train_conf",
        "pca_conf",
        "head_coverage",
        "loo_support",
        "loo_conf",
        "std_error",
        "pca_std_error",
    ),
    "AnyBURL": ("train_body_pairs", "train_support", "train_conf"),
}
_HEADERS: dict[RuleTableFormat, str] = {
    "tsv": "#" + "\t".join((*_COLUMNS["tsv"], "rule")) + "\n",
    "AnyBURL": "",
}
# starts the line that says what the counts of a tsv are of
COUNTS_PREFIX = "#counts\t"


class RuleStatistics(NamedTuple):
    """Statistics of each rule, float64 [R]."""

    weight: np.ndarray  # by which the rules are ranked
    support: np.ndarray  # right predictions: facts that the rule derives
    body_pairs: np.ndarray  # predictions: distinct heads that the body derives
    # facts of the support whose every derivation uses the fact itself
    circular_support: np.ndarray
    # predictions counted by the PCA confidence (partial completeness assumption), NaN where they were not counted
    pca_pairs: np.ndarray
    head_facts: np.ndarray  # facts of the head's predicate


def with_encoded_rules(
    dataset: Dataset, atoms: np.ndarray, counts: RuleStatistics
) -> Dataset:
    """Return the data set with the given rules, as ids, in place of its own.

    Args:
      dataset: its own rules are dropped.
      atoms: int [R, M, 3], head first, padded with 0; variables from C + 1 on.
      counts: statistics of the rules; their weights become those of the data set.
    """
    n_atoms = int((atoms[:, :, 0] > 0).sum(1).max(initial=1))
    n_columns = min(3, dataset.atom_width)
    table = np.zeros((len(atoms), n_atoms, dataset.atom_width), np.int32)
    table[:, :, :n_columns] = atoms[:, :n_atoms, :n_columns]
    dataset = replace(dataset, rules=table, rule_weights=counts.weight)
    columns = (counts.support, counts.body_pairs, counts.circular_support)
    return replace(dataset, rule_counts=_as_counts(columns))


def _as_counts(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return support, body pairs and circular support of rules as whole numbers, int64 [R, 3]."""
    return np.rint(np.stack(columns, axis=1)).astype(np.int64)


def _format_rules(dataset: Dataset, file_format: RuleTableFormat) -> list[str]:
    """Format the rules of a data set in a rule file format."""
    texts: list[str] = []
    for rows in dataset.rules:
        head, *body = [_decode_atom(dataset, row) for row in rows if row[0]]
        texts.append(format_clause(head, body, file_format))
    return texts


def format_rule_table(
    dataset: Dataset, counts: RuleStatistics, file_format: RuleTableFormat
) -> str:
    """Format the rules of a data set as the text of a rule file; without rules, just its header.

    Args:
      dataset: its rules are written, in their order.
      counts: statistics of the rules.
      file_format: format of the file.
    """
    # Leave one out: a prediction that only the fact itself supports counts neither as made nor as right.
    other_support = counts.support - counts.circular_support
    other_pairs = counts.body_pairs - counts.circular_support
    is_unknown = np.isnan(counts.pca_pairs)
    shares = {
        "source_weight": counts.weight,
        "train_conf": counts.support / np.maximum(counts.body_pairs, 1),
        "pca_conf": counts.support / np.maximum(counts.pca_pairs, 1),
        "head_coverage": counts.support / np.maximum(counts.head_facts, 1),
        "loo_conf": other_support / np.maximum(other_pairs, 1),
        # Counts are exact or not given.
        "std_error": np.zeros_like(counts.support),
        "pca_std_error": np.where(is_unknown, np.inf, 0.0),
    }
    whole = {
        "train_support": counts.support,
        "train_body_pairs": counts.body_pairs,
        "loo_support": other_support,
    }
    # All digits of a count, six of any other number.
    texts = {n: [f"{x:.6g}" for x in a.tolist()] for n, a in shares.items()}
    texts |= {n: [f"{round(x)}" for x in a.tolist()] for n, a in whole.items()}
    columns = [texts[name] for name in _COLUMNS[file_format]]
    rules = _format_rules(dataset, file_format)
    lines = ["\t".join(cells) + "\n" for cells in zip(*columns, rules)]
    table = _HEADERS[file_format] + "".join(lines)
    if file_format != "tsv" or not lines:
        return table
    return with_counts_line(table, dataset)


def with_counts_line(table: str, dataset: Dataset) -> str:
    """Append to a tsv the line that says that its counts are of the facts of train of a data set."""
    facts, lines = facts_digest(training_part(dataset)), _lines_digest(table)
    return f"{table}{COUNTS_PREFIX}{facts}\t{lines}\n"


def _lines_digest(table: str) -> str:
    """Return a hash of the lines of a table."""
    return hashlib.sha256(table.encode()).hexdigest()[:16]


def with_read_counts(
    text: str, dataset: Dataset, lines: Sequence[int]
) -> Dataset:
    """Return the data set with a tsv's counts of rules, if they are of its facts and the file was not edited.

    Args:
      text: content of the file.
      dataset: the data set that its rules are read for.
      lines: where the rules stand, line numbers from 1.
    """
    table, mark, last_line = text.rpartition(COUNTS_PREFIX)
    digests = last_line.removesuffix("\n").split("\t")
    if not mark or digests != [facts_digest(dataset), _lines_digest(table)]:
        return dataset
    rows = [row.split("\t") for row in table.splitlines()]
    names = ("train_support", "train_body_pairs", "loo_support", "std_error")
    header = [name.lstrip("#") for name in rows[0]]
    values = [
        [float(rows[line - 1][header.index(name)]) for name in names]
        for line in lines
    ]
    support, body_pairs, other_support, std_error = (
        np.array(values).reshape(-1, len(names)).T
    )
    counts = _as_counts((support, body_pairs, support - other_support))
    # Former versions wrote estimates too.
    counts[std_error > 0] = -1
    return replace(dataset, rule_counts=counts)


def is_mined_with_held_out(text: str, dataset: Dataset) -> bool:
    """Check whether a tsv says that its rules were mined from a data set's held-out triples too."""
    _, mark, last_line = text.rpartition(COUNTS_PREFIX)
    if not mark or not len(dataset.valid) + len(dataset.test):
        return False
    splits = (dataset.facts, dataset.valid, dataset.test)
    everything = replace(dataset, facts=np.concatenate(splits))
    digest, _, _ = last_line.partition("\t")
    # A split whose triples are all known facts was not held out.
    return digest == facts_digest(everything) != facts_digest(dataset)
