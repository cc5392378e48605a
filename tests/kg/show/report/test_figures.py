"""Pictures draw the tables that they return; SVG of hostile names is well-formed and asks for nothing."""

import dataclasses
import itertools
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib.legend
import numpy as np
import pytest

from funcppo.kg.show.report import figures, tables
from funcppo.kg.show.report.tables import (
    LearntWeights,
    MovedRelation,
    MovedWeight,
)
from tests.kg.show.report.test_return_curves import run_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=[1, 2], ids=["one run", "two runs"])
def shown(request, reports):
    """Small runs, as if training had moved some weights: it keeps the untrained ones where valid has a few queries."""
    runs = [reports[name].measured for name in ("questions", "other")]
    moved = [
        MovedWeight("link", f"evidence {i}", name, "head", 0.5, i - 20.0)
        for i in range(40)
        for name in ("<b>likes</b>", '$p$ "q"', "rel\u202e x")
    ]
    learnt = LearntWeights(
        len(moved), tuple(moved), (MovedRelation("<b>likes</b>", 40, 2.5),)
    )
    return [
        dataclasses.replace(run, learnt=learnt) for run in runs[: request.param]
    ]


def equal(a, b):
    """Whether two tables, or tuples of them, hold the same numbers."""
    return tables.to_json(a) == tables.to_json(b)


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("ranks", tables.ranks),
        ("relations", tables.relations),
        ("gains", tables.gains),
        ("reliability", tables.calibrations),
        ("rules", tables.rules),
        ("weights", tables.weights),
    ],
)
def test_a_picture_returns_the_table_that_it_draws(shown, kind, table):
    picture = figures.draw(kind, shown)
    assert equal(picture.table, table(shown))


def test_bars_of_gains_and_weights_are_the_differences(shown):
    picture = figures.draw("gains", shown)
    widths = [bar.get_width() for bar in picture.figure.axes[0].patches]
    np.testing.assert_allclose(widths, picture.table.gain.mean(0))
    picture = figures.draw("weights", shown)
    single, by_relation = picture.table
    for axes, values in zip(
        picture.figure.axes,
        (single.after - single.before, by_relation.distance),
    ):
        widths = [bar.get_width() for bar in axes.patches]
        np.testing.assert_allclose(widths, values[: figures.MAX_BARS])


def test_curves_draw_mean_and_band(shown):
    picture = figures.draw("curves", shown)
    names = [curve.name for curve in picture.table]
    assert names == [name for name, _ in figures.CURVES]
    axes = picture.figure.axes[0]
    curve = picture.table[0]
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), curve.update)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), curve.value.mean(0))


def test_the_band_of_a_single_update_can_be_seen(shown):
    """It is a bar from low to high; a filled area would have no width."""
    runs = [
        dataclasses.replace(run, log=({"update": 0, "valid_metric": metric},))
        for run, metric in zip(shown, (0.2, 0.6))
    ]
    picture = figures.draw("curves", runs)
    drawn = tables.band(picture.table[0].value)
    (bars,) = picture.figure.axes[0].collections
    (bar,) = bars.get_segments()
    np.testing.assert_allclose(bar, [[0, drawn.low[0]], [0, drawn.high[0]]])
    assert (drawn.high[0] > drawn.low[0]) == (len(shown) > 1)
    assert bars.get_linewidth()[0] > 0


def test_an_axis_has_no_offset_and_shows_no_rounding_as_a_change(shown):
    log = [
        {"update": i, "valid_metric": 0.897 + i * 1e-6, "loss": 1 + i * 1e-9}
        for i in range(3)
    ]
    runs = [dataclasses.replace(run, log=tuple(log)) for run in shown]
    picture = figures.draw("curves", runs)
    picture.figure.canvas.draw()
    metric, loss = picture.figure.axes[:2]
    low, high = metric.get_ylim()
    assert high - low == pytest.approx(figures.MIN_METRIC_RANGE)
    for axes in (metric, loss):
        assert axes.yaxis.get_offset_text().get_text() == ""


