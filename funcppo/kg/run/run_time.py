"""The time of a run, divided over its phases: each ends when its part of the time is over, or before.

What a phase leaves of its time, later ones have. The work of a phase is planned before it starts, from what its parts
are known or measured to take; what does not fit is sampled or left out, and a note counts it.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from funcppo.core.deadline import Clock, Deadline


class RunTime:
    """The time of a run, and what its phases took.

    Attributes:
      seconds: in all; infinity for no bound.
      phases: seconds of each phase that has ended, in order.
      peak_bytes: the most memory of the process, or of the GPU, by the end of each phase.
    """

    # The share of the time that is over when a phase should end, those before it included.
    MINING = 0.4
    CHOICE = 0.54
    VALID = 0.58
    QUESTIONS = 0.67
    FIT = 0.76
    EMBEDDING = 0.82
    PPO = 0.9
    TEST = 0.95  # the rest is for what is printed and written
    SHARES = (MINING, CHOICE, VALID, QUESTIONS, FIT, EMBEDDING, PPO, TEST)

    def __init__(
        self,
        seconds: float | None,
        clock: Clock = time.monotonic,
        device: str = "cpu",
    ) -> None:
        """Begin the time.

        Args:
          seconds: in all; None for no bound.
          device: whose memory is measured.
        """
        self.seconds = math.inf if seconds is None else seconds
        self.phases: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._clock = clock
        self._device = device
        self._start = self._last = clock()

    def until(self, share: float) -> Deadline:
        """The moment when a phase should end; one that begins late has the same part of what is left, at least.

        Args:
          share: of the phase, one of the above.
        """
        before = max(s for s in (0.0, *self.SHARES) if s < share)
        part = (share - before) / (1.0 - before)
        in_time = Deadline(
            at=self._start + share * self.seconds, clock=self._clock
        )
        end = replace(in_time, at=self._start + self.seconds)
        late = end.share(part)
        return max(in_time, late, key=lambda deadline: deadline.at)

    def end_phase(self, name: str, *, is_set: bool = False) -> None:
        """Record the seconds since the last phase ended.

        Args:
          is_set: the user has set the work of the phase, which therefore does not count.
        """
        # Imported here, because help texts read this module and PyTorch takes seconds.
        from funcppo.runtime import memory

        now = self._clock()
        seconds = now - self._last
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.peak_bytes[name] = memory.peak_bytes(self._device)
        self._last = now
        if is_set:
            self._start += seconds
