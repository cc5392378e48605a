"""Scorers of a task: what they compute, on which chunks, and what they report of their work."""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch

from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.graph import loaders
from funcppo.kg.logic import derivability, kb
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import ranking, scorers
from funcppo.kg.ranking.ranking import ScorerBySide
from funcppo.kg.search import beam_search
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.slot_scheduler import (
    evaluate_step,
    score_by_rules,
    score_candidates,
)
from funcppo.runtime.capture import GraphedStep
from funcppo.runtime.equivalence import EquivalenceError
from funcppo.runtime.reasons import ReasonCode
from tests.runtime.test_capture import on_gpu


@cache
def untrained(**fields):
    """A task on a small family, a policy that has learnt nothing, and the task's derivable atoms."""
    fields = {
        "max_height": 1,
        "max_depth": 4,
        "embed_dim": 4,
        "hidden_dim": 8,
    } | fields
    task = prover_task.build_task(
        loaders.load("family_tree:30:0"), ProverTaskConfig(**fields)
    )
    cfg = prover_task.build_config(
        task, PPOConfig(n_envs=4, n_steps=4, n_minibatches=1)
    )
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0)
    ).params
    return task, cfg, params, task.least_model.atoms[::7].to(torch.int32)


def search(score, chunk_size=16, **fields):
    task, cfg, _, _ = untrained(**fields)
    return scorers.search_config(
        task,
        cfg,
        score,
        slots=6,
        beam=8,
        rows_per_step=12,
        chunk_size=chunk_size,
    )


# -- untrained scores


def test_untrained_scores_are_worked_by_hand():
    """far(a, c) by rule 0 and far(a, b) by rule 1 with confidences 1 / 2 and 1 / 3; far(a, a) by none."""
    train = [
        ("a", "hop", "b"),
        ("b", "hop", "c"),
        ("c", "hop", "d"),
        ("b", "far", "d"),
        ("b", "far", "c"),
    ]
    dataset = loaders.from_triples(
        train, rules="far(X, Y) :- hop(X, Z), hop(Z, Y)\nfar(X, Y) :- hop(X, Y)"
    )
    task = prover_task.build_task(dataset, ProverTaskConfig(max_height=1))
    a, b, c = (dataset.entities.index(name) + 1 for name in "abc")
    atoms = torch.tensor([[2, a, a], [2, a, b], [2, a, c]], dtype=torch.int32)
    for name, scores in (
        ("exists@0", [0, 0, 0]),
        ("exists@1", [0, 1, 1]),
        ("max-confidence", [0, 1 / 3, 1 / 2]),
        ("noisy-or", [0, 1 / 3, 1 / 2]),
        # (p^2)^(1/2): powers matter only where several rules count
        ("noisy-or@2", [0, 1 / 3, 1 / 2]),
    ):
        log_odds = scorers.make_untrained_scorer(task, name)(atoms)
        torch.testing.assert_close(
            log_odds.sigmoid(),
            torch.tensor(scores, dtype=torch.float64),
            rtol=1e-12,
            atol=0,
        )


