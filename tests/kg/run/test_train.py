"""Training runs: resumed bit for bit, validated at the right updates, stopped where numbers are not finite."""

import math
import os
import shutil
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from funcppo import learner, logs, train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.core.host import Deadline
from funcppo.core.settings import METRICS_FILE
from funcppo.kg.config import RESULTS_FILE, read_config
from funcppo.kg.run import held_out, train
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.run import open_run, resume_run, saved_update, write_graph
from funcppo.kg.run.train import rank_results, validate, with_capacity
from funcppo.kg.search import task as prover_task
from funcppo.runtime.compile import StrategyRecord
from funcppo.runtime.monitor import Monitor
from funcppo.train_step import EAGER_PARTS
from tests.kg.run.runs import CONFIG, N_UPDATES, assert_equal_runs, trained
from tests.kg.search.small_tasks import small_task
from tests.learning import assert_trees_equal

# -- resumed runs


@pytest.mark.parametrize("last_update", [1, 2, 3])
def test_a_stopped_run_is_resumed(last_update, uninterrupted, run, tmp_path):
    """Update 2 waits for its validation."""
    after, _ = trained(run, tmp_path, stop_at=last_update)
    waits = after.pending_row is not None
    assert waits == (last_update == 2)
    resumed = resume_run(run.run_config, tmp_path)
    assert int(resumed.state.train_state.update) == last_update
    _, metrics = trained(resumed, tmp_path)
    assert len(metrics) == N_UPDATES - last_update
    assert_equal_runs(tmp_path, uninterrupted)


def train_at(times, run, folder, n_updates):
    """Train under a clock that shows a time for each update; the updates that the checkpoint held after each.

    Args:
      times: in seconds, of the start and of each update.
      n_updates: after which the run is left, without a stop that would save it.
    """
    write_graph(run.task, folder)
    captured, _ = train.prepare_train_step(run)
    arguments = run, folder, captured, lambda: False, Monitor()
    updates = train.train(*arguments, checkpoint_seconds=60.0)
    saved = []
    now = lambda: times[int(captured.state.update)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train.time, "monotonic", now)
        # The clock on the wall goes backwards, which nothing may read.
        monkeypatch.setattr(train.time, "time", lambda: -1e9)
        for _ in range(n_updates):
            next(updates)
            saved.append(saved_update(folder))
    updates.close()
    return saved


def test_an_update_is_saved_after_a_while(uninterrupted, run, tmp_path):
    """The run is left at update 3 as a killed process leaves it, resumed, and left with update 1 alone likewise."""
    assert train_at([0, 60], run, tmp_path, 1) == [1]
    resumed = resume_run(run.run_config, tmp_path)
    assert train_at([0, 0, 0, 60], resumed, tmp_path, 2) == [2, 3]
    trained(resume_run(run.run_config, tmp_path), tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)
    # Of four updates, 2 and 4 end with a validation, which saves them and begins the time anew.
    other = tmp_path / "other"
    other.mkdir()
    times = [0, 59, 61, 122, 122]
    assert train_at(times, run, other, N_UPDATES) == [0, 2, 3, 4]


def test_a_run_stopped_in_its_last_validation_is_resumed(run, tmp_path):
    after, _ = trained(run, tmp_path, stop_at=N_UPDATES)
    assert after.pending_row is not None
    resumed = resume_run(run.run_config, tmp_path)
    captured, _ = train.prepare_train_step(resumed)
    updates = train.train(resumed, tmp_path, captured, lambda: False, Monitor())
    ((ended, numbers),) = updates
    assert ended.pending_row is None and numbers["update"] == N_UPDATES
    last = logs.read(tmp_path / METRICS_FILE)[-1]
    assert float(ended.state.best_valid_metric) == last["best_valid_metric"]


# -- validations


def ranked_as(monkeypatch, metrics):
    """Let validations find these metrics, each of four queries that are ranked alike."""
    found = iter(metrics)
    ranks = lambda ranked: torch.as_tensor(ranked).double().expand(4).clone()
    for module, name, function in (
        (train.held_out, "rank_valid", lambda *_, **__: next(found)),
        (train.held_out, "metric_of", lambda run, ranked: ranked),
        (train.fit, "reciprocal_ranks", ranks),
    ):
        monkeypatch.setattr(module, name, function)


