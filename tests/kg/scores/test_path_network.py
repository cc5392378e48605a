"""The path network learns compositions, knows no entity and does not see what is asked; its kernel adds messages up."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.func import grad

from funcppo.core import random, tree
from funcppo.kg.logic import row_index
from funcppo.kg.logic.derive import Questions as OpenQuestions
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.scores import evidence, path_network
from funcppo.kg.scores.path_network import NetworkConfig, Questions
from tests.learning import on_gpu

PARENT, GRANDPARENT = 1, 2
CFG = NetworkConfig(n_entities=9, n_labels=6, width=8, n_layers=3)
# Sums of the same float32 terms in another order.
ORDER = {"rtol": 1e-4, "atol": 1e-5}
N_ROWS, N_LABELS, WIDTH = 40, 7, 24  # of sums of messages


def random_facts(n=24, n_entities=9, seed=0):
    """Distinct facts of two relations."""
    generator = torch.Generator().manual_seed(seed)
    high = torch.tensor([2, n_entities, n_entities])
    drawn = torch.rand((3 * n, 3), generator=generator) * high
    return torch.unique(drawn.long() + 1, dim=0)[:n]


def random_params(cfg, seed=0):
    """Weights none of which is 0, so that each has a part in the logits."""
    params = path_network.init(cfg, random.key(seed))
    wave = lambda x: torch.sin(torch.arange(x.numel())).view_as(x)
    return tree.map(lambda x: x + 0.1 * wave(x), params)


def all_questions(cfg):
    label = torch.arange(2, cfg.n_labels).repeat_interleave(cfg.n_entities)
    given = torch.arange(1, cfg.n_entities + 1).repeat(cfg.n_labels - 2)
    return label, given


def logits_by_loops(cfg, params, facts, label, given):
    """The logits of one question, fact by fact."""
    asked = params.asked[label]
    start = torch.zeros(cfg.n_entities + 1, cfg.width)
    start[given] = asked
    state, is_reached = start.clone(), torch.arange(len(start)) == given
    for layer in range(cfg.n_layers):
        total = start.clone()
        by_asked = asked @ params.weight_by_asked[layer]
        weight = params.weight[layer] + by_asked.view(cfg.n_labels, cfg.width)
        now = is_reached.clone()
        for predicate, head, tail in facts.tolist():
            total[head] += state[tail] * weight[2 * predicate]
            total[tail] += state[head] * weight[2 * predicate + 1]
            now[head] |= is_reached[tail]
            now[tail] |= is_reached[head]
        change = torch.cat([state, total], 1) @ params.linear[layer]
        change = change + params.bias[layer]
        centred = change - change.mean(1, keepdim=True)
        variance = centred.var(1, correction=0, keepdim=True)
        change = centred / (variance + 1e-5).sqrt()
        change = change * params.norm_scale[layer] + params.norm_shift[layer]
        state = (state + change.relu()) * now[:, None]
        is_reached = now
    final = torch.cat([state, asked.expand_as(state)], 1)
    hidden = (final @ params.hidden + params.hidden_bias).relu()
    return (hidden @ params.output)[1:]


def test_logits_are_those_of_loops_over_facts():
    facts, params = random_facts(), random_params(CFG)
    graph = path_network.build_graph(CFG, facts, "fact")
    label, given = all_questions(CFG)
    logits = path_network.apply(CFG, params, graph, label, given)
    for i in range(0, len(label), 5):
        expected = logits_by_loops(
            CFG, params, facts, int(label[i]), int(given[i])
        )
        torch.testing.assert_close(logits[i], expected, **ORDER)


def test_each_edge_is_a_question_that_its_fact_answers():
    facts = torch.tensor([[1, 4, 7], [2, 7, 7]])
    graph = path_network.build_graph(CFG, facts, "fact")
    asked = path_network.edge_questions(graph, torch.arange(4))
    rows = sorted(tuple(x) for x in torch.stack(asked, 1).tolist())
    assert rows == [(2, 7, 4), (3, 4, 7), (4, 7, 7), (5, 7, 7)]
    questions = Questions(*torch.tensor([[3, 2], [4, 4], [1, 1]]))
    known = path_network.known_answers(CFG, graph, questions)
    assert known.nonzero().tolist() == [[0, 6]]  # entity 7; (2, 4) has none


def test_a_pair_is_left_out_with_all_its_facts():
    facts = torch.tensor([[1, 1, 2], [2, 2, 1], [1, 2, 3], [2, 1, 2]])
    graph = path_network.build_graph(CFG, facts, "pair")
    edge = int((graph.edge_target == 1).nonzero()[0])
    rest = (graph.edge_group != graph.edge_group[edge]).nonzero().squeeze(1)
    asked = path_network.edge_questions(graph, rest)
    pairs = {tuple(x) for x in torch.stack(asked, 1).tolist()}
    assert pairs == {(2, 3, 2), (3, 2, 3)}


def with_loops():
    """Facts of which some link an entity to itself, and some pairs are linked several times."""
    loops = torch.tensor([[1, 3, 3], [2, 3, 3], [2, 5, 5]])
    both_ways = torch.tensor([[1, 1, 2], [2, 1, 2], [1, 2, 1]])
    return torch.unique(torch.cat([random_facts(), loops, both_ways]), dim=0)


# -- training


def loss_after(graph, params, edge, key, **settings):
    cfg = dataclasses.replace(CFG, **settings)
    state = path_network.init_training(params)
    rate = torch.tensor(0.01)
    return path_network.train_step(cfg, graph, edge, key, rate, state)


def test_a_step_in_parts_is_the_step():
    graph = path_network.build_graph(CFG, random_facts(), "fact")
    edge, key = torch.arange(0, 40, 4), random.key(1)
    begun = graph, random_params(CFG), edge, key
    whole, parts = (
        loss_after(*begun, dropped=0.3, n_at_once=n) for n in (10, 3)
    )
    torch.testing.assert_close(whole.loss, parts.loss, **ORDER)
    for one, other in zip(whole.adam.mu, parts.adam.mu):
        torch.testing.assert_close(one, other, **ORDER)


def test_a_step_leaves_out_what_it_asks_and_what_is_dropped():
    graph = path_network.build_graph(CFG, random_facts(), "fact")
    params, edge = random_params(CFG), torch.tensor([5, 11])
    key = random.key(3)
    asked = path_network.edge_questions(graph, edge)
    known = path_network.known_answers(CFG, graph, asked)
    drawn = random.uniform(key, graph.edge_group.shape)
    losses = []
    for dropped in (0.0, 0.3, 1.0):
        is_left_out = drawn[graph.edge_group] < dropped
        is_left_out |= torch.isin(graph.edge_group, graph.edge_group[edge])
        assert int(is_left_out.sum()) >= 4  # both directions of two facts
        # the two edges of a fact that is left out are left out
        label, given, answer = path_network.edge_questions(
            graph, (~is_left_out).nonzero().squeeze(1)
        )
        facts = torch.stack([label // 2, answer, given], 1)[label % 2 == 0]
        rest = path_network.build_graph(CFG, facts, "fact")
        expected = path_network.loss(CFG, params, rest, asked, known) / 2
        loss = loss_after(
            graph, params, edge, key, dropped=dropped, n_at_once=2
        ).loss
        torch.testing.assert_close(loss, expected)
        losses.append(float(loss))
    assert len({round(x, 4) for x in losses}) == 3


def test_it_learns_a_composition():
    # Chains of three, of which every third has no known grandparent.
    n_chains = 12
    chain = 3 * torch.arange(n_chains)[:, None] + torch.tensor([1, 2, 3])
    a, b, c = chain.unbind(1)

    def facts_of(predicate, head, tail):
        return torch.stack([torch.full_like(head, predicate), head, tail], 1)

    is_known = torch.arange(n_chains) % 3 > 0
    of_parents = facts_of(PARENT, a, b), facts_of(PARENT, b, c)
    others = facts_of(GRANDPARENT, a[is_known], c[is_known])
    facts = torch.cat([*of_parents, others])
    cfg = NetworkConfig(
        n_entities=3 * n_chains, n_labels=6, width=8, n_layers=2, n_at_once=4
    )
    graph = path_network.build_graph(cfg, facts, "fact")
    state = path_network.init_training(path_network.init(cfg, random.key(0)))
    source_label = graph.source_label[graph.edge_source]
    asked = (source_label // 2 == GRANDPARENT).nonzero().squeeze(1)
    for step in range(80):
        order = random.permutation(random.key(step), len(asked))
        drawn = asked[order[:4]], random.key(0), torch.tensor(0.02)
        state = path_network.train_step(cfg, graph, *drawn, state)

    new_a, new_c = a[~is_known], c[~is_known]
    for side, given, answer in ((TAIL, new_a, new_c), (HEAD, new_c, new_a)):
        label = make_label(torch.full_like(given, GRANDPARENT), side)
        logits = path_network.apply(cfg, state.params, graph, label, given)
        assert torch.equal(logits.argmax(1) + 1, answer)


# -- scores of candidates


def random_network(width=8):
    """A network with random weights, and the facts that it reads."""
    cfg = dataclasses.replace(CFG, width=width)
    params = path_network.init(cfg, random.key(0))
    return path_network.make_network(params, with_loops(), CFG.n_entities)


def ask(n_each=4):
    """Both questions of each fact, two without a known answer, and some candidates of each question."""
    of_facts = evidence.training_questions(with_loops())
    others = OpenQuestions(
        predicate=torch.tensor([1, 2]),
        side=torch.tensor([HEAD, TAIL]),
        entity=torch.tensor([3, 7]),
        left_out=torch.tensor([0, 0]),
    )
    questions = OpenQuestions(*(torch.cat(x) for x in zip(of_facts, others)))
    n = len(questions.entity)
    # Of one question there is no candidate.
    count = torch.arange(n) % (n_each + 1)
    entity = 1 + torch.arange(int(count.sum())) * 5 % CFG.n_entities
    return questions, row_index.offsets(count), entity


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_a_score_is_the_logit_above_the_mean_without_what_is_left_out(left_out):
    network = random_network()
    questions, offsets, entity = ask()
    values = path_network.candidate_scores(
        network, questions, left_out, offsets, entity
    )
    label = make_label(questions.predicate, questions.side)
    facts = with_loops()
    weights = tree.map(lambda x: x.double(), network.params)
    for i in range(len(label)):
        given, answer = questions.entity[i], questions.left_out[i]
        ends = torch.stack([given, answer])
        if questions.side[i] == HEAD:
            ends = ends.flip(0)
        is_out = (facts[:, 1:] == ends).all(1)
        if left_out == "fact":
            is_out = is_out & (facts[:, 0] == questions.predicate[i])
        else:
            is_out = is_out | (facts[:, 1:] == ends.flip(0)).all(1)
        rest = path_network.build_graph(network.cfg, facts[~is_out], "fact")

        (logits,) = path_network.apply(
            network.cfg, weights, rest, label[[i]], given[None]
        )
        some = slice(*offsets[i : i + 2].tolist())
        expected = (logits - logits.mean())[entity[some] - 1]
        unit = path_network.SCORE_UNIT
        assert ((values[some] - expected).abs() <= 0.501 * unit).all()
        assert torch.equal((values[some] / unit).round() * unit, values[some])


def test_other_questions_change_no_bit_of_a_score():
    network = random_network(width=16)
    questions, offsets, entity = ask()

    def score(*args):
        return path_network.candidate_scores(network, *args)

    together = score(questions, "fact", offsets, entity)
    assert len(together) and together.abs().max() > 0.1
    assert network.cfg.n_at_once > 50
    cfg = dataclasses.replace(network.cfg, n_at_once=1)
    network = dataclasses.replace(network, cfg=cfg)
    assert torch.equal(together, score(questions, "fact", offsets, entity))

    # a part of the questions, in another order
    rows = torch.tensor([7, 3, 49, 20])
    candidates = [entity[offsets[i] : offsets[i + 1]] for i in rows]
    some = score(
        OpenQuestions(*(column[rows] for column in questions)),
        "fact",
        row_index.offsets(offsets.diff()[rows]),
        torch.cat(candidates),
    )
    expected = [together[offsets[i] : offsets[i + 1]] for i in rows]
    assert torch.equal(some, torch.cat(expected))

    # There may be no candidate.
    none = torch.zeros_like(offsets)
    assert not len(score(questions, "fact", none, entity[:0]))


# -- the kernel's sums


def random_edges(n, device="cpu", seed=0):
    """Edges of which half come from one entity, and half go to another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size, hub):
        drawn = torch.randint(0, size, (n,), generator=generator)
        is_hub = torch.rand(n, generator=generator) < 0.5
        return torch.where(is_hub, hub, drawn).to(device)

    return draw(N_ROWS, 3), draw(N_LABELS, 2), draw(N_ROWS, 5)


