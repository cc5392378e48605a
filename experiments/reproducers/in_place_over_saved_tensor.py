"""Cause 3: tanh keeps its output for backward and `h += x` overwrites it. No compiler is involved. Prints two lines."""

import torch

x = torch.ones(2, requires_grad=True)
for in_place in (True, False):
    h = torch.tanh(x)
    if in_place:
        h += x
    try:
        print(
            f"in place {in_place}:",
            torch.autograd.grad((h if in_place else h + x).sum(), x)[0],
        )
    except RuntimeError as error:
        print(f"in place {in_place}:", str(error).splitlines()[0])