def test_bars_of_ranks_are_the_shares(shown):
    picture = figures.draw("ranks", shown)
    heights = [bar.get_height() for bar in picture.figure.axes[0].patches]
    drawn = np.concatenate(
        [picture.table.untrained.mean(0), picture.table.trained.mean(0)]
    )
    np.testing.assert_allclose(heights, drawn)


@pytest.mark.parametrize("kind", figures.KINDS)
def test_svg_holds_hostile_names_as_text(shown, kind):
    picture = figures.draw(kind, shown)
    for text in (
        figures.to_svg(picture).decode(),
        figures.to_inline_svg(picture, kind, 'a "title" <x>'),
    ):
        root = ElementTree.fromstring(text)
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert not tags & {"script", "image", "foreignObject", "b", "metadata"}
        for element in root.iter():
            for key, value in element.attrib.items():
                assert not key.lower().startswith("on")
                assert "http" not in value
    if kind == "relations":
        texts = {element.text for element in root.iter(f"{SVG}text")}
        assert {"<b>likes</b>", '$p$ "q"', "rel\\u202e x"} <= texts


def test_inline_pictures_share_no_ids_and_have_the_colour_of_the_page(shown):
    ids = []
    for kind in ("ranks", "rules"):
        text = figures.to_inline_svg(figures.draw(kind, shown), kind, "t")
        root = ElementTree.fromstring(text)
        own = [e.get("id") for e in root.iter() if e.get("id")]
        assert len(set(own)) == len(own)
        ids += own
        links = [
            v
            for e in root.iter()
            for k, v in e.attrib.items()
            if k.endswith("href")
        ]
        assert links and all(link[1:] in own for link in links)
        assert "currentColor" in text and figures.INK not in text
    assert len(set(ids)) == len(ids)


def test_png(shown):
    content = figures.to_png(figures.draw("ranks", shown))
    assert content.startswith(b"\x89PNG")


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock of Matplotlib by which whatever it times takes a minute."""
    minutes = itertools.count(0.0, 60.0)
    clock = SimpleNamespace(perf_counter=lambda: next(minutes))
    monkeypatch.setattr(matplotlib.legend, "time", clock)
    return minutes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", figures.KINDS)
def test_a_slow_machine_draws_without_a_warning(shown, kind, slow_clock):
    """Matplotlib warns of a legend that took a second to place, unless its place was asked for."""
    figures.to_svg(figures.draw(kind, shown))
    if kind == "ranks":
        assert next(slow_clock) > 0.0


@pytest.mark.filterwarnings("error")
def test_a_slow_machine_draws_returns_without_a_warning(slow_clock):
    figures.to_svg(figures.draw_return_curves([run_of("a", "CartPole-v1", 3)]))
    assert next(slow_clock) > 0.0


def test_nothing_to_draw_is_an_error_of_one_line(shown):
    run = shown[0]
    still = run.learnt._replace(weights=(), relations=())
    empty = dataclasses.replace(run, log=(), ranked={}, rules=(), learnt=still)
    for kind, words in {
        "curves": "expected lines in metrics.jsonl",
        "ranks": "expected a test split",
        "relations": "expected a test split",
        "gains": "expected a test split",
        "reliability": "expected a test split",
        "weights": "expected weights that training moved",
        "rules": "expected test queries that rules derive",
    }.items():
        with pytest.raises(ValueError, match=words):
            figures.draw(kind, [empty])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    find = figures.importlib.util.find_spec
    monkeypatch.setattr(
        figures.importlib.util,
        "find_spec",
        lambda name: None if name == "jinja2" else find(name),
    )
    with pytest.raises(
        ValueError, match=r"jinja2 \(pip install 'funcppo\[plot\]'\)"
    ):
        figures.check_packages()
