"""Training runs: resumed bit for bit, validated at the right updates, stopped where numbers are not finite."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo import (
    checkpoint,
    compiled_step,
    logs,
    minibatch,
    shards,
    train_step,
)
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import METRICS_FILE, write_config
from funcppo.kg.graph import loaders
from funcppo.kg.run import run_start, training, validation
from funcppo.kg.run.config import CHECKPOINT_FILE, RunConfig
from funcppo.kg.run.run import learner_config, saved_update
from funcppo.kg.run.training import with_capacity
from funcppo.kg.search import network as net
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.runtime import compile as compilation
from funcppo.runtime.compile import StrategyRecord
from funcppo.runtime.distributed import alone
from funcppo.runtime.monitor import Monitor
from funcppo.runtime.reasons import ReasonCode
from funcppo.train_step import EAGER_PARTS
from tests.kg.run.runs import CONFIG, N_UPDATES, trained
from tests.learning import assert_trees_equal, compiled


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was trained to its end."""
    folder = tmp_path_factory.mktemp("run")
    run = run_start.prepare_run(CONFIG, folder, resume=False)
    write_config(run.run_config, folder)
    trained(run, folder)
    return folder


def assert_equal_runs(folder, uninterrupted):
    """The same checkpoint, and the same metrics but for times."""
    whole = checkpoint.read(uninterrupted / CHECKPOINT_FILE)[0]
    arrays = checkpoint.read(folder / CHECKPOINT_FILE)[0]
    assert set(arrays) == set(whole)
    for name in whole:
        assert np.array_equal(arrays[name], whole[name]), name
    rows = logs.read(folder / METRICS_FILE)
    whole_rows = logs.read(uninterrupted / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
    for name in ("loss", "valid_metric", "best_valid_metric"):
        assert [row.get(name) for row in rows] == [
            row.get(name) for row in whole_rows
        ]


@pytest.mark.parametrize("last_update", [1, 2, 3])
def test_a_run_stopped_anywhere_resumes_bit_for_bit(
    last_update, uninterrupted, run, tmp_path
):
    trained(run, tmp_path, stop_at=last_update)
    resumed = run_start.prepare_run(run.run_config, tmp_path, resume=True)
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
    captured, _ = training.prepare_train_step(run)
    updates = training.train(
        run,
        folder,
        captured,
        lambda: False,
        Monitor(),
        checkpoint_seconds=60.0,
    )
    saved = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            training.time,
            "monotonic",
            lambda: times[int(captured.state.update)],
        )
        # The clock on the wall goes backwards, which nothing may read.
        monkeypatch.setattr(training.time, "time", lambda: -1e9)
        for _ in range(n_updates):
            next(updates)
            saved.append(saved_update(folder))
    updates.close()
    return saved


def test_an_update_is_saved_a_while_after_the_last_checkpoint(run, tmp_path):
    """Of four updates, 2 and 4 end with a validation, which saves them and begins the time anew."""
    times = [0, 59, 61, 122, 122]
    assert train_at(times, run, tmp_path, N_UPDATES) == [0, 2, 3, 4]


