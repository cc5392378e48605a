"""Draw a neighbourhood or a proof as an SVG picture of entities and facts: bounded, without script, names escaped.

Entities stand in columns, and facts are arrows from head to tail; what a rule derives is dashed. Colours are those of
the text around the picture, so that it is legible in light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.text import display

# in pixels: between columns, between rows, and around the picture
COLUMN, ROW, MARGIN = 300, 42, 12
BOX_WIDTH, BOX_HEIGHT = 160, 24
# characters of the names of an entity and a relation
NODE_CHARS, EDGE_CHARS = 20, 22
# of any other name in a picture
MAX_LABEL = 36


def label(text: str, width: int = MAX_LABEL) -> str:
    """Escape and shorten a text for a picture.

    Args:
      width: the most characters.
    """
    text = display(text)
    return text if len(text) <= width else text[: width - 1] + "…"


class Edge(NamedTuple):
    """Binary atom to draw as an arrow."""

    head: int
    tail: int
    text: str
    """The name of the relation."""
    is_derived: bool = False
    """Derived by a rule rather than a fact."""


def neighbourhood(
    center: int,
    edges: Sequence[Edge],
    limit: int = 10,
    columns: Mapping[int, int] | None = None,
) -> tuple[list[Edge], dict[int, int]]:
    """Choose the edges of an entity to draw, and the column of each entity: heads left of it, tails right of it.

    The facts that link it to another entity are one edge: the first of them, and how many more there are.

    Args:
      limit: the most neighbours on each side.
      columns: of entities that are drawn, this one among them, whose further neighbours stand on its outer side.

    Returns:
      The edges, and the column of each of their entities.
    """
    before = dict(columns or {})
    place = before.get(center, 1)
    between: dict[int, list[Edge]] = {}
    for edge in edges:
        other = edge.tail if edge.head == center else edge.head
        between.setdefault(other, []).append(edge)

    added: dict[int, int] = {}
    chosen: list[Edge] = []
    for other, found in between.items():
        is_right = found[0].head == center if place == 1 else place > 1
        column = place + (1 if is_right else -1)
        if other != center and other not in before:
            n_there = list(added.values()).count(column)
            if other not in added and n_there == limit:
                continue
            added[other] = column
        more = f" +{len(found) - 1}" if len(found) > 1 else ""
        text = label(found[0].text, EDGE_CHARS - len(more)) + more
        chosen.append(found[0]._replace(text=text))
    return chosen, {center: place} | before | added


def proof_edges(
    nodes: Iterable[tuple[Sequence[int], int | None]],
    relation_name: Callable[[int], str],
) -> tuple[list[Edge], dict[int, int]]:
    """Return the goals of a proof as edges, facts before what they derive, and the column of each entity.

    The root's head stands first; every other entity stands one column after the nearest entity that a fact links it to.
    Goals of other than two arguments are left out.

    Args:
      nodes: of each the goal (ids of the relation and the arguments, padded with 0) and its rule, None for a fact.
    """
    edges: dict[Edge, None] = {}
    for (relation, *arguments), rule in nodes:
        match [i for i in arguments if i]:
            case [head, tail]:
                text = relation_name(relation)
                edges[Edge(head, tail, text, rule is not None)] = None
            case _:
                pass
    if not edges:
        return [], {}

    # Facts lead from entity to entity, in as many rounds as there are columns.
    facts = [edge for edge in edges if not edge.is_derived]
    columns = {next(iter(edges)).head: 0}
    for column in range(len(facts)):
        for edge in facts:
            ends = edge.head, edge.tail
            for end, other in (ends, ends[::-1]):
                if columns.get(end) == column:
                    columns.setdefault(other, column + 1)
    for edge in edges:
        columns.setdefault(edge.head, 0)
        columns.setdefault(edge.tail, columns[edge.head] + 1)
    return sorted(edges, key=lambda edge: edge.is_derived), columns


def draw_neighbours(
    dataset: Dataset,
    centers: Sequence[int],
    facts_of: Callable[[int], I64[np.ndarray, "n W"]],
    link: Callable[[int], str] | None = None,
    more: Callable[[int], str | None] = lambda entity: None,
    limit: int = 10,
) -> str:
    """Return the picture of an entity with its neighbours, and those of some of these; empty without a binary fact.

    Args:
      centers: the entity, then drawn ones whose neighbours are drawn too.
      facts_of: of an entity; those of other than two arguments are left out.
      limit: the most neighbours of the first on each side; of the others half as many.
    """
    pairs: dict[frozenset[int], Edge] = {}
    columns: dict[int, int] = {}
    for center in centers:
        facts = [
            Edge(head, tail, dataset.predicates[relation - 1])
            for relation, head, tail in facts_of(center)[:, :3].tolist()
            if dataset.arities[relation - 1] == 2
        ]
        chosen, columns = neighbourhood(center, facts, limit, columns)
        for edge in chosen:
            pairs.setdefault(frozenset(edge[:2]), edge)
        limit = max(limit // 2, 1)

    name = dataset.entities[centers[0] - 1]
    title = f"{name} and its neighbours"
    return draw(
        list(pairs.values()),
        columns,
        lambda i: dataset.entities[i - 1],
        link,
        title,
        more,
    )


def draw_proof(
    dataset: Dataset,
    nodes: Iterable[tuple[Sequence[int], int | None]],
    title: str,
    link: Callable[[int], str] | None = None,
) -> str:
    """Return the picture of a proof, with a data set's names; arguments as those of `proof_edges` and `draw`."""
    dataset = dataset.shown
    edges, columns = proof_edges(nodes, lambda i: dataset.predicates[i - 1])
    return draw(edges, columns, lambda i: dataset.entities[i - 1], link, title)


