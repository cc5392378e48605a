"""A pure step over static buffers: on a GPU one CUDA graph, launched once a step.

    captured = capture(fn, state)     # fn: state -> (state, out), pure
    out = captured.step()             # captured.state holds the new state, at the same addresses

A CUDA graph reads and writes fixed addresses, so the new state is copied over the old one. The copy happens inside the
captured region, but outside any compiled function: a compiler might move one leaf's write before another leaf's read.

    step = GraphedStep(evaluate_step)     # step(cfg, world, ..., state): one launch a call

It captures at the first call, and again for every other cfg, world and shape of the inputs. The world must stay at
its addresses. `cudagraph_trees_only` lets PyTorch record the compiled functions instead (`mode="reduce-overhead"`), to
compare the two.

A graph is launched on the current stream. All captures of a device share one memory pool, so two of them must not run
at the same time, unless they are made within `separate_graph_pools`.
"""

from __future__ import annotations

import operator
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum, unique
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.runtime.distributed import Agree, alone, backend_options

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

State = TypeVar("State")
Output = TypeVar("Output")
Tree = TypeVar("Tree")
Result = TypeVar("Result")

# how a step is replayed, if at all; "cuda-graph-trees": its compiled functions are, by PyTorch
ReplayMode = Literal["none", "cuda-graph", "cuda-graph-trees"]

_memory_pools: dict[int, _POOL_HANDLE] = {}  # by device index

# of the whole program, while their context managers are open; the last one of a list counts
_reasons_to_stay_eager: list[str] = []
_demands: list[str] = []
_tree_demands: list[str] = []
_separations: list[str] = []


# ---- Codes of reasons.


@unique
class ReasonCode(StrEnum):
    """Reason why a step is not as fast as it may be; never renamed, as labels of metrics and files of runs hold it."""

    OTHER = "other"
    OUT_OF_MEMORY = "out_of_memory"
    DISABLED = "disabled"
    NO_GPU = "no_gpu"
    SEVERAL_DEVICES = "several_devices"
    CPU_TENSOR = "cpu_tensor"
    HOST_SYNC = "host_sync"
    GENERATOR = "generator"
    NOT_REQUESTED = "not_requested"
    WRONG_RESULT = "wrong_result"
    UNSUPPORTED = "unsupported"
    COMPILER_ERROR = "compiler_error"
    NOT_CAPTURED = "not_captured"
    SHORT_RUN = "short_run"
    HOST_ENVIRONMENT = "host_environment"
    NO_SEARCH = "no_search"
    MUTATED_INPUTS = "mutated_inputs"
    CPU_OPERATOR = "cpu_operator"
    DYNAMIC_SHAPES = "dynamic_shapes"
    INCOMPATIBLE_OPERATOR = "incompatible_operator"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    GRAD_MODE = "grad_mode"
    VALUE = "value"


# why a step is not replayed as a CUDA graph
FALLBACKS = (
    ReasonCode.NO_GPU,
    ReasonCode.DISABLED,
    ReasonCode.SEVERAL_DEVICES,
    ReasonCode.CPU_TENSOR,
    ReasonCode.HOST_SYNC,
    ReasonCode.GENERATOR,
    ReasonCode.OUT_OF_MEMORY,
    ReasonCode.OTHER,
)
# why a strategy, a part of the training step, or a compiled search is not in use
FAILURES = (
    ReasonCode.DISABLED,
    ReasonCode.NOT_REQUESTED,
    ReasonCode.WRONG_RESULT,
    ReasonCode.UNSUPPORTED,
    ReasonCode.COMPILER_ERROR,
    ReasonCode.NOT_CAPTURED,
    ReasonCode.OUT_OF_MEMORY,
    ReasonCode.SHORT_RUN,
    ReasonCode.HOST_ENVIRONMENT,
    ReasonCode.NO_GPU,
    ReasonCode.NO_SEARCH,
    ReasonCode.OTHER,
)

