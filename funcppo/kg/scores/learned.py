"""A score for each candidate of a question, learnt from the evidence for and against it.

With x the features of a firing (log-odds of the rule's confidence; logs of its support, its fan-out, the number of
groundings, and of the probability of a random walk along its body, or if that is no path of their share of all
groundings; and 1), the rules that derive a candidate add up by learnt shares:

    score = log sum_firings exp(feature_weight[label, shape] . x + rule_weight[side, rule])
            + own_degree_weight[label, degree] + linked_weight[label]
            + sum_links link_weight[label of link, label]
            + prior_weight[label] * embedding_score + network_prior_weight[label] * path_score

where the label is that of the question (see `evidence`), the shape of a rule is the number of its atoms and constants,
degrees count by `DEGREE_BUCKETS`, and the two scores are those of `link_embedding` and of `path_network`. The initial
weights give the log of the sum of the odds of the confidences, each to a power. An entity that no rule derives has the
setting `no_proof` in place of the logarithm of the sum.

`score` takes a `Batch`: `gather` makes one of fixed shapes for training, `whole` one of all candidates for ranking.
`LearnedScore` is the score as a value, with the terms that add up to it.

The score of a question's candidates is a softmax policy over them. `listwise_loss` is the negative log-probability of
the answer: the exact objective, which the listwise fit minimises by gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core.settings import FiniteFloat, PositiveFloat, Size, check_fields
from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.config import Penalty
from funcppo.kg.logic.derive import LeftOut, Questions
from funcppo.kg.logic.kb import HEAD, KBSizes, KnowledgeBase
from funcppo.kg.logic.row_index import (
    binary_search,
    count_to,
    expand_ranges,
    first_of_run,
    unique_inverse,
)
from funcppo.kg.scores import link_embedding, path_network
from funcppo.kg.scores.evidence import (
    FIRING_FIELDS,
    Evidence,
    FactIndex,
    n_labels,
)
from funcppo.kg.scores.score import Candidates, Need, Score, Term

TermKind = Literal["rules", "own-degree", "embedding", "bellman-ford", "links"]
# in the order of an explanation
EXPLAINED_KINDS: tuple[TermKind, ...] = (
    "rules",
    "links",
    "own-degree",
    "embedding",
    "bellman-ford",
)
# where the buckets of degrees begin: 0, 1, 2, 3-4, 5-8, 9 and more
DEGREE_BUCKETS = (1, 2, 3, 5, 9)
N_BUCKETS = len(DEGREE_BUCKETS) + 1
N_FEATURES = 6
# Logarithms of counts are divided by this, so that a step of training moves all features alike.
LOG_SCALE = 3.0
# confidences are clipped to [c, 1 - d]
MIN_CONFIDENCE, MAX_CONFIDENCE = 1e-4, 0.999
# scores of firings are clipped to [-s, s]
MAX_FIRING_SCORE = 25.0
# added to the sum over firings, so that its logarithm is finite
MIN_SUM = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationConfig:
    """Settings of which evidence the score weighs."""

    sizes: KBSizes
    """Sizes of the knowledge base."""
    n_shapes: Size
    """Number of shapes that its rules have."""
    uses_links: bool = True
    """Weigh the facts that link a candidate to the question's entity."""
    uses_embedding: bool = False
    """Weigh the candidate's prior by link embeddings."""
    uses_bellman_ford: bool = False
    """Weigh the candidate's prior by a Bellman-Ford network."""
    odds_power: PositiveFloat = 1.0
    """Initial weight of the log-odds of a confidence: the larger it is, the less other rules add to the best one."""
    no_proof: FiniteFloat | None = None
    """In place of the rules' term of entities that none derives; None: these are not told apart, and rank last."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class AggregationWorld(NamedTuple):
    """Counts and shapes of rules, which the score reads and training never writes."""

    support: F32[Tensor, "R"]
    body_pairs: F32[Tensor, "R"]
    # the least support of any rule: with less, a rule does not count
    min_support: F32[Tensor, ""]
    shape: I64[Tensor, "R"]  # of each rule


class Params(NamedTuple):
    """Weights by label of the question."""

    feature_weight: F32[Tensor, "B S 6"]
    rule_weight: F32[Tensor, "2 R"]
    own_degree_weight: F32[Tensor, "B 6"]
    linked_weight: F32[Tensor, "B"]
    link_weight: F32[Tensor, "B B"]  # [label of the link, label]
    # without entries where the prior by link embeddings is not weighed
    prior_weight: F32[Tensor, "B"]
    # the same of the prior by a Bellman-Ford network
    network_prior_weight: F32[Tensor, "B"]


class Batch(NamedTuple):
    """Candidates with their firings and links; padding is masked and belongs to candidate 0."""

    label: I64[Tensor, "L"]
    entity: I64[Tensor, "L"]
    own_degree: I64[Tensor, "L"]
    embedding_score: F32[Tensor, "L"]
    path_score: F32[Tensor, "L"]

    firing_row: I64[Tensor, "N"]  # the candidate of each firing
    firing_mask: Bool[Tensor, "N"]
    rule: I64[Tensor, "N"]
    is_left_out: Bool[Tensor, "N"]
    n_groundings: I64[Tensor, "N"]
    fan_out: I64[Tensor, "N"]
    n_all_groundings: I64[Tensor, "N"]
    walk: F32[Tensor, "N"]

    link_row: I64[Tensor, "K"]  # the candidate of each link
    link_mask: Bool[Tensor, "K"]
    link_label: I64[Tensor, "K"]


# of each candidate
_CANDIDATE_COLUMNS = ("entity", "own_degree", "embedding_score", "path_score")


class Capacity(NamedTuple):
    """Largest numbers of candidates, firings and links of a question in a padded batch."""

    n_candidates: int
    n_firings: int
    n_links: int


def make_world(kb: KnowledgeBase, sizes: KBSizes) -> AggregationWorld:
    """Build the inputs of the score: counts and shapes of the rules."""
    shape = rule_shapes(kb.rules, sizes.n_constants)
    support = kb.support.float()
    return AggregationWorld(
        support=support,
        body_pairs=kb.body_pairs.float(),
        min_support=support.min() if len(support) else torch.zeros(()),
        shape=shape,
    )


def rule_shapes(
    rules: I32[Tensor, "R M W"], n_constants: int
) -> I64[Tensor, "R"]:
    """Return the shape of each rule: its number of atoms and constants, numbered in ascending order from 0."""
    terms = rules[:, :, 1:]
    is_constant = (terms > 0) & (terms <= n_constants)
    n_atoms = (rules[:, :, 0] > 0).sum(1)
    n_terms = terms.shape[1] * terms.shape[2]
    _, shape = unique_inverse(n_atoms * (n_terms + 1) + is_constant.sum((1, 2)))
    return shape


def degree_bucket(degree: I64[Tensor, "n"]) -> I64[Tensor, "n"]:
    """Return the bucket of each degree, 0 to N_BUCKETS - 1."""
    # Sums of comparisons: a tensor of the edges would be copied from the host, which a CUDA graph cannot hold.
    bucket = torch.zeros_like(degree)
    for edge in DEGREE_BUCKETS:
        bucket = bucket + (degree >= edge)
    return bucket


def n_shapes(world: AggregationWorld) -> int:
    """Return the number of shapes that the rules have, at least 1."""
    return 1 + int(world.shape.max()) if len(world.shape) else 1


def init(cfg: AggregationConfig, key: I64[Tensor, "2"]) -> Params:
    """Return the weights before training: `odds_power` for a confidence's log-odds, 0 for all else; none is random."""
    n = n_labels(cfg.sizes)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=key.device)

    is_log_odds = count_to(N_FEATURES, key) == 0
    by_feature = cfg.odds_power * is_log_odds.float()
    return Params(
        feature_weight=zeros(n, cfg.n_shapes, N_FEATURES) + by_feature,
        rule_weight=zeros(2, cfg.sizes.n_rules),
        own_degree_weight=zeros(n, N_BUCKETS),
        linked_weight=zeros(n),
        link_weight=zeros(n, n),
        prior_weight=zeros(n if cfg.uses_embedding else 0),
        network_prior_weight=zeros(n if cfg.uses_bellman_ford else 0),
    )


