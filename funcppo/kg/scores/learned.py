"""The score that a run learns from questions, as a value: the evidence for and against a candidate by its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32
from funcppo.kg.logic.derive import LeftOut
from funcppo.kg.logic.triple_index import HEAD
from funcppo.kg.scores import aggregation
from funcppo.kg.scores.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Params,
    TermKind,
)
from funcppo.kg.scores.evidence import Evidence, FactIndex
from funcppo.kg.scores.score import Candidates, Need, Score, Term


class Weights(NamedTuple):
    """What the score of evidence is computed from, on the device of the task."""

    facts: FactIndex
    cfg: AggregationConfig
    world: AggregationWorld
    params: Params
    left_out: LeftOut
    smoothing: float  # what was added to the body pairs of every rule


class WeighedRule(NamedTuple):
    """A rule that derives a candidate."""

    rule: int
    share: float  # of all that the rules add up to
    support: int  # without the fact that is left out
    body_pairs: int
    n_groundings: int
    fan_out: int  # candidates that it derives for the question
    n_all_groundings: int  # for all these
    # Probability that a random walk along its body ends in the candidate, which the score weighs in place of the share
    # of groundings; None where it weighs that.
    walk: float | None


class CountedFacts(NamedTuple):
    """Facts of a relation that have the candidate at a place."""

    predicate: int
    place: int  # HEAD or TAIL
    n_facts: int


class LearnedScore(Score):
    """The sum of what kinds of evidence add to a score, by learnt weights."""

    needs: frozenset[Need] = frozenset({"questions"})
    takes_other_facts = False

    def __init__(
        self,
        name: str,
        weights: Weights,
        kinds: Sequence[TermKind] | None = None,
    ) -> None:
        """Take the weights, and which kinds of evidence count; None for all that are weighed."""
        super().__init__(name)
        self.weights = weights
        self.facts = weights.facts
        self.left_out = weights.left_out
        self._kinds = kinds or aggregation.weighed_kinds(weights.cfg)

    def log_odds(self, found: Candidates) -> F32[Tensor, "L"]:
        """Return the score, a logit among the candidates of a question."""
        batch = aggregation.whole(found.evidence)
        cfg, world, params = self.weights[1:4]
        with torch.no_grad():
            total, *others = aggregation.terms(
                cfg, world, params, batch, self._kinds
            )
            for added in others:
                total = total + added
        return total

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return what each piece of evidence adds, facts and numbers of facts one by one."""
        part = found.evidence
        explainers = {
            "rules": self._explain_rules,
            "links": self._explain_links,
            "own-degree": self._explain_own_degree,
            "degrees": self._explain_degrees,
            "embedding": self._explain_embedding,
            "bellman-ford": self._explain_network,
        }
        return [
            term
            for kind, explain in explainers.items()
            if kind in self._kinds
            for term in explain(part, row)
        ]

    def _explain_rules(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield the rules with their shares, the largest first."""
        cfg, world, params = self.weights[1:4]
        amounts = aggregation.firing_amounts(
            cfg, world, params, aggregation.whole(part)
        ).double()
        firings = range(*part.firing_offsets[row : row + 2].tolist())
        total = float(amounts[firings.start : firings.stop].sum())
        found = [
            self._weigh_rule(
                part, i, float(amounts[i]) / total if total else 0.0
            )
            for i in firings
        ]
        log_sum = float(torch.log(torch.tensor(total + aggregation.MIN_SUM)))
        detail = tuple(sorted(found, key=lambda r: (-r.share, r.rule)))
        yield Term("rules", log_sum, detail)

    def _weigh_rule(self, part: Evidence, i: int, share: float) -> WeighedRule:
        """Return a firing with its counts."""
        world, rule = self.weights.world, int(part.rule[i])
        walk = float(part.walk[i]) if self.weights.cfg.uses_walks else 0.0
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
            walk=walk or None,
        )

    def _explain_own_degree(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield how many known answers to questions of the relation the candidate is."""
        degree = part.own_degree[row]
        bucket = aggregation.degree_bucket(degree)
        weight = self.weights.params.own_degree_weight
        added = weight[self._label(part, row), bucket]
        yield Term("own-degree", float(added), int(degree))

    def _explain_links(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield each fact between the candidate and the question's entity, and that there is one."""
        params, label = self.weights.params, self._label(part, row)
        links = slice(*part.link_offsets[row : row + 2].tolist())
        link_labels = part.link_label[links].tolist()
        for link in link_labels:
            fact = CountedFacts(link // 2, HEAD + link % 2, 1)
            yield Term("fact", float(params.link_weight[link, label]), fact)
        if link_labels:
            yield Term("linked", float(params.linked_weight[label]))

    def _explain_degrees(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield the degrees of the candidate in labels other than the question's, the largest weights first."""
        world, label = self.weights.world, self._label(part, row)
        candidate = int(part.entity[row])
        # The entries of a candidate are the same in the world and in the index of facts; the last entity's go to their
        # end.
        first, *last = world.degree_offsets[candidate : candidate + 2].tolist()
        entries = slice(first, *(last or [None]))
        code = world.degree_code[entries]
        found = [
            Term(
                "degree",
                weight,
                CountedFacts(other // 2, HEAD + other % 2, n_facts),
            )
            for other, n_facts, weight in zip(
                (code // aggregation.N_BUCKETS).tolist(),
                self.weights.facts.degree[entries].tolist(),
                self.weights.params.degree_weight[code, label].tolist(),
                strict=True,
            )
            if other != label
        ]
        yield from sorted(
            found,
            key=lambda term: (-abs(term.log_odds), *term.detail[:2]),
        )

    def _explain_embedding(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield what link embeddings add."""
        weight = self.weights.params.prior_weight[self._label(part, row)]
        yield Term("embedding", float(weight * part.embedding_score[row]))

    def _explain_network(self, part: Evidence, row: int) -> Iterator[Term]:
        """Yield what a path network adds."""
        weight = self.weights.params.network_prior_weight
        added = weight[self._label(part, row)] * part.path_score[row]
        yield Term("bellman-ford", float(added))

    def _label(self, part: Evidence, row: int) -> int:
        """Return the label of a candidate's question."""
        return int(part.label[part.question[row]])
