"""Laws of proofs: what is tampered with does not hold, and what is written can be read."""

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

from funcppo.kg.graph.loaders import from_text
from funcppo.kg.graph.rules import comparison_tests, parse_query, proof_names
from funcppo.kg.logic import kb, prove
from funcppo.kg.logic import proof as proof_
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
    trace,
)
from tests.oracles import Program, put

# -- a worked example


def of_france(by_rule=0.83, by_fact=0.5):
    """locatedIn(france, europe) by its neighbour, and the probabilities of the choices."""
    choices = [("rule", 0, by_rule), ("fact", 0, by_fact)]
    return trace(COUNTRIES, (2, 1, 3), choices)


def test_france_is_in_europe_because_germany_is():
    proof = of_france()
    root, *leaves = proof.nodes
    first = make_node((1, 1, 2), probability=0.5)
    assert leaves == [first, make_node((2, 2, 3))]
    theta, chosen = ((X, 1), (Y, 3), (Z, 2)), {"rule": 0, "probability": 0.83}
    goal, children = (2, 1, 3), (1, 2)
    assert root == make_node(
        goal, substitution=theta, children=children, **chosen
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
    bound = lambda *bindings: dict(substitution=bindings)
    for i, (variable, constant) in enumerate(substitution):
        before, after = substitution[:i], substitution[i + 1 :]
        for value in set(range(C + 2)) - {constant}:
            yield "binding", bound(*before, (variable, value), *after)
        yield "binding twice", bound(*substitution, (variable, constant))
        yield "no binding", bound(*before, *after)
    yield "a binding more", bound(*substitution, (99, 1))
    for i in range(len(children)):
        before, after = children[:i], children[i + 1 :]
        yield "missing child", dict(children=(*before, *after))
        yield "cycle", dict(children=(*before, at, *after))
    yield "extra child", dict(children=(*children, n_nodes - 1))
    if len(set(children)) == 2:
        yield "swapped children", dict(children=children[::-1])


def proves_the_same(program, nodes, node):
    """Whether a changed node is another instance of a rule, or another fact, that proves its goal after all."""
    if node.rule is None:
        is_fact = node.goal in program.facts
        return is_fact and not node.children and not node.substitution
    if not 0 <= node.rule < len(program.rules):
        return False
    clause, theta = program.rules[node.rule], dict(node.substitution)
    bound = sorted(v for v, _ in node.substitution)
    variables = sorted({t for a in clause for t in a[1:] if t > C})
    goals = [node.goal, *(nodes[c].goal for c in node.children)]
    return bound == variables and [put(a, theta) for a in clause] == goals


@given(programs(), st.data())
def test_a_tampered_proof_is_rejected(program, data):
    """Only a change that proves the very same goals by another clause may pass."""
    derived = [proof for height, proof in proved_by_model(program) if height]
    assume(derived)
    one_of = lambda name, values: data.draw(st.sampled_from(values), name)
    nodes = one_of("proof", derived).nodes
    by_rule = [i for i, node in enumerate(nodes) if node.rule is not None]
    at = data.draw(
        st.sampled_from(by_rule) | st.integers(0, len(nodes) - 1), "node"
    )
    atoms = st.tuples(*[st.integers(1, 3)] * 3)
    other = data.draw(atoms.filter(lambda a: a != nodes[at].goal), "atom")
    offered = list(changes(program, nodes[at], at, len(nodes), other))
    kind = one_of("kind", sorted({k for k, _ in offered}))
    fields = one_of("change", [f for k, f in offered if k == kind])
    false = list(nodes)
    false[at] = dataclasses.replace(nodes[at], **fields)
    event(kind)
    same_goals = "goal" not in fields or at == 0
    assume(not (same_goals and proves_the_same(program, false, false[at])))
    assert checked(program, Proof(nodes=tuple(false))) != []


# -- conditions

AGES = from_text("""
    e(ann, bob). e(bob, cid). age(ann, 17). age(bob, 40). age(eve, 50.5). age(dan, old).
    path(X, Y) :- e(X, Y).
    path(X, Z) :- path(X, Y), e(Y, Z).
    q(X, Y) :- age(X, N), age(Y, M), N < M, X \\= bob, \\+ path(X, Y), \\+ e(Y, _).
""")


AGES_BASE, AGES_TESTS = kb.from_dataset(AGES), comparison_tests(AGES)


def ages_proof():
    """The proof of q(ann, eve): its rule, two ages, two comparisons, two negations."""
    atom = tuple(parse_query(AGES, "q(ann, eve)").tolist())
    clauses = prove.Clauses(*AGES_BASE, comparisons=AGES_TESTS)
    proof = prove.prove_ground(clauses, atom, prove.Limits()).proof
    assert proof is not None
    return proof


def test_prove_does_not_trust_the_conditions_of_its_tables(monkeypatch):
    """q(ann, bob) needs that there is no path from ann to bob, and no edge from bob."""
    atom = tuple(parse_query(AGES, "q(ann, bob)").tolist())
    monkeypatch.setattr(prove.Clauses, "_is_absent", lambda *_: True)
    clauses = prove.Clauses(*AGES_BASE, comparisons=AGES_TESTS)
    with pytest.raises(AssertionError, match="does not hold"):
        prove.prove_ground(clauses, atom, prove.Limits())


def ages_errors(proof, *more_facts):
    """The errors of a proof with more facts."""
    facts = {tuple(fact) for fact in AGES.facts.tolist()}
    facts |= {tuple(parse_query(AGES, fact).tolist()) for fact in more_facts}
    rules, n = AGES.rules.tolist(), AGES.n_constants
    facts_of = lambda p: [fact for fact in facts if fact[0] == p]
    conditions = proof_.Conditions(facts_of, rules, AGES_TESTS, n)
    limits = {"max_height": 1, "leave_one_out": True, "n_constants": n}
    return proof_.check_proof(
        proof, facts, rules, holds=conditions.hold, **limits
    )


def test_a_proof_shows_its_conditions_and_the_checker_tests_them():
    proof = ages_proof()
    names = proof_names(AGES)
    assert proof_.to_text(proof, *names[:2]) == (
        "q(ann, eve)      by rule 2: q(X, Y) :- age(X, Z), age(Y, W), Z < W, X != bob, not path(X, Y), not e(Y, _)\n"
        "├─ age(ann, 17)      fact\n"
        "├─ age(eve, 50.5)      fact\n"
        "├─ 17 < 50.5      compared\n"
        "├─ ann != bob      compared\n"
        "├─ not path(ann, eve)      no fact and no rule gives it\n"
        "└─ not e(eve, _)      no fact and no rule gives it\n"
    )
    document = json.loads(proof_.to_json(proof, *names))
    assert proof_.from_json(document) == proof
    goalless = [*document["nodes"][:1], document["nodes"][1] | {"goal": {}}]
    with pytest.raises(ValueError, match="node 1: expected the fields of a"):
        proof_.from_json(document | {"nodes": goalless})
    assert {"not path", "not e", "<", "!="} < {*document["predicates"].values()}
    assert ages_errors(proof) == []
    (error,) = ages_errors(proof, "e(cid, eve)")
    assert error.startswith("root/4: ") and "does not hold" in error
    errors = ages_errors(proof, "e(eve, ann)", "path(ann, eve)")
    assert [error[:7] for error in errors] == ["root/4:", "root/5:"]


@pytest.mark.parametrize(
    ("position", "change"),
    [
        (0, {"children": (1, 2, 3, 4, 5)}),
        (0, {"children": (1, 2, 3, 4, 6, 5)}),
        (3, {"goal": "reversed"}),
        (5, {"goal": "reversed"}),
        (6, {"goal": "positive"}),
        *((i, {"goal": x}) for i in (3, 5) for x in ("unknown", "short")),
        *((i, {"goal": "other"}) for i in (3, 5)),
        (3, {"rule": 0}),
        (5, {"rule": 2}),
        (5, {"children": (6,)}),
        (6, {"substitution": ((1, 1),)}),
    ],
)
def test_a_proof_with_a_changed_condition_is_rejected(position, change):
    nodes = list(ages_proof().nodes)
    predicate, left, right = nodes[position].goal
    goals = {
        "reversed": (predicate, right, left),
        "positive": (-predicate, left, right),
        "unknown": (-(10**20), left, right),
        "short": (predicate, left),
        "other": (predicate, left, 10**9),
    }
    if "goal" in change:
        change = {"goal": goals[change["goal"]]}
    nodes[position] = dataclasses.replace(nodes[position], **change)
    assert ages_errors(Proof(nodes=tuple(nodes))) != []


def test_a_program_without_strata_gives_no_absent_atom():
    rules = [[(1, 1, 0), (-2, 1, 0)], [(2, 1, 0), (-1, 1, 0)]]
    conditions = proof_.Conditions(lambda p: (), rules, {}, 1)
    assert not conditions.hold((-1, 1, 0))
    assert conditions.hold((-3, 1, 0))


def test_the_checker_tests_each_row_of_a_recursive_rule_once():
    n, compared, calls = 50, -(1 << 30), []
    x, y, z = range(n + 1, n + 4)
    facts = {1: [], 2: [(2, i, i + 1) for i in range(1, n - 1)]}
    step = [(1, x, y), (1, x, z), (2, z, y), (compared, z, y)]
    conditions = proof_.Conditions(
        facts.__getitem__,
        [[(1, x, y), (2, x, y)], step],
        {compared: lambda *pair: calls.append(pair) or True},
        n,
    )
    assert conditions.hold((-1, 1, n))
    assert n - 3 == len(calls) == len({*calls})


def test_the_checker_imports_nothing_of_the_package():
    """It shares no code with the prover whose proofs it checks."""
    tree = ast.parse(inspect.getsource(proof_))
    nodes = list(ast.walk(tree))
    imported = [x.module for x in nodes if isinstance(x, ast.ImportFrom)]
    for node in nodes:
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    assert "json" in imported
    packages = {name and name.split(".")[0] for name in imported}
    assert packages <= sys.stdlib_module_names


@given(programs(), st.data())
def test_a_fact_that_the_base_has_not_is_rejected(program, data):
    """Without the fact of a leaf, the proof fails at that leaf alone, and the error gives the path to it."""
    proofs = [proof for _, proof in reversed(proved_by_model(program))]
    proof = data.draw(st.sampled_from(proofs))
    leaves = [node.goal for node in proof.nodes if node.rule is None]
    leaf = data.draw(st.sampled_from(leaves))
    errors = checked(program, proof, facts={*program.facts} - {leaf})
    pattern = r"root(/\d)*: \[.*\] is not a fact"
    assert errors and all(re.fullmatch(pattern, e) for e in errors)
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
        facts = {*program.facts, root}
        assert checked(program, alone, facts=facts) == []
        assert checked(program, alone, facts=facts, leave_one_out=True) != []
    leaf = make_node((1, 1, 2))

    def flip(goal, *children):
        theta = ((X, goal[1]), (Y, goal[2]))
        return make_node(goal, rule=1, substitution=theta, children=children)

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
        *(((node(p=p),), f"root: expected a probability from 0 to 1, got {p}")
          for p in (1.5, float("nan"))),
    ):  # fmt: skip
        errors = checked(COUNTRIES, Proof(nodes=nodes))
        assert any(text in e for e in errors), text


