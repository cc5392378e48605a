"""Trials of strategies are made once for the same code, settings and machine, and again where something failed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from funcppo.config import Schedule
from funcppo.core import random
from funcppo.runtime import compile as compilation
from funcppo.runtime import compile_cache, strategy_cache
from funcppo.runtime.agreement import alone
from funcppo.runtime.compile import StrategyRecord, select_strategy
from funcppo.runtime.env_kernel import rollout_kernel
from funcppo.runtime.reasons import FailureCode
from funcppo.runtime.strategy_cache import Built, Outcome, load, save
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import WORLD, assert_trees_equal, cartpole_config

# that of `test_compile.py`, whose graphs Inductor finds
CFG = cartpole_config(
    max_steps=5, n_envs=4, n_steps=8, n_updates=10, n_epochs=2, n_minibatches=2
)
outcome_path = strategy_cache.outcome_path  # tests do without, see conftest
RECORD = StrategyRecord(
    strategy="two-graphs",
    failures=(),
    torch_version=torch.__version__,
    device="cpu",
    backend="inductor",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Outcomes are kept in it, and code where other tests keep theirs."""

    def path(*args):
        found = outcome_path(*args)
        return found and tmp_path / found.name

    monkeypatch.setattr(strategy_cache, "outcome_path", path)
    return tmp_path


def select(strategy="one-graph", cfg=CFG, **options):
    """A strategy of Inductor."""
    state = init(cfg, WORLD, random.key(0))
    return select_strategy(
        collect, EAGER_PARTS, cfg, WORLD, state, strategy, **options
    )


def test_a_second_selection_tries_nothing(folder, monkeypatch):
    with torch.no_grad():
        parts, first = select()
        assert len(list(folder.iterdir())) == 1
        # what a trial begins with
        monkeypatch.setattr(compilation, "_record_calls", None)
        again, second = select()
        state = init(CFG, WORLD, random.key(0))
        results = [
            train_step(CFG, WORLD, state, each) for each in (parts, again)
        ]
    assert second == replace(first, tried_earlier=True)
    assert not first.tried_earlier
    assert again.minibatch_step is not parts.minibatch_step
    assert_trees_equal(*results, rtol=0, atol=0)


def test_another_learning_rate_and_length_find_all_code(folder, monkeypatch):
    """Scalars and their schedules are no part of compiled code; the results are those of the other numbers."""
    ppo = replace(
        CFG.ppo,
        learning_rate=1e-3,
        n_updates=20,
        gamma=0.5,
        entropy_coef_schedule=Schedule(kind="linear"),
    )
    other = replace(CFG, ppo=ppo)
    with torch.no_grad():
        select()
        monkeypatch.setattr(compilation, "_record_calls", None)
        monkeypatch.setattr(compile_cache, "compile_events", [])
        parts, record = select(cfg=other)
        state = init(other, WORLD, random.key(0))
        results = [
            train_step(other, WORLD, state, each)
            for each in (parts, EAGER_PARTS)
        ]
    assert record.tried_earlier
    events = compile_cache.compile_events
    assert len(events) == 4 and all(event.cache_hit for event in events)
    assert_trees_equal(*results, rtol=1e-4, atol=1e-5)
    assert results[0][1].learning_rate.item() == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "two-graphs"},
        {"tolerance": 1e-3},
        {"rollout_parts": ("build_batch",)},
        {"cfg": cartpole_config(max_steps=6, n_envs=4, n_steps=8)},
        {"agree": lambda what, failure="": failure},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_and_several_processes_try_anew(
    folder, monkeypatch, change
):
    """Whatever is found for one is no answer for another."""
    tried = []

    def try_all(self, *args):
        tried.append(args)
        return EAGER_PARTS, {"strategy": "two-graphs"}

    monkeypatch.setattr(compilation._StrategySelector, "try_all", try_all)
    select()
    select()
    assert len(tried) == 1
    select(**change)
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, True),
        ({"rollout_code": FailureCode.UNSUPPORTED}, True),
        ({"rollout_code": FailureCode.OUT_OF_MEMORY}, False),
        ({"network_code": FailureCode.COMPILER_ERROR}, False),
        ({"failures": ("a failure",)}, False),
    ],
)
def test_what_failed_is_tried_again(tmp_path, fields, is_kept):
    selector = compilation._StrategySelector(
        backend="inductor", tolerance=0.0, raise_on_failure=False, agree=alone
    )
    path = tmp_path / "outcome"
    selector.keep(path, EAGER_PARTS, replace(RECORD, **fields))
    selector.keep(None, EAGER_PARTS, RECORD)
    assert path.exists() == is_kept


def test_a_rollout_that_is_a_kernel_is_one_again(tmp_path, monkeypatch):
    """With what kernels compute, and without the passes, as it was found."""
    code = rollout_kernel.RolloutCode(
        source="def rollout_kernel(): pass",
        batch_shape=(4,),
        block=rollout_kernel.Block(n_rows=1, n_warps=1),
        rounded=frozenset(),
        has_checks=False,
        next_state=torch.zeros(8, 2),
        transition=torch.zeros(8),
    )
    built = {
        "build_batch": Built(by_kernels=True, use_custom_passes=False),
        "two-graphs": Built(by_kernels=False, use_custom_passes=True),
    }
    path = tmp_path / "outcome"
    save(path, Outcome(replace(RECORD, rollout="kernel"), built, code))
    compiled = []

    def compile_function(fn, backend, use_custom_passes):
        compiled.append((fn, backend, use_custom_passes))
        return partial(fn)

    monkeypatch.setattr(compilation, "compile_function", compile_function)
    kernel_parts = replace(
        EAGER_PARTS, build_batch=EAGER_PARTS.kernel_build_batch
    )
    selector = compilation._StrategySelector(
        backend="inductor",
        tolerance=0.0,
        raise_on_failure=False,
        kernels=compilation._NetworkKernels(kernel_parts),
    )
    parts, record = selector.rebuild(EAGER_PARTS, load(path))
    assert isinstance(parts.unroll, rollout_kernel.RolloutKernel)
    assert parts.unroll.code.source == code.source
    assert parts.unroll._values is EAGER_PARTS.kernel_values
    assert parts.rollout_step is EAGER_PARTS.rollout_step
    assert record == replace(RECORD, rollout="kernel", tried_earlier=True)
    pieces = EAGER_PARTS.minibatch_parts
    assert compiled == [
        (EAGER_PARTS.kernel_build_batch, "inductor", False),
        (pieces.loss_gradient, "inductor", True),
        (pieces.apply_gradients, "inductor", True),
    ]


def test_what_cannot_be_told_to_a_later_process_has_no_file():
    state = init(CFG, WORLD, random.key(0))
    args = (EAGER_PARTS, CFG, WORLD, state)
    assert outcome_path(collect, args, ("auto",)).suffix == ".strategy"
    local = replace(EAGER_PARTS, build_batch=lambda *_: None)
    assert outcome_path(collect, (local, *args[1:]), ("auto",)) is None


def test_a_broken_file_is_reported_and_no_outcome(tmp_path):
    path = tmp_path / "outcome"
    assert load(None) is load(path) is None
    path.write_bytes(b"no pickle")
    with pytest.warns(UserWarning, match="tried again"):
        assert load(path) is None


def test_where_nothing_can_be_written_a_warning_says_so(tmp_path):
    (tmp_path / "folder").write_text("in the way")
    with pytest.warns(UserWarning, match="not kept"):
        save(tmp_path / "folder" / "outcome", Outcome(RECORD, {}, None))