# The first code with a word that the text holds, in lower case.
_SKIP_WORDS: Mapping[ReasonCode, Sequence[str]] = {
    ReasonCode.MUTATED_INPUTS: ("mutated inputs",),
    ReasonCode.CPU_OPERATOR: ("cpu device", "cpu scalar", "cpu tensor"),
    ReasonCode.SEVERAL_DEVICES: ("multiple device",),
    ReasonCode.DYNAMIC_SHAPES: (
        "dynamic shape",
        "symbolic shape",
        "unbacked",
        "symint",
    ),
    ReasonCode.INCOMPATIBLE_OPERATOR: ("incompatible op", "deterministic"),
}
# Guards of Dynamo, and what `cache_key` says; arguments may have any of the bare words as names.
_RECOMPILE_WORDS: Mapping[ReasonCode, Sequence[str]] = {
    ReasonCode.SHAPE: (
        *("size mismatch", "rank mismatch", "stride mismatch"),
        *(".size()", ".stride()", "differs: shape ", "differs: stride "),
    ),
    ReasonCode.DTYPE: ("dtype mismatch", "differs: dtype "),
    ReasonCode.DEVICE: (
        "device index mismatch",
        "dispatch key set mismatch",
        "differs: device ",
    ),
    ReasonCode.GRAD_MODE: ("requires_grad mismatch", "changed: grad_mode"),
    ReasonCode.VALUE: ("==", " is ", "len(", "type(", "differs"),
}
SKIPS = (*_SKIP_WORDS, ReasonCode.OTHER)
RECOMPILES = (*_RECOMPILE_WORDS, ReasonCode.OTHER)
# Classes of exceptions, by name: the modules of some are not loaded.
_FAILURE_NAMES: Mapping[ReasonCode, set[str]] = {
    ReasonCode.WRONG_RESULT: {"EquivalenceError"},
    ReasonCode.OUT_OF_MEMORY: {"OutOfMemoryError"},
    ReasonCode.NOT_CAPTURED: {"CaptureError"},
    ReasonCode.UNSUPPORTED: {
        *("Unsupported", "UserError", "GuardOnDataDependentSymNode"),
        "UnsupportedError",  # of `env_kernel`
    },
}
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")


def skip_code(text: str) -> ReasonCode:
    """Return the code of a reason that CUDAGraph Trees log for skipping a graph."""
    return _first_match(_SKIP_WORDS, text)


def recompile_code(text: str) -> ReasonCode:
    """Return the code of a guard that failed and caused a recompilation."""
    return _first_match(_RECOMPILE_WORDS, text)


def failure_code(error: BaseException) -> ReasonCode:
    """Return the code of an exception from a strategy or a part of the step."""
    classes = type(error).__mro__
    names = {cls.__name__ for cls in classes}
    for code, known in _FAILURE_NAMES.items():
        if names & known:
            return code
    if any(cls.__module__.startswith(_COMPILER_MODULES) for cls in classes):
        return ReasonCode.COMPILER_ERROR
    return ReasonCode.OTHER


def _first_match(
    words: Mapping[ReasonCode, Sequence[str]], text: str
) -> ReasonCode:
    """Return the first code that has a word in the text; `OTHER` if no code has."""
    lower = text.lower()
    for code, parts in words.items():
        if any(part in lower for part in parts):
            return code
    return ReasonCode.OTHER


class CaptureError(RuntimeError):
    """Error for a function that cannot be captured; it has a message and a stable code."""

    def __init__(
        self, message: str, code: ReasonCode = ReasonCode.OTHER
    ) -> None:
        super().__init__(message)
        self.code = code