def test_a_checkpoint_by_time_does_not_change_the_result(
    uninterrupted, run, tmp_path
):
    """The run is left at update 3 as a killed process leaves it, resumed, and left with update 1 alone likewise."""
    assert train_at([0, 60], run, tmp_path, 1) == [1]
    resumed = run_start.prepare_run(run.run_config, tmp_path, resume=True)
    assert train_at([0, 0, 0, 60], resumed, tmp_path, 2) == [2, 3]
    resumed = run_start.prepare_run(run.run_config, tmp_path, resume=True)
    trained(resumed, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


def test_every_validation_has_its_metric_and_the_best_so_far_in_the_log(
    run, monkeypatch, tmp_path
):
    quality = iter([0.25, 0.5, 0.125])
    monkeypatch.setattr(validation, "_gains_beyond_chance", lambda *_: True)
    monkeypatch.setattr(
        validation,
        "evaluate_policy",
        lambda *_, **__: {"auc_pr": next(quality)},
    )
    trained(run, tmp_path)
    rows = logs.read(tmp_path / METRICS_FILE)
    assert [
        (row["valid_metric"], row["best_valid_metric"], row["best_update"])
        for row in rows
        if "valid_metric" in row
    ] == [(0.25, 0.25, 0), (0.5, 0.5, 2), (0.125, 0.5, 2)]


def test_a_run_ends_early_where_validations_get_no_better(
    run, monkeypatch, tmp_path
):
    """An equal metric is no better; a resumed run sees that it has ended."""
    quality = iter([0.25, 0.5, 0.5])
    monkeypatch.setattr(validation, "_gains_beyond_chance", lambda *_: True)
    monkeypatch.setattr(
        validation,
        "evaluate_policy",
        lambda *_, **__: {"auc_pr": next(quality)},
    )
    config = replace(
        run.run_config, n_validations=N_UPDATES, early_stop_validations=1
    )
    ended, metrics = trained(replace(run, run_config=config), tmp_path)
    assert len(metrics) == 2
    assert training.stopped_early(ended) and training.is_finished(ended)
    assert int(ended.state.best_update) == 1

    resumed = run_start.prepare_run(config, tmp_path, resume=True)
    again, metrics = trained(resumed, tmp_path)
    assert metrics == [] and training.is_finished(again)
    patient = replace(config, early_stop_validations=2)
    assert not training.is_finished(replace(again, run_config=patient))


def test_without_valid_queries_the_log_has_no_metric_of_valid(run, tmp_path):
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    task = replace(run.task, dataset=dataset)
    trained(replace(run, task=task), tmp_path)
    rows = logs.read(tmp_path / METRICS_FILE)
    assert {row.get("valid_metric") for row in rows} == {None}


def test_a_run_stopped_in_a_validation_is_yielded_as_it_is_saved(run, tmp_path):
    """With what the validations before have chosen, and the update that waits for its own."""
    after, metrics = trained(run, tmp_path, stop_at=2)
    assert len(metrics) == int(after.state.train_state.update) == 2
    assert saved_update(tmp_path) == after.pending_row["update"] == 2
    rows = logs.read(tmp_path / METRICS_FILE)
    assert float(after.state.best_valid_metric) == rows[0]["best_valid_metric"]


def test_a_run_stopped_in_its_last_validation_is_yielded_when_resumed(
    run, tmp_path
):
    after, _ = trained(run, tmp_path, stop_at=N_UPDATES)
    assert after.pending_row is not None
    resumed = run_start.prepare_run(run.run_config, tmp_path, resume=True)
    captured, _ = training.prepare_train_step(resumed)
    updates = training.train(
        resumed, tmp_path, captured, lambda: False, Monitor()
    )
    ((ended, numbers),) = updates
    assert ended.pending_row is None and numbers["update"] == N_UPDATES
    last = logs.read(tmp_path / METRICS_FILE)[-1]
    assert float(ended.state.best_valid_metric) == last["best_valid_metric"]


def test_the_best_parameters_are_kept_while_training_continues(
    run, monkeypatch, tmp_path
):
    """Valid quality 0.1 before training, 0.5 after update 2, 0.2 after update 4."""
    quality = iter([0.1, 0.5, 0.2])
    monkeypatch.setattr(
        validation,
        "evaluate_policy",
        lambda *_, **__: {"auc_pr": next(quality)},
    )
    monkeypatch.setattr(validation, "_gains_beyond_chance", lambda *_: True)
    captured, _ = training.prepare_train_step(run)
    params = [tree.ravel(run.state.train_state.params)]
    for after, _ in training.train(
        run, tmp_path, captured, lambda: False, Monitor()
    ):
        run = after
        params.append(tree.ravel(run.state.train_state.params))
    assert (
        int(run.state.best_update) == 2
        and float(run.state.best_valid_metric) == 0.5
    )
    assert torch.equal(
        tree.ravel(run.state.best_params), params[2]
    ) and not torch.equal(params[2], params[4])


def test_a_run_with_infinite_rewards_stops_and_keeps_its_last_good_checkpoint(
    monkeypatch, tmp_path
):
    """Targets are infinite from update 2 on; two bad updates in a row are allowed."""
    n_calls = 0

    def poisoned(*args):
        nonlocal n_calls
        n_calls += 1
        batch, metrics = EAGER_PARTS.build_batch(*args)
        factor = 1.0 if n_calls < 2 else float("inf")
        return batch._replace(value_target=batch.value_target * factor), metrics

    config = replace(CONFIG, max_nonfinite_updates=2, n_validations=4)
    run = run_start.prepare_run(config, tmp_path, resume=False)
    monkeypatch.setattr(
        training, "EAGER_PARTS", replace(EAGER_PARTS, build_batch=poisoned)
    )
    message = r"not finite in each of the 2 updates up to 3; .*checkpoint\.npz holds update 1"
    with pytest.raises(training.DivergenceError, match=message):
        trained(run, tmp_path)
    arrays = checkpoint.read(tmp_path / CHECKPOINT_FILE)[0]
    assert int(arrays["train_state.update"]) == 1
    assert all(
        np.isfinite(array).all()
        for array in arrays.values()
        if array.dtype.kind == "f"
    )
    rows = logs.read(tmp_path / METRICS_FILE)
    assert rows.pop(0)["update"] == 0
    assert [row["n_nonfinite_minibatches"] for row in rows] == [0, 2, 2]
    assert [row["n_applied_minibatches"] for row in rows] == [2, 0, 0]


@pytest.mark.parametrize(
    ("steps", "strategy", "selected"),
    [
        (5_100_000, "auto", "eager"),
        (5_120_000, "auto", "auto"),
        (51_200_000, "forward", "forward"),
        (1, "one-graph", "one-graph"),
    ],
)
def test_a_run_is_compiled_if_it_is_long_or_a_strategy_is_set(
    steps, strategy, selected, run, monkeypatch
):
    """By hand: an update has 8 rollout steps and 2 * 4 minibatches, and 5,120,000 / (256 * 8) updates make 40,000."""
    asked = []

    def select_strategy(*args, tolerance, agree):
        asked.append(args[-1])
        raise LookupError

    monkeypatch.setattr(compilation, "select_strategy", select_strategy)
    run_config = replace(
        CONFIG, steps=steps, strategy=strategy, ppo=RunConfig(dataset="").ppo
    )
    cfg = learner_config(run_config, run.task)
    with pytest.raises(LookupError):
        training.prepare_train_step(
            replace(run, run_config=run_config, cfg=cfg)
        )
    assert asked == [selected]


@pytest.mark.parametrize(
    ("device_type", "seconds", "n_updates", "repays", "numbers"),
    [
        ("cuda", 35.9, 2_500, False, "35.9 s of updates, repaid from 36 s on"),
        ("cuda", 36.0, 1, True, "36 s of updates, repaid from 36 s on"),
        ("cuda", None, 2_499, False, "39,984 rollout steps and minibatches"),
        ("cuda", None, 2_500, True, "minibatches, repaid from 40,000 on"),
        ("cpu", 1e6, 2_499, False, "39,984 rollout steps and minibatches"),
        ("cpu", 1.0, 2_500, True, "minibatches, repaid from 40,000 on"),
    ],
)
def test_a_gpu_decides_by_seconds_and_a_cpu_by_steps(
    device_type, seconds, n_updates, repays, numbers
):
    """By hand: an update has 8 rollout steps and 2 * 4 minibatches."""
    ppo = replace(RunConfig(dataset="").ppo, n_updates=n_updates)
    decision = compiled_step.decide_to_compile(ppo, device_type, seconds)
    assert decision[0] == repays and numbers in decision[1]


@pytest.fixture
def auto_run(run, monkeypatch):
    """A run of strategy auto, by the rules of a GPU; strategies that are selected, and updates that are timed.

    Nothing is compiled. An update takes `seconds`, and none may be timed where that is None.
    """
    auto = SimpleNamespace(asked=[], n_timed=0, seconds=None, bodies=[])
    auto.run = replace(run, run_config=replace(CONFIG, strategy="auto"))

    def select_strategy(*args, tolerance, agree):
        auto.asked.append(args[-1])
        record = StrategyRecord(
            strategy="eager" if args[-1] == "eager" else "one-graph",
            failures=(),
            torch_version="2.13",
            device="cuda:0",
            backend="inductor",
        )
        return EAGER_PARTS, record

    def time_call(fn, *args):
        fn(*args)
        auto.n_timed += 1
        return 1.0 * auto.seconds

    capture_loop_bodies = compiled_step.capture_loop_bodies

    def capture_bodies(*args, agree):
        auto.bodies.append(capture_loop_bodies(*args, agree=agree))
        return auto.bodies[-1]

    monkeypatch.setattr(compiled_step, "capture_loop_bodies", capture_bodies)
    monkeypatch.setattr(compilation, "select_strategy", select_strategy)
    monkeypatch.setattr(compiled_step, "_time_call", time_call)
    monkeypatch.setattr(compiled_step, "COMPILE_MIN_SECONDS", {"cpu": 36.0})
    return auto


def until(seconds):
    """A deadline that stays so far away."""
    return Deadline(at=seconds, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("update_seconds", "deadline", "selected", "total"),
    [
        (8.9, NO_DEADLINE, "eager", 35.6),
        (9.1, NO_DEADLINE, "auto", 36.4),
        (9.1, until(36.2), "auto", 36.2),
        (8.9, until(36.2), "eager", 35.6),
        # none is measured in time that could not repay
        (None, until(35.9), "eager", 35.9),
    ],
)
def test_a_run_on_a_gpu_is_compiled_if_its_updates_take_long_enough(
    update_seconds, deadline, selected, total, auto_run
):
    """By hand: four updates of 9 s are the 36 s from which compiling repays. Measuring leaves the state as it is."""
    auto_run.seconds = update_seconds
    captured, record = training.prepare_train_step(
        auto_run.run, deadline=deadline
    )
    assert auto_run.asked == [selected]
    assert auto_run.n_timed == (update_seconds is not None)
    assert record.uncompiled_seconds == pytest.approx(total)
    assert record.skip_code == (
        ReasonCode.SHORT_RUN if selected == "eager" else None
    )
    line = compiled_step.describe_strategy(record)
    assert f"{total:g} s" in line and ("repaid" in line) == bool(
        record.skip_code
    )
    state = auto_run.run.state.train_state
    assert len(auto_run.bodies) == auto_run.n_timed
    for step in (captured, *auto_run.bodies):
        for x, y in zip(tree.leaves(step.state), tree.leaves(state)):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("strategy", "device", "earlier", "update"),
    [
        ("forward", "cuda", None, 0),
        ("auto", "cpu", None, 0),
        ("auto", "cuda", {"strategy": "eager"}, 0),
        ("auto", "cuda", None, 1),
    ],
)
def test_no_update_is_measured_where_auto_does_not_decide_by_it(
    strategy, device, earlier, update, auto_run, monkeypatch
):
    """A strategy is set, a CPU decides by the number of steps, or a run that has measured none is resumed."""
    if device == "cpu":
        monkeypatch.setattr(
            compiled_step, "COMPILE_MIN_SECONDS", {"cuda": 36.0}
        )
    state = auto_run.run.state
    train_state = state.train_state._replace(update=torch.tensor(update))
    run = replace(
        auto_run.run,
        run_config=replace(CONFIG, strategy=strategy),
        state=state._replace(train_state=train_state),
    )
    _, record = training.prepare_train_step(run, earlier, deadline=NO_DEADLINE)
    assert auto_run.asked == ["eager" if strategy == "auto" else strategy]
    assert record.uncompiled_seconds is None
    numbers = "24 rollout steps and minibatches, repaid from 40,000 on"
    assert (numbers in record.skip_reason) == (strategy == "auto")


