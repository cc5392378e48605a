"""What a run that learns from questions has beside its task: evidence, and the listwise fit that PPO starts from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import F64
from funcppo.kg.logic.question_types import LeftOut
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_ranking, ranking
from funcppo.kg.ranking.candidates import RankingProtocol
from funcppo.kg.ranking.evidence_ranking import EvidenceScore, QuestionEvidence
from funcppo.kg.ranking.ranking import Ranking, ScorerBySide
from funcppo.kg.run import question_training
from funcppo.kg.run.choices import MIN_GAIN
from funcppo.kg.run.config import Note
from funcppo.kg.run.question_training import FirstEpoch, TrainingQuestions
from funcppo.kg.scores import aggregation, evidence, link_embedding, questions
from funcppo.kg.scores.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Capacity,
)
from funcppo.kg.scores.evidence import Evidence, FactIndex
from funcppo.kg.scores.network_prior import NetworkPrior
from funcppo.kg.scores.question_config import (
    ListwiseConfig,
    QuestionConfig,
    batch_size,
)
from funcppo.kg.scores.questions import Params, PolicyConfig, QuestionWorld
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    ignore_phase,
    with_answers,
)

# rows that joins make for each firing of the valid queries that every validation scores: a minute or less on one core
VALID_ROWS_PER_FIRING = 25
# Firings, and rows of joins, for a ranking of test, which holds a chunk of its questions at a time: some two minutes
# each; a GPU holds more of both, by `budget.GPU_FACTOR`.
MAX_TEST_FIRINGS = 100_000_000
MAX_TEST_ROWS = 400_000_000
# powers of the odds to start from, of which valid chooses
ODDS_POWERS = (1.0, 2.0, 3.0)
# questions whose priors by a network are computed between two looks at the progress
NETWORK_PRIOR_QUESTIONS = 256
# questions that PPO asks beside a network, at most: each needs a pass through it
MAX_NETWORK_QUESTIONS = 16_384
# what may be added to the fitted weights of link embeddings
PRIOR_WEIGHTS = (0.5, 1.0, 2.0)
# and to those of a candidate that a fact links with the question's entity
LINKED_WEIGHTS = (-1.0, -2.0, -4.0)
# Of fewer queries the answers may happen to be unlinked, and others be lost at the last places.
MIN_LINKED_QUERIES = 100
# weights of a Bellman-Ford network, of which valid chooses, and the one without that split
NETWORK_WEIGHTS = (0.25, 0.5, 1.0, 2.0)
DEFAULT_NETWORK_WEIGHT = 0.5
# standard errors that the fit must gain on valid
MIN_GAIN_ERRORS = 2.0
# Of fewer valid triples small gains and losses are mostly chance: only those above two standard errors count.
MIN_VALID_TRIPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSetup:
    """The evidence of a task, on its device, and the policy that weighs it."""

    facts: FactIndex
    """Index of the facts."""
    aggregation: AggregationWorld
    """What the score reads beside evidence."""
    policy: PolicyConfig
    """Which evidence is weighed; its capacity is that of the questions, where there are some."""
    world: QuestionWorld | None = None
    """The questions to learn from; None before they are listed."""
    first_epoch: FirstEpoch | None = None
    """The first epoch of a listwise fit, if it is in the order of the list."""


class ValidQuality(NamedTuple):
    """How well some weights rank valid."""

    metric: float  # larger is better
    reciprocal_rank: F64[Tensor, "Q"]  # of each query and side


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


def set_up(task: ProverTask, cfg: QuestionConfig) -> QuestionSetup:
    """Index the facts of a task of height 1.

    Args:
      cfg: degrees, walks and priors that are left open are not weighed, and odds start with power 1. Evidence has the
        probabilities of walks unless these are off.
    """
    facts = evidence.index_facts(
        task.kb,
        task.sizes,
        task.cfg.memory_share,
        with_walks=cfg.walks is not False,
        plan=task.answers_plan,
    )
    world = aggregation.make_world(task.kb, task.sizes, facts)
    weighed = AggregationConfig(
        sizes=task.sizes,
        n_shapes=aggregation.n_shapes(world),
        uses_links=cfg.links,
        uses_degrees=cfg.degrees is True,
        uses_walks=cfg.walks is True,
        uses_embedding=cfg.embedding is True,
        uses_bellman_ford=cfg.bellman_ford is True,
        odds_power=1.0 if cfg.odds_power == "auto" else cfg.odds_power,
    )
    return QuestionSetup(
        facts=facts,
        aggregation=world,
        policy=PolicyConfig(aggregation=weighed, capacity=Capacity(1, 1, 1)),
    )


def training_world(setup: QuestionSetup, device: str) -> QuestionWorld:
    """The questions, or a stand-in for them: the shapes of the training state are the same."""
    if setup.world is not None:
        return setup.world
    world = questions.blank_world(setup.aggregation)
    return tree.map(lambda x: x.to(device), world)


def untrained_params(setup: QuestionSetup, device: str) -> Params:
    """The weights that add the odds of the rule confidences, each to the power of the settings."""
    return questions.init(setup.policy, random.key(0, device))


def with_odds_power(setup: QuestionSetup, power: float) -> QuestionSetup:
    """The setup whose untrained weights add powers of the odds."""
    policy = _weighing(setup.policy, odds_power=power)
    return dataclasses.replace(setup, policy=policy)


def _weighing(policy: PolicyConfig, **settings: bool | float) -> PolicyConfig:
    """The policy with other settings of its aggregation."""
    aggregation = dataclasses.replace(policy.aggregation, **settings)
    return dataclasses.replace(policy, aggregation=aggregation)


def make_scorer(
    task: ProverTask,
    setup: QuestionSetup,
    params: Params,
    on_progress: ProgressCallback = ignore_progress,
) -> ScorerBySide:
    """The scorer of candidates by given weights."""
    score = _score(setup, params)
    return evidence_ranking.make_scorer(task, setup.facts, score, on_progress)


def make_fact_scorer(
    task: ProverTask, setup: QuestionSetup, params: Params, left_out: LeftOut
) -> ScorerBySide:
    """The scorer of known facts by given weights, each as an answer that is left out of its question."""
    score = _score(setup, params)
    return evidence_ranking.make_fact_scorer(task, setup.facts, score, left_out)


def make_scorers(
    task: ProverTask,
    setup: QuestionSetup,
    rule_scores: Sequence[str],
    params: Sequence[Params],
    on_progress: ProgressCallback = ignore_progress,
) -> list[ScorerBySide]:
    """Scorers of the same candidates by rule scores and by several weights, for which evidence is collected once."""
    scores = [
        evidence_ranking.make_rule_score(task, name) for name in rule_scores
    ]
    scores += [_score(setup, one) for one in params]
    return evidence_ranking.make_scorers(task, setup.facts, scores, on_progress)


def _score(setup: QuestionSetup, params: Params) -> EvidenceScore:
    """The score of evidence by given weights."""
    device = setup.facts.degree.device
    weights = tree.map(lambda x: x.to(device), params.score)
    return evidence_ranking.make_learned_score(
        setup.policy.aggregation, setup.aggregation, weights
    )


class ValidEvidence:
    """The evidence of the queries that every validation ranks, collected once.

    Attributes:
      queries: the queries [Q, W].
      task: the task with all their answers.
    """

    def __init__(
        self,
        task: ProverTask,
        facts: FactIndex,
        queries: np.ndarray,
        sides: Sequence[int],
    ) -> None:
        self.queries = queries
        atoms = torch.from_numpy(np.ascontiguousarray(queries))
        self._parts: Mapping[int, list[QuestionEvidence]] = {
            side: list(
                evidence_ranking.query_evidence(task, facts, atoms, side)
            )
            for side in sides
        }
        # The candidates that have evidence are the answers that rules derive.
        derived = [
            evidence_ranking.evidence_atoms(part, task.sizes)
            for parts in self._parts.values()
            for part in parts
        ]
        self.task = with_answers(task, atoms, sides, torch.cat(derived))
        self._listed = ranking.list_split(
            self.task,
            queries,
            RankingProtocol(sides=tuple(sides)),
            by_side=True,
        )

    def with_embedding(self, embedding: link_embedding.Params) -> ValidEvidence:
        """The evidence with priors by link embeddings."""
        return self._map(
            lambda part: evidence.with_prior(part, embedding, "fact")
        )

    def with_network(self, network: NetworkPrior) -> ValidEvidence:
        """The evidence with priors by a Bellman-Ford network."""
        return self._map(
            lambda part: evidence.with_network_prior(part, network, "fact")
        )

    def with_other_facts(self, task: ProverTask) -> ValidEvidence:
        """The evidence with the counts of other facts of a task."""
        changed = copy.copy(self)
        changed.task = dataclasses.replace(
            self.task, other_facts=task.other_facts
        )
        return changed

    def _map(self, change: Callable[[Evidence], Evidence]) -> ValidEvidence:
        """The evidence with a change in every part."""
        changed = copy.copy(self)
        changed._parts = {
            side: [
                part._replace(evidence=change(part.evidence)) for part in parts
            ]
            for side, parts in self._parts.items()
        }
        return changed

    @property
    def n_questions(self) -> int:
        """The number of distinct questions."""
        return sum(
            len(part.evidence.label)
            for parts in self._parts.values()
            for part in parts
        )

    def rank(self, setup: QuestionSetup, params: Params) -> Ranking:
        """The queries, ranked by given weights."""
        return self._rank_by(_score(setup, params))

    def rank_by_rules(self, name: str) -> Ranking:
        """The queries, ranked by a rule score, such as noisy-or."""
        return self._rank_by(evidence_ranking.make_rule_score(self.task, name))

    def _rank_by(self, score: EvidenceScore) -> Ranking:
        """The queries, ranked by a score of their evidence."""
        scorer = evidence_ranking.make_scorer_of(self.task, self._parts, score)
        return ranking.rank_listed(self._listed, scorer)


# -- the fit


def resolve_left_out(task: ProverTask, cfg: QuestionConfig) -> QuestionConfig:
    """The settings with what a question leaves out: its pair where valid's pairs are never linked by a known fact."""
    if cfg.left_out != "auto":
        return cfg
    is_linked = share_of_linked(task, task.dataset.valid) > 0
    has_valid = len(task.dataset.valid) > 0
    left_out = "fact" if is_linked or not has_valid else "pair"
    return dataclasses.replace(cfg, left_out=left_out)


