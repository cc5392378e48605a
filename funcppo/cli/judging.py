"""Who judges an evaluation: the score that was asked for, made ready for this machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from funcppo.cli.target import is_run_folder
from funcppo.evaluation import ranking, scorers
from funcppo.prover.config import ProverTaskConfig

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    import numpy as np

    from funcppo.cli.evaluate import Evaluate
    from funcppo.evaluation.beam_search import ScoreName, SearchConfig
    from funcppo.evaluation.evaluator import Evaluator
    from funcppo.evaluation.ranking import Scorer
    from funcppo.experiment.training import Run
    from funcppo.prover.task import ProverTask

POLICY_SCORES = ("success", "best-proof", "greedy")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSetup:
    """A judge, and what there is to say of it."""

    evaluator: Evaluator
    score: str  # of the score
    log_settings: dict[str, Any]
    search_stats: SearchStats
    notes: list[str]
    memory_limit: int  # bytes
    fallback_reasons: Callable[[], list[str]]  # why steps were not run as they should be, so far


@dataclass(slots=True)
class SearchStats:
    """What scoring took, added up call by call."""

    active_row_steps: int = 0  # row-steps that held a partial proof
    row_steps: int = 0
    n_pruned: int = 0  # candidates whose beam dropped partial proofs
    n_overflowed: int = 0  # candidates some of whose successors did not fit

    def add(self, result: Any, active_row_steps: int, row_steps: int) -> None:
        """Add one call."""
        self.active_row_steps, self.row_steps = self.active_row_steps + active_row_steps, self.row_steps + row_steps
        if result is not None:
            self.n_pruned += int(result.pruned_log_mass.isfinite().sum())
            self.n_overflowed += int(result.overflow_log_mass.isfinite().sum())

    def as_metrics(self) -> dict[str, Any]:
        """The same for a table of results; nothing where nothing was searched."""
        if not self.row_steps:
            return {}
        share = {"row_steps": self.row_steps, "active_share": self.active_row_steps / self.row_steps}
        return share | {"pruned": self.n_pruned, "overflowed": self.n_overflowed}


def prepare_evaluation(options: Evaluate) -> EvaluationSetup:
    """Who judges, by which score, and what tells this evaluation from others."""
    import torch

    from funcppo import data
    from funcppo.experiment import training
    from funcppo.prover import task as prover_task
    from funcppo.runtime import memory

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device here")
    negatives, budget = _negatives(options.negatives), _budget(options.memory, options.device)
    if is_run_folder(options.target):
        for name in ("rules", "height", "smoothing", "object_identity"):
            if getattr(options, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')}: {options.target} is a trained run, which has its own")
        run = training.open_run(Path(options.target), options.device)
        ready, name = run.task, run.score if options.score == "auto" else options.score
    elif options.score in POLICY_SCORES:
        want = "exists@H, max-confidence, noisy-or or noisy-or@P"
        raise ValueError(f"--score {options.score}: {options.target} is no trained run, want {want}")
    else:
        run, name = None, "max-confidence" if options.score == "auto" else options.score
        settings = ProverTaskConfig(
            max_height=options.height, smoothing=options.smoothing, object_identity=options.object_identity
        )
        ready = prover_task.build_task(data.load(options.target, options.rules), settings, options.device)
    how = {"n_negatives": negatives, "score_unprovable": name == "greedy", "seed": options.seed}
    work, notes, policy = SearchStats(), [], run if name in POLICY_SCORES else None
    if policy is None:
        scorer = scorers.make_untrained_scorer(ready, name)
        if (held := memory.used_bytes(options.device)) > budget:
            raise ValueError(
                f"--memory {budget}: want at least {held} bytes here, which data and T_P take by themselves"
            )
    else:
        cfg, notes = _fitted(policy, cast("ScoreName", name), getattr(ready.dataset, options.split), budget)
        scorer = scorers.make_policy_scorer(
            cfg, ready, policy.state.best_params, policy.evaluate_step, on_scored=work.add
        )
        ready = prover_task.with_ranking_on(ready, "cpu")
    judge, settings = _judge(options, ready, policy, scorer, name, how)
    fallbacks = partial(scorers.graph_fallback_notes, policy.evaluate_step) if policy else list[str]
    return EvaluationSetup(
        evaluator=judge,
        score=name,
        log_settings=settings,
        search_stats=work,
        notes=notes,
        memory_limit=budget,
        fallback_reasons=fallbacks,
    )


def _negatives(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--negatives {text}: want all, or a number of 1 or more")
    return int(text)


def search_notes(result: dict[str, Any]) -> list[str]:
    """What a reader is told of the work and of what it may have missed."""
    over = f"{result['peak_bytes'] / 1e6:,.0f} MB were held at once, more than --memory allows"
    lines = [over] if result["peak_bytes"] > result["memory"] else []
    if "row_steps" not in result:
        return lines
    lines += [f"{result['active_share']:.1%} of {result['row_steps']:,} rows computed were in use"]
    lines += [f"the beam dropped partial proofs of {result['pruned']:,} candidates"] if result["pruned"] else []
    lines += [f"successors of {result['overflowed']:,} candidates did not fit"] if result["overflowed"] else []
    return lines + ([f"{result['n_missed']:,} provable answers were not found"] if result["n_missed"] else [])


def _fitted(run: Run, score: ScoreName, split: np.ndarray, budget: int) -> tuple[SearchConfig, list[str]]:
    """The settings that are fastest here within the budget, and a line about them."""
    import torch

    from funcppo.evaluation import autotune
    from funcppo.experiment import training
    from funcppo.prover import task as prover_task

    cfg, ready, params = training.run_search_config(run, score), run.task, run.state.best_params
    if not len(split):
        return cfg, []
    sample = torch.unique(torch.from_numpy(split[:2048]), dim=0).to(ready.kb.facts.device)
    if scorers.needs_search(ready, cfg):
        make_step = partial(scorers.make_search_step, run.run_config.device)
        cfg, trials = autotune.tune_slots(cfg, prover_task.inference_world(ready), params, sample, budget, make_step)
        how = f"{cfg.slots} slots, {cfg.rows_per_step} rows a step"
    else:
        cfg, trials = autotune.tune_chunk_size(cfg, scorers.with_derivations(ready, sample), params, sample, budget)
        how = f"chunks of {cfg.chunk_size} candidates"
    best = autotune.select_trial(trials)
    speed = f"of {len(trials)} sizes tried the smallest that is nearly the fastest: {best.rows_per_second:,.0f} rows/s"
    return cfg, [f"{how}, {speed}, {best.peak_bytes / 1e6:,.0f} of {budget / 1e6:,.0f} MB"]


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _budget(text: str | None, device: str) -> int:
    """The bytes that --memory allows.

    Errors: ValueError for anything but a number and a unit.
    """
    from funcppo.runtime import memory

    if text is None:
        return memory.total_bytes(device) * 3 // 4
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"--memory {text}: want bytes, or a number with {', '.join(list(_UNITS)[1:])}")
    return int(float(match[1]) * _UNITS[match[2]])


def _judge(
    asked: Evaluate, ready: ProverTask, run: Run | None, scorer: Scorer, name: str, how: dict[str, Any]
) -> tuple[Evaluator, dict[str, Any]]:
    """The judge, whose answers the policy of `run` proves where there is one; and what tells its ranks from others."""
    from funcppo.evaluation import explain
    from funcppo.evaluation.beam_search import UNPROVED_PENALTY
    from funcppo.evaluation.evaluator import Evaluator
    from funcppo.evaluation.ranking import RankingProtocol

    prove: Any = lambda atom: None
    if asked.details is not None and asked.proofs:
        table = explain.build_program(ready)
        prove = partial(explain.smallest_proof, ready, program=table)
        if run is not None:
            prove = partial(explain.most_probable_proof, ready, run.cfg, run.state.best_params, program=table)
    judge = Evaluator(
        task=ready,
        protocol=RankingProtocol(sides=ranking.ranked_sides(ready), **how),
        scorer=scorer,
        prove=prove,
        proof_threshold=UNPROVED_PENALTY if name == "greedy" else -float("inf"),
        all_scores=asked.all_scores,
    )
    settings = {"dataset": ready.dataset.name, "fingerprint": ready.dataset.fingerprint, "height": ready.max_height}
    settings |= {
        "smoothing": ready.cfg.smoothing,
        "object_identity": ready.cfg.object_identity,
        "score": name,
        "params_digest": None if run is None else _digest(run.state.best_params),
        "negatives": how["n_negatives"],
        "seed": asked.seed,
        "all_scores": asked.all_scores,
    }
    return judge, settings


def _digest(params: Any) -> str:
    from funcppo import tree

    digest = hashlib.sha256()
    for leaf in tree.leaves(params):
        digest.update(leaf.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]