@pytest.mark.parametrize(
    ("seconds", "selected"), [(35.9, "eager"), (36.1, "auto")]
)
def test_a_resumed_run_decides_by_what_its_first_start_measured(
    seconds, selected, auto_run
):
    """One that compiles nothing in between, as by --debug, passes it on."""
    eager = replace(auto_run.run, run_config=CONFIG)
    earlier = {"strategy": "one-graph", "uncompiled_seconds": seconds}
    for run in (eager, auto_run.run):
        _, record = training.prepare_train_step(
            run, earlier, deadline=until(1.0)
        )
        earlier = asdict(record)
        assert record.uncompiled_seconds == seconds
    assert auto_run.asked == ["eager", selected]


@pytest.mark.parametrize("own_seconds", [1.0, 100.0])
@pytest.mark.parametrize(
    ("measures", "repays"), [(True, True), (True, False), (False, True)]
)
def test_rank_0_decides_for_processes_that_learn_together(
    measures, repays, own_seconds, auto_run
):
    """Whatever another process measures, it makes as many updates and decides alike."""
    decisions = iter([measures, repays])
    peers = SimpleNamespace(
        check_agent=lambda cfg: None,
        share=lambda cfg: cfg,
        take=lambda state: state,
        prepare=lambda prepare: prepare(agree=alone),
        decide=lambda decision: next(decisions),
    )
    auto_run.seconds = own_seconds
    training.prepare_train_step(auto_run.run, peers=peers)
    assert auto_run.asked == ["auto" if repays else "eager"]
    assert auto_run.n_timed == measures and next(decisions, None) is None


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "replayed by: none"),
        ({"rollout": "kernel"}, "replayed by: none; the rollout is one kernel"),
        (
            {"rollout_reason": "several learners at once"},
            "; the rollout is no kernel: several learners at once",
        ),
        (
            {"network": "kernels"},
            "replayed by: none; kernels compute the network of the update",
        ),
        (
            {"network_reason": "a shared trunk"},
            "; no kernels compute the network of the update: a shared trunk",
        ),
    ],
)
def test_the_line_of_a_strategy_says_what_kernels_compute(fields, end):
    record = StrategyRecord(
        strategy="one-graph",
        failures=(),
        torch_version="2.13",
        device="cuda:0",
        backend="inductor",
        **fields,
    )
    assert compiled_step.describe_strategy(record).endswith(end)