# -- proofs thousands deep


def chain(n):
    """even_after(k) from even_after(k - 1): a proof with 2 n + 1 nodes, n deep."""
    facts = [(1, k, k + 1) for k in range(1, n + 1)] + [(2, 1, 0)]
    v, w = n + 2, n + 3
    rule = ((2, v, 0), (1, w, v), (2, w, 0))
    return Program(n + 1, (2, 1), tuple(facts), (rule,))


def test_a_proof_thousands_deep_is_built_checked_written_and_read():
    n = 2000
    program = chain(n)
    root, facts = (2, n + 1, 0), {*program.facts}

    def support(atom):
        k = atom[1] - 1
        return None if atom in facts else (0, [(1, k, k + 1), (2, k, 0)])

    by_model = modelled(program, support, root)
    choices = []
    for k in range(n - 1, -1, -1):
        choices += [("rule", 0, None), ("fact", k, None)]
    by_trace = trace(program, root, choices)
    for proof in (by_model, by_trace):
        assert len(proof.nodes) == 2 * n + 1
        for height in (n - 1, n):
            limits = {"max_height": height, "leave_one_out": True}
            errors = checked(program, proof, **limits)
            assert (errors == []) == (height == n)
        assert read_proof(proof_.to_json(proof, *[str] * 4)) == proof
        assert proof_.to_dot(proof, str, str).count("->") == 2 * n
    assert proof_.to_text(by_model, str, str).count("\n") == 2 * n + 1


