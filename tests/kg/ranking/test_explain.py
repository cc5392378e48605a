"""Proofs of single atoms: the most probable one of a policy, and the smallest one."""

import math
from functools import cache

import pytest
import torch

from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import explain, scoring
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import score_by_rules, score_candidates


@cache
def setup(**fields):
    """A task on a small family, and a policy with preferences of its own."""
    settings = ProverTaskConfig(
        max_depth=4, embed_dim=4, hidden_dim=8, **fields
    )
    task = prover_task.build_task(loaders.load("family_tree:30:0"), settings)
    cfg = prover_task.build_config(
        task, PPOConfig(n_envs=4, n_steps=4, n_minibatches=1)
    )
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0)
    ).params
    return (
        task,
        cfg,
        tree.map(
            lambda x: (
                x + 0.1 * torch.sin(torch.arange(x.numel()).view(x.shape) * 1.7)
            ),
            params,
        ),
    )


def derived_atoms(task, n):
    """Some atoms that are no facts, of every height."""
    atoms = task.least_model.atoms[task.least_model.height > 0]
    return atoms[:: max(1, len(atoms) // n)]


# -- a worked example


def test_the_smallest_proof_is_worked_by_hand():
    """far(a, c) takes two steps by way of near; the facts are its leaves."""
    train = [
        ("a", "hop", "b"),
        ("b", "hop", "c"),
        ("c", "near", "a"),
        ("c", "far", "a"),
    ]
    rules = "near(X, Y) :- hop(X, Y)\nfar(X, Y) :- near(X, Z), hop(Z, Y)"
    task = prover_task.build_task(
        loaders.from_triples(train, rules=rules), ProverTaskConfig(max_height=2)
    )
    program = explain.build_program(task)
    entity = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    hop, near, far = (
        task.dataset.predicates.index(name) + 1
        for name in ("hop", "near", "far")
    )
    a, b, c = (entity[name] for name in "abc")
    # the last two are a fact and not derivable
    atoms = torch.tensor([[far, a, c], [hop, a, b], [far, a, b]])
    found, *others = explain.smallest_proofs(task, atoms, program)
    assert found is not None and others == [None, None]
    nodes = {
        node.goal: (node.rule, [found.nodes[i].goal for i in node.children])
        for node in found.nodes
    }
    assert found.nodes[0].goal == (far, a, c)
    assert nodes == {
        (far, a, c): (1, [(near, a, b), (hop, b, c)]),
        (near, a, b): (0, [(hop, a, b)]),
        (hop, a, b): (None, []),
        (hop, b, c): (None, []),
    }


# -- equality with the scores


def test_the_proof_by_rules_has_the_probability_of_the_best_rule():
    task, cfg, params = setup(max_height=1)
    assert task.fact_selection == "oracle"
    atoms = derived_atoms(task, 12)
    search = scoring.search_config(
        task, cfg, "best-proof", slots=1, beam=1, rows_per_step=1, chunk_size=1
    )
    score = score_by_rules(
        search, prover_task.inference_world(task), params, atoms.to(torch.int32)
    )
    for atom, probability in zip(atoms, score.sigmoid().tolist()):
        found = explain.most_probable_proof(task, cfg, params, atom)
        assert found is not None and found.nodes[
            0
        ].probability == pytest.approx(probability, rel=1e-5)
        assert all(node.probability is None for node in found.nodes[1:])


def test_the_proof_by_search_has_the_probability_of_the_best_path():
    task, cfg, params = setup(max_height=2)
    assert task.fact_selection == "policy"
    atoms, program = derived_atoms(task, 8), explain.build_program(task)
    search = scoring.search_config(
        task, cfg, "success", slots=1, beam=256, rows_per_step=256, chunk_size=8
    )
    result = score_candidates(
        search, prover_task.inference_world(task), params, atoms.to(torch.int32)
    ).results
    found = [
        explain.most_probable_proof(task, cfg, params, atom, program=program)
        for atom in atoms
    ]
    assert any(found)
    for proof, log_prob, n_choices in zip(
        found, result.best_log_prob.tolist(), result.proof_length.tolist()
    ):
        assert (proof is not None) == (n_choices > 0)
        if proof is not None:
            product = math.prod(
                node.probability
                for node in proof.nodes
                if node.probability is not None
            )
            assert product == pytest.approx(math.exp(log_prob), rel=1e-4)


@pytest.mark.parametrize("object_identity", [False, True])
def test_smallest_proofs_by_query_are_those_of_a_held_model(
    object_identity, monkeypatch
):
    """Facts, derived atoms and others; the rules of all atoms are found by one pass over their questions."""
    dataset = loaders.load("family_tree:30:0")
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=object_identity
    )
    held = prover_task.build_task(dataset, settings)
    monkeypatch.setattr(prover_task, "MAX_HEADS_PER_ATOM", 0)
    by_query = prover_task.build_task(dataset, settings, with_derivations=False)
    assert by_query.answers_plan is not None and held.answers_plan is None

    derived = derived_atoms(held, 40).long()
    others = torch.tensor([[1, i, i] for i in range(1, 9)])
    facts = held.kb.facts[::7].long()
    atoms = torch.cat([facts, derived.flip(0), others, derived[:2]])
    program = explain.build_program(held)
    passes = []
    iter_derivations = scoring.iter_answer_derivations
    monkeypatch.setattr(
        scoring,
        "iter_answer_derivations",
        lambda *args: passes.append(1) or iter_derivations(*args),
    )
    proofs = explain.smallest_proofs(by_query, atoms, program)
    assert len(passes) == 1
    assert proofs == explain.smallest_proofs(held, atoms, program)
    assert all(proofs[len(facts) : len(facts) + len(derived)])
    assert not all(proofs) and any(proofs[: len(facts)])


# -- limits


@pytest.mark.parametrize("max_height", [1, 2])
def test_an_atom_that_is_not_derivable_has_no_proof(max_height):
    task, cfg, params = setup(max_height=max_height)
    n = task.dataset.n_constants
    atoms = torch.tensor([[1, i, i] for i in range(1, n + 1)])
    refuted = atoms[fixpoint.atom_height(task.least_model, atoms) < 0]
    assert len(refuted)
    assert explain.most_probable_proof(task, cfg, params, refuted[0]) is None
    program = explain.build_program(task)
    assert explain.smallest_proofs(task, refuted[:1], program) == [None]


def test_a_proof_that_does_not_hold_is_an_error(monkeypatch):
    """No input causes it: the rule of a found proof is exchanged."""
    task, cfg, params = setup(max_height=1)
    atom = derived_atoms(task, 12)[0]
    found = explain.most_probable_proof(task, cfg, params, atom)
    assert found is not None
    wrong = Proof(nodes=found.nodes[:1])
    monkeypatch.setattr(
        explain.prove, "from_model", lambda *_, **options: wrong
    )
    with pytest.raises(
        AssertionError, match="expected a proof that holds, got"
    ):
        explain.most_probable_proof(task, cfg, params, atom)