def knows_all(params: Params) -> bool:
    """Return whether the weights tell entities apart that no rule derives; untrained ones do not."""
    others = params.own_degree_weight, params.prior_weight
    weights = [*others, params.network_prior_weight]
    return any(bool(weight.any()) for weight in weights)


def score(
    cfg: AggregationConfig,
    world: AggregationWorld,
    params: Params,
    batch: Batch,
    kinds: Sequence[TermKind] | None = None,
) -> F32[Tensor, "L"]:
    """Compute the score of each candidate, a logit among the candidates of its question.

    Args:
      kinds: of evidence that count; None for all that are weighed.
    """
    total, *others = [
        _term(kind, cfg, world, params, batch)
        for kind in kinds or weighed_kinds(cfg)
    ]
    for added in others:
        total = total + added
    return total


def weighed_kinds(cfg: AggregationConfig) -> tuple[TermKind, ...]:
    """Return the kinds of evidence that are weighed, in the order in which their terms are added."""
    is_weighed: dict[TermKind, bool] = {
        "rules": True,
        "own-degree": True,
        "embedding": cfg.uses_embedding,
        "bellman-ford": cfg.uses_bellman_ford,
        "links": cfg.uses_links,
    }
    return tuple(kind for kind, is_in in is_weighed.items() if is_in)


