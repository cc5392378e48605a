"""Rules with their counts as text: this project's table, AnyBURL (which PyClause reads too) and AMIE.

    tsv       weight, support, body pairs, confidence, PCA confidence, head coverage, leave-one-out support and
              confidence, standard errors of the confidence and of the PCA confidence (0: exact), rule
    AnyBURL   predictions, support, confidence, rule
    AMIE      rule, head coverage, confidence, PCA confidence, support, body pairs, PCA pairs, functional variable

`formats` reads each of them back: into the same rules, in the same order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from funcppo.data.dataset import Dataset
from funcppo.data.writers import format_rule_clause, to_clauses

TSV_HEADER = "#source_weight train_support train_body_pairs train_conf pca_conf head_coverage "
TSV_HEADER += "loo_support loo_conf std_error pca_std_error rule"
AMIE_HEADER = (
    "Rule,Head Coverage,Std Confidence,PCA Confidence,Positive Examples,Body size,PCA Body size,Functional variable"
)
RULE_FILE_FORMATS = ("tsv", "AnyBURL", "AMIE")
_ONE_CHARACTER = re.compile(r"[(,][^A-Z'][,)]")


class RuleStatistics(NamedTuple):
    """What was counted of each rule, float64 [R]."""

    weight: np.ndarray  # what the rules were ranked by
    support: np.ndarray
    body_pairs: np.ndarray
    circular_support: np.ndarray  # facts of the support that derive only themselves
    pca_pairs: np.ndarray
    head_facts: np.ndarray
    std_error: np.ndarray  # standard error of the confidence
    pca_std_error: np.ndarray  # of the PCA confidence


def with_encoded_rules(dataset: Dataset, atoms: np.ndarray, counts: RuleStatistics) -> Dataset:
    """The data set with these rules in place of its own.

    Args:
      atoms: int [R, M, 3], head first; variables from C + 1 on.
    """
    longest = int((atoms[:, :, 0] > 0).sum(1).max(initial=1))
    table = np.zeros((len(atoms), longest, dataset.atom_width), np.int32)
    table[:, :, : min(3, dataset.atom_width)] = atoms[:, :longest, : min(3, dataset.atom_width)]
    return replace(dataset, rules=table, rule_weights=counts.weight)


def format_rule_table(dataset: Dataset, counts: RuleStatistics, file_format: str) -> str:
    """The text of a file that holds the rules of a data set; only its header where there is none.

    Args:
      form: one of FORMATS.
    """
    header = {"tsv": TSV_HEADER.replace(" ", "\t"), "AnyBURL": "", "AMIE": AMIE_HEADER.replace(",", "\t")}[file_format]
    lines = [header] if header else []
    for clause, row in zip(to_clauses(dataset)[1], zip(*(column.tolist() for column in counts))):
        text = format_rule_clause(clause, "weighted" if file_format == "tsv" else file_format)
        fields = [str(value) if isinstance(value, int) else f"{value:.6g}" for value in _fields(file_format, *row)]
        parts = {"tsv": [*fields, text], "AnyBURL": [*fields, text], "AMIE": [text, *fields, "?x"]}
        lines.append("\t".join(parts[file_format]))
    return "".join(line + "\n" for line in lines)


def compatibility_notes(dataset: Dataset, file_format: str) -> list[str]:
    """A line on the rules whose names the tool that a format is of reads otherwise than this project; none if none.

    Neither AnyBURL nor AMIE knows quotes, and to AnyBURL a name of one character is a variable.
    """
    if file_format == "tsv":
        return []
    texts = [format_rule_clause(clause, file_format) for clause in to_clauses(dataset)[1]]
    n = sum("'" in text or (file_format == "AnyBURL" and _ONE_CHARACTER.search(text) is not None) for text in texts)
    why = "in quotes" + (" or of one character" if file_format == "AnyBURL" else "")
    return (
        [f"{n} rules hold names {why}: this project reads them back, {file_format} takes them for others"] if n else []
    )


def _fields(
    form: str,
    weight: float,
    support: float,
    body_pairs: float,
    circular: float,
    pca_pairs: float,
    head_facts: float,
    error: float,
    pca_error: float,
) -> list[float]:
    """The numbers of one rule in the order of the format; counts are whole, estimates of them rounded."""
    confidence, coverage = support / max(body_pairs, 1), support / max(head_facts, 1)
    pca_confidence = support / max(pca_pairs, 1)
    if form == "AnyBURL":
        return [round(body_pairs), round(support), confidence]
    if form == "AMIE":
        return [coverage, confidence, pca_confidence, round(support), round(body_pairs), round(pca_pairs)]
    alone = (support - circular) / max(body_pairs - circular, 1)
    counted = [weight, round(support), round(body_pairs), confidence, pca_confidence, coverage]
    return [*counted, round(support - circular), alone, error, pca_error]