class StateMismatchError(CaptureError):
    """Error for a step that returns a state with other structure, shape, dtype or device than it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep(Generic[State, Output]):
    """Step with the buffers of its state, which each call advances."""

    # the buffers: read them between steps, and clone what must outlive the next step
    state: State
    # advances the state once; the output is valid until the next call
    step: Callable[[], Output]
    # "none": the function is called, and its new state copied over the buffers; "cuda-graph-trees": likewise, and its
    # compiled functions replay CUDA graphs of their own
    replay_mode: ReplayMode
    # the function behind the step
    fn: Callable[[State], tuple[State, Output]]
    fallback_reason: str = ""  # why the step is no CUDA graph; empty if it is
    fallback_code: ReasonCode | None = None  # the same as a code
    n_graphs: int = 0  # CUDA graphs recorded here
    # time to record, without the warm-up and its compilations
    capture_ms: float = 0.0

    def load(self, state: State) -> None:
        """Copy another state into the buffers, to continue from it.

        Raises:
          ValueError: the state does not fit the buffers.
        """
        _check_fits(self.state, state, ValueError)
        _write_back(self.state, state, ())


def capture(
    fn: Callable[[State], tuple[State, Output]],
    state: State,
    *,
    strict: bool = False,
    use_cuda_graph: bool = True,
    agree: Agree = alone,
) -> CapturedStep[State, Output]:
    """Capture `fn` as a CUDA graph if state and device allow it; otherwise call `fn` itself, with the same copy-back.

    Tensors that `fn` closes over must be on the GPU and stay at their addresses. A number that it reads from the host
    is read once, during the capture.

    Args:
      fn: the step, `state -> (state, output)`.
      state: the first state; it is copied, and left as it is.
      strict: raise instead of falling back to calls of `fn`; `with_cuda_graphs_only` asks it of a whole program.
      use_cuda_graph: whether to try a CUDA graph at all; `without_cuda_graphs` turns them off for a whole program.
      agree: of several processes that each capture this step: all record a graph, or none.

    Returns:
      The step and its buffers, with the reason if it is no graph.

    Raises:
      CaptureError: `fn` returns a state of other shapes than it was given; or `strict`, and no graph can be captured.
    """
    buffers = tree.contiguous_copy(state)
    problem = _reason_against_graph(tree.leaves(buffers))
    if not use_cuda_graph:
        reason = "disabled by use_cuda_graph=False"
        problem = CaptureError(reason, ReasonCode.DISABLED)
    problem = _agree_on(agree, problem)

    is_of_trees = problem is None and are_trees_demanded()
    if problem is None and not is_of_trees:
        captured = None
        try:
            captured = _capture_cuda_graph(fn, buffers)
        except BaseException as error:
            # A broken capture may have spoilt the pool, and one that is interrupted, as by the deadline of a request.
            _memory_pools.pop(_device_index(), None)
            if isinstance(error, StateMismatchError) or not isinstance(
                error, Exception
            ):
                raise
            problem = _root_cause(error)
        problem = _agree_on(agree, problem)
        if captured is not None and problem is None:
            return captured
        buffers = tree.contiguous_copy(state)  # it may have spoilt them, too

    if problem is not None and (strict or (use_cuda_graph and _demands)):
        raise problem
    return CapturedStep(
        state=buffers,
        step=partial(_call_and_write_back, fn, buffers),
        replay_mode="cuda-graph-trees" if is_of_trees else "none",
        fallback_reason=str(problem or ""),
        fallback_code=problem and problem.code,
        fn=fn,
    )


def _agree_on(
    agree: Agree, problem: CaptureError | None
) -> CaptureError | None:
    """Return why this or another process has no CUDA graph; None if all have one."""
    found = agree("recording a CUDA graph", str(problem or ""))
    return CaptureError(found) if found and problem is None else problem


def _device_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@contextmanager
def _keep(switch: list[str], value: str = "") -> Iterator[None]:
    previous = list(switch)
    switch.append(value)
    try:
        yield
    finally:
        switch[:] = previous


def without_cuda_graphs(reason: str) -> AbstractContextManager[None]:
    """Prevent CUDA graphs for all captures within the context; `fallback_reason` gives the reason."""
    return _keep(_reasons_to_stay_eager, reason)


def with_cuda_graphs_only() -> AbstractContextManager[None]:
    """Make captures within the context raise `CaptureError` if they try a CUDA graph and record none."""
    return _keep(_demands)


def separate_graph_pools() -> AbstractContextManager[None]:
    """Give each capture within the context its own memory pool, so that captures may run side by side.

    They take more memory: what one has freed is not there for the others.
    """
    return _keep(_separations)


def cudagraph_trees_only() -> AbstractContextManager[None]:
    """Let PyTorch's CUDAGraph Trees record what is compiled within the context, in place of our captures."""
    return _keep(_tree_demands)


