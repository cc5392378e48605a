"""How CUDAGraph Trees (`mode="reduce-overhead"`) fail: the symptom, what the monitor says, and the cure.

    python -m pytest experiments/reproducers/cudagraph_symptoms.py

funcppo replays whole iterations by `capture`; these are for who meets the alternative. Every case needs a GPU.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch._inductor.cudagraph_trees

from funcppo.runtime.monitor import Monitor
from funcppo.runtime.reasons import ReasonCode
from tests.runtime.test_capture import on_gpu

pytestmark = on_gpu


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tree_compiled(fn):
    return torch.compile(fn, mode="reduce-overhead", fullgraph=True)


def sized(fn, dynamic):
    return torch.compile(fn, mode="reduce-overhead", dynamic=dynamic)


def double(x):
    return x * 2


def zeros(n=8):
    return torch.zeros(n, device="cuda")


def ones(n=8):
    return torch.ones(n, device="cuda")


def in_steps(n_steps):
    """Yield the number of each step after marking its beginning."""
    for i in range(n_steps):
        torch.compiler.cudagraph_mark_step_begin()
        yield i


def run(fn, inputs) -> Monitor:
    """Call a compiled function on one input after another, a step each."""
    with Monitor() as monitor:
        for i in in_steps(len(inputs)):
            fn(inputs[i])
    return monitor


def check_recorded(fn, inputs, n=1):
    """Each graph is recorded once, and none is skipped."""
    torch._dynamo.reset()
    monitor = run(fn, inputs)
    assert monitor.cudagraph_recordings == n
    assert not monitor.cudagraph_skip_reasons


def check_skipped(fn, inputs, *codes):
    """Nothing is recorded, for one of these reasons."""
    monitor = run(fn, inputs)
    assert monitor.cudagraph_recordings == 0 and monitor.cudagraph_skip_reasons
    assert set(monitor.cudagraph_skip_codes()) <= set(codes)
    return monitor.cudagraph_skip_reasons[0]


@contextmanager
def whole_graphs(**options):
    """Leave no operator out of a graph, as Inductor otherwise does with those that cannot be recorded."""
    with torch._inductor.config.patch(graph_partition=False, **options):
        yield


def mutating(x):
    x.add_(1)
    return x * 2


def test_an_input_that_is_mutated_is_skipped_with_the_reason_until_it_is_returned_instead():
    inputs = [zeros() for _ in range(4)]
    reason = check_skipped(
        tree_compiled(mutating), inputs, ReasonCode.MUTATED_INPUTS
    )
    assert "mutated inputs" in reason
    pure = tree_compiled(lambda x: (x + 1, (x + 1) * 2))
    check_recorded(pure, [zeros()] * 4)


def test_a_host_operator_is_skipped_with_the_reason_until_it_is_moved():
    host = torch.arange(8.0)
    with whole_graphs():
        bad = run(tree_compiled(lambda x: (x * 2, host * 2)), [zeros()] * 4)
    assert bad.cudagraph_recordings == 0
    assert "cpu" in bad.cudagraph_skip_reasons[0].lower()
    device = host.cuda()
    check_recorded(tree_compiled(lambda x: (x * 2, device * 2)), [zeros()] * 4)


def test_weights_that_move_are_recorded_again_until_they_stay():
    """Parameters are static inputs: each new home is a new recording."""
    net = torch.nn.Linear(8, 8, device="cuda")
    x = torch.zeros(2, 8, device="cuda")
    step = tree_compiled(net)
    with Monitor() as moving, torch.no_grad():
        for _ in in_steps(6):
            step(x)
            moving.watch_addresses(tuple(net.parameters()))
            net.weight.data = net.weight.data.clone()
            assert moving.moved_leaves(tuple(net.parameters())) == ["0"]
    torch._dynamo.reset()
    step = tree_compiled(net)
    with Monitor() as staying, torch.no_grad():
        for _ in in_steps(6):
            step(x)
            net.weight.copy_(net.weight * 0.9)
    assert moving.cudagraph_recordings > staying.cudagraph_recordings == 1


def test_an_output_kept_over_a_step_is_lost_until_it_is_cloned():
    step = tree_compiled(double)
    kept = None
    for i in in_steps(4):
        before, kept = kept, step(torch.full((4,), float(i), device="cuda"))
    try:
        lost = float(before[0]) != 4.0
    except RuntimeError as error:
        lost = "overwritten" in str(error)
    assert lost
    clones = [
        step(torch.full((4,), float(i), device="cuda")).clone()
        for i in in_steps(4)
    ]
    assert [float(x[0]) for x in clones] == [0.0, 2.0, 4.0, 6.0]


def test_a_batch_of_another_size_is_compiled_and_recorded_again_until_it_is_padded():
    step = sized(double, dynamic=False)
    sizes = run(step, [zeros(n) for n in (8, 8, 8, 5, 5, 5)])
    assert sizes.cudagraph_recordings == 2 and sizes.compiles == 2
    assert run(step, [zeros() for _ in range(6)]).compiles == 0


def test_gradients_set_to_none_move_and_gradients_set_to_zero_stay():
    net = torch.nn.Linear(8, 8, device="cuda")
    homes: dict[bool, set[int]] = {}
    for to_none in (True, False):
        homes[to_none], held = set(), []
        for _ in range(4):
            net(torch.ones(2, 8, device="cuda")).sum().backward()
            homes[to_none].add(net.weight.grad.data_ptr())
            # something else takes the memory that was let go
            held.append(torch.empty_like(net.weight))
            net.zero_grad(set_to_none=to_none)
            held.append(torch.empty_like(net.weight))
    assert len(homes[False]) == 1 < len(homes[True])


def test_two_paths_through_one_function_are_recorded_once_each():
    left, right = tree_compiled(double), tree_compiled(lambda x: x * 3)
    with Monitor() as monitor:
        for i in in_steps(10):
            y = (zeros() + 1).sin()
            left(y) if i % 2 == 0 else right(y)
    assert monitor.cudagraph_recordings == 2
    assert monitor.cudagraph_rerecordings == 0


def three_of_each(sizes):
    """Three steps of each size: warm-up, recording, replay."""
    return [zeros(n) for n in sizes for _ in range(3)]


def test_one_compiled_function_of_symbolic_sizes_is_recorded_once_a_size():
    """The compilation is shared, the graphs are not: whoever has many sizes pads them."""
    sizes = run(sized(double, dynamic=True), three_of_each((8, 5, 6)))
    assert (sizes.compiles, sizes.cudagraph_recordings) == (1, 3)


def test_symbolic_sizes_are_skipped_on_demand_until_they_are_fixed():
    inputs = three_of_each((8, 5))
    with whole_graphs(**{"triton.cudagraph_skip_dynamic_graphs": True}):
        check_skipped(
            sized(double, dynamic=True), inputs, ReasonCode.DYNAMIC_SHAPES
        )
        check_recorded(sized(double, dynamic=False), inputs, n=2)


def test_a_size_that_depends_on_values_is_skipped_until_it_is_a_mask():
    patch = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with patch, whole_graphs():
        check_skipped(
            tree_compiled(lambda x: (x * 2, x.nonzero())),
            [ones()] * 4,
            ReasonCode.INCOMPATIBLE_OPERATOR,
            ReasonCode.DYNAMIC_SHAPES,
        )
    masked = tree_compiled(lambda x: (x * 2, torch.where(x != 0, x, 0)))
    check_recorded(masked, [ones()] * 4)


def test_what_is_incompatible_under_deterministic_algorithms_is_named():
    """Some versions of PyTorch record no `index_put` then; without them it is recorded, and so it is as a gather."""
    index = torch.tensor([0, 2, 2], device="cuda")

    def accumulate(x):
        return torch.zeros_like(x).index_put((index,), x[:3], accumulate=True)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with whole_graphs():
            strict = run(tree_compiled(accumulate), [ones()] * 4)
    finally:
        torch.use_deterministic_algorithms(before)
    is_skipped = strict.cudagraph_recordings == 0
    expected = {ReasonCode.INCOMPATIBLE_OPERATOR} if is_skipped else set()
    assert set(strict.cudagraph_skip_codes()) == expected
    one_hot = torch.nn.functional.one_hot(index, 8).float()
    for fn in (accumulate, lambda x: x[:3] @ one_hot):
        check_recorded(tree_compiled(fn), [ones()] * 4)


def test_the_shared_tail_of_two_branches_is_recorded_once_a_branch():
    """1 -> 2 -> 4 and 1 -> 3 -> 4 are five recordings of four graphs; as one graph that chooses by a mask, one."""

    def branching(x, turn):
        y = x + 1
        torch._dynamo.graph_break()
        y = y * 2 if turn else y * 3
        torch._dynamo.graph_break()
        return y.sin()

    step = torch.compile(branching, mode="reduce-overhead")
    with Monitor() as monitor:
        for i in in_steps(12):
            step(zeros(), i % 2 == 0)
    assert monitor.cudagraph_recordings == 5

    masked = tree_compiled(
        lambda x, turn: torch.where(turn, (x + 1) * 2, (x + 1) * 3).sin()
    )
    with Monitor() as monitor:
        for i in in_steps(12):
            masked(zeros(), torch.tensor(i % 2 == 0, device="cuda"))
    assert monitor.cudagraph_recordings == 1


def test_a_prior_output_may_be_mutated_where_an_eager_input_may_not():
    first, second = tree_compiled(lambda x: x + 1), tree_compiled(mutating)
    with Monitor() as monitor:
        for _ in in_steps(5):
            assert second(first(zeros())).tolist() == [4.0] * 8
    assert monitor.cudagraph_recordings == 2
    assert not monitor.cudagraph_skip_reasons


class Counter(torch.nn.Module):
    """A module that writes into its buffer and its parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_calls", zeros())
        self.scale = torch.nn.Parameter(zeros())

    def forward(self, x):
        self.n_calls.add_(1)
        self.scale.sub_(1)
        return x + self.n_calls * self.scale


