"""Random search and successive halving of a population."""

from __future__ import annotations

import math

import pytest

import funcppo as fp
from funcppo import metrics_log
from funcppo.rl import search as search_module
from funcppo.rl.many import train_many
from funcppo.rl.search import (
    RANGES,
    Trial,
    draw_trials,
    rungs,
    search,
    trial_rows,
    write_trials,
)
from funcppo.trainer import evaluate_many
from tests.learning import one_thread
from tests.rl.test_many import LEARNER

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_trials_are_drawn_in_their_ranges_but_for_the_first():
    trials = draw_trials(LEARNER, 200)
    assert trials == draw_trials(LEARNER, 200) != draw_trials(LEARNER, 200, 1)
    assert trials[0].scalars == {
        name: getattr(LEARNER.cfg.ppo, name) for name in RANGES
    }
    for name, (low, high) in RANGES.items():
        drawn = [trial.scalars[name] for trial in trials[1:]]
        assert all(low <= value <= high for value in drawn)
        # Log-uniform: half of them are below the geometric mean; 4 sigma.
        n_low = sum(value < math.sqrt(low * high) for value in drawn)
        assert abs(n_low - 99.5) < 4 * math.sqrt(199) / 2


@pytest.mark.parametrize(
    ("method", "n_trials", "n_updates", "expected"),
    [
        ("random", 8, 100, [100]),
        ("halving", 8, 100, [25, 50, 100]),
        ("halving", 5, 100, [25, 50, 100]),
        ("halving", 1, 100, [100]),
        ("halving", 16, 3, [1, 3]),
    ],
)
def test_rungs_double(method, n_trials, n_updates, expected):
    assert rungs(method, n_trials, n_updates) == expected


def fake_returns(monkeypatch):
    """Returns that fall with the learning rate, in place of played episodes."""

    def evaluate(learner, state, *, seeds, n_episodes):
        real = evaluate_many(learner, state, seeds=seeds, n_episodes=1)
        rates = state.scalars.learning_rate.tolist()
        return tuple(
            one._replace(sampled=one.sampled._replace(mean=-rate))
            for one, rate in zip(real, rates)
        )

    monkeypatch.setattr(search_module.trainer, "evaluate_many", evaluate)


def test_halving_keeps_the_better_half_and_its_states(monkeypatch):
    """The last one has the parameters of a run of its own, but for rounding."""
    fake_returns(monkeypatch)
    trials = draw_trials(LEARNER, 4)
    states = []
    found = list(
        search(
            LEARNER,
            4 * 32,
            trials,
            method="halving",
            seeds=(3, 4),
            callbacks=[lambda progress: states.append(progress.state) or False],
        )
    )
    assert [len(rung) for rung in found] == [4, 2]
    assert [rung[0].steps for rung in found] == [2 * 32, 4 * 32]
    rates = sorted(trial.scalars["learning_rate"] for trial in trials)
    best = [trial.scalars["learning_rate"] for trial in found[0]]
    assert best == rates
    last = [trial.scalars["learning_rate"] for trial in found[1]]
    assert last == rates[:2]
    assert found[1][0].mean_return == pytest.approx(-rates[0])

    winner = found[1][0]
    scalars = {name: [value] * 2 for name, value in winner.scalars.items()}
    alone = fp.train_many(LEARNER, 4 * 32, seeds=(3, 4), scalars=scalars)
    place = [t.number for t in found[0][:2]].index(winner.number)
    rows = slice(2 * place, 2 * place + 2)
    for got, expected in zip(
        fp.tree.leaves(states[-1].params), fp.tree.leaves(alone.state.params)
    ):
        assert got[rows].numpy() == pytest.approx(
            expected.numpy(), rel=1e-4, abs=1e-5
        )


def test_random_search_trains_all_to_the_end():
    trials = draw_trials(LEARNER, 3)
    (found,) = search(LEARNER, 64, trials, n_episodes=2)
    assert sorted(trial.number for trial in found) == [0, 1, 2]
    assert {trial.steps for trial in found} == {64}
    means = [trial.mean_return for trial in found]
    assert means == sorted(means, reverse=True)