def test_the_best_parameters_are_kept_meanwhile(run, monkeypatch, tmp_path):
    """Valid quality 0.25 before training, 0.5 after update 2, 0.125 after update 4."""
    ranked_as(monkeypatch, [0.25, 0.5, 0.125])
    captured, _ = train.prepare_train_step(run)
    params = [tree.ravel(run.state.train_state.params)]
    arguments = run, tmp_path, captured, lambda: False, Monitor()
    for run, _ in train.train(*arguments):
        params.append(tree.ravel(run.state.train_state.params))
    best = tree.ravel(run.state.best_params)
    assert torch.equal(best, params[2])
    assert not torch.equal(params[2], params[4])
    names = ("valid_metric", "best_valid_metric", "best_update")
    rows = logs.read(tmp_path / METRICS_FILE)
    of_valid = [[x[name] for name in names] for x in rows if names[0] in x]
    assert of_valid == [[0.25, 0.25, 0], [0.5, 0.5, 2], [0.125, 0.5, 2]]
    (row,) = [row for row in run.choices if row.stage == "PPO"]
    assert row.tried == {"update 0": 0.25, "update 2": 0.5, "update 4": 0.125}
    assert (row.chosen, row.is_kept) == ("update 2", True)
    assert (row.valid_before, row.valid_after) == (0.25, 0.5)


def test_a_run_ends_early_if_it_gets_no_better(run, monkeypatch, tmp_path):
    """An equal metric is no better, though 0.7 is above its float32 value; a resumed run sees that it has ended."""
    ranked_as(monkeypatch, [0.25, 0.7, 0.7])
    config = replace(
        run.run_config, n_validations=N_UPDATES, early_stop_validations=1
    )
    ended, metrics = trained(replace(run, run_config=config), tmp_path)
    assert len(metrics) == 2
    assert ended.stopped_early and ended.is_finished
    assert int(ended.state.best_update) == 1

    resumed = resume_run(config, tmp_path)
    again, metrics = trained(resumed, tmp_path)
    assert metrics == [] and again.is_finished
    patient = replace(config, early_stop_validations=2)
    assert not replace(again, run_config=patient).is_finished


def moved_run(run, **state):
    """The run with other parameters than its best ones, after nine updates."""
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.start_params),
        update=torch.tensor(9),
    )
    return replace(run, state=run.state._replace(train_state=moved, **state))


@pytest.mark.parametrize(
    ("ranks", "is_kept"),
    [
        ([0.5, 0.5, 0.5, 0.75], False),  # by chance
        ([0.5, 0.5, 0.5, 0.5], True),
        ([0.25, 0.25, 0.25, 0.25], False),
    ],
)
def test_parameters_that_gain_replace_others(ranks, is_kept, run, monkeypatch):
    before = torch.tensor([0.25, 0.25, 0.25, 0.25]).double()
    if not is_kept and max(ranks) > 0.5:
        before = torch.tensor([0.5, 0.5, 0.5, 0.5]).double()
    ranked_as(monkeypatch, [torch.tensor(ranks).double()])
    monkeypatch.setattr(
        train.held_out, "metric_of", lambda run, ranked: float(ranked.mean())
    )
    moved = moved_run(
        run, best_valid_metric=before.mean().float(), best_ranks=before
    )
    after, metric = validate(moved)
    assert metric == pytest.approx(sum(ranks) / 4)
    assert int(after.state.best_update) == (9 if is_kept else 0)
    kept = ranks if is_kept else before.tolist()
    assert after.state.best_ranks.tolist() == kept


def test_without_valid_queries_the_last_parameters_are_kept(run, tmp_path):
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    run = replace(run, task=replace(run.task, dataset=dataset))
    validated, valid_metric = validate(moved_run(run))
    after = validated.state
    assert valid_metric is None and float(after.best_valid_metric) == -1.0
    assert int(after.best_update) == 9
    one, other = after.best_params, after.train_state.params
    assert torch.equal(tree.ravel(one), tree.ravel(other))
    assert tree.leaves(one)[0].data_ptr() != tree.leaves(other)[0].data_ptr()
    trained(run, tmp_path)
    rows = logs.read(tmp_path / METRICS_FILE)
    assert {row.get("valid_metric") for row in rows} == {None}


# -- how the training step is executed


