"""Cause 1: Dynamo does not trace the autograd engine unless a flag, new in PyTorch 2.11, says so. Prints two lines."""

import torch

weight = torch.ones(3, requires_grad=True)
step = lambda x: torch.autograd.grad((weight * x).sum(), weight)[0]
for flag in (False, True):
    torch._dynamo.reset()
    try:
        if flag:
            torch._dynamo.config.trace_autograd_ops = True
        print(
            f"flag {flag}:",
            torch.compile(step, backend="eager", fullgraph=True)(
                torch.arange(3.0)
            ),
        )
    except (torch._dynamo.exc.Unsupported, AttributeError) as error:
        print(f"flag {flag}:", str(error).splitlines()[0])
