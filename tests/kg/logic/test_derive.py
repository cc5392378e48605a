"""What rules derive for questions: walks counted by hand, every grounding by brute force, chunks, bounds."""

import itertools
import threading
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.kg.logic import derive, fixpoint, joins, kb
from funcppo.kg.logic.derive import (
    WALK_UNIT,
    GroundingWork,
    Questions,
    list_groundings,
    plan_rules,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded, Rule
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.resolve import make_resolve_config, resolve
from tests import oracles, sld
from tests.kg.logic.test_fixpoint import atoms_of, model_of
from tests.kg.logic.test_resolve import C, P, program, start
from tests.oracles import Program, programs

# -- test chains

N_CONSTANTS = 9
X1, Y1, Z1, W1 = 10, 11, 12, 13
H, A, B = 1, 2, 3


def steps(head, *body):
    return derive.path_steps(Rule(0, head, body), N_CONSTANTS)


def test_the_steps_of_a_chain_lead_from_the_given_argument_to_the_other():
    body = (B, W1, Z1), (A, X1, Z1), (A, W1, Y1)  # atoms in any order
    assert steps((H, X1, Y1), *body) == (2 * A, 2 * B + 1, 2 * A)
    assert steps((H, X1, Y1), (A, Y1, X1)) == (2 * A + 1,)
    assert steps((H, X1, Y1, 0), (A, X1, Y1, 0)) == (2 * A,)  # padded


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ((H, X1, Y1), [(A, X1, Z1)]),  # does not reach the end
        ((H, X1, Y1), [(A, X1, Z1), (B, W1, Y1)]),  # is in two parts
        ((H, X1, Y1), [(A, X1, Y1), (B, X1, Y1)]),  # goes two ways
        ((H, X1, Y1), [(A, X1, Z1), (B, Z1, X1), (A, X1, Y1)]),  # comes back
        ((H, X1, Y1), [(A, X1, Y1), (B, Y1, Z1)]),  # goes on
        ((H, X1, Y1), [(A, X1, Z1), (B, Z1, Z1), (A, Z1, Y1)]),  # has a loop
        ((H, X1, X1), [(A, X1, X1)]),
        ((H, X1, 5), [(A, X1, 5)]),
        ((H, X1, Y1), [(A, X1, 5), (A, 5, Y1)]),
        ((H, 5, Y1), [(A, 5, Y1)]),
        ((H, X1), [(A, X1)]),
        ((H, X1, Y1, Z1), [(A, X1, Y1, Z1)]),
        ((H, X1, Y1), [(A, X1, 0), (B, X1, Y1)]),  # a unary atom, padded
        ((H, X1, Y1), []),
        ((H, X1, X1), []),
    ],
)
def test_other_bodies_are_no_chains(head, body):
    assert steps(head, *body) is None


# -- test firings

LIKES = 1
X, Y, Z = 4, 5, 6


def rows_of(atoms) -> list[tuple[int, ...]]:
    return [tuple(atom) for atom in atoms.tolist()]


def ask_all(rows) -> Questions:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return Questions(*table.unbind(1))


def fire(program, rows, **options):
    """The groundings of each (question, candidate, rule)."""
    return fire_by(plan_rules(*kb.build(**program.arrays())), rows, **options)


def fire_by(plan, rows, **options):
    found = list_groundings(plan, ask_all(rows), **options)
    assert not len(found.walk), "nobody asks for walks"
    *triples, counts = (column.tolist() for column in found[:4])
    keys = [*zip(*triples, strict=True)]
    assert keys == sorted(set(keys)) and all(counts)
    return Counter(dict(zip(keys, counts, strict=True)))


def unknown_facts(row, left_out):
    """What a question leaves out, as a test of an atom."""
    predicate, side, entity, answer = row
    pair = (entity, answer) if side == TAIL else (answer, entity)

    def is_unknown(atom):
        if not answer or len(atom) != 3:
            return False
        if left_out == "pair":
            return atom[1:] in (pair, pair[::-1])
        return atom == (predicate, *pair)

    return is_unknown