@pytest.mark.parametrize(
    ("calls", "seconds", "earlier", "selected"),
    [
        (0, math.inf, None, "auto"),
        (0, 35.9, None, "eager"),
        (10**9, math.inf, None, "eager"),
        # a run that is resumed goes on as it began
        (10**9, 1.0, {"failures": []}, "auto"),
        (0, math.inf, {"failures": [{"code": "short_run"}]}, "eager"),
    ],
)
def test_a_run_is_compiled_if_its_calls_and_its_time_repay_that(
    calls, seconds, earlier, selected, run, monkeypatch
):
    asked = []

    def select_strategy(*args, tolerance, agree):
        asked.append(args[-1])
        strategy = "eager" if args[-1] == "eager" else "one-graph"
        made = {"torch_version": "2.13", "device": "cuda:0", "failures": ()}
        record = StrategyRecord(strategy=strategy, backend="inductor", **made)
        return EAGER_PARTS, record

    monkeypatch.setattr(learner, "select_strategy", select_strategy)
    monkeypatch.setattr(learner, "COMPILE_MIN_CALLS", calls)
    run = replace(run, run_config=replace(CONFIG, strategy="auto"))
    deadline = Deadline(at=seconds, clock=lambda: 0.0)
    captured, record = train.prepare_train_step(run, earlier, None, deadline)
    assert asked == [selected]
    codes = [failure.code for failure in record.failures]
    assert ("short_run" in codes) == (selected == "eager")
    assert_trees_equal(captured.state, run.state.train_state, rtol=0, atol=0)


# -- a whole run


