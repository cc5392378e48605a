"""Cause 2: functional_call runs `forward`, other methods not. No compiler is involved; prints two lines."""

import torch
from torch.func import functional_call


class Policy(torch.nn.Linear):
    def judge(self, input, actions):
        return torch.nn.Linear.forward(self, input)[actions]


class Judge(Policy):
    forward = Policy.judge


for module in (Policy(2, 3), Judge(2, 3)):
    try:
        given = {"input": torch.ones(2), "actions": torch.tensor(1)}
        print(
            type(module).__name__,
            functional_call(module, {"weight": torch.zeros(3, 2)}, (), given),
        )
    except TypeError as error:
        print(type(module).__name__, error)