def test_the_initial_parameters_are_those_of_a_fresh_run(run, uninterrupted):
    params = tree.ravel(run_start.open_run(uninterrupted).state.start_params)
    assert torch.equal(params, tree.ravel(run.state.best_params))
    assert not torch.equal(
        params,
        tree.ravel(run_start.open_run(uninterrupted).state.train_state.params),
    )


def test_a_short_run_without_a_compiler_says_what_turns_it_off(
    run, monkeypatch
):
    monkeypatch.setattr(
        compilation,
        "reason_against_compiling",
        lambda: "TORCH_COMPILE_DISABLE=1",
    )
    short = replace(run, run_config=replace(CONFIG, strategy="auto"))
    _, record = training.prepare_train_step(short)
    assert record.skip_code == ReasonCode.DISABLED
    assert "TORCH_COMPILE_DISABLE=1 turns" in record.skip_reason


# -- a whole run


def test_the_run_is_the_one_that_its_folder_opens(run, tmp_path):
    updates = []
    fitted = training.fit(
        CONFIG, tmp_path / "a", on_update=lambda i, _: updates.append(i)
    )
    assert updates == list(range(1, N_UPDATES + 1))
    opened = run_start.open_run(tmp_path / "a")
    expected, _ = trained(run, tmp_path)
    for other in (opened, expected):
        for x, y in zip(
            tree.leaves(fitted.state.best_params),
            tree.leaves(other.state.best_params),
        ):
            assert torch.equal(x, y)
    assert (tmp_path / "a" / METRICS_FILE).read_text().count("\n") > N_UPDATES


