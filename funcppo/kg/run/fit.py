"""Learning the score of candidates from questions: their evidence, the listwise fit, and what gives them priors.

`list_questions` lists the evidence of training questions, `fit_weights` fits weights of it, and `train_embedding` and
`train_network` train what gives candidates a prior; each ends in time, its learning rate at 0 then. `SplitEvidence`
ranks queries by any weights. `kg.run.choices` decides which of it a run has.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64, I64
from funcppo.kg.config import (
    MAX_FIRINGS,
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    Note,
    QuestionConfig,
    RunConfig,
    batch_size,
)
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    GroundingWork,
    LeftOut,
    Questions,
    candidate_atoms,
)
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.row_index import count_to, select_rows, true_rows
from funcppo.kg.ranking import rank_metrics, ranking, scoring
from funcppo.kg.ranking.ranking import ListedQueries, Ranking, RankingProtocol
from funcppo.kg.ranking.scoring import QuestionEvidence
from funcppo.kg.run import budget
from funcppo.kg.scores import evidence, learned, link_embedding, path_network
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.learned import (
    AggregationConfig,
    AggregationWorld,
    LearnedScore,
    Params,
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
from funcppo.runtime.capture import GraphedStep, clear_graph_pools

# steps of a GPU that may be under way when the time ends
MAX_QUEUED_STEPS = 16
# the first steps of a training, which tell what a step takes
MAX_FIRST_STEPS, FIRST_SECONDS = 16, 0.3

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSetup:
    """Evidence of a task, on its device, and the policy that weighs it."""

    facts: FactIndex
    """Index of the facts."""
    aggregation: AggregationWorld
    """What the score reads beside evidence."""
    weighed: AggregationConfig
    """Which evidence is weighed."""
    world: QuestionWorld | None = None
    """The questions to learn from; None before they are listed."""


class FitState(NamedTuple):
    """Weights and moments of Adam in the middle of a listwise fit."""

    params: Params
    adam: AdamState[Params]


class Training(Generic[State]):
    """Training step by step, which may stop after its first steps and go on later.

    Attributes:
      state: after the steps that are made.
      n_steps: of the whole training.
      n_made: steps that are made.
      is_run: it has ended.
      no_graph: why its steps replay no CUDA graph on a GPU; empty if they do.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[I64[Tensor, "n"], float, State], State],
        state: State,
        batches: Iterator[I64[Tensor, "n"]],
        n_steps: int,
        step_fn: object = None,
    ) -> None:
        """Set the training, of which no step is made.

        Args:
          name: what is done, for callbacks.
          take: a step on a batch, with a share of the learning rate.
          batches: of `n_steps` steps.
          step_fn: what `take` calls; a `GraphedStep` is released at the end.
        """
        self.name, self.state, self.n_steps = name, state, n_steps
        self.n_made, self.no_graph, self.is_run = 0, "", False
        self._take, self._batches, self._step_fn = take, batches, step_fn
        self._step_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step, by the first ones, which are made where none is yet."""
        if self._step_seconds is None:
            # The first step loads what computes it; on a GPU it records a graph, beside those of other trainings.
            self._make(1.0)
            clear_graph_pools()
            n_before, began = self.n_made, time.monotonic()
            seconds = 0.0
            while (
                seconds < FIRST_SECONDS
                and self.n_made < MAX_FIRST_STEPS
                and self._make(1.0)
            ):
                seconds = time.monotonic() - began
            self._step_seconds = seconds / max(self.n_made - n_before, 1)
        return self._step_seconds

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps, by the first ones."""
        return self.step_seconds * self.n_steps

    def run(
        self,
        on_phase: PhaseCallback = ignore_phase,
        deadline: Deadline = NO_DEADLINE,
    ) -> State:
        """Make all steps, or those that there is time for; return the last state.

        The learning rate falls to 0 with the steps or with the time, whichever has less left.
        """
        seconds = deadline.seconds_left
        by_time = 1.0
        while self._make(by_time):
            on_phase(self.name, self.n_made, self.n_steps, deadline)
            if deadline.is_over:
                break
            if math.isfinite(seconds):
                by_time = deadline.seconds_left / max(seconds, 1e-9)
        self.state, self.is_run = tree.map(torch.clone, self.state), True
        if isinstance(self._step_fn, GraphedStep):
            self.no_graph = "; ".join(self._step_fn.fallback_reasons())
            self._step_fn.release()
        return self.state

    def _make(self, by_time: float) -> bool:
        """Make a step; return whether there was one left."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        by_steps = 1.0 - self.n_made / self.n_steps
        self.state = self._take(batch, min(by_steps, by_time), self.state)
        self.n_made += 1
        # Otherwise steps of a GPU would be under way when the time ends.
        is_first = self.n_made <= MAX_FIRST_STEPS
        if batch.is_cuda and (is_first or self.n_made % MAX_QUEUED_STEPS == 0):
            torch.cuda.synchronize(batch.device)
        return True


def set_up(task: ProverTask, cfg: QuestionConfig) -> QuestionSetup:
    """Index the facts of a task of height 1, and set up what weighs their evidence.

    Args:
      cfg: priors that are left open are not weighed.
    """
    facts = evidence.index_facts(
        task.kb,
        task.sizes,
        task.cfg.memory_share,
        plan=task.answers_plan,
    )
    world = learned.make_world(task.kb, task.sizes)
    weighed = AggregationConfig(
        sizes=task.sizes,
        n_shapes=learned.n_shapes(world),
        uses_links=cfg.links,
        uses_embedding=cfg.embedding is True,
        uses_bellman_ford=cfg.bellman_ford is True,
        odds_power=cfg.odds_power,
        no_proof=None if cfg.no_proof == "auto" else cfg.no_proof,
    )
    return QuestionSetup(facts=facts, aggregation=world, weighed=weighed)


def untrained_params(setup: QuestionSetup) -> Params:
    """Return the weights that add up the odds of rule confidences, each to the power in the settings."""
    key = random.key(0, setup.facts.degree.device)
    return learned.init(setup.weighed, key)


def widened(setup: QuestionSetup, params: Params) -> Params:
    """Return weights in the shapes of the setup; evidence that they do not weigh has weights of 0."""
    return Params(
        *(
            old if old.shape == new.shape else torch.zeros_like(new)
            for old, new in zip(params, untrained_params(setup), strict=True)
        )
    )


def with_weights_of(
    setup: QuestionSetup, **settings: bool | float | None
) -> QuestionSetup:
    """Return the setup with changed aggregation settings, such as uses_embedding or odds_power."""
    return replace(setup, weighed=replace(setup.weighed, **settings))


def make_weights(
    task: ProverTask,
    setup: QuestionSetup,
    params: Params,
    left_out: LeftOut = "fact",
) -> Weights:
    """Return the weights of the score together with the tensors that it reads beside evidence.

    Args:
      left_out: what a question about a known fact leaves out, as in training.
    """
    device = setup.facts.degree.device
    return Weights(
        facts=setup.facts,
        cfg=setup.weighed,
        world=setup.aggregation,
        params=tree.map(lambda x: x.to(device), params),
        left_out=left_out,
        smoothing=float(task.cfg.smoothing or 0.0),
    )


# -- evidence of queries


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitEvidence:
    """Evidence of queries of a split, collected once and ranked by any number of scores."""

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
        return sum(len(part.label) for part in self._evidence())

    @property
    def n_firings(self) -> int:
        """Return the number of firings, a candidate and a rule that derives it."""
        return sum(len(part.rule) for part in self._evidence())

    def _evidence(self) -> Iterator[Evidence]:
        """Yield the evidence of all parts."""
        for parts in self.parts.values():
            yield from (part.evidence for part in parts)

    def change(self, change: Callable[[Evidence], Evidence]) -> SplitEvidence:
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

        def score_atoms(atoms: Tensor, side: int) -> Tensor:
            parts = self.parts.get(side, ())
            return scoring.score_collected(self.task, parts, score, atoms, side)

        return ranking.rank_listed(self.listed, score_atoms, score)

    def rank_by_weights(self, setup: QuestionSetup, params: Params) -> Ranking:
        """Rank the queries by the learned score with given weights."""
        weights = make_weights(self.task, setup, params)
        return self.rank(LearnedScore("evidence", weights))


def count_queries_within(
    task: ProverTask,
    facts: FactIndex,
    queries: np.ndarray,
    max_firings: float,
    max_rows: float,
    max_seconds: float = math.inf,
) -> int:
    """Estimate from the first queries how many, at least one, keep within bounds on their evidence.

    Args:
      max_firings: the most firings.
      max_rows: the most rows that the joins make for them.
      max_seconds: the most seconds, as the first queries take; many together take less, so those are within.
    """
    share, n_pilot, took = 0.0, 1, 0.0
    for size in (1, 8, 64):
        if took > max_seconds or size > 8 * len(queries):
            break
        start = time.monotonic()
        pilot, work = queries[:size], GroundingWork()
        collected = collect_evidence(task, facts, pilot, work)
        n_firings = sum(
            len(part.evidence.rule)
            for parts in collected.parts.values()
            for part in parts
        )
        share = max(n_firings / max_firings, work.n_rows / max_rows)
        n_pilot = max(len(pilot), 1)
        took = time.monotonic() - start
    n_within = max(1, int(n_pilot / max(share, 1e-12)))
    if took * len(queries) > max_seconds * n_pilot:
        in_time = int(max_seconds * n_pilot / took)
        n_within = min(n_within, max(n_pilot, in_time))
    return min(len(queries), n_within)


def collect_evidence(
    task: ProverTask,
    facts: FactIndex,
    queries: np.ndarray,
    work: GroundingWork | None = None,
) -> SplitEvidence:
    """Collect the evidence of queries of a split.

    Args:
      work: counts the work of finding groundings; None not to count it.
    """
    sides = ranking.ranked_sides(task)
    atoms = torch.from_numpy(np.ascontiguousarray(queries))
    parts = {
        side: list(scoring.query_evidence(task, facts, atoms, side, work))
        for side in sides
    }
    # The candidates that have evidence are the answers that rules derive.
    derived = [
        candidate_atoms(asked, found.question, found.entity, task.sizes)
        for of_side in parts.values()
        for asked, found in of_side
    ]
    task = with_answers(task, atoms, sides, torch.cat(derived))
    protocol = RankingProtocol(sides=sides)
    listed = ranking.list_split(task, queries, protocol, by_side=True)
    return SplitEvidence(task=task, queries=queries, parts=parts, listed=listed)


def with_priors(
    collected: SplitEvidence, setup: QuestionSetup
) -> SplitEvidence:
    """Return the evidence with the priors of candidates that the setup weighs."""
    facts = setup.facts

    def add(part: Evidence) -> Evidence:
        if setup.weighed.uses_embedding:
            part = evidence.with_embedding_scores(part, facts.embedding, "fact")
        if setup.weighed.uses_bellman_ford:
            part = evidence.with_path_scores(part, facts.network, "fact")
        return part

    return collected.change(add)


def seconds_of_all_entities(
    task: ProverTask,
    setup: QuestionSetup,
    params: Params,
    collected: SplitEvidence,
) -> float:
    """Return the seconds of the scores of all entities for a question, as those of a few questions take."""
    part = next(iter(collected.parts.values()))[0].evidence
    # A prior that the user has set may not be trained yet.
    weighed, has_network = setup.weighed, setup.facts.network is not None
    has_models = link_embedding.n_models(setup.facts.embedding) > 0
    setup = with_weights_of(
        setup,
        uses_embedding=weighed.uses_embedding and has_models,
        uses_bellman_ford=weighed.uses_bellman_ford and has_network,
    )
    score = LearnedScore("evidence", make_weights(task, setup, params))
    questions = evidence.questions_of(part)
    return _seconds_of_some(
        lambda n: score.log_odds_of_all(select_rows(questions, slice(n))),
        len(part.label),
    )


def _seconds_of_some(compute: Callable[[int], Tensor], most: int) -> float:
    """Return the seconds of a question, by those of a few; a GPU takes as long for many as for few.

    Args:
      compute: the scores of some number of questions.
      most: that there are.
    """
    took, n = 0.0, 0
    for n in (1, min(16, most), min(256, most)):
        began = time.monotonic()
        found = compute(n)
        found.sum().item()
        took = time.monotonic() - began
        # The first one on a GPU loads what computes it.
        if took > FIRST_SECONDS and not (found.is_cuda and n == 1):
            break
    return took / max(n, 1)


def reciprocal_ranks(ranked: Ranking) -> F64[Tensor, "Q"]:
    """Return the expected reciprocal rank of each query and side."""
    return rank_metrics.expected_reciprocal_ranks(ranked.counts).cpu()


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
    most: int | None = None,
) -> tuple[QuestionSetup, int, Note]:
    """List the evidence of training questions about a sample of the facts; each question leaves its own fact out.

    The same number of questions gives the same evidence, whatever the seconds.

    Args:
      task: of height 1.
      cfg: the bounds of the list.
      seed: of what is drawn.
      on_phase: receives the number of questions that are listed, and of all.
      deadline: ends the list after a chunk, unless the number of questions is set.
      most: questions that there is time for, those that the setup has already included; None for no such number.

    Returns:
      The setup with the questions whose answer is derived without its own fact; the number of those that were asked;
      and a note on what was left out.

    Raises:
      ValueError: the rules derive no known fact from the others.
    """
    asked, n_all = _draw_questions(task, cfg, seed)
    if cfg.max_questions is None and most is not None:
        asked = select_rows(asked, slice(most))
    n_most = len(asked.entity)
    # What the setup has is not listed again.
    earlier = [] if setup.world is None else [setup.world.evidence]
    for part in earlier:
        asked = select_rows(asked, slice(len(part.label), None))
    facts = setup.facts._replace(network=None)
    work = GroundingWork(leaves_out=True)
    settings = EvidenceConfig(
        left_out=left_out_of(cfg),
        object_identity=task.object_identity,
        with_facts=False,
        n_best=cfg.n_best,
        n_sampled=cfg.n_sampled,
        seed=seed,
    )
    parts = evidence.iter_evidence(
        task.kb, task.sizes, facts, asked, settings, work
    )
    listed, stopped_by = _list_within_bounds(
        itertools.chain(earlier, parts), work, cfg, n_most, deadline, on_phase
    )

    n_derived = len(derived_questions(listed))
    if not n_derived:
        raise ValueError("no rule derives a known fact from the others")
    rows, most = fitting_questions(listed, cfg.max_size_quantile)
    left_out = (
        f", of which {work.n_left_out:,} take too many rows of joins and were left out"
        * bool(work.n_left_out)
    )
    note = (
        f"{len(listed.label):,} of {n_all:,} questions asked{stopped_by}{left_out}; the rules derive the answers of "
        f"{n_derived:,} without their own fact; {n_derived - len(rows):,} of these have more than {most:,} firings and "
        "were left out"
    )

    world = QuestionWorld(setup.aggregation, listed, rows)
    return (
        replace(setup, world=world),
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
    return select_rows(asked, order), n_all


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
    seconds = deadline.seconds_left
    max_firings = cfg.max_firings or MAX_FIRINGS
    if cfg.max_questions is None:
        work.deadline = deadline
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
    return true_rows(listed.answer >= 0)


# -- the listwise fit


def fit_training(
    setup: QuestionSetup,
    cfg: ListwiseConfig,
    seed: int,
    start: Params | None = None,
) -> Training[FitState]:
    """Return the fit of the weights of evidence by gradient steps down the listwise loss.

    Args:
      setup: with listed questions.
      seed: of the order of the questions.
      start: weights to start from; None for the untrained ones.
    """
    assert setup.world is not None, "the questions are listed"
    weighed, world = setup.weighed, setup.world
    params = untrained_params(setup) if start is None else start
    n_questions = len(world.question)

    def take(question: Tensor, share: float, state: FitState) -> FitState:
        rate = share * cfg.learning_rate
        return take_step(weighed, world, state, cfg, question, rate)

    return Training(
        "listwise fit",
        take,
        FitState(params, optim.init(params)),
        _batches(world, seed, batch_size(cfg, n_questions), cfg.n_epochs),
        count_fit_steps(cfg, n_questions),
    )


def count_fit_steps(cfg: ListwiseConfig, n_questions: int) -> int:
    """Return the number of steps of a listwise fit on some questions."""
    n_in_epoch = n_questions // batch_size(cfg, n_questions)
    return cfg.n_epochs * max(1, n_in_epoch)


def take_step(
    weighed: AggregationConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
    rate: float,
) -> FitState:
    """Take one step of Adam on a batch of questions."""
    gradient = batch_gradient(weighed, world, fit.params, cfg, question)
    return FitState(
        *optim.update(AdamConfig(), gradient, fit.adam, fit.params, rate)
    )


def batch_gradient(
    weighed: AggregationConfig,
    world: QuestionWorld,
    params: Params,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
) -> Params:
    """Compute the gradient of the listwise loss of a batch of questions, in parts if they do not fit together."""
    size = learned.capacity(world.evidence, question)
    n_together = max(1, cfg.max_batch_firings // budget.batch_firings(1, size))

    def loss(params: Params, part: I64[Tensor, "b"]) -> Tensor:
        return learned.listwise_loss(
            weighed, world, cfg.penalty, params, part, size=size
        )

    total = tree.zeros_like(params)
    for part in question.split(n_together):
        gradient, _ = tree.grad_and_value(partial(loss, part=part), params)
        share = len(part) / len(question)
        total = tree.map(
            lambda a, b: a + share * b,  # noqa: B023
            total,
            gradient,
        )
    return total


def _batches(
    world: QuestionWorld, seed: int, size: int, n_epochs: int
) -> Iterator[I64[Tensor, "B"]]:
    """Yield passes over the questions in random order, similar sizes together.

    An incomplete batch comes only if it is the only one.
    """
    key = random.key(seed, world.question.device)
    for epoch in range(n_epochs):
        order = random.permutation(
            random.fold_in(key, epoch), len(world.question)
        )
        rows = world.question[order]
        rows = rows[: max(1, len(rows) // size) * size]
        for group in rows.split(8 * size):  # sorted within eight batches
            _, n_firings, _ = learned.question_sizes(world.evidence, group)
            order = torch.argsort(n_firings, stable=True)
            yield from group[order].split(size)


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


def embedding_training(
    task: ProverTask, cfg: EmbeddingConfig, left_out: LeftOut, seed: int
) -> Training[link_embedding.TrainState]:
    """Return the training of link embeddings on known facts of two arguments; nothing of valid or test is read.

    Args:
      left_out: what a training question leaves out, which its model must not have seen.
      seed: of the initial vectors and of the order of the questions.
    """
    asked = evidence.training_questions(training_facts(task))
    label = asked.label
    links = link_embedding.training_links(asked, label, cfg.n_folds, left_out)
    device = label.device

    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    n_labels = evidence.n_labels(task.sizes)
    params = link_embedding.init(
        cfg, task.sizes.n_constants, n_labels, init_key
    )
    step = link_embedding.train_step
    step_fn = GraphedStep(step) if is_cuda(str(device)) else step

    def take(
        rows: Tensor, share: float, state: link_embedding.TrainState
    ) -> link_embedding.TrainState:
        rate = torch.full((), share * cfg.learning_rate, device=device)
        return step_fn(cfg, links, rows, rate, state)

    n_links = len(links.label)
    size = min(cfg.batch_size, n_links)
    return Training(
        "training link embeddings",
        take,
        link_embedding.TrainState(params, optim.init(params)),
        _shuffled_batches(key, n_links, size, cfg.n_epochs),
        cfg.n_epochs * (n_links // size),
        step_fn,
    )


def _shuffled_batches(
    key: I64[Tensor, "2"], n_rows: int, size: int, n_epochs: int
) -> Iterator[I64[Tensor, "n"]]:
    """Yield the rows of each batch: passes in random order, without incomplete batches."""
    for epoch in range(n_epochs):
        order = random.permutation(random.fold_in(key, epoch), n_rows)
        yield from order[: n_rows // size * size].split(size)


# -- priors by a Bellman-Ford network


def make_network(task: ProverTask, params: path_network.Params) -> PathNetwork:
    """Build the prior by a trained network over the facts of a task."""
    facts = evidence.binary_facts(task.kb)
    return path_network.make_network(params, facts, task.sizes.n_constants)


def with_network(setup: QuestionSetup, network: PathNetwork) -> QuestionSetup:
    """Return the setup with priors by a path network, which the score weighs."""
    facts = setup.facts._replace(network=network)
    setup = replace(setup, facts=facts)
    return with_weights_of(setup, uses_bellman_ford=True)


def network_training(
    task: ProverTask, cfg: BellmanFordConfig, left_out: LeftOut, seed: int
) -> Training[path_network.TrainState]:
    """Return the training of a network on the known facts of two arguments; nothing of valid or test is read.

    Args:
      left_out: what a training question leaves out.
      seed: of the initial weights, of the order of the questions, and of what is dropped.
    """
    sizes = _network_config(task, cfg)
    graph = path_network.build_graph(
        sizes, evidence.binary_facts(task.kb), left_out
    )
    device = str(graph.source.device)
    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    # Bytes that the gradients of a step's questions may hold at once; equal on all GPUs of one model.
    most = 1e9
    if is_cuda(device):
        most = min(4e9, 0.1 * memory.total_bytes(device))
    most *= task.cfg.memory_share
    most /= path_network.bytes_per_question(sizes, graph)
    sizes = replace(sizes, n_at_once=max(1, int(most)))
    step = path_network.train_step
    step_fn = GraphedStep(step) if is_cuda(device) else step

    # On the host: a key takes a hundred operations.
    host_key, steps = key.cpu(), itertools.count(1)

    def take(
        edge: Tensor, share: float, state: path_network.TrainState
    ) -> path_network.TrainState:
        drop_key = random.fold_in(random.fold_in(host_key, next(steps)), 1)
        rate = torch.full((), share * cfg.learning_rate, device=device)
        return step_fn(sizes, graph, edge, drop_key.to(device), rate, state)

    edges = path_network.edges_of(sizes, graph, training_facts(task))
    return Training(
        "training a Bellman-Ford network",
        take,
        path_network.init_training(path_network.init(sizes, init_key)),
        _edge_batches(key, edges, cfg.batch_size, cfg.n_steps),
        cfg.n_steps,
        step_fn,
    )


def seconds_of_prior(network: PathNetwork) -> float:
    """Return the seconds of the scores of a question by a network, as those of a few questions take."""
    graph = network.graph
    n_sources = len(graph.source)

    def compute(n: int) -> Tensor:
        some = count_to(n, graph.source) * n_sources // n
        return path_network.entity_scores(
            network, graph.source_label[some], graph.source_entity[some]
        )

    return _seconds_of_some(compute, n_sources)


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
) -> tuple[link_embedding.Params, path_network.Params]:
    """Return zeros in the shapes of the trained link embeddings and network; no model where it is not weighed."""
    device = run_config.device
    key = random.key(0, device)
    embedding = link_embedding.without_models(torch.device(device))
    network = path_network.without_network(torch.device(device))
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
