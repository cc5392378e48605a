"""A policy's scores of candidates, wherever these are: by a search, or by the rules that derive them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcppo import problem as problems
from funcppo import protocol
from funcppo.beam import EvalConfig, Result
from funcppo.envs import prover
from funcppo.evaluate import Evaluation, Stage, evaluate_step, narrowed, rule_scores, score_by_width
from funcppo.logic import outlook
from funcppo.problem import Problem
from funcppo.runtime.inputs import lagging, staged
from funcppo.runtime.replay import Replayed


def stepping(device: torch.device | str) -> Callable[..., Evaluation]:
    """`evaluate_step` as it runs without compiling: replayed on a GPU, where kernels take less than launching them."""
    return Replayed(evaluate_step) if torch.device(device).type == "cuda" else evaluate_step


def not_replayed(step: Callable[..., Evaluation]) -> list[str]:
    """Lines that say why a way to run steps, made for a GPU, replays none; empty where it does."""
    reasons = step.reasons() if isinstance(step, Replayed) else []
    return [f"steps of a search were not replayed as a CUDA graph: {reason}" for reason in reasons]


def policy_scorer(
    cfg: EvalConfig,
    problem: Problem,
    params: Any,
    step: Callable[..., Evaluation],
    on_progress: Any = lambda done: None,
    on_scored: Callable[[Result | None, int, int], None] = lambda result, active, taken: None,
) -> protocol.Scorer:
    """The score of `cfg` under a policy; some need no search: see `searchless`.

    Candidates may be on the host: they come to the policy's device window by window, and their scores go back.

    Args:
      step: what `stepping` returns, or another way to run `evaluate_step`; not called where there is no search.
      on_scored: told the results of each call (None where there was no search), the row-steps that held a partial
        proof and all row-steps taken.
    """
    fixed, device = problems.fixed_world(problem), problem.kb.facts.device
    stage, widths = partial(staged, device=device), narrowed(cfg)

    def scored(atoms: Tensor) -> Tensor:
        if searchless(problem, cfg):
            score, computed = _rule_scores(cfg, looked_up(problem, atoms), params, atoms, on_progress, stage)
            on_scored(None, len(atoms), computed)
        else:
            how = dict(step=step, on_progress=on_progress, stage=stage, looking=lagging)
            result, active, taken = score_by_width(widths, fixed, params, atoms, **how)
            on_scored(result, active, taken)
            score = result.score
        return score.to(atoms.device)

    return scored


def searchless(problem: Problem, cfg: EvalConfig) -> bool:
    """Whether the rules that derive a candidate are all that counts: at height 1, facts found or counted as 1."""
    return problem.facts == "found" or (problem.max_height == 1 and cfg.score == "best-proof")


def looked_up(problem: Problem, atoms: Tensor) -> prover.World:
    """A world whose outlook tells of these atoms, where it was too large to tell of all.

    Args:
      atoms: distinct, in lexicographic order.
    """
    fixed, kb = problems.fixed_world(problem), problem.kb
    if problem.outlook is not None:
        return fixed
    found = outlook.of_atoms(kb, problem.sizes, problem.model, atoms.to(kb.facts.device))
    return fixed._replace(outlook=found)


def _rule_scores(
    cfg: EvalConfig, fixed: prover.World, params: Any, atoms: Tensor, on_progress: Any, stage: Stage
) -> tuple[Tensor, int]:
    """The scores, and how many were computed: the last chunk is padded to a power of two, so that few sizes come up."""
    parts, done, computed = [fixed.kb.support.new_zeros(0)], 0, 0
    for part in stage(atoms, cfg.window):
        size = min(cfg.window, 1 << (len(part) - 1).bit_length())
        padded = torch.cat([part, part.new_zeros((size - len(part), part.shape[1]))])
        parts.append(rule_scores(cfg, fixed, params, padded)[: len(part)])
        done, computed = done + len(part), computed + size
        on_progress(done)
    return torch.cat(parts), computed
