"""Returns of runs of `funcppo rl` over environment steps: the interquartile mean over seeds, its interval as a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from funcppo.core.types import F64, I64
from funcppo.kg.show.report.figures import COLOURS, Picture, new_figure, style
from funcppo.kg.show.report.names import label
from funcppo.rl.run import POLICIES, Returns, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = 2.6
MAX_MARKED_POINTS = 30  # a line through few points hides where they are


class RunReturns(NamedTuple):
    """The evaluations of a run."""

    name: str  # of its folder
    env: str
    returns: Returns


class ReturnCurve(NamedTuple):
    """What is drawn of a run and one of its policies."""

    run: str
    env: str
    policy: str  # greedy or sampled
    n_seeds: int
    steps: I64[np.ndarray, "E"]  # environment steps of each seed
    iqm: F64[np.ndarray, "E"]
    low: F64[np.ndarray, "E"]
    high: F64[np.ndarray, "E"]


def curve(run: RunReturns, policy: str) -> ReturnCurve:
    """The interquartile mean over seeds and its interval of 95 % at each evaluation."""
    returns: F64[np.ndarray, "K E"] = getattr(run.returns, policy)
    estimates = [estimate(column[:, None]) for column in returns.T]
    iqm, low, high = np.array(estimates).T
    return ReturnCurve(
        run=run.name,
        env=run.env,
        policy=policy,
        n_seeds=len(returns),
        steps=run.returns.steps,
        iqm=iqm,
        low=low,
        high=high,
    )


def draw(runs: Sequence[RunReturns]) -> Picture:
    """Draw the curves of some runs, a row of panels for each environment and a panel for each policy."""
    curves = [curve(run, policy) for run in runs for policy in POLICIES]
    envs = list(dict.fromkeys(run.env for run in runs))
    with style():
        figure = new_figure(0.4 + PANEL_INCHES * len(envs))
        panels = figure.subplots(len(envs), len(POLICIES), squeeze=False)
        for row, env in zip(panels, envs):
            for axes, policy in zip(row, POLICIES):
                shown = [
                    c for c in curves if (c.env, c.policy) == (env, policy)
                ]
                _draw_panel(axes, shown)
                axes.set_title(f"{env}, {policy}", fontsize=9)
            row[0].set_ylabel("return")
            row[0].legend(frameon=False, fontsize=8, loc="best")
        figure.supxlabel("environment steps of each seed", fontsize=9)
    return Picture(figure, tuple(curves))


def _draw_panel(axes: Axes, curves: Sequence[ReturnCurve]) -> None:
    """Draw some curves over each other."""
    for i, one in enumerate(curves):
        # The first colour is a grey, for what others are compared with.
        colour = COLOURS[1:][i % len(COLOURS[1:])]
        axes.plot(
            one.steps,
            one.iqm,
            color=colour,
            label=f"{label(one.run)}, {one.n_seeds} seeds",
            marker="o" if len(one.steps) <= MAX_MARKED_POINTS else None,
            markersize=3,
        )
        axes.fill_between(
            one.steps, one.low, one.high, color=colour, alpha=0.2, linewidth=0
        )
