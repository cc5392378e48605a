"""Claim: the ranks of `funcppo evaluate --details` follow from its counts and scores; by code that shares none with it.

    funcppo evaluate RUN --all-scores --details ranks.jsonl --json summary.json
    python experiments/checks/check_ranks.py ranks.jsonl --summary summary.json

Prints MRR and Hits under the four tie policies. Exits 1 when a line contradicts itself (its rank does not follow from
its counts, or its counts from the scores of its candidates) or the summary differs from the lines.
"""

import argparse
import json
import math
import sys
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any

POLICIES = ("optimistic", "pessimistic", "realistic", "expected")
HITS_AT = (1, 3, 10)
MAX_PRINTED = 20
TOLERANCE = 1e-9  # the program adds floating-point numbers in another order

Line = dict[str, Any]  # of the details
Metrics = dict[str, dict[str, float]]  # by name and tie policy


def main() -> None:
    """Recompute, compare, print; the exit status is 1 where anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("details", type=Path)
    parser.add_argument("--summary", type=Path, help="what --json wrote")
    args = parser.parse_args()
    text = args.details.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    errors = [
        error
        for number, line in enumerate(lines, 1)
        for error in contradictions(number, line)
    ]
    metrics = {
        side: mean_metrics(lines_of(lines, side)) for side in sides(lines)
    }
    if args.summary is not None:
        errors += differences(
            metrics, json.loads(args.summary.read_text())["by_group"]["all"]
        )

    for side, by_name in metrics.items():
        for name, by_policy in by_name.items():
            values = "  ".join(
                f"{policy} {value:.6f}" for policy, value in by_policy.items()
            )
            print(f"{side:>5} {name:>8}  {values}")
    for error in errors[:MAX_PRINTED]:
        print(error, file=sys.stderr)
    print(f"{len(lines)} lines, {len(errors)} contradictions")
    sys.exit(bool(errors))


def sides(lines: list[Line]) -> list[str]:
    """The sides that are ranked, and both together."""
    return ["both", *sorted({line["side"] for line in lines})]


def lines_of(lines: list[Line], side: str) -> list[Line]:
    """The lines of a side, or of both."""
    return [line for line in lines if side in ("both", line["side"])]


def possible_ranks(line: Line) -> range:
    """Every rank that some order of the candidates that tie with the answer gives it."""
    return range(line["n_better"] + 1, line["n_better"] + line["n_equal"] + 2)


def contradictions(number: int, line: Line) -> list[str]:
    """What in a line does not follow from the rest of it."""
    errors = []
    ranks = possible_ranks(line)
    expected = {
        "optimistic": ranks[0],
        "pessimistic": ranks[-1],
        "realistic": sum(ranks) / len(ranks),
        "reciprocal": mean_reciprocal(ranks),
    }
    stated_ranks = line["rank"] | {"reciprocal": line["reciprocal_rank"]}
    for name, rank in expected.items():
        if abs(stated_ranks[name] - rank) > TOLERANCE * rank:
            errors.append(
                f"line {number}: {name} rank: expected {rank}, got {stated_ranks[name]}"
            )
    if ranks[-1] > line["n_candidates"]:
        errors.append(
            f"line {number}: a rank of {ranks[-1]} among {line['n_candidates']} candidates"
        )
    if "other_quantised_scores" in line:
        counts = count_better_and_equal(line)
        stated = line["n_better"], line["n_equal"]
        if counts != stated:
            errors.append(
                f"line {number}: better and equal candidates: expected {counts}, got {stated}"
            )
    return errors


def count_better_and_equal(line: Line) -> tuple[int, int]:
    """Candidates whose score is above the answer's, and others that have the same."""
    others = [
        -math.inf if score is None else score
        for score in line["other_quantised_scores"]
    ]
    answer = (
        -math.inf
        if line["quantised_score"] is None
        else line["quantised_score"]
    )
    n_unscored = (
        line["n_candidates"] - 1 - len(others)
    )  # their score is 0, which has no logarithm
    n_tied_at_zero = n_unscored if answer == -math.inf else 0
    return sum(score > answer for score in others), sum(
        score == answer for score in others
    ) + n_tied_at_zero


def mean_metrics(lines: list[Line]) -> Metrics:
    """MRR and Hits under each policy; `expected` is the mean over all orders of the candidates that tie."""
    values: dict[str, list[tuple[float, ...]]] = {"mrr": []} | {
        f"hits@{k}": [] for k in HITS_AT
    }
    for line in lines:
        ranks = possible_ranks(line)
        single_ranks = (ranks[0], ranks[-1], (ranks[0] + ranks[-1]) / 2)
        values["mrr"].append(
            (*(1 / rank for rank in single_ranks), mean_reciprocal(ranks))
        )
        for k in HITS_AT:
            share_within = max(0, min(k, ranks[-1]) - ranks[0] + 1) / len(ranks)
            values[f"hits@{k}"].append(
                (*(float(rank <= k) for rank in single_ranks), share_within)
            )

    metrics: Metrics = {}
    for name, rows in values.items():
        metrics[name] = {
            policy: fsum(row[i] for row in rows) / len(rows)
            for i, policy in enumerate(POLICIES)
        }
    return metrics


@cache
def mean_reciprocal(ranks: range) -> float:
    """The mean of 1 / rank, added up one by one."""
    return fsum(1 / rank for rank in ranks) / len(ranks)


def differences(
    metrics: dict[str, Metrics], summary: dict[str, Any]
) -> list[str]:
    """Where a summary is not what the lines say."""
    errors = []
    for side, by_name in metrics.items():
        for name, by_policy in by_name.items():
            for policy, value in by_policy.items():
                if (
                    side in summary
                    and abs(summary[side][name][policy] - value) > TOLERANCE
                ):
                    stated = summary[side][name][policy]
                    errors.append(
                        f"summary: {side} {name} {policy}: expected {value}, got {stated}"
                    )
    return errors


if __name__ == "__main__":
    main()