def test_the_run_is_what_its_folder_opens(uninterrupted, tmp_path, monkeypatch):
    updates = []
    on_update = lambda i, _: updates.append(i)
    fitted = train.train_run(
        CONFIG, tmp_path / "a", on_update=on_update, log=["csv"]
    )
    assert updates == list(range(1, N_UPDATES + 1))
    opened = open_run(tmp_path / "a")
    for other in (opened, open_run(uninterrupted)):
        assert_trees_equal(
            other.state.best_params, fitted.state.best_params, rtol=0, atol=0
        )
    lines = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines][:2] == ["update", "0"]
    # by which a resumed run decides as this one did
    assert logs.read_header(tmp_path / "a" / METRICS_FILE)["strategy"]

    # A folder in use is refused before any work, and several processes, which would write into one.
    before = {x: x.read_bytes() for x in (tmp_path / "a").iterdir()}
    with pytest.raises(ValueError, match="holds a run already"):
        train.train_run(CONFIG, tmp_path / "a")
    assert before == {x: x.read_bytes() for x in (tmp_path / "a").iterdir()}
    monkeypatch.setattr(train.distributed, "launched_size", lambda: 2)
    with pytest.raises(ValueError, match=r"^fit: expected one process, got 2"):
        train.train_run(CONFIG, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_fit_ends_with_its_time_unless_its_steps_are_set(tmp_path):
    short = replace(CONFIG, seconds=1.0, steps=None)
    fitted = train.train_run(short, tmp_path / "short")
    assert fitted.update < fitted.n_updates
    set_steps = replace(CONFIG, seconds=1.0)
    fitted = train.train_run(set_steps, tmp_path / "set")
    assert fitted.update == N_UPDATES


def test_without_time_test_is_ranked_by_rules_alone(run):
    over = RunTime(1e-9)
    _, results = rank_results(run, over)
    assert "max-confidence" in results["test"]
    assert f"{run.score}, trained" not in results["test"]
    assert results["n_test_queries"] >= 16
    text = "the time of the run (--seconds) ended training after update 0"
    assert any(note.startswith(text) for note in results["notes"])


def test_the_checkpoint_of_a_fit_opens_and_its_results_are_the_same(asking):
    """Nothing is learnt again: the weights of each stage are in the checkpoint."""
    run, results = asking
    folder = Path(run.run_config.dataset).parent / "run"
    before = {path.name for path in folder.iterdir()}
    again = train.resume(run.run_config, folder)
    assert before == {path.name for path in folder.iterdir()}
    assert again.is_finished and again.step_names == run.step_names
    _, found = rank_results(again, RunTime())
    for name in ("exists@1", "noisy-or", *held_out.policies(run)):
        assert found["test"][name] == results["test"][name], name


# -- a capacity for successors


PPO = PPOConfig(
    n_envs=16, n_steps=8, n_epochs=1, n_minibatches=2, learning_rate=1e-3
)


@cache
def trained_problem(ppo: PPOConfig = PPO):
    """Config, world, first state, and the state after three updates, when no head is zero any more."""
    task = small_task("countries_s3", hard_negative_fraction=0.0)
    cfg = prover_task.build_config(task, ppo)
    world = prover_task.training_world(task)
    first = state = train_step.init(cfg, world, random.key(1))
    for _ in range(3):
        state, _ = train_step.train_step(cfg, world, state)
    return cfg, world, first, state


@pytest.mark.parametrize(
    ("n_microbatches", "n_shards"), [(1, 1), (2, 1), (1, 2)]
)
def test_an_update_with_a_capacity_equals_the_update_without(
    n_microbatches, n_shards
):
    """1e-6: of float32 sums; params move by 1e-3 each minibatch."""
    cfg, world, first, state = trained_problem(
        replace(PPO, n_microbatches=n_microbatches, n_shards=n_shards)
    )
    limited = with_capacity(cfg, world, first)
    want, metrics = train_step.train_step(cfg, world, state)
    got, limited_metrics = train_step.train_step(limited, world, state)
    n_rows = 64 // n_microbatches // n_shards
    n_slots = n_rows * cfg.env.cfg.resolve.max_successors
    assert limited.update_agent.cfg.capacity <= n_slots / 2
    assert float(limited_metrics.loss.dropped_fraction) == 0.0
    assert_trees_equal(got, want, rtol=0, atol=1e-6)
    without = limited_metrics.loss._replace(dropped_fraction=())
    assert_trees_equal(
        limited_metrics._replace(loss=without), metrics, rtol=1e-4, atol=1e-5
    )
    assert "dropped_fraction" not in logs.to_scalars(metrics)
    assert logs.to_scalars(limited_metrics)["dropped_fraction"] == 0.0


def test_the_capacity_is_the_measured_mean_with_a_margin(monkeypatch):
    """By hand: 16 * 8 / 2 = 64 rows with 1 or 3 of 20 slots filled: mean 2, deviation 1; 1.25 * 2 * 64 + 4 * 1 * 8."""
    cfg, world, first, _ = trained_problem()
    mask = torch.zeros((128, 20), dtype=torch.bool)
    mask[:64, :1] = True
    mask[64:, :3] = True
    obs = SimpleNamespace(action_mask=None)
    profile = SimpleNamespace(batch=SimpleNamespace(obs=obs))
    monkeypatch.setattr(train.train_step, "collect", lambda *_: profile)
    # one row fits in any case
    for n_more, capacity in ((1, 192), (481, 500)):
        obs.action_mask = torch.nn.functional.pad(mask, (0, n_more))
        limited = with_capacity(cfg, world, first)
        assert limited.update_agent.cfg.capacity == capacity
    obs.action_mask = torch.ones((128, 21), dtype=torch.bool)
    assert with_capacity(cfg, world, first) is cfg


# -- a run that replaces another


class Killed(BaseException):
    """End of a process that no handler can delay."""


CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir")


def kill_at(patch, step):
    """Let no change of names happen from a step on, 1 for the first; return a list with the number of steps so far."""
    count = [0]
    for name in CHANGES:
        call = getattr(os, name)

        def change(*args, _call=call, **kwargs):
            count[0] += 1
            if step is not None and count[0] >= step:
                raise Killed
            return _call(*args, **kwargs)

        patch.setattr(os, name, change)
    return count


def test_a_run_killed_while_it_replaces_another_is_whole(run, tmp_path):
    """At any change of a name; what is read after it is one of the two, with all its files."""
    old = tmp_path / "old"
    old.mkdir()
    train._write_start(run, old, None)
    (old / RESULTS_FILE).write_text("{}")
    (old / "mine.txt").write_text("a file of the user")
    seed = replace(run.run_config, seed=5)
    new_run = replace(run, run_config=seed)
    contents = lambda folder: {
        x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()
    }
    found = []
    for step in (None, *range(1, 100)):
        out = tmp_path / f"at-{step}"
        shutil.copytree(old, out)
        with pytest.MonkeyPatch.context() as patch:
            count = kill_at(patch, step)
            with nullcontext() if step is None else suppress(Killed):
                train._write_start(new_run, out, None)
        if step is None:
            n_steps, new = count[0], contents(out)
            continue
        if step > n_steps:
            break
        found.append(read_config(out).seed)
        expected = new if found[-1] == 5 else contents(old)
        assert contents(out) == expected, step
    assert found == sorted(found, key=lambda seed: seed == 5)
    assert 0 < found.count(5) < n_steps
    assert new["mine.txt"] and RESULTS_FILE not in new
