"""What is computed from a data set, and which settings are refused."""

import dataclasses
import itertools

import pytest
import torch

from funcppo.core.host import Deadline
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import explain, scoring
from funcppo.kg.ranking.scoring import PolicyScore, search_config
from funcppo.kg.search import task as prover_task
from tests.kg.search.small_tasks import (
    PPO,
    SETTINGS,
    SIZES,
    small_task,
    untrained_policy,
)


def test_object_identity_works_with_the_oracle_and_is_refused_otherwise():
    """A choice proves its goal exactly where the rule derives it under object identity."""
    triples = [(f"p{i // 2}", "child", f"p{i}") for i in range(2, 20)] + [
        ("p2", "sibling", "p3")
    ]
    family = loaders.from_triples(
        triples, rules="sibling(X, Y) :- child(Z, X), child(Z, Y)"
    )
    settings_ = dataclasses.replace(
        SETTINGS, max_height=1, hard_negative_fraction=0.0
    )
    plain = prover_task.build_task(family, settings_)
    task = prover_task.build_task(
        family, dataclasses.replace(settings_, object_identity=True)
    )
    atoms = plain.least_model.atoms
    lost = atoms[fixpoint.atom_height(task.least_model, atoms.long()) < 0]
    assert len(lost) == 18 and task.fact_selection == "oracle"
    cfg, params = untrained_policy(task)
    how = search_config(task, cfg, "success", **SIZES)
    score = PolicyScore(how, task, params, None)
    assert scoring.score_atoms(task, score, lost, 0).isneginf().all()
    atom = task.least_model.atoms[task.least_model.height > 0][0]
    proof = explain.most_probable_proof(task, cfg, params, atom.long())
    assert proof is not None
    problem = "object_identity: expected fact_selection=oracle"
    with pytest.raises(ValueError, match=problem):
        prover_task.build_config(small_task(object_identity=True), PPO)


def test_the_oracle_selects_facts_at_height_1_only():
    problem = "fact_selection=oracle: expected height 1 and all derivations, got height 2"
    with pytest.raises(ValueError, match=problem):
        small_task(fact_selection="oracle")
    assert small_task().fact_selection == "policy"
    assert small_task("countries_s1", max_height=1).fact_selection == "oracle"


CHAIN = "path(X, Y) :- edge(X, Y)\npath(X, Z) :- edge(X, Y), path(Y, Z)"
EDGES = [(a, "edge", b) for a, b in itertools.pairwise("abcde")]