def test_other_facts_add_a_log_likelihood_ratio_for_each_side():
    """far(a, X): c and d by confidence 1/2; c has another fact of far as a tail, d has none; a has none as a head."""
    train = [
        ("a", "hop", "b"), ("b", "hop", "c"), ("b", "hop", "d"),
        ("x", "hop", "y"), ("y", "hop", "z"), ("x", "far", "z"),
        ("z", "far", "c"), ("x", "hop", "w"), ("w", "hop", "v"),
        ("x", "far", "v"),
    ]  # fmt: skip
    rules = "far(X, Y) :- hop(X, Z), hop(Z, Y)"
    dataset = loaders.from_triples(train, rules=rules)
    task = prover_task.build_task(
        dataset, ProverTaskConfig(max_height=1, smoothing=None)
    )
    far = dataset.predicates.index("far") + 1
    a, c, d, x, z = (dataset.entities.index(name) + 1 for name in "acdxz")
    atoms = torch.tensor(
        [[far, a, a], [far, a, c], [far, a, d], [far, x, z]], dtype=torch.int32
    )
    atoms = atoms[torch.argsort(atoms[:, 1] * 10 + atoms[:, 2])]
    plain = scorers.make_untrained_scorer(task, "max-confidence")(atoms)
    both = scorers.make_untrained_scorer(task, "max-confidence-other-facts")
    assert isinstance(both, ScorerBySide)

    # Facts: far of (x, z), (x, v), (z, c). Of their heads two have another fact, of their tails none.
    head_facts, tail_facts = (2 + 1) / (3 + 2), 1 / (3 + 2)
    # Derived beside them, by confidence 1/2: (a, c), (a, d). No head has a fact, one tail has.
    head_derived, tail_derived = 1 / (1 + 2), (1 / 2 + 1) / (1 + 2)
    ratio = {
        HEAD: (head_facts, head_derived),
        TAIL: (tail_facts, tail_derived),
    }
    by_pair = {(x, z): {HEAD: 1, TAIL: 0}, (a, c): {HEAD: 0, TAIL: 1}}
    for side in (HEAD, TAIL):
        found = both.of(side)(atoms)
        for atom, score, before in zip(atoms.tolist(), found, plain):
            own, derived = ratio[side]
            if not by_pair.get((atom[1], atom[2]), {}).get(side):
                own, derived = 1 - own, 1 - derived
            expected = float(before) + math.log(own / derived)
            assert float(score) == pytest.approx(expected, rel=1e-14)
    assert torch.isinf(plain).any()  # what no rule derives stays so


@pytest.mark.parametrize("with_derivations", [True, False])
def test_queries_that_ask_the_same_question_score_candidates_alike(
    with_derivations,
):
    """Nothing leaks: no candidate's score depends on which answer is held out."""
    cells = np.random.default_rng(0).permutation(200)[:100]
    triples = [
        (f"e{i % 10}", "rs"[i // 100], f"e{i // 10 % 10}") for i in cells
    ]
    dataset = loaders.from_triples(
        triples[:50],
        test=triples[50:],
        rules="r(X, Y) :- s(Y, X)\nr(X, Y) :- s(X, Z), r(Z, Y)\ns(X, Y) :- r(X, Y)",
    )
    task = prover_task.build_task(
        dataset,
        ProverTaskConfig(max_height=1),
        with_derivations=with_derivations,
    )
    scorer = scorers.make_untrained_scorer(task, "noisy-or-other-facts")
    n_compared = 0
    for side in (HEAD, TAIL):
        protocol = ranking.RankingProtocol(sides=(side,))
        found: dict[tuple[int, ...], float] = {}
        for query in dataset.test:
            ranked = ranking.rank_split(task, query[None], scorer, protocol)
            rows = zip(
                map(tuple, ranked.scored_atom.tolist()),
                ranked.log_odds.tolist(),
                strict=True,
            )
            for atom, score in rows:
                n_compared += atom in found
                assert found.setdefault(atom, score) == score
    assert n_compared > 100


@pytest.mark.parametrize("power", [1, 2, 7])
def test_noisy_or_counts_several_rules_less_the_larger_its_power(power):
    """far(a, c) by both rules: (1 - (1 - p^n) (1 - q^n))^(1 / n) of their confidences p and q."""
    train = [
        ("a", "hop", "b"),
        ("b", "hop", "c"),
        ("a", "hop", "c"),
        ("c", "hop", "d"),
        ("b", "far", "d"),
    ]
    train += [("b", "far", "c")]
    dataset = loaders.from_triples(
        train, rules="far(X, Y) :- hop(X, Z), hop(Z, Y)\nfar(X, Y) :- hop(X, Y)"
    )
    task = prover_task.build_task(dataset, ProverTaskConfig(max_height=1))
    a, c = (dataset.entities.index(name) + 1 for name in "ac")
    p, q = kb.rule_confidence(task.kb).tolist()  # in float32
    assert 0 < p < 1 and 0 < q < 1
    score = scorers.make_untrained_scorer(task, f"noisy-or@{power}")(
        torch.tensor([[2, a, c]], dtype=torch.int32)
    )
    expected = (1 - (1 - p**power) * (1 - q**power)) ** (1 / power)
    assert score.sigmoid().tolist() == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "exists",
        "exists@",
        "exists@x",
        "noisy-or@",
        "noisy-or@0",
        "noisy-or@100",
        "noisy-or-top-0",
        "noisy-or-top-",
        "noisy-or-top-5@",
        "best",
        "max-plus",
        "noisy-or-linked-last",
        "noisy-or-joint",
    ],
)
def test_an_unknown_score_is_refused(name):
    with pytest.raises(
        ValueError,
        match=rf"score '{name}': expected success, .* P from 1 to 99",
    ):
        scorers.make_untrained_scorer(untrained()[0], name)