def test_a_folder_in_use_is_refused_before_any_work(tmp_path):
    training.fit(dataclasses.replace(CONFIG, steps=16), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds a run already"):
        training.fit(CONFIG, tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_several_processes_are_refused_which_would_write_into_one_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(training.distributed, "launched_size", lambda: 2)
    with pytest.raises(ValueError, match=r"^fit: expected one process, got 2"):
        training.fit(CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_logged_where_they_are_asked_for(tmp_path):
    config = dataclasses.replace(CONFIG, steps=16)
    training.fit(config, tmp_path, log=["csv"])
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["update", "0", "1"]


# -- a capacity for successors


PPO = PPOConfig(
    n_envs=16, n_steps=8, n_epochs=1, n_minibatches=2, learning_rate=1e-3
)
SETTINGS = ProverTaskConfig(
    max_height=2, max_depth=5, embed_dim=4, hidden_dim=8
)


@cache
def trained_problem(ppo: PPOConfig = PPO, **settings):
    """Config, world, first state, and the state after three updates, when no head is zero any more."""
    task = prover_task.build_task(
        loaders.load("countries_s3"), replace(SETTINGS, **settings)
    )
    cfg, world = (
        prover_task.build_config(task, ppo),
        prover_task.training_world(task),
    )
    first = state = train_step.init(cfg, world, random.key(1))
    for _ in range(3):
        state, _ = train_step.train_step(cfg, world, state)
    return cfg, world, first, state


def limited_to(cfg, capacity: int):
    return replace(
        cfg, update_agent=net.agent(replace(cfg.agent.cfg, capacity=capacity))
    )


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
    assert (
        limited.update_agent.cfg.capacity
        <= 64
        // n_microbatches
        // n_shards
        * cfg.env.cfg.resolve.max_successors
        / 2
    )
    assert float(limited_metrics.loss.dropped_fraction) == 0.0
    assert_trees_equal(got, want, rtol=0, atol=1e-6)
    assert_trees_equal(
        limited_metrics._replace(
            loss=limited_metrics.loss._replace(dropped_fraction=())
        ),
        metrics,
        rtol=1e-4,
        atol=1e-5,
    )
    assert (
        "dropped_fraction" not in logs.to_scalars(metrics)
        and logs.to_scalars(limited_metrics)["dropped_fraction"] == 0.0
    )


def test_a_minibatch_with_a_capacity_compiles_fullgraph_and_equals_eager():
    """1e-6: params move by 1e-3."""
    cfg, world, first, state = trained_problem()
    cfg = with_capacity(cfg, world, first)
    got = train_step.collect(cfg, world, state)
    args = (
        cfg,
        world,
        state.params,
        got.batch,
        got.scalars,
        got.update_state,
        tree.map(lambda x: x[0], got.minibatches),
    )
    learner, metrics = compiled(shards.minibatch_step, backend="aot_eager")(
        *args
    )
    want, expected = shards.minibatch_step(*args)
    assert_trees_equal(
        (learner, metrics), (want, expected), rtol=1e-4, atol=1e-6
    )


def test_the_loss_is_over_the_rows_within_capacity_and_the_others_are_counted():
    """Capacity for half of the successors; the gradient is that of a batch of these rows alone. 1e-6: float32 sums."""
    cfg, world, _, state = trained_problem(replace(PPO, advantage_ddof=None))
    got = train_step.collect(cfg, world, state)
    mask, rows = got.batch.obs.action_mask, got.minibatches.rows[0]
    small = limited_to(cfg, int(mask[rows, :-1].sum()) // 2)
    within_capacity = ~net.exceeds_capacity(small.update_agent.cfg, mask[rows])
    assert 0.2 < within_capacity.double().mean() < 0.8
    gradient = partial(
        minibatch.accumulate_gradients,
        world=world,
        params=state.params,
        batch=got.batch,
        scalars=got.scalars,
    )
    grads, metrics = gradient(small, rows=rows)
    want, expected = gradient(cfg, rows=rows[within_capacity])
    assert float(metrics.dropped_fraction) == pytest.approx(
        1.0 - float(within_capacity.double().mean())
    )
    assert_trees_equal(grads, want, rtol=1e-4, atol=1e-6)
    assert_trees_equal(
        metrics._replace(dropped_fraction=()), expected, rtol=1e-4, atol=1e-6
    )


def test_a_minibatch_without_any_row_within_capacity_has_gradient_zero():
    cfg, world, _, state = trained_problem()
    got = train_step.collect(cfg, world, state)
    obs = got.batch.obs._replace(
        action_mask=torch.ones_like(got.batch.obs.action_mask)
    )
    grads, metrics = minibatch.accumulate_gradients(
        limited_to(cfg, 3),
        world,
        state.params,
        got.batch._replace(obs=obs),
        got.minibatches.rows[0],
        got.scalars,
    )
    assert (
        float(metrics.dropped_fraction) == 1.0
        and float(tree.global_norm(grads)) == 0.0
    )


def test_no_capacity_is_set_if_successors_have_no_goals_or_fill_most_slots():
    for settings in ({"max_height": 1}, {"max_successors": 4}):
        task = prover_task.build_task(
            loaders.load("countries_s1"), replace(SETTINGS, **settings)
        )
        cfg, world = (
            prover_task.build_config(task, PPO),
            prover_task.training_world(task),
        )
        assert cfg.env.cfg.fact_selection == (
            "oracle" if "max_height" in settings else "policy"
        )
        assert (
            with_capacity(
                cfg, world, train_step.init(cfg, world, random.key(1))
            )
            is cfg
        )


def test_the_capacity_is_the_measured_mean_with_a_margin(monkeypatch):
    """By hand: 16 * 8 / 2 = 64 rows with 1 or 3 of 20 slots filled: mean 2, deviation 1; 1.25 * 2 * 64 + 4 * 1 * 8."""
    cfg, world, first, _ = trained_problem()
    mask = torch.zeros((128, 20), dtype=torch.bool)
    mask[:64, :1] = True
    mask[64:, :3] = True
    monkeypatch.setattr(training, "_profile_successors", lambda *_: mask)
    assert with_capacity(cfg, world, first).update_agent.cfg.capacity == 192
    wide = torch.zeros((128, 500), dtype=torch.bool)
    monkeypatch.setattr(training, "_profile_successors", lambda *_: wide)
    # one row fits in any case
    assert with_capacity(cfg, world, first).update_agent.cfg.capacity == 500
    monkeypatch.setattr(
        training, "_profile_successors", lambda *_: torch.ones_like(mask)
    )
    assert with_capacity(cfg, world, first) is cfg
