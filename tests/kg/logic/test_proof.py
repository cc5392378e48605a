"""Laws of proofs: what is tampered with does not hold, and what is written can be read."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import random
import re
import sys

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from funcppo.kg.logic import proof as proof_
from funcppo.kg.logic import prove
from funcppo.kg.logic.proof import Proof
from tests import sld
from tests.kg.logic.proof_cases import (
    COUNTRIES,
    C,
    X,
    Y,
    Z,
    checked,
    format_atom,
    format_rule,
    make_node,
    modelled,
    programs,
    proved_by_model,
    read_proof,
)
from tests.oracles import put

# -- a worked example


def test_france_is_in_europe_because_germany_is():
    proof = prove.from_trace(
        COUNTRIES, (2, 1, 3), [("rule", 0, 0.83), ("fact", 0, 0.5)]
    )
    assert proof.nodes == (
        make_node(
            (2, 1, 3),
            rule=0,
            substitution=((X, 1), (Y, 3), (Z, 2)),
            children=(1, 2),
            probability=0.83,
        ),
        make_node((1, 1, 2), probability=0.5),
        make_node((2, 2, 3)),
    )
    assert checked(COUNTRIES, proof, max_height=1, leave_one_out=True) == []
    lost = checked(COUNTRIES, proof, facts={(1, 1, 2)})
    assert lost == ["root/1: [2, 2, 3] is not a fact"]
    rule = "locatedIn(X, Y) :- neighborOf(X, Z), locatedIn(Z, Y)"
    assert proof_.to_text(proof, format_atom, format_rule) == (
        f"locatedIn(france, europe)      by rule 0: {rule}   p=0.83\n"
        "├─ neighborOf(france, germany)      fact   p=0.5\n"
        "└─ locatedIn(germany, europe)      fact\n"
    )


# -- what is tampered with does not hold


def changes(program, node, at, n_nodes, other):
    """Every change of one node that is offered, by name: the fields that it replaces."""
    substitution, children = node.substitution, node.children
    if node.rule is None:
        yield "fact", dict(goal=other)
        yield "fact with a child", dict(children=(n_nodes - 1,))
        yield "fact by a rule", dict(rule=0)
        return
    yield "goal", dict(goal=other)
    for rule in {-1, *range(len(program.rules) + 1)} - {node.rule}:
        yield "rule", dict(rule=rule)
    for i, (variable, constant) in enumerate(substitution):
        for value in set(range(C + 2)) - {constant}:
            yield (
                "binding",
                dict(
                    substitution=(
                        *substitution[:i],
                        (variable, value),
                        *substitution[i + 1 :],
                    )
                ),
            )
        yield (
            "binding twice",
            dict(substitution=(*substitution, (variable, constant))),
        )
        yield (
            "no binding",
            dict(substitution=(*substitution[:i], *substitution[i + 1 :])),
        )
    yield "a binding more", dict(substitution=(*substitution, (99, 1)))
    for i in range(len(children)):
        yield (
            "missing child",
            dict(children=(*children[:i], *children[i + 1 :])),
        )
        yield "cycle", dict(children=(*children[:i], at, *children[i + 1 :]))
    yield "extra child", dict(children=(*children, n_nodes - 1))
    if len(set(children)) == 2:
        yield "swapped children", dict(children=children[::-1])


def proves_the_same(program, nodes, node):
    """Whether a changed node is another instance of a rule, or another fact, that proves its goal after all."""
    if node.rule is None:
        return (
            not node.children
            and not node.substitution
            and node.goal in program.fact_set
        )
    if not 0 <= node.rule < len(program.rules):
        return False
    clause, theta = program.rules[node.rule], dict(node.substitution)
    same_variables = sorted(v for v, _ in node.substitution) == sorted(
        {t for a in clause for t in a[1:] if t > C}
    )
    body = [nodes[c].goal for c in node.children]
    return same_variables and [put(a, theta) for a in clause] == [
        node.goal,
        *body,
    ]


@given(programs(), st.data())
def test_a_tampered_proof_is_rejected(program, data):
    """Only a change that proves the very same goals by another clause may pass."""
    derived = [
        proof for height, proof in proved_by_model(program) if height > 0
    ]
    assume(derived)
    nodes = data.draw(st.sampled_from(derived), "proof").nodes
    by_rule = [i for i, node in enumerate(nodes) if node.rule is not None]
    at = data.draw(
        st.sampled_from(by_rule) | st.integers(0, len(nodes) - 1), "node"
    )
    other = data.draw(
        st.tuples(*[st.integers(1, 3)] * 3).filter(
            lambda a: a != nodes[at].goal
        ),
        "atom",
    )
    offered = list(changes(program, nodes[at], at, len(nodes), other))
    kind, fields = (
        data.draw(st.sampled_from(sorted({k for k, _ in offered})), "kind"),
        None,
    )
    fields = data.draw(
        st.sampled_from([f for k, f in offered if k == kind]), "change"
    )
    false = [
        dataclasses.replace(n, **fields) if i == at else n
        for i, n in enumerate(nodes)
    ]
    event(kind)
    same_goals = "goal" not in fields or at == 0
    assume(not (same_goals and proves_the_same(program, false, false[at])))
    assert checked(program, Proof(nodes=tuple(false))) != []


def test_the_checker_imports_nothing_of_the_package():
    """It shares no code with the prover whose proofs it checks."""
    tree = ast.parse(inspect.getsource(proof_))
    imported = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    ]
    imported += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert "json" in imported
    assert all(
        name and name.split(".")[0] in sys.stdlib_module_names
        for name in imported
    )


@given(programs(), st.data())
def test_a_fact_that_the_base_has_not_is_rejected(program, data):
    """Without the fact of a leaf, the proof fails at that leaf alone, and the error gives the path to it."""
    proof = data.draw(
        st.sampled_from(
            [proof for _, proof in reversed(proved_by_model(program))]
        )
    )
    leaf = data.draw(
        st.sampled_from(
            [node.goal for node in proof.nodes if node.rule is None]
        )
    )
    errors = checked(program, proof, facts=program.fact_set - {leaf})
    assert errors and all(
        re.fullmatch(r"root(/\d)*: \[.*\] is not a fact", e) for e in errors
    )
    path = [int(i) for i in errors[0].split(":")[0].split("/")[1:]]
    node = proof.nodes[0]
    for ordinal in path:
        node = proof.nodes[node.children[ordinal]]
    assert node.goal == leaf


@given(programs())
def test_the_root_is_no_fact_of_its_own_proof(program):
    """With every derivable atom a fact, a proof of itself by itself is a fact's, unless it is left out."""
    for _, proof in proved_by_model(program):
        root = proof.nodes[0].goal
        alone = Proof(nodes=(make_node(root),))
        assert checked(program, alone, facts=program.fact_set | {root}) == []
        assert (
            checked(
                program,
                alone,
                facts=program.fact_set | {root},
                leave_one_out=True,
            )
            != []
        )
    leaf = make_node((1, 1, 2))
    flip = lambda goal, child: make_node(
        goal,
        rule=1,
        substitution=((X, goal[1]), (Y, goal[2])),
        children=(child,),
    )
    circular = Proof(nodes=(flip((1, 1, 2), 1), flip((1, 2, 1), 2), leaf))
    assert checked(COUNTRIES, circular) == []
    assert checked(COUNTRIES, circular, leave_one_out=True) == [
        "root/0/0: the root is used as a fact in its own proof"
    ]


