"""Verdicts and proofs: worked by hand; equal to a least model over Python sets, and to the lines of real files."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.core.host import Deadline
from funcppo.kg.logic import kb
from funcppo.kg.logic import prove as proving
from funcppo.kg.logic.fixpoint import StopCode, Verdict
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.proof import check_proof
from funcppo.kg.logic.prove import Clauses, Limits, proof_by_rule
from tests import oracles
from tests.kg.logic.test_fixpoint import heights, model_of
from tests.oracles import Program, programs

MANY = 10**9
EDGE, PATH = 1, 2
X, Y, Z = 5, 6, 7
LOOP = Program(
    4,
    (2, 2),
    ((EDGE, 1, 2), (EDGE, 2, 3), (EDGE, 3, 1), (EDGE, 3, 4)),
    (((PATH, X, Y), (EDGE, X, Y)), ((PATH, X, Y), (PATH, X, Z), (EDGE, Z, Y))),
)


def prove(program, atom, max_height=None, **limits):
    limits = Limits(max_height=max_height, max_atoms=MANY, **limits)
    return proving.prove_ground(clauses_of(program), atom, limits)


def errors_of(program, proof, max_height=None, object_identity=True):
    """What the checker has against a proof, which leaves its root out."""
    arrays = program.arrays()
    return check_proof(
        proof,
        {tuple(fact) for fact in arrays["facts"].tolist()},
        arrays["rules"].tolist(),
        n_constants=program.n_constants,
        max_height=max_height,
        leave_one_out=True,
        object_identity=object_identity,
    )


def without(program, fact):
    others = tuple(other for other in program.facts if other != fact)
    return dataclasses.replace(program, facts=others)


def clauses_of(program):
    return Clauses(*kb.build(**program.arrays()))


def test_a_path_round_a_loop_has_a_proof_as_high_as_it_is_long():
    found = prove(LOOP, (PATH, 1, 1))
    assert found.verdict == Verdict.PROVED
    assert found.is_fact is False
    assert found.height == 3
    goals = [(node.goal, node.rule) for node in found.proof.nodes]
    assert goals == [
        ((PATH, 1, 1), 1),
        ((PATH, 1, 3), 1),
        ((EDGE, 3, 1), None),
        ((PATH, 1, 2), 0),
        ((EDGE, 2, 3), None),
        ((EDGE, 1, 2), None),
    ]


def test_the_checker_rejects_a_proof_that_binds_a_variable_to_a_constant_of_its_rule():
    """p(X, 1) :- b(X, 2). b(1, 2). b(3, 2)."""
    p, b, x = 1, 2, 4
    facts, rule = ((b, 1, 2), (b, 3, 2)), ((p, x, 1), (b, x, 2))
    program = Program(3, (2, 2), facts, (rule,))
    expected = "another constant for each variable, none of the rule's [1, 2]"
    proofs = [prove(program, (p, value, 1)).proof for value in (1, 3)]
    assert [errors_of(program, proof) for proof in proofs] == [
        [f"root: expected {expected}, got [(4, 1)]"], []
    ]  # fmt: skip
    apart = prove(program, (p, 1, 1), object_identity=True)
    assert apart.verdict == Verdict.REFUTED


@given(programs, st.booleans(), st.data())
def test_verdict_and_height_are_those_of_the_least_model_without_the_query(
    program, object_identity, data
):
    predicate = data.draw(st.integers(1, len(program.arity)))
    constant = st.integers(1, program.n_constants)
    args = st.tuples(*[constant] * program.arity[predicate - 1])
    atoms = args.map(lambda terms: (predicate, *terms))
    stated = [fact for fact in program.facts if fact[0] == predicate]
    atom = data.draw(atoms | st.sampled_from(stated) if stated else atoms)
    max_height = data.draw(st.none() | st.integers(0, 4))
    rest = without(program, atom)
    height = oracles.least_model(rest, max_height, object_identity).get(atom)
    width = program.arrays()["facts"].shape[1]
    padded = (*atom, *[0] * (width - len(atom)))
    found = prove(program, padded, max_height, object_identity=object_identity)
    assert found.is_fact == (atom in program.facts)
    verdict = Verdict.REFUTED if height is None else Verdict.PROVED
    assert (found.verdict, found.height) == (verdict, height)
    if height is not None:
        assert found.proof.nodes[0].goal == padded
        for most in (height, height - 1):
            errors = errors_of(program, found.proof, most, object_identity)
            assert (errors == []) == (most == height)


@given(programs, st.booleans(), st.none() | st.integers(0, 4), st.data())
def test_the_answers_and_their_heights_are_those_of_the_least_model(
    program, object_identity, max_height, data
):
    """Queries with variables, some of them twice, and constants."""
    n = program.n_constants
    predicate = data.draw(st.integers(1, len(program.arity)))
    arity = program.arity[predicate - 1]
    term = st.integers(1, n) | st.integers(n + 1, n + 3)
    query = (predicate, *data.draw(st.tuples(*[term] * arity)))
    if all(t <= n for t in query[1:]):
        return
    model = oracles.least_model(program, max_height, object_identity)
    expected = {
        atom: height
        for atom, height in model.items()
        if oracles.match(query, atom, {}, n) is not None
    }
    world, sizes = kb.build(**program.arrays())
    padding = (0,) * (sizes.atom_width - len(query))
    limits = dict(max_height=max_height, object_identity=object_identity)
    solve = lambda **more: proving.solve(
        Clauses(world, sizes), (*query, *padding), Limits(**limits, **more)
    )
    found = solve()
    assert found.complete
    assert (
        dict(zip(unpadded(found.heights), found.heights.values())) == expected
    )
    # What a limit leaves is right, as far as it goes.
    for max_rows in (0, 3, 10):
        part = solve(budget=RowBudget(max_rows))
        for atom, height in part.heights.items():
            known = found.heights[atom] if height is None else height
            assert model[tuple(t for t in atom if t)] == known
        is_whole = part.heights == found.heights
        assert part.complete == is_whole or part.stop_reason


@pytest.mark.parametrize("limit", ["max_atoms", "max_rows"])
def test_a_limit_ends_in_unknown_or_in_a_proof(limit):
    clauses = clauses_of(LOOP)
    verdicts = set()
    for n in range(40):
        limits = Limits(budget=RowBudget(n))
        if limit == "max_atoms":
            limits = Limits(max_atoms=n)
        found = proving.prove_ground(clauses, (PATH, 1, 1), limits)
        verdicts.add(found.verdict)
        assert (found.verdict == Verdict.PROVED) == (found.proof is not None)
        if found.verdict == Verdict.UNKNOWN:
            assert found.answers.stop_code == limit
    assert verdicts == {Verdict.UNKNOWN, Verdict.PROVED}


@pytest.mark.parametrize(
    "body",
    [
        ((EDGE, X, Y), (PATH, Y, Z)),
        ((PATH, X, Y), (EDGE, Y, Z)),
        ((PATH, X, Y), (PATH, Y, Z)),
    ],
)
def test_the_work_is_what_the_goal_reaches_and_not_more_in_a_larger_graph(body):
    """A chain of 40 edges in which the goal is the first 10, alone and beside 300 others."""
    n_rows = []
    for n_others in (0, 300):
        n = 41 + 2 * n_others
        chain = [(EDGE, i, i + 1) for i in range(1, 11)]
        chain += [(EDGE, 42 + i, 43 + i) for i in range(0, 2 * n_others - 2)]
        variables = {X: n + 1, Y: n + 2, Z: n + 3}
        rules = ((PATH, X, Y), (EDGE, X, Y)), ((PATH, X, Z), *body)
        rules = tuple(
            tuple(oracles.put(atom, variables) for atom in rule)
            for rule in rules
        )
        budget = RowBudget(MANY)
        program = Program(n, (2, 2), tuple(chain), rules)
        found = prove(program, (PATH, 1, 11), budget=budget)
        assert found.verdict == Verdict.PROVED
        n_rows.append(budget.n_rows)
    assert n_rows[0] == n_rows[1]


@pytest.mark.parametrize("length", [100, 200])
def test_the_work_for_a_chain_is_linear_in_its_length(length):
    n = length + 1
    x, y, z = n + 1, n + 2, n + 3
    edges = tuple((EDGE, i, i + 1) for i in range(1, n))
    first = (PATH, x, y), (EDGE, x, y)
    for body in (((EDGE, x, y), (PATH, y, z)), ((PATH, x, y), (EDGE, y, z))):
        program = Program(n, (2, 2), edges, (first, ((PATH, x, z), *body)))
        found = prove(program, (PATH, 1, n), budget=RowBudget(8 * length))
        assert found.height == length and found.answers.complete
        assert len(found.proof.nodes) == 2 * length


def test_answers_travel_once_where_they_lead_to_no_other_goal():
    """Paths of odd length: all goals are known before any answer of one is given out."""
    n, odd, even, edge = 40, 1, 2, 3
    x, y, z = range(n + 1, n + 4)
    rules = (
        ((odd, x, y), (edge, x, y)),
        ((odd, x, y), (edge, x, z), (even, z, y)),
        ((even, x, y), (edge, x, z), (odd, z, y)),
    )
    edges = tuple((edge, i, i + 1) for i in range(1, n))
    program = Program(n, (2, 2, 2), edges, rules)
    budget, few = RowBudget(MANY), RowBudget(1000)
    found, cut = (
        proving.solve(clauses_of(program), (odd, x, y), Limits(budget=rows))
        for rows in (budget, few)
    )
    pairs = [(i, j) for j in range(n + 1) for i in range(1, j)]
    expected = {(odd, i, j): j - i for i, j in pairs if (j - i) % 2}
    assert found.heights == expected and found.complete
    assert budget.n_rows < 4 * len(expected)
    assert not cut.complete and n < len(cut.heights) < len(expected)
    assert cut.heights.keys() < expected.keys()


@given(programs, st.booleans())
def test_what_rules_lack_is_never_satisfied(program, object_identity):
    _, sizes = kb.build(**program.arrays())
    n = program.n_constants
    for predicate, arity in enumerate(program.arity, 1):
        atom = (predicate, *[1] * arity)
        padded = (*atom, *[0] * (sizes.atom_width - len(atom)))
        found = prove(program, padded, object_identity=object_identity)
        if found.verdict == Verdict.PROVED:
            continue
        rest = without(program, atom)
        model = set(oracles.least_model(rest, None, object_identity))
        failed = proving.failed_rules(found.answers, padded, n_rules=MANY)
        heads = [
            i
            for i, (head, *body) in enumerate(program.rules)
            if oracles.groundings(
                # an atom in place of the head keeps the constants of the rule
                ((0, *oracles.constants_of((head, *body), n)), (-1, *head[1:])),
                {(-1, *atom[1:])} if head[0] == predicate else set(),
                n,
                object_identity,
            )
        ]
        assert [i for i, _ in failed.rules] == heads
        for i, goals in failed.rules:
            body = unpadded(goals)
            named = (0, *oracles.constants_of(program.rules[i], n))
            assert not oracles.groundings(
                (named, *body), model, n, object_identity
            )


def test_a_predicate_with_the_id_of_a_variable_is_no_variable():
    one = Program(1, (1, 1, 2), ((1, 1), (3, 1, 1)), (((2, 2), (1, 2)),))
    clauses = clauses_of(one)
    matched = lambda *atom: [*proving.solve(clauses, atom, Limits()).heights]
    assert matched(2, 2, 0) == [(2, 1, 0)]
    assert matched(3, 2, 3) == [(3, 1, 1)]
    assert matched(3, 3, 3) == [(3, 1, 1)]
    assert prove(one, (2, 1, 0)).height == 1


def test_failed_rules_name_what_no_atom_satisfies():
    """path(4, 1): no edge leaves 4, so the first rule lacks its goal, and the second its first goal."""
    found = prove(LOOP, (PATH, 4, 1))
    assert found.verdict == Verdict.REFUTED
    failed = proving.failed_rules(found.answers, (PATH, 4, 1), n_rules=5)
    assert failed.n_matching == 2
    assert [rule for rule, _ in failed.rules] == [0, 1]
    assert failed.rules[0][1] == ((EDGE, 4, 1),)
    assert [goal[:2] for goal in failed.rules[1][1]] == [(PATH, 4), (EDGE, 7)]
    first = proving.failed_rules(found.answers, (PATH, 4, 1), n_rules=1)
    assert len(first.rules) == 1 and first.n_matching == 2


# -- derivations


def unpadded(atoms):
    return [tuple(term for term in atom if term) for atom in atoms]


@given(programs, st.booleans())
def test_a_derivation_is_by_the_first_and_smallest_body(program, identity):
    model = model_of(program, object_identity=identity)
    found = heights(model)
    for padded, (atom, height) in zip(model.atoms.tolist(), found.items()):
        if height:
            options = {"object_identity": identity}
            proof = prove(program, tuple(padded), **options).proof
            root = proof.nodes[0]
            body = [proof.nodes[i].goal for i in root.children]
            below = {a for a, h in found.items() if h < height}
            expected = _first_derivation(program, atom, below, identity)
            assert (root.rule, unpadded(body)) == expected


@given(programs, st.booleans())
def test_a_ground_body_is_the_smallest_without_the_atom(program, identity):
    clauses = clauses_of(program)
    model = model_of(program, object_identity=identity)
    for padded, atom in zip(model.atoms.tolist(), heights(model)):
        for i in range(len(program.rules)):
            others = set(program.facts) - {atom}
            proof = proof_by_rule(clauses, tuple(padded), i, identity)
            expected = _smallest_body(program, i, atom, others, identity)
            body = proof and [node.goal for node in proof.nodes[1:]]
            assert (None if body is None else unpadded(body)) == expected


def _first_derivation(program, atom, below, identity):
    for i in range(len(program.rules)):
        body = _smallest_body(program, i, atom, below, identity)
        if body is not None:
            return i, body
    raise AssertionError


def _smallest_body(program, i, atom, below, identity):
    rule, n = program.rules[i], program.n_constants
    found = oracles.groundings(rule, below, n, identity)
    bindings = [s for s in found if oracles.put(rule[0], s) == atom]
    terms = dict.fromkeys(t for a in rule[1:] for t in a[1:])
    names = [t for t in terms if t > n]
    if not bindings:
        return None
    smallest = min(bindings, key=lambda s: [s[v] for v in names])
    return [oracles.put(a, smallest) for a in rule[1:]]


# -- facts proved from other facts

P, Q, S = 1, 2, 3
# p and q follow from each other, and q from s.
CIRCLE = Program(
    4,
    (2, 2, 2),
    ((P, 1, 2), (P, 3, 4), (P, 2, 3), (Q, 2, 3), (S, 1, 2)),
    tuple(((p, X, Y), (q, X, Y)) for p, q in ((P, Q), (Q, P), (Q, S))),
)


def fact_heights(program, max_height, max_rows=MANY, **options):
    base, sizes = kb.build(**program.arrays())
    options |= {"max_height": max_height, "budget": RowBudget(max_rows)}
    found = proving.fact_heights(base, sizes, base.facts, Limits(**options))
    return found.height.tolist(), found.n_undecided


@pytest.mark.parametrize("max_height", [1, 2, None])
@given(program=programs, object_identity=st.booleans())
def test_the_height_is_without_the_fact(max_height, object_identity, program):
    options = {"object_identity": object_identity}
    found, n_undecided = fact_heights(program, max_height, **options)
    assert n_undecided == 0
    for fact, height in zip(program.facts, found, strict=True):
        rest = without(program, fact)
        model = oracles.least_model(rest, max_height, **options)
        assert height == model.get(fact, -1)


def test_what_a_bound_leaves_undecided_is_counted_and_not_proved():
    """Nothing is decided within 0 rows; in between, those that are removed one by one are open."""
    assert fact_heights(CIRCLE, None, max_rows=0) == ([-1] * 5, 5)
    base, sizes = kb.build(**CIRCLE.arrays())
    budget = RowBudget(MANY)
    limits = Limits(max_height=1, budget=budget)
    proving.fact_heights(base, sizes, base.facts, limits)
    # After the rules there are no rows left for those that need a greater height; s has no rule.
    found, n_undecided = fact_heights(CIRCLE, None, max_rows=budget.n_rows)
    assert (found, n_undecided) == ([-1, 1, -1, 1, -1], 2)


# -- the most probable proofs

CONFIDENCES = (0.5, 1.0, 0.9, 0.25, 0.5, 0.0, 1.0)


def best(program, atom, k, max_height=None, object_identity=False, **bounds):
    limits = dict(max_height=max_height, object_identity=object_identity)
    return proving.best_proofs(
        clauses_of(program),
        atom,
        Limits(**limits, **bounds),
        k,
        lambda rules: {rule: CONFIDENCES[rule] for rule in rules},
    )


def all_proofs(program, root, max_height, object_identity, most=2000):
    """Every proof of an atom as a nested tuple, by trying each ground rule; None if that is too much work."""
    atoms = set(oracles.least_model(program, None, object_identity))
    ground = [
        (i, tuple(oracles.put(atom, s) for atom in rule))
        for i, rule in enumerate(program.rules)
        for s in oracles.groundings(
            rule, atoms, program.n_constants, object_identity
        )
    ]
    n_tried = itertools.count()

    def prove_below(goal, above):
        if goal in above:
            return []
        if above and goal in program.facts:
            return [(goal,)]
        if len(above) == max_height:
            return []
        found = []
        for i, (head, *body) in ground:
            if head != goal:
                continue
            parts = [prove_below(atom, (*above, goal)) for atom in body]
            if next(n_tried) > most or math.prod(map(len, parts)) > most:
                raise OverflowError
            found += [(goal, i, *tree) for tree in itertools.product(*parts)]
        return found

    try:
        return prove_below(root, ())
    except OverflowError:
        return None


def as_tree(proof, position=0):
    node = proof.nodes[position]
    goal = tuple(t for t in node.goal if t)
    if node.rule is None:
        return (goal,)
    return (goal, node.rule, *(as_tree(proof, i) for i in node.children))


def rules_in(tree):
    if len(tree) == 1:
        return []
    return [tree[1], *itertools.chain(*map(rules_in, tree[2:]))]


@given(programs, st.booleans(), st.none() | st.integers(0, 3), st.data())
def test_the_proofs_are_the_best(program, object_identity, max_height, data):
    """The same probabilities in the same order as all proofs have, each once, and each of them one of these."""
    model = oracles.least_model(program, 4, object_identity)
    if not model:
        return
    atom = data.draw(st.sampled_from(sorted(model)))
    expected = all_proofs(program, atom, max_height, object_identity)
    if expected is None:
        return

    def order(tree):
        confidences = sorted(CONFIDENCES[i] for i in rules_in(tree))
        n_zero = confidences.count(0.0)
        return (
            n_zero,
            -round(math.prod(confidences[n_zero:]), 9),
            len(confidences),
        )

    arrays = program.arrays()
    padded = (*atom, *[0] * (arrays["facts"].shape[1] - len(atom)))
    k = data.draw(st.sampled_from([1, 3, len(expected), len(expected) + 1]))
    if not k:
        return
    found = best(program, padded, k, max_height, object_identity)
    assert not found.stop_reason
    trees = [as_tree(proof) for proof in found.proofs]
    assert [order(t) for t in trees] == sorted(map(order, expected))[:k]
    assert len({*trees}) == len(trees) and {*trees} <= {*expected}
    for tree, probability in zip(trees, found.probabilities):
        chosen = [CONFIDENCES[i] for i in rules_in(tree)]
        assert probability == pytest.approx(math.prod(chosen))


def test_proofs_beyond_a_limit_are_said_to_be_unknown():
    """A path by its edge, or once round the loop before it; twice round needs the loop for itself."""
    found = best(LOOP, (PATH, 3, 4), 5)
    assert len(found.proofs) == 2 and not found.stop_reason
    reasons = set()
    for n in range(0, 60, 3):
        for bounds in (dict(budget=RowBudget(n)), dict(max_atoms=n)):
            part = best(LOOP, (PATH, 3, 4), 5, **bounds)
            assert part.stop_reason or len(part.proofs) == 2
            reasons.add(bool(part.stop_reason))
    assert reasons == {True, False}


def test_the_time_bounds_the_building_of_a_proof_too():
    """The clock goes on with each look at it. Without time for its proof an answer is unknown, and says so."""
    seen = set()
    for n in range(1, 100):
        ticks = itertools.count()
        deadline = Deadline(at=n, clock=lambda ticks=ticks: next(ticks))
        budget = RowBudget(MANY, deadline=deadline)
        found = prove(LOOP, (PATH, 3, 4), budget=budget)
        is_late = found.answers.stop_code is StopCode.TIME_LIMIT
        assert found.verdict is (
            Verdict.PROVED if found.proof else Verdict.UNKNOWN
        )
        seen.add((found.verdict, bool(found.answers.heights), is_late))
    assert (Verdict.UNKNOWN, True, True) in seen
    assert {
        (Verdict.UNKNOWN, False, True),
        (Verdict.PROVED, True, False),
    } < seen
