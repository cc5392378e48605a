"""Codes of reasons: from the texts and exceptions that PyTorch raises."""

from __future__ import annotations

import pytest
import torch

from funcppo.runtime import reasons
from funcppo.runtime.capture import CaptureError
from funcppo.runtime.compile import EquivalenceError
from funcppo.runtime.reasons import ReasonCode

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
    [(reasons.skip_code, SKIPPED), (reasons.recompile_code, RECOMPILED)],
    ids=["skipped", "recompiled"],
)
def test_a_text_of_pytorch_has_the_code_of_its_reason(code_of, table):
    for line in table.strip("\n").splitlines():
        text, _, code = line.rpartition(" | ")
        assert code_of(text) is ReasonCode[code], line


def unsupported() -> BaseException:
    try:
        torch.compile(
            lambda x: torch._dynamo.graph_break() or x,
            backend="eager",
            fullgraph=True,
        )(torch.zeros(1))
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
        assert reasons.failure_code(error) is code


def raised(fn):
    try:
        fn()
    except AssertionError as error:
        return error
    raise RuntimeError("nothing was raised")


def test_a_line_says_what_an_error_says_or_where_it_was_raised():
    def fail(*text):
        if text:
            raise AssertionError(*text)
        raise AssertionError

    assert reasons.error_line(raised(lambda: fail("two\n lines"))) == "two"
    of_backend = lambda: fail("backend='b' raised:\nValueError: no")
    line = reasons.error_line(raised(of_backend))
    assert line == "backend='b' raised: ValueError: no"
    line = reasons.error_line(raised(fail))
    assert line.startswith("test_reasons.py, line ")
    assert line.endswith(": raise AssertionError")
    of_dynamo = (
        '\nfrom user code:\n   File "/a/b/net.py", line 3, in f\n    g()'
    )
    line = reasons.error_line(raised(lambda: fail(of_dynamo)))
    assert line.startswith("test_reasons.py, line ")
    assert line.endswith(', from user code: File "net.py", line 3, in f g()')
    assert reasons.error_line(ValueError()) == ""