def test_the_table_of_trials(tmp_path):
    """Trials that came further are first, whatever their return."""

    def trial(number, steps, mean):
        scalars = {"gamma": number / 10}
        return Trial(
            number=number,
            scalars=scalars,
            steps=steps,
            returns=(mean, mean + 2),
        )

    rungs = [[trial(1, 8, 5.0), trial(0, 8, 3.0)], [trial(1, 16, -7.0)]]
    assert trial_rows(rungs) == [
        {"trial": 1, "gamma": 0.1, "steps": 16, "return": -6.0},
        {"trial": 0, "gamma": 0.0, "steps": 8, "return": 4.0},
    ]
    write_trials(tmp_path / "trials.csv", rungs)
    assert (tmp_path / "trials.csv").read_text().splitlines() == [
        "trial,gamma,steps,return",
        "1,0.1,16,-6.0",
        "0,0.0,8,4.0",
    ]


def test_a_callback_ends_a_search():
    trials = draw_trials(LEARNER, 2)
    stop = [lambda progress: progress.update == 1]
    assert list(search(LEARNER, 64, trials, callbacks=stop)) == []


def test_no_trials_are_named():
    with pytest.raises(ValueError, match=r"^trials: expected an integer"):
        next(search(LEARNER, 64, ()))


@pytest.mark.parametrize("update", [1, 2, 3])
def test_a_search_continued_from_its_checkpoint_equals_one_without_a_stop(
    update, tmp_path
):
    trials = draw_trials(LEARNER, 4)
    path = tmp_path / "new" / "search.npz"
    options = {"method": "halving", "seeds": (3, 4), "n_episodes": 2}
    whole = list(search(LEARNER, 4 * 32, trials, **options))

    def stop(progress):
        return progress.update == update

    options["checkpoint"] = path
    part = search(LEARNER, 4 * 32, trials, callbacks=[stop], **options)
    assert list(part) == whole[: (update - 1) // 2]
    continued = list(search(LEARNER, 4 * 32, trials, **options))
    assert continued == whole
    # A search that is finished yields its rungs again, from the states of the last one.
    assert list(search(LEARNER, 4 * 32, trials, **options)) == whole


def test_each_trial_is_logged_as_the_run_of_its_numbers(tmp_path):
    """Of halving, the logs of two trials end with the first rung; the others go on as alone, but for rounding."""
    trials = draw_trials(LEARNER, 4)
    options = {"method": "halving", "seeds": (3, 4), "n_episodes": 2}
    options["callbacks"] = [fp.MetricsLog(tmp_path, "csv")]
    first, last = search(LEARNER, 4 * 32, trials, **options)
    for trial in first:
        is_kept = trial.number in [other.number for other in last]
        folder = tmp_path / f"trial-{trial.number}"
        rows = metrics_log.read(folder / "metrics.jsonl")
        assert [(row["seed"], row["update"]) for row in rows] == [
            (seed, update)
            for update in range(1, 5 if is_kept else 3)
            for seed in (3, 4)
        ]

        alone = tmp_path / f"alone-{trial.number}"
        scalars = {name: [x, x] for name, x in trial.scalars.items()}
        train_many(
            LEARNER,
            4 * 32,
            seeds=(3, 4),
            scalars=scalars,
            callbacks=[fp.MetricsLog(alone)],
        )
        expected = metrics_log.read(alone / "metrics.jsonl")
        for row, other in zip(rows, expected, strict=False):
            for name in ("steps", "n_episodes", "loss", "learning_rate"):
                assert row[name] == pytest.approx(other[name], rel=1e-3), name


def test_trials_are_not_logged_by_runs_of_wandb_side_by_side(
    monkeypatch, tmp_path
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logs = [fp.MetricsLog(tmp_path, "wandb")]
    trials = draw_trials(LEARNER, 2)
    with pytest.raises(ValueError, match=r"^log: expected csv.*, got wandb"):
        next(search(LEARNER, 32, trials, callbacks=logs))


def test_a_checkpoint_of_another_search_is_refused(tmp_path):
    path = tmp_path / "search.npz"
    trials = draw_trials(LEARNER, 2)
    list(search(LEARNER, 32, trials, n_episodes=2, checkpoint=path))
    for options, problem in (
        ({"method": "halving"}, "method: expected halving, got random"),
        ({"seeds": (1,)}, r"seeds: expected \[1\], got \[0\]"),
    ):
        with pytest.raises(ValueError, match=problem):
            list(search(LEARNER, 32, trials, checkpoint=path, **options))
