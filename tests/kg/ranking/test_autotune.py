"""The tuned batch size keeps the memory limit and is near the best throughput, and no score depends on it."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.ranking import autotune
from funcppo.kg.ranking.autotune import Trial
from funcppo.kg.search.slot_scheduler import evaluate_step, score_candidates
from funcppo.runtime import memory
from tests.kg.search.test_slot_scheduler import setup

MB = 1 << 20


def machine(monkeypatch, speed, held, growth):
    """A machine that is so fast at each size, and takes so many bytes more for each row."""
    monkeypatch.setattr(memory, "used_bytes", lambda device: held)
    monkeypatch.setattr(memory, "reset_peak", lambda device: None)
    monkeypatch.setattr(memory, "collect_unused", lambda: None)
    now = []
    monkeypatch.setattr(
        memory, "peak_bytes", lambda device: held + growth * now[-1]
    )
    return now, lambda size: (now.append(size), (size, size / speed(size)))[1]


@given(
    st.lists(st.integers(1, 1000), min_size=10, max_size=10),
    st.integers(0, 3000),
)
def test_no_size_beyond_the_limit_is_tried_and_the_smallest_near_the_best_is_selected(
    speeds, budget
):
    """Growth of 1 byte a row over 100 held: a size of n fits when 100 + n does."""
    sizes = [1 << i for i in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        tried, run = machine(
            patch, lambda size: speeds[sizes.index(size)], held=100, growth=1
        )
        if budget < 101:
            with pytest.raises(
                ValueError, match=f"--memory {budget}: expected at least"
            ):
                autotune.run_trials(run, sizes, budget, torch.device("cpu"))
            return
        trials = autotune.run_trials(run, sizes, budget, torch.device("cpu"))
    assert all(100 + size <= budget for size in tried)
    assert [trial.size for trial in trials] == tried
    fastest = max(speeds[sizes.index(size)] for size in tried)
    nearly = [
        size
        for size in tried
        if speeds[sizes.index(size)] * autotune.NEAR_BEST >= fastest
    ]
    assert autotune.select_trial(trials).size == nearly[0]
    fewer = max((t.rows_per_second for t in trials[:-2]), default=0)
    ends_early = len(tried) < len(
        [size for size in sizes if 100 + size <= budget]
    )
    assert (
        not ends_early
        or max(t.rows_per_second for t in trials[-2:]) < 1.05 * fewer
    )


def test_the_largest_size_that_fits_is_selected_where_throughput_keeps_growing(
    monkeypatch,
):
    _, run = machine(monkeypatch, lambda size: float(size), held=0, growth=MB)
    trials = autotune.run_trials(
        run, autotune.TRIAL_SIZES, 100 * MB, torch.device("cpu")
    )
    assert autotune.select_trial(trials) == Trial(
        size=64, rows_per_second=64.0, peak_bytes=64 * MB
    )


def test_trials_end_when_two_sizes_in_a_row_are_no_faster(monkeypatch):
    """Rows per second by size: 1, 2, 4, 4, 4 ends after the fifth, whose predecessor was no faster either."""
    _, run = machine(
        monkeypatch, lambda size: min(float(size), 4.0), held=0, growth=1
    )
    trials = autotune.run_trials(
        run, [1, 2, 4, 8, 16, 32], MB, torch.device("cpu")
    )
    assert [trial.size for trial in trials] == [1, 2, 4, 8, 16]
    assert autotune.select_trial(trials).size == 4


def test_trials_end_at_a_size_that_runs_out_of_memory(monkeypatch):
    """Unless it is the smallest, or another error."""
    _, run = machine(monkeypatch, float, held=0, growth=1)

    def run_within(size, largest=4, message="CUDA out of memory. Tried"):
        if size > largest:
            raise RuntimeError(message)
        return run(size)

    cpu = torch.device("cpu")
    trials = autotune.run_trials(run_within, [1, 2, 4, 8, 16], MB, cpu)
    assert [trial.size for trial in trials] == [1, 2, 4]
    for options in ({"largest": 0}, {"message": "index out of range"}):
        with pytest.raises(RuntimeError):
            autotune.run_trials(partial(run_within, **options), [1, 8], MB, cpu)


def test_scores_are_those_of_any_other_number_of_slots(monkeypatch):
    monkeypatch.setattr(autotune, "TRIAL_SIZES", (4, 16, 64))
    cfg, world, params, atoms = setup(5, "success", beam=6, chunk_size=48)
    fitted, trials = autotune.tune_slots(
        cfg, world, params, atoms, 1 << 60, lambda: evaluate_step
    )
    assert (
        fitted.rows_per_step in [trial.size for trial in trials]
        and fitted.slots == fitted.rows_per_step // 2
    )
    assert fitted.chunk_size >= 16 * fitted.slots
    got, want = (
        score_candidates(c, world, params, atoms)[0]
        for c in (fitted, dataclasses.replace(cfg, slots=3))
    )
    torch.testing.assert_close(got.log_score, want.log_score, rtol=0, atol=1e-5)


def test_a_chunk_is_tuned_for_scores_without_a_search(monkeypatch):
    """The scores of a chunk do not depend on its size; no chunk of fewer than 64 is tried."""
    monkeypatch.setattr(autotune, "TRIAL_SIZES", (16, 64, 128))
    cfg, world, params, atoms = setup(5, "best-proof", beam=6, chunk_size=7)
    tuned, trials = autotune.tune_chunk_size(cfg, world, params, atoms, 1 << 60)
    assert {trial.size for trial in trials} <= {
        64,
        128,
    } and tuned.chunk_size in [trial.size for trial in trials]
    assert dataclasses.replace(tuned, chunk_size=7) == cfg
    with pytest.raises(
        ValueError, match=r"--memory 1000: expected at least \d+ bytes"
    ):
        autotune.tune_chunk_size(cfg, world, params, atoms, 1000)


def test_a_search_that_cannot_fit_is_refused_before_it_starts():
    cfg, world, params, atoms = setup(5, "success", beam=6, chunk_size=48)
    with pytest.raises(
        ValueError,
        match=r"--memory 1000: expected at least \d+ bytes here, of which \d+ are in use",
    ):
        autotune.tune_slots(
            cfg, world, params, atoms, 1000, lambda: evaluate_step
        )