def test_a_parameter_may_be_mutated_where_another_tensor_may_not():
    """What a module holds stays where it is, and each replay writes there; a tensor of a closure is an input."""
    n_calls = zeros()

    def count(x):
        n_calls.add_(1)
        return x + n_calls

    xs = [zeros() for _ in range(5)]
    check_skipped(tree_compiled(count), xs, ReasonCode.MUTATED_INPUTS)
    assert n_calls.tolist() == [5.0] * 8  # right, and launch by launch
    module = Counter()
    with torch.no_grad():
        check_recorded(tree_compiled(module), xs)
    assert module.n_calls.tolist() == [5.0] * 8
    assert module.scale.tolist() == [-5.0] * 8


def test_memory_that_lives_longer_than_at_the_recording_records_again():
    """The second graph may reuse memory of the first output, if that was dead when it was recorded."""

    def recordings(keeps) -> int:
        torch._dynamo.reset()
        first, second = tree_compiled(double), tree_compiled(lambda x: x * 3)
        with Monitor() as monitor:
            for i in in_steps(len(keeps)):
                kept = first(ones())
                if not keeps[i]:
                    kept = None
                second(ones())
                del kept
        return monitor.cudagraph_recordings

    assert recordings([False] * 8) == 2
    assert recordings([False] * 4 + [True] * 4) > 2


