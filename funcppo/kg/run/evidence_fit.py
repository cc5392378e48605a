"""Learning the score of candidates from questions: listing them, the listwise fit that PPO starts from, and PPO.

`collect` lists the evidence of training questions within bounds, and `fit_listwise` keeps the epoch that ranks valid
best; `with_...` and `weigh_network` add what a fit may weigh beside the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from funcppo import optim, train_step
from funcppo.config import AdamConfig, Config, PPOConfig
from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import I64
from funcppo.kg.logic import derive, triple_index
from funcppo.kg.logic.derive import GroundingWork, LeftOut, select_questions
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.run import budget
from funcppo.kg.run.choices import MIN_GAIN, best_above
from funcppo.kg.run.config import Note
from funcppo.kg.run.run import (
    MIN_GAIN_ERRORS,
    FirstEpoch,
    QuestionSetup,
    ValidQuality,
    is_better,
    question_world,
    reweigh,
    untrained_params,
)
from funcppo.kg.scores import aggregation, evidence, link_embedding, questions
from funcppo.kg.scores.aggregation import AggregationConfig
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.path_network import PathNetwork
from funcppo.kg.scores.question_config import (
    LISTING_SECONDS,
    MAX_FIRINGS,
    ListwiseConfig,
    QuestionConfig,
    batch_size,
)
from funcppo.kg.scores.questions import Params, PolicyConfig, QuestionWorld
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    ignore_phase,
)
from funcppo.optim import AdamState

# batches of a group of the first epoch, after its first batch, whose questions are sorted by size
GROUP_BATCHES = 4
# powers of the odds to start from, of which valid chooses
ODDS_POWERS = (1.0, 2.0, 3.0)
# questions that PPO asks beside a network, at most: each needs a pass through it
MAX_NETWORK_QUESTIONS = 16_384
# Of fewer queries the answers may happen to be unlinked, and others be lost at the last places.
MIN_LINKED_QUERIES = 100
DEFAULT_NETWORK_WEIGHT = 0.5


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
    work = GroundingWork(leaves_out=True)
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
    n_join_rows = derive.max_join_rows(facts.plan, asked)
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
    work: GroundingWork,
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
        # Four links take the memory of a firing.
        n_firings += len(part.rule) + len(part.link_label) // 4
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
    for start in range(0, len(world.evidence.label), 1024):
        part = evidence.slice_questions(world.evidence, start, start + 1024)
        batch = aggregation.whole(part)
        scores.append(
            aggregation.score(
                policy.aggregation, world.aggregation, params.score, batch
            )
        )
    return world._replace(prior_score=torch.cat(scores))


def iter_epochs(
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
    for group in rows.split(8 * size):  # sorted by size within eight batches
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


class Metric(Protocol):
    """Tells how well some weights rank valid."""

    def __call__(self, setup: QuestionSetup, params: Params, /) -> ValidQuality:
        """Rank the queries of a validation."""
        ...


class ListwiseFit(NamedTuple):
    """The listwise fit that ranks valid best."""

    setup: QuestionSetup
    params: Params
    quality: ValidQuality | None  # None where there is no valid split
    n_epochs: int  # that there was time for
    notes: list[Note]


class _Fit(NamedTuple):
    """A fit with some evidence, at its best epoch."""

    setup: QuestionSetup
    params: Params
    quality: ValidQuality
    epoch: int

    @property
    def metric(self) -> float:
        """Its metric on valid."""
        return self.quality.metric


# -- the fit


def resolve_left_out(task: ProverTask, cfg: QuestionConfig) -> QuestionConfig:
    """The settings with what a question leaves out: its pair where valid's pairs are never linked by a known fact."""
    if cfg.left_out != "auto":
        return cfg
    is_linked = share_of_linked(task, task.dataset.valid) > 0
    has_valid = len(task.dataset.valid) > 0
    left_out = "fact" if is_linked or not has_valid else "pair"
    return dataclasses.replace(cfg, left_out=left_out)


