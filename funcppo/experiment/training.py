"""A training run on disk: learn, validate, keep the best, stop and go on bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import atomic_io, data, random, train_step, tree
from funcppo.config import AdamConfig, Config, PPOConfig, Schedule
from funcppo.evaluation import ranking, scorers
from funcppo.evaluation import scorers as scores
from funcppo.evaluation.beam_search import ScoreName, SearchConfig, slots_for_rows
from funcppo.evaluation.ranking import RankingProtocol, ranked_sides, selection_metric, stratified_sample
from funcppo.evaluation.slot_scheduler import SchedulerState
from funcppo.experiment import checkpoint, metrics_log
from funcppo.experiment.capacity import with_capacity
from funcppo.experiment.config import CHECKPOINT_FILE, CONFIG_FILE, METRICS_FILE, RunConfig
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import ProverTask
from funcppo.runtime import compile as ladder
from funcppo.runtime.capture import CapturedStep, capture, with_capture
from funcppo.runtime.equivalence import BF16_TOLERANCE, DEFAULT_TOLERANCE
from funcppo.runtime.graphed import capture_loop_bodies
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState
from funcppo.types import F32, I64

if TYPE_CHECKING:  # it imports Dynamo, which judging a run does without
    from funcppo.runtime.monitor import Monitor

MAX_VALIDATION_SUCCESSORS = 3e7  # successors that a validation by `success` may have to look at, by a rough count
# Rollout steps and minibatches from which a run is long: compiling takes a minute or two, and saves 1.5 ms on each on a
# GPU, 8 on a CPU.
COMPILE_MIN_CALLS = 40_000


class RunState(NamedTuple):
    """A checkpoint: where training stands, and the params that ranked valid best so far."""

    train_state: TrainState
    best_params: Any  # params
    best_valid_metric: F32[Tensor, ""]  # their MRR (Countries: AUC-PR) on the valid queries
    best_update: I64[Tensor, ""]  # 0: before the first update


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run ready to go on; a value of the host."""

    run_config: RunConfig
    task: ProverTask
    cfg: Config
    score: ScoreName
    state: RunState
    notes: tuple[str, ...]
    evaluate_step: Callable[..., SchedulerState]  # as it runs on the run's device


def prepare_run(run_config: RunConfig, folder: Path, *, resume: bool) -> Run:
    """The run that `run` describes, at its start or where the checkpoint in `folder` left it.

    Errors: ValueError for bad data or settings, or a checkpoint of something else.
    """
    ready = prover_task.build_task(
        data.load(run_config.dataset, run_config.rules), run_config.prover, run_config.device
    )
    n_updates = math.ceil(run_config.steps / (run_config.ppo.n_envs * run_config.ppo.n_steps))
    products = torch.bfloat16 if run_config.precision == "bfloat16" else None
    cfg = prover_task.build_config(ready, dataclasses.replace(run_config.ppo, n_updates=n_updates), products)
    state = train_step.init(cfg, prover_task.training_world(ready), random.key(run_config.seed, run_config.device))
    zero = torch.zeros((), dtype=torch.int64, device=run_config.device)
    saved = RunState(
        train_state=state, best_params=state.params, best_valid_metric=zero.float() - 1.0, best_update=zero
    )
    made = partial(
        Run,
        run_config=run_config,
        task=ready,
        cfg=cfg,
        notes=ready.notes,
        evaluate_step=scores.make_search_step(run_config.device),
    )
    if resume:
        saved, meta = checkpoint.restore(folder / CHECKPOINT_FILE, saved, ready.dataset.fingerprint)
        return made(score=meta["score"], state=saved)
    draft = made(score="best-proof", state=saved)
    score, notes = _choose_score(draft)
    return dataclasses.replace(draft, score=score, notes=(*ready.notes, *notes))


def open_run(folder: Path, device: str = "cpu") -> Run:
    """The run in a folder, to be judged or gone on with.

    Errors: ValueError when it is none, or its data set has changed since.
    """
    return prepare_run(dataclasses.replace(read_config(folder), device=device), folder, resume=True)


class DivergenceError(ValueError):
    """A run whose loss or gradient stays infinite or not a number."""


