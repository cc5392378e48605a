"""A proof as a page draws it: its goals in the order of the drawing, with marks of where subgoals end."""

from __future__ import annotations

from typing import NamedTuple

from funcppo.kg.show.serve.values import Name, Proof

# nodes that are drawn, and how deep they are nested; browsers give up at some hundreds
MAX_NODES = 300
MAX_DEPTH = 40

FACT, RULE, REPEATED, CUT, END = "fact", "rule", "repeated", "cut", "end"


class TreeRow(NamedTuple):
    """A goal, or the end of the part that the last open goal began."""

    # fact; rule: its subgoals follow up to an end; repeated: drawn before; cut: subgoals are not drawn; end
    kind: str
    relation: Name | None = None
    arguments: tuple[Name, ...] = ()
    rule: int | None = None
    rule_text: str = ""
    probability: float | None = None


_END = TreeRow(END)


def draw(proof: Proof) -> list[TreeRow]:
    """The goals of a proof in the order of the drawing, an `end` after the subgoals of each.

    A goal that is proved again by a rule is drawn once. What is too deep or too much is cut, and marked.
    """
    rows: list[TreeRow] = []
    visited: set[int] = set()
    stack: list[tuple[int, int] | None] = [(0, 0)]
    while stack:
        place = stack.pop()
        if place is None:
            rows.append(_END)
            continue
        position, depth = place

        node = proof["nodes"][position]
        kind = RULE
        if node["rule"] is None:
            kind = FACT
        elif position in visited:
            kind = REPEATED
        elif depth >= MAX_DEPTH or len(rows) >= MAX_NODES:
            kind = CUT
        visited.add(position)

        rows.append(_make_row(proof, position, kind))
        if kind == RULE:
            stack.append(None)
            children = reversed(node["children"])
            stack += [(child, depth + 1) for child in children]
    return rows


def _make_row(proof: Proof, position: int, kind: str) -> TreeRow:
    """A goal with its names."""
    node = proof["nodes"][position]
    predicate, *arguments = node["goal"]
    return TreeRow(
        kind=kind,
        relation={
            "id": predicate,
            "name": proof["predicates"][str(predicate)],
        },
        arguments=tuple(
            {"id": term, "name": proof["constants"][str(term)]}
            for term in arguments
            if term
        ),
        rule=node["rule"],
        rule_text=node["rule_text"] or "",
        probability=node["probability"],
    )