def _term(
    kind: TermKind,
    cfg: AggregationConfig,
    world: AggregationWorld,
    params: Params,
    batch: Batch,
) -> F32[Tensor, "L"]:
    """Compute the term of one kind of evidence in the score of each candidate."""
    label = batch.label
    match kind:
        case "rules":
            # The logarithm of the summed amounts of the rules that derive a candidate.
            amount = firing_amounts(cfg, world, params, batch)
            zero = torch.zeros_like(params.linked_weight[label])
            total = zero.index_add(0, batch.firing_row, amount)
            return torch.log(total + MIN_SUM)
        case "own-degree":
            bucket = degree_bucket(batch.own_degree)
            return params.own_degree_weight[label, bucket]
        case "embedding":
            return params.prior_weight[label] * batch.embedding_score
        case "bellman-ford":
            return params.network_prior_weight[label] * batch.path_score
        case "links":
            return _link_scores(params, batch)


def firing_amounts(
    cfg: AggregationConfig,
    world: AggregationWorld,
    params: Params,
    batch: Batch,
) -> F32[Tensor, "N"]:
    """Compute the amount that each firing adds to its candidate's sum; 0 for padding and for too little support."""
    rule, is_left_out = batch.rule, batch.is_left_out
    support = (world.support[rule] - is_left_out.float()).clamp_min(0.0)
    confidence = support / world.body_pairs[rule].clamp_min(1.0)
    n_groundings = batch.n_groundings.clamp_min(1).float()
    # A body that is no path has no walk.
    share = n_groundings / batch.n_all_groundings.clamp_min(1)
    share = torch.where(batch.walk > 0, batch.walk, share)
    fan_out = batch.fan_out.clamp_min(1).float()

    features = torch.stack(
        [
            torch.logit(confidence.clamp(MIN_CONFIDENCE, MAX_CONFIDENCE)),
            support.clamp_min(1.0).log() / LOG_SCALE,
            fan_out.log() / LOG_SCALE,
            n_groundings.log(),
            share.log() / LOG_SCALE,
            torch.ones_like(share),
        ],
        dim=1,
    )
    label = batch.label[batch.firing_row]
    weight = params.feature_weight[label, world.shape[rule]]
    strength = (weight * features).sum(1)
    strength = strength + params.rule_weight[label % 2, rule]
    strength = strength.clamp(-MAX_FIRING_SCORE, MAX_FIRING_SCORE)

    is_supported = ~is_left_out | (support >= world.min_support)
    return torch.where(batch.firing_mask & is_supported, strength.exp(), 0.0)


