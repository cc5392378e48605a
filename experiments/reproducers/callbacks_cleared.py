"""torch._dynamo.reset() forgets the callbacks that others registered, and unregistering one then fails."""

import torch
from torch._dynamo.callback import callback_handler

started = []
callback = started.append
callback_handler.register_start_callback(callback)

torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
before = len(started)
torch._dynamo.reset()
torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
print(
    f"compilations told of: {before} before reset, {len(started) - before} after it, wanted 1, 1"
)
try:
    callback_handler.remove_start_callback(callback)
    print("callback removed")
except ValueError as error:
    print(f"callback not removed: {type(error).__name__}: {error}")
