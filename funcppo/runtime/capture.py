"""A pure step over static buffers: on a GPU one CUDA graph, launched once a step.

    captured = capture(fn, state)     # fn: state -> (state, out), pure
    out = captured.step()             # captured.state holds the new state, at the same addresses

A CUDA graph reads and writes fixed addresses, so the new state is copied over the old one. The copy happens inside the
captured region, but outside any compiled function: a compiler might move one leaf's write before another leaf's read.

A graph is launched on the current stream. All captures of a device share one memory pool, so two of them must not run
at the same time, unless they are made within `separate_graph_pools`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.runtime import cudagraph_trees
from funcppo.runtime.agreement import Agree, alone
from funcppo.runtime.reasons import FallbackCode

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

State = TypeVar("State")
Output = TypeVar("Output")
Tree = TypeVar("Tree")

# how a step is replayed, if at all; "cuda-graph-trees": its compiled functions are, by PyTorch
ReplayMode = Literal[
    "none", "cuda-graph", "cuda-graph-per-loop-body", "cuda-graph-trees"
]

_memory_pools: dict[int, _POOL_HANDLE] = {}  # by device index
_reasons_to_stay_eager: list[str] = []  # of `without_cuda_graphs`
_demands: list[None] = []  # one for each open `with_cuda_graphs_only`
_separations: list[None] = []  # one for each open `separate_graph_pools`


class CaptureError(RuntimeError):
    """A function cannot be captured; the message says why, and so does a stable code."""

    def __init__(
        self, message: str, code: FallbackCode = FallbackCode.OTHER
    ) -> None:
        super().__init__(message)
        self.code = code


class StateMismatchError(CaptureError):
    """A step returns a state with another structure, shape, dtype or device than the state it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep(Generic[State, Output]):
    """A step and the buffers that it advances."""

    # the buffers: read them between steps, and clone what must outlive the next step
    state: State
    # advances the state once; the output is valid until the next call
    step: Callable[[], Output]
    # "none": the function is called, and its new state copied over the buffers; "cuda-graph-trees": likewise, and its
    # compiled functions replay CUDA graphs of their own
    replay_mode: ReplayMode
    fallback_reason: str  # why the step is no CUDA graph; empty if it is one
    fallback_code: FallbackCode | None  # the same as a code; None if it is one
    n_graphs: int  # CUDA graphs recorded here
    # time to record, without the warm-up and its compilations; 0 if nothing was recorded
    capture_ms: float
    fn: Callable[[State], tuple[State, Output]]  # the function behind the step

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
    buffers = _clone_contiguous(state)
    reason, code = (
        _reason_against_graph(tree.leaves(buffers))
        if use_cuda_graph
        else ("disabled by use_cuda_graph=False", FallbackCode.DISABLED)
    )

    reason, code = _agree_on(agree, reason, code)

    replay_mode: ReplayMode = "none"
    if code is None and cudagraph_trees.are_demanded():
        replay_mode = "cuda-graph-trees"
    elif code is None:
        captured = None
        try:
            captured = _capture_cuda_graph(fn, buffers)
        except StateMismatchError:
            raise
        except Exception as error:
            reason, code = _root_cause(error)
        except BaseException:
            # One that is interrupted, as by the deadline of a request, may have spoilt the pool too.
            _memory_pools.pop(_device_index(), None)
            raise
        reason, code = _agree_on(agree, reason, code)
        if captured is not None and code is None:
            return captured
        # A broken capture may have spoilt the pool and the buffers: start from new ones.
        _memory_pools.pop(_device_index(), None)
        buffers = _clone_contiguous(state)

    if code is not None and (strict or (use_cuda_graph and _demands)):
        raise CaptureError(reason, code)
    return CapturedStep(
        state=buffers,
        step=partial(_call_and_write_back, fn, buffers),
        replay_mode=replay_mode,
        fallback_reason=reason,
        fallback_code=code,
        n_graphs=0,
        capture_ms=0.0,
        fn=fn,
    )


