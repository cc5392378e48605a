"""A pure step over a state that stays where it is; on a GPU one CUDA graph, launched once a step.

    captured = capture(fn, state)     # fn: state -> (state, out), pure
    out = captured.step()             # captured.state has moved on, in place

This is the only room where a tensor is overwritten: the new leaves are copied over the old ones inside the captured
region and outside any compiled function, where a compiler may reorder one write-back before another's read.

Replays run on the stream that they are asked for on, one at a time: captures share one memory pool, so two of them
must not run at once.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from funcppo import tree
from funcppo.runtime.compile import Failure, StrategyRecord

S = TypeVar("S")
O = TypeVar("O")

_pools: dict[int, Any] = {}  # the memory pool of each device, shared by its captures


class CaptureError(RuntimeError):
    """Why a function cannot be captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep(Generic[S, O]):
    """A function and the buffers that it steps through."""

    state: S  # the buffers: read them between steps, clone what is to be kept
    step: Callable[[], O]  # one step on; what it returns is valid until the next
    replay_mode: (
        str  # "manual graph", "manual graph a turn", or "none": `fn` is called, its new leaves copied over the old
    )
    fallback_reason: str  # why it is no graph; empty where it is one
    n_graphs: int  # graphs
    capture_ms: float  # warm-up and what it compiles not included; 0 where nothing was captured
    fn: Callable[[S], tuple[S, O]]  # what was captured

    def load(self, state: S) -> None:
        """Go on from another state. Errors: ValueError when it does not fit the buffers."""
        _check_fits(self.state, state, ValueError)
        _write_back(self.state, state)


def capture(
    fn: Callable[[S], tuple[S, O]], state: S, *, strict: bool = False, use_cuda_graph: bool = True
) -> CapturedStep[S, O]:
    """`fn` from `state` on, which is left as it is.

    A CUDA graph where state and device allow it; otherwise `fn` itself with the same copy-back, and the reason. What
    `fn` closes over must stay where it is and be on the GPU: a number that it reads from the host is read once.

    Args:
      strict: raise in place of falling back.
      graph: False calls `fn` itself on a GPU too.
    Errors: CaptureError when `fn` returns a state of other shapes than it was given; if strict, for want of a graph.
    """
    buffers = tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), state)
    reason = _refusal(tree.leaves(buffers)) if use_cuda_graph else "not asked for"
    if not reason:
        try:
            return _as_graph(fn, buffers)
        except StateMismatchError:
            raise
        except Exception as error:
            reason = _first(error)
            _pools.pop(torch.cuda.current_device(), None)
            buffers = tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), state)
    if strict:
        raise CaptureError(reason)
    called = partial(CapturedStep, replay_mode="none", fallback_reason=reason, n_graphs=0)
    return called(state=buffers, step=_copying(fn, buffers), capture_ms=0.0, fn=fn)


class StateMismatchError(CaptureError):
    """A step whose new state does not fit the old one's buffers."""


def clear_graph_pools() -> None:
    """Let captures to come start from an empty pool; those that exist keep theirs."""
    _pools.clear()


def with_capture(record: StrategyRecord, captured: CapturedStep[Any, Any]) -> StrategyRecord:
    """The record of a strategy with how its step is replayed, and why not as a graph where there is a GPU."""
    failed = captured.replay_mode == "none" and record.device.startswith("cuda")
    failure = Failure(
        name="manual graph",
        error_type="CaptureError",
        message=captured.fallback_reason,
        torch_version=torch.__version__,
    )
    failures = (*record.failures, failure) if failed else record.failures
    return dataclasses.replace(record, replay_mode=captured.replay_mode, failures=failures)


def _refusal(leaves: list[Tensor]) -> str:
    """Why no graph is tried; empty where one may be."""
    devices = {x.device for x in leaves}
    if not any(d.type == "cuda" for d in devices):
        return "no CUDA tensor in the state"
    if len(devices) > 1:
        return f"the state lies on several devices: {', '.join(sorted(map(str, devices)))}"
    return ""


