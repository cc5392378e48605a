"""Why a candidate has its score: the rules that derive it with their shares, and the facts for and against it.

`explain_answer` gives the evidence of one candidate of a question with what each part adds to its score, a logit among
the candidates of the question. All numbers but the weights are counts over known facts, which `funcppo check` recounts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    free_variable,
    proof_names,
)
from funcppo.kg.graph.text import format_name
from funcppo.kg.logic import triple_index
from funcppo.kg.logic.derive import LeftOut, Questions
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL
from funcppo.kg.scores import aggregation, bellman_ford_paths, evidence
from funcppo.kg.scores.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Params,
)
from funcppo.kg.scores.bellman_ford_paths import KnownPath
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.search.task import ProverTask

# rules of an explanation that are printed
MAX_PRINTED_RULES = 5
# relations of a candidate whose facts are printed
MAX_PRINTED_DEGREES = 5
# paths of an explanation by a Bellman-Ford network
MAX_PATHS = 3


class WeighedRule(NamedTuple):
    """A rule that derives the candidate."""

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


class WeighedFact(NamedTuple):
    """A known fact between the candidate and the question's entity."""

    predicate: int
    place: int  # of the candidate, HEAD or TAIL
    weight: float  # what it adds to the score


class WeighedDegree(NamedTuple):
    """How many facts of a relation the candidate has at a place, that of the question excepted."""

    predicate: int
    place: int  # HEAD or TAIL
    n_facts: int
    weight: float  # what that adds to the score


class Explanation(NamedTuple):
    """The evidence of a candidate."""

    predicate: int
    side: int  # the argument that is asked for
    given: int  # the other argument
    candidate: int
    is_fact: bool  # known, and left out of all counts
    score: float
    probability: float  # among the candidates of the question
    place: int  # of the candidate by score, from 1
    n_candidates: int  # that the rules derive and that are not known answers
    rules: tuple[WeighedRule, ...]  # the largest share first
    rule_score: float  # the log of what the rules add up to
    facts: tuple[WeighedFact, ...]
    linked_weight: float  # added once where there are such facts
    own_degree: int  # known answers to questions of the relation that it is
    own_degree_weight: float
    degree_weight: float  # what its other degrees add
    # these where they are weighed, the largest weights first
    degrees: tuple[WeighedDegree, ...]
    embedding_weight: float  # what its prior by link embeddings adds
    bellman_ford_weight: float  # what that by a Bellman-Ford network adds
    # of known facts, which that network reads it from, the most important first
    paths: tuple[KnownPath, ...]


class Weights(NamedTuple):
    """What the score of evidence is computed from, on the device of the task."""

    facts: FactIndex
    cfg: AggregationConfig
    world: AggregationWorld
    params: Params
    left_out: LeftOut


class _PriorWeights(NamedTuple):
    """What the priors of a candidate add to its score."""

    embedding: float
    bellman_ford: float


def explain_answer(
    task: ProverTask, weights: Weights, atom: Tensor, side: int
) -> Explanation | None:
    """The evidence of an atom as an answer about one side; None if no rule derives it.

    Args:
      task: of height 1.
      atom: ground and of two arguments [W]; a known fact is left out of all counts.
    """
    predicate, answer = int(atom[0]), int(atom[side])
    given = int(atom[HEAD + TAIL - side])
    known = evidence.binary_facts(task.kb)
    is_fact = bool((known == atom.long().to(known.device)).all(1).any())
    questions = Questions(
        *(
            torch.tensor([value], device=known.device)
            for value in (predicate, side, given, answer if is_fact else 0)
        )
    )

    found = evidence.collect_evidence(
        task.kb,
        task.sizes,
        weights.facts,
        questions,
        triple_index.build_triple_index(known, task.sizes.n_constants),
        EvidenceConfig(
            left_out=weights.left_out,
            object_identity=task.least_model.object_identity,
        ),
    )
    rows = (found.entity == answer).nonzero().squeeze(1).tolist()
    if not rows:
        return None
    return _explain_row(
        weights,
        found,
        rows[0],
        (predicate, side, given),
        is_fact,
        float(task.cfg.smoothing or 0.0),
    )


