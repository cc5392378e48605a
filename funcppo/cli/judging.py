"""Who judges an evaluation: the score that was asked for, made ready for this machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from funcppo.cli.target import is_run
from funcppo.config import ProverSettings

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    import numpy as np

    from funcppo.beam import EvalConfig, Score
    from funcppo.cli.evaluate import Evaluate
    from funcppo.judge import Judge
    from funcppo.problem import Problem
    from funcppo.protocol import Scorer
    from funcppo.training import Run

POLICY = ("success", "best-proof", "greedy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A judge, and what there is to say of it."""

    judge: Judge
    name: str  # of the score
    settings: dict[str, Any]
    work: Work
    notes: list[str]
    budget: int  # bytes
    fallbacks: Callable[[], list[str]]  # why steps were not run as they should be, so far


@dataclass(slots=True)
class Work:
    """What scoring took, added up call by call."""

    active: int = 0  # row-steps that held a partial proof
    row_steps: int = 0
    pruned: int = 0  # candidates whose beam dropped partial proofs
    overflowed: int = 0  # candidates some of whose successors did not fit

    def add(self, result: Any, active: int, taken: int) -> None:
        """Add one call."""
        self.active, self.row_steps = self.active + active, self.row_steps + taken
        if result is not None:
            self.pruned += int(result.pruned.isfinite().sum())
            self.overflowed += int(result.overflowed.isfinite().sum())

    def told(self) -> dict[str, Any]:
        """The same for a table of results; nothing where nothing was searched."""
        if not self.row_steps:
            return {}
        share = {"row_steps": self.row_steps, "active_share": self.active / self.row_steps}
        return share | {"pruned": self.pruned, "overflowed": self.overflowed}


def prepare(asked: Evaluate) -> Ready:
    """Who judges, by which score, and what tells this evaluation from others."""
    import torch

    from funcppo import data, problem, scoring, training
    from funcppo.runtime import memory

    if asked.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device here")
    negatives, budget = _negatives(asked.negatives), _budget(asked.memory, asked.device)
    if is_run(asked.target):
        for name in ("rules", "height", "smoothing", "object_identity"):
            if getattr(asked, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')}: {asked.target} is a trained run, which has its own")
        run = training.open_run(Path(asked.target), asked.device)
        ready, name = run.problem, run.score if asked.score == "auto" else asked.score
    elif asked.score in POLICY:
        want = "exists@H, max-confidence, noisy-or or noisy-or@P"
        raise ValueError(f"--score {asked.score}: {asked.target} is no trained run, want {want}")
    else:
        run, name = None, "max-confidence" if asked.score == "auto" else asked.score
        settings = ProverSettings(
            max_height=asked.height, smoothing=asked.smoothing, object_identity=asked.object_identity
        )
        ready = problem.build(data.load(asked.target, asked.rules), settings, asked.device)
    how = {"negatives": negatives, "list_all": name == "greedy", "seed": asked.seed}
    work, notes, policy = Work(), [], run if name in POLICY else None
    if policy is None:
        scorer = problem.untrained_scorer(ready, name)
        if (held := memory.held_bytes(asked.device)) > budget:
            raise ValueError(
                f"--memory {budget}: want at least {held} bytes here, which data and T_P take by themselves"
            )
    else:
        cfg, notes = _fitted(policy, cast("Score", name), getattr(ready.dataset, asked.split), budget)
        scorer = scoring.policy_scorer(cfg, ready, policy.saved.best, policy.evaluate_step, on_scored=work.add)
        ready = problem.ranked_on(ready, "cpu")
    judge, settings = _judge(asked, ready, policy, scorer, name, how)
    fallbacks = partial(scoring.not_replayed, policy.evaluate_step) if policy else list[str]
    return Ready(judge=judge, name=name, settings=settings, work=work, notes=notes, budget=budget, fallbacks=fallbacks)


def _negatives(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--negatives {text}: want all, or a number of 1 or more")
    return int(text)


def on_work(result: dict[str, Any]) -> list[str]:
    """What a reader is told of the work and of what it may have missed."""
    over = f"{result['peak_bytes'] / 1e6:,.0f} MB were held at once, more than --memory allows"
    lines = [over] if result["peak_bytes"] > result["memory"] else []
    if "row_steps" not in result:
        return lines
    lines += [f"{result['active_share']:.1%} of {result['row_steps']:,} rows computed were in use"]
    lines += [f"the beam dropped partial proofs of {result['pruned']:,} candidates"] if result["pruned"] else []
    lines += [f"successors of {result['overflowed']:,} candidates did not fit"] if result["overflowed"] else []
    return lines + ([f"{result['lost']:,} provable answers were not found"] if result["lost"] else [])


def _fitted(run: Run, score: Score, split: np.ndarray, budget: int) -> tuple[EvalConfig, list[str]]:
    """The settings that are fastest here within the budget, and a line about them."""
    import torch

    from funcppo import fitting, problem, scoring, training

    cfg, ready, params = training.scoring(run, score), run.problem, run.saved.best
    if not len(split):
        return cfg, []
    sample = torch.unique(torch.from_numpy(split[:2048]), dim=0).to(ready.kb.facts.device)
    if scoring.searchless(ready, cfg):
        cfg, trials = fitting.fit_rules(cfg, scoring.looked_up(ready, sample), params, sample, budget)
        how = f"chunks of {cfg.window} candidates"
    else:
        steps = partial(scoring.stepping, run.run.device)
        cfg, trials = fitting.fit_search(cfg, problem.fixed_world(ready), params, sample, budget, steps)
        how = f"{cfg.slots} slots, {cfg.rows} rows a step"
    best = fitting.best(trials)
    speed = f"of {len(trials)} sizes tried the smallest that is nearly the fastest: {best.speed:,.0f} rows/s"
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
    asked: Evaluate, ready: Problem, run: Run | None, scorer: Scorer, name: str, how: dict[str, Any]
) -> tuple[Judge, dict[str, Any]]:
    """The judge, whose answers the policy of `run` proves where there is one; and what tells its ranks from others."""
    from funcppo import explain, training
    from funcppo.beam import NOT_PROVED
    from funcppo.judge import Judge
    from funcppo.protocol import Protocol

    prove: Any = lambda atom: None
    if asked.details is not None and asked.proofs:
        table = explain.program(ready)
        prove = partial(explain.smallest_proof, ready, table=table)
        if run is not None:
            prove = partial(explain.best_proof, ready, run.cfg, run.saved.best, table=table)
    judge = Judge(
        problem=ready,
        how=Protocol(sides=training.sides(ready), **how),
        scorer=scorer,
        prove=prove,
        floor=NOT_PROVED if name == "greedy" else -float("inf"),
        all_scores=asked.all_scores,
    )
    settings = {"dataset": ready.dataset.name, "fingerprint": ready.dataset.fingerprint, "height": ready.max_height}
    settings |= {
        "smoothing": ready.settings.smoothing,
        "object_identity": ready.settings.object_identity,
        "score": name,
        "params": None if run is None else _digest(run.saved.best),
        "negatives": how["negatives"],
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