def draw(
    edges: Sequence[Edge],
    columns: Mapping[int, int],
    name: Callable[[int], str],
    link: Callable[[int], str] | None = None,
    title: str = "graph",
    more: Callable[[int], str | None] = lambda entity: None,
) -> str:
    """Return the picture of some edges as SVG text; empty without an edge.

    Args:
      columns: of each entity of the edges.
      name: of an entity.
      link: the address that an entity leads to; None for no links.
      title: what the picture shows, for readers that do not see it.
      more: the address of the picture with an entity's further neighbours; None where there is none.
    """
    if not edges:
        return ""
    places = _place(columns)
    width = max(x for x, _ in places.values()) + BOX_WIDTH + MARGIN + 60
    height = max(y for _, y in places.values()) + BOX_HEIGHT + MARGIN + ROW
    # what is an image hides the links in it from readers
    role = "group" if link else "img"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="{role}" aria-label="{escape(label(title, 200))}" '
        f'class="drawing" width="{width}" height="{height}" viewBox="0 {-ROW} {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    pairs: Counter[frozenset[int]] = Counter()
    for edge in edges:
        pair = frozenset(edge[:2])
        lines.append(
            _arrow(edge, *places[edge.head], *places[edge.tail], pairs[pair])
        )
        pairs[pair] += 1
    for entity, (x, y) in places.items():
        box = (
            f'<rect x="{x}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            'fill="none" stroke="currentColor"/>'
            f'<text x="{x + BOX_WIDTH // 2}" y="{y + 4}" text-anchor="middle">'
            f"{escape(label(name(entity), NODE_CHARS))}</text>"
        )
        address = link and escape(link(entity))
        lines.append(f'<a href="{address}">{box}</a>' if link else box)
        if address := more(entity):
            what = escape(f"expand {label(name(entity), NODE_CHARS)}")
            lines.append(
                f'<a href="{escape(address)}" aria-label="{what}"><rect x="{x + BOX_WIDTH}" y="{y - 12}" width="24" '
                f'height="24" fill="none" pointer-events="all"/><text x="{x + BOX_WIDTH + 12}" y="{y + 5}" '
                'text-anchor="middle">+</text></a>'
            )
    return "\n".join([*lines, "</svg>"])


def _place(columns: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the left end and the middle height of the box of each entity, columns centred on each other."""
    members: dict[int, list[int]] = {}
    for entity, column in columns.items():
        members.setdefault(column, []).append(entity)
    n_rows = max(map(len, members.values()))
    return {
        entity: (
            MARGIN + (column - min(members)) * COLUMN,
            BOX_HEIGHT + row * ROW + (n_rows - len(entities)) * ROW // 2,
        )
        for column, entities in members.items()
        for row, entity in enumerate(entities)
    }


def _arrow(
    edge: Edge, x0: int, y0: int, x1: int, y1: int, n_before: int
) -> str:
    """Draw an edge with its text between the boxes of its head and tail, as an arc above the former ones.

    Args:
      n_before: edges between the two that are drawn.
    """
    # within a column an arc leaves and enters at the right
    start = x0 + BOX_WIDTH * (x1 >= x0)
    end = x1 + BOX_WIDTH * (x1 <= x0)
    lift = 52 * n_before + 60 * (abs(x1 - x0) > COLUMN)
    x = (start + end) / 2 + 70 * (x0 == x1)
    y = (y0 + y1) / 2 - lift
    if edge.head == edge.tail:
        y0, y1 = y0 - 6, y1 + 6
    dashes = ' stroke-dasharray="6 4"' if edge.is_derived else ""
    text_x, text_y = (start + 2 * x + end) / 4, (y0 + 2 * y + y1) / 4 - 4
    return (
        f'<path d="M{start} {y0}Q{x:g} {y:g} {end} {y1}" fill="none" stroke="currentColor" stroke-opacity=".6"'
        f'{dashes} marker-end="url(#arrow)"/>'
        f'<text x="{text_x:.0f}" y="{text_y:.0f}" text-anchor="middle" font-size="11">'
        f"{escape(label(edge.text, EDGE_CHARS))}</text>"
    )
