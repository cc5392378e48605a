"""The picture of a search draws the table that it returns."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from funcppo.kg.show.report import figures, search_plot

ROWS = [
    {"trial": 2, "rate": 1e-3, "weight": 0.1, "steps": 20, "return": 9.0},
    {"trial": 0, "rate": 1e-4, "weight": 0.0, "steps": 20, "return": 7.0},
    {"trial": 1, "rate": 1e-2, "weight": 0.2, "steps": 10, "return": 8.0},
]


def test_trials_are_told_apart():
    table = search_plot.table(ROWS)
    assert table.names == ("rate", "weight")
    assert table.values.tolist() == [[1e-3, 0.1], [1e-4, 0.0], [1e-2, 0.2]]
    assert table.is_complete.tolist() == [True, True, False]
    assert table.is_published.tolist() == [False, True, False]


def test_each_number_has_a_panel():
    picture = search_plot.draw(ROWS)
    panels = picture.figure.axes
    assert [axes.get_xlabel() for axes in panels] == ["rate", "weight"]
    assert [axes.get_xscale() for axes in panels] == ["log", "symlog"]
    given_up, complete, _ = panels[0].lines
    assert given_up.get_ydata().tolist() == [8.0]
    assert complete.get_xdata().tolist() == [1e-3, 1e-4]
    ElementTree.fromstring(figures.to_svg(picture))


def test_labels_of_an_axis_are_plain_numbers_that_do_not_overlap():
    """On three panels, as those of a search have: a range of decades, one without a power of ten, and one with 0."""
    narrow = (0.2, 0.33, 0.21)
    rows = [row | {"clip": clip} for row, clip in zip(ROWS, narrow)]
    figure = search_plot.draw(rows).figure
    figure.canvas.draw()
    for axes in figure.axes:
        labels = [x for x in axes.get_xticklabels() if x.get_text()]
        numbers = [float(label.get_text()) for label in labels]
        assert len(set(numbers)) == len(labels) > 1
        boxes = [label.get_window_extent() for label in labels]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
