"""Proofs as objects: what they are, whether they hold, and how they are shown.

A proof is a list of nodes, the root first; a node names its children by position, so no step of any function recurses
and proofs may be thousands of nodes deep. A node may be the child of several: a subproof is stored once.

An atom is a tuple of ids padded with 0, as a row of `KnowledgeBase.facts`. This module is plain Python and imports
nothing of the project, so that `check` shares no code with a prover or with what builds a proof (`logic/proof_builder.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

Atom = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One goal and how it was proved."""

    goal: Atom  # ground
    rule: int | None  # id of the rule applied; None for a fact leaf
    substitution: tuple[tuple[int, int], ...]  # (variable of the rule, constant), ascending
    probability: float | None  # of this choice, where a policy made it
    children: tuple[int, ...]  # positions of the proofs of the body's atoms, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A proof of `nodes[0].goal`."""

    nodes: tuple[Node, ...]


def check_proof(
    proof: Proof,
    facts: AbstractSet[Atom],
    rules: Sequence[Sequence[Sequence[int]]],
    *,
    n_constants: int,
    max_height: int | None,
    leave_one_out: bool,
    object_identity: bool = False,
) -> list[str]:
    """What is wrong with a proof, a line each, naming the node by its path from the root; empty when it holds.

    It holds when every node's goal is a fact or the head of an instance of a rule whose body are its children's goals
    in order, no node supports itself, and every node supports the root.

    Args:
      rules: head first; empty atoms (0) are skipped, ids above `n_constants` are variables.
      max_height: goals of this height or more are facts; None for any.
      leave_one_out: the root is no fact leaf, there or anywhere in its proof.
      object_identity: different variables of a rule bind different constants.
    """
    height, path, errors = _order(proof)
    if errors:
        return errors
    for at, node in enumerate(proof.nodes):
        wrong = []
        if node.rule is not None:
            wrong += _rule_errors(proof, node, rules, n_constants)
            if max_height is not None and height[at] >= max_height:
                wrong.append(f"a rule at height {height[at]}, want facts only from {max_height}")
            if object_identity and len({constant for _, constant in node.substitution}) < len(node.substitution):
                wrong.append(f"want a constant for each variable of its own, got {list(node.substitution)}")
        elif node.children or node.substitution:
            wrong.append("a fact has no children and no substitution")
        elif node.goal not in facts:
            wrong.append(f"{list(node.goal)} is not a fact")
        elif leave_one_out and node.goal == proof.nodes[0].goal:
            wrong.append("the root is used as a fact in its own proof")
        if node.probability is not None and not 0 <= node.probability <= 1:
            wrong.append(f"probability {node.probability}, want 0 to 1")
        errors += [f"{path(at)}: {text}" for text in wrong]
    return errors


def _rule_errors(proof: Proof, node: Node, rules: Sequence[Sequence[Sequence[int]]], n_constants: int) -> list[str]:
    """What is wrong with a node that applies a rule, seen beside its children."""
    assert node.rule is not None
    if not 0 <= node.rule < len(rules):
        return [f"there is no rule {node.rule}"]
    atoms = [atom for atom in rules[node.rule] if atom[0]]
    binding = dict(node.substitution)
    variables = sorted({t for atom in atoms for t in atom[1:] if t > n_constants})
    if [variable for variable, _ in node.substitution] != variables:
        return [f"rule {node.rule} has the variables {variables}, got {list(node.substitution)}"]
    if not all(1 <= constant <= n_constants for constant in binding.values()):
        return [f"want constants from 1 to {n_constants} for variables, got {list(node.substitution)}"]
    instance = [(atom[0], *(binding[t] if t > n_constants else t for t in atom[1:])) for atom in atoms]
    proved = [node.goal, *(proof.nodes[child].goal for child in node.children)]
    if len(instance) != len(proved):
        return [f"rule {node.rule} has {len(instance) - 1} atoms in its body, got {len(proved) - 1} children"]
    part = ["head", *(f"body atom {i}" for i in range(len(instance)))]
    return [
        f"{part[i]} of rule {node.rule} is {list(want)} here, got {list(got)}"
        for i, (want, got) in enumerate(zip(instance, proved))
        if want != got
    ]


