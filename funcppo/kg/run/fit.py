"""Learning the score of candidates from questions: their evidence, the listwise fit that PPO starts from, and priors.

`list_questions` lists the evidence of training questions within bounds, `iter_epochs` fits weights of it, and
`train_embedding` and `train_bellman_ford` train what gives candidates a prior. `ValidEvidence` tells how well weights
rank. `kg.run.choices` decides which of it a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from funcppo import optim
from funcppo.config import AdamConfig, Config, PPOConfig
from funcppo.core import random, tree
from funcppo.core.files import Json
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64, I64
from funcppo.kg.config import (
    LISTING_SECONDS,
    MAX_FIRINGS,
    N_NETWORK_STEPS,
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    Note,
    QuestionConfig,
    RunConfig,
    batch_size,
)
from funcppo.kg.logic import derive
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    GroundingWork,
    LeftOut,
    Questions,
    select_questions,
)
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import rank_metrics, ranking, scoring
from funcppo.kg.ranking.ranking import ListedQueries, Ranking, RankingProtocol
from funcppo.kg.ranking.scoring import QuestionEvidence
from funcppo.kg.run import budget
from funcppo.kg.scores import evidence, learned, link_embedding, path_network
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.learned import (
    AggregationConfig,
    AggregationWorld,
    Capacity,
    LearnedScore,
    PolicyConfig,
    QuestionParams,
    QuestionWorld,
    Weights,
)
from funcppo.kg.scores.path_network import NetworkConfig, PathNetwork
from funcppo.kg.scores.score import Score
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    ignore_phase,
    with_answers,
)
from funcppo.optim import AdamState
from funcppo.runtime import memory
from funcppo.runtime.capture import GraphedStep

# questions that PPO asks beside a network, at most: each needs a pass through it
MAX_NETWORK_QUESTIONS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSetup:
    """Evidence of a task, on its device, and the policy that weighs it."""

    facts: FactIndex
    """Index of the facts."""
    aggregation: AggregationWorld
    """What the score reads beside evidence."""
    policy: PolicyConfig
    """Which evidence is weighed; its capacity is that of the questions, where there are some."""
    world: QuestionWorld | None = None
    """The questions to learn from; None before they are listed."""


class Quality(NamedTuple):
    """Metric on valid, and the reciprocal ranks behind it."""

    metric: float  # larger is better
    # of each query and side; None where they are not known
    reciprocal_rank: F64[Tensor, "Q"] | None = None


class FitState(NamedTuple):
    """Weights, moments of Adam and number of steps in the middle of a listwise fit."""

    params: QuestionParams
    adam: AdamState[QuestionParams]
    n_steps: int  # so far


def set_up(task: ProverTask, cfg: QuestionConfig) -> QuestionSetup:
    """Index the facts of a task of height 1, and set up the policy that weighs their evidence.

    Args:
      cfg: degrees and priors that are left open are not weighed, and odds start with power 1.
    """
    facts = evidence.index_facts(
        task.kb,
        task.sizes,
        task.cfg.memory_share,
        plan=task.answers_plan,
    )
    world = learned.make_world(task.kb, task.sizes, facts)

    weighed = AggregationConfig(
        sizes=task.sizes,
        n_shapes=learned.n_shapes(world),
        uses_links=cfg.links,
        uses_degrees=cfg.degrees is True,
        uses_embedding=cfg.embedding is True,
        uses_bellman_ford=cfg.bellman_ford is True,
        odds_power=1.0 if cfg.odds_power == "auto" else cfg.odds_power,
        no_proof=None if cfg.no_proof == "auto" else cfg.no_proof,
    )
    return QuestionSetup(
        facts=facts,
        aggregation=world,
        policy=PolicyConfig(aggregation=weighed, capacity=Capacity(1, 1, 1)),
    )


def question_world(setup: QuestionSetup) -> QuestionWorld:
    """Return the listed questions, or a stand-in with which the training state has the same shapes."""
    if setup.world is not None:
        return setup.world
    device = setup.facts.degree.device
    blank = learned.blank_world(setup.aggregation)
    return tree.map(lambda x: x.to(device), blank)


def untrained_params(setup: QuestionSetup) -> QuestionParams:
    """Return the weights that add up the odds of rule confidences, each to the power in the settings."""
    return learned.init_params(
        setup.policy, random.key(0, setup.facts.degree.device)
    )


def with_weights_of(
    setup: QuestionSetup, **settings: bool | float
) -> QuestionSetup:
    """Return the setup with changed aggregation settings of its policy, such as uses_degrees or odds_power."""
    weighed = replace(setup.policy.aggregation, **settings)
    return replace(setup, policy=replace(setup.policy, aggregation=weighed))


def make_weights(
    task: ProverTask,
    setup: QuestionSetup,
    params: QuestionParams,
    left_out: LeftOut = "fact",
) -> Weights:
    """Return the weights of the score together with the tensors that it reads beside evidence.

    Args:
      left_out: what a question about a known fact leaves out, as in training.
    """
    device = setup.facts.degree.device
    return Weights(
        facts=setup.facts,
        cfg=setup.policy.aggregation,
        world=setup.aggregation,
        params=tree.map(lambda x: x.to(device), params.score),
        left_out=left_out,
        smoothing=float(task.cfg.smoothing or 0.0),
    )


def question_learner(policy: PolicyConfig, ppo: PPOConfig) -> Config:
    """Return the configuration of PPO on questions."""
    return Config(
        ppo=ppo,
        env=learned.environment(policy.capacity),
        agent=learned.agent(policy),
    )


# -- evidence of valid


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidEvidence:
    """Evidence of the queries that every validation ranks, collected once."""

    task: ProverTask
    """The task with all answers of the queries."""
    queries: np.ndarray
    """The queries [Q, W]."""
    parts: Mapping[int, list[QuestionEvidence]]
    """Their evidence, by side."""
    listed: ListedQueries
    """Their candidates."""

    @property
    def n_questions(self) -> int:
        """Return the number of distinct questions."""
        return sum(
            len(part.evidence.label)
            for parts in self.parts.values()
            for part in parts
        )

    def change(self, change: Callable[[Evidence], Evidence]) -> ValidEvidence:
        """Return the evidence with a change applied to every part."""
        parts = {
            side: [
                part._replace(evidence=change(part.evidence)) for part in parts
            ]
            for side, parts in self.parts.items()
        }
        return replace(self, parts=parts)

    def rank(self, score: Score) -> Ranking:
        """Rank the queries by a score of their evidence."""
        score_atoms = partial(
            scoring.score_collected, self.task, self.parts, score
        )
        return ranking.rank_listed(self.listed, score_atoms, score)

    def rank_by_weights(
        self, setup: QuestionSetup, params: QuestionParams
    ) -> Ranking:
        """Rank the queries by the learned score with given weights."""
        weights = make_weights(self.task, setup, params)
        return self.rank(LearnedScore("evidence", weights))

    def quality(self, setup: QuestionSetup, params: QuestionParams) -> Quality:
        """Rank the queries by given weights; return the metric and the reciprocal ranks."""
        return quality_of(self.task, self.rank_by_weights(setup, params))


def collect_valid_evidence(
    task: ProverTask, facts: FactIndex, queries: np.ndarray
) -> ValidEvidence:
    """Collect the evidence of the queries of a validation."""
    sides = ranking.ranked_sides(task)
    atoms = torch.from_numpy(np.ascontiguousarray(queries))
    parts = {
        side: list(scoring.query_evidence(task, facts, atoms, side))
        for side in sides
    }
    # The candidates that have evidence are the answers that rules derive.
    derived = [
        scoring.evidence_atoms(part, task.sizes)
        for of_side in parts.values()
        for part in of_side
    ]
    task = with_answers(task, atoms, sides, torch.cat(derived))
    protocol = RankingProtocol(sides=sides)
    listed = ranking.list_split(task, queries, protocol, by_side=True)
    return ValidEvidence(task=task, queries=queries, parts=parts, listed=listed)


def summarise(task: ProverTask, ranked: Ranking) -> Json:
    """Return the metrics of a ranking, with "auc_pr" for Countries."""
    return ranking.summarise_ranking(
        ranked, list(task.dataset.predicates), with_auc=task.is_countries
    )


def quality_of(task: ProverTask, ranked: Ranking) -> Quality:
    """Return the metric of a ranking by which a run chooses, with its reciprocal ranks."""
    return Quality(
        summarise(task, ranked)[ranking.selection_metric(task)],
        rank_metrics.expected_reciprocal_ranks(ranked.counts),
    )


# -- training questions


def training_facts(task: ProverTask) -> I64[Tensor, "n W"]:
    """Return the facts of train of two arguments: questions are asked about them, and not about facts.txt."""
    facts = evidence.binary_facts(task.kb)
    train = task.dataset.train
    if len(train) == len(task.dataset.facts):
        return facts
    asked = kbase.binary_atoms(torch.from_numpy(train).long().to(facts.device))
    _, row = torch.cat([asked, facts]).unique(dim=0, return_inverse=True)
    return facts[torch.isin(row[len(asked) :], row[: len(asked)])]


def left_out_of(cfg: QuestionConfig) -> LeftOut:
    """Return what a question leaves out: its own fact, also if that is still open, or its pair."""
    return "fact" if cfg.left_out == "auto" else cfg.left_out


def resolve_left_out(task: ProverTask, cfg: QuestionConfig) -> QuestionConfig:
    """Return the settings with an open `left_out` chosen: "pair" if known facts link no pair of valid, else "fact"."""
    valid = task.dataset.valid
    if cfg.left_out != "auto":
        return cfg
    base = task.sizes.n_constants + 1
    facts = evidence.binary_facts(task.kb).cpu().numpy()
    head, tail = facts[:, HEAD], facts[:, TAIL]
    linked = np.concatenate([head * base + tail, tail * base + head])
    pair = valid[:, HEAD].astype(np.int64) * base + valid[:, TAIL]
    is_fact = np.isin(pair, linked).any() or not len(valid)
    return replace(cfg, left_out="fact" if is_fact else "pair")


def list_questions(
    task: ProverTask,
    setup: QuestionSetup,
    cfg: QuestionConfig,
    seed: int,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[QuestionSetup, int, Note]:
    """List the evidence of training questions about a sample of the facts; each question leaves its own fact out.

    The same number of questions gives the same evidence, whatever the seconds.

    Args:
      task: of height 1.
      cfg: the bounds of the list.
      seed: of what is drawn.
      on_phase: receives the number of questions that are listed, and of all.
      deadline: ends the list as the seconds of `cfg` do, unless the number of questions is set.

    Returns:
      The setup with the questions whose answer is derived without its own fact; the number of those that were asked;
      and a note on what was left out.

    Raises:
      ValueError: the rules derive no known fact from the others.
    """
    asked, n_all = _draw_questions(task, cfg, seed)
    facts = setup.facts._replace(network=None)
    work = GroundingWork(leaves_out=True)
    settings = EvidenceConfig(
        left_out=left_out_of(cfg),
        object_identity=task.least_model.object_identity,
        n_best=cfg.n_best,
        n_sampled=cfg.n_sampled,
        seed=seed,
    )
    known = evidence.binary_facts(task.kb)
    index = kbase.build_triple_index(known, task.sizes.n_constants)
    parts = evidence.iter_evidence(
        task.kb, task.sizes, facts, asked, index, settings, work
    )
    listed, stopped_by = _list_within_bounds(
        parts, work, cfg, len(asked.entity), deadline, on_phase
    )

    n_derived = len(derived_questions(listed))
    if not n_derived:
        raise ValueError("no rule derives a known fact from the others")
    rows, most = fitting_questions(listed, cfg.max_size_quantile)
    left_out = ""
    if work.n_left_out:
        n_join_rows = derive.max_join_rows(facts.plan, asked)
        left_out = f", of which {work.n_left_out:,} take more than {n_join_rows:,} rows of joins each and were left out"
    note = (
        f"{len(listed.label):,} of {n_all:,} questions asked{stopped_by}{left_out}; the rules derive the answers of "
        f"{n_derived:,} without their own fact; {n_derived - len(rows):,} of these have more than {most:,} firings and "
        "were left out"
    )

    world = QuestionWorld(
        setup.aggregation, listed, rows, torch.zeros_like(listed.base_score)
    )
    if setup.facts.network is not None:
        world = _with_network_priors(
            world, setup.facts.network, left_out_of(cfg), seed, on_phase
        )
    policy = replace(setup.policy, capacity=learned.capacity(listed, rows))
    setup = replace(setup, world=world, policy=policy)
    return (
        setup,
        len(listed.label),
        Note("cut" if stopped_by else "detail", note),
    )


def _draw_questions(
    task: ProverTask, cfg: QuestionConfig, seed: int
) -> tuple[Questions, int]:
    """Draw questions about known binary facts in random order; return them and how many there are in all.

    Nothing of valid or test is asked.

    Raises:
      ValueError: there are none.
    """
    asked = evidence.training_questions(training_facts(task))
    n_all = len(asked.entity)
    if not n_all:
        raise ValueError("there is no fact of two arguments to ask about")
    key = random.key(seed, asked.entity.device)
    order = random.permutation(key, n_all)[: cfg.max_questions]
    return select_questions(asked, order), n_all


def _list_within_bounds(
    parts: Iterator[Evidence],
    work: GroundingWork,
    cfg: QuestionConfig,
    n_all: int,
    deadline: Deadline,
    on_phase: PhaseCallback,
) -> tuple[Evidence, str]:
    """Concatenate the parts up to the first that exceeds a bound, or all if the number of questions is set.

    Args:
      parts: none is listed yet.
      work: of the parts; its deadline is set.

    Returns:
      The evidence, and the bound that ended the list in words; empty if none did.
    """
    listed: list[Evidence] = []
    n_questions, n_firings = 0, 0
    seconds = min(cfg.seconds or LISTING_SECONDS, deadline.seconds_left)
    max_firings = cfg.max_firings or MAX_FIRINGS
    if cfg.max_questions is None:
        work.deadline = deadline.at_most(seconds)
    text = "listing evidence of training questions"
    on_phase(text, 0, n_all, work.deadline)

    stopped_by = ""
    for part in parts:
        listed.append(part)
        n_questions += len(part.label)
        # Four links take the memory of a firing.
        n_firings += len(part.rule) + len(part.link_label) // 4
        on_phase(text, n_questions, n_all, work.deadline)
        if cfg.max_questions is not None or n_questions == n_all:
            continue
        if work.deadline.is_over:
            stopped_by = f" (within {seconds:.3g} seconds)"
        elif n_firings > max_firings:
            stopped_by = f" (with more than {max_firings:,} firings, four links counted as one)"
        if stopped_by:
            break
    return evidence.concatenate(listed), stopped_by


def fitting_questions(
    listed: Evidence, quantile: float
) -> tuple[I64[Tensor, "n"], int]:
    """Return the questions with derived answers whose firings are within a quantile, and that number of firings."""
    rows = derived_questions(listed)
    _, n_firings, _ = learned.question_sizes(listed, rows)
    most = torch.quantile(n_firings.double(), quantile)
    return rows[n_firings <= most], int(most)


def derived_questions(listed: Evidence) -> I64[Tensor, "n"]:
    """Return the rows of the questions whose answer is derived."""
    return (listed.answer >= 0).nonzero().squeeze(1)


def with_prior_score(
    setup: QuestionSetup, params: QuestionParams
) -> QuestionSetup:
    """Return the setup with the scores by given weights as the policy that PPO starts from."""
    world = question_world(setup)
    scores = [world.prior_score[:0]]
    for start in range(0, len(world.evidence.label), 1024):
        part = evidence.slice_questions(world.evidence, start, start + 1024)
        scores.append(
            learned.score(
                setup.policy.aggregation,
                world.aggregation,
                params.score,
                learned.whole(part),
            )
        )
    return replace(setup, world=world._replace(prior_score=torch.cat(scores)))


# -- the listwise fit


def iter_epochs(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: QuestionParams,
    cfg: ListwiseConfig,
    seed: int,
    deadline: Deadline = NO_DEADLINE,
    first: tuple[int, float] | None = None,
) -> Iterator[QuestionParams]:
    """Yield the weights after each epoch of gradient steps down the listwise loss.

    Args:
      seed: of the order of the questions.
      deadline: ends the epoch in progress, the last one then.
      first: number of questions of a step, and `max_size_quantile`, of an epoch in the order of the list at the full
        learning rate, which takes the place of the first one if there is a batch of questions; None for an epoch as
        the later ones.
    """
    size = batch_size(cfg, len(world.question))
    n_batches = max(1, len(world.question) // size)
    epochs = range(cfg.n_epochs)
    fit = FitState(params, optim.init(params), 0)
    if first is not None:
        fit = _fit_in_listed_order(policy, world, fit, cfg, *first, deadline)
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


def take_step(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
    rate: float,
) -> FitState:
    """Take one step of Adam on a batch of questions."""
    gradient = batch_gradient(policy, world, fit.params, cfg, question)
    params, adam = optim.update(
        AdamConfig(), gradient, fit.adam, fit.params, rate
    )
    return FitState(params, adam, fit.n_steps + 1)


def batch_gradient(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: QuestionParams,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
) -> QuestionParams:
    """Compute the gradient of the listwise loss of a batch of questions, in parts if they do not fit together."""
    size = learned.capacity(world.evidence, question)
    n_together = max(1, cfg.max_batch_firings // budget.batch_firings(1, size))
    gradient_of = partial(
        grad(learned.listwise_loss, argnums=3),
        replace(policy, capacity=size),
        world,
        cfg.penalty,
        params,
    )
    if n_together >= len(question):
        return gradient_of(question)

    total = tree.zeros_like(params)
    for part in question.split(n_together):
        share = len(part) / len(question)
        total = tree.map(
            lambda a, b: a + share * b,  # noqa: B023
            total,
            gradient_of(part),
        )
    return total


def _fit_in_listed_order(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    size: int,
    quantile: float,
    deadline: Deadline,
) -> FitState:
    """Fit one epoch over the questions in the order of their list, at the full learning rate.

    The first gradient step is on one batch, the others are on groups of four. An incomplete last batch is part of the
    last group; fewer questions than a batch make no step.

    Args:
      size: of a batch.
      quantile: of the firings of a group, beyond which its questions are left out.
      deadline: ends the epoch after a group.
    """
    row = derived_questions(world.evidence)
    n_done, start = 0, 0
    while len(row) - n_done >= size:
        # The last group has fewer batches.
        most = 4 if n_done else 1
        n_batches = min(most, (len(row) - n_done) // size)
        is_last = n_done > 0 and n_batches < most
        n_done = len(row) if is_last else n_done + n_batches * size
        stop = int(row[n_done - 1]) + 1
        group = evidence.slice_questions(world.evidence, start, stop)
        rows, _ = fitting_questions(group, quantile)
        group_world = world._replace(
            evidence=group,
            question=rows,
            prior_score=torch.zeros_like(group.base_score),
        )
        # The prior of the weights counts once for all questions so far, not once for each group.
        deviation = cfg.penalty.feature_deviation * (n_done / len(rows)) ** 0.5
        penalty = replace(cfg.penalty, feature_deviation=deviation)

        _, n_firings, _ = learned.question_sizes(group, rows)
        by_size = rows[torch.argsort(n_firings, stable=True)]
        for question in by_size.tensor_split(n_batches):
            fit = take_step(
                policy,
                group_world,
                fit,
                replace(cfg, penalty=penalty),
                question,
                cfg.learning_rate,
            )
        start = stop
        if deadline.is_over:
            break
    return fit


def _batches(
    world: QuestionWorld, key: I64[Tensor, "2"], size: int
) -> Iterator[I64[Tensor, "B"]]:
    """Yield the questions in random order, similar sizes together; an incomplete batch only if it is the only one."""
    order = random.permutation(key, len(world.question))
    rows = world.question[order]
    rows = rows[: max(1, len(rows) // size) * size]
    for group in rows.split(8 * size):  # sorted by size within eight batches
        _, n_firings, _ = learned.question_sizes(world.evidence, group)
        yield from group[torch.argsort(n_firings, stable=True)].split(size)


# -- priors by link embeddings


def with_embedding(
    setup: QuestionSetup,
    embedding: link_embedding.Params,
    left_out: LeftOut,
) -> QuestionSetup:
    """Return the setup with priors by link embeddings in its evidence, which the policy weighs.

    Args:
      left_out: what a training question leaves out.
    """
    world = setup.world
    if world is not None:
        listed = evidence.with_embedding_scores(
            world.evidence, embedding, left_out
        )
        world = world._replace(evidence=listed)
    facts = setup.facts._replace(embedding=embedding)
    setup = replace(setup, facts=facts, world=world)
    return with_weights_of(setup, uses_embedding=True)


def train_embedding(
    task: ProverTask,
    cfg: EmbeddingConfig,
    left_out: LeftOut,
    seed: int,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> link_embedding.Params:
    """Train link embeddings on the known facts of two arguments; nothing of valid or test is read.

    Args:
      left_out: what a training question leaves out, which its model must not have seen.
      seed: of the initial vectors and of the order of the questions.
      deadline: ends the training after the epoch in progress.
    """
    asked = evidence.training_questions(training_facts(task))
    label = evidence.make_label(asked.predicate, asked.side)
    links = link_embedding.training_links(asked, label, cfg.n_folds, left_out)
    device = label.device

    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    n_labels = evidence.n_labels(task.sizes)
    params = link_embedding.init(
        cfg, task.sizes.n_constants, n_labels, init_key
    )
    state = link_embedding.TrainState(params, optim.init(params))
    step_fn = link_embedding.train_step
    if is_cuda(str(device)):
        step_fn = GraphedStep(step_fn)

    n_links = len(links.label)
    size = min(cfg.batch_size, n_links)
    n_steps = cfg.n_epochs * (n_links // size)
    batches = _shuffled_batches(key, n_links, size, cfg.n_epochs)
    for step, (epoch, rows) in enumerate(batches):
        if step and step % (n_links // size) == 0 and deadline.is_over:
            break
        on_phase("training link embeddings", epoch, cfg.n_epochs)
        rate = cfg.learning_rate * (1.0 - step / n_steps)
        state = step_fn(
            cfg, links, rows, torch.full((), rate, device=device), state
        )
    params = tree.map(torch.clone, state.params)
    if isinstance(step_fn, GraphedStep):
        step_fn.release()
    return params


def _shuffled_batches(
    key: I64[Tensor, "2"], n_rows: int, size: int, n_epochs: int
) -> Iterator[tuple[int, I64[Tensor, "n"]]]:
    """Yield the epoch and the rows of each batch: passes in random order, without incomplete batches."""
    for epoch in range(n_epochs):
        order = random.permutation(random.fold_in(key, epoch), n_rows)
        for rows in order[: n_rows // size * size].split(size):
            yield epoch, rows


# -- priors by a Bellman-Ford network


def make_network(task: ProverTask, params: path_network.Params) -> PathNetwork:
    """Build the prior by a trained network over the facts of a task."""
    facts = evidence.binary_facts(task.kb)
    return path_network.make_network(params, facts, task.sizes.n_constants)


def with_network(
    setup: QuestionSetup,
    network: PathNetwork,
    left_out: LeftOut,
    seed: int,
    on_phase: PhaseCallback = ignore_phase,
) -> QuestionSetup:
    """Return the setup with priors by a Bellman-Ford network in its evidence, which the policy weighs.

    Args:
      left_out: what a training question leaves out.
      seed: of the questions that are asked of many.
    """
    world = setup.world
    if world is not None:
        world = _with_network_priors(world, network, left_out, seed, on_phase)
    facts = setup.facts._replace(network=network)
    setup = replace(setup, facts=facts, world=world)
    return with_weights_of(setup, uses_bellman_ford=True)


def _with_network_priors(
    world: QuestionWorld,
    network: PathNetwork,
    left_out: LeftOut,
    seed: int,
    on_phase: PhaseCallback,
) -> QuestionWorld:
    """Return the world with at most `MAX_NETWORK_QUESTIONS` questions, drawn at random, and with their priors."""
    key = random.key(seed, world.question.device)
    order = random.permutation(key, len(world.question))
    drawn = order[:MAX_NETWORK_QUESTIONS].sort().values
    world = world._replace(question=world.question[drawn])

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


def train_bellman_ford(
    task: ProverTask,
    cfg: BellmanFordConfig,
    left_out: LeftOut,
    seed: int,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[path_network.Params, str]:
    """Train a Bellman-Ford network on the known facts of two arguments; nothing of valid or test is read.

    Args:
      left_out: what a training question leaves out.
      seed: of the initial weights, of the order of the questions, and of what is dropped.
      deadline: ends the training after a step.

    Returns:
      The weights, and why its steps replay no CUDA graph on a GPU; empty if they do.
    """
    sizes = _network_config(task, cfg)
    graph = path_network.build_graph(
        sizes, evidence.binary_facts(task.kb), left_out
    )
    device = str(graph.source.device)
    init_key, key = random.split(random.key(seed, device)).unbind(-2)

    state = path_network.init_training(path_network.init(sizes, init_key))
    most = _max_step_bytes(device) * task.cfg.memory_share
    most /= path_network.bytes_per_question(sizes, graph)
    sizes = replace(sizes, n_at_once=max(1, int(most)))
    step_fn = path_network.train_step
    if is_cuda(device):
        step_fn = GraphedStep(step_fn)

    n_steps, host_key = cfg.n_steps or N_NETWORK_STEPS, key.cpu()
    batches = _edge_batches(
        key,
        path_network.edges_of(sizes, graph, training_facts(task)),
        cfg.batch_size,
        n_steps,
    )
    for step, edge in enumerate(batches, 1):
        # On the host: a key takes a hundred operations.
        drop_key = random.fold_in(random.fold_in(host_key, step), 1)
        rate = cfg.learning_rate * (1.0 - (step - 1) / n_steps)
        state = step_fn(
            sizes,
            graph,
            edge,
            drop_key.to(device),
            torch.full((), rate, device=device),
            state,
        )
        on_phase("training a Bellman-Ford network", step, n_steps, deadline)
        if deadline.is_over:
            break
    params, reason = tree.map(torch.clone, state.params), ""
    if isinstance(step_fn, GraphedStep):
        reason = "; ".join(step_fn.fallback_reasons())
        step_fn.release()
    return params, reason


def _max_step_bytes(device: str) -> float:
    """Return the bytes that the gradients of a step's questions may hold at once; equal on all GPUs of one model."""
    if not is_cuda(device):
        return 1e9
    return min(4e9, 0.1 * memory.total_bytes(device))


