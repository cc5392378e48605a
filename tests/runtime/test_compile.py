"""The fastest strategy that works and is right is selected, and the record says why faster ones are not."""

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.nets import networks
from funcppo.runtime import compile as compilation
from funcppo.runtime.capture import ReasonCode, capture
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import SMALL, WORLD, assert_trees_equal, cartpole_config

# One small layer: each test traces or compiles it again.
NETWORK = networks.MLPConfig(n_obs=4, n_actions=2, hidden=(8,))
CFG = replace(
    cartpole_config(max_steps=5, **SMALL), agent=networks.mlp_agent(NETWORK)
)
BREAKABLE = {"one-graph": "minibatch_step", "forward": "minibatch_loss"}


@cache
def state():
    return init(CFG, WORLD, random.key(0))


def select(
    parts=EAGER_PARTS, strategy="auto", backend="eager", cfg=CFG, **options
):
    """A strategy; the parts are traced, and compiled by a backend that is named."""
    return compilation.select_strategy(
        collect, parts, cfg, WORLD, state(), strategy, backend, **options
    )


def assert_learns_the_same(parts, rtol=0.0, cfg=CFG, as_cfg=CFG):
    """Params after a step by these parts, beside those of an eager step."""
    got, _ = train_step(cfg, WORLD, state(), parts)
    want, _ = train_step(as_cfg, WORLD, state())
    assert_trees_equal(got.params, want.params, rtol=rtol, atol=1e-5)


def broken(name: str, why: str = "broken on purpose") -> Any:
    """A part that works eagerly and breaks the graph when it is compiled."""

    def part(*args, **kwargs):
        torch._dynamo.graph_break(msg=why)
        return getattr(EAGER_PARTS, name)(*args, **kwargs)

    return part


def wrong(*args, **kwargs):
    """A minibatch step that is fast and wrong: compiled, it forgets half of what it learnt."""
    after, shown = EAGER_PARTS.minibatch_step(*args, **kwargs)
    if torch.compiler.is_compiling():
        learner = args[-2]
        mean = 0.5 * (after.flat_params + learner.flat_params)
        after = after._replace(flat_params=mean, opt_state=learner.opt_state)
    return as_new((after, shown))


def as_new(values):
    """The same tensors in new tuples: Dynamo of 2.11 cannot return those that `_replace` makes."""
    return tree.map(lambda x: x, values)