def _order(proof: Proof) -> tuple[list[int], Callable[[int], str], list[str]]:
    """The greatest height at which each node is used, its path there, and what is wrong with the graph of nodes."""
    nodes = proof.nodes
    bad = [i for i, node in enumerate(nodes) if not all(0 < c < len(nodes) for c in node.children)]
    if bad or not nodes:
        return (
            [],
            str,
            [f"node {i}: children {list(nodes[i].children)}, want positions 1 to {len(nodes) - 1}" for i in bad]
            or ["no nodes"],
        )
    waiting, height, user = [0] * len(nodes), [0] * len(nodes), [(0, 0)] * len(nodes)
    for node in nodes:
        for child in node.children:
            waiting[child] += 1
    ready = [0]
    for at in ready:
        for ordinal, child in enumerate(nodes[at].children):
            height[child], user[child] = height[at] + 1, (at, ordinal)  # the last user is the one of greatest height
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    lost = sorted(set(range(len(nodes))) - set(ready))
    return height, lambda at: _path(at, user), [f"node {i}: supports itself or nothing" for i in lost]


def _path(at: int, user: Sequence[tuple[int, int]]) -> str:
    """root/1/0 is the first child of the second child of the root."""
    steps = []
    while at:
        at, ordinal = user[at]
        steps.append(str(ordinal))
    return "/".join(["root", *reversed(steps)])


# -- showing


def to_text(proof: Proof, format_atom: Callable[[Atom], str], format_rule: Callable[[int], str]) -> str:
    """The proof as an indented tree, a line a goal; a subproof that occurs again is referred to, not repeated.

    Args:
      show_rule: the text of the rule of that id.
    """
    lines, shown = [], set()
    stack = [(0, "", "")]  # node, what stands before it, what stands before its children
    while stack:
        at, first, rest = stack.pop()
        node = proof.nodes[at]
        again = at in shown and node.rule is not None
        how = "fact" if node.rule is None else "as above" if again else f"by rule {node.rule}: {format_rule(node.rule)}"
        probability = "" if node.probability is None else f"   p={node.probability:.3g}"
        lines.append(f"{first}{format_atom(node.goal)}      {how}{probability}")
        last = len(node.children) - 1
        for i, child in [] if again else reversed([*enumerate(node.children)]):
            stack.append((child, rest + ("├─ ", "└─ ")[i == last], rest + ("│  ", "   ")[i == last]))
        shown.add(at)
    return "\n".join(lines) + "\n"


def to_json(proof: Proof, format_atom: Callable[[Atom], str], format_rule: Callable[[int], str]) -> str:
    """The proof as one JSON object; ids are what counts, names are for the reader."""
    nodes = [
        {
            "goal": node.goal,
            "goal_text": format_atom(node.goal),
            "rule": node.rule,
            "rule_text": None if node.rule is None else format_rule(node.rule),
            "substitution": node.substitution,
            "probability": node.probability,
            "children": node.children,
        }
        for node in proof.nodes
    ]
    return json.dumps({"nodes": nodes}, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Proof:
    """The proof that `to_json` wrote; whether it holds is for `check` to say.

    Errors: ValueError, one line, naming the node that is not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"proof: not JSON: {error}") from None
    rows = value.get("nodes") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise ValueError('proof: want an object with a list of "nodes"')
    return Proof(nodes=tuple(_node(i, row) for i, row in enumerate(rows)))


def to_dot(proof: Proof, format_atom: Callable[[Atom], str], format_rule: Callable[[int], str]) -> str:
    """The proof as a Graphviz digraph: a box a goal, an edge to each goal that proves it."""
    lines = ["digraph proof {", "  node [shape=box];"]
    for at, node in enumerate(proof.nodes):
        how = "fact" if node.rule is None else f"rule {node.rule}: {format_rule(node.rule)}"
        odds = [] if node.probability is None else [f"p={node.probability:.3g}"]
        label = "\n".join([format_atom(node.goal), how, *odds])
        lines.append(f"  n{at} [label={_quoted(label)}];")
        lines += [f"  n{at} -> n{child};" for child in node.children]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(label: str) -> str:
    """A string of the DOT language, in which a backslash starts an escape."""
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _node(at: int, row: Any) -> Node:
    row = row if isinstance(row, dict) else {}
    goal, rule, probability = row.get("goal"), row.get("rule"), row.get("probability")
    substitution, children = row.get("substitution"), row.get("children")
    fits = _integers(goal) and bool(goal) and _integers(children) and isinstance(substitution, list)
    fits = fits and all(_integers(pair) and len(pair) == 2 for pair in substitution)
    fits = fits and _integers([] if rule is None else [rule])
    if not fits or not (probability is None or (type(probability) in (float, int) and abs(probability) < 1e300)):
        raise ValueError(f"proof: node {at}: want goal, rule, substitution, children as integers; probability")
    return Node(
        goal=tuple(goal),
        rule=rule,
        substitution=tuple((variable, constant) for variable, constant in substitution),
        probability=None if probability is None else float(probability),
        children=tuple(children),
    )


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)