def prepare_train_step(run: Run) -> tuple[CapturedStep[TrainState, Metrics], str]:
    """The training step as this run wants it, from where the run stands, and a line that tells which and why.

    Errors: what a strategy that was asked for by name raises.
    """
    wanted, world = run.run_config.strategy, prover_task.training_world(run.task)
    short = wanted == "auto" and _calls(run.cfg.ppo) < COMPILE_MIN_CALLS
    chosen = "eager" if short else wanted
    cfg, state = with_capacity(run.cfg, world, _first_state(run)), run.state.train_state
    parity = BF16_TOLERANCE if run.run_config.precision == "bfloat16" else DEFAULT_TOLERANCE
    parts, record = ladder.select_strategy(train_step.collect, EAGER_PARTS, cfg, world, state, chosen, tolerance=parity)
    step = partial(train_step.train_step, cfg, world)
    turns = short and run.run_config.device != "cpu"  # to record all kernels of an uncompiled iteration takes seconds
    captured = capture_loop_bodies(step, parts, state) if turns else capture(partial(step, parts=parts), state)
    record = with_capture(record, captured)
    failed = "; ".join(f"not {f.name}: {f.error_type}: {f.message}" for f in record.failures)
    line = f"strategy {record.strategy} on {record.device}, replayed by: {record.replay_mode}"
    line += "; compiling would take longer than it saves (--strategy one-graph compiles)" if short else ""
    return captured, line + (f" ({failed})" if failed else "")


def _calls(ppo: PPOConfig) -> int:
    """Rollout steps, and parts of minibatches, of a whole run."""
    return ppo.n_updates * (ppo.n_steps + ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches)


