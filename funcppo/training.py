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

from funcppo import checkpoint, data, journal, problem, protocol, queries, random, train_step, tree
from funcppo import scoring as scores
from funcppo.beam import EvalConfig, Score, slots_for
from funcppo.config import AdamConfig, Config, PPOConfig, ProverSettings, RunConfig, Schedule
from funcppo.evaluate import Evaluation
from funcppo.packing import packed
from funcppo.problem import Problem
from funcppo.protocol import Protocol
from funcppo.runtime import compile as ladder
from funcppo.runtime.capture import Captured, capture, recorded
from funcppo.runtime.parity import PARITY, ROUNDED
from funcppo.runtime.replay import capture_turns
from funcppo.train_step import EAGER, Metrics, TrainState
from funcppo.types import F32, I64

if TYPE_CHECKING:  # it imports Dynamo, which judging a run does without
    from funcppo.runtime.monitor import Monitor

CONFIG, CHECKPOINT, METRICS, RESULTS = "config.json", "checkpoint.npz", "metrics.jsonl", "results.json"
COSTLY = 3e7  # successors that a validation by `success` may have to look at, by a rough count
# Rollout steps and minibatches from which a run is long: compiling takes a minute or two, and saves 1.5 ms on each on a
# GPU, 8 on a CPU.
LONG = 40_000