def are_trees_demanded() -> bool:
    """Return whether a `cudagraph_trees_only` context is open."""
    return bool(_tree_demands)


def clear_graph_pools() -> None:
    """Start later captures with an empty memory pool; existing captures keep theirs."""
    _memory_pools.clear()


def _reason_against_graph(leaves: list[Tensor]) -> CaptureError | None:
    """Return why a CUDA graph is not even tried; None if it may be tried."""
    if _reasons_to_stay_eager:
        reason = _reasons_to_stay_eager[-1]
        return CaptureError(reason, ReasonCode.DISABLED)
    names = {str(leaf.device) for leaf in leaves}
    if not any(name.startswith("cuda") for name in names):
        reason = "no CUDA tensor in the state"
        return CaptureError(reason, ReasonCode.NO_GPU)
    if len(names) > 1:
        devices = ", ".join(sorted(names))
        reason = f"the state lies on several devices: {devices}"
        return CaptureError(reason, ReasonCode.SEVERAL_DEVICES)
    return None


def _capture_cuda_graph(
    fn: Callable[[State], tuple[State, Output]], buffers: State
) -> CapturedStep[State, Output]:
    device = torch.cuda.current_device()

    # Warm up on a side stream: compile, load kernels, allocate their workspaces. None of that may happen in a capture.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        new_state, out = fn(buffers)
        _check_capturable(buffers, new_state, out)
        del new_state, out
    torch.cuda.current_stream().wait_stream(side_stream)

    # The default mode, global, would break when another thread allocates or pins memory during the capture.
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    if not _separations:
        pool = _memory_pools.setdefault(device, pool)
    start = time.perf_counter()
    with torch.cuda.graph(
        graph, pool=pool, stream=side_stream, capture_error_mode="thread_local"
    ):
        out = _captured_region(fn, buffers)
    capture_ms = 1e3 * (time.perf_counter() - start)

    return CapturedStep(
        state=buffers,
        step=partial(_replay_graph, graph, out, (fn, buffers)),
        replay_mode="cuda-graph",
        n_graphs=1,
        capture_ms=capture_ms,
        fn=fn,
    )


def _replay_graph(
    graph: torch.cuda.CUDAGraph, out: Output, keep_alive: object
) -> Output:
    """Replay the graph; return its output buffers.

    Args:
      keep_alive: all that the graph reads at fixed addresses, so that it lives as long as the step does.
    """
    graph.replay()
    return out


def _captured_region(
    fn: Callable[[State], tuple[State, Output]], buffers: State
) -> Output:
    try:
        new_state, out = fn(buffers)
        return _write_back(buffers, new_state, out)
    except Exception as error:
        # Explained here, because the end of a broken capture raises another error.
        raise _explain(error) from error


def _call_and_write_back(
    fn: Callable[[State], tuple[State, Output]], buffers: State
) -> Output:
    new_state, out = fn(buffers)
    _check_fits(buffers, new_state, StateMismatchError)
    return _write_back(buffers, new_state, out)