def test_a_subproof_used_often_is_stored_and_shown_once():
    """Doubling at every height: 2**60 leaves as a tree, 61 nodes here."""
    rules = [[(k + 1, X, X), (k, X, X), (k, X, X)] for k in range(1, 61)]
    program = Program(1, (2,) * 61, ((1, 1, 1),), rules)
    twice = lambda a: (a[0] - 2, [(a[0] - 1, 1, 1)] * 2) if a[0] > 1 else None
    proof = modelled(program, twice, (61, 1, 1))
    assert len(proof.nodes) == 61
    assert checked(program, proof, max_height=60) == []
    shown = proof_.to_text(proof, str, str).splitlines()
    assert len(shown) == 121 and sum("as above" in line for line in shown) == 59


# -- written and read


def test_the_json_of_a_proof_is_decoded_without_the_data():
    """Goals and substitutions by the tables of names alone: locatedIn(france, europe) by X, Y and Z."""
    predicates = {1: "neighborOf", 2: "locatedIn"}
    constants = {1: "france", 2: "germany", 3: "europe"}
    terms = constants | {X: "X", Y: "Y", Z: "Z"}
    tables = predicates.__getitem__, terms.__getitem__
    text = proof_.to_json(of_france(), format_atom, format_rule, *tables)
    document = json.loads(text)
    assert document["format"] == 2
    assert document["constants"] == {str(c): n for c, n in constants.items()}
    assert document["variables"] == {str(X): "X", str(Y): "Y", str(Z): "Z"}
    for node in document["nodes"]:
        predicate, *arguments = map(str, node["goal"])
        names = [document["constants"][i] for i in arguments]
        text = f"{document['predicates'][predicate]}({', '.join(names)})"
        assert text == node["goal_text"]
    theta = document["nodes"][0]["substitution"]
    names = [document["variables"][str(v)] for v, _ in theta]
    values = [document["constants"][str(c)] for _, c in theta]
    assert "".join(names) == "XYZ" and values == ["france", "europe", "germany"]


