"""Candidates scored a second, compiled and not, with and without the prefilter; full rankings.

    python experiments/benchmarks/scoring.py --device cuda --out experiments/results/scoring-h200.json

Family, its 41 rules, height 2, depth 20, the score `greedy`, 500 queries drawn evenly over relations,
100 negatives a query and side, an untrained policy, one process. Rows:

    refilled                  slots take the next candidate when they are done; compiled, and on a GPU replayed as a
                              CUDA graph
    refilled, not compiled    as `funcppo evaluate` runs it up to ten million candidates
    prefiltered               `refilled` on the provable candidates alone; its candidates a second count all

Every row has its largest difference from the first one's scores. Last come full filtered rankings of all test triples,
both sides, at height 1 by `success`: of WN18RR with its 34 rules, and by `--ranked` with RNNLogic's rules, and of
FB15k-237 with its 15,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import DATA, make_parser
from experiments.provenance import describe_machine
from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import (
    evaluate_step,
    score_by_width,
    width_schedule,
)
from funcppo.kg.search.task import ProverTask
from funcppo.runtime import compile as strategies
from funcppo.runtime import memory
from funcppo.runtime.capture import GraphedStep
from funcppo.runtime.memory import AsyncReadback

CHUNK_SLOTS, MAX_DEPTH = 512, 20
CHUNK_CANDIDATES = 2048
RANKED = {  # data set and rule file
    "wn18rr": ("wn18rr", "rules.txt"),
    "wn18rr-rnnlogic": ("wn18rr", "rules_rnnlogic.tsv"),
    "fb15k-237-rnnlogic": ("fb15k-237", "rules_rnnlogic_top.tsv.gz"),
}

# The scores of atoms, and the row-steps that were taken.
Score = Callable[[Tensor], tuple[Tensor, int]]


class Policy(NamedTuple):
    """A task and a policy that has learnt nothing."""

    task: ProverTask
    cfg: Config
    params: Any


def main() -> None:
    """Time every row and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="record to write"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--no-family", action="store_true", help="only the full rankings"
    )
    parser.add_argument(
        "--ranked",
        nargs="*",
        choices=RANKED,
        default=["wn18rr"],
        help="what is ranked in full",
    )
    args = parser.parse_args()
    rows = [] if args.no_family else score_family(args)
    for name in args.ranked:
        rows.append(rank_in_full(args, *RANKED[name]))
        print(json.dumps(rows[-1]))
    write_record(
        args.out,
        {
            "machine": describe_machine(args.device),
            "seed": 0,
            "score": "greedy",
            "rows": rows,
        },
    )


def score_family(args: argparse.Namespace) -> list[Row]:
    """The rows on Family."""
    settings = ProverTaskConfig(max_height=2, max_depth=MAX_DEPTH)
    policy = untrained_policy(args.data / "family", None, settings, args.device)
    task = policy.task
    test = task.dataset.test
    test = test[ranking.stratified_sample(test, 500)]
    every_candidate = list_candidates(task, test, with_unprovable=True)
    provable = list_candidates(task, test, with_unprovable=False)

    rows: list[Row] = []
    first_scores = None
    for name, (score, slots) in make_designs(
        args, policy, every_candidate
    ).items():
        candidates = provable if name == "prefiltered" else every_candidate
        row, scores = time_scoring(
            score, candidates, len(every_candidate), args.device
        )
        if first_scores is None:
            first_scores = scores
        same_candidates = torch.isin(
            pack_atoms(task, every_candidate), pack_atoms(task, candidates)
        )
        row["largest_difference"] = largest_difference(
            first_scores[same_candidates], scores
        )
        row["slots"] = slots
        rows.append({"row": name} | row)
        print(json.dumps(rows[-1]))
    return rows


def make_designs(
    args: argparse.Namespace, policy: Policy, candidates: Tensor
) -> dict[str, tuple[Score, int]]:
    """The score and the slots of every design."""
    world = prover_task.inference_world(policy.task)
    plain_step = partial(scoring.make_search_step, args.device)
    compiled_step = strategies.compile_function(evaluate_step)
    replayed_step = (
        compiled_step if args.device == "cpu" else GraphedStep(compiled_step)
    )

    search = scoring.search_config(
        policy.task,
        policy.cfg,
        "greedy",
        slots=CHUNK_SLOTS,
        beam=1,
        rows_per_step=CHUNK_SLOTS,
        chunk_size=CHUNK_SLOTS,
    )
    rows = CHUNK_SLOTS * (1 if args.device == "cpu" else 16)
    wide = replace(
        search,
        slots=rows,
        rows_per_step=rows,
        chunk_size=max(CHUNK_CANDIDATES, 16 * rows),
    )

    def refilled(step: Callable[..., Any], atoms: Tensor) -> tuple[Tensor, int]:
        widths = width_schedule(wide)
        result, _, row_steps = score_by_width(
            widths,
            world,
            policy.params,
            atoms,
            step=step,
            make_readback=AsyncReadback,
        )
        return result.log_score, row_steps

    return {
        "refilled": (partial(refilled, replayed_step), wide.slots),
        "refilled, not compiled": (
            partial(refilled, plain_step()),
            wide.slots,
        ),
        "prefiltered": (partial(refilled, replayed_step), wide.slots),
    }