def share_of_linked(task: ProverTask, split: np.ndarray) -> float:
    """The share of queries whose two entities some known fact links; 0 without queries."""
    base = task.sizes.n_constants + 1
    facts = evidence.binary_facts(task.kb).cpu().numpy()
    keys = np.concatenate(
        [
            facts[:, HEAD] * base + facts[:, TAIL],
            facts[:, TAIL] * base + facts[:, HEAD],
        ]
    )
    pair = split[:, HEAD].astype(np.int64) * base + split[:, TAIL]
    return float(np.isin(pair, keys).mean()) if len(split) else 0.0


def collect(
    task: ProverTask,
    setup: QuestionSetup,
    cfg: QuestionConfig,
    seed: int,
    device: str,
    on_phase: PhaseCallback,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[QuestionSetup, TrainingQuestions]:
    """List the questions to learn from.

    Args:
      deadline: ends the list, unless the number of questions is set.

    Raises:
      ValueError: the rules derive no known fact from the others.
    """
    network = setup.facts.network
    collected = collect_questions(
        task,
        setup.facts._replace(network=None),
        cfg,
        seed,
        uses_degrees=setup.policy.aggregation.uses_degrees,
        on_phase=on_phase,
        deadline=deadline,
    )
    world = tree.map(lambda x: x.to(device), collected.world)
    if network is not None:
        assert cfg.left_out != "auto", "what is left out is chosen before"
        world = _sample_asked(world, seed)
        world = _add_network_priors(world, network, cfg.left_out, on_phase)
    policy = reweigh(
        collected.policy,
        uses_walks=setup.policy.aggregation.uses_walks,
        uses_embedding=setup.policy.aggregation.uses_embedding,
        uses_bellman_ford=setup.policy.aggregation.uses_bellman_ford,
        odds_power=setup.policy.aggregation.odds_power,
    )
    setup = dataclasses.replace(
        setup,
        world=world,
        policy=policy,
    )
    return setup, collected


def plan_first_epoch(
    task: ProverTask, listwise: ListwiseConfig, max_size_quantile: float
) -> FirstEpoch | None:
    """The first epoch of a listwise fit in the order of the list; None for a fit of one epoch.

    Its learning rate does not fall, as it must in a fit of one epoch.
    """
    if listwise.n_epochs == 1 or not listwise.learning_rate:
        return None
    n_questions = 2 * len(evidence.binary_facts(task.kb))
    return FirstEpoch(
        batch_size=batch_size(listwise, n_questions),
        max_size_quantile=max_size_quantile,
    )


def without_walks(setup: QuestionSetup) -> QuestionSetup:
    """The setup with neither walks in its evidence nor a policy that weighs them."""
    plan = dataclasses.replace(setup.facts.plan, with_walks=False)
    world = setup.world
    if world is not None:
        listed = evidence.without_walks(world.evidence)
        world = world._replace(evidence=listed)
    return dataclasses.replace(
        setup,
        facts=setup.facts._replace(plan=plan),
        policy=reweigh(setup.policy, uses_walks=False),
        world=world,
    )


def with_embedding(
    setup: QuestionSetup, embedding: link_embedding.Params, left_out: LeftOut
) -> QuestionSetup:
    """The evidence with priors by link embeddings, which the policy weighs.

    Args:
      left_out: what a training question leaves out.
    """
    world = setup.world
    if world is not None:
        listed = evidence.with_embedding_scores(
            world.evidence, embedding, left_out
        )
        world = world._replace(evidence=listed)
    return dataclasses.replace(
        setup,
        facts=setup.facts._replace(embedding=embedding),
        policy=reweigh(setup.policy, uses_embedding=True),
        world=world,
    )


def with_network(
    setup: QuestionSetup,
    network: PathNetwork,
    left_out: LeftOut,
    seed: int,
    on_phase: PhaseCallback = ignore_phase,
) -> QuestionSetup:
    """The evidence with priors by a Bellman-Ford network, which the policy weighs.

    Args:
      left_out: what a training question leaves out.
      seed: of the questions that are asked of many.
    """
    world = setup.world
    if world is not None:
        world = _sample_asked(world, seed)
        world = _add_network_priors(world, network, left_out, on_phase)
    return dataclasses.replace(
        setup,
        facts=setup.facts._replace(network=network),
        policy=reweigh(setup.policy, uses_bellman_ford=True),
        world=world,
    )


def n_asked(world: QuestionWorld) -> int:
    """How many questions are asked where each needs a prior by a network."""
    return min(len(world.question), MAX_NETWORK_QUESTIONS)


def _sample_asked(world: QuestionWorld, seed: int) -> QuestionWorld:
    """The world with as many questions to ask as are given priors by a network, drawn at random."""
    question = world.question
    order = random.permutation(random.key(seed, question.device), len(question))
    drawn = order[: n_asked(world)].sort().values
    return world._replace(question=question[drawn])


def _add_network_priors(
    world: QuestionWorld,
    network: PathNetwork,
    left_out: LeftOut,
    on_phase: PhaseCallback,
) -> QuestionWorld:
    """The world with priors by a network of the questions that are asked, some after others."""
    listed = world.evidence
    is_asked = torch.zeros_like(listed.label, dtype=torch.bool)
    is_asked = is_asked.index_fill(0, world.question, True)
    n_questions = len(listed.label)
    priors = [listed.path_score[:0]]
    for start in range(0, n_questions, 256):
        on_phase("priors by the Bellman-Ford network", start, n_questions)
        stop = min(start + 256, n_questions)
        part = evidence.slice_questions(listed, start, stop)
        part = evidence.with_path_scores(
            part, network, left_out, is_asked[start:stop]
        )
        priors.append(part.path_score)
    listed = listed._replace(path_score=torch.cat(priors))
    return world._replace(evidence=listed)


def fit_listwise(
    setup: QuestionSetup,
    degrees: Sequence[bool],
    cfg: ListwiseConfig,
    seed: int,
    device: str,
    metric: Metric | None,
    on_phase: PhaseCallback,
    deadline: Deadline = NO_DEADLINE,
) -> ListwiseFit:
    """Fit the weights with each kind of evidence, and keep the epoch that ranks valid best.

    Args:
      setup: with questions.
      degrees: whether to weigh degrees, each value to try.
      metric: None keeps the last epoch of the first fit.
      deadline: when the fits end; each has the same part of the time.
    """
    fits: list[_Fit] = []
    n_fits = len(degrees) if metric else 1
    for i, uses_degrees in enumerate(degrees[:n_fits]):
        part = deadline.share(1 / (n_fits - i))
        policy = reweigh(setup.policy, uses_degrees=uses_degrees)
        variant = dataclasses.replace(setup, policy=policy)
        fits += _iter_fits(variant, cfg, seed, device, metric, on_phase, part)
    if metric is None:
        note = f"listwise fit: epoch {cfg.n_epochs}, the last: there is no valid split to choose by"
        notes = [Note("detail", note)]
        return ListwiseFit(
            fits[-1].setup, fits[-1].params, None, cfg.n_epochs, notes
        )

    best = max(fits, key=lambda fit: fit.metric)
    lines = [
        f"listwise fit: epoch {best.epoch} of {cfg.n_epochs} ranks valid best, {best.metric:.4f}; untrained "
        f"{fits[0].metric:.4f}"
    ]
    if best.epoch == 0:
        lines = [
            f"listwise fit: no epoch of {cfg.n_epochs} ranks valid better than the untrained weights, {best.metric:.4f}"
        ]
    elif not is_better(best.quality, fits[0].quality):
        lines.append(
            f"the gain is within {MIN_GAIN_ERRORS:g} standard errors: the untrained weights are kept"
        )
        best = fits[0]
    notes = [Note("detail", line) for line in lines]
    if deadline.is_over:
        note = "listwise fit: it was ended by the time of the run"
        notes.append(Note("cut", note))
    if len(degrees) > 1:
        notes.append(Note("detail", _describe_degrees(fits, best)))
    return ListwiseFit(
        best.setup, best.params, best.quality, cfg.n_epochs, notes
    )


def raise_prior(
    fitted: ListwiseFit, metric: Metric | None, *, beyond_chance: bool = False
) -> ListwiseFit:
    """The fit with more weight on link embeddings, as much for all labels, where that ranks valid better.

    A fit gives them too little: the embeddings of a training question have not seen a part of the facts, and those of
    other questions have seen all.

    Args:
      fitted: with link embeddings; as it is where the untrained weights were kept, which have none for them.
      metric: None where there is no valid split.
      beyond_chance: it must rank valid better by more than two standard errors.
    """
    is_fitted = bool(fitted.params.score.prior_weight.any())
    if not is_fitted:
        return fitted
    of = "link embeddings: {} is added to their weights"
    return _add_to_weights(
        fitted, metric, "prior_weight", (0.5, 1.0, 2.0), of, beyond_chance
    )


def lower_linked(
    fitted: ListwiseFit, metric: Metric | None, *, beyond_chance: bool = False
) -> ListwiseFit:
    """The fit with less weight on being linked at all, as much less for all labels, where that ranks valid better.

    Each label has a weight of its own, which its few questions hardly move from 0; all labels together have a valid
    split to tell it by.

    Args:
      fitted: as it is where links are not weighed, or fewer than `MIN_LINKED_QUERIES` queries tell the quality.
      metric: None where there is no valid split.
      beyond_chance: it must rank valid better by more than two standard errors.
    """
    if not fitted.setup.policy.aggregation.uses_links:
        return fitted
    if fitted.quality is not None:
        n_queries = len(fitted.quality.reciprocal_rank)
        if n_queries < MIN_LINKED_QUERIES:
            note = (
                f"linked candidates: 0 is added to their weights: {n_queries} valid queries are too few to tell, fewer "
                f"than {MIN_LINKED_QUERIES}"
            )
            return fitted._replace(notes=[*fitted.notes, Note("detail", note)])
    of = "linked candidates: {} is added to their weights"
    return _add_to_weights(
        fitted, metric, "linked_weight", (-1.0, -2.0, -4.0), of, beyond_chance
    )


def _add_to_weights(
    fitted: ListwiseFit,
    metric: Metric | None,
    name: Literal["prior_weight", "linked_weight"],
    amounts: Sequence[float],
    description: str,
    beyond_chance: bool,
) -> ListwiseFit:
    """The fit with what ranks valid best added to some weights of all labels, or nothing; with a note.

    Args:
      metric: None where there is no valid split.
      name: of the weights.
      description: of the note, with a place for the amount.
      beyond_chance: the gain must be above two standard errors.
    """
    if metric is None or fitted.quality is None:
        return fitted
    found = {0.0: fitted}
    qualities = {0.0: fitted.quality}
    mrr = {0.0: fitted.quality.metric}
    for amount in amounts:
        score = fitted.params.score
        changed = score._replace(**{name: getattr(score, name) + amount})
        params = fitted.params._replace(score=changed)
        quality = metric(fitted.setup, params)
        found[amount] = fitted._replace(params=params, quality=quality)
        qualities[amount] = quality
        mrr[amount] = quality.metric

    # Nothing is added for next to nothing.
    best = best_above(mrr, MIN_GAIN)
    listing = ", ".join(f"{amount:g} {mrr[amount]:.4f}" for amount in mrr)
    is_checked = bool(best) and beyond_chance
    if is_checked and not is_better(qualities[best], qualities[0.0]):
        best = 0.0
        listing += f", no gain above {MIN_GAIN_ERRORS:g} standard errors"
    note = f"{description.format(f'{best:g}')}: valid: {listing}"
    return found[best]._replace(notes=[*fitted.notes, Note("detail", note)])


def weigh_network(
    fitted: ListwiseFit,
    network: PathNetwork,
    metric: Metric | None,
    *,
    starts_at_rules: bool = False,
) -> ListwiseFit:
    """The fit with the weight of a Bellman-Ford network, one for all labels, that ranks valid best.

    Training questions cannot tell the weight: the network has learnt from their facts, and rules were elected and other
    weights fitted by them. A fit trusts the one or the others more than new questions do.

    Args:
      fitted: without a network.
      metric: ranks valid with the network's priors; None where there is no valid split.
      starts_at_rules: the weights are those of the rule confidences, so that the network's is 0.
    """
    setup = dataclasses.replace(
        fitted.setup,
        facts=fitted.setup.facts._replace(network=network),
        policy=reweigh(fitted.setup.policy, uses_bellman_ford=True),
    )
    if starts_at_rules:
        params = _with_network_weight(fitted.params, 0.0)
        note = "Bellman-Ford network: weight 0: PPO starts from the rule confidences (listwise.learning_rate 0)"
        return fitted._replace(
            setup=setup,
            params=params,
            quality=metric(setup, params) if metric else None,
            notes=[Note("detail", note)],
        )
    if metric is None:
        note = f"Bellman-Ford network: weight {DEFAULT_NETWORK_WEIGHT:g}: there is no valid split to choose it by"
        return fitted._replace(
            setup=setup,
            params=_with_network_weight(fitted.params, DEFAULT_NETWORK_WEIGHT),
            notes=[Note("detail", note)],
        )

    found: dict[float, ListwiseFit] = {}
    mrr: dict[float, float] = {}
    for weight in (0.25, 0.5, 1.0, 2.0):
        params = _with_network_weight(fitted.params, weight)
        quality = metric(setup, params)
        mrr[weight] = quality.metric
        found[weight] = fitted._replace(
            setup=setup, params=params, quality=quality
        )
    best = best_above(mrr)
    listing = ", ".join(
        f"{weight:g} {value:.4f}" for weight, value in mrr.items()
    )
    note = f"Bellman-Ford network: weight {best:g} chosen: valid: {listing}"
    return found[best]._replace(notes=[Note("detail", note)])


def _with_network_weight(params: Params, weight: float) -> Params:
    """The weights with one for the prior by a Bellman-Ford network, the same for all labels."""
    of_labels = torch.full_like(params.score.linked_weight, weight)
    score = params.score._replace(network_prior_weight=of_labels)
    return params._replace(score=score)


def _describe_degrees(fits: Sequence[_Fit], best: _Fit) -> str:
    """Whether degrees are weighed, and how well each fit ranks valid."""
    listing = ", ".join(
        f"{'on' if uses_degrees else 'off'} {value:.4f}"
        for uses_degrees, value in _best_by_degrees(fits).items()
    )
    chosen = "on" if best.setup.policy.aggregation.uses_degrees else "off"
    why = ", as the untrained weights are" if best is fits[0] else ""
    return f"degrees {chosen}{why}; best fits on valid: {listing}"


def _best_by_degrees(fits: Sequence[_Fit]) -> dict[bool, float]:
    """The best metric with and without degrees."""
    best: dict[bool, float] = {}
    for fit in fits:
        key = fit.setup.policy.aggregation.uses_degrees
        best |= {key: max(fit.metric, best.get(key, -1.0))}
    return best


def _iter_fits(
    setup: QuestionSetup,
    cfg: ListwiseConfig,
    seed: int,
    device: str,
    metric: Metric | None,
    on_phase: PhaseCallback,
    deadline: Deadline,
) -> Iterator[_Fit]:
    """Yield the weights before and after each epoch, with their metric."""
    params = untrained_params(setup, device)
    world = question_world(setup, device)
    unknown = ValidQuality(0.0, torch.zeros(0))
    value = metric(setup, params) if metric else unknown
    yield _Fit(setup, params, value, 0)
    if not cfg.learning_rate:
        return
    phase = _describe_fit(setup)
    on_phase(phase, 0, cfg.n_epochs, deadline)
    epochs = iter_epochs(
        setup.policy,
        world,
        params,
        cfg,
        seed,
        deadline,
        setup.first_epoch,
    )
    for epoch, params in enumerate(epochs, 1):
        value = metric(setup, params) if metric else unknown
        yield _Fit(setup, params, value, epoch)
        on_phase(phase, epoch, cfg.n_epochs, deadline)


def _describe_fit(setup: QuestionSetup) -> str:
    """The name of a listwise fit, of which a run may have several: each has its own progress and time left."""
    aggregation = setup.policy.aggregation
    parts = ["degrees"] * aggregation.uses_degrees
    parts += ["walks"] * aggregation.uses_walks
    parts += ["link embeddings"] * aggregation.uses_embedding
    *first, last = parts or [""]
    listing = f"{', '.join(first)} and {last}" if first else last
    return f"listwise fit with {listing}" if listing else "listwise fit"