def test_inductor_selects_one_graph():
    """Of a minibatch step alone: long tests compile the other parts, one by one."""
    with torch.no_grad():
        parts, record = compilation.select_strategy(
            collect, EAGER_PARTS, CFG, WORLD, state(), rollout_parts=()
        )
        got = train_step(CFG, WORLD, state(), parts)
        want = train_step(CFG, WORLD, state())
    found = record.strategy, record.failures, record.backend, record.device
    assert found == ("one-graph", (), "inductor", "cpu")
    assert_trees_equal(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "backend"), [("one-graph", "eager"), ("forward", "aot_eager")]
)
def test_microbatches_update_as_their_minibatch_does(strategy, backend):
    cfg = replace(CFG, ppo=replace(CFG.ppo, n_microbatches=2))
    parts, record = select(strategy=strategy, backend=backend, cfg=cfg)
    assert record.failures == ()
    assert record.strategy == strategy
    got = train_step(cfg, WORLD, state(), parts)
    want = train_step(CFG, WORLD, state())
    assert_trees_equal(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_broken", [1, 2])
def test_each_strategy_that_fails_is_passed_over_and_recorded(n_broken):
    """Trials leave the state as it was."""
    failing = compilation.STRATEGIES[:n_broken]
    broken_parts = (broken(BREAKABLE[r], f"no {r}") for r in failing)
    named = dict(zip([BREAKABLE[r] for r in failing], broken_parts))
    before = [(x.clone(), x._version) for x in tree.leaves(state())]
    parts, record = select(replace(EAGER_PARTS, **named))
    for x, (values, version) in zip(tree.leaves(state()), before):
        assert torch.equal(x, values) and x._version == version
    assert record.strategy == compilation.STRATEGIES[n_broken]
    assert tuple(f.name for f in record.failures) == failing
    for failure in record.failures:
        assert failure.error_type == "Unsupported"
        assert failure.message and "\n" not in failure.message
    assert_learns_the_same(parts)


def test_a_logger_or_a_terminal_shows_each_part(caplog, capsys, monkeypatch):
    """Nothing else does: programs show their own progress."""
    parts = replace(EAGER_PARTS, minibatch_step=broken("minibatch_step"))
    with caplog.at_level("INFO", "funcppo.compile"):
        select(parts)
    first, *lines = caplog.messages
    assert first.startswith("compiling a training step")
    assert all(line.endswith(" s") for line in lines)
    shown = [line.partition(":")[0] for line in lines]
    assert shown[-2:] == ["no one-graph", "forward is compiled"]
    with monkeypatch.context() as patch:
        patch.setattr(compilation.logger, "propagate", False)  # to pytest's
        for is_terminal in (False, True):
            patch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
            with compilation.show_progress():
                select(strategy="forward")
            select(strategy="forward")
            told = capsys.readouterr().err
            assert told.count("forward is compiled") == is_terminal


def scaled_if_compiled(name, by, path):
    """A part whose compiled form gives one leaf of its output, named by its path, a little too large."""

    def part(*args, **kwargs):
        out = getattr(EAGER_PARTS, name)(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return out
        names = tree.paths(out)
        assert path in names
        leaves = zip(names, tree.leaves(out))
        return tree.unflatten(
            out, [x * by if n == path else x for n, x in leaves]
        )

    return part


@pytest.mark.parametrize(
    ("name", "by", "path", "failing"),
    [
        ("rollout_step", 1.009, "1.reward", "rollout_step"),
        ("build_batch", 1.0001, "0.advantage", "build_batch"),
        ("minibatch_step", 1.001, "0.opt_state.mu", "one-graph"),
        ("minibatch_step", 1.001, "1.loss.entropy", "one-graph"),
    ],
)
def test_one_output_that_is_a_little_wrong_is_refused(name, by, path, failing):
    part = scaled_if_compiled(name, by, path)
    (failure,) = select(replace(EAGER_PARTS, **{name: part}))[1].failures
    assert (failure.name, failure.error_type) == (failing, "EquivalenceError")


def test_a_strategy_chosen_by_name_that_fails_raises():
    for strategy, part in BREAKABLE.items():
        parts = replace(EAGER_PARTS, **{part: broken(part)})
        with pytest.raises(torch._dynamo.exc.Unsupported):
            select(parts, strategy=strategy)
    with pytest.raises(compilation.EquivalenceError):
        select(replace(EAGER_PARTS, minibatch_step=wrong), strategy="one-graph")


class Cube(torch.autograd.Function):
    """A function that `torch.func` cannot differentiate, because it has no `setup_context`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_a_network_of_the_autograd_engine_alone_is_compiled(backend):
    """Its updates are those of the same network in PyTorch's own operators."""

    def network(cube, *args):
        out = CFG.agent.apply(*args)
        return out._replace(value=out.value + cube(out.value))

    by_engine, by_operators = (
        replace(CFG, agent=replace(CFG.agent, apply=partial(network, cube)))
        for cube in (Cube.apply, lambda x: x**3)
    )
    parts, record = select(backend=backend, cfg=by_engine)
    assert record.strategy != "eager"
    assert_learns_the_same(parts, 1e-4, by_engine, by_operators)


@pytest.mark.parametrize("decay", [(0.0, True), (0.1, True), (0.1, False)])
def test_fused_adam_equals_ours_and_writes_to_no_argument(decay):
    """Ten steps in float32, 1e-6."""
    weight_decay, decoupled = decay
    cfg = AdamConfig(
        weight_decay=weight_decay, decoupled_weight_decay=decoupled
    )
    params, results = state().params, []
    versions = [x._version for x in tree.leaves(params)]
    for update in (compilation.fused_adam, optim.update):
        p, s = params, optim.init(params)
        for i in range(10):
            grads = tree.map(lambda x, i=i: torch.sin(100 * x + i), params)
            p, s = update(cfg, grads, s, p, torch.tensor(1e-3))
        results.append((p, s))
    assert_trees_equal(*results, rtol=1e-5, atol=1e-6)
    assert [x._version for x in tree.leaves(params)] == versions


def test_a_step_that_is_no_graph_is_a_failure_on_a_gpu_only():
    fields = {"failures": (), "torch_version": "2.13", "backend": "inductor"}
    on_cpu = compilation.StrategyRecord(
        strategy="one-graph", device="cpu", **fields
    )
    on_gpu = replace(on_cpu, device="cuda:0")
    none = capture(lambda x: (x, ()), torch.zeros(1))
    assert compilation.with_capture(on_cpu, none) == on_cpu
    graph = replace(none, replay_mode="cuda-graph", fallback_code=None)
    record = compilation.with_capture(on_gpu, graph)
    assert record == replace(on_gpu, replay_mode="cuda-graph")
    why, code = "it waits for the GPU", ReasonCode.HOST_SYNC
    waits = replace(none, fallback_reason=why, fallback_code=code)
    (failure,) = compilation.with_capture(on_gpu, waits).failures
    assert failure.code is code
    assert str(failure) == "not cuda-graph: it waits for the GPU"


@pytest.mark.parametrize(
    "way", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "stance"]
)
def test_nothing_is_compiled_where_the_compiler_is_turned_off(way, monkeypatch):
    def forbidden(*args, **kwargs):
        pytest.fail("it compiles")

    monkeypatch.setattr(torch, "compile", forbidden)
    monkeypatch.setattr(compilation, "CompiledFunction", forbidden)
    is_stance = way == "stance"
    if not is_stance:
        monkeypatch.setenv(way, "1")
    stance = torch.compiler.set_stance
    with stance("force_eager") if is_stance else nullcontext():
        parts, record = select()
        assert parts is EAGER_PARTS and record.strategy == "eager"
        reason = "force_eager" if is_stance else f"{way}=1"
        assert reason in record.failures[0].message
        assert compilation.compile_function(math.sin) is math.sin
        assert compilation.compile_function(math.sin, "eager") is math.sin
        with pytest.raises(ValueError, match=r"expected auto or eager, since"):
            select(strategy="one-graph")


class Peers:
    """Another process, which fails in some of what is tried."""

    def __init__(self, *fails_in):
        self.fails_in = fails_in
        self.own = []

    def __call__(self, what, failure=""):
        self.own.append((what, failure))
        return failure or ("rank 1: no" if what in self.fails_in else "")


def test_a_strategy_that_fails_in_another_process_is_passed_over():
    """Its reason stands in the record with the rank."""
    peers = Peers("one-graph")
    parts, record = select(agree=peers)
    assert record.strategy == "forward"
    assert {failure for _, failure in peers.own} == {""}
    assert [f.name for f in record.failures] == ["one-graph"]
    assert {f.message for f in record.failures} == {"rank 1: no"}
    assert_learns_the_same(parts)


# ---- Equality.

LARGE = torch.tensor([1e3, 2e3])


def test_a_small_leaf_that_is_wrong_is_named_however_large_the_others():
    want = (LARGE, torch.tensor([1e-3, 2e-3]))
    compilation.check_output((LARGE * 1.00002, want[1] * 0.99998), want)
    problem = "^2 of 2 numbers differ from eager in 1$"
    with pytest.raises(compilation.EquivalenceError, match=problem):
        compilation.check_output((LARGE, want[1] * 1.002), want)
    compilation.check_output((LARGE, want[1] * 1.002), want, tolerance=0.003)


def test_the_same_infinities_and_no_numbers_are_equal_and_others_are_not():
    odd = torch.tensor([math.inf, math.nan, -math.inf, 1.0])
    compilation.check_output(odd.clone(), odd)
    for i in range(4):
        with pytest.raises(compilation.EquivalenceError, match=r"^1 of 4 "):
            compilation.check_output(
                torch.where(torch.arange(4) == i, 7.0, odd), odd
            )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_one_row_in_a_thousand_may_differ_and_none_of_fewer(dtype):
    for n, rows, passes in ((2000, 2, True), (2000, 3, False), (999, 1, False)):
        want = (torch.arange(n) + 1).to(dtype)
        wrong = ~want if dtype == torch.bool else -100 * want
        other = torch.where(torch.arange(n) < rows, wrong, want)
        refused = pytest.raises(
            compilation.EquivalenceError, match=rf"^{rows} of {n} "
        )
        with nullcontext() if passes else refused:
            compilation.check_output(other, want)


def test_steps_are_compared_over_four_minibatches_and_by_what_they_change():
    """Both go from 1 by 1 a step; one of them by 1.001 in the fourth, a 4,000th of its change."""
    step = lambda last: lambda x, n: (x + torch.where(n == 3, last, 1.0), x)
    start, few, many = torch.tensor([1.0]), torch.arange(3), torch.arange(9)
    compilation.check_update(step(1.001), step(1.0), start, few)
    compilation.check_update(step(1.0001), step(1.0), start, many)
    problem = "differs from eager by 0.001 in , where that changes by 4$"
    with pytest.raises(compilation.EquivalenceError, match=problem):
        compilation.check_update(step(1.001), step(1.0), start, many)