def brute_force(program, rows, left_out="fact", object_identity=False):
    found: Counter = Counter()
    for question, row in enumerate(rows):
        predicate, side, entity, _ = row
        is_unknown = unknown_facts(row, left_out)
        facts = {fact for fact in program.facts if not is_unknown(fact)}
        for i, rule in enumerate(program.rules):
            if rule[0][0] != predicate:
                continue
            base = facts, program.n_constants, object_identity
            for substitution in oracles.groundings(rule, *base):
                head = oracles.put(rule[0], substitution)
                if head[HEAD + TAIL - side] == entity:
                    found[question, head[side], i] += 1
    return found


def walks(program, rows, **options):
    """The probability of each (question, candidate, rule) in units, as firings have it."""
    built, sizes = kb.build(**program.arrays())
    plan = plan_rules(built, sizes, with_walks=True)
    found = list_groundings(plan, ask_all(rows), **options)
    keys = zip(*(column.tolist() for column in found[:3]))
    return dict(zip(keys, found.walk.tolist(), strict=True))


def is_path(rule, n_constants):
    """Whether the body leads from one argument of the head to the other, through each variable once."""
    head, *body = rule
    if len(head) != 3 or any(len(atom) != 3 for atom in body):
        return False
    places = Counter(term for atom in body for term in atom[1:])
    ends = {term for term, n in places.items() if n == 1}
    inner = {term for term, n in places.items() if n == 2}
    if min(places, default=0) <= n_constants or ends | inner != set(places):
        return False
    if ends != set(head[1:]) or len(ends) != 2:
        return False
    reached, goals = {head[1]}, list(body)
    for _ in body:
        goals = [a for a in goals if not reached & set(a[1:])]
        reached |= {t for a in body if a not in goals for t in a[1:]}
    return reached == set(places)


def walk_by_hand(program, rule, row, left_out, object_identity):
    """{candidate: (probability, ways)} of a path rule, one fact after the other."""
    _, side, entity, _ = row
    is_unknown = unknown_facts(row, left_out)
    facts = [fact for fact in program.facts if not is_unknown(fact)]
    head, *body = rule
    ends: dict[int, list[Fraction]] = {}

    def walk_on(term, visited, goals, chance):
        here = visited[-1]
        if not goals:
            ends.setdefault(here, []).append(chance)
            return
        # the one atom with the variable that was reached last
        (goal,) = (goal for goal in goals if term in goal[1:])
        place = HEAD if goal[HEAD] == term else TAIL
        other = HEAD + TAIL - place
        others = [g for g in goals if g is not goal]
        leads = lambda fact: (fact[0], fact[place]) == (goal[0], here)
        binary = [fact for fact in facts if len(fact) == 3]
        there = [fact[other] for fact in binary if leads(fact)]
        for end in there:
            if not (object_identity and end in visited):
                later = chance / len(there)
                walk_on(goal[other], [*visited, end], others, later)

    walk_on(head[HEAD + TAIL - side], [entity], body, Fraction(1))
    return {end: (sum(parts), len(parts)) for end, parts in ends.items()}


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
def test_walks_are_those_along_single_facts(program, left_out, identity):
    """A probability is off by less than a unit for each atom of each grounding; other bodies have none."""
    rows, options = all_questions(program), (left_out, identity)
    found = walks(program, rows, left_out=left_out, object_identity=identity)
    assert set(found) == set(brute_force(program, rows, *options))
    for (question, candidate, i), units in found.items():
        rule = program.rules[i]
        if not is_path(rule, program.n_constants):
            assert units == 0
            continue
        ends = walk_by_hand(program, rule, rows[question], *options)
        expected, n_ways = ends[candidate]
        error = abs(units * Fraction(WALK_UNIT) - expected)
        assert units > 0
        assert error < (len(rule) - 1) * n_ways * Fraction(WALK_UNIT)


