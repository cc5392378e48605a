"""The trials of a search: their returns over each of the numbers that were searched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from funcppo.core.types import F64, Bool
from funcppo.kg.show.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    Picture,
    new_figure,
    style,
)

NOT_SEARCHED = ("trial", "steps", "return")  # the other columns of the table


class Trials(NamedTuple):
    """The trials of a search, the best first."""

    names: tuple[str, ...]  # of what was searched
    values: F64[np.ndarray, "K N"]
    returns: F64[np.ndarray, "K"]
    is_complete: Bool[np.ndarray, "K"]  # trained as long as the best
    is_published: Bool[np.ndarray, "K"]  # the settings without a change


def table(rows: Sequence[dict[str, Any]]) -> Trials:
    """The trials in the results of a search, `rl.search.trial_rows`."""
    names = tuple(name for name in rows[0] if name not in NOT_SEARCHED)
    steps = np.array([row["steps"] for row in rows])
    return Trials(
        names=names,
        values=np.array([[row[name] for name in names] for row in rows]),
        returns=np.array([row["return"] for row in rows], dtype=np.float64),
        is_complete=steps == steps.max(),
        is_published=np.array([row["trial"] == 0 for row in rows]),
    )


def draw(rows: Sequence[dict[str, Any]]) -> Picture:
    """Draw a panel for each number: trials to the end, those given up before it, and the published settings."""
    trials = table(rows)
    groups = (
        ("given up", ~trials.is_complete, GREY, "o"),
        ("trained to the end", trials.is_complete, BLUE, "o"),
        ("settings as they are", trials.is_published, ORANGE, "x"),
    )

    with style():
        figure = new_figure(3.0)
        panels = figure.subplots(1, len(trials.names), sharey=True)
        for i, (axes, name) in enumerate(
            zip(np.atleast_1d(panels), trials.names)
        ):
            for text, rows_shown, colour, marker in groups:
                axes.plot(
                    trials.values[rows_shown, i],
                    trials.returns[rows_shown],
                    marker,
                    color=colour,
                    label=text,
                    markersize=5,
                )

            _set_scale(axes, trials.values[:, i])
            axes.set_xlabel(name)

        np.atleast_1d(panels)[0].set_ylabel("mean sampled return")
        handles = np.atleast_1d(panels)[0].get_legend_handles_labels()
        figure.legend(
            *handles, loc="outside upper center", ncols=3, frameon=False
        )
    return Picture(figure, trials)


def _set_scale(axes: Any, values: F64[np.ndarray, "K"]) -> None:
    """A logarithmic axis with three plain numbers: a range may have no power of ten, and powers no room."""
    is_positive = bool((values > 0).all())
    spaced = np.geomspace if is_positive else np.linspace
    axes.set_xscale("log" if is_positive else "symlog")
    axes.set_xticks(np.unique(spaced(values.min(), values.max(), 3)))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:.2g}")
