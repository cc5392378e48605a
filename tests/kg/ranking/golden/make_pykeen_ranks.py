"""Writes pykeen_ranks.json: PyKEEN's own numbers on generated scores with many ties.

Needs PyKEEN, which is no dependency of this project; `test_rank_metrics.py` reads the file and, where PyKEEN
can be imported, also calls it. Run `python tests/kg/ranking/golden/make_pykeen_ranks.py` from the root of the
repository.
"""

import json
import pathlib
import sys
from typing import Any

import torch

TARGET = pathlib.Path(__file__).with_name("pykeen_ranks.json")
# queries, candidates, distinct scores
CASES = [(40, 30, 3), (40, 30, 30), (25, 200, 2), (60, 7, 1), (60, 12, 1000)]


def scores(
    seed: int, n_queries: int, n_candidates: int, n_levels: int
) -> tuple[list[list[int]], list[list[bool]]]:
    """Integer scores [Q, E], the answer in column 0, and which are candidates: a linear congruence, so that no
    library's generator has a say."""
    state, stream = seed, []
    for _ in range(2 * n_queries * n_candidates):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        stream.append(state >> 33)
    table = [
        [stream[q * n_candidates + e] % n_levels for e in range(n_candidates)]
        for q in range(n_queries)
    ]
    rest = stream[n_queries * n_candidates :]
    valid = [
        [
            e == 0 or rest[q * n_candidates + e] % 4 > 0
            for e in range(n_candidates)
        ]
        for q in range(n_queries)
    ]
    return table, valid


def pykeen_numbers(
    seed: int, case: tuple[int, int, int]
) -> dict[str, dict[str, float]]:
    """PyKEEN's MRR and Hits@k by side and tie policy; even rows ask for heads, odd ones for tails."""
    from pykeen.evaluation import RankBasedEvaluator

    table, valid = scores(seed, *case)
    masked = (
        torch.tensor(table)
        .double()
        .masked_fill(~torch.tensor(valid), torch.nan)
    )
    evaluator: Any = RankBasedEvaluator(filtered=True)
    for first, target in ((0, "head"), (1, "tail")):
        rows = masked[first::2]
        evaluator.process_scores_(
            hrt_batch=torch.zeros(len(rows), 3, dtype=torch.long),
            target=target,
            scores=rows,
            true_scores=rows[:, :1],
        )
    result = evaluator.finalize()
    return {
        side: {
            f"{policy} {metric}": float(
                result.get_metric(f"{side}.{policy}.{metric}")
            )
            for policy in ("optimistic", "pessimistic", "realistic")
            for metric in (
                "inverse_harmonic_mean_rank",
                "hits_at_1",
                "hits_at_3",
                "hits_at_10",
                "arithmetic_mean_rank",
            )
        }
        for side in ("both", "head", "tail")
    }


def main() -> int:
    rows = [
        {"seed": i, "case": case, "pykeen": pykeen_numbers(i, case)}
        for i, case in enumerate(CASES)
    ]
    TARGET.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