def _as_graph(fn: Callable[[S], tuple[S, O]], buffers: S) -> CapturedStep[S, O]:
    device = torch.cuda.current_device()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _check(buffers, *fn(buffers))  # compiles, loads kernels and sets their memory aside
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    pool = _pools.setdefault(device, torch.cuda.graph_pool_handle())
    start = time.perf_counter()
    # Another thread that allocates or pins memory meanwhile would break a capture in the default, global mode.
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        out = _body(fn, buffers)
    capture_ms = 1e3 * (time.perf_counter() - start)
    step = partial(_launched, graph, out, (fn, buffers))
    replayed = partial(CapturedStep, replay_mode="manual graph", fallback_reason="", n_graphs=1)
    return replayed(state=buffers, step=step, capture_ms=capture_ms, fn=fn)


def _launched(graph: torch.cuda.CUDAGraph, out: O, kept: Any) -> O:
    """What the graph gives; `kept` is all that it reads where that lay when captured, alive as long as the step is."""
    graph.replay()
    return out


def _body(fn: Callable[[S], tuple[S, O]], buffers: S) -> O:
    try:
        new, out = fn(buffers)
        return _write_back(buffers, new, out)
    except Exception as error:  # named here: the end of a broken capture raises another one
        raise CaptureError(_why(error)) from error


def _copying(fn: Callable[[S], tuple[S, O]], buffers: S) -> Callable[[], O]:
    def step() -> O:
        new, out = fn(buffers)
        _check_fits(buffers, new, StateMismatchError)
        return _write_back(buffers, new, out)

    return step


def _write_back(old: Any, new: Any, out: Any = ()) -> Any:
    """Copy `new` over `old`; returns `out`, none of which then shares memory with `old`.

    A new leaf that is a view of some old one (two leaves swapped, rotated, passed through) is cloned before any is
    overwritten; one that is the very leaf that it replaces is left alone.
    """
    homes = {x.untyped_storage().data_ptr() for x in tree.leaves(old)}

    def apart(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in homes else x

    out = tree.map(apart, out)
    moved = [(a, b) for a, b in zip(tree.leaves(old), tree.leaves(new)) if not _same(a, b)]
    if moved:
        into, values = zip(*((a, apart(b)) for a, b in moved))
        torch._foreach_copy_(list(into), list(values))  # pyright: ignore[reportPrivateImportUsage]
    return out


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.numel() > 0


def _check_fits(old: Any, new: Any, error: type[Exception]) -> None:
    if tree.structure(old) != tree.structure(new) and tree.paths(old) != tree.paths(new):
        names = tree.paths(old)
        raise error(f"the step changes the structure of the state: want leaves {names}, got {tree.paths(new)}")
    for i, (a, b) in enumerate(zip(tree.leaves(old), tree.leaves(new))):
        want, got = (a.dtype, a.shape, a.device), (b.dtype, b.shape, b.device)
        if want != got:
            raise error(f"the step changes {tree.paths(old)[i]}: want {_kind(*want)}, got {_kind(*got)}")


def _kind(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _check(buffers: Any, new: Any, out: Any) -> None:
    _check_fits(buffers, new, StateMismatchError)
    device = tree.leaves(buffers)[0].device
    for name, x in zip(tree.paths(out), tree.leaves(out)):
        if x.device != device:
            raise CaptureError(f"output {name} is on {x.device}, want {device}: a graph cannot write to the host")


def _first(error: BaseException) -> str:
    """What broke first: the end of a broken capture raises an error of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CaptureError):
        cause = cause.__context__
    return str(cause) if cause is not None else _why(error)


def _why(error: BaseException) -> str:
    """A line that says what kept `fn` from being captured, and where."""
    line = (str(error).strip().splitlines() or [""])[0]
    if "enerator" in line or "offset increment" in line.lower():
        line = f"it draws from a torch.Generator that the graph does not know ({line})"
    elif "captur" in line.lower():
        line = f"it waits for the GPU, or copies from or to the host ({line})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    ours = [f for f in frames if "site-packages" not in f.filename and "<" not in f.filename]
    where = f", in {_near(ours[-1].filename)}:{ours[-1].lineno}: {ours[-1].line}" if ours else ""
    return f"{type(error).__name__}: {line}{where}"


def _near(name: str) -> str:
    """A file as seen from the current folder, if it is in there."""
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
