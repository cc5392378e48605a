"""Proofs as values: their form, an independent checker, and their text, JSON and DOT forms.

A proof is a list of nodes, the root first. A node names its children by position, so no function here recurses and
proofs may be thousands of nodes deep. A node may be the child of several nodes: a subproof is stored once.

`check_proof` replays a proof against facts and rules. An atom is a tuple of ids padded with 0, like a row of
`KnowledgeBase.facts`. This module is plain Python and imports nothing else of the package: the checker shares no code
with the prover or with the module that builds proofs (`logic/prove.py`).

A condition of a rule's body is a leaf of its own: the negation (-p, term...) of an atom of predicate p, in which 0
stands for any constant, or a comparison, with a predicate from -2^30 down. `Conditions` tells which hold.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

Atom = tuple[int, ...]
Rules = Sequence[Sequence[Sequence[int]]]
# Functions that turn an atom into text, and the id of a rule, a predicate or a term into its text or name.
AtomFormatter = Callable[[Atom], str]
RuleFormatter = Callable[[int], str]
NameFormatter = Callable[[int], str]
# version of the JSON form; 1, without tables of names, had no version
JSON_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Node:
    """One goal of a proof and the choice that proves it."""

    goal: Atom  # ground
    # id of the rule applied; None for a fact or a condition
    rule: int | None
    # (variable of the rule, constant), ascending; empty for a fact
    substitution: tuple[tuple[int, int], ...]
    # probability of this choice under a policy; None if no policy made it
    probability: float | None
    # positions of the nodes that prove the atoms of the rule's body, in order
    children: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Proof of `nodes[0].goal`, as a list of nodes."""

    nodes: tuple[Node, ...]  # the root first


# -- checking


def check_proof(
    proof: Proof,
    facts: AbstractSet[Atom],
    rules: Rules,
    *,
    n_constants: int,
    max_height: int | None,
    leave_one_out: bool,
    object_identity: bool = False,
    holds: Callable[[Atom], bool] = lambda condition: False,
) -> list[str]:
    """Check a proof against facts and rules.

    A proof holds if the goal of every node is a fact, or the head of a rule instance whose body atoms are the goals of
    its children in order, or a condition that holds; if no node supports itself; and if every node supports the root.

    Args:
      facts: ground atoms, padded.
      rules: head first; atoms with predicate 0 are skipped, and a term above `n_constants` is a variable.
      max_height: goals at this height or above must be facts; None for no limit. The root has height 0, the children of
        a node one more than the node.
      leave_one_out: the root does not count as a fact, neither as the root nor anywhere in its proof.
      object_identity: different variables of a rule bind different constants, none of which the rule names outside of
        its comparisons.
      holds: tells whether a ground condition holds; `Conditions` does.

    Returns:
      One line for each error, with the path of its node from the root; empty if the proof holds.
    """
    errors = _position_errors(proof)
    if errors:
        return errors
    heights, users, unsupported = _order_nodes(proof)
    if unsupported:
        return [f"node {i}: supports itself or nothing" for i in unsupported]

    excluded_fact = proof.nodes[0].goal if leave_one_out else None
    for position, node in enumerate(proof.nodes):
        if node.rule is None:
            found = _leaf_errors(node, facts, excluded_fact, holds)
        else:
            found = _rule_errors(
                proof, node, node.rule, rules, n_constants, object_identity
            )
            height = heights[position]
            if max_height is not None and height >= max_height:
                found.append(
                    f"expected only facts from height {max_height}, got a rule at height {height}"
                )
        if node.probability is not None and not 0 <= node.probability <= 1:
            found.append(
                f"expected a probability from 0 to 1, got {node.probability}"
            )

        # a path is as long as the node is deep: format it for an error only
        errors += [f"{_format_path(position, users)}: {e}" for e in found]
    return errors


def _position_errors(proof: Proof) -> list[str]:
    """Return one error per node whose child positions are out of range; the root is nobody's child."""
    n_nodes = len(proof.nodes)
    if not n_nodes:
        return ["expected at least one node, got no nodes"]
    return [
        f"node {i}: expected children at positions 1 to {n_nodes - 1}, got {list(node.children)}"
        for i, node in enumerate(proof.nodes)
        if not all(0 < child < n_nodes for child in node.children)
    ]