def _explain_row(
    weights: Weights,
    found: Evidence,
    row: int,
    question: tuple[int, int, int],
    is_fact: bool,
    smoothing: float,
) -> Explanation:
    """The evidence of one candidate of a question, which is its predicate, side and given entity."""
    cfg, params = weights.cfg, weights.params
    batch = aggregation.whole(found)
    scores = aggregation.score(cfg, weights.world, params, batch).double()
    amounts = aggregation.firing_amounts(
        cfg, weights.world, params, batch
    ).double()

    firings = slice(*found.firing_offsets[row : row + 2].tolist())
    links = slice(*found.link_offsets[row : row + 2].tolist())
    total = float(amounts[firings].sum())
    rules = [
        _weigh_rule(
            weights,
            found,
            i,
            float(amounts[i]) / total if total else 0.0,
            smoothing,
        )
        for i in range(firings.start, firings.stop)
    ]

    label = int(found.label[0])
    link_labels = found.link_label[links].tolist() if cfg.uses_links else []
    bucket = int(aggregation.degree_bucket(found.own_degree[row : row + 1]))
    linked = float(params.linked_weight[label]) if link_labels else 0.0
    facts = tuple(
        WeighedFact(
            predicate=link // 2,
            place=HEAD + link % 2,
            weight=float(params.link_weight[link, label]),
        )
        for link in link_labels
    )

    rule_score = float(torch.log(torch.tensor(total + aggregation.MIN_SUM)))
    own_degree_weight = float(params.own_degree_weight[label, bucket])
    by_priors = _prior_weights(weights, found, row)
    degrees = _weigh_degrees(weights, int(found.entity[row]), label)
    predicate, side, given = question
    return Explanation(
        predicate=predicate,
        side=side,
        given=given,
        candidate=int(found.entity[row]),
        is_fact=is_fact,
        score=float(scores[row]),
        probability=float(torch.softmax(scores, 0)[row]),
        place=1 + int((scores > scores[row]).sum()),
        n_candidates=len(scores),
        rules=tuple(sorted(rules, key=lambda r: (-r.share, r.rule))),
        rule_score=rule_score,
        facts=facts,
        linked_weight=linked,
        own_degree=int(found.own_degree[row]),
        own_degree_weight=own_degree_weight,
        degree_weight=sum(degree.weight for degree in degrees),
        degrees=degrees,
        embedding_weight=by_priors.embedding,
        bellman_ford_weight=by_priors.bellman_ford,
        paths=_find_paths(weights, found, row),
    )