def _agree_on(
    agree: Agree, reason: str, code: FallbackCode | None
) -> tuple[str, FallbackCode | None]:
    """Why there is no CUDA graph, here or else in another process; empty and None if there is one in all."""
    found = agree("recording a CUDA graph", reason)
    if found and code is None:
        return found, FallbackCode.OTHER
    return reason, code


def _device_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@contextmanager
def without_cuda_graphs(reason: str) -> Iterator[None]:
    """Let no capture of this process record a CUDA graph meanwhile.

    Args:
      reason: what `fallback_reason` says then.
    """
    previous = list(_reasons_to_stay_eager)
    _reasons_to_stay_eager.append(reason)
    try:
        yield
    finally:
        _reasons_to_stay_eager[:] = previous


@contextmanager
def with_cuda_graphs_only() -> Iterator[None]:
    """Let every capture of this process that tries a CUDA graph raise `CaptureError` if it records none meanwhile."""
    _demands.append(None)
    try:
        yield
    finally:
        _demands.pop()


@contextmanager
def separate_graph_pools() -> Iterator[None]:
    """Let every capture of this process meanwhile have a memory pool of its own, so that captures may run side by side.

    They take more memory: what one has freed is not there for the others.
    """
    _separations.append(None)
    try:
        yield
    finally:
        _separations.pop()


def clear_graph_pools() -> None:
    """Let later captures begin with an empty memory pool; existing captures keep theirs."""
    _memory_pools.clear()


def _clone_contiguous(state: State) -> State:
    return tree.map(
        lambda x: x.clone(memory_format=torch.contiguous_format), state
    )


def _reason_against_graph(
    leaves: list[Tensor],
) -> tuple[str, FallbackCode | None]:
    """Why a CUDA graph is not even tried, as text and as code; empty and None if it may be."""
    if _reasons_to_stay_eager:
        return _reasons_to_stay_eager[-1], FallbackCode.DISABLED
    devices = {leaf.device for leaf in leaves}
    if not any(device.type == "cuda" for device in devices):
        return "no CUDA tensor in the state", FallbackCode.NO_GPU
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        reason = f"the state lies on several devices: {names}"
        return reason, FallbackCode.SEVERAL_DEVICES
    return "", None


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
        fallback_reason="",
        fallback_code=None,
        n_graphs=1,
        capture_ms=capture_ms,
        fn=fn,
    )


