"""A captured step is the step: state stays where it is, and no write-back is lost. So is a graphed call, and a loop.

The laws hold for the CPU's copy-back and for a CUDA graph alike; the cases on a GPU skip where there is none.
"""

import re
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcppo.core import random, tree
from funcppo.runtime.capture import (
    CUDAGRAPH_OPTIONS,
    CaptureError,
    GraphedStep,
    ReasonCode,
    TreeFunction,
    are_trees_demanded,
    capture,
    cudagraph_trees_only,
    failure_code,
    recompile_code,
    skip_code,
    with_cuda_graphs_only,
    without_cuda_graphs,
)
from funcppo.runtime.compile import (
    EquivalenceError,
    compile_function,
    select_strategy,
    with_capture,
)
from funcppo.runtime.monitor import Monitor
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import (
    SMALL,
    WORLD,
    assert_trees_equal,
    cartpole_config,
    devices,
    on_gpu,
)

HAS_GPU = torch.cuda.is_available()


class Pair(NamedTuple):
    """A state of two leaves."""

    a: Tensor
    b: Tensor


def pair(device: str) -> Pair:
    numbers = torch.arange(3.0, device=device)
    return Pair(numbers, 10.0 + numbers)


def swap(s: Pair):
    return Pair(s.b, s.a), s.a


def pass_through(s: Pair):
    """The old a moves on to b, as a trajectory takes a state while the state moves on."""
    return Pair(2 * s.a + 1, s.a), s.b + 0


def views(s: Pair):
    """New leaves that are views of old ones: reversed, and a shifted copy of the same leaf."""
    return Pair(s.a.flip(0), torch.cat([s.b[1:], s.a[:1]])), s.b[:2]


@devices
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("fn", [swap, pass_through, views])
def test_no_write_back_overtakes_a_read(fn, compile, device):
    """Five steps from a state that is left as it was; inside one compiled function a swap loses a leaf."""
    start = pair(device)
    captured = capture(compile_function(fn) if compile else fn, start)
    want = start
    for _ in range(5):
        want, seen = fn(want)
        want = tree.map(torch.clone, want)
        torch.testing.assert_close(captured.step(), seen, rtol=0, atol=0)
        assert_trees_equal(captured.state, want, rtol=0, atol=0)
    assert_trees_equal(start, pair(device), rtol=0, atol=0)


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.booleans()), min_size=4, max_size=4
    ),
    device=st.sampled_from(["cpu", "cuda"] if HAS_GPU else ["cpu"]),
)
def test_any_shuffle_of_leaves_equals_the_pure_step(moves, device):
    """Each new leaf is an old one, or a number made from it, and one old leaf is shown."""

    def fn(s):
        moved = [s[i] * 3 + 1 if fresh else s[i] for i, fresh in moves]
        return tuple(moved), s[moves[0][0]]

    want = tuple(
        torch.full((2,), float(i + 1), device=device) for i in range(4)
    )
    captured = capture(fn, want)
    for _ in range(3):
        want, seen = fn(want)
        assert torch.equal(captured.step(), seen)
        assert all(torch.equal(a, b) for a, b in zip(captured.state, want))


@devices
def test_what_a_step_closes_over_stays_alive(device):
    """A graph reads it where it lay when captured: once freed, that place goes to the next tensor of its size."""
    add = lambda term, s: ((s[0] + term,), s[0].sum())
    like = torch.zeros(1 << 20, device=device)
    captured = capture(partial(add, torch.full_like(like, 3.0)), (like,))
    later = [torch.full_like(like, 7.0) for _ in range(8)]
    captured.step()
    assert torch.equal(captured.state[0], like + 3.0)
    assert torch.equal(later[0], like + 7.0)


@devices
def test_the_state_stays_where_it_is(device):
    captured = capture(pass_through, pair(device))
    before = [x.data_ptr() for x in tree.leaves(captured.state)]
    for _ in range(3):
        captured.step()
    assert [x.data_ptr() for x in tree.leaves(captured.state)] == before
    mode = "cuda-graph" if device == "cuda" else "none"
    assert captured.replay_mode == mode


@devices
def test_another_state_can_be_loaded(device):
    captured = capture(swap, pair(device))
    captured.step()
    captured.load(pair(device))
    assert_trees_equal(captured.state, pair(device), rtol=0, atol=0)
    problem = (
        r"^the next state.a: expected .*float32 \[3\], got .*float32 \[2\]$"
    )
    with pytest.raises(ValueError, match=problem):
        captured.load(
            Pair(torch.zeros(2, device=device), torch.zeros(3, device=device))
        )


@devices
def test_a_step_that_changes_a_shape_raises_and_names_the_leaf(device):
    """A broadcast would hide it."""
    problem = (
        r"the next state.b: expected .*float32 \[3\], got .*float32 \[1\]$"
    )
    with pytest.raises(CaptureError, match=problem):
        capture(lambda s: (Pair(s.a, s.b[:1]), s.a), pair(device)).step()
    with pytest.raises(
        CaptureError, match="the next state: expected a Pair of "
    ):
        capture(lambda s: (s.a, s.b), pair(device)).step()