def test_a_walk_divides_by_the_facts_that_are_left():
    """likes(X, Y) <- likes(X, Z), likes(Z, Y), from 1: to 2 and to 3, and from 3 to 1 and to 2."""
    facts = tuple((LIKES, i, j) for i, j in ((1, 2), (1, 3), (3, 1), (3, 2)))
    rule = (LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)
    program = Program(3, (2,), facts, (rule,))

    def probabilities(row, **options):
        found = walks(program, [row], **options)
        return {end: n * WALK_UNIT for (_, end, _), n in found.items()}

    assert probabilities((LIKES, TAIL, 1, 0)) == {1: 0.25, 2: 0.25}
    # Without likes(1, 2), the first step leads to 3 alone.
    assert probabilities((LIKES, TAIL, 1, 2)) == {1: 0.5, 2: 0.5}
    # Without all facts of 1 and 3 it leads to 2, where the walk ends.
    assert probabilities((LIKES, TAIL, 1, 3), left_out="pair") == {}
    # Under object identity a walk that comes back ends.
    assert probabilities((LIKES, TAIL, 1, 0), object_identity=True) == {2: 0.25}


def test_a_walk_keeps_a_unit_however_unlikely_it_is():
    """Eight steps, each to one of 256 entities, have a chance of 2 ** -64."""
    n_wide, n_steps = 256, 8
    variables = [n_wide + 1, *range(n_wide + 3, n_wide + 2 + n_steps)]
    variables.append(n_wide + 2)
    body = [(LIKES, i, j) for i, j in itertools.pairwise(variables)]
    rule = ((LIKES, n_wide + 1, n_wide + 2), *body)
    star = tuple((LIKES, 1, j) for j in range(1, n_wide + 1))
    program = Program(n_wide, (2,), star, (rule,))
    # All ways but the loop of 1 end at once, and the walk stays there.
    found = walks(program, [(LIKES, TAIL, 1, 0)])
    assert found[0, 2, 0] == 1
    assert found[0, 1, 0] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("identity", [False, True])
def test_walks_are_the_same_bits_on_a_gpu(identity):
    n = 30
    facts = tuple(
        (LIKES, i, j) for i in range(1, n) for j in range(1, n) if i * j % 7 < 3
    )
    x, y, z, w = range(n + 1, n + 5)
    rules = (
        ((LIKES, x, y), (LIKES, x, z), (LIKES, z, w), (LIKES, w, y)),
        ((LIKES, x, y), (LIKES, z, x), (LIKES, z, y)),
        ((LIKES, x, 1), (LIKES, x, z)),
    )
    program = Program(n, (2,), facts, rules)
    rows = ask_all(all_questions(program))
    found = {}
    for device in ("cpu", "cuda"):
        built, sizes = kb.build(**program.arrays(), device=device)
        plan = plan_rules(built, sizes, with_walks=True)
        asked = Questions(*(column.to(device) for column in rows))
        found[device] = derive.list_groundings(plan, asked, "fact", identity)
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        assert torch.equal(one, other.cpu())


def all_questions(program):
    """Every question about a binary predicate, with and without an answer to leave out."""
    constants = range(1, program.n_constants + 1)
    predicates = [p for p, arity in enumerate(program.arity, 1) if arity == 2]
    asked = itertools.product(predicates, (HEAD, TAIL), constants)
    rows = [(*question, 0) for question in asked]
    for p, *arguments in program.facts:
        if p in predicates:
            head, tail = arguments
            rows += [(p, HEAD, tail, head), (p, TAIL, head, tail)]
    return rows


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
def test_firings_are_those_of_every_grounding(program, left_out, identity):
    rows = all_questions(program)
    options = dict(left_out=left_out, object_identity=identity)
    expected = brute_force(program, rows, **options)
    assert fire(program, rows, **options) == expected