def _weigh_degrees(
    weights: Weights, candidate: int, label: int
) -> tuple[WeighedDegree, ...]:
    """The degrees of a candidate, without that in the label of the question; none if they are not weighed."""
    if not weights.cfg.uses_degrees:
        return ()
    # The entries of a candidate are the same in the world and in the index of facts; the last entity's go to their end.
    first, *last = weights.world.degree_offsets[
        candidate : candidate + 2
    ].tolist()
    entries = slice(first, *(last or [None]))
    code = weights.world.degree_code[entries]
    degrees = [
        WeighedDegree(
            predicate=other // 2,
            place=HEAD + other % 2,
            n_facts=n_facts,
            weight=weight,
        )
        for other, n_facts, weight in zip(
            (code // aggregation.N_BUCKETS).tolist(),
            weights.facts.degree[entries].tolist(),
            weights.params.degree_weight[code, label].tolist(),
            strict=True,
        )
        if other != label
    ]
    return tuple(
        sorted(degrees, key=lambda d: (-abs(d.weight), d.predicate, d.place))
    )


def _prior_weights(
    weights: Weights, found: Evidence, row: int
) -> _PriorWeights:
    """What the priors of a candidate of the only question add to its score."""
    cfg, params, label = weights.cfg, weights.params, int(found.label[0])
    by_embedding = by_network = 0.0
    if cfg.uses_embedding:
        by_embedding = float(params.prior_weight[label] * found.prior[row])
    if cfg.uses_bellman_ford:
        weight = params.network_prior_weight[label]
        by_network = float(weight * found.network_prior[row])
    return _PriorWeights(by_embedding, by_network)


def _find_paths(
    weights: Weights, found: Evidence, row: int
) -> tuple[KnownPath, ...]:
    """The paths that a Bellman-Ford network reads a candidate of the only question from; none if it is not weighed."""
    network = weights.facts.network
    if network is None or not weights.cfg.uses_bellman_ford:
        return ()
    paths = bellman_ford_paths.best_paths(
        network,
        evidence.questions_of(found),
        weights.left_out,
        int(found.entity[row]),
        MAX_PATHS,
    )
    return tuple(paths)


def _weigh_rule(
    weights: Weights,
    found: Evidence,
    i: int,
    share: float,
    smoothing: float,
) -> WeighedRule:
    """A firing with its counts.

    Args:
      smoothing: what was added to the body pairs of every rule.
    """
    world, rule = weights.world, int(found.rule[i])
    walk = float(found.walk[i]) if weights.cfg.uses_walks else 0.0
    return WeighedRule(
        rule=rule,
        share=share,
        support=int(world.support[rule]) - int(found.is_left_out[i]),
        body_pairs=round(float(world.body_pairs[rule]) - smoothing),
        n_groundings=int(found.n_groundings[i]),
        fan_out=int(found.fan_out[i]),
        n_all_groundings=int(found.n_all_groundings[i]),
        walk=walk or None,
    )


# -- as text and JSON


def to_lines(dataset: Dataset, explanation: Explanation) -> list[str]:
    """The evidence as lines of text."""
    e = explanation
    lines = [
        f"as an answer to {_question_text(dataset, e)}: place {e.place} of {_count(e.n_candidates, 'candidate')}, "
        f"probability {e.probability:.3f}, log-odds {e.score:+.2f} (score {_logistic(e.score):.4f}), the sum of:"
    ]
    is_one = len(e.rules) == 1
    derive = "rule derives" if is_one else "rules derive"
    whose, weight = "its" if is_one else "their", math.exp(e.rule_score)
    lines.append(
        f"  {e.rule_score:+.2f}  {len(e.rules)} {derive} it, the log of {whose} weight {weight:.3g}:"
    )

    for rule in e.rules[:MAX_PRINTED_RULES]:
        lines.append(
            f"      {rule.share:6.1%} by rule {rule.rule}: {format_rule(dataset, dataset.rules[rule.rule])}"
        )
        lines.append(
            f"             right for {rule.support:,} of {_count(rule.body_pairs, 'pair')} in train; derives this by "
            f"{_count(rule.n_groundings, 'grounding')}, {_count(rule.fan_out, 'candidate')} by "
            f"{rule.n_all_groundings:,} in all{_walk_text(rule)}"
        )
    if len(e.rules) > MAX_PRINTED_RULES:
        others = sum(rule.share for rule in e.rules[MAX_PRINTED_RULES:])
        n_others = len(e.rules) - MAX_PRINTED_RULES
        lines.append(f"      {others:6.1%} by {_count(n_others, 'other')}")

    for fact in e.facts:
        word = "against" if fact.weight < 0 else "for"
        lines.append(
            f"  {fact.weight:+.2f}  {word}: {_fact_text(dataset, e, fact)} is a fact"
        )
    if e.facts:
        lines.append(
            f"  {e.linked_weight:+.2f}  some fact links it to {format_name(_term_text(dataset, e.given))}"
        )
    return lines + _describe_candidate(dataset, e)


def _walk_text(rule: WeighedRule) -> str:
    """The probability of a random walk along the rule's body, where it is weighed."""
    if rule.walk is None:
        return ""
    return f"; a random walk ends here with probability {rule.walk:.3g}"


def _describe_candidate(dataset: Dataset, e: Explanation) -> list[str]:
    """What is known of the candidate itself, as lines of text."""
    place = "head" if e.side == HEAD else "tail"
    facts = _count(e.own_degree, "other fact")
    relation = format_name(dataset.predicates[e.predicate - 1])
    lines = [
        f"  {e.own_degree_weight:+.2f}  it is the {place} of {facts} of {relation}"
    ]
    if e.degrees:
        lines += _describe_degrees(dataset, e)
    if e.embedding_weight:
        lines.append(
            f"  {e.embedding_weight:+.2f}  prior by link embeddings, which proves nothing"
        )
    if e.bellman_ford_weight:
        reads = "; it reads it from:" if e.paths else ""
        lines.append(
            f"  {e.bellman_ford_weight:+.2f}  prior by a Bellman-Ford network, which proves nothing{reads}"
        )
        lines += [
            f"      {path.importance:+.2f} {', '.join(format_atom(dataset, fact) for fact in path.facts)}"
            for path in e.paths
        ]
    return lines


def _describe_degrees(dataset: Dataset, e: Explanation) -> list[str]:
    """How many facts the candidate has in other relations and places, as lines of text."""
    lines = [f"  {e.degree_weight:+.2f}  how many other facts it has:"]
    for degree in e.degrees[:MAX_PRINTED_DEGREES]:
        facts = _count(degree.n_facts, "fact")
        relation = format_name(dataset.predicates[degree.predicate - 1])
        lines.append(
            f"      {degree.weight:+.2f}  it is the {SIDE_NAMES[degree.place]} of {facts} of {relation}"
        )
    rest = e.degrees[MAX_PRINTED_DEGREES:]
    if rest:
        weight = sum(degree.weight for degree in rest)
        n_others = _count(len(rest), "other number")
        lines.append(f"      {weight:+.2f}  by {n_others} of facts")
    return lines


def _logistic(log_odds: float) -> float:
    """The score that a table of answers shows."""
    return float(torch.sigmoid(torch.tensor(log_odds, dtype=torch.float64)))


def _count(n: int, noun: str) -> str:
    """A number of things as text."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def to_json(dataset: Dataset, explanation: Explanation) -> dict[str, object]:
    """The evidence as JSON values, with the names of the data set."""
    e = explanation
    fields = e._asdict()
    for name in ("predicate", "side", "given"):
        del fields[name]
    return fields | {
        "question": _question_text(dataset, e),
        "candidate": _term_text(dataset, e.candidate),
        "rules": [
            rule._asdict()
            | {"rule_text": format_rule(dataset, dataset.rules[rule.rule])}
            for rule in e.rules
        ],
        "degrees": [
            {
                "relation": dataset.predicates[degree.predicate - 1],
                "side": SIDE_NAMES[degree.place],
                "n_facts": degree.n_facts,
                "weight": degree.weight,
            }
            for degree in e.degrees
        ],
        "paths": [
            {
                "importance": path.importance,
                "facts": [format_atom(dataset, fact) for fact in path.facts],
            }
            for path in e.paths
        ],
        "facts": [
            {"fact": _fact_text(dataset, e, fact), "weight": fact.weight}
            for fact in e.facts
        ],
    }


def _term_text(dataset: Dataset, term: int) -> str:
    """The name of a constant."""
    return proof_names(dataset).format_term(term)


def _question_text(dataset: Dataset, e: Explanation) -> str:
    """The question, with a variable for what is asked that is no entity's name."""
    variable = free_variable(dataset)
    return _atom_text(dataset, e.predicate, e.side, variable, e.given)


def _fact_text(dataset: Dataset, e: Explanation, fact: WeighedFact) -> str:
    """A fact between the candidate and the question's entity."""
    return _atom_text(dataset, fact.predicate, fact.place, e.candidate, e.given)


def _atom_text(
    dataset: Dataset, predicate: int, place: int, term: int, other: int
) -> str:
    """An atom of two arguments as text, one of them at a place."""
    arguments = (term, other) if place == HEAD else (other, term)
    return format_atom(dataset, (predicate, *arguments))
