"""Two write-backs that a compiled function gets wrong in silence: a swap, and a 0-d float64 tensor on the CPU."""

import torch


def swap(a, b):
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def count(a):
    a.copy_(a + 1)


for backend in ("eager", "aot_eager", "inductor"):
    a, b, c = (
        torch.zeros(2),
        torch.ones(2),
        torch.zeros((), dtype=torch.float64),
    )
    torch._dynamo.reset()
    torch.compile(swap, backend=backend, fullgraph=True)(a, b)
    torch.compile(count, backend=backend, fullgraph=True)(c)
    print(
        f"{backend}: a, b = {a.tolist()}, {b.tolist()}, wanted [1, 1], [0, 0]; count = {c.item()}, wanted 1.0"
    )
