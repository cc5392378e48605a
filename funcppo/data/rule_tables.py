"""Rules with their statistics as text: this project's table, AnyBURL (which PyClause reads too) and AMIE.

    tsv       weight, support, body pairs, confidence, PCA confidence, head coverage, leave-one-out support and
              confidence, standard errors of the confidence and of the PCA confidence (0: exact), rule
    AnyBURL   predictions, support, confidence, rule
    AMIE      rule, head coverage, confidence, PCA confidence, support, body pairs, PCA pairs, functional variable

`format_rule_table` makes the text of a file. `funcppo.data.readers` reads each of them back, into the same rules in the
same order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from funcppo.data.dataset import Dataset
from funcppo.data.parser import FileFormat
from funcppo.data.writers import format_rule_clause, rule_clauses

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
AMIE_HEADER = (
    "Rule,Head Coverage,Std Confidence,PCA Confidence,"
    "Positive Examples,Body size,PCA Body size,Functional variable"
)
_AMIE_FUNCTIONAL_VARIABLE = "?x"
# as an argument in AnyBURL's syntax
_NAME_OF_ONE_CHARACTER = re.compile(r"[(,][^A-Z'][,)]")


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
    return replace(dataset, rules=table, rule_weights=counts.weight)


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
    return "".join(line + "\n" for line in lines)


def compatibility_notes(
    dataset: Dataset, file_format: RuleTableFormat
) -> list[str]:
    """Notes on names in rules that the tool of a format reads otherwise than this project; empty if there are none.

    Neither AnyBURL nor AMIE has quotes, and in AnyBURL a name of one character is a variable.

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
    names = (
        "in quotes or of one character"
        if file_format == "AnyBURL"
        else "in quotes"
    )
    return [
        f"{n_affected} rules hold names {names}: this project reads them back, {file_format} takes them for others"
    ]


def _is_read_otherwise(text: str, file_format: RuleTableFormat) -> bool:
    """Whether the tool of a format takes a name in the text of a rule for another name or for a variable."""
    if "'" in text:
        return True
    return (
        file_format == "AnyBURL"
        and _NAME_OF_ONE_CHARACTER.search(text) is not None
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