@devices
def test_no_graph_is_recorded_where_graphs_are_turned_off(device):
    with without_cuda_graphs("outer"):
        with without_cuda_graphs("inner"):
            captured = capture(swap, pair(device))
        assert captured.fallback_reason == "inner"
        assert capture(swap, pair(device)).fallback_reason == "outer"
        assert captured.n_graphs == 0 and captured.replay_mode == "none"
    assert "outer" not in capture(swap, pair(device)).fallback_reason
    captured.step()
    assert torch.equal(captured.state.a, pair(device).b)


def test_every_capture_is_strict_where_graphs_are_demanded():
    with with_cuda_graphs_only():
        with pytest.raises(CaptureError, match=r"^no CUDA tensor in the state"):
            capture(swap, pair("cpu"))
        untried = capture(swap, pair("cpu"), use_cuda_graph=False)
        assert untried.replay_mode == "none"
    assert capture(swap, pair("cpu")).replay_mode == "none"


def host_sync(s: Pair):
    return Pair(s.a + float(s.b.sum()), s.b), s.a.sum()


def to_host(s: Pair):
    return Pair(s.b + 1, s.a), s.a.sum().cpu()


def from_host(s: Pair):
    return Pair(s.a + torch.ones(3).cuda(), s.b), s.a.sum()


def strange_generator(generator):
    def fn(s: Pair):
        return Pair(
            s.a + torch.rand(3, device="cuda", generator=generator), s.b
        ), s.a.sum()

    return fn


REFUSED = {
    "host sync": (
        lambda: host_sync,
        r"waits for the GPU.*test_capture.py:\d+: return Pair\(s.a \+ float",
    ),
    "host output": (lambda: to_host, "output : .* on cuda:0, got one on cpu"),
    "host input": (lambda: from_host, r"from or to the host.*capture.py:\d+"),
    "generator": (
        lambda: strange_generator(torch.Generator("cuda")),
        r"torch.Generator that the graph does not know",
    ),
}


@on_gpu
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_captured_falls_back_with_the_reason(name):
    """The fallback steps like the function, and the next capture, from a new pool, works."""
    make, reason = REFUSED[name]
    captured = capture(make(), pair("cuda"))
    assert captured.replay_mode == "none"
    assert re.search(reason, captured.fallback_reason), captured.fallback_reason
    captured.step()
    with pytest.raises(CaptureError):
        capture(make(), pair("cuda"), strict=True)
    assert capture(swap, pair("cuda"), strict=True).replay_mode == "cuda-graph"
    torch.rand(3, device="cuda")


@on_gpu
def test_a_state_on_two_devices_is_refused():
    state = Pair(torch.zeros(3, device="cuda"), torch.zeros(3))
    captured = capture(lambda s: (Pair(s.a + 1, s.b + 1), s.a), state)
    assert "several devices: cpu, cuda:0" in captured.fallback_reason


@devices
def test_a_graphed_step_equals_the_step_whatever_its_arguments(device):
    """Params, inputs and states change between calls and within a run of them; one recording serves a cfg."""

    def step(cfg, world, params, table, state):
        traced.append(cfg)
        return Pair(state.a * params + world[0], state.b + table * cfg)

    traced, world = [], (torch.arange(3.0, device=device),)
    graphed = GraphedStep(step)
    for cfg, weight, entry in ((2, 0.5, 1.0), (2, 0.25, 3.0), (3, 0.5, 1.0)):
        params, table = (
            torch.full((3,), x, device=device) for x in (weight, entry)
        )
        state, want = pair(device), pair(device)
        for i in range(4):
            table = table + 1 if i == 2 else table
            state = graphed(cfg, world, params, table, state)
            want = step(cfg, world, params, table, want)
            assert_trees_equal(state, want, rtol=0, atol=0)
    reasons = ["no CUDA tensor in the state"] * (device != "cuda")
    assert graphed.fallback_reasons() == reasons
    if device == "cuda":
        # called by the test; warmed up and recorded
        assert traced.count(3) == 4 + 2


CFG = cartpole_config(max_steps=5, **SMALL)


@cache
def state(device: str = "cpu"):
    return init(CFG, WORLD, random.key(0, device))


def test_a_result_outlives_a_call_and_each_begins_a_step(monkeypatch):
    """In place of PyTorch's function one that, as a graph does, overwrites what it has returned."""
    buffers = pair("cpu")
    asked, events = [], []

    def compile_over_buffers(fn, **options):
        asked.append(options)

        def compiled(x):
            events.append("call")
            buffers.a.copy_(fn(x))
            return buffers

        return compiled

    monkeypatch.setattr(torch, "compile", compile_over_buffers)
    name, begin = "cudagraph_mark_step_begin", lambda: events.append("step")
    monkeypatch.setattr(torch.compiler, name, begin)
    double = TreeFunction(lambda x: 2 * x, {"size_asserts": False})
    first, second = double(torch.ones(3)), double(torch.full((3,), 5.0))
    assert type(first) is Pair
    assert first.a.tolist() == [2.0] * 3 and second.a.tolist() == [10.0] * 3
    assert events == ["step", "call"] * 2
    (options,) = asked
    assert options["fullgraph"] and options["dynamic"] is False
    assert options["options"] == {"size_asserts": False} | CUDAGRAPH_OPTIONS


