"""Candidates a second: slots that are refilled, against the design that they replace; with and without the prefilter.

    python experiments/bench_scoring.py --data DIR --device cuda --out experiments/results/bench_scoring-h200.json

Family, its 41 rules, height 2, depth 20, the score `greedy` (`--score success` takes a beam of 64), 100 negatives a
query and side, an untrained policy, one process. The design replaced scores every candidate in chunks of 512 whose
slots are masked when they are done and all take 20 steps; both are compiled, and on a GPU the steps of the one that
replaces it are replayed as a CUDA graph. `refilled` scores the same candidates, also without compiling, `prefiltered`
the provable ones alone, and its candidates a second count all that are ranked. Every row has its largest
difference from the first one's scores. Last the full filtered ranking of the test triples of WN18RR, both sides, with
its 34 rules at height 1 by `success`; `--ranked` names others: with RNNLogic's rules, and FB15k-237 with its 15,000.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks import side_by_side
import torch
from torch import Tensor

from funcppo import data, random, train_step
from funcppo.config import Config, PPOConfig
from funcppo.evaluation import autotune, ranking, scorers
from funcppo.evaluation.beam_search import SearchConfig
from funcppo.evaluation.ranking import RankingProtocol
from funcppo.evaluation.slot_scheduler import evaluate_step, init_scheduler, score_by_width, width_schedule
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.env import World
from funcppo.prover.task import ProverTask
from funcppo.runtime import compile as ladder
from funcppo.runtime import memory
from funcppo.runtime.graphed import GraphedStep
from funcppo.runtime.host_transfer import make_async_readback

CHUNK, DEPTH = 512, 20  # of the design replaced
RANKED = {
    "wn18rr": ("wn18rr", "rules.txt"),
    "wn18rr-rnnlogic": ("wn18rr", "rules_rnnlogic.tsv"),
    "fb15k-237-rnnlogic": ("fb15k-237", "rules_rnnlogic_top.tsv.gz"),
}


def main() -> None:
    """Time every row, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--score", choices=("greedy", "success"), default="greedy")
    parser.add_argument("--queries", type=int, default=500, help="of Family, drawn evenly over relations")
    parser.add_argument("--eager", action="store_true", help="compile neither design")
    parser.add_argument("--no-family", action="store_true", help="rank in full alone")
    parser.add_argument("--ranked", nargs="*", choices=RANKED, default=["wn18rr"], help="what is ranked in full")
    parser.add_argument("--queries-ranked", type=int, default=None, help="of those ranked in full; all by default")
    args = parser.parse_args()
    rows = [] if args.no_family else family(args)
    for name in args.ranked:
        rows.append(ranked_in_full(args, *RANKED[name]))
        print(json.dumps(rows[-1]))
    found = {"machine": side_by_side.machine(args.device), "seed": 0, "score": args.score, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def family(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows on Family: replaced, refilled, prefiltered."""
    settings = ProverTaskConfig(max_height=2, max_depth=DEPTH)
    ready, cfg, params = untrained(args.data / "family", None, settings, args.device)
    world, plain = prover_task.inference_world(ready), partial(scorers.make_search_step, args.device)
    compiled = evaluate_step if args.eager else ladder.compile_function(evaluate_step)
    replayed = compiled if args.device == "cpu" else GraphedStep(compiled)
    split = ready.dataset.test[ranking.stratified_sample(ready.dataset.test, args.queries)]
    every, provable = (asked(ready, split, list_all=whole) for whole in (True, False))
    beam = 1 if args.score == "greedy" else 64
    how = scorers.search_config(
        ready, cfg, args.score, slots=CHUNK, beam=beam, rows_per_step=CHUNK * beam, chunk_size=CHUNK
    )
    old = partial(replaced, replace(how, refill=False), world, params, step=compiled)
    budget = memory.total_bytes(args.device) // 2
    fitted, _ = autotune.tune_slots(replace(how, chunk_size=2048), world, params, every[:2048], budget, plain)

    def new(step: Callable[..., Any], atoms: Tensor) -> tuple[Tensor, int]:
        result, _, taken = score_by_width(
            width_schedule(fitted), world, params, atoms, step=step, make_readback=make_async_readback
        )
        return result.log_score, taken

    rows, first = [], None
    designs = {
        "replaced": (old, every),
        "refilled": (partial(new, replayed), every),
        "refilled, not compiled": (partial(new, plain()), every),
        "prefiltered": (partial(new, replayed), provable),
    }
    for name, (score, atoms) in designs.items():
        row, scores = timed(score, atoms, len(every), args.device)
        first = scores if first is None else first
        row["largest_difference"] = difference(first[torch.isin(code(ready, every), code(ready, atoms))], scores)
        row |= {"slots": CHUNK if score is old else fitted.slots}
        rows.append(
            {"row": name} | row | {"times_replaced": row["candidates_per_s"] / (rows or [row])[0]["candidates_per_s"]}
        )
        print(json.dumps(rows[-1]))
    return rows


def replaced(
    cfg: SearchConfig, world: World, params: Any, atoms: Tensor, *, step: Callable[..., Any]
) -> tuple[Tensor, int]:
    """The scores by the design replaced, and the row-steps taken: every slot steps to the depth limit."""
    scores = []
    for part in atoms.split(cfg.chunk_size):
        table = torch.cat([part, part.new_zeros((cfg.chunk_size + 1 - len(part), part.shape[1]))])
        state = init_scheduler(cfg, table)
        for _ in range(cfg.max_depth):
            state = step(cfg, world, params, table, state)
        scores.append(state.results.log_score[: len(part)])
    return torch.cat(scores), cfg.max_depth * cfg.rows_per_step * len(scores)


def ranked_in_full(args: argparse.Namespace, name: str, rules: str) -> dict[str, Any]:
    """The full filtered ranking of the test triples, timed apart from what every run on these data does beforehand."""
    begun, folder = time.perf_counter(), args.data / name
    settings = ProverTaskConfig(max_height=1, hard_negative_fraction=1.0, embed_dim=16, hidden_dim=32)
    ready, cfg, params = untrained(folder, str(folder / rules), settings, args.device)
    split = ready.dataset.test
    split = split if args.queries_ranked is None else split[ranking.stratified_sample(split, args.queries_ranked)]
    how = scorers.search_config(ready, cfg, "success", slots=CHUNK, beam=64, rows_per_step=CHUNK, chunk_size=2048)
    world, budget = prover_task.inference_world(ready), memory.total_bytes(args.device) // 2
    how, _ = autotune.tune_chunk_size(how, world, params, ready.least_model.atoms[:2048], budget)
    prepared = time.perf_counter() - begun
    memory.reset_peak(args.device)
    begun = time.perf_counter()
    ranked = ranking.rank_split(
        ready, split, scorers.make_policy_scorer(how, ready, params, evaluate_step), RankingProtocol()
    )
    found = ranking.summarise_ranking(ranked, list(ready.dataset.predicates), with_auc=False)
    seconds = time.perf_counter() - begun
    row = {"row": f"{name}, {rules}", "queries": len(split), "candidates": found["n_candidates"], "seconds": seconds}
    row |= {"scored": found["n_scored"], "mrr": found["mrr"], "ceiling": found["ceiling"], "chunk": how.chunk_size}
    return row | {"prepared_seconds": prepared, "peak_bytes": memory.peak_bytes(args.device)}


def untrained(
    folder: Path, rules: str | None, settings: ProverTaskConfig, device: str
) -> tuple[ProverTask, Config, Any]:
    """A problem and a policy that has learnt nothing."""
    ready = prover_task.build_task(data.load(str(folder), rules), settings, device)
    cfg = prover_task.build_config(ready, PPOConfig())
    return ready, cfg, train_step.init(cfg, prover_task.training_world(ready), random.key(0, device)).params


def asked(ready: ProverTask, split: Any, *, list_all: bool) -> Tensor:
    """The candidates that 100 negatives a query and side make, distinct and in order."""
    nothing = lambda atoms: torch.zeros(len(atoms), device=atoms.device)
    return ranking.rank_split(
        ready, split, nothing, RankingProtocol(n_negatives=100, score_unprovable=list_all)
    ).scored_atom.to(torch.int32)


def timed(
    score: Callable[[Tensor], tuple[Tensor, int]], atoms: Tensor, n_ranked: int, device: str
) -> tuple[dict[str, Any], Tensor]:
    """One call after one that warms up, and its scores."""
    begun = time.perf_counter()
    score(atoms[:: max(1, len(atoms) // (8 * CHUNK))])  # of every relation, so that every width is compiled
    warm = time.perf_counter() - begun
    memory.reset_peak(device)
    begun = time.perf_counter()
    scores, taken = score(atoms)
    scores = scores.cpu()
    seconds = time.perf_counter() - begun
    row = {"candidates": n_ranked, "scored": len(atoms), "row_steps": taken, "seconds": seconds, "warmup_seconds": warm}
    row |= {"candidates_per_s": n_ranked / seconds, "ms_per_candidate": 1e3 * seconds / n_ranked}
    return row | {"peak_bytes": memory.peak_bytes(device)}, scores


def difference(a: Tensor, b: Tensor) -> float:
    """The largest of two tables of logarithms; those of 0 must be the same."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a - b)[a.isfinite()].abs().max())


def code(ready: ProverTask, atoms: Tensor) -> Tensor:
    """A number for each atom of two arguments, on the host."""
    base = ready.sizes.n_constants + 1
    predicate, head, tail = atoms.cpu().long().unbind(1)
    return (predicate * base + head) * base + tail


if __name__ == "__main__":
    main()
