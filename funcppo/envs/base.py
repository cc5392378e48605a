from typing import NamedTuple

from torch import Tensor


class Timestep(NamedTuple):
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