def rank_in_full(args: argparse.Namespace, name: str, rules: str) -> Row:
    """The full filtered ranking of the test triples, timed apart from what every run on these data does beforehand."""
    start = time.perf_counter()
    folder = args.data / name
    settings = ProverTaskConfig(
        max_height=1,
        hard_negative_fraction=1.0,
        embed_dim=16,
        hidden_dim=32,
        max_atoms=50_000_000,
    )
    task, cfg, params = untrained_policy(
        folder, str(folder / rules), settings, args.device
    )
    test = task.dataset.test
    search = scoring.search_config(
        task,
        cfg,
        "success",
        slots=CHUNK_SLOTS,
        beam=64,
        rows_per_step=CHUNK_SLOTS,
        chunk_size=CHUNK_CANDIDATES,
    )
    prepared_seconds = time.perf_counter() - start

    memory.reset_peak(args.device)
    start = time.perf_counter()
    score = scoring.PolicyScore(search, task, params, evaluate_step)
    ranked = ranking.rank_split(task, test, score, RankingProtocol())
    summary = ranking.summarise_ranking(
        ranked, list(task.dataset.predicates), with_auc=False
    )
    seconds = time.perf_counter() - start
    return {
        "row": f"{name}, {rules}",
        "queries": len(test),
        "candidates": summary["n_candidates"],
        "seconds": seconds,
        "scored": summary["n_scored"],
        "mrr": summary["mrr"],
        "ceiling": summary["ceiling"],
        "chunk": search.chunk_size,
        "prepared_seconds": prepared_seconds,
        "peak_bytes": memory.peak_bytes(args.device),
    }


def untrained_policy(
    folder: Path, rules: str | None, settings: ProverTaskConfig, device: str
) -> Policy:
    """The task of a data set and its first params."""
    task = prover_task.build_task(
        loaders.load(str(folder), rules), settings, device
    )
    cfg = prover_task.build_config(task, PPOConfig())
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0, device)
    ).params
    return Policy(task, cfg, params)


def list_candidates(
    task: ProverTask, split: Any, *, with_unprovable: bool
) -> Tensor:
    """The distinct candidates that 100 negatives a query and side make, in order."""

    protocol = RankingProtocol(
        n_negatives=100, score_unprovable=with_unprovable
    )
    listed = ranking.list_split(task, split, protocol, by_side=False)
    return listed.distinct[0][0].to(torch.int32)


def time_scoring(
    score: Score, atoms: Tensor, n_ranked: int, device: str
) -> tuple[Row, Tensor]:
    """One call after one that warms up, and its scores.

    Args:
      n_ranked: candidates that the scores rank, scored or not.
    """
    start = time.perf_counter()
    score(
        atoms[:: max(1, len(atoms) // (8 * CHUNK_SLOTS))]
    )  # of every relation, so that every width is compiled
    warmup_seconds = time.perf_counter() - start

    memory.reset_peak(device)
    start = time.perf_counter()
    scores, row_steps = score(atoms)
    scores = scores.cpu()
    seconds = time.perf_counter() - start
    row = {
        "candidates": n_ranked,
        "scored": len(atoms),
        "row_steps": row_steps,
        "seconds": seconds,
        "warmup_seconds": warmup_seconds,
        "candidates_per_s": n_ranked / seconds,
        "ms_per_candidate": 1e3 * seconds / n_ranked,
        "peak_bytes": memory.peak_bytes(device),
    }
    return row, scores


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tables of logarithms; infinite where the logarithms of 0 are not the same."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a - b)[a.isfinite()].abs().max())


def pack_atoms(task: ProverTask, atoms: Tensor) -> Tensor:
    """A number for each atom of two arguments, on the host."""
    base = task.sizes.n_constants + 1
    predicate, head, tail = atoms.cpu().long().unbind(1)
    return (predicate * base + head) * base + tail


if __name__ == "__main__":
    main()