def _network_config(task: ProverTask, cfg: BellmanFordConfig) -> NetworkConfig:
    """Return the settings of a network over the facts of a task."""
    return path_network.network_config(
        cfg, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )


def _edge_batches(
    key: I64[Tensor, "2"], edges: I64[Tensor, "n"], size: int, n_steps: int
) -> Iterator[I64[Tensor, "m"]]:
    """Yield a batch of edges for each step, from passes in random order; nothing if there are no edges."""
    if not len(edges):
        return
    size = min(size, len(edges))
    n_in_epoch = len(edges) // size
    for first in range(0, n_steps, n_in_epoch):
        order = random.permutation(random.fold_in(key, first), len(edges))
        of_epoch = edges[order[: n_in_epoch * size]].split(size)
        yield from of_epoch[: n_steps - first]


def blank_priors(
    task: ProverTask, weighed: AggregationConfig, run_config: RunConfig
) -> tuple[link_embedding.Params | None, path_network.Params | None]:
    """Return zeros in the shapes of the trained link embeddings and network; None for a prior that is not weighed."""
    key = random.key(0, run_config.device)
    embedding, network = None, None
    if weighed.uses_embedding:
        n_labels = evidence.n_labels(task.sizes)
        vectors = link_embedding.init(
            run_config.embedding, task.sizes.n_constants, n_labels, key
        )
        embedding = tree.zeros_like(vectors)
    if weighed.uses_bellman_ford:
        sizes = _network_config(task, run_config.bellman_ford)
        network = tree.zeros_like(path_network.init(sizes, key))
    return embedding, network
