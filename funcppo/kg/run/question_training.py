"""Learning the score of candidates from question episodes: the questions, the listwise fit, and PPO.

`collect_questions` lists the evidence of training questions within bounds, `fit_listwise` yields the params after each
epoch of the fit that PPO starts from, and `refine_with_ppo` yields those after each update of PPO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from funcppo import optim, train_step
from funcppo.config import AdamConfig, Config, PPOConfig
from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import Size, UnitInterval
from funcppo.core.types import I64
from funcppo.kg.logic import firing_chunks, triple_index
from funcppo.kg.logic.firing_chunks import FiringWork
from funcppo.kg.logic.question_types import select_questions
from funcppo.kg.run import budget
from funcppo.kg.run.config import Note
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
from funcppo.optim import AdamState

# Questions of similar size share a batch; they are sorted within this many batches.
SORTED_BATCHES = 8
# batches of a group of the first epoch, after its first batch, whose questions are sorted by size
GROUP_BATCHES = 4
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


class _ListedQuestions(NamedTuple):
    """The evidence of questions."""

    evidence: Evidence
    n_questions: int
    stopped_by: str  # the bound that ended the list; empty if none did


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstEpoch:
    """Settings of the first epoch of a listwise fit, which takes questions in the order of their list."""

    batch_size: Size
    """Number of questions of a gradient step."""
    max_size_quantile: UnitInterval
    """Questions with more firings than this share of their group are left out."""


class FitState(NamedTuple):
    """Weights in the middle of a listwise fit."""

    params: Params
    adam: AdamState[Params]
    n_steps: int  # so far


def collect_questions(
    task: ProverTask,
    facts: FactIndex,
    cfg: QuestionConfig,
    seed: int,
    *,
    uses_degrees: bool,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> TrainingQuestions:
    """List the evidence of training questions: those of a sample of the facts, each without its own.

    The same number of questions gives the same evidence, whatever the seconds.

    Args:
      task: of height 1.
      facts: of its knowledge base.
      cfg: `left_out` must not be open.
      seed: of what is drawn.
      uses_degrees: weigh degrees.
      on_phase: receives the number of questions that are listed, and of all.
      deadline: ends the list as the seconds of `cfg` do.

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
        parts, work, cfg, len(order), deadline, on_phase
    )
    n_derived = len(derived_questions(listed.evidence))
    if not n_derived:
        raise ValueError("no rule derives a known fact from the others")
    rows, most, n_left_out = fitting_questions(
        listed.evidence, cfg.max_size_quantile
    )
    n_join_rows = firing_chunks.max_join_rows(facts.plan, asked)
    note = _describe_listing(
        listed, n_all, n_derived, work.n_left_out, n_join_rows
    )
    if n_left_out:
        note += f"; {n_left_out:,} of these have more than {most:,} firings and were left out"
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
        notes=(Note("cut" if listed.stopped_by else "detail", note),),
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


