"""Learning the score of candidates from question episodes: the questions, the listwise fit, and PPO.

`collect_questions` lists the evidence of training questions within bounds, and may make the first epoch of the listwise
fit meanwhile; `fit_listwise` yields the params after each epoch of the fit that PPO starts from, and `refine_with_ppo`
those after each update of PPO.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import I64
from funcppo.kg.logic import firing_chunks, triple_index
from funcppo.kg.logic.firing_chunks import FiringWork
from funcppo.kg.logic.question_types import select_questions
from funcppo.kg.run import listwise_steps
from funcppo.kg.run.config import Note
from funcppo.kg.run.listwise_steps import FirstEpoch, FirstEpochSetup, FitState
from funcppo.kg.scores import aggregation, evidence, questions
from funcppo.kg.scores.aggregation import AggregationConfig
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.question_config import (
    LISTING_SECONDS,
    MAX_FIRINGS,
    ListwiseConfig,
    QuestionConfig,
    batch_size,
)
from funcppo.kg.scores.questions import Params, PolicyConfig, QuestionWorld
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# Questions of similar size share a batch; they are sorted within this many batches.
SORTED_BATCHES = 8
# links that take the memory of a firing
LINKS_PER_FIRING = 4
# questions whose candidates are scored at once before PPO starts
PRIOR_QUESTIONS = 1024


class TrainingQuestions(NamedTuple):
    """The questions to learn from."""

    world: QuestionWorld
    policy: PolicyConfig
    n_questions: int  # that were asked, those without a derived answer included
    notes: tuple[Note, ...]  # which questions were left out
    # the listwise fit after its first epoch; None where it was not asked for, or there are fewer than a batch
    first_epoch: FitState | None = None


class _ListedQuestions(NamedTuple):
    """The evidence of questions."""

    evidence: Evidence
    n_questions: int
    stopped_by: str  # the bound that ended the list; empty if none did
    first_epoch: FirstEpoch | None


def collect_questions(
    task: ProverTask,
    facts: FactIndex,
    cfg: QuestionConfig,
    seed: int,
    *,
    uses_degrees: bool,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
    first_epoch: FirstEpochSetup | None = None,
) -> TrainingQuestions:
    """List the evidence of training questions: those of a sample of the facts, each without its own.

    The same number of questions gives the same evidence and the same first epoch, whatever the seconds.

    Args:
      task: of height 1.
      facts: of its knowledge base.
      cfg: `left_out` must not be open.
      seed: of what is drawn.
      uses_degrees: weigh degrees.
      on_phase: receives the number of questions that are listed, and of all.
      deadline: ends the list as the seconds of `cfg` do, which do not count gradient steps.
      first_epoch: of the listwise fit, whose steps are taken while questions are listed; None for none.

    Returns:
      The questions whose answer is derived without its own fact.

    Raises:
      ValueError: there are none.
    """
    known = evidence.binary_facts(task.kb)  # nothing of valid or test
    asked = evidence.training_questions(known)
    n_all = len(asked.entity)
    key = random.key(seed, asked.entity.device)
    order = random.permutation(key, n_all)[: cfg.max_questions]
    if not n_all:
        raise ValueError("there is no fact of two arguments to ask about")

    assert cfg.left_out != "auto", "what is left out is chosen before"
    work = FiringWork(leaves_out=True)
    asked = select_questions(asked, order)
    parts = evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        asked,
        triple_index.build_triple_index(known, task.sizes.n_constants),
        EvidenceConfig(
            left_out=cfg.left_out,
            object_identity=task.least_model.object_identity,
            n_best=cfg.n_best,
            n_sampled=cfg.n_sampled,
            seed=seed,
        ),
        work,
    )
    world = aggregation.make_world(task.kb, task.sizes, facts)
    listed = _list_within_bounds(
        parts, work, cfg, len(order), deadline, on_phase, first_epoch
    )
    n_derived = len(listwise_steps.derived_questions(listed.evidence))
    if not n_derived:
        raise ValueError("no rule derives a known fact from the others")
    rows, most, n_left_out = listwise_steps.fitting_questions(
        listed.evidence, cfg.max_size_quantile
    )
    n_join_rows = firing_chunks.max_join_rows(facts.plan, asked)
    note = _describe_listing(
        listed, n_all, n_derived, work.n_left_out, n_join_rows
    )
    if n_left_out:
        note += f"; {n_left_out:,} of these have more than {most:,} firings and were left out"
    epoch = listed.first_epoch
    return TrainingQuestions(
        world=QuestionWorld(
            world,
            listed.evidence,
            rows,
            torch.zeros_like(listed.evidence.base_score),
        ),
        policy=PolicyConfig(
            aggregation=AggregationConfig(
                sizes=task.sizes,
                n_shapes=aggregation.n_shapes(world),
                uses_links=cfg.links,
                uses_degrees=uses_degrees,
            ),
            capacity=aggregation.capacity(listed.evidence, rows),
        ),
        n_questions=listed.n_questions,
        notes=(
            Note("cut" if listed.stopped_by else "detail", note),
            *_describe_first_epoch(epoch),
        ),
        first_epoch=epoch and epoch.fit,
    )


def _describe_listing(
    listed: _ListedQuestions,
    n_all: int,
    n_derived: int,
    n_too_large: int,
    n_join_rows: int,
) -> str:
    """How many of all questions were asked, and how many answers are derived.

    Args:
      n_join_rows: that a question which was left out exceeds.
    """
    stopped = f" ({listed.stopped_by})" if listed.stopped_by else ""
    note = f"{listed.n_questions:,} of {n_all:,} questions asked{stopped}"
    if n_too_large:
        note += (
            f", of which {n_too_large:,} were left out, because each takes more than "
            f"{n_join_rows:,} rows of joins"
        )
    return f"{note}; the rules derive the answers of {n_derived:,} without their own fact"


def _describe_first_epoch(epoch: FirstEpoch | None) -> list[Note]:
    """A note on the first epoch of the fit, where it was made while questions were listed."""
    if epoch is None:
        return []
    note = (
        f"listwise fit: its first epoch was made while questions were listed, {epoch.fit.n_steps:,} gradient steps on "
        f"{epoch.n_questions:,} of them"
    )
    return [Note("detail", note)]


def _list_within_bounds(
    parts: Iterator[Evidence],
    work: FiringWork,
    cfg: QuestionConfig,
    n_all: int,
    deadline: Deadline,
    on_phase: PhaseCallback,
    first_epoch: FirstEpochSetup | None,
) -> _ListedQuestions:
    """The parts up to the last one within the bounds, which the number of questions replaces where it is set.

    Args:
      parts: none is listed yet.
      work: of the parts; its deadline is set.
      first_epoch: its steps are taken between parts, and their time does not count; None for none.
    """
    listed: list[Evidence] = []
    epoch = first_epoch and listwise_steps.begin(first_epoch)
    n_questions, n_firings, stopped_by = 0, 0, ""
    seconds = min(cfg.seconds or LISTING_SECONDS, deadline.seconds_left)
    max_firings = cfg.max_firings or MAX_FIRINGS
    if cfg.max_questions is None:
        work.deadline = deadline.at_most(seconds)
    show = partial(_show_listing, on_phase, total=n_all)
    show(0, deadline=work.deadline)

    for part in parts:
        listed.append(part)
        n_questions += len(part.label)
        n_firings += len(part.rule) + len(part.link_label) // LINKS_PER_FIRING
        if first_epoch is not None and epoch is not None:
            epoch = _learn_part(first_epoch, epoch, part, work, deadline)
        show(n_questions, deadline=work.deadline)
        if cfg.max_questions is not None or n_questions == n_all:
            continue
        if work.deadline.is_over:
            stopped_by = f"within {seconds:.3g} seconds"
            break
        if n_firings > max_firings:
            stopped_by = f"with more than {max_firings:,} firings, four links counted as one"
            break

    return _ListedQuestions(
        evidence.concatenate(listed),
        n_questions,
        stopped_by,
        first_epoch and epoch and listwise_steps.finish(first_epoch, epoch),
    )


def _learn_part(
    cfg: FirstEpochSetup,
    epoch: FirstEpoch,
    part: Evidence,
    work: FiringWork,
    latest: Deadline,
) -> FirstEpoch:
    """The first epoch after the steps that a listed part allows.

    Args:
      work: its deadline, if it has one, is put off by the time of the steps.
      latest: the deadline is not put off beyond.
    """
    deadline = work.deadline
    began = deadline.clock()
    epoch = listwise_steps.learn(cfg, epoch, part)
    if not math.isinf(deadline.at):
        later = deadline.at + deadline.clock() - began
        work.deadline = replace(deadline, at=min(later, latest.at))
    return epoch


def _show_listing(
    on_phase: PhaseCallback, done: int, *, total: int, deadline: Deadline
) -> None:
    """Show how many questions are listed."""
    text = "listing evidence of training questions"
    on_phase(text, done, total, deadline)


def with_prior(
    policy: PolicyConfig, world: QuestionWorld, params: Params
) -> QuestionWorld:
    """The world with the scores of given weights as the policy that PPO starts from."""
    scores = [world.prior_score[:0]]
    for start in range(0, len(world.evidence.label), PRIOR_QUESTIONS):
        part = evidence.slice_questions(
            world.evidence, start, start + PRIOR_QUESTIONS
        )
        batch = aggregation.whole(part)
        scores.append(
            aggregation.score(
                policy.aggregation, world.aggregation, params.score, batch
            )
        )
    return world._replace(prior_score=torch.cat(scores))


def fit_listwise(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    cfg: ListwiseConfig,
    seed: int,
    deadline: Deadline = NO_DEADLINE,
    first_epoch: FitState | None = None,
) -> Iterator[Params]:
    """Yield the params after each epoch of steps down the listwise loss.

    Args:
      seed: of the order of the questions.
      deadline: ends the epoch in progress, the last one then.
      first_epoch: the fit after its first epoch if that is made, which started from the params.
    """
    size = batch_size(cfg, len(world.question))
    n_batches = max(1, len(world.question) // size)
    epochs = range(cfg.n_epochs)
    fit = listwise_steps.init_fit(params)
    if first_epoch is not None:
        fit, epochs = first_epoch, epochs[1:]
        yield fit.params
        if deadline.is_over:
            return

    n_steps = fit.n_steps + len(epochs) * n_batches
    for epoch in epochs:
        key = random.fold_in(random.key(seed, world.question.device), epoch)
        for question in _batches(world, key, size):
            rate = cfg.learning_rate * (1.0 - fit.n_steps / n_steps)
            fit = listwise_steps.take_step(
                policy, world, fit, cfg, question, rate
            )
            if deadline.is_over:
                break
        yield fit.params
        if deadline.is_over:
            return


def _batches(
    world: QuestionWorld, key: I64[Tensor, "2"], size: int
) -> Iterator[I64[Tensor, "B"]]:
    """Yield the questions in random order; those of similar size together, and no incomplete batch beside others."""
    order = random.permutation(key, len(world.question))
    rows = world.question[order]
    rows = rows[: max(1, len(rows) // size) * size]
    for group in rows.split(SORTED_BATCHES * size):
        _, n_firings, _ = aggregation.question_sizes(world.evidence, group)
        yield from group[torch.argsort(n_firings, stable=True)].split(size)


def refine_with_ppo(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    ppo: PPOConfig,
    seed: int,
) -> Iterator[tuple[Params, train_step.Metrics]]:
    """Yield the params and the metrics after each update of PPO, from given params on."""
    cfg = learner_config(policy, ppo)
    key = random.key(seed, world.question.device)
    world = with_prior(policy, world, params)
    state = train_step.init(cfg, world, key)._replace(params=params)
    for _ in range(ppo.n_updates):
        state, metrics = train_step.train_step(cfg, world, state)
        yield state.params, metrics


def learner_config(policy: PolicyConfig, ppo: PPOConfig) -> Config:
    """PPO on questions."""
    return Config(
        ppo=ppo,
        env=questions.environment(policy.capacity),
        agent=questions.agent(policy),
    )