def _replay_graph(
    graph: torch.cuda.CUDAGraph, out: Output, keep_alive: object
) -> Output:
    """Launch the graph; returns its output buffers.

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
        raise CaptureError(_explain(error), _code_of(error)) from error


def _call_and_write_back(
    fn: Callable[[State], tuple[State, Output]], buffers: State
) -> Output:
    new_state, out = fn(buffers)
    _check_fits(buffers, new_state, StateMismatchError)
    return _write_back(buffers, new_state, out)


def _write_back(old: State, new: State, out: Output) -> Output:
    """Copy `new` over `old`, and return `out`, which then shares no memory with `old`.

    A new leaf may be a view of any old leaf: two leaves swapped, rotated or passed through. Such leaves are cloned
    before the first one is overwritten. A leaf that is the very leaf it replaces is left alone.
    """
    old_storages = {
        leaf.untyped_storage().data_ptr() for leaf in tree.leaves(old)
    }

    def clone_if_aliased(x: Tensor) -> Tensor:
        return (
            x.clone() if x.untyped_storage().data_ptr() in old_storages else x
        )

    out = tree.map(clone_if_aliased, out)

    targets: list[Tensor] = []
    values: list[Tensor] = []
    for target, value in zip(tree.leaves(old), tree.leaves(new)):
        if not _is_same_view(target, value):
            targets.append(target)
            values.append(clone_if_aliased(value))
    if targets:
        torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
    return out


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    has_same_address = a.data_ptr() == b.data_ptr()
    has_same_strides = a.stride() == b.stride()
    return has_same_address and has_same_strides and a.numel() > 0


def _check_fits(old: Tree, new: Tree, error_type: type[Exception]) -> None:
    """Raise an error if `new` cannot be copied over `old` leaf by leaf."""
    has_same_structure = tree.structure(old) == tree.structure(new)
    if not has_same_structure and tree.paths(old) != tree.paths(new):
        raise error_type(
            f"the step changes the structure of the state: expected leaves {tree.paths(old)}, got {tree.paths(new)}"
        )

    leaves = zip(tree.leaves(old), tree.leaves(new))
    for i, (old_leaf, new_leaf) in enumerate(leaves):
        if _layout(new_leaf) != _layout(old_leaf):
            name = tree.paths(old)[i]
            raise error_type(
                f"the step changes {name}: expected {_describe(old_leaf)}, got {_describe(new_leaf)}"
            )


def _layout(x: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return x.dtype, x.shape, x.device


def _describe(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {list(x.shape)} on {x.device}"


def _check_capturable(buffers: State, new_state: State, out: object) -> None:
    """Raise an error if a CUDA graph cannot write the new state and the output."""
    _check_fits(buffers, new_state, StateMismatchError)
    device = tree.leaves(buffers)[0].device
    for name, leaf in zip(tree.paths(out), tree.leaves(out)):
        if leaf.device != device:
            raise CaptureError(
                f"output {name}: expected a tensor on {device}, got one on {leaf.device}; "
                "a graph cannot write to the host",
                FallbackCode.CPU_TENSOR,
            )


def _root_cause(error: BaseException) -> tuple[str, FallbackCode]:
    """The first failure, explained: the end of a broken capture raises an error of its own on top of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CaptureError):
        cause = cause.__context__
    if cause is None:
        return _explain(error), _code_of(error)
    return str(cause), cause.code


def _code_of(error: BaseException) -> FallbackCode:
    """The code of an exception in a warm-up or a capture."""
    line = _first_line(error)
    if isinstance(error, CaptureError):
        return error.code
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return FallbackCode.OUT_OF_MEMORY
    if _is_about_a_generator(line):
        return FallbackCode.GENERATOR
    return (
        FallbackCode.HOST_SYNC
        if "captur" in line.lower()
        else FallbackCode.OTHER
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _is_about_a_generator(line: str) -> bool:
    return "enerator" in line or "offset increment" in line.lower()


def _explain(error: BaseException) -> str:
    """One line that says what cannot be captured, and where in the user's code."""
    line = _first_line(error)
    is_capture_error = "captur" in line.lower()
    if _is_about_a_generator(line):
        line = f"it draws from a torch.Generator that the graph does not know ({line})"
    elif is_capture_error:
        line = f"it waits for the GPU, or copies from or to the host ({line})"
    return f"{type(error).__name__}: {line}{_innermost_user_frame(error)}"


def _innermost_user_frame(error: BaseException) -> str:
    """Where an error arose, outside of this module, of installed packages and of generated code; empty if nowhere."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames: list[traceback.FrameSummary] = []
    for frame in frames:
        is_installed = "site-packages" in frame.filename
        is_generated = "<" in frame.filename
        if frame.filename != __file__ and not is_installed and not is_generated:
            user_frames.append(frame)
    if not user_frames:
        return ""
    innermost = user_frames[-1]
    filename = _relative_to_cwd(innermost.filename)
    return f", in {filename}:{innermost.lineno}: {innermost.line}"


def _relative_to_cwd(filename: str) -> str:
    """A file name relative to the current folder if it is in there."""
    path = Path(filename)
    folder = Path.cwd()
    return (
        str(path.relative_to(folder))
        if path.is_relative_to(folder)
        else filename
    )