def _list_within_bounds(
    parts: Iterator[Evidence],
    work: FiringWork,
    cfg: QuestionConfig,
    n_all: int,
    deadline: Deadline,
    on_phase: PhaseCallback,
) -> _ListedQuestions:
    """The parts up to the last one within the bounds, which the number of questions replaces where it is set.

    Args:
      parts: none is listed yet.
      work: of the parts; its deadline is set.
    """
    listed: list[Evidence] = []
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
        evidence.concatenate(listed), n_questions, stopped_by
    )


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
    first_epoch: FirstEpoch | None = None,
) -> Iterator[Params]:
    """Yield the params after each epoch of steps down the listwise loss.

    Args:
      seed: of the order of the questions.
      deadline: ends the epoch in progress, the last one then.
      first_epoch: settings of an epoch in the order of the list, which takes the place of the first one if there is a
        batch of questions; None for an epoch as the later ones.
    """
    size = batch_size(cfg, len(world.question))
    n_batches = max(1, len(world.question) // size)
    epochs = range(cfg.n_epochs)
    fit = init_fit(params)
    if first_epoch is not None:
        fit = _fit_in_listed_order(
            policy, world, fit, cfg, first_epoch, deadline
        )
    if fit.n_steps:
        epochs = epochs[1:]
        yield fit.params
        if deadline.is_over:
            return

    n_steps = fit.n_steps + len(epochs) * n_batches
    for epoch in epochs:
        key = random.fold_in(random.key(seed, world.question.device), epoch)
        for question in _batches(world, key, size):
            rate = cfg.learning_rate * (1.0 - fit.n_steps / n_steps)
            fit = take_step(policy, world, fit, cfg, question, rate)
            if deadline.is_over:
                break
        yield fit.params
        if deadline.is_over:
            return


def init_fit(params: Params) -> FitState:
    """The state of a fit before its first step."""
    return FitState(params, optim.init(params), 0)


def take_step(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
    rate: float,
) -> FitState:
    """The fit after one step of Adam on some questions."""
    gradient = batch_gradient(policy, world, fit.params, cfg, question)
    params, adam = optim.update(
        AdamConfig(), gradient, fit.adam, fit.params, rate
    )
    return FitState(params, adam, fit.n_steps + 1)


def batch_gradient(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
) -> Params:
    """The gradient of the listwise loss of some questions, computed in parts where they do not fit together."""
    size = aggregation.capacity(world.evidence, question)
    per_question = budget.batch_firings(1, size)
    n_together = max(1, cfg.max_batch_firings // per_question)

    total: Params | None = None
    for part in question.split(n_together):
        gradient = grad(questions.listwise_loss, argnums=3)(
            replace(policy, capacity=size), world, cfg.penalty, params, part
        )
        if len(part) == len(question):
            return gradient
        share = len(part) / len(question)
        weighted = tree.map(lambda x: share * x, gradient)  # noqa: B023
        total = (
            weighted if total is None else tree.map(torch.add, total, weighted)
        )
    assert total is not None, "there are questions"
    return total


def fitting_questions(
    listed: Evidence, quantile: float
) -> tuple[I64[Tensor, "n"], int, int]:
    """The questions whose answer is derived and whose firings are no more than some quantile of theirs.

    Returns:
      Their rows; the quantile, in firings; and the number of larger ones.
    """
    rows = derived_questions(listed)
    _, n_firings, _ = aggregation.question_sizes(listed, rows)
    most = torch.quantile(n_firings.double(), quantile)
    fits = n_firings <= most
    return rows[fits], int(most), int((~fits).sum())


def derived_questions(listed: Evidence) -> I64[Tensor, "n"]:
    """The rows of the questions whose answer is derived."""
    return (listed.answer >= 0).nonzero().squeeze(1)


def _fit_in_listed_order(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    first_epoch: FirstEpoch,
    deadline: Deadline,
) -> FitState:
    """The fit after an epoch over the questions in the order of their list, at the full learning rate.

    The first gradient step is on one batch, the others are on groups of batches. An incomplete last batch is part of
    the last group; fewer questions than a batch make no step.

    Args:
      deadline: ends the epoch after a group.
    """
    listed = world.evidence
    row = derived_questions(listed)
    size = first_epoch.batch_size
    n_done, start = 0, 0
    while len(row) - n_done >= size:
        # The last group has fewer batches.
        n_batches = GROUP_BATCHES if n_done else 1
        n_batches = min(n_batches, (len(row) - n_done) // size)
        n_next = n_done + n_batches * size
        if n_done and n_batches < GROUP_BATCHES:
            n_next = len(row)
        stop = int(row[n_next - 1]) + 1
        group = evidence.slice_questions(listed, start, stop)
        fit = _fit_group(
            policy, world, fit, cfg, first_epoch, group, n_next, n_batches
        )
        n_done, start = n_next, stop
        if deadline.is_over:
            break
    return fit


def _fit_group(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    first_epoch: FirstEpoch,
    group: Evidence,
    n_questions: int,
    n_batches: int,
) -> FitState:
    """The fit after a step on each batch of a group, questions of similar size together.

    Args:
      n_questions: of this group and those before.
    """
    rows, _, _ = fitting_questions(group, first_epoch.max_size_quantile)
    group_world = world._replace(
        evidence=group,
        question=rows,
        prior_score=torch.zeros_like(group.base_score),
    )

    # The prior of the weights counts once for all questions so far, not once for each group.
    penalty = cfg.penalty
    deviation = penalty.feature_deviation * (n_questions / len(rows)) ** 0.5
    cfg = replace(cfg, penalty=replace(penalty, feature_deviation=deviation))

    _, n_firings, _ = aggregation.question_sizes(group, rows)
    by_size = rows[torch.argsort(n_firings, stable=True)]
    for question in by_size.tensor_split(n_batches):
        fit = take_step(
            policy, group_world, fit, cfg, question, cfg.learning_rate
        )
    return fit


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
