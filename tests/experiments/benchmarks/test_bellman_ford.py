"""The Bellman-Ford network learns compositions, knows no entity and does not see what is asked; its gain is judged."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.benchmarks import added_term, bellman_ford
from experiments.benchmarks import bellman_ford_network as network
from experiments.benchmarks.added_term import Candidates, Ranked
from experiments.benchmarks.bellman_ford_network import (
    NetworkConfig,
    Questions,
    TrainState,
)
from funcppo import optim, random, tree
from funcppo.evaluation import rank_metrics, ranking
from funcppo.experiment import run_start
from funcppo.experiment.config import RunConfig
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover import evidence
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.question_config import EmbeddingConfig, QuestionConfig

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
        left_out = network.without_groups(with_all, torch.tensor([i]))
        expected = network.apply(CFG, params, without, label, given)
        logits = network.apply(CFG, params, left_out, label, given)
        assert torch.equal(logits, expected)
        seen = network.apply(CFG, params, with_all, label, given)
        assert not torch.allclose(seen, expected, atol=1e-3)


def test_a_pair_is_left_out_with_all_its_facts():
    facts = torch.tensor([[1, 1, 2], [2, 2, 1], [1, 2, 3], [2, 1, 2]])
    graph = network.build_graph(CFG, facts, "pair")
    edge = int((graph.edge_target == 1).nonzero()[0])
    rest = network.without_groups(graph, graph.edge_group[[edge]])
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


def test_a_step_in_parts_is_the_step():
    graph = network.build_graph(CFG, random_facts(), "fact")
    params = random_params(CFG)
    state = TrainState(params, optim.init(params))
    edge, none = torch.arange(0, 40, 4), torch.zeros(0, dtype=torch.long)
    whole, value = network.train_step(CFG, graph, state, edge, none, 0.01, 10)
    parts, same = network.train_step(CFG, graph, state, edge, none, 0.01, 3)
    torch.testing.assert_close(value, same, **ORDER)
    for one, other in zip(whole.adam.mu, parts.adam.mu):
        torch.testing.assert_close(one, other, **ORDER)


def test_what_is_dropped_is_left_out_of_a_step():
    facts = random_facts()
    graph = network.build_graph(CFG, facts, "fact")
    state = TrainState(random_params(CFG), optim.init(random_params(CFG)))
    edge = torch.tensor([5])
    own = graph.edge_group[edge]
    others = torch.arange(len(facts))
    nothing = network.train_step(CFG, graph, state, edge, others, 0.01, 1)[1]
    alone = network.train_step(CFG, graph, state, edge, own, 0.01, 1)[1]
    assert not torch.isclose(nothing, alone)

    asked = network.edge_questions(graph, edge)
    known = network.known_answers(CFG, graph, asked)
    rest = network.without_groups(graph, own)
    expected = network.loss(CFG, state.params, rest, asked, known)
    torch.testing.assert_close(alone, expected)


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
    params = network.init(cfg, random.key(0))
    state = TrainState(params, optim.init(params))
    none = torch.zeros(0, dtype=torch.long)
    source_label = graph.source_label[graph.edge_source]
    asked = (source_label // 2 == GRANDPARENT).nonzero().squeeze(1)
    for step in range(80):
        order = random.permutation(random.key(step), len(asked))
        state, _ = network.train_step(
            cfg, graph, state, asked[order[:4]], none, 0.02, 4
        )

    new_a, new_c = a[~is_known], c[~is_known]
    for side, given, answer in ((TAIL, new_a, new_c), (HEAD, new_c, new_a)):
        label = evidence.make_label(torch.full_like(given, GRANDPARENT), side)
        log_p = network.answer_log_p(cfg, state.params, graph, label, given, 4)
        assert torch.equal(log_p.argmax(1), answer)


# -- what it adds to a run


def candidates(n_rows=200, n_each=5, seed=0):
    """Candidates, each the answer as often as log-probabilities say, and these; the run knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n_rows, n_each), generator=generator).double()
    log_p = logits.log_softmax(1)
    answer = torch.multinomial(log_p.exp(), 1, generator=generator)
    is_answer = torch.zeros((n_rows, n_each), dtype=torch.bool)
    is_answer = is_answer.scatter(1, answer, True)
    row = torch.arange(n_rows).repeat_interleave(n_each)
    listed = Candidates(
        row=row,
        label=row % 4,
        given=torch.ones_like(row),
        entity=torch.ones_like(row),
        is_answer=is_answer.flatten(),
        run_score=torch.zeros(n_rows * n_each, dtype=torch.float64),
        n_candidates=torch.full((n_rows,), n_each),
    )
    return listed, log_p.flatten()


