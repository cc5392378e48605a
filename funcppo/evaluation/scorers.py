"""A policy's scores of candidates, wherever these are: by a search, or by the rules that derive them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.evaluation import ranking
from funcppo.evaluation.beam_search import ScoreName, SearchConfig, SearchResult
from funcppo.evaluation.slot_scheduler import (
    ChunkLoader,
    SchedulerState,
    evaluate_step,
    score_by_rules,
    score_by_width,
    width_schedule,
)
from funcppo.logic import baselines, derivability, joins
from funcppo.prover import env as prover_env
from funcppo.prover import task as problems
from funcppo.prover.task import ProverTask
from funcppo.runtime.graphed import GraphedStep
from funcppo.runtime.host_transfer import make_async_readback, prefetch


def make_search_step(device: torch.device | str) -> Callable[..., SchedulerState]:
    """`evaluate_step` as it runs without compiling: replayed on a GPU, where kernels take less than launching them."""
    return GraphedStep(evaluate_step) if torch.device(device).type == "cuda" else evaluate_step


def graph_fallback_notes(step: Callable[..., SchedulerState]) -> list[str]:
    """Lines that say why a way to run steps, made for a GPU, replays none; empty where it does."""
    reasons = step.fallback_reasons() if isinstance(step, GraphedStep) else []
    return [f"steps of a search were not replayed as a CUDA graph: {reason}" for reason in reasons]


def make_policy_scorer(
    cfg: SearchConfig,
    task: ProverTask,
    params: Any,
    step: Callable[..., SchedulerState],
    on_progress: Any = lambda done: None,
    on_scored: Callable[[SearchResult | None, int, int], None] = lambda result, active, taken: None,
) -> ranking.Scorer:
    """The score of `cfg` under a policy; some need no search: see `needs_search`.

    Candidates may be on the host: they come to the policy's device window by window, and their scores go back.

    Args:
      step: what `stepping` returns, or another way to run `evaluate_step`; not called where there is no search.
      on_scored: told the results of each call (None where there was no search), the row-steps that held a partial
        proof and all row-steps taken.
    """
    fixed, device = problems.inference_world(task), task.kb.facts.device
    stage, widths = partial(prefetch, device=device), width_schedule(cfg)

    def scored(atoms: Tensor) -> Tensor:
        if needs_search(task, cfg):
            how = dict(step=step, on_progress=on_progress, load_chunks=stage, make_readback=make_async_readback)
            result, active, taken = score_by_width(widths, fixed, params, atoms, **how)
            on_scored(result, active, taken)
            score = result.log_score
        else:
            score, computed = _rule_scores(cfg, with_derivations(task, atoms), params, atoms, on_progress, stage)
            on_scored(None, len(atoms), computed)
        return score.to(atoms.device)

    return scored


def needs_search(task: ProverTask, cfg: SearchConfig) -> bool:
    """Whether a score depends on more than the rules that derive a candidate: not at height 1, with facts not chosen."""
    return not (task.fact_selection == "oracle" or (task.max_height == 1 and cfg.score == "best-proof"))


def with_derivations(task: ProverTask, atoms: Tensor) -> prover_env.World:
    """A world whose outlook tells of these atoms, where it was too large to tell of all.

    Args:
      atoms: distinct, in lexicographic order.
    """
    fixed, kb = problems.inference_world(task), task.kb
    if task.derivability_index is not None:
        return fixed
    found = derivability.build_derivability_index_for_atoms(kb, task.sizes, task.least_model, atoms.to(kb.facts.device))
    return fixed._replace(derivability_index=found)


def _rule_scores(
    cfg: SearchConfig, fixed: prover_env.World, params: Any, atoms: Tensor, on_progress: Any, stage: ChunkLoader
) -> tuple[Tensor, int]:
    """The scores, and how many were computed: the last chunk is padded to a power of two, so that few sizes come up."""
    parts, done, computed = [fixed.kb.support.new_zeros(0)], 0, 0
    for part in stage(atoms, cfg.chunk_size):
        size = min(cfg.chunk_size, 1 << (len(part) - 1).bit_length())
        padded = torch.cat([part, part.new_zeros((size - len(part), part.shape[1]))])
        parts.append(score_by_rules(cfg, fixed, params, padded)[: len(part)])
        done, computed = done + len(part), computed + size
        on_progress(done)
    return torch.cat(parts), computed


def make_untrained_scorer(task: ProverTask, name: str) -> ranking.Scorer:
    """`exists@H`, `max-confidence`, `noisy-or` or `noisy-or@P`, of power P.

    Errors: ValueError for another name.
    """
    kb, sizes, model, height = task.kb, task.sizes, task.least_model, task.max_height
    kind, _, number = name.partition("@")
    if kind == "exists" and number.isdigit():
        return lambda atoms: baselines.exists(model, int(number), atoms)
    if name == "max-confidence":
        score = baselines.max_confidence
    elif name == "noisy-or" or (kind == "noisy-or" and re.fullmatch(r"[1-9]\d?(\.\d+)?", number)):
        score = partial(baselines.noisy_or, power=float(number or 1))
    else:
        want = "success, best-proof, greedy, exists@H, max-confidence, noisy-or or noisy-or@P"
        raise ValueError(f"score {name!r}: want {want}, P from 1 to 99")
    if height == 1 and (known := task.derivability_index) is not None:
        return lambda atoms: score(
            kb, derivability.iter_indexed_derivations(known, sizes, atoms, joins.MAX_CHUNK_ROWS), len(atoms)
        )
    return lambda atoms: score(kb, baselines.iter_derivations(kb, sizes, model, height, atoms), len(atoms))


def search_config(
    task: ProverTask, cfg: Config, score: ScoreName, *, slots: int, beam: int, rows_per_step: int, chunk_size: int
) -> SearchConfig:
    """How a policy's scores are computed."""
    return SearchConfig(
        resolve=cfg.env.cfg.resolve,
        agent=cfg.agent,
        score=score,
        max_depth=task.cfg.max_depth,
        slots=slots,
        beam=1 if score == "greedy" else beam,
        rows_per_step=rows_per_step,
        chunk_size=chunk_size,
        refill=True,
    )