@pytest.fixture
def no_boundary_yet(monkeypatch):
    """A process that has marked no step: once one is marked, only marks begin steps."""
    box = torch._inductor.cudagraph_trees.MarkStepBox
    monkeypatch.setattr(box, "mark_step_counter", 0)


@pytest.mark.parametrize("marked", [False, True])
def test_without_step_boundaries_a_forward_pass_stays_in_its_warm_up(
    marked, no_boundary_yet
):
    """Outputs that wait for a backward pass keep the step open, and a warm-up is followed by warm-ups only."""
    weight = torch.ones(8, device="cuda", requires_grad=True)
    step = tree_compiled(lambda x: (x * weight).sin() + 1)
    outputs = []
    with Monitor() as monitor, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in in_steps(6) if marked else range(6):
            outputs.append(step(ones()))
    lines = [str(warning.message) for warning in warned]
    is_warned = any("Unable to hit fast path" in line for line in lines)
    assert monitor.cudagraph_recordings == (1 if marked else 0)
    assert not (marked and is_warned)


@pytest.mark.parametrize("marked", [False, True])
def test_without_step_boundaries_a_result_is_gone_at_the_next_call(
    marked, no_boundary_yet
):
    """In inference each call begins a step by itself. One step around both keeps the first result."""
    left, right = tree_compiled(double), tree_compiled(lambda x: x * 3)
    x = ones()
    with torch.no_grad():
        for _ in in_steps(4) if marked else range(4):
            first, second = left(x), right(x)
            assert second.tolist() == [3.0] * 8
            try:
                is_kept = first.tolist() == [2.0] * 8
            except RuntimeError as error:
                assert "overwritten" in str(error)
                is_kept = False
            assert is_kept == marked


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"
)
def test_a_graph_over_two_gpus_is_skipped_with_the_reason_until_it_is_split():
    far = torch.ones(8, device="cuda:1")
    with whole_graphs():
        both = tree_compiled(lambda x: (x * 2, far * 2))
        check_skipped(both, [zeros()] * 4, ReasonCode.SEVERAL_DEVICES)
    check_recorded(tree_compiled(double), [zeros()] * 4)


def test_separate_graphs_keep_memory_apart_that_trees_share():
    """Four sizes, the largest first: a graph of its own for each holds all of them, one pool hardly more than one."""

    def free():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def held_bytes(trees: bool) -> int:
        torch._dynamo.reset()
        before = free()
        step = sized(lambda x: (x.sin(), x.cos()), dynamic=False)
        with torch._inductor.config.patch({"triton.cudagraph_trees": trees}):
            for size in (16, 14, 12, 10):
                for _ in in_steps(3):
                    step(zeros(size << 20))
        return free() - before

    shared = held_bytes(trees=True)
    assert held_bytes(trees=False) > 2 * shared > 0