def test_what_is_no_tree_of_nodes_is_rejected():
    node = lambda *children, p=None: make_node(
        (1, 1, 2), children=children, probability=p
    )
    for nodes, text in (
        ((), "no nodes"),
        ((node(5),), "node 0: expected children at positions 1 to 0, got [5]"),
        ((node(-1), node()), "expected children at positions 1 to 1"),
        ((node(1), node(0)), "expected children at positions 1 to 1"),
        ((node(), node(2), node(1)), "node 1: supports itself or nothing"),
        ((node(1), node()), "root: a fact has no children"),
        ((node(p=1.5),), "root: expected a probability from 0 to 1, got 1.5"),
        (
            (node(p=float("nan")),),
            "root: expected a probability from 0 to 1, got nan",
        ),
    ):
        assert any(text in e for e in checked(COUNTRIES, Proof(nodes=nodes))), (
            text
        )


# -- proofs thousands deep


def chain(n):
    """even_after(k) from even_after(k - 1): a proof with 2 n + 1 nodes, n deep."""
    facts = [(1, k, k + 1) for k in range(1, n + 1)] + [(2, 1, 0)]
    v, w = n + 2, n + 3
    return prove.make_program(facts, [[(2, v, 0), (1, w, v), (2, w, 0)]], n + 1)


