"""Cause 2: functional_call runs `forward`, other methods not. No compiler is involved; prints two lines."""

import torch
from torch.func import functional_call


class Policy(torch.nn.Linear):
    def judge(self, input, actions):
        return self(input)[actions]


class Judge(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, input, actions):
        return self.policy.judge(input, actions)


policy, given = Policy(2, 3), {"input": torch.ones(2), "actions": torch.tensor(1)}
for module, key in ((policy, "weight"), (Judge(policy), "policy.weight")):
    try:
        print(type(module).__name__, functional_call(module, {key: torch.zeros(3, 2)}, (), given))
    except TypeError as error:
        print(type(module).__name__, error)