def _link_scores(params: Params, batch: Batch) -> F32[Tensor, "L"]:
    """Compute the term of links in the score of each candidate."""
    zero = torch.zeros_like(params.linked_weight[batch.label])
    label = batch.label[batch.link_row]
    weight = params.link_weight[batch.link_label, label]
    weight = torch.where(batch.link_mask, weight, 0.0)
    n_links = zero.index_add(0, batch.link_row, batch.link_mask.float())
    linked = torch.where(n_links > 0, params.linked_weight[batch.label], 0.0)
    return linked.index_add(0, batch.link_row, weight)


# -- batches


def capacity(evidence: Evidence, question: I64[Tensor, "n"]) -> Capacity:
    """Return the largest numbers of candidates, firings and links among the questions, at least 1 each."""
    counts = question_sizes(evidence, question)
    return Capacity(
        *(int(count.max()) if len(count) else 1 for count in counts)
    )


def question_sizes(
    evidence: Evidence, question: I64[Tensor, "n"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Count the candidates, firings and links of each question; 1 instead of 0."""
    first = evidence.candidate_offsets[question]
    last = evidence.candidate_offsets[question + 1]
    counts = (
        last - first,
        evidence.firing_offsets[last] - evidence.firing_offsets[first],
        evidence.link_offsets[last] - evidence.link_offsets[first],
    )
    candidates, firings, links = (count.clamp_min(1) for count in counts)
    return candidates, firings, links


def gather(
    evidence: Evidence, question: I64[Tensor, "B"], size: Capacity
) -> Batch:
    """Gather the evidence of questions in fixed shapes; question b has rows b * n_candidates and on.

    Args:
      size: no question has more.
    """
    n_rows = len(question)
    first = evidence.candidate_offsets[question]
    last = evidence.candidate_offsets[question + 1]
    candidate, _ = _padded_range(first, last, size.n_candidates)
    firing, firing_mask = _padded_range(
        evidence.firing_offsets[first],
        evidence.firing_offsets[last],
        size.n_firings,
    )
    link, link_mask = _padded_range(
        evidence.link_offsets[first],
        evidence.link_offsets[last],
        size.n_links,
    )
    # The row of a firing is that of its candidate, counted from the first one of its question.
    shift = count_to(n_rows, question) * size.n_candidates
    shift = shift - first
    firing_row = _owner(evidence.firing_offsets, firing, shift, firing_mask)
    link_row = _owner(evidence.link_offsets, link, shift, link_mask)
    candidate, firing, link = (
        position.view(-1) for position in (candidate, firing, link)
    )
    columns = {
        **_take_columns(evidence, _CANDIDATE_COLUMNS, candidate),
        **_take_columns(evidence, FIRING_FIELDS, firing),
    }
    return Batch(
        label=evidence.label[question].repeat_interleave(size.n_candidates),
        firing_row=firing_row,
        firing_mask=firing_mask.view(-1),
        link_row=link_row,
        link_mask=link_mask.view(-1),
        link_label=_take(evidence.link_label, link),
        **columns,
    )


def whole(evidence: Evidence) -> Batch:
    """Return a batch of all candidates of all questions, without padding."""
    names = (*_CANDIDATE_COLUMNS, *FIRING_FIELDS, "link_label")
    return Batch(
        label=evidence.label[evidence.question],
        firing_row=torch.repeat_interleave(evidence.firing_offsets.diff()),
        firing_mask=torch.ones_like(evidence.is_left_out),
        link_row=torch.repeat_interleave(evidence.link_offsets.diff()),
        link_mask=torch.ones_like(evidence.link_label, dtype=torch.bool),
        **{name: getattr(evidence, name) for name in names},
    )


def _padded_range(
    start: I64[Tensor, "B"], stop: I64[Tensor, "B"], width: int
) -> tuple[I64[Tensor, "B W"], Bool[Tensor, "B W"]]:
    """Return positions start, start + 1, ... of each row, and which of them lie before stop."""
    position = start[:, None] + count_to(width, start)
    return position, position < stop[:, None]


def _owner(
    offsets: I64[Tensor, "L1"],
    position: I64[Tensor, "B W"],
    shift: I64[Tensor, "B"],
    mask: Bool[Tensor, "B W"],
) -> I64[Tensor, "BW"]:
    """Return the batch row that each position belongs to; 0 for padding."""
    owner = torch.searchsorted(offsets, position, right=True) - 1
    return torch.where(mask, owner + shift[:, None], 0).view(-1)


def _take_columns(
    evidence: Evidence, names: Sequence[str], position: I64[Tensor, "n"]
) -> dict[str, Tensor]:
    """Return columns of evidence at given positions."""
    return {name: _take(getattr(evidence, name), position) for name in names}


def _take(values: Tensor, position: I64[Tensor, "n"]) -> Tensor:
    """Return the values at given positions; a position beyond the end gives an arbitrary value."""
    if not len(values):
        return torch.zeros_like(position, dtype=values.dtype)
    return values[position.clamp_max(len(values) - 1)]


# -- the score as a value


class Weights(NamedTuple):
    """Inputs of the learned score, on the device of the task."""

    facts: FactIndex
    cfg: AggregationConfig
    world: AggregationWorld
    params: Params
    left_out: LeftOut
    smoothing: float  # what was added to the body pairs of every rule


class WeighedRule(NamedTuple):
    """Rule that derives a candidate, with its share and counts."""

    rule: int
    share: float  # of all that the rules add up to
    support: int  # without the fact that is left out
    body_pairs: int
    n_groundings: int
    fan_out: int  # candidates that it derives for the question
    n_all_groundings: int  # for all these
    # probability that a random walk along its body ends in the candidate; None where the body is no path
    walk: float | None


class CountedFacts(NamedTuple):
    """Number of facts of a relation that hold the candidate at an argument position."""

    predicate: int
    place: int  # HEAD or TAIL
    n_facts: int


class LearnedScore(Score):
    """Sum of the terms of kinds of evidence, by learned weights."""

    needs: frozenset[Need] = frozenset({"questions"})
    takes_other_facts = False

    def __init__(
        self,
        name: str,
        weights: Weights,
        kinds: Sequence[TermKind] | None = None,
    ) -> None:
        """Set the weights and the kinds of evidence that count; None for all that are weighed."""
        super().__init__(name)
        self.weights = weights
        self.facts = weights.facts
        self.left_out = weights.left_out
        self._kinds = kinds or weighed_kinds(weights.cfg)
        self.knows_all = knows_all(weights.params)
        self.ranks_all = self.knows_all and weights.cfg.no_proof is not None

    def log_odds(self, found: Candidates) -> F32[Tensor, "L"]:
        """Compute the score, a logit among the candidates of a question."""
        return self._score(whole(found.evidence), self._kinds)

    def log_odds_of_all(self, questions: Questions) -> F64[Tensor, "Q E"]:
        """Compute the score of every entity as an answer that no rule derives; the questions leave nothing out."""
        facts, cfg, _, params, *_ = self.weights
        label = questions.label
        given = questions.entity
        total = params.linked_weight.new_full(
            (len(label), cfg.sizes.n_constants),
            cfg.no_proof or 0.0,
            dtype=torch.float64,
        )
        if "own-degree" in self._kinds:
            total += _own_degrees_of_all(facts, params, label, total.shape[1])
        if "embedding" in self._kinds:
            scores = link_embedding.entity_scores(facts.embedding, label, given)
            total += params.prior_weight[label, None] * scores
        if "bellman-ford" in self._kinds:
            assert facts.network is not None, "its weight is there"
            scores = path_network.entity_scores(facts.network, label, given)
            total += params.network_prior_weight[label, None] * scores
        if "links" in self._kinds:
            row, entity, added = _links_of_all(
                facts, params, label, given, total.shape[1]
            )
            cell = row, entity - 1
            total = total.index_put(cell, added, accumulate=True)
        return total

    def log_odds_without_rules(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the score of candidates with evidence as answers that no rule derives."""
        kinds: list[TermKind] = [x for x in self._kinds if x != "rules"]
        others = self._score(whole(found.evidence), kinds).double()
        return others + (self.weights.cfg.no_proof or 0.0)

    def _score(
        self, batch: Batch, kinds: Sequence[TermKind]
    ) -> F32[Tensor, "L"]:
        """Compute the sum of the terms of the given kinds of evidence."""
        with torch.no_grad():
            return score(*self.weights[1:4], batch, kinds)

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the term of each piece of evidence; facts are listed one by one."""
        part = found.evidence
        batch = whole(part)
        pieces: dict[str, Callable[[Evidence, int], Iterator[Term]]] = {
            "rules": self._explain_rules,
            "links": self._explain_links,
        }
        found_terms: list[Term] = []
        for kind in EXPLAINED_KINDS:
            if kind not in self._kinds:
                continue
            if kind in pieces:
                found_terms += pieces[kind](part, row)
                continue
            added = float(self._score(batch, [kind])[row])
            is_degree = kind == "own-degree"
            detail = int(part.own_degree[row]) if is_degree else None
            found_terms.append(Term(kind, added, detail))
        return found_terms

    def _explain_rules(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield one term of all rules; its detail lists the rules by share, the largest first."""
        cfg, world, params = self.weights[1:4]
        amounts = firing_amounts(cfg, world, params, whole(part)).double()
        firings = range(*part.firing_offsets[row : row + 2].tolist())
        total = float(amounts[firings.start : firings.stop].sum())
        found = [
            self._weigh_rule(
                part, i, float(amounts[i]) / total if total else 0.0
            )
            for i in firings
        ]
        log_sum = float(torch.log(torch.tensor(total + MIN_SUM)))
        detail = tuple(sorted(found, key=lambda r: (-r.share, r.rule)))
        yield Term("rules", log_sum, detail)

    def _weigh_rule(self, part: Evidence, i: int, share: float) -> WeighedRule:
        """Return a firing's rule with its share and counts."""
        world, rule = self.weights.world, int(part.rule[i])
        return WeighedRule(
            rule=rule,
            share=share,
            support=int(world.support[rule]) - int(part.is_left_out[i]),
            body_pairs=round(
                float(world.body_pairs[rule]) - self.weights.smoothing
            ),
            n_groundings=int(part.n_groundings[i]),
            fan_out=int(part.fan_out[i]),
            n_all_groundings=int(part.n_all_groundings[i]),
            walk=float(part.walk[i]) or None,
        )

    def _explain_links(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield a term per fact between the candidate and the question's entity, and a term for being linked at all."""
        params = self.weights.params
        label = int(part.label[part.question[row]])
        links = slice(*part.link_offsets[row : row + 2].tolist())
        link_labels = part.link_label[links].tolist()
        for link in link_labels:
            fact = CountedFacts(link // 2, HEAD + link % 2, 1)
            yield Term("fact", float(params.link_weight[link, label]), fact)
        if link_labels:
            yield Term("linked", float(params.linked_weight[label]))


def _own_degrees_of_all(
    facts: FactIndex, params: Params, label: I64[Tensor, "n"], n_entities: int
) -> F32[Tensor, "n E"]:
    """Compute the term of own degrees of every entity as an answer to questions of each label."""
    n = len(params.own_degree_weight)
    distinct, row = unique_inverse(label)
    entity, of_label = facts.degree_key // n, facts.degree_key % n
    place, found = binary_search(distinct, of_label)
    weight = params.own_degree_weight[of_label, degree_bucket(facts.degree)]
    # Without a fact of the label a degree is 0.
    table = params.own_degree_weight[distinct, :1].repeat(1, n_entities + 1)
    table = table.index_put((place[found], entity[found]), weight[found])
    return table[row, 1:]


def _links_of_all(
    facts: FactIndex,
    params: Params,
    label: I64[Tensor, "n"],
    given: I64[Tensor, "n"],
    n_entities: int,
) -> tuple[I64[Tensor, "m"], I64[Tensor, "m"], F64[Tensor, "m"]]:
    """Compute the term of links of the entities that have any; a link with the question's label makes a known answer.

    Returns:
      The row of the question, the entity, and the term of each.
    """
    base = n_entities + 1
    start = torch.searchsorted(facts.link_key, given * base)
    stop = torch.searchsorted(facts.link_key, (given + 1) * base)
    row, position = expand_ranges(start, stop - start)
    entity, link = facts.link_key[position] % base, facts.link_label[position]
    is_loop = entity == given[row]
    is_own = (link == label[row]) | (is_loop & (link // 2 == label[row] // 2))
    row, entity, link = row[~is_own], entity[~is_own], link[~is_own]

    # The links of a pair are next to each other.
    weight = params.link_weight[link, label[row]].double()
    is_first = first_of_run(row * base + entity)
    row, entity = row[is_first], entity[is_first]
    of_links = torch.zeros_like(row, dtype=torch.float64)
    of_links = of_links.index_add(0, is_first.cumsum(0) - 1, weight)
    return row, entity, of_links + params.linked_weight[label[row]].double()


class QuestionWorld(NamedTuple):
    """Questions to learn from with their evidence; training never writes them."""

    aggregation: AggregationWorld
    evidence: Evidence
    question: I64[Tensor, "Q"]  # rows of the evidence to ask, at least one


# -- the listwise objective


def log_odds_of_listed(
    cfg: AggregationConfig,
    world: QuestionWorld,
    params: Params,
    question: I64[Tensor, "B"],
    size: Capacity,
) -> F32[Tensor, "B S"]:
    """Compute the logits of each question's candidates; the lowest number where there is no candidate.

    The candidates that were drawn from a larger number stand for them all: their logits grow accordingly.

    Args:
      size: no question has more.
    """
    listed = world.evidence
    batch = gather(listed, question, size)
    scores = score(cfg, world.aggregation, params, batch)
    position, is_there = _padded_range(
        listed.candidate_offsets[question],
        listed.candidate_offsets[question + 1],
        size.n_candidates,
    )
    position = position.clamp_max(len(listed.log_listed) - 1)
    logits = scores.view(position.shape) - listed.log_listed[position]
    lowest = torch.finfo(logits.dtype).min
    return torch.where(is_there, logits, lowest)


def listwise_loss(
    cfg: AggregationConfig,
    world: QuestionWorld,
    penalty: Penalty,
    params: Params,
    question: I64[Tensor, "B"],
    size: Capacity,
) -> F32[Tensor, ""]:
    """Compute the mean of -log p(answer) over the questions, plus the penalty of the weights.

    Args:
      question: rows of the evidence whose answers are candidates.
      size: no question has more.
    """
    # The position of the answer among its question's candidates.
    first = world.evidence.candidate_offsets[question]
    place = world.evidence.answer[question] - first
    logits = log_odds_of_listed(cfg, world, params, question, size)
    log_p = torch.log_softmax(logits, -1).gather(1, place[:, None])
    squares = (
        penalty.rule_weight * (params.rule_weight**2).sum()
        + penalty.link_weight * (params.link_weight**2).sum()
    )
    # Squared distances from the initial values.
    feature = params.feature_weight
    moved = (
        ((feature[..., 0] - cfg.odds_power) ** 2).sum()
        + (feature[..., 1:] ** 2).sum()
        + (params.own_degree_weight**2).sum()
        + (params.linked_weight**2).sum()
    )
    n_questions = len(world.question)
    prior = moved / (2 * n_questions * penalty.feature_deviation**2)
    return squares + prior - log_p.mean()
