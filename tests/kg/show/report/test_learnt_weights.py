"""The weights that training moved are those of the checkpoint, and each is said by its evidence."""

import dataclasses

import numpy as np
import torch

from funcppo.core import tree
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.run import evidence_fit, run_start, validation
from funcppo.kg.run.run import with_weights_of
from funcppo.kg.show.report import tables
from tests.kg.show.report.graphs import ALSO, INVERSE, LIKES


def changed_run(run, **changes):
    """The run with the untrained weights, but for given ones: name to (place, value)."""
    untrained = next(iter(validation.policies(run).values()))
    params = tree.map(torch.clone, untrained)
    score = params.score
    for name, (place, value) in changes.items():
        weight = getattr(score, name).clone()
        weight[place] = value
        score = score._replace(**{name: weight})
    state = run.state._replace(best_params=params._replace(score=score))
    return dataclasses.replace(run, state=state)


def test_each_weight_is_said_by_what_it_weighs(runs):
    run = run_start.open_run(runs["questions"])
    names = run.task.dataset.predicates
    likes, also = names.index(LIKES) + 1, names.index(ALSO) + 1
    inverse = names.index(INVERSE) + 1
    run = changed_run(
        run,
        # of the third rule, as a question about the tail
        rule_weight=((1, 2), 3.0),
        # the candidate is the tail of a fact of likes, the question asks for the head of also
        link_weight=((2 * likes + 1, 2 * also), -4.0),
        own_degree_weight=((2 * inverse, 3), 2.0),
        linked_weight=((2 * inverse + 1,), -1.0),
        feature_weight=((2 * also, int(run.questions.aggregation.shape[2]), 0), 1.5),
    )  # fmt: skip
    found = tables.learnt_weights(run)
    rule = format_rule(run.task.dataset, run.task.dataset.rules[2])
    assert found.n_moved == 5
    assert [tuple(weight) for weight in found.weights] == [
        ("link", f"{LIKES} with the candidate as tail", ALSO, "head", 0, -4),
        ("rule", rule, ALSO, "tail", 0, 3),
        ("known answers", "it is 3 to 4 known answers", INVERSE, "head", 0, 2),
        ("linked", "some fact links it", INVERSE, "tail", 0, -1),
        (
            "feature of rules",
            "log-odds of the confidence, rules of 3 atoms and 0 constants",
            ALSO, "head", 1, 1.5,
        ),
    ]  # fmt: skip
    assert [(r.relation, r.n_moved) for r in found.relations] == [
        (ALSO, 3), (INVERSE, 2),
    ]  # fmt: skip
    np.testing.assert_allclose(
        [r.distance for r in found.relations],
        np.sqrt([16 + 9 + 0.25, 4 + 1]),
    )


def test_degrees_and_the_prior_have_names_too(runs):
    run = run_start.open_run(runs["questions"])
    describe = tables._describe_places(run.task.dataset, run.questions)
    likes = run.task.dataset.predicates.index(LIKES) + 1
    _, degree = describe["degree_weight"]
    label = 2 * likes
    assert degree([6 * label + 5, 0]) == (
        f"9 or more facts of {LIKES} with the candidate as head"
    )
    assert degree([6 * label + 1, 0]) == (
        f"1 fact of {LIKES} with the candidate as head"
    )
    _, own_degree = describe["own_degree_weight"]
    assert own_degree([label, 1]) == "it is 1 known answer"
    assert own_degree([label, 0]) == "it is 0 known answers"
    assert describe["prior_weight"][1]([0]) == "prior by link embeddings"
    by_network = describe["network_prior_weight"][1]
    assert by_network([0]) == "prior by a Bellman-Ford network"
    fields = set(run.state.best_params.score._fields)
    assert fields == set(describe)


def test_a_walk_is_named_where_it_is_weighed(runs):
    run = run_start.open_run(runs["questions"])

    def name(setup):
        _, feature = tables._describe_places(run.task.dataset, setup)[
            "feature_weight"
        ]
        return feature([0, 0, 4])

    plain = evidence_fit.without_walks(run.questions)
    assert name(plain).startswith("log of the share of groundings, rules of")
    walking = name(with_weights_of(run.questions, uses_walks=True))
    assert walking.startswith("log of the probability of a random walk")


def test_what_training_did_not_move_is_not_listed(runs):
    run = changed_run(run_start.open_run(runs["questions"]))
    found = tables.learnt_weights(run)
    assert found == (0, (), ())


def test_the_most_moved_weights_are_listed_and_all_are_counted(
    runs, monkeypatch
):
    run = changed_run(
        run_start.open_run(runs["questions"]),
        linked_weight=(slice(2, 6), torch.tensor([1.0, -3.0, 2.0, 0.5])),
    )
    whole = tables.learnt_weights(run)
    monkeypatch.setattr(tables, "MAX_WEIGHTS", 2)
    found = tables.learnt_weights(run)
    assert [weight.after for weight in whole.weights] == [-3.0, 2.0, 1.0, 0.5]
    assert found.weights == whole.weights[:2]
    assert found.n_moved == whole.n_moved == len(whole.weights)
    assert found.relations == whole.relations


def test_a_run_that_searches_proofs_has_none(runs):
    run = run_start.open_run(runs["proofs"])
    assert tables.learnt_weights(run) is None
