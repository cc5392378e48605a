"""The parts of an explanation add up to the score, its counts are those of a recount, and its text names them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg.graph.rules import format_atom
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import agreement, evidence_explanation, ranking
from funcppo.kg.ranking.evaluator import Evaluator
from funcppo.kg.ranking.evidence_explanation import Weights, explain_answer
from funcppo.kg.run import priors
from funcppo.kg.scores import (
    aggregation,
    evidence,
    link_embedding,
    network_prior,
)
from funcppo.kg.scores.question_config import BellmanFordConfig, EmbeddingConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task
from tests.kg.run.test_choices import random_graph

SECONDS = 3600.0  # never cut by the clock


@pytest.fixture(scope="module", params=["fact", "pair"])
def subject(request):
    """A task and random weights of all evidence; identity of objects and walks with "pair"."""
    settings = ProverTaskConfig(
        max_height=1,
        smoothing=5.0,
        object_identity=request.param == "pair",
    )
    task = build_task(random_graph(), settings)
    with_walks = request.param == "pair"
    facts = evidence.index_facts(task.kb, task.sizes, with_walks=with_walks)
    world = aggregation.make_world(task.kb, task.sizes, facts)
    cfg = aggregation.AggregationConfig(
        sizes=task.sizes,
        n_shapes=aggregation.n_shapes(world),
        uses_degrees=True,
        uses_walks=with_walks,
        uses_embedding=True,
        uses_bellman_ford=True,
    )
    embedding = link_embedding.init(
        EmbeddingConfig(rank=3, n_folds=2),
        task.sizes.n_constants,
        evidence.n_labels(task.sizes),
        random.key(2),
    )
    network = priors.blank_bellman_ford(
        task, BellmanFordConfig(width=4, n_layers=2), "cpu"
    )
    network = network_prior.make_prior(
        tree.map(
            lambda x: torch.sin(torch.arange(x.numel())).view_as(x), network
        ),
        evidence.binary_facts(task.kb),
        task.sizes.n_constants,
    )
    facts = facts._replace(embedding=embedding, network=network)
    params = aggregation.init(cfg, random.key(0))
    generator = torch.Generator().manual_seed(1)
    params = tree.map(
        lambda x: x + 0.3 * torch.randn(x.shape, generator=generator), params
    )
    return task, Weights(facts, cfg, world, params, request.param)


def explanations(subject):
    task, weights = subject
    for split in (task.dataset.valid, task.dataset.train[:20]):
        for atom in torch.from_numpy(split):
            for side in (HEAD, TAIL):
                found = explain_answer(task, weights, atom, side)
                if found is not None:
                    yield atom, side, found


def test_the_parts_add_up_to_the_score(subject):
    n_facts = 0
    for atom, side, e in explanations(subject):
        parts = [e.rule_score, e.own_degree_weight, e.degree_weight]
        assert e.embedding_weight
        parts.append(e.embedding_weight)
        assert e.bellman_ford_weight
        parts.append(e.bellman_ford_weight)
        parts += [e.linked_weight, *(fact.weight for fact in e.facts)]
        assert sum(parts) == pytest.approx(e.score, abs=1e-5)
        assert sum(rule.share for rule in e.rules) == pytest.approx(1.0)
        assert e.candidate == atom[side] and e.predicate == atom[0]
        assert 1 <= e.place <= e.n_candidates and 0 < e.probability <= 1
        assert bool(e.linked_weight) == bool(e.facts)
        n_facts += e.is_fact
    assert n_facts > 0


def test_shares_of_rules_that_weigh_next_to_nothing_add_up(subject):
    task, weights = subject
    lowered = weights.params.rule_weight - 30.0
    params = weights.params._replace(rule_weight=lowered)
    found = [
        e for _, _, e in explanations((task, weights._replace(params=params)))
    ]
    assert found
    assert max(e.rule_score for e in found) < -10
    for e in found:
        assert sum(rule.share for rule in e.rules) == pytest.approx(1.0)


def test_the_counts_of_a_rule_are_without_smoothing_and_without_the_fact(
    subject,
):
    """What derives a fact that is left out has one support less."""
    task, weights = subject
    seen = set()
    for _, _, e in explanations(subject):
        seen.add(e.is_fact)
        for rule in e.rules:
            support = int(weights.world.support[rule.rule])
            assert rule.support == support - e.is_fact
            pairs = float(weights.world.body_pairs[rule.rule])
            assert rule.body_pairs + task.cfg.smoothing == pairs
    assert seen == {True, False}


def test_the_recount_agrees_and_reports_what_does_not(subject):
    task, weights = subject
    compared = compare(task, weights)
    assert compared.n_compared == compared.n_total > 4
    assert compared.disagreements == ()

    def miscount(atom, side):
        found = explain_answer(task, weights, atom, side)
        if found is None:
            return None
        rule = found.rules[0]._replace(fan_out=1000)
        degrees = (d._replace(n_facts=7000) for d in found.degrees)
        return found._replace(
            rules=(rule, *found.rules[1:]),
            own_degree=found.own_degree + 1,
            degrees=tuple(degrees),
        )

    wrong = compare(task, weights, miscount)
    assert 0 < wrong.n_disagreeing <= wrong.n_compared
    text = "\n".join(wrong.disagreements)
    assert "1000" in text and "known answers" in text
    assert "7000" in text and "facts of relation" in text


def test_a_degree_that_is_not_listed_is_reported(subject):
    task, weights = subject

    def leave_degrees_out(atom, side):
        found = explain_answer(task, weights, atom, side)
        return found and found._replace(degrees=found.degrees[1:])

    wrong = compare(task, weights, leave_degrees_out)
    assert any(
        "facts of relation" in line
        and ": 0" not in line
        and " 0, recounted" in line
        for line in wrong.disagreements
    )


def test_degrees_are_counts_of_facts_whose_weights_add_up(subject):
    """By relation and place, without those in which the question asks."""
    task, _ = subject
    facts = evidence.binary_facts(task.kb).tolist()
    n_degrees = 0
    for atom, side, e in explanations(subject):
        expected = Counter(
            (fact[0], place)
            for fact in facts
            for place in (HEAD, TAIL)
            if fact[place] == e.candidate
        )
        expected.pop((int(atom[0]), side), None)
        listed = {(d.predicate, d.place): d.n_facts for d in e.degrees}
        assert listed == expected and len(listed) == len(e.degrees)
        sizes = [abs(d.weight) for d in e.degrees]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(d.weight for d in e.degrees) == pytest.approx(
            e.degree_weight
        )
        n_degrees += len(e.degrees)
    assert n_degrees > 0


def test_the_recount_reports_a_path_of_other_facts(subject):
    task, weights = subject
    known = {tuple(fact) for fact in evidence.binary_facts(task.kb).tolist()}
    n = task.sizes.n_constants
    unknown = next(
        (1, x, y)
        for x, y in itertools.product(range(1, n + 1), repeat=2)
        if (1, x, y) not in known
    )
    n_paths = 0

    def replace_fact(facts):
        return (*facts[:-1], unknown)

    def reverse(facts):
        return facts[::-1]

    for change in (replace_fact, reverse):

        def miscount(atom, side, change=change):
            nonlocal n_paths
            found = explain_answer(task, weights, atom, side)
            if found is None:
                return None
            paths = [
                path._replace(facts=change(path.facts))
                for path in found.paths
                if len(path.facts) > 1
            ]
            n_paths += len(paths)
            return found._replace(paths=tuple(paths))

        wrong = compare(task, weights, miscount)
        assert n_paths and wrong.n_disagreeing
        assert all(
            "expected known facts that lead" in line
            for line in wrong.disagreements
        )


@pytest.mark.parametrize("wrong", [1.001, None])
def test_the_recount_reports_a_wrong_probability_of_a_walk(subject, wrong):
    task, weights = subject

    def miscount(atom, side):
        found = explain_answer(task, weights, atom, side)
        if found is None:
            return None
        rules = [
            rule._replace(walk=wrong and rule.walk and rule.walk * wrong)
            for rule in found.rules
        ]
        return found._replace(rules=tuple(rules))

    walks = {e.rules[0].walk is None for _, _, e in explanations(subject)}
    compared = compare(task, weights, miscount)
    if weights.cfg.uses_walks:
        assert False in walks
        assert "walk of rule" in "\n".join(compared.disagreements)
    else:
        assert walks == {True} and not compared.n_disagreeing


def test_the_probability_of_a_walk_is_printed_where_it_is_weighed(subject):
    task, weights = subject
    e = next(e for _, _, e in explanations(subject))
    text = "\n".join(evidence_explanation.to_lines(task.dataset, e))
    assert ("a random walk ends here" in text) == weights.cfg.uses_walks
    rule = e.rules[0]._replace(walk=0.125)
    one = e._replace(rules=(rule,))
    text = "\n".join(evidence_explanation.to_lines(task.dataset, one))
    assert "in all; a random walk ends here with probability 0.125" in text
    fields = evidence_explanation.to_json(task.dataset, one)
    assert fields["rules"][0]["walk"] == 0.125


def compare(task, weights, explain=None):
    evaluator = Evaluator(
        task=task,
        protocol=ranking.RankingProtocol(sides=(HEAD, TAIL)),
        scorer=lambda atoms: torch.zeros(len(atoms), dtype=torch.float64),
        prove=lambda atoms: [None] * len(atoms),
        proof_threshold=-float("inf"),
        all_scores=False,
    )
    # Facts of train are left out of their own evidence.
    split = torch.from_numpy(task.dataset.valid).tolist()
    split += task.dataset.train[:5].tolist()
    ranked = agreement.rank_sample(
        evaluator, torch.tensor(split).numpy(), range(len(split))
    )
    return agreement.compare_evidence(
        agreement.make_subject(evaluator, "evidence"),
        explain or (lambda a, s: explain_answer(task, weights, a, s)),
        weights.left_out,
        ranked,
        SECONDS,
        weighs_links=weights.cfg.uses_links,
        weighs_walks=weights.cfg.uses_walks,
        weighs_degrees=weights.cfg.uses_degrees,
    )


def test_an_atom_that_no_rule_derives_has_no_explanation(subject):
    task, weights = subject
    n = task.sizes.n_constants
    atoms = [(1, x, y) for x in range(1, n + 1) for y in range(1, n + 1)]
    found = [
        explain_answer(task, weights, torch.tensor(atom), TAIL)
        for atom in atoms[:: max(1, len(atoms) // 15)]
    ]
    assert None in found and any(found)


def test_the_text_and_the_json_name_rules_and_facts(subject):
    task, _ = subject
    dataset = task.dataset
    linked = [e for _, side, e in explanations(subject) if e.facts]
    e = linked[0]
    lines = evidence_explanation.to_lines(dataset, e)
    assert f"place {e.place} of {e.n_candidates} candidates" in lines[0]
    assert f"by rule {e.rules[0].rule}: " in lines[2]
    assert any(line.endswith(" is a fact") for line in lines)
    assert any(" against: " in line or " for: " in line for line in lines)

    many = e._replace(rules=e.rules[:1] * 9)
    assert any("by 4 others" in line
               for line in evidence_explanation.to_lines(dataset, many))  # fmt: skip
    one = e._replace(rules=e.rules[:1], n_candidates=1, side=TAIL, own_degree=1)
    text = "\n".join(evidence_explanation.to_lines(dataset, one))
    assert "of 1 candidate," in text and "1 rule derives it, the log" in text
    assert f"{e.embedding_weight:+.2f}  prior by link embeddings" in text
    network = f"{e.bellman_ford_weight:+.2f}  prior by a Bellman-Ford network"
    assert network in text
    assert e.paths
    for path in e.paths:
        facts = ", ".join(format_atom(dataset, fact) for fact in path.facts)
        assert f"      {path.importance:+.2f} {facts}" in text
    relation = dataset.predicates[e.predicate - 1]
    assert f"it is the tail of 1 other fact of {relation}" in text

    degree = e.degrees[0]
    counted = f"of {degree.n_facts} fact{'s' * (degree.n_facts != 1)} of "
    counted += dataset.predicates[degree.predicate - 1]
    assert f"{e.degree_weight:+.2f}  how many other facts it has:" in text
    assert f"{degree.weight:+.2f}  it is the " in text and counted in text
    several = e._replace(degrees=(degree,) * 7)
    assert any("by 2 other numbers of facts" in line
               for line in evidence_explanation.to_lines(dataset, several))  # fmt: skip

    fields = json.loads(json.dumps(evidence_explanation.to_json(dataset, e)))
    assert [row["n_facts"] for row in fields["degrees"]] == [
        degree.n_facts for degree in e.degrees
    ]
    assert [path["facts"] for path in fields["paths"]] == [
        [format_atom(dataset, fact) for fact in path.facts] for path in e.paths
    ]
    assert fields["rules"][0]["n_groundings"] == e.rules[0].n_groundings
    assert len(fields["facts"]) == len(e.facts)
    assert fields["question"].count(", ") == 1 and fields["score"] == e.score


def test_a_name_of_control_characters_is_one_that_a_query_takes(subject):
    """On one line, escaped: a terminal obeys none of it."""
    task, _ = subject
    dataset = replace(
        task.dataset,
        predicates=[f"r\x1b[{i}m" for i in range(len(task.dataset.predicates))],
        entities=[f"e\n{i}" for i in range(len(task.dataset.entities))],
    )
    linked = next(e for _, _, e in explanations(subject) if e.facts)
    lines = evidence_explanation.to_lines(dataset, linked)
    assert all(map(str.isprintable, lines))
    assert any(f"links it to 'e\\n{linked.given - 1}'" in x for x in lines)
    assert any(f"of 'r\\x1b\\[{linked.predicate - 1}m'" in x for x in lines)


def test_a_fact_is_for_or_against_by_the_number_beside_it(subject):
    """Whatever the weight that is added once where some fact links the two."""
    task, _ = subject
    linked = [e for _, _, e in explanations(subject) if e.facts]
    seen = set()
    for e, sign in itertools.product(linked[:3], (-1.0, 1.0)):
        facts = [fact._replace(weight=0.1 * sign) for fact in e.facts]
        e = e._replace(facts=tuple(facts), linked_weight=-9.0 * sign)
        for line in evidence_explanation.to_lines(task.dataset, e):
            if line.endswith(" is a fact"):
                number, word, *_ = line.split()
                assert word == ("for:" if float(number) > 0 else "against:")
                seen.add(word)
    assert seen == {"for:", "against:"}


def test_links_and_degrees_that_are_not_weighed_are_no_evidence(subject):
    task, weights = subject
    plain = weights._replace(
        cfg=replace(
            weights.cfg,
            uses_links=False,
            uses_degrees=False,
            uses_embedding=False,
            uses_bellman_ford=False,
        )
    )
    atom = torch.from_numpy(task.dataset.train[0])
    for side in (HEAD, TAIL):
        e = explain_answer(task, plain, atom, side)
        if e is not None:
            assert e.facts == ()
            assert e.degree_weight == e.embedding_weight == 0
            assert e.degrees == ()
            assert e.bellman_ford_weight == 0 and e.paths == ()
            assert e.rule_score + e.own_degree_weight == pytest.approx(
                e.score, abs=1e-5
            )


def test_the_recount_has_no_links_where_they_are_not_weighed(subject):
    task, weights = subject
    assert any(e.facts for _, _, e in explanations(subject))
    cfg = replace(weights.cfg, uses_links=False)
    compared = compare(task, weights._replace(cfg=cfg))
    assert compared.n_compared and not compared.disagreements


def test_the_variable_of_the_question_is_no_entity(subject):
    task, _ = subject
    _, _, e = next(explanations(subject))
    names = ["X", "Y", *task.dataset.entities[2:]]
    dataset = replace(task.dataset, entities=names)
    fields = evidence_explanation.to_json(dataset, e)
    assert "Z" in fields["question"]
    assert fields["question"] in evidence_explanation.to_lines(dataset, e)[0]