def chain_task(valid, **fields):
    """Paths of up to four edges; a path of n edges has a proof of height n."""
    train = [*EDGES, ("a", "path", "b"), ("b", "path", "c")]
    graph = loaders.from_triples(train, valid, rules=CHAIN)
    return prover_task.build_task(graph, ProverTaskConfig(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "max_height: expected a height, got none"),
        ({"smoothing": "auto"}, "smoothing: expected a number or None, got auto"),
        ({"object_identity": "auto"}, "object_identity: expected true or false, got auto"),
        ({"hard_negative_fraction": 1.1}, "hard_negative_fraction: expected 0 to 1, got 1.1"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_chosen_or_out_of_range_is_refused(
    fields, message
):
    with pytest.raises(ValueError, match=f"^{message}$"):
        chain_task([], **({"max_height": 1} if fields else {}), **fields)


def test_positives_are_the_train_facts_with_a_rule_for_their_predicate():
    task = chain_task([], max_height=1)
    world = prover_task.training_world(task)
    path = task.dataset.predicates.index("path") + 1
    assert world.positives[:, 0].tolist() == [path, path]
    assert len(prover_task.inference_world(task).positives) == 0


def test_hard_negatives_are_the_derived_atoms_that_are_no_facts():
    """Height 1 derives path(c, d) and path(d, e) by the first rule, path(a, c) by the second."""
    for fraction, n in ((0.0, 0), (1.0, 3)):
        task = chain_task([], max_height=1, hard_negative_fraction=fraction)
        assert len(prover_task.training_world(task).hard_negatives) == n


def test_a_task_without_rules_or_without_a_positive_is_refused():
    with pytest.raises(ValueError, match=r"expected rules .* got none"):
        prover_task.build_task(
            loaders.from_triples(EDGES), ProverTaskConfig(max_height=1)
        )
    unused = prover_task.build_task(
        loaders.from_triples(EDGES, rules=CHAIN), ProverTaskConfig(max_height=1)
    )
    problem = (
        "expected a train fact with the predicate of a rule's head, got none"
    )
    with pytest.raises(ValueError, match=problem):
        prover_task.training_world(unused)


def test_without_derivations_a_task_holds_the_same_candidates():
    """Each query derives its own."""
    dataset = loaders.load("family_tree:60:3")
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=False
    )
    whole = prover_task.build_task(dataset, settings)
    bare = prover_task.build_task(dataset, settings, with_derivations=False)
    assert bare.derivability_index is None
    assert not len(bare.least_model.atoms)
    split = torch.from_numpy(dataset.test).long()
    bare = prover_task.with_answers(bare, split, (HEAD, TAIL))
    assert (bare.least_model.height > 0).any()
    assert prover_task.with_answers(bare, split, (HEAD, TAIL)) is bare
    for side, index in itertools.product(
        (HEAD, TAIL), ("derivable_triples", "true_triples")
    ):
        tables = (getattr(x.filter_index, index) for x in (bare, whole))
        ours, theirs = (
            kbase.list_answers(table, split, side) for table in tables
        )
        assert len(ours.entity) >= len(split)
        assert torch.equal(ours.query_row, theirs.query_row)
        assert torch.equal(ours.entity, theirs.entity)


def test_a_deadline_ends_t_p_above_height_1_as_one_line():
    dataset = loaders.load("countries_s2")
    settings = dataclasses.replace(SETTINGS, max_height=2)
    over = Deadline(at=0.0)
    with pytest.raises(ValueError, match=r"height 2 stopped.*more time"):
        prover_task.build_task(dataset, settings, deadline=over)
    low = dataclasses.replace(SETTINGS, max_height=1)
    assert prover_task.build_task(dataset, low, deadline=over).max_height == 1


LEAKY = loaders.from_triples(
    [("a", "p", "b"), ("a", "q", "b"), ("c", "p", "d"), ("g", "q", "h")],
    [("c", "p", "d")],
    [("a", "p", "b"), ("g", "p", "h")],
    rules="p(X, Y) :- q(X, Y)\nq(X, Y) :- p(X, Y)",
)


@pytest.mark.parametrize(
    ("height", "with_derivations"),
    list(itertools.product((1, 2), (False, True))),
)
def test_a_fact_is_derived_by_others_alone(height, with_derivations):
    """q(a, b) proves p(a, b); nothing but p(c, d) proves itself. Whether T_P is held or each query derives its own."""
    settings = ProverTaskConfig(max_height=height, smoothing=5.0)
    options = {"with_derivations": with_derivations}
    task = prover_task.build_task(LEAKY, settings, **options)
    a, b, c, d, g, h = (LEAKY.entities.index(x) + 1 for x in "abcdgh")
    assert task.unproved_facts.tolist() == [[1, c, d]]
    queries = torch.tensor([[1, a, b], [1, c, d], [1, g, h]])
    is_unproved = prover_task.is_unproved_fact(task, queries)
    assert is_unproved.tolist() == [False, True, False]
    answered = prover_task.with_answers(task, queries, (HEAD, TAIL))
    for side in (HEAD, TAIL):
        derivable = kbase.contains_triple(
            answered.filter_index.derivable_triples, queries, side
        )
        assert derivable.tolist() == [True, False, True]


# -- indexing derivations, whose work is bounded


def test_a_t_p_too_large_for_a_search_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"--learner questions"):
        chain_task([], max_height=1, max_atoms=4)