def has_few_valid(task: ProverTask) -> bool:
    """Whether valid is so small that only differences above two standard errors count.

    False without valid, and for Countries, whose metric is no mean over queries.
    """
    n_triples = len(task.dataset.valid)
    return not task.is_countries and 0 < n_triples < MIN_VALID_TRIPLES


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
    collected = question_training.collect_questions(
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
    policy = _weighing(
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


def with_walks(setup: QuestionSetup) -> QuestionSetup:
    """The setup, whose evidence has walks, with a policy that weighs them."""
    policy = _weighing(setup.policy, uses_walks=True)
    return dataclasses.replace(setup, policy=policy)


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
        policy=_weighing(setup.policy, uses_walks=False),
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
        listed = evidence.with_prior(world.evidence, embedding, left_out)
        world = world._replace(evidence=listed)
    return dataclasses.replace(
        setup,
        facts=setup.facts._replace(embedding=embedding),
        policy=_weighing(setup.policy, uses_embedding=True),
        world=world,
    )


def with_network(
    setup: QuestionSetup,
    network: NetworkPrior,
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
        policy=_weighing(setup.policy, uses_bellman_ford=True),
        world=world,
    )


def without_network(setup: QuestionSetup) -> QuestionSetup:
    """The setup with a policy that weighs no Bellman-Ford network."""
    policy = _weighing(setup.policy, uses_bellman_ford=False)
    return dataclasses.replace(setup, policy=policy)


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
    network: NetworkPrior,
    left_out: LeftOut,
    on_phase: PhaseCallback,
) -> QuestionWorld:
    """The world with priors by a network of the questions that are asked, some after others."""
    listed = world.evidence
    is_asked = torch.zeros_like(listed.label, dtype=torch.bool)
    is_asked = is_asked.index_fill(0, world.question, True)
    n_questions = len(listed.label)
    priors = [listed.network_prior[:0]]
    for start in range(0, n_questions, NETWORK_PRIOR_QUESTIONS):
        on_phase("priors by the Bellman-Ford network", start, n_questions)
        stop = min(start + NETWORK_PRIOR_QUESTIONS, n_questions)
        part = evidence.slice_questions(listed, start, stop)
        part = evidence.with_network_prior(
            part, network, left_out, is_asked[start:stop]
        )
        priors.append(part.network_prior)
    listed = listed._replace(network_prior=torch.cat(priors))
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
        policy = _weighing(setup.policy, uses_degrees=uses_degrees)
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
        fitted, metric, "prior_weight", PRIOR_WEIGHTS, of, beyond_chance
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
        fitted, metric, "linked_weight", LINKED_WEIGHTS, of, beyond_chance
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

    # The first one is chosen if they are equal, and nothing added for next to nothing.
    best = max(mrr, key=lambda amount: mrr[amount])
    listing = ", ".join(f"{amount:g} {mrr[amount]:.4f}" for amount in mrr)
    if mrr[best] <= mrr[0.0] + MIN_GAIN:
        best = 0.0
    elif beyond_chance and not is_better(qualities[best], qualities[0.0]):
        best = 0.0
        listing += f", no gain above {MIN_GAIN_ERRORS:g} standard errors"
    note = f"{description.format(f'{best:g}')}: valid: {listing}"
    return found[best]._replace(notes=[*fitted.notes, Note("detail", note)])


def weigh_network(
    fitted: ListwiseFit,
    network: NetworkPrior,
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
        policy=_weighing(fitted.setup.policy, uses_bellman_ford=True),
    )
    if starts_at_rules:
        params = _with_network_weight(fitted.params, 0.0)
        note = "Bellman-Ford network: weight 0: PPO starts from the rule confidences (--listwise.learning-rate 0)"
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
    for weight in NETWORK_WEIGHTS:
        params = _with_network_weight(fitted.params, weight)
        quality = metric(setup, params)
        mrr[weight] = quality.metric
        found[weight] = fitted._replace(
            setup=setup, params=params, quality=quality
        )
    # The first one is chosen if they are equal.
    best = max(mrr, key=lambda weight: mrr[weight])
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


def is_better(quality: ValidQuality, other: ValidQuality) -> bool:
    """Whether the mean gain in reciprocal rank is above two standard errors of it, which pairs the queries.

    The best of some 16 epochs gains a standard error or more by chance alone.
    """
    gain = quality.reciprocal_rank - other.reciprocal_rank
    error = gain.std() / len(gain) ** 0.5
    return bool(gain.mean() > MIN_GAIN_ERRORS * error)


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
    world = training_world(setup, device)
    unknown = ValidQuality(0.0, torch.zeros(0))
    value = metric(setup, params) if metric else unknown
    yield _Fit(setup, params, value, 0)
    if not cfg.learning_rate:
        return
    phase = _describe_fit(setup)
    on_phase(phase, 0, cfg.n_epochs, deadline)
    epochs = question_training.fit_listwise(
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