def _order_nodes(
    proof: Proof,
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Traverse the nodes in topological order from the root (Kahn's algorithm).

    Returns:
      The greatest height at which each node is used, a parent at that height and the place among its children, and the
      nodes that support themselves or not the root.
    """
    nodes = proof.nodes
    n_open_parents = [0] * len(nodes)
    for node in nodes:
        for child in node.children:
            n_open_parents[child] += 1

    heights = [0] * len(nodes)
    users = [(0, 0)] * len(nodes)
    order = [0]
    for position in order:  # grows while it is traversed
        for ordinal, child in enumerate(nodes[position].children):
            # Parents come by ascending height, so the last one is at the greatest.
            heights[child] = heights[position] + 1
            users[child] = (position, ordinal)
            n_open_parents[child] -= 1
            if not n_open_parents[child]:
                order.append(child)

    unsupported = sorted(set(range(len(nodes))).difference(order))
    return heights, users, unsupported


def proof_height(proof: Proof) -> int:
    """Return the most rule applications on one branch of a proof."""
    heights, _, _ = _order_nodes(proof)
    by_rule = (node.rule is not None for node in proof.nodes)
    return max(
        (1 + h for h, is_rule in zip(heights, by_rule) if is_rule), default=0
    )


def _format_path(position: int, users: Sequence[tuple[int, int]]) -> str:
    """Format the path of a node: root/1/0 is the first child of the second child of the root."""
    ordinals: list[str] = []
    while position:
        position, ordinal = users[position]
        ordinals.append(str(ordinal))
    return "/".join(["root", *reversed(ordinals)])


def _leaf_errors(
    node: Node,
    facts: AbstractSet[Atom],
    excluded_fact: Atom | None,
    holds: Callable[[Atom], bool],
) -> list[str]:
    """Return the errors of a node that claims to be a fact or a condition."""
    if node.children or node.substitution:
        return ["a fact has no children and no substitution"]
    if node.goal[0] < 0:
        is_true = holds(node.goal)
        return [] if is_true else [f"{list(node.goal)} does not hold"]
    if node.goal not in facts:
        return [f"{list(node.goal)} is not a fact"]
    if node.goal == excluded_fact:
        return ["the root is used as a fact in its own proof"]
    return []


def _rule_errors(
    proof: Proof,
    node: Node,
    rule_id: int,
    rules: Rules,
    n_constants: int,
    object_identity: bool,
) -> list[str]:
    """Return the errors of a node that applies a rule: its rule id, substitution and children."""
    if not 0 <= rule_id < len(rules):
        return [f"there is no rule {rule_id}"]
    atoms = [atom for atom in rules[rule_id] if atom[0]]
    terms = {term for atom in atoms for term in atom[1:] if term}
    variables = sorted(term for term in terms if term > n_constants)

    # The substitution binds exactly the variables of the rule, each to a constant.
    pairs = list(node.substitution)
    binding = dict(pairs)
    if [variable for variable, _ in pairs] != variables:
        return [f"rule {rule_id} has the variables {variables}, got {pairs}"]
    if not all(1 <= constant <= n_constants for constant in binding.values()):
        return [
            f"expected constants from 1 to {n_constants} for variables, got {pairs}"
        ]

    # Under the substitution, the head is the node's goal and the body atoms are the goals of its children.
    goals = [node.goal, *(proof.nodes[i].goal for i in node.children)]
    if len(goals) != len(atoms):
        return [
            f"rule {rule_id} has {len(atoms) - 1} atoms in its body, got {len(goals) - 1} children"
        ]
    errors: list[str] = []
    for i, ((predicate, *arguments), goal) in enumerate(zip(atoms, goals)):
        expected = (predicate, *(binding.get(t, t) for t in arguments))
        if expected != goal:
            part = f"body atom {i - 1}" if i else "head"
            errors.append(
                f"{part} of rule {rule_id}: expected {list(expected)}, got {list(goal)}"
            )

    named = _named_constants(atoms, n_constants)
    if object_identity and not _keeps_identity(named, binding):
        errors.append(
            f"expected another constant for each variable, none of the rule's {sorted(named)}, got {pairs}"
        )
    return errors


def _named_constants(
    atoms: Iterable[Sequence[int]], n_constants: int
) -> set[int]:
    """Return the constants that a rule names outside of comparisons."""
    rows = (atom[1:] for atom in atoms if not _is_comparison(atom))
    return {t for row in rows for t in row if 0 < t <= n_constants}


def _keeps_identity(named: set[int], binding: Mapping[int, int]) -> bool:
    """Return whether no two variables have one constant, and none has one that the rule names."""
    n_distinct = len(named.union(binding.values()))
    return n_distinct == len(named) + len(binding)


def _is_comparison(atom: Sequence[int]) -> bool:
    """Return whether an atom is a comparison."""
    return atom[0] <= -(1 << 30)


# -- conditions

# a goal with a rule for it, the atoms of its body that are left, and the constants of its variables
_Row = tuple[Atom, list[Atom], tuple[Atom, ...], dict[int, int]]


class Conditions:
    """Which conditions hold: by the facts and rules, whose goals and answers are kept (tabling).

    A goal is an atom in which 0 stands for any constant.

    Args:
      facts: those of a predicate.
      comparisons: the test of two constants of each comparison, by its predicate.
      spend: is called as the work goes on; what it raises ends the work.
    """

    def __init__(
        self,
        facts: Callable[[int], Iterable[Atom]],
        rules: Rules,
        comparisons: Mapping[int, Callable[[int, int], bool]],
        n_constants: int,
        object_identity: bool = False,
        spend: Callable[[], object] = lambda: None,
    ) -> None:
        self.comparisons, self.n_constants = comparisons, n_constants
        self.object_identity, self.spend = object_identity, spend
        self.rules: dict[int, list[list[Atom]]] = defaultdict(list)
        for rule in rules:
            atoms = [tuple(atom) for atom in rule if atom[0]]
            self.rules[atoms[0][0]].append(atoms)
        self.facts = facts
        # facts by predicate and places, and by their constants there
        self.indices: dict[Atom, dict[Atom, set[Atom]]] = {}
        self.is_derivable: dict[Atom, bool] = {}  # by goal
        self.open_goals: list[Atom] = []  # of negations, each below the last

    def hold(self, condition: Atom) -> bool:
        """Return whether a ground condition holds; a negation does if no fact and no rule gives its atom.

        Goals of negations below come first. None depends on the one above, unless the program has no strata: then it
        does not hold.

        Raises:
          ValueError: more than 100 negations are in one another.
        """
        if _is_comparison(condition):
            test, terms = self.comparisons.get(condition[0]), condition[1:3]
            is_ground = all(0 < term <= self.n_constants for term in terms)
            return bool(test and len(terms) == 2 and is_ground and test(*terms))
        goal = _negated(condition)
        if goal not in self.is_derivable:
            if len(self.open_goals) > 100:
                raise ValueError(
                    "expected at most 100 negations in one another, got more"
                )
            self.is_derivable[goal] = True  # while it is not known
            self.open_goals.append(goal)
            self.is_derivable[goal] = self._solve(goal)
            self.open_goals.pop()
        return not self.is_derivable[goal]

    def _solve(self, root: Atom) -> bool:
        """Return whether a goal has an answer; each answer meets each row that waits for it once."""
        answers: dict[Atom, set[Atom]] = {}
        # the rows that wait for answers to a goal, and rows to go on with
        waiting: dict[Atom, list[tuple[Atom, _Row]]] = defaultdict(list)
        rows = self._open(root, answers)
        while rows and not answers[root]:
            self.spend()
            goal, rule, atoms, binding = rows.pop()
            if atoms:
                # The atom of which most is known comes next.
                atom = min(atoms, key=lambda a: self._bind(a, binding).count(0))
                asked = self._bind(atom, binding)
                left = tuple(other for other in atoms if other is not atom)
                if asked[0] in self.rules and asked not in answers:
                    rows += self._open(asked, answers)
                found = answers.get(asked) or self._matching_facts(asked)
                row = goal, rule, left, binding
                rows += self._longer_rows(row, atom, found)
                if asked in answers:
                    waiting[asked].append((atom, row))
            elif self._satisfies(rule, binding):
                new = {self._bind(rule[0], binding)} - answers[goal]
                answers[goal] |= new
                for pattern, row in waiting[goal]:
                    rows += self._longer_rows(row, pattern, new)
        return bool(answers[root])

    def _open(self, goal: Atom, answers: dict[Atom, set[Atom]]) -> list[_Row]:
        """Add a goal to the answers; return the rows of its rules, the first rule last, which is the next to go on."""
        answers[goal] = {*self._matching_facts(goal)}
        return [
            (goal, rule, tuple(atom for atom in rule[1:] if atom[0] > 0), row)
            for rule in reversed(self.rules.get(goal[0], ()))
            for row in self._match(rule[0], [goal], {})
        ]

    def _longer_rows(
        self, row: _Row, pattern: Atom, found: Iterable[Atom]
    ) -> list[_Row]:
        """Return the rows that atoms which match a pattern make of a row."""
        goal, rule, left, binding = row
        return [
            (goal, rule, left, longer)
            for longer in self._match(pattern, found, binding)
        ]

    def _matching_facts(self, goal: Atom) -> set[Atom]:
        """Return the facts that match a goal."""
        places = tuple(i for i, term in enumerate(goal) if term)
        index = self.indices.get((goal[0], *places))
        if index is None:
            index = self.indices[goal[0], *places] = defaultdict(set)
            for fact in self.facts(goal[0]):
                index[tuple(fact[i] for i in places)].add(fact)
        return index.get(tuple(goal[i] for i in places), set())

    def _bind(self, atom: Atom, row: Mapping[int, int]) -> Atom:
        """Return an atom with its variables replaced by their constants, or by 0 without one."""
        n = self.n_constants
        return (atom[0], *(t if t <= n else row.get(t, 0) for t in atom[1:]))

    def _match(
        self, pattern: Atom, atoms: Iterable[Atom], row: Mapping[int, int]
    ) -> Iterator[dict[int, int]]:
        """Yield a row extended by the variables of a pattern, for each atom that the pattern matches then."""
        for atom in atoms:
            found = {**row}
            for term, constant in zip(pattern[1:], atom[1:]):
                if constant and term > self.n_constants:
                    term = found.setdefault(term, constant)
                if constant and term != constant:
                    break
            else:
                yield found

    def _satisfies(self, rule: list[Atom], row: Mapping[int, int]) -> bool:
        """Return whether a row keeps object identity and satisfies the conditions of a rule."""
        if self.object_identity:
            named = _named_constants(rule, self.n_constants)
            if not _keeps_identity(named, row):
                return False
        conditions = (self._bind(atom, row) for atom in rule if atom[0] < 0)
        return all(map(self.hold, conditions))


def _negated(condition: Atom) -> Atom:
    """Return the goal of a negation."""
    return (-condition[0], *condition[1:])


# -- text, JSON and DOT


def to_text(
    proof: Proof, format_atom: AtomFormatter, format_rule: RuleFormatter
) -> str:
    """Format a proof as an indented tree, one goal a line.

    A subproof that occurs again is referred to ("as above") instead of being repeated.

    Args:
      format_atom: turns an atom into text.
      format_rule: turns the id of a rule into the rule's text.

    Returns:
      The lines, each with a newline at its end.
    """
    lines: list[str] = []
    visited: set[int] = set()
    # node, what stands before it, what stands before its children
    stack = [(0, "", "")]
    while stack:
        position, prefix, child_prefix = stack.pop()
        node = proof.nodes[position]
        is_repeated = position in visited and node.rule is not None
        visited.add(position)

        choice = (
            "as above"
            if is_repeated
            else _format_choice(node, format_rule, by="by ")
        )
        goal = format_atom(node.goal)
        lines.append("   ".join([f"{prefix}{goal}   ", choice, *_p(node)]))
        if is_repeated:
            continue

        # The first child is pushed last, to come next.
        last = len(node.children) - 1
        for i, child in reversed(list(enumerate(node.children))):
            branch = "└─ " if i == last else "├─ "
            trunk = "   " if i == last else "│  "
            stack.append((child, child_prefix + branch, child_prefix + trunk))
    return "\n".join(lines) + "\n"


def to_json(
    proof: Proof,
    format_atom: AtomFormatter,
    format_rule: RuleFormatter,
    format_predicate: NameFormatter,
    format_term: NameFormatter,
) -> str:
    """Format a proof as one JSON object, which is complete by itself.

    Args:
      format_atom: turns an atom into text, for people.
      format_rule: turns the id of a rule into the rule's text, for people.
      format_predicate: turns the id of a predicate into its name.
      format_term: turns the id of a constant or a variable into its name.

    Returns:
      {"format": 2, "nodes": [...], "predicates": {id: name}, "constants": {id: name}, "variables": {id: name}}, with
      the fields of `Node` and the texts of its goal and rule in each node. The names are those of all ids in the goals,
      [predicate, constant...] padded with 0, and the substitutions, [variable, constant] pairs.
    """
    predicates = {node.goal[0] for node in proof.nodes}
    constants = {t for node in proof.nodes for t in node.goal[1:] if t}
    variables: set[int] = set()
    nodes: list[object] = []
    for node in proof.nodes:
        constants.update(constant for _, constant in node.substitution)
        variables.update(variable for variable, _ in node.substitution)
        rule_text = None if node.rule is None else format_rule(node.rule)
        texts = {"goal_text": format_atom(node.goal), "rule_text": rule_text}
        nodes.append(asdict(node) | texts)
    document = {
        "format": JSON_FORMAT,
        "nodes": nodes,
        "predicates": {i: format_predicate(i) for i in sorted(predicates)},
        "constants": {i: format_term(i) for i in sorted(constants)},
        "variables": {i: format_term(i) for i in sorted(variables)},
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def from_json(document: Mapping[str, Any]) -> Proof:
    """Return the proof that an object of `to_json` holds, without its texts and names.

    Raises:
      ValueError: a node has not the fields of one; the message is one line that names it.
    """
    nodes: list[Node] = []
    try:
        for row in document["nodes"]:
            rule, probability = row["rule"], row["probability"]
            pairs = ((int(v), int(c)) for v, c in row["substitution"])
            predicate, *arguments = map(int, row["goal"])
            node = Node(
                goal=(predicate, *arguments),
                rule=None if rule is None else int(rule),
                substitution=tuple(pairs),
                probability=None if probability is None else float(probability),
                children=tuple(map(int, row["children"])),
            )
            nodes.append(node)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"node {len(nodes)}: expected the fields of a node, got {error!r}"
        ) from None
    return Proof(nodes=tuple(nodes))


def to_dot(
    proof: Proof, format_atom: AtomFormatter, format_rule: RuleFormatter
) -> str:
    """Format a proof as a Graphviz digraph: a box for each goal, an edge to each goal that supports it.

    Args:
      format_atom: turns an atom into text.
      format_rule: turns the id of a rule into the rule's text.

    Returns:
      The text of a DOT file.
    """
    lines = ["digraph proof {", "  node [shape=box];"]
    for position, node in enumerate(proof.nodes):
        choice = _format_choice(node, format_rule)
        label = _quote_dot(
            "\n".join([format_atom(node.goal), choice, *_p(node)])
        )
        lines.append(f"  n{position} [label={label}];")
        for child in node.children:
            lines.append(f"  n{position} -> n{child};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _p(node: Node) -> list[str]:
    """Format the probability of a node's choice, if it has one."""
    return [] if node.probability is None else [f"p={node.probability:.3g}"]


def _format_choice(node: Node, format_rule: RuleFormatter, by: str = "") -> str:
    """Format the choice that proves a goal: "fact", what makes a condition hold, or the id and text of a rule."""
    if node.rule is not None:
        return f"{by}rule {node.rule}: {format_rule(node.rule)}"
    if node.goal[0] > 0:
        return "fact"
    is_comparison = _is_comparison(node.goal)
    return "compared" if is_comparison else "no fact and no rule gives it"


def _quote_dot(label: str) -> str:
    """Quote and escape a label as a DOT string."""
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return f'"{label.translate(escapes)}"'
