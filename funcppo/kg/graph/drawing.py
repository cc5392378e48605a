"""Draw a neighbourhood or a proof as an SVG picture of entities and facts: bounded, without script, names escaped.

Entities stand in columns, and facts are arrows from head to tail; what a rule derives is dashed. Colours are those of
the text around the picture, so that it is legible in light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from funcppo.core.files import Json
from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.text import display

if TYPE_CHECKING:
    import jinja2

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
    center: int, edges: Iterable[Edge], limit: int = 20
) -> list[Edge]:
    """Choose the edges of an entity to draw.

    The facts that link it to another entity are one edge: the first of them, and how many more there are.

    Args:
      limit: the most neighbours.
    """
    between: dict[int, list[Edge]] = {}
    for edge in edges:
        other = edge.tail if edge.head == center else edge.head
        between.setdefault(other, []).append(edge)

    chosen: list[Edge] = []
    for edge, *rest in list(between.values())[:limit]:
        more = f" +{len(rest)}" if rest else ""
        text = label(edge.text, EDGE_CHARS - len(more)) + more
        chosen.append(edge._replace(text=text))
    return chosen


def proof_edges(
    nodes: Iterable[tuple[Sequence[int], int | None]],
    relation_name: Callable[[int], str],
) -> list[Edge]:
    """Return the goals of a proof as edges, the root first; goals of other than two arguments are left out.

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
    return list(edges)


def columns_of(edges: Sequence[Edge], first: int) -> dict[int, int]:
    """Return the column of each entity: one after the nearest entity that a fact links it to, from the first on."""
    # Facts lead from entity to entity, in as many rounds as there are columns.
    facts = [edge for edge in edges if not edge.is_derived]
    columns = {first: 0}
    for column in range(len(facts)):
        for edge in facts:
            ends = edge.head, edge.tail
            for end, other in (ends, ends[::-1]):
                if columns.get(end) == column:
                    columns.setdefault(other, column + 1)
    for edge in edges:
        columns.setdefault(edge.head, 0)
        columns.setdefault(edge.tail, columns[edge.head] + 1)
    return columns


def draw_neighbours(
    dataset: Dataset,
    centers: Sequence[int],
    facts_of: Callable[[int], I64[np.ndarray, "n W"]],
    link: Callable[[int], str] | None = None,
    more: Callable[[int], str | None] = lambda entity: None,
    limit: int = 20,
) -> str:
    """Return the picture of an entity with its neighbours, and those of some of these; empty without a binary fact.

    Args:
      centers: the entity, then drawn ones whose neighbours are drawn too.
      facts_of: of an entity; those of other than two arguments are left out.
      limit: the most neighbours of the first; of the others half as many.
    """
    pairs: dict[frozenset[int], Edge] = {}
    for center in centers:
        facts = [
            Edge(head, tail, dataset.predicate_name(relation))
            for relation, head, tail in facts_of(center)[:, :3].tolist()
            if dataset.arities[relation - 1] == 2
        ]
        for edge in neighbourhood(center, facts, limit):
            pairs.setdefault(frozenset(edge[:2]), edge)
        limit = max(limit // 2, 1)

    name, edges = dataset.entity_name(centers[0]), list(pairs.values())
    return draw(
        edges,
        dataset.entity_name,
        link,
        f"{name} and its neighbours",
        more,
        columns_of(edges, centers[0]),
    )


def draw_proof(
    dataset: Dataset,
    nodes: Iterable[tuple[Sequence[int], int | None]],
    title: str,
    link: Callable[[int], str] | None = None,
) -> str:
    """Return the picture of a proof, with a data set's names; arguments as those of `proof_edges` and `draw`."""
    dataset = dataset.shown
    edges = proof_edges(nodes, dataset.predicate_name)
    return draw(edges, dataset.entity_name, link, title)


def draw(
    edges: Sequence[Edge],
    name: Callable[[int], str],
    link: Callable[[int], str] | None = None,
    title: str = "graph",
    more: Callable[[int], str | None] = lambda entity: None,
    columns: Mapping[int, int] | None = None,
) -> str:
    """Return the picture of some edges as SVG text; empty without an edge.

    Args:
      name: of an entity.
      link: the address that an entity leads to; None for no links.
      title: what the picture shows, for readers that do not see it.
      more: the address of the picture with an entity's further neighbours; None where there is none.
      columns: of each entity; None for `columns_of` from the head of the first edge on.
    """
    if not edges:
        return ""
    places = _place(columns or columns_of(edges, edges[0].head))
    arrows: list[Json] = []
    pairs: Counter[frozenset[int]] = Counter()
    for edge in sorted(edges, key=lambda edge: edge.is_derived):
        pair = frozenset(edge[:2])
        ends = places[edge.head], places[edge.tail]
        arrows.append(_arrow(edge, *ends, pairs[pair]))
        pairs[pair] += 1

    boxes = [
        {
            "x": x,
            "y": y,
            "name": label(name(entity), NODE_CHARS),
            "link": link and link(entity),
            "more": more(entity),
        }
        for entity, (x, y) in places.items()
    ]
    return (
        make_templates("funcppo.kg.graph")
        .get_template("drawing.svg")
        .render(
            title=label(title, 200),
            has_links=link is not None,  # what is an image hides them
            width=max(box["x"] for box in boxes) + BOX_WIDTH + MARGIN + 60,
            height=max(box["y"] for box in boxes) + BOX_HEIGHT + MARGIN + ROW,
            row=ROW,
            box_width=BOX_WIDTH,
            box_height=BOX_HEIGHT,
            arrows=arrows,
            boxes=boxes,
        )
    )


def make_templates(package: str) -> jinja2.Environment:
    """Return the environment of a package's templates, which escape every value."""
    import jinja2  # which PyTorch needs too

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _place(columns: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the left end and the middle height of the box of each entity, columns centred on each other."""
    n_rows = Counter(columns.values())
    first, most = min(n_rows), max(n_rows.values())
    places: dict[int, tuple[int, int]] = {}
    row: Counter[int] = Counter()
    for entity, column in sorted(columns.items(), key=lambda item: item[1]):
        top = BOX_HEIGHT + (most - n_rows[column]) * ROW // 2
        x = MARGIN + (column - first) * COLUMN
        places[entity] = (x, top + row[column] * ROW)
        row[column] += 1
    return places


def _arrow(
    edge: Edge, head: tuple[int, int], tail: tuple[int, int], n_before: int
) -> Json:
    """Return the path and the text of an edge between the boxes of its head and tail, an arc above the former ones.

    Args:
      head: left end and middle height of its box.
      n_before: edges between the two that are drawn.
    """
    (x0, y0), (x1, y1) = head, tail
    # within a column an arc leaves and enters at the right
    start = x0 + BOX_WIDTH * (x1 >= x0)
    end = x1 + BOX_WIDTH * (x1 <= x0)
    lift = 52 * n_before + 60 * (abs(x1 - x0) > COLUMN)
    x = (start + end) / 2 + 70 * (x0 == x1)
    y = (y0 + y1) / 2 - lift
    if edge.head == edge.tail:
        y0, y1 = y0 - 6, y1 + 6
    return {
        "path": f"M{start} {y0}Q{x:g} {y:g} {end} {y1}",
        "is_derived": edge.is_derived,
        "x": round((start + 2 * x + end) / 4),
        "y": round((y0 + 2 * y + y1) / 4 - 4),
        "text": label(edge.text, EDGE_CHARS),
    }
