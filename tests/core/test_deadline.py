"""A moment by which work should end."""

from __future__ import annotations

import math

from funcppo.core.host import NO_DEADLINE, Deadline


def test_a_deadline_is_over_at_its_moment():
    now = [10.0]
    deadline = Deadline(at=14.0, clock=lambda: now[0])
    assert deadline.seconds_left == 4.0 and not deadline.is_over
    half = deadline.share(0.5)
    assert half.at == 12.0 and half.seconds_left == 2.0
    assert deadline.at_most(1.0).at == 11.0
    assert deadline.at_most(9.0).at == 14.0
    now[0] = 14.0
    assert deadline.is_over and deadline.seconds_left == 0.0
    now[0] = 20.0
    assert deadline.seconds_left == 0.0 and deadline.share(0.5).is_over


def test_without_a_deadline_nothing_is_over():
    assert NO_DEADLINE.seconds_left == math.inf
    assert NO_DEADLINE.share(0.1) is NO_DEADLINE
    assert not NO_DEADLINE.is_over
