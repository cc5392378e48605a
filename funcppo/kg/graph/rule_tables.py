"""Rules with their statistics as text: this project's table, AnyBURL (which PyClause reads too) and AMIE.

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
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.ordered_facts import facts_digest
from funcppo.kg.graph.parser import FileFormat
from funcppo.kg.graph.writers import format_rule_clause, rule_clauses

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
