"""One step of the beam search: which rows it extends, and that slots do not depend on one another."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import tree
from funcppo.kg.search import beam_search, slot_scheduler
from funcppo.kg.search.beam_search import extend_beams, slots_for_rows
from tests.kg.search.test_slot_scheduler import PHASES, setup
from tests.learning import assert_trees_equal


def started(cfg, world, params, atoms, steps):
    """The search after some steps, one atom in each slot; the table of candidates is not used up."""
    padding = atoms.new_zeros((cfg.chunk_size + 1 - len(atoms), 3))
    chunk = torch.cat([atoms, padding])
    state = slot_scheduler._refill(
        cfg, chunk, slot_scheduler.init_scheduler(cfg, chunk)
    )
    search = state.search
    for _ in range(steps):
        search = extend_beams(cfg, world, params, search).search
    return search


# -- worked by hand


def test_the_rows_of_a_step_fill_slots_of_two_partial_proofs():
    assert [slots_for_rows(rows, beam=64) for rows in (1, 2, 3, 512)] == [
        1,
        1,
        1,
        256,
    ]
    # greedy: one partial proof a slot
    assert slots_for_rows(512, beam=1) == 512


def test_the_policy_of_a_partial_proof_is_a_distribution_over_its_successors_and_end():
    cfg, world, params, atoms = setup(3, "success")
    search = started(cfg, world, params, atoms[:4], steps=0)
    goals = tree.map(lambda x: x[:, 0], search.goals)
    successors = beam_search.resolve(cfg.resolve, world.kb, goals, search.query)
    observation = beam_search.make_observation(
        cfg.resolve,
        world,
        goals,
        successors,
        search.query,
        torch.ones(cfg.slots),
    )
    log_prob = beam_search.policy_log_probs(cfg, world, params, observation)
    torch.testing.assert_close(
        log_prob.exp().sum(1), torch.ones(cfg.slots), rtol=0, atol=1e-6
    )
    assert (log_prob[~observation.action_mask] < -1e30).all()


# -- a slow oracle


def selection_by_loops(n_open, n_rows, rounds):
    """The slots that a step extends: those that come first as far as they fit, then others into the rest."""
    chosen = set()
    for _ in range(rounds):
        free = n_rows - sum(n_open[i] for i in chosen)
        demand, taken = 0, set()
        for i, n in enumerate(n_open):
            if i in chosen or n > free:
                continue
            demand += n
            if n and demand <= free:
                taken.add(i)
        chosen |= taken
    return chosen


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.integers(4, 30))
@settings(max_examples=40, phases=PHASES)
def test_slots_are_extended_whole_in_order_as_far_as_rows_last(n_open, n_rows):
    cfg, world, params, atoms = setup(
        1, "success", beam=4, slots=6, rows_per_step=n_rows
    )
    search = started(cfg, world, params, atoms[:6], steps=0)
    is_open = torch.arange(4) < torch.tensor(n_open)[:, None]
    search = search._replace(
        goals=tree.map(lambda x: x[:, :1].expand_as(x), search.goals),
        log_prob=torch.where(is_open, -1.0, -torch.inf),
    )
    extended, n_extended = extend_beams(cfg, world, params, search)
    expected = selection_by_loops(
        n_open, n_rows, beam_search._SLOT_SELECTION_ROUNDS
    )
    assert set(extended.depth.nonzero()[:, 0].tolist()) == expected
    assert int(n_extended) == sum(n_open[i] for i in expected) <= n_rows


@pytest.mark.parametrize("score", ["success", "best-proof", "greedy"])
@given(seed=st.integers(0, 10_000), steps=st.integers(0, 2))
@settings(max_examples=5, phases=PHASES)
def test_a_step_of_many_slots_is_that_of_each_slot_alone(score, seed, steps):
    """1e-5: sums over another number of rows are rounded otherwise. Choices and goals are compared exactly."""
    beam = 1 if score == "greedy" else 3
    cfg, world, params, atoms = setup(
        seed, score, max_height=2, beam=beam, slots=12, rows_per_step=12 * beam
    )
    search = started(cfg, world, params, atoms[seed % 4 :: 4], steps)
    together = extend_beams(cfg, world, params, search).search
    alone = dataclasses.replace(cfg, slots=1, rows_per_step=beam)
    for i in range(cfg.slots):
        one = tree.map(lambda x, i=i: x[i : i + 1], search)
        if not torch.isfinite(one.log_prob).any():
            continue
        expected = extend_beams(alone, world, params, one).search
        got = tree.map(lambda x, i=i: x[i : i + 1], together)
        is_open = torch.isfinite(expected.log_prob)
        assert torch.equal(torch.isfinite(got.log_prob), is_open)
        assert_trees_equal(
            (
                got.log_prob,
                got.result,
                got.trace[is_open],
                got.goals.atoms[is_open],
            ),
            (
                expected.log_prob,
                expected.result,
                expected.trace[is_open],
                expected.goals.atoms[is_open],
            ),
            rtol=0,
            atol=1e-5,
        )


# -- limits


@given(st.integers(0, 10_000))
@settings(max_examples=5, phases=PHASES)
def test_a_beam_keeps_the_most_probable_and_counts_the_rest_as_pruned(seed):
    """1e-5: rounding of float32 sums."""
    cfg, world, params, atoms = setup(
        seed,
        "success",
        max_height=2,
        beam=1,
        slots=48,
        rows_per_step=48,
        chunk_size=48,
    )
    narrow = started(cfg, world, params, atoms, steps=1)
    wide = started(
        dataclasses.replace(cfg, beam=50, rows_per_step=2400),
        world,
        params,
        atoms,
        steps=1,
    )
    assert torch.isneginf(wide.result.pruned_log_mass).all()
    torch.testing.assert_close(
        narrow.log_prob, wide.log_prob.topk(1, dim=1).values, rtol=0, atol=1e-5
    )
    narrow_mass = (
        narrow.log_prob.logsumexp(1).exp() + narrow.result.pruned_log_mass.exp()
    )
    wide_mass = wide.log_prob.logsumexp(1).exp()
    torch.testing.assert_close(narrow_mass, wide_mass, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        narrow.result.log_score, wide.result.log_score, rtol=0, atol=1e-5
    )
    assert (wide_mass + wide.result.log_score.exp() <= 1 + 1e-5).all()


def test_a_slot_beyond_the_capacity_of_the_network_waits():
    """The slots have 1, 1, 2, 1, 0, 0, 1, ... successors: with capacity for 4, those after the third wait.

    A slot without a successor never waits.
    """
    cfg, world, params, atoms = setup(
        4, "success", beam=2, slots=16, rows_per_step=32
    )
    search = started(cfg, world, params, atoms[16:32], steps=0)
    n_successors = [1, 1, 2, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 2, 1]

    def extend_with_capacity(capacity):
        agent = dataclasses.replace(
            cfg.agent, cfg=dataclasses.replace(cfg.agent.cfg, capacity=capacity)
        )
        return extend_beams(
            dataclasses.replace(cfg, agent=agent), world, params, search
        )

    extended, n_rows = extend_with_capacity(4)
    waits = extended.depth == 0
    assert waits.tolist() == [
        i > 2 and n > 0 for i, n in enumerate(n_successors)
    ]
    assert int(n_rows) == 16 - int(waits.sum())
    for old, new in zip(tree.leaves(search), tree.leaves(extended)):
        assert torch.equal(old[waits], new[waits])
    extended, n_rows = extend_with_capacity(sum(n_successors))
    assert (extended.depth == 1).all() and int(n_rows) == 16
