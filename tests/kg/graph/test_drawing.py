"""Pictures: every fact that is chosen is drawn, names are escaped, columns follow the facts."""

import xml.etree.ElementTree as ElementTree

from funcppo.kg.graph.drawing import (
    Edge,
    columns_of,
    draw,
    neighbourhood,
    proof_edges,
)
from tests.kg.show.graphs import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    root = ElementTree.fromstring(picture)
    return [text.text for text in root.iter(f"{SVG}text")]


def test_a_neighbourhood_has_each_neighbour_once_and_is_bounded():
    edges = [Edge(1, tail, "to") for tail in range(2, 20)]
    edges += [Edge(1, 2, "also"), Edge(30, 1, "from"), Edge(1, 1, "self")]
    chosen = neighbourhood(1, edges, limit=5)
    assert [edge.text for edge in chosen[:2]] == ["to +1", "to"]
    assert columns_of(chosen, 1) == {1: 0} | dict.fromkeys(range(2, 7), 1)
    chosen = neighbourhood(1, edges, limit=30)
    assert len(chosen) == 18 + 2
    chosen += neighbourhood(30, [Edge(31, 30, "x"), Edge(30, 1, "from")])
    columns = columns_of(chosen, 1)
    assert (columns[1], columns[2], columns[30], columns[31]) == (0, 1, 1, 2)


def test_a_proof_is_its_facts_in_a_row_and_what_they_derive():
    nodes = [
        ((1, 10, 13, 0), 0),
        ((2, 10, 11, 0), None),
        ((1, 11, 13, 0), 1),
        ((3, 12, 11, 0), None),
        ((1, 12, 13, 0), None),
        ((4, 12, 0, 0), None),
    ]
    edges = proof_edges(nodes, "_abcd".__getitem__)
    assert columns_of(edges, 10) == {10: 0, 11: 1, 12: 2, 13: 3}
    assert sum(edge.is_derived for edge in edges) == 2
    picture = draw(edges, str, title="why")
    assert sorted(texts(picture)) == sorted(
        ["10", "11", "12", "13", "b", "c", "a", "a", "a"]
    )
    assert picture.count("stroke-dasharray") == 2
    assert proof_edges([((4, 1, 0, 0), None)], str) == []
    assert draw([], str) == ""


def test_hostile_names_are_text():
    edges = [Edge(0, i, name) for i, name in enumerate(HOSTILE) if i]
    picture = draw(
        neighbourhood(0, edges, limit=30),
        HOSTILE.__getitem__,
        lambda i: f'/x?"<{i}',
        HOSTILE[0],
    )
    root = ElementTree.fromstring(picture)
    allowed = ["svg", "defs", "marker", "path", "text", "rect", "a"]
    assert {element.tag for element in root.iter()} == {
        SVG + tag for tag in allowed
    }
    assert HOSTILE[0] in root.attrib["aria-label"]
    assert len(texts(picture)) == 2 * len(HOSTILE) - 1