def test_weights_are_those_of_the_distribution_that_was_drawn_from():
    listed, log_p = candidates(n_rows=3000)
    half = torch.arange(3000) % 2 == 0
    weights = added_term.fit_weights(listed, log_p, half, 4, by_label=False)
    # 1,500 answers tell a weight to about .03.
    assert float(weights.common) == pytest.approx(1.0, abs=0.12)
    assert not weights.by_label.any()


def test_labels_have_weights_of_their_own():
    listed, log_p = candidates(n_rows=3000)
    # Of label 0 the log-probabilities say the opposite.
    log_p = torch.where(listed.label == 0, -log_p, log_p)
    every = torch.ones(3000, dtype=torch.bool)
    weights = added_term.fit_weights(listed, log_p, every, 4, by_label=True)
    weight = weights.common + weights.by_label
    assert float(weight[0]) < -0.5
    assert float(weight[1:].min()) > 0.5


def test_the_other_half_does_not_move_the_weights():
    listed, log_p = candidates()
    half = torch.arange(200) < 100
    _, other = candidates(seed=1)
    swapped = torch.where(half[listed.row], log_p, other)
    one = added_term.fit_weights(listed, log_p, half, 4, by_label=True)
    two = added_term.fit_weights(listed, swapped, half, 4, by_label=True)
    for x, y in zip(one, two):
        assert torch.equal(x, y)


def test_a_half_is_ranked_by_what_ranks_the_other_half_best():
    first = torch.tensor([True, True, False, False])
    good_first = Ranked(torch.tensor([1.0, 1.0, 0.2, 0.2]), 1)
    good_second = Ranked(torch.tensor([0.3, 0.3, 1.0, 1.0]), 2)
    rankings = [good_first, good_second]
    outcome = added_term.judge("both", (first, ~first), [rankings] * 2)
    assert [x.step for x in outcome.chosen] == [1, 2]
    torch.testing.assert_close(
        outcome.ranks, torch.tensor([0.3, 0.3, 0.2, 0.2])
    )


def test_a_record_has_the_rows_of_each_seed(tmp_path, monkeypatch):
    config = RunConfig(
        dataset="family_tree:30:0",
        steps=64,
        prover=ProverTaskConfig(
            max_height=1, smoothing=5.0, object_identity=False
        ),
        questions=QuestionConfig(
            left_out="fact", embedding=False, degrees=False, walks=False
        ),
        rule_score="noisy-or@3",
        embedding=EmbeddingConfig(rank=2, n_epochs=1),
    )
    run = run_start.prepare_run(config, tmp_path, resume=False)
    monkeypatch.setattr(run_start, "open_run", lambda _: run)
    record = tmp_path / "record.json"
    arguments = ["--run", tmp_path, "--out", record, "--seeds", 2]
    arguments += ["--width", 4, "--layers", 2, "--steps", 6, "--snapshots", 2]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    bellman_ford.main()

    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 10
    n_valid = 2 * len(run.task.dataset.valid)
    assert {row["n_valid"] for row in rows} == {n_valid}
    for seed in (0, 1):
        of_seed = [row for row in rows if row["seed"] == seed]
        first = of_seed[0]
        assert first["method"] == "run"
        for row in of_seed:
            gain = row["valid_mrr"] - first["valid_mrr"]
            assert row["valid_gain"] == pytest.approx(gain)
            assert row["training"]["steps"] == 6
            assert set(row["steps"]) <= {3, 6}

    # The control adds its rows and leaves the others.
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments), "--control"])
    bellman_ford.main()
    both = json.loads(record.read_text())["rows"]
    assert both[:10] == rows
    control = [row["method"] for row in both[10:]]
    assert len(control) == 8
    assert all("other link embeddings" in method for method in control)

    # What rank_split makes of the run's score.
    ranked = ranking.rank_split(
        run.task,
        run.task.dataset.valid,
        added_term.run_scorer(run),
        ranking.RankingProtocol(),
    )
    values = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    assert rows[0]["valid_mrr"] == pytest.approx(float(values.mean()))