def test_a_fact_that_is_left_out_is_walked_in_neither_direction():
    """p(X, Y) <- q(X, Z), p(W, Z), q(W, Y): from 1 to 2, back by p(1, 2) to 1 unless that is left out, or to 3."""
    facts = ((1, 1, 2), (1, 3, 2), (2, 1, 2), (2, 1, 4), (2, 3, 4))
    rules = (((1, 5, 6), (2, 5, 7), (1, 8, 7), (2, 8, 6)),)
    program = Program(4, (2, 2), facts, rules)
    assert fire(program, [(1, TAIL, 1, 2)]) == {(0, 4, 0): 1}
    assert fire(program, [(1, TAIL, 1, 0)]) == {(0, 2, 0): 1, (0, 4, 0): 2}


@st.composite
def path_programs(draw):
    """Rules whose bodies are paths that share beginnings, over a dense graph."""
    entity = st.integers(1, 5)
    fact = st.tuples(st.integers(1, 2), entity, entity)
    facts = draw(st.sets(fact, min_size=8, max_size=20))
    step = st.tuples(st.integers(1, 2), st.booleans())
    path = st.lists(step, min_size=1, max_size=5)
    paths = draw(st.lists(path, min_size=1, max_size=4))
    rules = []
    for path in paths:
        body = []
        for i, (predicate, is_forward) in enumerate(path, 6):
            ends = (i, i + 1) if is_forward else (i + 1, i)
            body.append((predicate, *ends))
        rules.append(((1, 6, 6 + len(path)), *body))
    return Program(5, (2, 2), tuple(sorted(facts)), tuple(rules))


@given(path_programs(), st.sampled_from(["fact", "pair"]))
def test_paths_that_come_back_to_an_entity_do_not_count(program, left_out):
    """Under object identity, where walks are merged before their last step."""
    rows = [row for row in all_questions(program) if row[0] == 1]
    expected = brute_force(program, rows, left_out, object_identity=True)
    options = {"left_out": left_out, "object_identity": True}
    plan = plan_rules(*kb.build(**program.arrays()))
    assert fire_by(plan, rows, **options) == expected
    # The same where a table of all neighbours would be too large, and in small pieces.
    neighbours = plan.neighbours._replace(offsets=plan.neighbours.offsets[:0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "MAX_CHUNK_ROWS", 3)
        searching = replace(plan, neighbours=neighbours)
        assert fire_by(searching, rows, **options) == expected


# -- test firing chunks


@given(programs, st.booleans())
def test_derived_answers_are_the_atoms_of_one_step(program, identity):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_rules(world, sizes)
    model = model_of(program, 1, object_identity=identity)
    atoms = rows_of(model.atoms[kb.is_binary(model.atoms)])
    queries = atoms[::2]
    if not queries:
        return
    for sides in ((HEAD,), (TAIL,), (HEAD, TAIL)):
        asked_of = lambda atom, sides=sides: {
            (side, atom[0], atom[HEAD + TAIL - side]) for side in sides
        }
        table = torch.tensor(queries)
        derived = set(
            rows_of(
                derive.derive_answers(
                    plan, table, sides, object_identity=identity
                )
            )
        )
        given = set().union(*map(asked_of, queries))
        asked = {atom for atom in atoms if asked_of(atom) & given}
        # A fact is listed where a rule derives it too.
        facts = set(rows_of(world.facts))
        assert derived - facts == asked - facts
        assert derived <= asked


X3, Y3, Z3 = 6, 7, 8
# near(X3, Y3) <- near(X3, Z3), near(Z3, Y3) over a chain of five entities.
CHAIN = Program(
    facts=tuple((1, i, i + 1) for i in range(1, 5)),
    rules=(((1, X3, Y3), (1, X3, Z3), (1, Z3, Y3)),),
    n_constants=5,
    arity=(2,),
)


def joined(chunks):
    """The columns of all chunks, whose questions are numbered from the first one of all."""
    start, parts = 0, []
    for questions, found in chunks:
        own = found._replace(question=found.question + start)
        parts.append((*questions, *own))
        start += len(questions.entity)
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


@given(programs, st.booleans(), st.integers(2, 4))
def test_any_number_of_threads_fires_the_same(program, identity, n_threads):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_rules(world, sizes)
    queries = world.facts.long()
    if not len(queries) or world.facts.shape[1] <= TAIL:
        return
    asked = derive.open_questions(queries, TAIL)
    threads_of_parts = set()

    def compute(questions, found):
        threads_of_parts.add(threading.get_ident())
        return questions, found

    def run(n_threads, work, most_rows=10**6):
        options = dict(object_identity=identity, work=work, n_threads=n_threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derive, "PILOT_QUESTIONS", 1)
            patch.setattr(derive, "MIN_PART_ROWS", 1)
            patch.setattr(derive, "MAX_CHUNK_JOIN_ROWS", most_rows)
            return joined(
                derive.map_groundings(compute, plan, asked, **options)
            )

    one, several = GroundingWork(), GroundingWork()
    alone = run(1, one)
    assert threads_of_parts == {threading.get_ident()}
    for column, expected in zip(run(n_threads, several), alone, strict=True):
        assert torch.equal(column, expected)
    assert several.n_rows == one.n_rows
    # Chunks that are too large are halved, down to one question.
    for column, expected in zip(run(n_threads, GroundingWork(), 1), alone):
        assert torch.equal(column, expected)


def test_the_budget_bounds_the_rows_and_the_joins_of_all_chunks(monkeypatch):
    world, sizes = kb.build(**CHAIN.arrays())
    plan = derive.plan_rules(world, sizes)
    asked = derive.open_questions(world.facts.long(), TAIL)
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)

    def run(budget, work=None):
        count, options = lambda _, found: len(found.rule), {"budget": budget}
        return sum(
            derive.map_groundings(count, plan, asked, work=work, **options)
        )

    spent, work = RowBudget(10**9), GroundingWork()
    assert run(spent, work) == 3
    n_joins, rest = divmod(spent.n_rows - work.n_rows, joins.JOIN_OVERHEAD_ROWS)
    assert n_joins >= 2 and not rest
    assert run(RowBudget(spent.n_rows)) == 3
    with pytest.raises(RowBudgetExceeded):
        run(RowBudget(spent.n_rows - 1))


