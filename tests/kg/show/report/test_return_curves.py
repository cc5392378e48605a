"""Curves of returns draw the tables that they return."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from funcppo.kg.show.report import figures
from funcppo.kg.show.report.figures import RunReturns
from funcppo.rl.run import Returns


def run_of(name, env, n_seeds, shift=0.0):
    """A run whose seeds return their number, plus 100 at the second evaluation."""
    seeds = np.arange(float(n_seeds))[:, None]
    greedy = seeds + np.array([[0.0, 100.0]]) + shift
    zeros = np.zeros(2, dtype=np.int64)
    returns = Returns(
        tuple(range(n_seeds)), np.array([10, 20]), greedy, -greedy, zeros
    )
    return RunReturns(name, env, returns)


def test_a_curve_is_the_interquartile_mean_with_its_interval():
    got = figures.curve(run_of("a", "CartPole-v1", 8), "greedy")
    assert got.steps.tolist() == [10, 20] and got.n_seeds == 8
    np.testing.assert_allclose(got.iqm, [3.5, 103.5])
    assert (got.low < got.iqm).all() and (got.iqm < got.high).all()
    np.testing.assert_allclose(got.high[1] - got.high[0], 100.0)


def test_one_seed_has_no_band():
    got = figures.curve(run_of("a", "CartPole-v1", 1), "sampled")
    assert got.low.tolist() == got.iqm.tolist() == got.high.tolist()


def test_runs_are_drawn_beside_each_other_and_environments_below():
    runs = [
        run_of("a_$x$", "CartPole-v1", 3),
        run_of("b<&", "CartPole-v1", 2, shift=5.0),
        run_of("c", "Pendulum-v1", 2),
    ]
    picture = figures.draw_return_curves(runs)
    panels = picture.figure.axes
    assert [axes.get_title() for axes in panels] == [
        "CartPole-v1, greedy",
        "CartPole-v1, sampled",
        "Pendulum-v1, greedy",
        "Pendulum-v1, sampled",
    ]
    assert [len(axes.lines) for axes in panels] == [2, 2, 1, 1]
    names = [(one.run, one.policy) for one in picture.table]
    assert names[:3] == [
        ("a_$x$", "greedy"),
        ("a_$x$", "sampled"),
        ("b<&", "greedy"),
    ]
    line = panels[0].lines[1]
    np.testing.assert_array_equal(line.get_ydata(), picture.table[2].iqm)
    ElementTree.fromstring(figures.to_svg(picture))
