"""Exceptions in one line, and the four causes behind those of the report."""

from __future__ import annotations

from experiments.paths import ROOT

CAUSES = {
    "autograd engine not traced": (
        "Tensor.backward()",
        "torch.autograd.grad",
        "marked as skipped",
        "trace_autograd_ops",
    ),
    "functional_call reaches forward only": (
        "unexpected keyword argument 'actions'",
        "Unexpected keyword arguments: ['actions']",
        "failed to bind arguments",
    ),
    "in-place write over what backward needs": (
        "modified by an inplace operation",
    ),
    "eager transform over a compiled function": (
        "requires the function to be inlined by dynamo",
        "Unsupported functorch tracing attempt",
        "from eager mode is not supported",
    ),
    "no such option": ("unexpected keyword argument 'trace_",),
}


def describe(error: BaseException, dtype: str) -> dict[str, str]:
    """Class, first line and cause of an exception; of the one inside, where a compiler only passes it on."""
    text = str(error)
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return {
        "type": type(error).__name__,
        "message": first_line(str(error)).replace(f"{ROOT}/", ""),
        "cause": cause(text),
        "dtype": dtype,
    }


def first_line(text: str) -> str:
    """The first line that says something, at most 200 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def cause(text: str) -> str:
    """Which of the causes a message speaks of; empty where it is none of them."""
    return next(
        (
            name
            for name, signs in CAUSES.items()
            if any(sign in text for sign in signs)
        ),
        "",
    )