def test_a_proof_thousands_deep_is_built_checked_written_and_read():
    n = 5000
    program = chain(n)
    root = (2, n + 1, 0)
    by_model = modelled(
        program,
        lambda a: (
            None
            if a in program.fact_set
            else (0, [(1, a[1] - 1, a[1]), (2, a[1] - 1, 0)])
        ),
        root,
    )
    choices = [
        step
        for k in range(n - 1, -1, -1)
        for step in (("rule", 0, None), ("fact", k, None))
    ]
    by_trace = prove.from_trace(program, root, choices)
    for proof in (by_model, by_trace):
        assert len(proof.nodes) == 2 * n + 1
        assert checked(program, proof, max_height=n, leave_one_out=True) == []
        assert (
            checked(program, proof, max_height=n - 1, leave_one_out=True) != []
        )
        assert read_proof(proof_.to_json(proof, *[str] * 4)) == proof
        assert proof_.to_dot(proof, str, str).count("->") == 2 * n
    assert proof_.to_text(by_model, str, str).count("\n") == 2 * n + 1


def test_a_subproof_used_often_is_stored_and_shown_once():
    """Doubling at every height: 2**60 leaves as a tree, 61 nodes here."""
    program = prove.make_program(
        [(1, 1, 1)],
        [[(k + 1, X, X), (k, X, X), (k, X, X)] for k in range(1, 61)],
        1,
    )
    proof = modelled(
        program,
        lambda a: (a[0] - 2, [(a[0] - 1, 1, 1)] * 2) if a[0] > 1 else None,
        (61, 1, 1),
    )
    assert (
        len(proof.nodes) == 61 and checked(program, proof, max_height=60) == []
    )
    shown = proof_.to_text(proof, str, str).splitlines()
    assert len(shown) == 121 and sum("as above" in line for line in shown) == 59


# -- written and read


def test_the_json_of_a_proof_is_decoded_without_the_data():
    """Goals and substitutions by the tables of names alone: locatedIn(france, europe) by X, Y and Z."""
    proof = prove.from_trace(
        COUNTRIES, (2, 1, 3), [("rule", 0, 0.83), ("fact", 0, 0.5)]
    )
    predicates = {1: "neighborOf", 2: "locatedIn"}
    terms = {1: "france", 2: "germany", 3: "europe", X: "X", Y: "Y", Z: "Z"}
    document = json.loads(
        proof_.to_json(
            proof,
            format_atom,
            format_rule,
            predicates.__getitem__,
            terms.__getitem__,
        )
    )
    assert document["format"] == 2
    assert document["constants"] == {
        "1": "france",
        "2": "germany",
        "3": "europe",
    }
    assert document["variables"] == {str(X): "X", str(Y): "Y", str(Z): "Z"}
    for node in document["nodes"]:
        predicate, *arguments = map(str, node["goal"])
        names = [document["constants"][i] for i in arguments]
        text = f"{document['predicates'][predicate]}({', '.join(names)})"
        assert text == node["goal_text"]
    root = document["nodes"][0]
    assert [
        (document["variables"][str(v)], document["constants"][str(c)])
        for v, c in root["substitution"]
    ] == [("X", "france"), ("Y", "europe"), ("Z", "germany")]


