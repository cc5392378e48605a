"""The score of a candidate worked by hand, and the same whether its batch is padded or not."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given

from funcppo.core import random
from funcppo.kg.config import Penalty
from funcppo.kg.scores import learned
from funcppo.kg.scores.learned import AggregationConfig, QuestionWorld
from tests.kg.logic.test_derive import HEAD, TAIL, all_questions, ask_all
from tests.kg.scores.test_evidence import (
    KNOWS,
    PARENT,
    VILLAGE,
    build,
    collect_from,
)
from tests.oracles import Program, programs


def problem(program, questions, **options: Any):
    """Settings, what the score reads, initial params, and the evidence."""
    built, sizes, facts = build(program)
    world = learned.make_world(built, sizes)
    options |= {"sizes": sizes, "n_shapes": learned.n_shapes(world)}
    cfg = AggregationConfig(**options)
    found = collect_from((built, sizes, facts), questions)
    return cfg, world, learned.init(cfg, random.key(0)), found


def scores(cfg, world, params, found):
    return learned.score(cfg, world, params, learned.whole(found))


def random_params(params, seed=1):
    keys = random.split(random.key(seed), len(params))
    shapes = (tuple(p.shape) for p in params)
    return type(params)(*map(random.normal, keys, shapes))


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_before_training_powers_of_the_odds_of_confidences_add_up(power):
    cfg, world, _, found = problem(VILLAGE, ask_all([(KNOWS, TAIL, 1, 0)]))
    cfg = replace(cfg, odds_power=power)
    params = learned.init(cfg, random.key(0))
    # 1 knows 1, 4 (by 2), 2 (rule 0; rule 1), 4 (rule 0), 3 (rule 1)
    confidence = world.support / world.body_pairs
    odds = confidence / (1 - confidence)
    for entity, rules in ((2, (0, 1)), (3, (1,)), (4, (0, 2)), (1, (2,))):
        at = found.entity.tolist().index(entity)
        total = float((odds[list(rules)] ** power).sum())
        expected = math.log(total + 1e-6)
        score = float(scores(cfg, world, params, found)[at])
        assert score == pytest.approx(expected, abs=1e-5)


def test_each_weight_acts_on_its_evidence_alone():
    question = (KNOWS, TAIL, 1, 0)
    cfg, world, params, found = problem(VILLAGE, ask_all([question]))
    label = 2 * KNOWS + 1
    before = scores(cfg, world, params, found)

    def change(**weights):
        after = scores(cfg, world, params._replace(**weights), found)
        moved = (after - before).tolist()
        return {
            entity: pytest.approx(shift, abs=1e-5)
            for entity, shift in zip(found.entity.tolist(), moved)
            if abs(shift) > 1e-5
        }

    # parent(1, 2), parent(1, 3); knows(1, 2), knows(2, 1), knows(4, 1)
    link = params.link_weight.clone()
    link[2 * PARENT + 1, label] = 0.5
    assert change(link_weight=link) == {2: 0.5, 3: 0.5}
    linked = params.linked_weight.clone()
    linked[label] = -2.0
    assert change(linked_weight=linked) == {2: -2.0, 3: -2.0, 4: -2.0}
    # 1, 2 and 4 are known by 2, 1 and 2 persons, 3 by none
    own = params.own_degree_weight.clone()
    own[label] = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0])
    assert change(own_degree_weight=own) == {1: 3.0, 2: 2.0, 3: 1.0, 4: 3.0}
    # the prior of each candidate by link embeddings
    prior = torch.arange(len(found.entity)).float() - 1.0
    cfg = replace(cfg, uses_embedding=True)
    params = learned.init(cfg, random.key(0))
    found = found._replace(embedding_score=prior)
    assert torch.equal(scores(cfg, world, params, found), before)
    weight = params.prior_weight.clone()
    weight[label] = 0.5
    changed = {x: p for x, p in zip(found.entity.tolist(), prior) if p}
    halves = {entity: p / 2 for entity, p in changed.items()}
    assert change(prior_weight=weight) == halves
    # that by a path network
    cfg = replace(cfg, uses_embedding=False, uses_bellman_ford=True)
    params = learned.init(cfg, random.key(0))
    found = found._replace(path_score=2 * prior)
    assert torch.equal(scores(cfg, world, params, found), before)
    assert change(network_prior_weight=weight) == changed
    # a weight of another question's label
    assert not change(own_degree_weight=own.roll(1, 0))


def test_a_rule_that_loses_its_support_adds_nothing():
    cfg, world, params, found = problem(VILLAGE, ask_all([(KNOWS, HEAD, 1, 2)]))
    world = world._replace(support=torch.full_like(world.support, 2.0))
    world = world._replace(min_support=torch.tensor(2.0))
    batch = learned.whole(found)
    assert batch.is_left_out.all()
    amounts = learned.firing_amounts(cfg, world, params, batch)
    assert (amounts == 0).all()
    kept = world._replace(min_support=torch.tensor(1.0))
    assert (learned.firing_amounts(cfg, kept, params, batch) > 0).all()


LIKES, MEETS = 1, 2
X, Y, Z = 6, 7, 8
# meets(X, Y) <- likes(X, Z), likes(Z, Y).  meets(X, 4) <- likes(X, Z).
CLUB = Program(
    5,
    (2, 2),
    ((LIKES, 1, 2), (LIKES, 1, 3), (LIKES, 2, 4), (LIKES, 3, 4), (LIKES, 3, 5)),
    (
        ((MEETS, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),
        ((MEETS, X, 4), (LIKES, X, Z)),
    ),
)


def test_a_walk_is_weighed_in_place_of_the_share_where_there_is_one():
    """From 1 to 2 or 3; from 2 to 4, from 3 to 4 or 5: of three ways two end in 4, with a chance of 3/4."""
    cfg, world, params, found = problem(CLUB, ask_all([(MEETS, TAIL, 1, 0)]))
    batch = learned.whole(found)
    # The second rule is no path.
    firings = zip(found.entity[batch.firing_row].tolist(), found.rule.tolist())
    assert list(firings) == [(4, 0), (4, 1), (5, 0)]
    assert found.walk.tolist() == [0.75, 0.0, 0.25]

    weight = params.feature_weight.clone()
    weight[..., 4] = learned.LOG_SCALE
    weighed = params._replace(feature_weight=weight)
    before, after = (
        learned.firing_amounts(cfg, world, one, batch)
        for one in (params, weighed)
    )
    change = (after / before).tolist()
    assert change == pytest.approx([0.75, 1.0, 0.25], rel=1e-5)


@given(programs)
def test_a_padded_batch_scores_as_all_candidates_do(program):
    assume(program.rules)
    questions = ask_all(all_questions(program))
    cfg, world, params, found = problem(program, questions)
    params = random_params(params)
    expected = scores(cfg, world, params, found)
    rows = torch.arange(len(found.label)).flip(0)
    size = learned.capacity(found, rows)
    gathered = learned.gather(found, rows, size)
    padded = learned.score(cfg, world, params, gathered)
    by_question = padded.view(len(rows), size.n_candidates)
    for question, row in zip(rows.tolist(), by_question):
        first, last = found.candidate_offsets[question : question + 2].tolist()
        torch.testing.assert_close(row[: last - first], expected[first:last])


def test_the_score_compiles_as_one_graph_with_its_gradient():
    questions = ask_all(all_questions(VILLAGE))
    cfg, world, params, found = problem(VILLAGE, questions)
    params = random_params(params)
    rows = torch.arange(len(found.label))
    size = learned.capacity(found, rows)

    def total(params):
        batch = learned.gather(found, rows, size)
        return learned.score(cfg, world, params, batch).square().sum()

    gradient = torch.func.grad(total)
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(params), gradient(params), strict=True):
        torch.testing.assert_close(got, want)
        assert want.isfinite().all()


# Who knows 1, and whom does 1 know? The answer that is left out is 2.
ASKED = ask_all([(KNOWS, HEAD, 1, 2), (KNOWS, TAIL, 1, 2)])


def make_world(**options):
    """Settings of what is weighed, the questions, and their size."""
    cfg, world, _, found = problem(VILLAGE, ASKED)
    rows = torch.arange(len(found.label))
    size = learned.capacity(found, rows)
    return replace(cfg, **options), QuestionWorld(world, found, rows), size


def loss(cfg, world, size, params, **penalty):
    asked = Penalty(**penalty), params, world.question, size
    return float(learned.listwise_loss(cfg, world, *asked))


def test_the_loss_is_that_of_a_softmax_over_the_candidates_of_the_question():
    cfg, world, size = make_world()
    params = learned.init(cfg, random.key(0))
    listed = world.evidence
    logits = learned.log_odds_of_listed(
        cfg, world, params, world.question, size
    )
    p = torch.softmax(logits, -1)
    whole = learned.score(cfg, world.aggregation, params, learned.whole(listed))
    for q in (0, 1):
        mine = torch.softmax(whole[listed.question == q], 0)
        torch.testing.assert_close(p[q, : len(mine)], mine)
        assert not p[q, len(mine) :].any()

    answer = listed.answer - listed.candidate_offsets[:-1]
    log_p = [math.log(float(p[q, answer[q]])) for q in (0, 1)]
    expected = pytest.approx(-sum(log_p) / 2, abs=1e-5)
    assert loss(cfg, world, size, params) == expected
    heavy = params._replace(rule_weight=torch.full_like(params.rule_weight, 3))
    weighed, free = (
        loss(cfg, world, size, heavy, rule_weight=weight)
        for weight in (0.5, 0.0)
    )
    n_weights = heavy.rule_weight.numel()
    assert weighed - free == pytest.approx(0.5 * 9 * n_weights, rel=1e-4)


def test_the_prior_of_features_worked_by_hand():
    """One weight of each kind moves by 0.5; a quarter each over twice the questions and the variance."""
    cfg, world, size = make_world(odds_power=2.0)
    params = learned.init(cfg, random.key(0))
    feature = params.feature_weight.clone()
    degree = params.own_degree_weight.clone()
    feature[0, 0, 0] += 0.5
    feature[0, 0, 1] -= 0.5
    degree[0, 0] += 0.5
    first = torch.tensor([0])
    moved = params._replace(
        feature_weight=feature,
        own_degree_weight=degree,
        linked_weight=params.linked_weight.index_fill(0, first, 0.5),
    )
    tight, wide = (
        loss(cfg, world, size, moved, feature_deviation=deviation)
        for deviation in (0.1, 1e6)
    )
    assert tight - wide == pytest.approx(4 * 0.25 / (2 * 2 * 0.01), rel=1e-4)


def test_candidates_that_were_drawn_stand_for_those_that_were_not():
    cfg, world, size = make_world()
    chance = torch.zeros_like(world.evidence.log_listed)
    chance[0] = math.log(0.25)
    drawn = world._replace(evidence=world.evidence._replace(log_listed=chance))
    params = learned.init(cfg, random.key(0))
    before, after = (
        learned.log_odds_of_listed(cfg, w, params, w.question, size)
        for w in (world, drawn)
    )
    difference = (after - before)[before > torch.finfo(before.dtype).min]
    assert difference[0] == pytest.approx(math.log(4))
    assert (difference[1:] == 0).all()