class Saved(NamedTuple):
    """A checkpoint: where training stands, and the params that ranked valid best so far."""

    state: TrainState
    best: Any  # params
    best_valid: F32[Tensor, ""]  # their MRR (Countries: AUC-PR) on the valid queries
    best_update: I64[Tensor, ""]  # 0: before the first update


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run ready to go on; a value of the host."""

    run: RunConfig
    problem: Problem
    cfg: Config
    score: Score
    saved: Saved
    notes: tuple[str, ...]
    evaluate_step: Callable[..., Evaluation]  # as it runs on the run's device


def prepare(run: RunConfig, folder: Path, *, resume: bool) -> Run:
    """The run that `run` describes, at its start or where the checkpoint in `folder` left it.

    Errors: ValueError for bad data or settings, or a checkpoint of something else.
    """
    ready = problem.build(data.load(run.dataset, run.rules), run.prover, run.device)
    n_updates = math.ceil(run.steps / (run.ppo.n_envs * run.ppo.n_steps))
    products = torch.bfloat16 if run.precision == "bfloat16" else None
    cfg = problem.config(ready, dataclasses.replace(run.ppo, n_updates=n_updates), products)
    state = train_step.init(cfg, problem.world(ready), random.key(run.seed, run.device))
    zero = torch.zeros((), dtype=torch.int64, device=run.device)
    saved = Saved(state=state, best=state.params, best_valid=zero.float() - 1.0, best_update=zero)
    made = partial(Run, run=run, problem=ready, cfg=cfg, notes=ready.notes, evaluate_step=scores.stepping(run.device))
    if resume:
        saved, meta = checkpoint.restore(folder / CHECKPOINT, saved, ready.dataset.fingerprint)
        return made(score=meta["score"], saved=saved)
    draft = made(score="best-proof", saved=saved)
    score, notes = _choose_score(draft)
    return dataclasses.replace(draft, score=score, notes=(*ready.notes, *notes))


def open_run(folder: Path, device: str = "cpu") -> Run:
    """The run in a folder, to be judged or gone on with.

    Errors: ValueError when it is none, or its data set has changed since.
    """
    return prepare(dataclasses.replace(read_config(folder), device=device), folder, resume=True)


class Diverged(ValueError):
    """A run whose loss or gradient stays infinite or not a number."""


def strategy(run: Run) -> tuple[Captured[TrainState, Metrics], str]:
    """The training step as this run wants it, from where the run stands, and a line that tells which and why.

    Errors: what a strategy that was asked for by name raises.
    """
    wanted, world = run.run.strategy, problem.world(run.problem)
    short = wanted == "auto" and _calls(run.cfg.ppo) < LONG
    chosen = "eager" if short else wanted
    cfg, state = packed(run.cfg, world, _first_state(run)), run.saved.state
    parity = ROUNDED if run.run.precision == "bfloat16" else PARITY
    parts, record = ladder.strategy(train_step.collect, EAGER, cfg, world, state, chosen, parity=parity)
    step = partial(train_step.train_step, cfg, world)
    turns = short and run.run.device != "cpu"  # to record all kernels of an uncompiled iteration takes seconds
    captured = capture_turns(step, parts, state) if turns else capture(partial(step, parts=parts), state)
    record = recorded(record, captured)
    failed = "; ".join(f"not {f.name}: {f.error}: {f.message}" for f in record.failures)
    line = f"strategy {record.rung} on {record.device}, replayed by: {record.replay}"
    line += "; compiling would take longer than it saves (--strategy one-graph compiles)" if short else ""
    return captured, line + (f" ({failed})" if failed else "")


def _calls(ppo: PPOConfig) -> int:
    """Rollout steps, and parts of minibatches, of a whole run."""
    return ppo.n_updates * (ppo.n_steps + ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches)


def learn(
    run: Run, folder: Path, captured: Captured[TrainState, Metrics], stop: Callable[[], bool], monitor: Monitor
) -> Iterator[tuple[Run, dict[str, float]]]:
    """The run after each update and what the update showed; files are kept up to date at every validation and stop.

    The run's state is the step's buffers: the next update overwrites it.

    Args:
      stop: asked after each update whether to save and end here.
    Errors: Diverged after `patience` updates in a row that met a number that is not finite; none of them is saved.
    """
    n_updates = run.cfg.ppo.n_updates
    every, bad = max(1, n_updates // run.run.validations), 0
    if int(run.saved.state.update) == 0:
        run = validate(run)
        save(run, folder)
    journal.truncate(folder / METRICS, int(run.saved.state.update))
    run = dataclasses.replace(run, saved=run.saved._replace(state=captured.state))
    while (update := int(run.saved.state.update)) < n_updates:
        start = time.perf_counter()
        with monitor.timed("replay"):
            metrics = captured.step()
        numbers, row = journal.shown(metrics), {}
        seconds, stopping = time.perf_counter() - start, stop()
        bad = bad + 1 if numbers["skipped"] else 0
        if not bad and ((update + 1) % every == 0 or update + 1 == n_updates):
            run = validate(run)
            row = {"best_valid": float(run.saved.best_valid), "best_update": int(run.saved.best_update)}
            row |= monitor.report()
        journal.append(folder / METRICS, {"update": update + 1, "seconds": seconds} | numbers | row)
        if not bad and (row or stopping):
            save(run, folder)
        yield run, numbers
        if bad >= run.run.patience:
            raise Diverged(_diverged(folder, update + 1, bad))
        if stopping:
            return


def validate(run: Run) -> Run:
    """The run with its params kept as the best, if they rank the valid queries better than any before."""
    saved = run.saved
    if not len(run.problem.dataset.valid):
        kept = saved._replace(best=_kept(saved.state.params), best_update=saved.state.update.clone())
        return dataclasses.replace(run, saved=kept)
    quality = judge(run, saved.state.params, valid_sample(run), Protocol(sides=sides(run.problem)))
    value = quality[selects(run.problem)]
    if value <= float(saved.best_valid):
        return run
    best = saved._replace(
        best=_kept(saved.state.params),
        best_valid=torch.full_like(saved.best_valid, value),
        best_update=saved.state.update.clone(),
    )
    return dataclasses.replace(run, saved=best)


def _kept(params: Any) -> Any:
    return tree.map(torch.clone, params)  # the state's own leaves are overwritten by the next update


def selects(ready: Problem) -> str:
    """The number by which params are chosen on valid."""
    return "auc_pr" if ready.regions else "mrr"


def judge(run: Run, params: Any, split: np.ndarray, how: Protocol, score: Score | None = None) -> dict[str, Any]:
    """The ranking quality of a policy on a split."""
    scorer = policy_scorer(run, params, score or run.score)
    ranked = problem.rank(run.problem, split, scorer, how)
    return protocol.summarise(ranked, list(run.problem.dataset.predicates), with_auc=run.problem.regions)


def untrained(run: Run) -> Any:
    """The params that the run started from."""
    return _first_state(run).params


def _first_state(run: Run) -> TrainState:
    return train_step.init(run.cfg, problem.world(run.problem), random.key(run.run.seed, run.run.device))


def policy_scorer(run: Run, params: Any, score: Score) -> protocol.Scorer:
    """How the policy scores candidates, with slots and beam that fit the search."""
    return scores.policy_scorer(scoring(run, score), run.problem, params, run.evaluate_step)


def scoring(run: Run, score: Score) -> EvalConfig:
    """The settings of a search for scores, before `fitting` has looked at what this machine is fastest at."""
    width = run.cfg.env.cfg.resolve.max_successors
    beam = 1 if score == "greedy" else 64
    rows = max(beam, min(512, 4096 // width) * (16 if run.run.device == "cuda" else 1))
    slots = slots_for(rows, beam)
    return problem.evaluation(run.problem, run.cfg, score, slots=slots, beam=beam, rows=rows, window=2048)


def sides(ready: Problem) -> tuple[int, ...]:
    """Both sides; of the Countries protocol the tail alone."""
    return (queries.TAIL,) if ready.regions else (queries.HEAD, queries.TAIL)


def valid_sample(run: Run) -> np.ndarray:
    """The valid queries that training looks at, always the same ones."""
    valid = run.problem.dataset.valid
    return valid[stratified(valid, run.run.valid_queries)]


def stratified(split: np.ndarray, n: int) -> np.ndarray:
    """Rows of at most `n` queries, as many of each relation as there are, ascending; always the same ones."""
    order = np.random.default_rng(0).permutation(len(split))
    place = np.zeros(len(split), dtype=np.int64)  # how many of its relation come before each
    for relation in np.unique(split[:, 0]):
        mine = order[split[order, 0] == relation]
        place[mine] = np.arange(len(mine))
    return np.sort(np.lexsort((order, place))[:n])


def save(run: Run, folder: Path) -> None:
    """Write the checkpoint."""
    meta = {"fingerprint": run.problem.dataset.fingerprint, "score": run.score}
    checkpoint.save(folder / CHECKPOINT, run.saved, meta)


def write_config(run: RunConfig, folder: Path) -> None:
    """Write `config.json`."""
    text = json.dumps(dataclasses.asdict(run), indent=2) + "\n"
    checkpoint.write_atomically(folder / CONFIG, lambda file: file.write(text.encode()))


def read_config(folder: Path) -> RunConfig:
    """What `write_config` wrote.

    Errors: ValueError when the folder holds no run, or a field is not known.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text())
        ppo, prover = raw.pop("ppo"), raw.pop("prover")
        schedules = {k: Schedule(**v) for k, v in ppo.items() if k.endswith("_schedule")}
        ppo = PPOConfig(**(ppo | schedules | {"adam": AdamConfig(**ppo["adam"])}))
        return RunConfig(**raw, ppo=ppo, prover=ProverSettings(**prover))
    except FileNotFoundError:
        raise ValueError(f"{folder}: want a folder that `funcppo train` wrote, found no {CONFIG} in it") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: want the settings of a run: {error}") from None