@given(st.text(), st.text())
def test_dot_labels_read_back_as_the_names_they_hold(name, rule):
    proof = prove.from_trace(
        COUNTRIES, (2, 1, 3), [("rule", 0, 0.25), ("fact", 0, None)]
    )
    dot = proof_.to_dot(proof, lambda a: name, lambda r: rule)
    labels = re.findall(r'n\d+ \[label="((?:[^"\\]|\\.)*)"\];', dot, re.DOTALL)
    read = [
        re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label)
        for label in labels
    ]
    assert read == [
        f"{name}\nrule 0: {rule}\np=0.25",
        f"{name}\nfact",
        f"{name}\nfact",
    ]
    assert dot.count(";\n  n0 -> n1;\n  n0 -> n2;\n") == 1


# -- proofs from models and traces


def traces(program, root, max_height, budget):
    """Choices of every proof that leftmost resolution finds, breadth first, within a number of resolution steps."""
    todo, steps = [(((root, 0),), [])], 0
    while todo and steps < budget:
        steps += 1
        goals, choices = todo.pop(0)
        for kind, i, left in sld.successors(
            goals,
            root,
            list(program.facts),
            program.rules,
            program.n_constants,
            max_height,
        ):
            chosen = [*choices, (kind, i, random.Random(steps).random())]
            if left:
                todo.append((left, chosen))
            else:
                yield chosen


def test_a_program_leaves_padding_atoms_out():
    program = prove.make_program(
        [[1, 1, 0]],
        [[[1, X, 0], [1, X, 0], [0, 0, 0]], [[1, 2, 0], [0, 0, 0], [0, 0, 0]]],
        C,
    )
    assert program.facts == ((1, 1, 0),) and program.fact_set == {(1, 1, 0)}
    assert program.rules == (((1, X, 0), (1, X, 0)), ((1, 2, 0),))


@given(programs())
def test_a_proof_from_the_model_holds_within_its_height(program):
    for height, proof in proved_by_model(program):
        assert checked(program, proof, max_height=height) == []


@given(programs(), st.data())
def test_a_proof_from_a_trace_holds_and_keeps_the_probability_of_every_choice(
    program, data
):
    root = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, C), st.integers(1, C))
        | st.sampled_from(program.facts)
    )
    for choices in itertools.islice(
        traces(program, root, max_height=3, budget=40), 5
    ):
        proof = prove.from_trace(program, root, choices)
        assert proof.nodes[0].goal == root
        assert checked(program, proof, max_height=3, leave_one_out=True) == []
        chosen = [
            node.probability
            for node in proof.nodes
            if node.probability is not None
        ]
        assert sorted(chosen) == sorted(p for _, _, p in choices)
        rules = [node.rule for node in proof.nodes if node.rule is not None]
        assert sorted(rules) == sorted(
            i for kind, i, _ in choices if kind == "rule"
        )


def test_an_open_root_is_bound_by_its_proof():
    """locatedIn(Y, europe), whose variable has the id of one of the rule's."""
    proof = prove.from_trace(
        COUNTRIES, (2, Y, 3), [("rule", 0, None), ("fact", 0, None)]
    )
    assert proof.nodes[0].goal == (2, 1, 3) and checked(COUNTRIES, proof) == []
    unsafe = prove.make_program([(2, 1, 1)], [[(1, X, Y), (2, X, X)]], C)
    with pytest.raises(ValueError, match="unbound"):
        prove.from_trace(
            unsafe, (1, X, Y), [("rule", 0, None), ("fact", 0, None)]
        )
