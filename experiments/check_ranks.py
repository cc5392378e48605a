"""Ranks recomputed from the JSON Lines of `funcppo evaluate --details`, by code that shares nothing with it.

    funcppo evaluate RUN --all-scores --details ranks.jsonl --json summary.json
    python experiments/check_ranks.py ranks.jsonl --summary summary.json

Prints MRR and Hits under the four tie policies. Exit status 1 when a line contradicts itself (its rank does not follow
from its counts, or its counts from the scores of its candidates) or the summary differs from the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from math import fsum
from pathlib import Path

POLICIES = ("optimistic", "pessimistic", "realistic", "expected")
HITS_AT = (1, 3, 10)
FORMAT_1_KEYS = {
    "better": "n_better",
    "equal": "n_equal",
    "candidates": "n_candidates",
    "line": "quantised_score",
    "others": "other_quantised_scores",
}


def main() -> None:
    """Recompute, compare, print; the exit status tells whether all agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("details", type=Path)
    parser.add_argument("--summary", type=Path, help="what --json wrote")
    args = parser.parse_args()
    lines = [current_keys(json.loads(line)) for line in args.details.read_text().splitlines()]
    wrong = [text for at, line in enumerate(lines, 1) for text in contradictions(at, line)]
    found = {side: averages([line for line in lines if side in ("both", line["side"])]) for side in sides(lines)}
    if args.summary is not None:
        wrong += differences(found, json.loads(args.summary.read_text())["by_group"]["all"])
    for side, table in found.items():
        for name, values in table.items():
            print(f"{side:>5} {name:>8}  " + "  ".join(f"{p} {v:.6f}" for p, v in values.items()))
    for text in wrong[:20]:
        print(text, file=sys.stderr)
    print(f"{len(lines)} lines, {len(wrong)} contradictions")
    sys.exit(bool(wrong))


def current_keys(line: dict) -> dict:
    """The line under the keys of format 2; a line of format 1 has others."""
    if "better" in line:
        line = {FORMAT_1_KEYS.get(name, name): value for name, value in line.items()}
        line["reciprocal_rank"] = line["rank"]["reciprocal"]
    return line


def sides(lines: list[dict]) -> list[str]:
    """The sides that were asked for, and both together."""
    return ["both", *sorted({line["side"] for line in lines})]


def possible_ranks(line: dict) -> range:
    """Every rank that some order of the candidates that tie with the answer gives it."""
    return range(line["n_better"] + 1, line["n_better"] + line["n_equal"] + 2)


def contradictions(at: int, line: dict) -> list[str]:
    """What in a line does not follow from the rest of it."""
    ranks, wrong = possible_ranks(line), []
    want = {"optimistic": ranks[0], "pessimistic": ranks[-1], "realistic": sum(ranks) / len(ranks)}
    want["reciprocal"] = mean_reciprocal(ranks)
    held = line["rank"] | {"reciprocal": line["reciprocal_rank"]}
    for name, rank in want.items():
        if abs(held[name] - rank) > 1e-9 * rank:
            wrong.append(f"line {at}: {name} rank {held[name]}, want {rank}")
    if not ranks[-1] <= line["n_candidates"]:
        wrong.append(f"line {at}: a rank of {ranks[-1]} among {line['n_candidates']} candidates")
    if "other_quantised_scores" in line:
        others, answer = line["other_quantised_scores"], line["quantised_score"]
        unscored = line["n_candidates"] - 1 - len(others)
        scores = [-float("inf") if x is None else x for x in others]
        mine = -float("inf") if answer is None else answer
        tied_at_0 = unscored if answer is None else 0  # what is not scored has the score 0
        counted = (sum(x > mine for x in scores), sum(x == mine for x in scores) + tied_at_0)
        counts = (line["n_better"], line["n_equal"])
        if counted != counts:
            wrong.append(f"line {at}: {counted} candidates are better and equal, got {counts}")
    return wrong


def averages(lines: list[dict]) -> dict[str, dict[str, float]]:
    """MRR and Hits under each policy; `expected` is the mean over all orders of the candidates that tie."""
    table: dict[str, list[tuple[float, ...]]] = {"mrr": []} | {f"hits@{k}": [] for k in HITS_AT}
    for line in lines:
        ranks = possible_ranks(line)
        single = (ranks[0], ranks[-1], (ranks[0] + ranks[-1]) / 2)
        table["mrr"].append((*(1 / rank for rank in single), mean_reciprocal(ranks)))
        for k in HITS_AT:
            within = max(0, min(k, ranks[-1]) - ranks[0] + 1) / len(ranks)
            table[f"hits@{k}"].append((*(float(rank <= k) for rank in single), within))
    return {
        name: {policy: fsum(row[i] for row in rows) / len(rows) for i, policy in enumerate(POLICIES)}
        for name, rows in table.items()
    }


@cache
def mean_reciprocal(ranks: range) -> float:
    """The mean of 1 / rank, added up one by one."""
    return fsum(1 / rank for rank in ranks) / len(ranks)


def differences(found: dict, summary: dict) -> list[str]:
    """Where a summary is not what the lines say, to 1e-9: it adds floating-point numbers."""
    return [
        f"summary: {side} {name} {policy} {summary[side][name][policy]}, want {value}"
        for side, table in found.items()
        for name, values in table.items()
        for policy, value in values.items()
        if side in summary and abs(summary[side][name][policy] - value) > 1e-9
    ]


if __name__ == "__main__":
    main()