@given(st.text(), st.text())
def test_dot_labels_read_back_as_the_names_they_hold(name, rule):
    dot = proof_.to_dot(of_france(0.25, None), lambda a: name, lambda r: rule)
    labels = re.findall(r'n\d+ \[label="((?:[^"\\]|\\.)*)"\];', dot, re.DOTALL)
    plain = lambda m: "\n" if m[1] == "n" else m[1]
    read = [re.sub(r"\\(.)", plain, label) for label in labels]
    fact = f"{name}\nfact"
    assert read == [f"{name}\nrule 0: {rule}\np=0.25", fact, fact]
    assert dot.count(";\n  n0 -> n1;\n  n0 -> n2;\n") == 1


# -- proofs from models and traces


def traces(program, root, max_height, budget):
    """Choices of every proof that leftmost resolution finds, breadth first, within a number of resolution steps."""
    todo, steps = [(((root, 0),), [])], 0
    while todo and steps < budget:
        steps += 1
        goals, choices = todo.pop(0)
        base = list(program.facts), program.rules, program.n_constants
        for kind, i, left in sld.successors(goals, root, *base, max_height):
            chosen = [*choices, (kind, i, random.Random(steps).random())]
            if left:
                todo.append((left, chosen))
            else:
                yield chosen


@given(programs())
def test_a_proof_from_the_model_holds_within_its_height(program):
    for height, proof in proved_by_model(program):
        assert checked(program, proof, max_height=height) == []


@given(programs(), st.data())
def test_a_proof_from_a_trace_holds_and_keeps_probabilities(program, data):
    root = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, C), st.integers(1, C))
        | st.sampled_from(program.facts)
    )
    found = traces(program, root, max_height=3, budget=40)
    for choices in itertools.islice(found, 5):
        proof = trace(program, root, choices)
        assert proof.nodes[0].goal == root
        assert checked(program, proof, max_height=3, leave_one_out=True) == []
        chosen = [node.probability for node in proof.nodes]
        chances = [p for _, _, p in choices]
        assert sorted(p for p in chosen if p is not None) == sorted(chances)
        rules = [node.rule for node in proof.nodes if node.rule is not None]
        by_rule = [i for kind, i, _ in choices if kind == "rule"]
        assert sorted(rules) == sorted(by_rule)


def test_an_open_root_is_bound_by_its_proof():
    """locatedIn(Y, europe), whose variable has the id of one of the rule's."""
    choices = [("rule", 0, None), ("fact", 0, None)]
    proof = trace(COUNTRIES, (2, Y, 3), choices)
    assert proof.nodes[0].goal == (2, 1, 3) and checked(COUNTRIES, proof) == []