def _write_back(old: State, new: State, out: Output) -> Output:
    """Copy `new` over `old`; return `out`, copied if it shared memory with `old`.

    A new leaf may be a view of any old leaf: two leaves swapped, rotated or passed through. Such leaves are cloned
    before the first one is overwritten. A leaf that is the very leaf it replaces is left alone.
    """
    storages = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(old)}

    def copy(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in storages else x

    out = tree.map(copy, out)
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for target, value in zip(tree.leaves(old), tree.leaves(new)):
        if not _is_same_view(target, value):
            targets.append(target)
            values.append(copy(value))
    if targets:
        torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
    return out


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    is_at_address = a.data_ptr() == b.data_ptr() and a.numel() > 0
    return is_at_address and a.stride() == b.stride()


def _check_fits(old: Tree, new: Tree, error_type: type[Exception]) -> None:
    """Raise an error unless `new` can be copied over `old` leaf by leaf."""
    tree.check_layout(new, old, "the next state", error_type)
    for i, (x, y) in enumerate(zip(tree.leaves(old), tree.leaves(new))):
        if x.device != y.device:
            raise error_type(
                f"the next state.{tree.paths(old)[i]}: expected a tensor on {x.device}, got one on {y.device}"
            )


def _check_capturable(buffers: State, new_state: State, out: object) -> None:
    """Raise an error unless a CUDA graph can write the new state and the output."""
    _check_fits(buffers, new_state, StateMismatchError)
    device = tree.leaves(buffers)[0].device
    for name, leaf in zip(tree.paths(out), tree.leaves(out)):
        if leaf.device != device:
            raise CaptureError(
                f"output {name}: expected a tensor on {device}, got one on {leaf.device}; "
                "a graph cannot write to the host",
                ReasonCode.CPU_TENSOR,
            )


def _root_cause(error: BaseException) -> CaptureError:
    """Return the first failure of a broken capture; the capture's end raises an error on top of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CaptureError):
        cause = cause.__context__
    return cause or _explain(error)


def _explain(error: BaseException) -> CaptureError:
    """Return an error that says on one line what was raised and where in the user's code, with its reason code."""
    line = next(iter(str(error).strip().splitlines()), "")
    code = ReasonCode.OTHER
    if isinstance(error, torch.cuda.OutOfMemoryError):
        code = ReasonCode.OUT_OF_MEMORY
    elif "enerator" in line or "offset increment" in line.lower():
        code = ReasonCode.GENERATOR
        line = f"it draws from a torch.Generator that the graph does not know ({line})"
    elif "captur" in line.lower():
        code = ReasonCode.HOST_SYNC
        line = f"it waits for the GPU, or copies from or to the host ({line})"
    if isinstance(error, CaptureError):
        code = error.code

    # where it arose outside of this module, of installed packages and of generated code
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        of_others = (__file__, "site-packages", "<")
        if not any(name in frame.filename for name in of_others):
            place = f", in {frame.filename}:{frame.lineno}: {frame.line}"
    return CaptureError(f"{type(error).__name__}: {line}{place}", code)


# ---- Repeated calls that replay graphs.

_Capture = CapturedStep[Any, tuple[()]]  # states of several types in one table


def _capture_key(
    cfg: object, world: object, inputs: object
) -> tuple[object, ...]:
    """Return the key of a capture: the settings, the addresses of the world, and shapes and dtypes of the inputs."""
    world_key = [(x.data_ptr(), x.shape) for x in tree.leaves(world)]
    input_key = [(x.shape, x.dtype) for x in tree.leaves(inputs)]
    return (cfg, *world_key, *input_key)


class GraphedStep(Generic[State]):
    """Pure `step(cfg, world, *inputs, state) -> state` whose calls on a GPU replay a CUDA graph.

    It returns its buffers, which the next call overwrites. A call with the state that the last call returned, and with
    the same other arguments, continues in place. Any other call copies its arguments into the buffers first.
    """

    def __init__(self, step: Callable[..., State]) -> None:
        """Start with no capture; `step` must be a pure function."""
        self._step = step
        self._captures: dict[tuple[object, ...], _Capture] = {}
        self._captured: _Capture | None = None
        # the arguments of a call that continues in place
        self._in_place_args: tuple[object, ...] = ()

    def __call__(self, cfg: object, world: object, *inputs: object) -> State:
        """Compute the next state, in buffers that the next call overwrites.

        Args:
          cfg: frozen settings.
          world: data that stays at its addresses.
          *inputs: the other arguments of the step; the state is the last one.

        Raises:
          CaptureError: as by `capture`.
        """
        args = (cfg, world, *inputs)
        captured = self._captured
        is_same = len(args) == len(self._in_place_args)
        is_same = is_same and all(map(operator.is_, args, self._in_place_args))
        if captured is None or not is_same:
            key = _capture_key(cfg, world, inputs)
            if key not in self._captures:
                advance = partial(self._advance, cfg, world)
                self._captures[key] = capture(advance, inputs)
            captured = self._captured = self._captures[key]
            captured.load(inputs)
            self._in_place_args = (*args[:-1], captured.state[-1])
        captured.step()
        return captured.state[-1]

    def captures(self) -> list[_Capture]:
        """List all captures so far."""
        return list(self._captures.values())

    def fallback_reasons(self) -> list[str]:
        """List why calls do not replay graphs; empty if all do."""
        reasons = {captured.fallback_reason for captured in self.captures()}
        return sorted(reasons - {""})

    def release(self) -> None:
        """Free all graphs and their buffers; later calls capture again."""
        self._captures.clear()
        self._in_place_args = ()
        self._captured = None
        clear_graph_pools()

    def _advance(
        self, cfg: object, world: object, inputs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[()]]:
        """Return the inputs with the state replaced by the next state."""
        state = self._step(cfg, world, *inputs)
        return (*inputs[:-1], state), ()


# ---- CUDAGraph Trees: the CUDA graphs that PyTorch records of compiled functions by itself.

# what `mode="reduce-overhead"` stands for; a mode excludes other options
CUDAGRAPH_OPTIONS: dict[str, Any] = {"triton.cudagraphs": True}


def _initialize_thread() -> None:
    """Prepare the current thread for CUDAGraph Trees.

    PyTorch 2.13 does so by itself. In 2.10 the thread that imports them has some, and so have its threads of autograd.
    """
    from torch._inductor import cudagraph_trees

    threads = cudagraph_trees.local
    has_trees = hasattr(threads, "tree_manager_containers")
    if has_trees or torch._C._is_key_in_tls("tree_manager_containers"):  # pyright: ignore[reportAttributeAccessIssue]
        return
    threads.tree_manager_containers = {}
    threads.tree_manager_locks = defaultdict(threading.Lock)


class TreeFunction(Generic[Result]):
    """Compiled function of which PyTorch's CUDAGraph Trees record a graph for each kind of arguments.

    Every call begins a step of the trees and clones what it returns. So each recording is the root of a tree, whatever
    is called before or after it, and no later replay overwrites a result.

    Attributes:
      is_called: whether it has been called, other than within another compiled function.
    """

    def __init__(
        self, fn: Callable[..., Result], options: dict[str, Any]
    ) -> None:
        """Wrap the function; it is compiled at its first call.

        Args:
          fn: a pure function of trees of tensors and frozen settings.
          options: further options of Inductor.
        """
        self._fn = fn
        self.is_called = False
        self._compiled = torch.compile(
            fn,
            fullgraph=True,
            dynamic=False,
            **backend_options("inductor", options | CUDAGRAPH_OPTIONS),
        )

    def __call__(self, *args: object) -> Result:
        """Call the compiled function; return a copy of its output.

        Raises:
          Exception: whatever the compiler raises.
        """
        if torch.compiler.is_compiling():
            return self._fn(*args)
        _initialize_thread()
        torch.compiler.cudagraph_mark_step_begin()
        result = tree.map(torch.clone, self._compiled(*args))
        self.is_called = True
        return result
