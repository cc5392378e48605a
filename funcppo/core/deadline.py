"""A moment by which work should end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]  # seconds since some moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """A moment by which work should end: what is left out then is said where it is."""

    at: float
    """On the clock; infinity for no bound."""
    clock: Clock = time.monotonic

    @property
    def seconds_left(self) -> float:
        """Seconds until the moment, not negative."""
        return max(0.0, self.at - self.clock())

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self.clock() >= self.at

    def at_most(self, seconds: float) -> Deadline:
        """The moment itself, or that in so many seconds if it is earlier."""
        at = min(self.at, self.clock() + seconds)
        return Deadline(at=at, clock=self.clock)

    def share(self, share: float) -> Deadline:
        """The moment when this share of the seconds left is over."""
        if math.isinf(self.at):
            return self
        at = self.clock() + share * self.seconds_left
        return Deadline(at=at, clock=self.clock)


NO_DEADLINE = Deadline(at=math.inf)