def _choose_score(draft: Run) -> tuple[Score, list[str]]:
    """The score that ranks valid better before any training, where looking at both is affordable."""
    if draft.run.score != "auto":
        return draft.run.score, []
    sample, how = valid_sample(draft), Protocol(sides=sides(draft.problem))
    if not len(sample):
        return "best-proof", ["score best-proof: there are no valid queries to choose by"]
    width = draft.cfg.env.cfg.resolve.max_successors
    n = len(problem.rank(draft.problem, sample, lambda atoms: torch.zeros(len(atoms), device=atoms.device), how).atom)
    cost = n * min(64, width) * width * 3 * draft.problem.max_height
    if draft.problem.facts == "chosen" and cost > COSTLY:
        return "best-proof", [f"score best-proof: success would look at about {cost:.0e} successors a validation"]
    names: tuple[Score, ...] = ("success", "best-proof")  # of equal ones the first
    mrr = {name: judge(draft, draft.saved.best, sample, how, name)["mrr"] for name in names}
    chosen = max(names, key=lambda name: mrr[name])
    return chosen, [f"score {chosen} chosen: MRR on valid " + ", ".join(f"{v:.4f} by {k}" for k, v in mrr.items())]


def _diverged(folder: Path, update: int, bad: int) -> str:
    saved, _ = checkpoint.read(folder / CHECKPOINT)
    return (
        f"{folder}: loss or gradient not finite in each of the {bad} updates up to {update}; params moved in none of "
        f"them, and {CHECKPOINT} holds update {int(saved['state.update'])}: want other settings"
    )