# -- what a search knows

FAMILY = Program(
    3,
    (2, 2),
    ((1, 1, 2), (1, 2, 3)),
    (((2, 4, 6), (1, 4, 5), (1, 5, 6)), ((1, 4, 5), (1, 4, 5))),
)


def indexed(program: Program, object_identity: bool = False):
    """The model of height 1 and its index."""
    world, sizes = kb.build(**program.arrays())
    model = model_of(program, 1, object_identity=object_identity)
    known = derive.build_derivability_index(world, sizes, model, 1)
    assert known is not None
    return world, sizes, model, known


def pairs_of(index, sizes, atoms):
    """The (atom, rule) of an index of some atoms, each once."""
    keys = index.derivation_keys
    rows = rows_of(atoms[keys // sizes.n_rules])
    pairs = list(zip(rows, (keys % sizes.n_rules).tolist()))
    assert len(pairs) == len(set(pairs))
    return set(pairs)


@given(programs, st.booleans(), st.integers(1, 9))
@example(FAMILY, False, 1)
def test_rules_of_an_atom_are_by_the_oracle(program, object_identity, n_pairs):
    """A rule that needs the atom itself does not derive it; by rules, by questions, and read from an index."""
    world, sizes, model, known = indexed(program, object_identity)
    oracle = oracles.consequences(program, True, object_identity)
    atoms = dict(zip(atoms_of(model.atoms), rows_of(model.atoms)))
    want = {(atoms[atom], i) for i, atom in oracle if atom in atoms}
    assert pairs_of(known, sizes, model.atoms) == want
    rules = torch.arange(len(program.rules), dtype=torch.int32)
    rules = rules.expand(len(model.atoms), -1)
    derives = derive.rule_derives(known, sizes, model.atoms, rules)
    assert int(derives.sum()) == len(want)

    # Some atoms, read from an index of all or of these.
    some = model.atoms[::2]
    of_some = sorted(p for p in want if p[0] in rows_of(some))
    for held in (known, derive.index_atoms(world, sizes, model, some)):
        read = []
        for row, rule in derive.iter_indexed_derivations(held, sizes, some):
            read += zip(rows_of(some[row]), rule.tolist())
        assert sorted(read) == of_some

    # By their questions, of either side.
    binary = model.atoms[kb.is_binary(model.atoms)].long()
    if not len(binary):
        return
    plan, options = (
        plan_rules(world, sizes),
        {"object_identity": object_identity},
    )
    for side in (HEAD, TAIL):
        found = set()
        for row, rule in derive.iter_derivations(
            plan, world, binary, side, **options
        ):
            found |= set(zip(rows_of(binary[row]), rule.tolist()))
        assert found == {p for p in want if p[0] in rows_of(binary)}


@given(programs, st.randoms(use_true_random=False), st.booleans())
def test_answers_have_the_rules_that_derive_them(program, random, identity):
    """By rules and by questions the same, but for facts that are no queries, which may derive themselves by these."""
    world, sizes, whole, known = indexed(program, identity)
    binary = whole.atoms[kb.is_binary(whole.atoms)]
    rows = rows_of(binary)
    if not rows:
        return
    queries = torch.tensor(random.sample(rows, min(2, len(rows))))
    sides = random.choice([(HEAD,), (TAIL,), (HEAD, TAIL)])
    kept = [HEAD + TAIL - side for side in sides]
    asked = {(i, q[0], q[i]) for q in rows_of(queries) for i in kept}
    is_answer = lambda row: any((i, row[0], row[i]) in asked for i in kept)
    answers = set(filter(is_answer, rows))
    pairs = pairs_of(known, sizes, whole.atoms)
    expected = {pair for pair in pairs if pair[0] in answers}
    others = set(rows_of(world.facts)) - set(rows_of(queries))
    plan = plan_rules(world, sizes)
    step = lambda most: derive.answered_step(
        plan, world, queries, sides, most, identity
    )
    model, index = step(10**6)
    assert set(rows_of(model.atoms)) == answers
    pairs = pairs_of(index, sizes, model.atoms)
    assert pairs >= expected
    assert all(atom in others for atom, _ in pairs - expected)
    assert step(-1) is None or not pairs


@given(st.integers(0, 10_000), st.integers(1, 2))
@example(2, 2)  # a body that holds the root, which another rule proves
def test_a_dead_end_leads_to_no_proof(seed, max_height):
    """All searches from every ground atom, followed to their ends by the slow resolver."""
    facts, rules, _ = program(seed)
    world, sizes = kb.build(facts, rules, n_constants=C, n_predicates=P)
    limits = {"max_height": max_height, "max_atoms": 100_000}
    model = fixpoint.least_model(world, sizes, **limits)
    known = derive.build_derivability_index(world, sizes, model, max_height)
    cfg = make_resolve_config(world, sizes, max_height)
    assert known is not None
    ids = (torch.arange(1, n + 1, dtype=torch.int32) for n in (P, C, C))
    roots = torch.cartesian_prod(*ids)
    goals = start(roots, cfg.max_goals)
    successors = resolve(cfg, world, goals, roots)
    base = known, sizes, max_height
    lost = derive.dead_end_mask(*base, roots, goals, successors)
    assert not lost[~successors.mask].any()
    clauses = rows_of(world.facts), rules.tolist()
    for b, s in lost.nonzero().tolist():
        atoms, height = (x[b, s] for x in successors.goals[:2])
        state = zip(rows_of(atoms), height.tolist())
        state = tuple((atom, h) for atom, h in state if atom[0])
        root = tuple(roots[b].tolist())
        assert not provable(state, root, *clauses, max_height)
    proved = (successors.goals.atoms[:, :, 0, 0] == 0) & successors.mask
    assert not (proved & lost).any()


def provable(goals, root, facts, rules, max_height) -> bool:
    base = facts, rules
    return any(
        not child or provable(child, root, *base, max_height)
        for _, _, child in sld.successors(goals, root, *base, C, max_height)
    )
