"""Cause 4: an eager torch.func transform cannot see into a compiled function; the compiler can see into a transform.

With the demand for a full graph the first line is an error. Without it nothing is compiled and nothing is said.
"""

import torch
from torch._dynamo.utils import counters

loss, x = lambda w: (w * w).sum(), torch.ones(2)
compiled = lambda fn, fullgraph: torch.compile(
    fn, backend="aot_eager", fullgraph=fullgraph
)
ways = {
    "grad(compile(loss))": lambda: torch.func.grad(compiled(loss, True))(x),
    "the same, graph breaks allowed": lambda: torch.func.grad(
        compiled(loss, False)
    )(x),
    "compile(grad(loss))": lambda: compiled(torch.func.grad(loss), True)(x),
}
for name, way in ways.items():
    torch._dynamo.reset()
    counters.clear()
    try:
        print(f"{name}:", way(), "graphs", counters["stats"]["unique_graphs"])
    except torch._dynamo.exc.Unsupported as error:
        print(f"{name}:", str(error).splitlines()[0])
