"""The ladder takes the highest rung that works and is right, and says why it passed over those above it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from funcppo import data, optim, random, tree
from funcppo.config import AdamConfig, PPOConfig
from funcppo.minibatch import UpdateState
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.runtime import parallel_compile
from funcppo.runtime.compile import STRATEGIES, _StrategySelector, compile_function, fused_adam, select_strategy
from funcppo.runtime.equivalence import DEFAULT_TOLERANCE, EquivalenceError
from funcppo.runtime.inductor.matmul_pass import MatmulPass
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import WORLD, assert_trees_equal, cartpole_config, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

CFG = cartpole_config(max_steps=5, n_envs=4, n_steps=8, n_updates=10, n_epochs=2, n_minibatches=2)
BREAKABLE = {"one-graph": "minibatch_step", "two-graphs": "loss_gradient", "forward": "minibatch_loss"}


@cache
def state():
    return init(CFG, WORLD, random.key(0))


def ladder(parts=EAGER_PARTS, name="auto", backend="aot_eager"):
    return select_strategy(collect, parts, CFG, WORLD, state(), name, backend)


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
        after = UpdateState(
            0.5 * (after.params + learner.params), opt_state=learner.opt_state, continue_update=after.active
        )
    return after, shown


@pytest.mark.parametrize("rung", STRATEGIES)
def test_every_rung_learns_what_eager_learns(rung):
    """One update of 4 minibatches, 1e-5 of parameters that move by up to 1e-3."""
    parts, record = ladder(name=rung)
    want, _ = train_step(CFG, WORLD, state())
    got, _ = train_step(CFG, WORLD, state(), parts)
    assert_trees_equal(got.params, want.params, rtol=0, atol=1e-5)
    assert record.strategy == rung and record.failures == () and record.torch_version == torch.__version__


def test_the_whole_step_in_one_graph_is_what_inductor_takes(monkeypatch, tmp_path):
    """On many cores: other processes are sent all parts but the longest, and waited for since nothing is on disk."""
    sent, waits = [], []

    @contextmanager
    def others(calls):
        sent.extend(calls)
        yield lambda: waits.append(len(sent))

    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 3)
    monkeypatch.setattr(parallel_compile, "compile_in_background", others)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    parts, record = ladder(backend="inductor")
    assert waits == [3] and {fn for fn, _ in sent} == {
        EAGER_PARTS.sample_randomness,
        EAGER_PARTS.build_batch,
        EAGER_PARTS.minibatch_step,
    }
    got = collect(CFG, WORLD, state())
    for fn, args in sent:
        if fn is EAGER_PARTS.build_batch:
            assert [x.shape for x in tree.leaves(fn(*args)[0])] == [x.shape for x in tree.leaves(got.batch)]
    assert (record.strategy, record.failures, record.backend, record.device) == ("one-graph", (), "inductor", "cpu")
    got, want = train_step(CFG, WORLD, state(), parts), train_step(CFG, WORLD, state())
    assert_trees_equal(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rung", [*STRATEGIES, "auto"])
def test_microbatches_learn_what_their_minibatch_teaches(rung):
    cfg = replace(CFG, ppo=replace(CFG.ppo, n_microbatches=4))
    parts, record = select_strategy(collect, EAGER_PARTS, cfg, WORLD, state(), rung, "aot_eager")
    assert record.failures == () and record.strategy == ("two-graphs" if rung == "auto" else rung)
    got, want = train_step(cfg, WORLD, state(), parts), train_step(CFG, WORLD, state())
    assert_trees_equal(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_broken", [1, 2, 3])
def test_each_rung_that_fails_is_passed_over_and_recorded(n_broken):
    failing = STRATEGIES[:n_broken]
    parts, record = ladder(replace(EAGER_PARTS, **{BREAKABLE[r]: broken(BREAKABLE[r], f"no {r}") for r in failing}))
    assert record.strategy == STRATEGIES[n_broken]
    assert tuple(f.name for f in record.failures) == failing
    for failure in record.failures:
        assert failure.error_type == "Unsupported" and failure.torch_version == torch.__version__
        assert failure.message and "\n" not in failure.message
    got, want = train_step(CFG, WORLD, state(), parts)[0], train_step(CFG, WORLD, state())[0]
    assert_trees_equal(got.params, want.params, rtol=0, atol=1e-5)


def test_a_rung_that_is_fast_and_wrong_is_passed_over():
    _, record = ladder(replace(EAGER_PARTS, minibatch_step=wrong))
    assert record.strategy == "two-graphs"
    assert [(f.name, f.error_type) for f in record.failures] == [("one-graph", "ParityError")]
    assert "differs from eager" in record.failures[0].message


def test_a_rung_that_is_wrong_from_the_second_minibatch_on_is_passed_over():
    def later(*args, **kwargs):
        after, shown = EAGER_PARTS.minibatch_step(*args, **kwargs)
        late = 0.1 * args[-2].opt_state.step.float() if torch.compiler.is_compiling() else 0.0
        moved = after.params - args[-2].params
        return UpdateState(after.params + late * moved, after.opt_state, after.active), shown

    _, record = ladder(replace(EAGER_PARTS, minibatch_step=later))
    assert [(f.name, f.error_type) for f in record.failures] == [("one-graph", "ParityError")]


def test_acting_with_leaves_that_are_empty_is_compiled_too():
    """At height 1 successors have no goals."""
    made = prover_task.build_task(data.load("countries_s1"), ProverTaskConfig(max_height=1, embed_dim=2, hidden_dim=4))
    cfg = prover_task.build_config(made, PPOConfig(n_envs=4, n_steps=2, n_minibatches=1, n_epochs=1))
    first = init(cfg, prover_task.training_world(made), random.key(0))
    assert any(not x.numel() for x in tree.leaves(first.env_state))
    _, record = select_strategy(collect, EAGER_PARTS, cfg, prover_task.training_world(made), first, "auto", "aot_eager")
    assert record.strategy == "one-graph" and record.failures == ()


@pytest.mark.parametrize("name", ["plan", "rollout_step", "learning_batch"])
def test_a_part_of_acting_that_is_fast_and_wrong_stays_eager_and_is_recorded(name):
    """Half of a float that it gives, or of its integers where it gives no other."""

    def halved(*args):
        out = getattr(EAGER_PARTS, name)(*args)
        floats = any(x.dtype.is_floating_point for x in tree.leaves(out))
        half = lambda x: x / 2 if x.dtype.is_floating_point else x if floats or x.dtype == torch.bool else x // 2
        return tree.map(half, out) if torch.compiler.is_compiling() else out

    parts, record = ladder(replace(EAGER_PARTS, **{name: halved}))
    assert [(f.name, f.error_type) for f in record.failures] == [(name, "ParityError")]
    assert getattr(parts, name) is halved
    with pytest.raises(EquivalenceError):
        ladder(replace(EAGER_PARTS, **{name: halved}), name="one-graph")


def test_what_fails_tuned_is_compiled_plain_and_recorded(monkeypatch):
    """An Inductor that cannot take our rewriting of products."""

    def refuses(self, graph):
        raise RuntimeError("no such form")

    monkeypatch.setattr(MatmulPass, "__call__", refuses)
    fn = lambda x: x @ x
    plain = lambda tuned: [f := compile_function(fn, use_custom_passes=tuned), f(torch.eye(3))][1]
    trial = _StrategySelector(backend="inductor", tolerance=DEFAULT_TOLERANCE, raise_on_failure=False)
    assert torch.equal(trial.compile_with_fallback(plain, "a product"), torch.eye(3))
    assert [(f.name, "no such form" in f.message) for f in trial.failures] == [("a product, tuned", True)]


def test_a_forced_rung_that_fails_raises():
    for rung, part in BREAKABLE.items():
        with pytest.raises(torch._dynamo.exc.Unsupported):
            ladder(replace(EAGER_PARTS, **{part: broken(part)}), name=rung)
    with pytest.raises(EquivalenceError):
        ladder(replace(EAGER_PARTS, minibatch_step=wrong), name="one-graph")


def test_a_part_of_acting_that_cannot_be_compiled_stays_eager_and_is_recorded():
    parts, record = ladder(replace(EAGER_PARTS, sample_randomness=broken("plan")))
    assert record.strategy == "one-graph" and [(f.name, f.error_type) for f in record.failures] == [
        ("plan", "Unsupported")
    ]
    train_step(CFG, WORLD, state(), parts)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        ladder(replace(EAGER_PARTS, sample_randomness=broken("plan")), name="two-graphs")


def test_eager_compiles_nothing():
    parts, record = ladder(name="eager")
    assert parts == EAGER_PARTS and record.strategy == "eager"


def test_what_fails_eagerly_too_is_no_matter_of_the_ladder():
    def fails(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ladder(replace(EAGER_PARTS, minibatch_step=fails, accumulate_gradients=fails, minibatch_loss=fails))


def test_an_unknown_rung_is_one_line_that_names_the_rungs():
    with pytest.raises(ValueError, match=r"^strategy 'fast': want auto, one-graph, two-graphs, forward, eager$"):
        ladder(name="fast")


def test_trying_the_rungs_leaves_the_state_as_it_was():
    before = [x.clone() for x in tree.leaves(state())]
    versions = [x._version for x in tree.leaves(state())]
    ladder()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state()), before))
    assert [x._version for x in tree.leaves(state())] == versions


@pytest.mark.parametrize(
    "cfg", [AdamConfig(), AdamConfig(weight_decay=0.1), AdamConfig(weight_decay=0.1, decoupled_weight_decay=False)]
)
def test_fused_adam_equals_ours_and_writes_to_no_argument(cfg):
    """Ten steps in float32, 1e-6."""
    params = state().params
    results = []
    for update in (fused_adam, optim.update):
        p, s = params, optim.init(params)
        for i in range(10):
            grads = tree.map(lambda x, i=i: torch.sin(100 * x + i), params)
            p, s = update(cfg, grads, s, p, torch.tensor(1e-3))
        results.append((p, s))
    assert_trees_equal(*results, rtol=1e-5, atol=1e-6)
    assert all(x._version == y._version for x, y in zip(tree.leaves(params), tree.leaves(state().params)))
