"""Where "Cannot access storage of TensorWrapper" comes from, which the report saw in approaches 6 and 7.

A tensor under an eager `torch.func` transform has no storage: whatever reads it raises. No combination of backend,
form and setting tried here does so by itself. Arguments name the backends to try; all by default.
"""

import copy
import itertools
import sys
from functools import partial

import torch
from torch.func import functional_call, grad

MESSAGE = "Cannot access storage of TensorWrapper"
BACKENDS = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
OPTIONS = (
    {},
    {"fullgraph": True},
    {"dynamic": True},
    {"dynamic": False, "fullgraph": True},
    {"mode": "reduce-overhead"},
)
SETTINGS = (
    "suppress_errors",
    "inline_inbuilt_nn_modules",
    "capture_scalar_outputs",
    "compiled_autograd",
    "trace_autograd_ops",
    "capture_func_transforms",
)

module = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
)
x = torch.ones(3, 4)


def loss(params, net=module):
    """The mean square of a network's output."""
    return functional_call(net, params, (x,)).square().mean()


def transform(form, **options):
    """The gradient, by an eager transform over something compiled."""
    if form == "function":
        target = torch.compile(loss, **options)
    else:
        net = torch.compile(copy.deepcopy(module), **options)
        target = lambda params: loss(params, net)
    prefix = "" if form == "function" else "_orig_mod."
    params = {
        prefix + name: p.detach() for name, p in module.named_parameters()
    }
    return grad(target)(params)


def said(run) -> str:
    """What a call raises, in one line."""
    torch._dynamo.reset()
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing raised"


detached = {name: p.detach() for name, p in module.named_parameters()}
copies = lambda params: loss(copy.deepcopy(params))
print("a copy of what is transformed:", said(lambda: grad(copies)(detached)))

config = torch._dynamo.config
settings = [None, *(name for name in SETTINGS if hasattr(config, name))]
outcomes = []
for form, backend, options, setting in itertools.product(
    ("function", "module"), sys.argv[1:] or BACKENDS, OPTIONS, settings
):
    if "mode" in options and backend != "inductor":
        continue
    with config.patch({setting: True} if setting else {}):
        outcomes.append(
            said(partial(transform, form, backend=backend, **options))
        )
raised = sum(MESSAGE in text for text in outcomes)
print(
    f"compiled functions under an eager transform: {raised} of {len(outcomes)} raise it"
)
for text in sorted(set(outcomes)):
    print(f"{outcomes.count(text):4d}  {text}")