@pytest.mark.parametrize(
    "name",
    [
        "max-confidence",
        "noisy-or",
        "noisy-or@3",
        "noisy-or-top-2",
    ],
)
def test_untrained_scores_are_the_same_from_the_index_and_from_joins(name):
    task, _, _, atoms = untrained()
    assert task.derivability_index is not None
    without_index = dataclasses.replace(task, derivability_index=None)
    got, want = (
        scorers.make_untrained_scorer(t, name)(atoms)
        for t in (task, without_index)
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


# -- scores of a policy


def test_a_search_is_needed_unless_the_rules_decide():
    """The oracle selects the facts at height 1; `best-proof` counts no choice of facts there."""
    oracle, policy, deep = (
        untrained(**fields)[0]
        for fields in (
            {"fact_selection": "oracle"},
            {"fact_selection": "policy"},
            {"max_height": 2},
        )
    )
    for task, needed in (
        (oracle, []),
        (policy, ["success", "greedy"]),
        (deep, ["success", "best-proof", "greedy"]),
    ):
        names = ("success", "best-proof", "greedy")
        assert [
            name for name in names if scorers.needs_search(task, search(name))
        ] == needed


@pytest.mark.parametrize("score", ["success", "best-proof", "greedy"])
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_a_scorer_without_a_search_scores_all_atoms_in_chunks(
    score, chunk_size
):
    """5-atom chunks of 13 atoms: 5, 5 and 3, the last padded to 4."""
    task, _, params, atoms = untrained()
    atoms, cfg = atoms[:13], search(score, chunk_size)
    progress, outcomes = [], []
    scorer = scorers.make_policy_scorer(
        cfg,
        task,
        params,
        None,
        lambda *n: progress.append(n),
        lambda *o: outcomes.append(o),
    )
    expected = score_by_rules(
        cfg, prover_task.inference_world(task), params, atoms
    )
    torch.testing.assert_close(scorer(atoms), expected, rtol=1e-5, atol=1e-5)
    n_started = [0, 5, 10, 13] if chunk_size == 5 else [0, 13]
    assert progress == [(n, 13) for n in n_started]
    assert outcomes == [(None, 13, 14 if chunk_size == 5 else 16)]


@pytest.mark.parametrize("score", ["success", "best-proof", "greedy"])
def test_a_scorer_with_a_search_gives_the_scores_of_the_search(score):
    fields = {"max_height": 2}
    task, _, params, atoms = untrained(**fields)
    atoms, cfg = atoms[:24], search(score, **fields)
    progress, outcomes = [], []
    scorer = scorers.make_policy_scorer(
        cfg,
        task,
        params,
        evaluate_step,
        lambda *n: progress.append(n),
        lambda *outcome: outcomes.append(outcome),
    )
    run = score_candidates(
        cfg, prover_task.inference_world(task), params, atoms
    )
    torch.testing.assert_close(
        scorer(atoms),
        beam_search.log_odds(cfg, run.results),
        rtol=0,
        atol=1e-5,
    )
    n_started, n_candidates = progress[-1]
    assert n_started == n_candidates >= len(atoms) and len(outcomes) == 1
    result, active_row_steps, row_steps = outcomes[0]
    assert (
        len(result.log_score) == len(atoms)
        and 0 < active_row_steps <= row_steps
    )


def test_derivations_of_the_scored_atoms_replace_an_index_that_is_too_large():
    task, _, params, atoms = untrained()
    without_index = dataclasses.replace(task, derivability_index=None)
    assert (
        scorers.with_derivations(task, atoms).derivability_index
        is task.derivability_index
    )
    cfg = search("success")
    empty = score_by_rules(
        cfg, prover_task.inference_world(without_index), params, atoms
    )
    got = score_by_rules(
        cfg, scorers.with_derivations(without_index, atoms), params, atoms
    )
    expected = score_by_rules(
        cfg, prover_task.inference_world(task), params, atoms
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(empty, expected)
    assert isinstance(
        scorers.with_derivations(without_index, atoms).derivability_index,
        derivability.DerivabilityIndex,
    )


# -- steps


def test_a_step_is_graphed_on_a_gpu_alone():
    assert scorers.make_search_step("cpu") is evaluate_step
    graphed = scorers.make_search_step("cuda")
    assert isinstance(graphed, GraphedStep)
    assert (
        scorers.graph_fallback_notes(graphed)
        == scorers.graph_fallback_notes(evaluate_step)
        == []
    )


def test_a_step_that_is_not_replayed_says_why():
    """On a CPU nothing is replayed."""
    task, _, params, atoms = untrained(max_height=2)
    step = GraphedStep(evaluate_step)
    scorers.make_policy_scorer(
        search("success", max_height=2), task, params, step
    )(atoms[:3])
    (note,) = scorers.graph_fallback_notes(step)
    assert note.startswith(
        "steps of a search were not replayed as a CUDA graph: "
    )
    replay = scorers.search_replay(step)
    assert replay.replay_mode == "none"
    assert replay.fallback_codes == {ReasonCode.NO_GPU: 1}
    assert scorers.search_replay(None) == ("none", {})


class CallTooLargeError(RuntimeError):
    """An error that is none of memory."""


def step_within(n_slots, error):
    """A step that fails with more slots, as where memory does not suffice."""

    def step(cfg, *args):
        if cfg.slots > n_slots:
            raise error
        return evaluate_step(cfg, *args)

    return step


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_slots_are_halved_until_the_search_fits(error):
    """Once for all later calls; scores do not depend on the number of slots (1e-5, as where they are set)."""
    task, _, params, atoms = untrained(max_height=2)
    cfg = dataclasses.replace(
        search("success", max_height=2), slots=8, rows_per_step=64
    )
    halved = []
    scorer = scorers.make_policy_scorer(
        cfg, task, params, step_within(2, error), on_halved=halved.append
    )
    expected = scorers.make_policy_scorer(cfg, task, params, evaluate_step)
    for part in (atoms[:20], atoms[20:30]):
        torch.testing.assert_close(
            scorer(part), expected(part), rtol=1e-5, atol=1e-5
        )
    assert [smaller.slots for smaller in halved] == [4, 2]
    assert [smaller.rows_per_step for smaller in halved] == [32, 16]
    assert [smaller.chunk_size for smaller in halved] == [8, 4]


def test_a_search_that_cannot_be_smaller_and_other_errors_are_raised():
    task, _, params, atoms = untrained(max_height=2)
    cfg = search("success", max_height=2)
    for n_slots, error in (
        (0, torch.OutOfMemoryError("CUDA out of memory")),
        (5, CallTooLargeError("expected less")),
    ):
        scorer = scorers.make_policy_scorer(
            cfg, task, params, step_within(n_slots, error)
        )
        with pytest.raises(type(error)):
            scorer(atoms[:3])


@on_gpu
def test_the_search_is_compiled_as_one_graph_that_equals_it():
    """By Inductor, with all widths, and captured; a graph break would be an error. It takes minutes on a CPU."""
    task, _, params, atoms = untrained(max_height=2)
    expected = scorers.make_policy_scorer(
        search("success", max_height=2), task, params, evaluate_step
    )
    on_cuda = prover_task.build_task(task.dataset, task.cfg, "cuda")
    cuda_params = tree.map(lambda x: x.cuda(), params)
    cfg = search("success", max_height=2)
    step = scorers.make_search_step("cuda", compiled=True)
    scorers.compile_search_step(cfg, on_cuda, cuda_params, atoms[:9], step)
    got = scorers.make_policy_scorer(cfg, on_cuda, cuda_params, step)
    torch.testing.assert_close(
        got(atoms[:40]), expected(atoms[:40]), rtol=1e-4, atol=1e-4
    )
    assert scorers.graph_fallback_notes(step) == []


def test_a_search_that_is_fast_and_wrong_is_refused():
    task, _, params, atoms = untrained(max_height=2)

    def wrong(*args):
        state = evaluate_step(*args)
        score = state.results.log_score * 1.01
        return state._replace(results=state.results._replace(log_score=score))

    with pytest.raises(EquivalenceError):
        scorers.compile_search_step(
            search("success", max_height=2), task, params, atoms[:9], wrong
        )
