"""The paths that a network reads an answer from: worked by hand, against all walks, and without what is left out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.func import grad

from funcppo.core import random, tree
from funcppo.kg.logic.derive import Questions
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.scores import bellman_ford, bellman_ford_paths, network_prior
from funcppo.kg.scores.bellman_ford_paths import best_paths
from funcppo.kg.scores.question_config import BellmanFordConfig
from tests.kg.scores.test_network_prior import (
    N_ENTITIES,
    N_LABELS,
    random_facts,
)

ALL = 1000  # more paths than there are


def random_network(facts, n_entities=N_ENTITIES, n_layers=3):
    cfg = BellmanFordConfig(width=4, n_layers=n_layers)
    sizes = network_prior.network_config(cfg, n_entities, N_LABELS)
    params = bellman_ford.init(sizes, random.key(0))
    return network_prior.make_prior(params, facts, n_entities)


def ask(predicate, side, given, left_out=0):
    return Questions(
        *(torch.tensor([x]) for x in (predicate, side, given, left_out))
    )


def paths_by_enumeration(network, graph, question, answer):
    """Each path to the answer with the most that its facts add up to in ascending layers."""
    label = 2 * question.predicate + question.side - HEAD
    params = tree.map(lambda x: x.double(), network.params)
    n_layers, n_edges = network.cfg.n_layers, len(graph.edge_target)

    def logit(factor):
        sums = bellman_ford.summation(network.cfg, graph, factor)
        logits = bellman_ford.apply(
            network.cfg, params, graph, label, question.entity, None, sums
        )
        return logits[0, answer - 1]

    importance = grad(logit)(torch.ones(n_layers, n_edges).double())
    edges = list(
        zip(
            graph.source_entity[graph.edge_source].tolist(),
            graph.edge_target.tolist(),
            graph.source_label[graph.edge_source].tolist(),
        )
    )
    found = {}
    for length in range(1, n_layers + 1):
        for walk in itertools.product(range(n_edges), repeat=length):
            visited = [int(question.entity), *(edges[e][1] for e in walk)]
            starts = [edges[e][0] for e in walk]
            if starts != visited[:-1] or len(set(visited)) < len(visited):
                continue
            if visited[-1] != answer:
                continue
            value = max(
                sum(float(importance[t, e]) for t, e in zip(layers, walk))
                for layers in itertools.combinations(range(n_layers), length)
            )
            facts = []
            for u, v, label in (edges[e] for e in walk):
                facts.append((label // 2, *((u, v) if label % 2 else (v, u))))
            found[tuple(facts)] = value
    return found


@pytest.mark.parametrize("side", [HEAD, TAIL])
def test_paths_are_the_best_of_all_walks(side, monkeypatch):
    monkeypatch.setattr(bellman_ford_paths, "MAX_WALKS", 1000)
    facts = random_facts(n=7)
    network = random_network(facts)
    n_found = 0
    for given, answer in itertools.permutations(range(1, N_ENTITIES + 1), 2):
        question = ask(1, side, given)
        found = best_paths(network, question, "fact", answer, ALL)
        expected = paths_by_enumeration(
            network, network.graph, question, answer
        )
        assert {path.facts for path in found} == set(expected)
        values = [path.importance for path in found]
        assert values == sorted(values, reverse=True)
        for path in found:
            assert path.importance == pytest.approx(expected[path.facts])
        first = best_paths(network, question, "fact", answer, 1)
        assert first == found[:1]
        n_found += len(found)
        if n_found > 12:
            break
    assert n_found > 4


def test_the_path_of_a_chain_is_its_facts_in_order():
    facts = torch.tensor([[1, 1, 2], [2, 3, 2], [1, 4, 5]])
    network = random_network(facts, n_entities=5)
    (path,) = best_paths(network, ask(2, TAIL, 1), "fact", 3, ALL)
    assert path.facts == ((1, 1, 2), (2, 3, 2))
    assert best_paths(network, ask(2, TAIL, 1), "fact", 5, ALL) == []
    # two facts are more than one layer sees
    short = random_network(facts, n_entities=5, n_layers=1)
    assert best_paths(short, ask(2, TAIL, 1), "fact", 3, ALL) == []


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_what_is_left_out_is_on_no_path(left_out):
    facts = torch.tensor([[1, 1, 2], [2, 2, 1], [1, 2, 3], [2, 3, 1]])
    network = random_network(facts, n_entities=3)
    asked = ask(1, TAIL, 1, left_out=2)
    found = {
        path.facts for path in best_paths(network, asked, left_out, 2, ALL)
    }
    around = ((2, 3, 1), (1, 2, 3))
    directly = {((2, 2, 1),)} if left_out == "fact" else set()
    assert found == {around} | directly
    known = best_paths(network, ask(1, TAIL, 1), left_out, 2, ALL)
    assert {path.facts for path in known} == {
        around,
        ((2, 2, 1),),
        ((1, 1, 2),),
    }


def test_paths_are_found_where_most_walks_come_back():
    """In a dense graph most walks visit an entity twice."""
    pairs = itertools.product(range(1, 9), repeat=2)
    facts = torch.tensor([(1, x, y) for x, y in pairs])
    network = random_network(facts, n_layers=4)
    for answer in range(2, 9):
        found = best_paths(network, ask(2, TAIL, 1), "fact", answer, 3)
        assert len(found) == 3
        for path in found:
            entities = [x for _, *ends in path.facts for x in ends]
            assert entities.count(1) == entities.count(answer) == 1
            assert len(set(entities)) == len(path.facts) + 1


def test_the_walks_that_are_kept_are_bounded(monkeypatch):
    network = random_network(random_facts())
    question = ask(1, TAIL, 1)
    some = [
        answer
        for answer in range(2, N_ENTITIES + 1)
        if len(best_paths(network, question, "fact", answer, ALL)) > 1
    ]
    monkeypatch.setattr(bellman_ford_paths, "MAX_WALKS", 1)
    for answer in some:
        found = best_paths(network, question, "fact", answer, ALL)
        assert len(found) <= 1
    assert some