def train(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    should_stop: Callable[[], bool],
    monitor: Monitor,
) -> Iterator[tuple[Run, dict[str, float]]]:
    """The run after each update and what the update showed; files are kept up to date at every validation and stop.

    The run's state is the step's buffers: the next update overwrites it.

    Args:
      stop: asked after each update whether to save and end here.
    Errors: Diverged after `patience` updates in a row that met a number that is not finite; none of them is saved.
    """
    n_updates = run.cfg.ppo.n_updates
    every, bad = max(1, n_updates // run.run_config.n_validations), 0
    if int(run.state.train_state.update) == 0:
        run = validate(run)
        save_checkpoint(run, folder)
    metrics_log.truncate(folder / METRICS_FILE, int(run.state.train_state.update))
    run = dataclasses.replace(run, state=run.state._replace(train_state=captured.state))
    while (update := int(run.state.train_state.update)) < n_updates:
        start = time.perf_counter()
        with monitor.timer("replay"):
            metrics = captured.step()
        numbers, row = metrics_log.to_scalars(metrics), {}
        seconds, stopping = time.perf_counter() - start, should_stop()
        bad = bad + 1 if numbers["n_nonfinite_minibatches"] else 0
        if not bad and ((update + 1) % every == 0 or update + 1 == n_updates):
            run = validate(run)
            row = {"best_valid": float(run.state.best_valid_metric), "best_update": int(run.state.best_update)}
            row |= monitor.report()
        metrics_log.append(folder / METRICS_FILE, {"update": update + 1, "seconds": seconds} | numbers | row)
        if not bad and (row or stopping):
            save_checkpoint(run, folder)
        yield run, numbers
        if bad >= run.run_config.max_nonfinite_updates:
            raise DivergenceError(_diverged(folder, update + 1, bad))
        if stopping:
            return


def validate(run: Run) -> Run:
    """The run with its params kept as the best, if they rank the valid queries better than any before."""
    saved = run.state
    if not len(run.task.dataset.valid):
        kept = saved._replace(best_params=_kept(saved.train_state.params), best_update=saved.train_state.update.clone())
        return dataclasses.replace(run, state=kept)
    quality = evaluate_policy(
        run, saved.train_state.params, validation_queries(run), RankingProtocol(sides=ranked_sides(run.task))
    )
    value = quality[selection_metric(run.task)]
    if value <= float(saved.best_valid_metric):
        return run
    best = saved._replace(
        best_params=_kept(saved.train_state.params),
        best_valid_metric=torch.full_like(saved.best_valid_metric, value),
        best_update=saved.train_state.update.clone(),
    )
    return dataclasses.replace(run, state=best)


def _kept(params: Any) -> Any:
    return tree.map(torch.clone, params)  # the state's own leaves are overwritten by the next update


def evaluate_policy(
    run: Run, params: Any, split: np.ndarray, ranking_protocol: RankingProtocol, score: ScoreName | None = None
) -> dict[str, Any]:
    """The ranking quality of a policy on a split."""
    scorer = run_policy_scorer(run, params, score or run.score)
    ranked = ranking.rank_split(run.task, split, scorer, ranking_protocol)
    return ranking.summarise_ranking(ranked, list(run.task.dataset.predicates), with_auc=run.task.is_countries)


def initial_params(run: Run) -> Any:
    """The params that the run started from."""
    return _first_state(run).params


def _first_state(run: Run) -> TrainState:
    return train_step.init(
        run.cfg, prover_task.training_world(run.task), random.key(run.run_config.seed, run.run_config.device)
    )


def run_policy_scorer(run: Run, params: Any, score: ScoreName) -> ranking.Scorer:
    """How the policy scores candidates, with slots and beam that fit the search."""
    return scores.make_policy_scorer(run_search_config(run, score), run.task, params, run.evaluate_step)


def run_search_config(run: Run, score: ScoreName) -> SearchConfig:
    """The settings of a search for scores, before `fitting` has looked at what this machine is fastest at."""
    width = run.cfg.env.cfg.resolve.max_successors
    beam = 1 if score == "greedy" else 64
    rows = max(beam, min(512, 4096 // width) * (16 if run.run_config.device == "cuda" else 1))
    slots = slots_for_rows(rows, beam)
    return scorers.search_config(run.task, run.cfg, score, slots=slots, beam=beam, rows_per_step=rows, chunk_size=2048)


def validation_queries(run: Run) -> np.ndarray:
    """The valid queries that training looks at, always the same ones."""
    valid = run.task.dataset.valid
    return valid[stratified_sample(valid, run.run_config.n_validation_queries)]


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the checkpoint."""
    meta = {"fingerprint": run.task.dataset.fingerprint, "score": run.score}
    checkpoint.save(folder / CHECKPOINT_FILE, run.state, meta)


def write_config(run_config: RunConfig, folder: Path) -> None:
    """Write `config.json`."""
    text = json.dumps(dataclasses.asdict(run_config), indent=2) + "\n"
    atomic_io.write_atomically(folder / CONFIG_FILE, lambda file: file.write(text.encode()))


def read_config(folder: Path) -> RunConfig:
    """What `write_config` wrote.

    Errors: ValueError when the folder holds no run, or a field is not known.
    """
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text())
        ppo, prover = raw.pop("ppo"), raw.pop("prover")
        schedules = {k: Schedule(**v) for k, v in ppo.items() if k.endswith("_schedule")}
        ppo = PPOConfig(**(ppo | schedules | {"adam": AdamConfig(**ppo["adam"])}))
        return RunConfig(**raw, ppo=ppo, prover=ProverTaskConfig(**prover))
    except FileNotFoundError:
        raise ValueError(f"{folder}: want a folder that `funcppo train` wrote, found no {CONFIG_FILE} in it") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: want the settings of a run: {error}") from None


def _choose_score(draft: Run) -> tuple[ScoreName, list[str]]:
    """The score that ranks valid better before any training, where looking at both is affordable."""
    if draft.run_config.score != "auto":
        return draft.run_config.score, []
    sample, how = validation_queries(draft), RankingProtocol(sides=ranked_sides(draft.task))
    if not len(sample):
        return "best-proof", ["score best-proof: there are no valid queries to choose by"]
    width = draft.cfg.env.cfg.resolve.max_successors
    n = len(
        ranking.rank_split(
            draft.task, sample, lambda atoms: torch.zeros(len(atoms), device=atoms.device), how
        ).scored_atom
    )
    cost = n * min(64, width) * width * 3 * draft.task.max_height
    if draft.task.fact_selection == "policy" and cost > MAX_VALIDATION_SUCCESSORS:
        return "best-proof", [f"score best-proof: success would look at about {cost:.0e} successors a validation"]
    names: tuple[ScoreName, ...] = ("success", "best-proof")  # of equal ones the first
    mrr = {name: evaluate_policy(draft, draft.state.best_params, sample, how, name)["mrr"] for name in names}
    chosen = max(names, key=lambda name: mrr[name])
    return chosen, [f"score {chosen} chosen: MRR on valid " + ", ".join(f"{v:.4f} by {k}" for k, v in mrr.items())]


def _diverged(folder: Path, update: int, bad: int) -> str:
    saved, _ = checkpoint.read(folder / CHECKPOINT_FILE)
    return (
        f"{folder}: loss or gradient not finite in each of the {bad} updates up to {update}; params moved in none of "
        f"them, and {CHECKPOINT_FILE} holds update {int(saved['train_state.update'])}: want other settings"
    )