def random_rows(n, device="cpu", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((n, WIDTH), generator=generator, dtype=torch.float64)
    return rows.to(device=device, dtype=dtype)


def plain_sums(states, weights, edges, is_kept=None):
    if is_kept is not None:
        edges = [x[is_kept] for x in edges]
    source, label, target = edges
    total = torch.zeros(N_ROWS, WIDTH, dtype=states.dtype)
    return total.index_add(0, target, states[source] * weights[label])


def sum_parts_on_cpu(offsets, left_row, right_row, edge, is_kept, left, right):
    """What the kernel computes, part by part."""
    assert left.data_ptr(), "a tensor with memory"
    rows = left if right is None else left[left_row] * right[right_row]
    if right is not None and is_kept is not None:
        rows = rows * is_kept[edge][:, None]
    parts = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.stack([rows[start:stop].sum(0) for start, stop in parts])


@pytest.fixture(scope="module")
def operator_on_cpu():
    library = torch.library.Library("funcppo", "IMPL")
    library.impl("sum_parts", sum_parts_on_cpu, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    "n", [1, 5, path_network.PART, path_network.PART + 1, 40_000]
)
def test_parts_add_up_to_the_sums_and_their_gradients(operator_on_cpu, n):
    """40,000 edges, half of which one hub has, take three levels of parts; some entities have no edge."""
    edges = random_edges(n)
    orders = path_network.order_messages(*edges, N_ROWS, N_LABELS)
    assert len(orders[0].offsets) == (3 if n == 40_000 else 1)
    for order in orders:
        lengths = torch.cat([offsets.diff() for offsets in order.offsets])
        assert int(lengths.max()) <= path_network.PART
    check(edges, torch.float64, 1e-12)
    check(edges, torch.float64, 1e-12, is_kept=torch.arange(n) % 3 > 0)


def check(edges, dtype, tolerance, is_kept=None):
    """Compare sums and gradients of random rows with those of plain tensors of float64."""
    device = edges[0].device
    orders = path_network.order_messages(*edges, N_ROWS, N_LABELS)
    rows = [random_rows(n, device, dtype, n) for n in (N_ROWS, N_LABELS)]
    against = random_rows(N_ROWS, device, torch.float64, 3)
    on_host = [x.cpu() for x in edges]
    kept_there = None if is_kept is None else is_kept.to(device)

    def by_parts(states, weights):
        sums = path_network.sum_messages(states, weights, orders, kept_there)
        return (sums * against).sum(), sums

    def plainly(states, weights):
        sums = plain_sums(states, weights, on_host, is_kept)
        return (sums * against.cpu()).sum(), sums

    gradients = grad(by_parts, (0, 1), has_aux=True)(*rows)
    exact = [x.cpu().double() for x in rows]
    expected = grad(plainly, (0, 1), has_aux=True)(*exact)
    close = {"rtol": tolerance, "atol": tolerance * len(on_host[0]) ** 0.5}
    for one, other in zip(tree.leaves(gradients), tree.leaves(expected)):
        torch.testing.assert_close(one.cpu().double(), other, **close)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_messages_along_all_edges_are_those_listed(operator_on_cpu, is_dropped):
    facts, params = with_loops(), random_params(CFG)
    listed = path_network.build_graph(CFG, facts, "fact")
    listed = listed._replace(by_target=())
    others = [path_network.with_orders(CFG, listed)]
    others.append(path_network.with_all_sent(listed))
    label, given = all_questions(CFG)
    n_edges = len(listed.edge_target)
    row = torch.arange(len(label))
    omitted = path_network.OmittedEdges(row, row * 7 % n_edges)
    is_kept = None
    if is_dropped:
        omitted, is_kept = None, torch.arange(n_edges) % 3 > 0

    def logits(params, graph):
        return path_network.apply(
            CFG, params, graph, label, given, omitted, is_kept
        )

    def against(params, graph):
        found = logits(params, graph)
        return (
            found * torch.sin(torch.arange(found.numel())).view_as(found)
        ).sum()

    expected = logits(params, listed)
    gradient, _ = tree.grad_and_value(partial(against, graph=listed), params)
    for graph in others:
        torch.testing.assert_close(logits(params, graph), expected, **ORDER)
        found, _ = tree.grad_and_value(partial(against, graph=graph), params)
        for one, other in zip(found, gradient, strict=True):
            torch.testing.assert_close(one, other, **ORDER)
    # Entities that no path reaches have the logit of nothing.
    far = torch.cat([facts, torch.tensor([[1, 10, 11]])])
    cfg = dataclasses.replace(CFG, n_entities=11)
    listed = path_network.build_graph(cfg, far, "fact")._replace(by_target=())
    sent = path_network.with_all_sent(listed)
    for graph in (listed, sent, path_network.with_orders(cfg, listed)):
        found = path_network.apply(cfg, params, graph, label[:1], given[:1])
        assert found[0, 9] == found[0, 10] != found[0, 0]


@on_gpu
@pytest.mark.parametrize("n", [1, 10_000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)]
)
def test_the_kernel_adds_up_messages(n, dtype, tolerance):
    edges = random_edges(n, "cuda")
    check(edges, dtype, tolerance)


@on_gpu
def test_the_kernel_adds_in_a_fixed_order():
    """Gradients of `embedding` and of `scatter_add` are added up as the threads come."""
    edges = random_edges(20_000, "cuda")
    orders = path_network.order_messages(*edges, N_ROWS, N_LABELS)
    states = random_rows(N_ROWS, "cuda", torch.float32, 1)
    weights = random_rows(N_LABELS, "cuda", torch.float32, 2)

    def loss(states, weights):
        return path_network.sum_messages(states, weights, orders).square().sum()

    first = grad(loss, (0, 1))(states, weights)
    for _ in range(20):
        again = grad(loss, (0, 1))(states, weights)
        assert all(map(torch.equal, first, again))
