"""The score of a policy: what it computes, on which chunks, and what it reports of its work."""

import dataclasses
from functools import cache

import pytest
import torch

from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import derive
from funcppo.kg.ranking import scoring
from funcppo.kg.ranking.scoring import PolicyScore
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import (
    evaluate_step,
    log_odds,
    score_by_rules,
    score_candidates,
)
from funcppo.runtime.capture import GraphedStep
from funcppo.runtime.compile import EquivalenceError
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
    return scoring.search_config(
        task,
        cfg,
        score,
        slots=6,
        beam=8,
        rows_per_step=12,
        chunk_size=chunk_size,
    )


def score(value, atoms):
    """The log-odds of atoms by a score of the small family."""
    return scoring.score_atoms(untrained()[0], value, atoms, 0)


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
            name for name in names if scoring.needs_search(task, search(name))
        ] == needed


@pytest.mark.parametrize("name", ["success", "best-proof", "greedy"])
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_a_score_without_a_search_scores_all_atoms_in_chunks(name, chunk_size):
    """5-atom chunks of 13 atoms: 5, 5 and 3, the last padded to 4."""
    task, _, params, atoms = untrained()
    atoms, cfg = atoms[:13], search(name, chunk_size)
    progress, outcomes = [], []
    scorer = PolicyScore(
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
    torch.testing.assert_close(
        score(scorer, atoms), expected, rtol=1e-5, atol=1e-5
    )
    n_started = [0, 5, 10, 13] if chunk_size == 5 else [0, 13]
    assert progress == [(n, 13) for n in n_started]
    assert outcomes == [(None, 13, 14 if chunk_size == 5 else 16)]


@pytest.mark.parametrize("name", ["success", "best-proof", "greedy"])
def test_a_score_with_a_search_gives_the_scores_of_the_search(name):
    fields = {"max_height": 2}
    task, _, params, atoms = untrained(**fields)
    atoms, cfg = atoms[:24], search(name, **fields)
    progress, outcomes = [], []
    scorer = PolicyScore(
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
        score(scorer, atoms),
        log_odds(cfg, run.results),
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
        scoring.with_derivations(task, atoms).derivability_index
        is task.derivability_index
    )
    cfg = search("success")
    empty = score_by_rules(
        cfg, prover_task.inference_world(without_index), params, atoms
    )
    got = score_by_rules(
        cfg, scoring.with_derivations(without_index, atoms), params, atoms
    )
    expected = score_by_rules(
        cfg, prover_task.inference_world(task), params, atoms
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(empty, expected)
    assert isinstance(
        scoring.with_derivations(without_index, atoms).derivability_index,
        derive.DerivabilityIndex,
    )


# -- steps


def test_a_step_that_is_not_replayed_says_why():
    """On a CPU nothing is replayed."""
    task, _, params, atoms = untrained(max_height=2)
    step = GraphedStep(evaluate_step)
    score(
        PolicyScore(search("success", max_height=2), task, params, step),
        atoms[:3],
    )
    (note,) = scoring.graph_fallback_notes(step)
    assert note.startswith(
        "steps of a search were not replayed as a CUDA graph: "
    )
    replay = scoring.search_replay(step)
    assert replay.replay_mode == "none"
    assert replay.fallback_codes == {ReasonCode.NO_GPU: 1}
    assert scoring.search_replay(None) == ("none", {})


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
    scorer = PolicyScore(
        cfg, task, params, step_within(2, error), on_halved=halved.append
    )
    expected = PolicyScore(cfg, task, params, evaluate_step)
    for part in (atoms[:20], atoms[20:30]):
        torch.testing.assert_close(
            score(scorer, part), score(expected, part), rtol=1e-5, atol=1e-5
        )
    assert [smaller.slots for smaller in halved] == [4, 2]
    assert [smaller.rows_per_step for smaller in halved] == [32, 16]
    assert [smaller.chunk_size for smaller in halved] == [8, 4]


def test_slots_are_tuned_within_the_memory_limit(monkeypatch):
    """Sizes double their speed up to 32 rows and hold a megabyte a row; no score depends on them."""
    task, _, params, atoms = untrained(max_height=2)
    tried = []

    def speed(cfg, *_):
        tried.append(cfg.rows_per_step)
        if cfg.rows_per_step > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return float(min(cfg.rows_per_step, 32 if fast else 10**9))

    monkeypatch.setattr(scoring, "_rows_per_second", speed)
    monkeypatch.setattr(scoring.memory, "used_bytes", lambda _: 100)
    monkeypatch.setattr(scoring.memory, "peak_bytes", lambda _: 100 + tried[-1])

    def tune(max_bytes):
        tried.clear()
        cfg = search("success", max_height=2)
        return scoring.tune_slots(
            cfg, task, params, atoms[:9], max_bytes, lambda: evaluate_step
        )[0]

    fast = True
    first = 2 * search("success", max_height=2).beam
    with pytest.raises(ValueError, match="--memory 101: expected at least"):
        tune(101)
    assert tune(10**9).rows_per_step == max(32, first)
    assert tried[-1] <= max(32, first) * 4  # the last two are no faster
    fast = False
    assert tune(100 + 256).rows_per_step == max(tried) <= 256
    assert tune(10**9).rows_per_step == 512 and tried[-1] == 1024


def test_a_search_that_cannot_be_smaller_and_other_errors_are_raised():
    task, _, params, atoms = untrained(max_height=2)
    cfg = search("success", max_height=2)
    for n_slots, error in (
        (0, torch.OutOfMemoryError("CUDA out of memory")),
        (5, CallTooLargeError("expected less")),
    ):
        scorer = PolicyScore(cfg, task, params, step_within(n_slots, error))
        with pytest.raises(type(error)):
            score(scorer, atoms[:3])


@on_gpu
def test_the_search_is_compiled_as_one_graph_that_equals_it():
    """By Inductor, with all widths, and captured; a graph break would be an error. It takes minutes on a CPU."""
    task, _, params, atoms = untrained(max_height=2)
    expected = PolicyScore(
        search("success", max_height=2), task, params, evaluate_step
    )
    on_cuda = prover_task.build_task(task.dataset, task.cfg, "cuda")
    cuda_params = tree.map(lambda x: x.cuda(), params)
    cfg = search("success", max_height=2)
    step = scoring.make_search_step("cuda", compiled=True)
    scoring.compile_search_step(cfg, on_cuda, cuda_params, atoms[:9], step)
    got = PolicyScore(cfg, on_cuda, cuda_params, step)
    torch.testing.assert_close(
        score(got, atoms[:40]),
        score(expected, atoms[:40]),
        rtol=1e-4,
        atol=1e-4,
    )
    assert scoring.graph_fallback_notes(step) == []


def test_a_search_that_is_fast_and_wrong_is_refused():
    task, _, params, atoms = untrained(max_height=2)

    def wrong(*args):
        state = evaluate_step(*args)
        score = state.results.log_score * 1.01
        return state._replace(results=state.results._replace(log_score=score))

    with pytest.raises(EquivalenceError):
        scoring.compile_search_step(
            search("success", max_height=2), task, params, atoms[:9], wrong
        )