def test_the_demand_ends_with_its_block():
    assert not are_trees_demanded()
    with cudagraph_trees_only():
        with cudagraph_trees_only():
            assert are_trees_demanded()
        assert are_trees_demanded()
        captured = capture(lambda s: (s, ()), pair("cpu"))
        assert captured.fallback_reason == "no CUDA tensor in the state"
        assert captured.replay_mode == "none"
    assert not are_trees_demanded()


@on_gpu
def test_a_training_step_replays_one_graph_for_each_compiled_function():
    """Four functions; 1e-5 of parameters that move by up to 1e-3. The second update records nothing."""
    torch._dynamo.reset()
    want = state("cuda")
    with cudagraph_trees_only(), Monitor() as monitor:
        parts, record = select_strategy(
            collect, EAGER_PARTS, CFG, WORLD, want, "one-graph"
        )
        captured = capture(
            partial(train_step, CFG, WORLD, parts=parts), state("cuda")
        )
        record = with_capture(record, captured)
        recordings = []
        for _ in range(3):
            captured.step()
            recordings.append(monitor.cudagraph_recordings)
    assert record.replay_mode == "cuda-graph-trees"
    assert {f.code for f in record.failures} == {ReasonCode.NOT_REQUESTED}
    # One of them may be compiled for the first state and again for later ones.
    assert recordings[0] in (4, 5), monitor.report()
    assert recordings == [recordings[0]] * 3, monitor.report()
    assert monitor.cudagraph_skip_reasons == []
    assert monitor.cudagraph_rerecordings == 0

    for _ in range(3):
        want, _ = train_step(CFG, WORLD, want)
    got = captured.state
    assert_trees_equal(got.params, want.params, rtol=0, atol=1e-5)


# ---- Codes of reasons, from the texts and exceptions that PyTorch raises.

SKIPPED = """
skipping cudagraphs due to mutated inputs (3 instances) | MUTATED_INPUTS
skipping cudagraphs due to cpu device (arg1_1) | CPU_OPERATOR
skipping cudagraphs due to multiple devices: cuda:0, cuda:1 | SEVERAL_DEVICES
skipping cudagraphs due to graph with symbolic shapes inputs | DYNAMIC_SHAPES
skipping cudagraphs due to unbacked symint | DYNAMIC_SHAPES
disabling cudagraphs due to incompatible op aten.nonzero | INCOMPATIBLE_OPERATOR
skipping cudagraphs due to bisector | OTHER
"""
RECOMPILED = """
tensor 'x' size mismatch at index 0. expected 3, actual 4 | SHAPE
tensor 'x' dtype mismatch. expected Float, actual Double | DTYPE
tensor 'x' requires_grad mismatch. expected requires_grad=0 | GRAD_MODE
GLOBAL_STATE changed: grad_mode | GRAD_MODE
f: 0/0: n['shape'] == 3 | VALUE
f: 1/0: 2 <= x.size()[0] <= 3 | SHAPE
step: dtype differs: stride (1,) before, now (2,) | SHAPE
step: 0 differs: dtype torch.int64 before, now torch.int32 | DTYPE
step: 0 differs: device cuda:0 before, now cuda:1 | DEVICE
step: cfg differs | VALUE
 | OTHER
"""


@pytest.mark.parametrize(
    ("code_of", "table"),
    [(skip_code, SKIPPED), (recompile_code, RECOMPILED)],
    ids=["skipped", "recompiled"],
)
def test_a_text_of_pytorch_has_the_code_of_its_reason(code_of, table):
    for line in table.strip("\n").splitlines():
        text, _, code = line.rpartition(" | ")
        assert code_of(text) is ReasonCode[code], line


def unsupported() -> BaseException:
    try:
        step = lambda x: torch._dynamo.graph_break() or x
        options = {"backend": "eager", "fullgraph": True}
        torch.compile(step, **options)(torch.zeros(1))
    except Exception as error:
        return error
    raise AssertionError("a graph break is an error under fullgraph")


def test_a_failure_has_the_code_of_its_exception():
    codes = {
        ReasonCode.WRONG_RESULT: EquivalenceError(""),
        ReasonCode.NOT_CAPTURED: CaptureError(""),
        ReasonCode.OUT_OF_MEMORY: torch.cuda.OutOfMemoryError(""),
        ReasonCode.UNSUPPORTED: unsupported(),
        ReasonCode.COMPILER_ERROR: torch._inductor.exc.LoweringException(
            ValueError(""), "target", (), {}
        ),
        ReasonCode.OTHER: KeyError(""),
    }
    for code, error in codes.items():
        assert failure_code(error) is code
