"""The Bellman-Ford network learns compositions, knows no entity and does not see what is asked."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.scores import bellman_ford as network
from funcppo.kg.scores.bellman_ford import NetworkConfig, Questions, StepConfig

PARENT, GRANDPARENT = 1, 2
CFG = NetworkConfig(
    n_entities=9, n_labels=6, width=8, n_layers=3, messages="float32"
)
# Sums of the same float32 terms in another order.
ORDER = {"rtol": 1e-4, "atol": 1e-5}


def random_facts(n=24, n_entities=9, seed=0):
    """Distinct facts of two relations."""
    generator = torch.Generator().manual_seed(seed)
    high = torch.tensor([2, n_entities, n_entities])
    drawn = torch.rand((3 * n, 3), generator=generator) * high
    return torch.unique(drawn.long() + 1, dim=0)[:n]


def random_params(cfg, seed=0):
    """Weights none of which is 0, so that each has a part in the logits."""
    params = network.init(cfg, random.key(seed))
    return tree.map(
        lambda x: x + 0.1 * torch.sin(torch.arange(x.numel())).view_as(x),
        params,
    )


def all_questions(cfg):
    label = torch.arange(2, cfg.n_labels).repeat_interleave(cfg.n_entities)
    given = torch.arange(1, cfg.n_entities + 1).repeat(cfg.n_labels - 2)
    return label, given


def logits_by_loops(cfg, params, facts, label, given):
    """The logits of one question, fact by fact."""
    asked = params.asked[label]
    start = torch.zeros(cfg.n_entities + 1, cfg.width)
    start[given] = asked
    state = start.clone()
    for layer in range(cfg.n_layers):
        total = start.clone()
        for predicate, head, tail in facts.tolist():
            for source, target, side in (
                (tail, head, HEAD),
                (head, tail, TAIL),
            ):
                weight = params.weight[layer]
                if cfg.asks:
                    by_asked = asked @ params.weight_by_asked[layer]
                    weight = weight + by_asked.view(cfg.n_labels, cfg.width)
                edge = 2 * predicate + (side - HEAD)
                total[target] += state[source] * weight[edge]
        change = torch.cat([state, total], 1) @ params.linear[layer]
        change = change + params.bias[layer]
        centred = change - change.mean(1, keepdim=True)
        change = (
            centred / (centred.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        )
        change = change * params.norm_scale[layer] + params.norm_shift[layer]
        state = state + change.relu()
    final = torch.cat([state, asked.expand_as(state)], 1)
    hidden = (final @ params.hidden + params.hidden_bias).relu()
    return (hidden @ params.output)[1:]


@pytest.mark.parametrize("asks", [True, False])
def test_logits_are_those_of_loops_over_facts(asks):
    cfg = NetworkConfig(
        n_entities=9, n_labels=6, width=8, n_layers=3, asks=asks
    )
    facts, params = random_facts(), random_params(cfg)
    graph = network.build_graph(cfg, facts, "fact")
    label, given = all_questions(cfg)
    logits = network.apply(cfg, params, graph, label, given)
    for i in range(0, len(label), 5):
        expected = logits_by_loops(
            cfg, params, facts, int(label[i]), int(given[i])
        )
        torch.testing.assert_close(logits[i], expected, **ORDER)


def test_a_fact_that_is_left_out_changes_nothing():
    facts, params = random_facts(), random_params(CFG)
    label, given = all_questions(CFG)
    with_all = network.build_graph(CFG, facts, "fact")
    for i in (0, 7, 23):
        others = torch.cat([facts[:i], facts[i + 1 :]])
        without = network.build_graph(CFG, others, "fact")
        left_out = network.without_edges(
            with_all, (with_all.edge_group == i).nonzero().squeeze(1)
        )
        expected = network.apply(CFG, params, without, label, given)
        logits = network.apply(CFG, params, left_out, label, given)
        assert torch.equal(logits, expected)
        seen = network.apply(CFG, params, with_all, label, given)
        assert not torch.allclose(seen, expected, atol=1e-3)


def test_a_pair_is_left_out_with_all_its_facts():
    facts = torch.tensor([[1, 1, 2], [2, 2, 1], [1, 2, 3], [2, 1, 2]])
    graph = network.build_graph(CFG, facts, "pair")
    edge = int((graph.edge_target == 1).nonzero()[0])
    is_left_out = graph.edge_group == graph.edge_group[edge]
    rest = network.without_edges(graph, is_left_out.nonzero().squeeze(1))
    asked = network.edge_questions(rest, torch.arange(len(rest.edge_target)))
    assert {tuple(x) for x in torch.stack(asked, 1).tolist()} == {
        (2, 3, 2),
        (3, 2, 3),
    }


def test_each_edge_is_a_question_that_its_fact_answers():
    facts = torch.tensor([[1, 4, 7], [2, 7, 7]])
    graph = network.build_graph(CFG, facts, "fact")
    asked = network.edge_questions(graph, torch.arange(4))
    rows = sorted(tuple(x) for x in torch.stack(asked, 1).tolist())
    assert rows == [(2, 7, 4), (3, 4, 7), (4, 7, 7), (5, 7, 7)]
    known = network.known_answers(
        CFG,
        graph,
        Questions(
            torch.tensor([3, 2]), torch.tensor([4, 4]), torch.tensor([1, 1])
        ),
    )
    assert known.nonzero().tolist() == [[0, 6]]  # entity 7; (2, 4) has none


def with_loops():
    """Facts of which some link an entity to itself, and some pairs are linked several times."""
    loops = torch.tensor([[1, 3, 3], [2, 3, 3], [2, 5, 5]])
    both_ways = torch.tensor([[1, 1, 2], [2, 1, 2], [1, 2, 1]])
    return torch.unique(torch.cat([random_facts(), loops, both_ways]), dim=0)


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_edges_that_a_question_leaves_out_are_unknown_to_it_alone(left_out):
    """As if they were no facts; a question whose answer is no known one leaves nothing out."""
    facts = with_loops()
    cfg = NetworkConfig(
        n_entities=9, n_labels=6, width=8, n_layers=3, messages="float64"
    )
    params = tree.map(lambda x: x.double(), random_params(CFG))
    graph = network.build_graph(cfg, facts, "fact")
    every = network.edge_questions(graph, torch.arange(2 * len(facts)))
    unknown = Questions(
        torch.tensor([2, 5]), torch.tensor([1, 4]), torch.tensor([0, 0])
    )
    asked = Questions(*(torch.cat(x) for x in zip(every, unknown)))
    omitted = network.question_edges(cfg, graph, asked, left_out)
    assert set(omitted.row.tolist()) == set(range(2 * len(facts)))
    logits = network.apply(
        cfg, params, graph, asked.label, asked.given, omitted
    )

    for i, (label, given, answer) in enumerate(
        zip(*(x.tolist() for x in asked))
    ):
        ends = (answer, given) if label % 2 == 0 else (given, answer)
        is_out = (facts == torch.tensor([label // 2, *ends])).all(1)
        if left_out == "pair":
            pairs = facts[:, 1:].sort(1).values
            is_out = (pairs == torch.tensor(sorted(ends))).all(1)
        assert is_out.any() == (answer > 0)
        rest = network.build_graph(cfg, facts[~is_out], "fact")
        expected = network.apply(
            cfg, params, rest, asked.label[[i]], asked.given[[i]]
        )
        # sums of the same float64 terms, one of them added and taken away
        torch.testing.assert_close(
            logits[i], expected[0], rtol=1e-9, atol=1e-11
        )


def test_permuted_entities_have_permuted_logits():
    facts, params = random_facts(), random_params(CFG)
    label, given = all_questions(CFG)
    permuted = torch.cat(
        [torch.zeros(1).long(), random.permutation(random.key(3), 9) + 1]
    )
    renamed = torch.cat([facts[:, :1], permuted[facts[:, 1:]]], 1)
    logits = network.apply(
        CFG, params, network.build_graph(CFG, facts, "fact"), label, given
    )
    other = network.apply(
        CFG,
        params,
        network.build_graph(CFG, renamed, "fact"),
        label,
        permuted[given],
    )
    torch.testing.assert_close(other[:, permuted[1:] - 1], logits, **ORDER)


def test_messages_in_bfloat16_are_close():
    facts, params = random_facts(), random_params(CFG)
    label, given = all_questions(CFG)
    graph = network.build_graph(CFG, facts, "fact")
    exact = network.apply(CFG, params, graph, label, given)
    cfg = NetworkConfig(
        n_entities=9, n_labels=6, width=8, n_layers=3, messages="bfloat16"
    )
    rounded = network.apply(cfg, params, graph, label, given)
    # A message has 8 bits, of which three layers lose a few.
    assert float((rounded - exact).abs().max()) < 0.1 * float(exact.std())
    assert not torch.equal(rounded, exact)


def step_config(n_at_once, dropped=0.0, cfg=CFG):
    return StepConfig(network=cfg, n_at_once=n_at_once, dropped=dropped)


def test_a_step_in_parts_is_the_step():
    graph = network.build_graph(CFG, random_facts(), "fact")
    world = network.make_world(CFG, graph)
    edge, key = torch.arange(0, 40, 4), random.key(1)
    whole, parts = (
        network.train_step(
            step_config(n_at_once, 0.3),
            world,
            edge,
            key,
            torch.tensor(0.01),
            network.init_training(random_params(CFG)),
        )
        for n_at_once in (10, 3)
    )
    torch.testing.assert_close(whole.loss, parts.loss, **ORDER)
    for one, other in zip(whole.adam.mu, parts.adam.mu):
        torch.testing.assert_close(one, other, **ORDER)


def test_a_step_leaves_out_what_it_asks_and_what_is_dropped():
    graph = network.build_graph(CFG, random_facts(), "fact")
    world = network.make_world(CFG, graph)
    params, edge = random_params(CFG), torch.tensor([5, 11])
    key = random.key(3)

    def loss(dropped):
        state = network.train_step(
            step_config(2, dropped),
            world,
            edge,
            key,
            torch.tensor(0.01),
            network.init_training(params),
        )
        return state.loss

    asked = network.edge_questions(graph, edge)
    known = network.known_answers(CFG, graph, asked)
    drawn = random.uniform(key, graph.edge_group.shape)
    for dropped in (0.0, 0.3, 1.0):
        is_left_out = drawn[graph.edge_group] < dropped
        is_left_out |= torch.isin(graph.edge_group, graph.edge_group[edge])
        assert int(is_left_out.sum()) >= 4  # both directions of two facts
        rest = network.without_edges(graph, is_left_out.nonzero().squeeze(1))
        expected = network.loss(CFG, params, rest, asked, known) / 2
        torch.testing.assert_close(loss(dropped), expected)
    assert not torch.isclose(loss(0.0), loss(0.3))
    assert not torch.isclose(loss(0.3), loss(1.0))


def test_it_learns_a_composition():
    # Chains of three, of which every third has no known grandparent.
    n_chains = 12
    chain = 3 * torch.arange(n_chains)[:, None] + torch.tensor([1, 2, 3])
    a, b, c = chain.unbind(1)

    def facts_of(predicate, head, tail):
        return torch.stack([torch.full_like(head, predicate), head, tail], 1)

    is_known = torch.arange(n_chains) % 3 > 0
    facts = torch.cat(
        [
            facts_of(PARENT, a, b),
            facts_of(PARENT, b, c),
            facts_of(GRANDPARENT, a[is_known], c[is_known]),
        ]
    )
    cfg = NetworkConfig(
        n_entities=3 * n_chains, n_labels=6, width=8, n_layers=2
    )
    graph = network.build_graph(cfg, facts, "fact")
    world = network.make_world(cfg, graph)
    state = network.init_training(network.init(cfg, random.key(0)))
    source_label = graph.source_label[graph.edge_source]
    asked = (source_label // 2 == GRANDPARENT).nonzero().squeeze(1)
    for step in range(80):
        order = random.permutation(random.key(step), len(asked))
        state = network.train_step(
            step_config(4, cfg=cfg),
            world,
            asked[order[:4]],
            random.key(0),
            torch.tensor(0.02),
            state,
        )

    new_a, new_c = a[~is_known], c[~is_known]
    for side, given, answer in ((TAIL, new_a, new_c), (HEAD, new_c, new_a)):
        label = make_label(torch.full_like(given, GRANDPARENT), side)
        log_p = network.answer_log_p(cfg, state.params, graph, label, given, 4)
        assert torch.equal(log_p.argmax(1), answer)
