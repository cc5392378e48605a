"""T_P: worked by hand; equal to a least model over Python sets and to Prolog; the counts known of the data sets."""

import gzip
import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core.host import Deadline
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import derive, fixpoint, joins, kb
from tests import oracles, prolog
from tests.learning import DATA
from tests.oracles import Program, programs

MANY = 10**9  # more atoms than any test derives

# edges 1 -> 2 -> 3 -> 1 and 3 -> 4; path is their closure, loop(X) a path from X to itself, any a proposition
EDGE, PATH, LOOP, ANY = 1, 2, 3, 4
X, Y, Z = 5, 6, 7
GRAPH = Program(
    4,
    (2, 2, 1, 0),
    ((EDGE, 1, 2), (EDGE, 2, 3), (EDGE, 3, 1), (EDGE, 3, 4)),
    (
        ((PATH, X, Y), (EDGE, X, Y)),
        ((PATH, X, Y), (PATH, X, Z), (EDGE, Z, Y)),
        ((LOOP, X), (PATH, X, X)),
        ((ANY,), (LOOP, 2), (EDGE, Y, Z)),
    ),
)


def atoms_of(table):
    return [tuple(t for t in row if t) for row in table.tolist()]


def heights(model):
    return dict(zip(atoms_of(model.atoms), model.height.tolist()))


def model_of(program, max_height=None, max_atoms=MANY, **options):
    base = kb.build(**program.arrays())
    options |= {"max_height": max_height, "max_atoms": max_atoms}
    return fixpoint.least_model(*base, **options)


def test_a_closure_worked_by_hand():
    model = model_of(GRAPH)
    assert heights(model)[LOOP, 2] == 4 and heights(model)[ANY,] == 5
    assert model.n_atoms_after_step == (4, 8, 12, 16, 19, 20)
    assert model.complete and model.reached_fixpoint and not model.stop_reason


@given(programs, st.booleans())
def test_the_model_is_the_least_model_with_its_heights(program, identity):
    """Also where joins are taken in pieces, and of ids of which three take 93 bits, more than one key."""
    options = {"object_identity": identity}
    expected = oracles.least_model(program, **options)
    model = model_of(program, **options)
    assert heights(model) == expected
    assert atoms_of(model.atoms) == sorted(expected)
    assert model.complete and model.reached_fixpoint
    assert model.n_atoms_after_step[-1] == len(model.atoms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "MAX_CHUNK_ROWS", 2)
        assert heights(model_of(program, **options)) == expected

    big = lambda t: t if t <= 0 else t + 2**30 - oracles.N_CONSTANTS
    wide = lambda atom: (atom[0], *map(big, atom[1:]))
    facts = tuple(map(wide, program.facts))
    rules = tuple(tuple(map(wide, rule)) for rule in program.rules)
    moved = model_of(Program(2**30, program.arity, facts, rules), **options)
    assert heights(moved) == {wide(atom): h for atom, h in expected.items()}


@pytest.mark.skipif(not prolog.AVAILABLE, reason="swipl is not installed")
@pytest.mark.parametrize(
    "n_programs", [130, pytest.param(1300, marks=pytest.mark.long)]
)
def test_answers_and_heights_are_prologs(n_programs):
    """Of programs at once: Prolog's tabled answers, and what its meta-interpreter proves within height 3."""
    random = Random(0)
    several: list[Program] = []
    while len(several) < n_programs:
        drawn = oracles.random_program(random)
        if drawn.rules:  # those without derive nothing: a seventh
            several.append(drawn)
    program, shifts = oracles.together(several)
    found = heights(model_of(program))
    answers, bounded = prolog.models(program, height=3)
    wrong = set(found) ^ answers
    wrong |= {a for a in found if min(found[a], 4) != bounded.get(a, 4)}
    wrong = {atom[0] for atom in wrong}
    for one, by in zip(several, shifts):
        assert not wrong & set(range(by + 1, by + 1 + len(one.arity))), one
    # recursion was exercised
    assert sum(h >= 3 for h in found.values()) > n_programs / 13


@given(programs, st.integers(0, 4), st.booleans())
def test_products_of_weights_are_the_best(program, height, object_identity):
    """By value iteration over every grounding; a fact stands in no body of its own proof."""
    weights = [0.9 - 0.07 * i for i in range(len(program.rules))]
    known = oracles.least_model(program, height, object_identity)
    value = {atom: float(known[atom] == 0) for atom in known}
    best = dict.fromkeys(known, 0.0)
    for _ in range(height):
        for weight, rule in zip(weights, program.rules):
            for found in oracles.groundings(
                rule, set(known), program.n_constants, object_identity
            ):
                head, *body = (oracles.put(atom, found) for atom in rule)
                if head in known and head not in body:
                    product = weight * math.prod(value[x] for x in body)
                    best[head] = max(best[head], product)
        value = {x: 1.0 if known[x] == 0 else best[x] for x in known}
    built = kb.build(**program.arrays())
    model = model_of(program, height, object_identity=object_identity)
    got = fixpoint.best_products(
        *built, model, torch.tensor(weights, dtype=torch.float64), height
    )
    expected = [best[atom] for atom in atoms_of(model.atoms)]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_join_is_taken_in_pieces(monkeypatch):
    """A product of 40 x 40 x 40 rows with two variables wanted: no table is larger than two pieces."""
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 100)
    seen, project = [], joins.project
    see = lambda table, *rest: seen.append(table.size) or project(table, *rest)
    monkeypatch.setattr(joins, "project", see)
    facts = tuple((p, 1, c) for p in (1, 2, 3) for c in range(2, 42))
    a, b, c, d = 50, 51, 52, 53
    rule = ((4, b, c), (1, a, b), (2, a, c), (3, a, d), (3, d, d))
    for of_rule, counts in ((rule, (120,)), (rule[:3], (120, 120 + 40 * 40))):
        model = model_of(Program(49, (2, 2, 2, 2), facts, (of_rule,)))
        assert model.n_atoms_after_step == counts
    assert 0 < max(seen) <= 200


@given(programs)
def test_max_atoms_stops_after_a_whole_step_and_says_so(program):
    whole = heights(model_of(program))
    counts = model_of(program).n_atoms_after_step
    for max_atoms in {n - 1 for n in counts[1:]}:
        model = model_of(program, max_atoms=max_atoms)
        step = max(i for i, n in enumerate(counts) if n <= max_atoms or i == 0)
        assert model.n_atoms_after_step == counts[: step + 1]
        assert heights(model) == {a: h for a, h in whole.items() if h <= step}
        assert not model.complete and not model.reached_fixpoint
        why = f"step {step + 1} exceeds max_atoms {max_atoms}, unknown beyond"
        assert model.stop_reason == f"stopped at {counts[step]} atoms: {why}"
        assert model.stop_code is fixpoint.StopCode.MAX_ATOMS


def test_a_budget_of_rows_stops_after_a_whole_step_and_says_so():
    whole = model_of(GRAPH)
    spent = joins.RowBudget(10**9)
    assert model_of(GRAPH, max_height=2, budget=spent).complete
    budget = joins.RowBudget(spent.n_rows)
    model = model_of(GRAPH, budget=budget)
    assert not model.complete and len(model.n_atoms_after_step) == 3
    n_atoms = whole.n_atoms_after_step[2]
    assert heights(model) == {a: h for a, h in heights(whole).items() if h <= 2}
    why = f"step 3 takes more than {spent.n_rows:,} rows of joins"
    assert (
        model.stop_reason
        == f"stopped at {n_atoms} atoms: {why}, unknown beyond"
    )
    assert model.stop_code is fixpoint.StopCode.MAX_ROWS


@given(programs, st.integers(0, 2), st.booleans())
@settings(deadline=None)
def test_the_step_after_a_model_derives_the_next_model(program, h, identity):
    world, _ = kb.build(**program.arrays())
    model, after, whole = (
        model_of(program, steps, object_identity=identity)
        for steps in (h, h + 1, None)
    )
    is_missing = fixpoint.atom_height(model, whole.atoms.long()) < 0
    others = kb.binary_atoms(whole.atoms[is_missing].long())
    if not len(others):
        return
    is_derived = derive.derived_in_next_step(world, model, others)
    assert torch.equal(is_derived, fixpoint.atom_height(after, others) >= 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_model():
    random = Random(7)
    several = [oracles.random_program(random) for _ in range(200)]
    program, _ = oracles.together(several)
    world, sizes = kb.build(**program.arrays(), device="cuda")
    model = fixpoint.least_model(world, sizes, max_height=None, max_atoms=MANY)
    other = model_of(program)
    assert torch.equal(model.atoms.cpu(), other.atoms)
    assert torch.equal(model.height.cpu(), other.height)


# -- consequences of each rule

LIKES = 1
# likes(X, Y) :- likes(Y, X).   likes(X, Y) :- likes(X, Z), likes(Z, Y).
BACK = (LIKES, 4, 5), (LIKES, 5, 4)
ON = (LIKES, 4, 5), (LIKES, 4, 6), (LIKES, 6, 5)
FRIENDS = Program(
    3,
    (2,),
    ((LIKES, 1, 1), (LIKES, 1, 2), (LIKES, 2, 1), (LIKES, 2, 3)),
    (BACK, ON),
)


def applied(program, **options):
    """The pairs of a rule and an atom that it derives, and those whose atom is a fact."""
    world, sizes = kb.build(**program.arrays())
    pairs, known = [], []
    parts = fixpoint.iter_consequences(world, sizes, **options)
    for i, part in enumerate(parts):
        assert set(part.rule.tolist()) <= {i}
        of_rule = [(i, atom) for atom in atoms_of(part.atoms)]
        is_fact = part.fact >= 0
        assert torch.equal(world.facts[part.fact[is_fact]], part.atoms[is_fact])
        pairs += of_rule
        known += [p for p, fact in zip(of_rule, is_fact.tolist()) if fact]
    assert len(pairs) == len(set(pairs))
    return set(pairs), set(known)


@pytest.mark.parametrize(
    ("smoothing", "whole", "without_one"),
    [(None, [3 / 4, 3 / 5], [2 / 3, 2 / 4]), (5.0, [2 / 8, 1 / 8], [1 / 7, 0])],
)
def test_confidence_worked_by_hand(smoothing, whole, without_one):
    """Without likes(1,1), which derives itself, the first rule is right for 2 of 3 pairs; the second for 1 of 3."""
    world, sizes = kb.build(**FRIENDS.arrays())
    counts = fixpoint.count_rules(world, sizes)
    assert [column.tolist() for column in counts] == [[3, 3], [4, 5], [1, 2]]
    world = fixpoint.with_confidence(world, counts, smoothing)
    confidence = lambda *which: kb.rule_confidence(world, *which).tolist()
    assert confidence() == pytest.approx(whole)
    assert confidence(True) == pytest.approx(without_one)
    assert confidence(torch.tensor([True])) == pytest.approx(without_one)


@given(programs, st.booleans(), st.booleans())
def test_consequences_are_heads_of_one_step(program, leave_one_out, identity):
    options = {"leave_one_out": leave_one_out, "object_identity": identity}
    pairs, known = applied(program, **options)
    assert pairs == oracles.consequences(program, leave_one_out, identity)
    assert known == {pair for pair in pairs if pair[1] in program.facts}


@given(programs)
def test_confidence_counts_each_derived_atom_once_a_rule(program):
    ways = itertools.product((None, 0.0, 2.5), (False, True))
    for smoothing, identity in ways:
        pairs = oracles.consequences(program, smoothing is not None, identity)
        world, sizes = kb.build(**program.arrays())
        counts = fixpoint.count_rules(world, sizes, object_identity=identity)
        world = fixpoint.with_confidence(world, counts, smoothing)
        for i in range(len(program.rules)):
            heads = [a for j, a in pairs if j == i]
            assert world.body_pairs[i] == len(heads) + (smoothing or 0)
            assert world.support[i] == sum(a in program.facts for a in heads)


def test_a_sample_of_the_rules_tells_whether_all_make_too_many_rows():
    """Rules alike, of which one in sixteen is applied: each makes the same rows."""
    check = fixpoint.check_sampled_rows
    check(*kb.build(**FRIENDS.arrays()), 1)  # so few rules tell nothing
    alike = replace(FRIENDS, rules=FRIENDS.rules[1:] * 1024)
    base, sizes = kb.build(**alike.arrays())
    whole = joins.RowBudget(10**9)
    list(fixpoint.iter_consequences(base, sizes, rule_ids=[0], budget=whole))
    n_rows = 1024 * whole.n_rows
    check(base, sizes, n_rows)
    said = f"more than {n_rows - 16:,} rows of joins, by a random sample of 64 of 1,024 rules"
    with pytest.raises(joins.RowBudgetExceeded, match=said):
        check(base, sizes, n_rows - 16)
    with pytest.raises(joins.TimeBudgetExceeded):
        check(base, sizes, n_rows, deadline=Deadline(at=0.0))


# -- data sets

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)


@needs_data
@pytest.mark.parametrize(
    ("name", "rules", "every"),
    [
        ("wn18rr", "rules_kns_amie_full.tsv", 1),
        ("wn18rr", "rules_rnnlogic.tsv", 60),
        ("family", "rules_rnnlogic.tsv", 4),
        ("fb15k-237", "rules_kns.tsv", 4),
        ("fb15k-237", "rules_rnnlogic_top.tsv.gz", 60),
    ],
)
def test_support_and_pairs_are_those_of_a_file(name, rules, every, tmp_path):
    """The columns train_support and train_body_pairs, counted elsewhere: exactly."""
    path = DATA / name / rules
    opened = gzip.open if path.suffix == ".gz" else open
    comments, lines = [], []
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            (comments if line.startswith("#") else lines).append(line)
    lines = lines[::every]
    some = tmp_path / path.name.removesuffix(".gz")
    some.write_text("".join([*comments, *lines]))
    data = load(DATA / name, some)
    assert len(data.rules) == len(lines)

    columns = np.array([line.split("\t")[1:3] for line in lines], dtype=float)
    world, sizes = kb.from_dataset(data)
    world = fixpoint.with_confidence(world, fixpoint.count_rules(world, sizes))
    assert np.array_equal(world.support, columns[:, 0])
    assert np.array_equal(world.body_pairs, columns[:, 1])


@needs_data
def test_one_step_derives_the_known_number_of_fb15k_237(monkeypatch):
    # Joins in few chunks, which are merged less often; `test_fixpoint.py` has many.
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 1 << 23)
    data = load(DATA / "fb15k-237", DATA / "fb15k-237" / "rules.txt")
    world, sizes = kb.from_dataset(data)
    test = torch.from_numpy(data.test).to(torch.int64)
    _, asked = kb.sort_and_index_atoms(test, sizes)
    derived = torch.zeros(len(asked[-1]), dtype=torch.bool)
    for part in fixpoint.iter_consequences(world, sizes):
        row = kb.find_atoms(asked, sizes, part.atoms)
        derived = derived.scatter(0, row[row >= 0], True)
    assert int(derived.sum()) == 9299


S2 = (1062, 1261, 1516, 1785, 2049)
NTP = (978, 1474, 2006, 2535, 2947)


@needs_data
@pytest.mark.parametrize(
    ("name", "rules", "counts", "steps", "last", "tests"),
    [
        ("countries_S1", "rules.txt", (1110, 1158), 1, 1158, [24]),
        ("countries_S2", "rules.txt", S2, 18, 3517, [23, 24]),
        ("countries_S3", "rules.txt", (978, *S2[1:]), 18, 3517, [23, 24]),
        ("countries_S3", "rules_ntp_variant.txt", NTP, 10, 3517, [18, 24]),
    ],
)
def test_countries_have_known_models(name, rules, counts, steps, last, tests):
    data = load(DATA / name, DATA / name / rules)
    model, height = _model_of_data(data, None)
    assert model.n_atoms_after_step[: len(counts)] == counts
    assert len(model.n_atoms_after_step) - 1 == steps
    assert model.n_atoms_after_step[-1] == last
    within = lambda h: int(((height >= 0) & (height <= h)).sum())
    assert [within(h) for h in range(1, len(tests) + 1)] == tests


@needs_data
@pytest.mark.parametrize(
    ("name", "rules", "derived"),
    [
        ("wn18rr", "rules.txt", 1146),
        ("family", "rules.txt", 2210),
        ("family", "rules_rnnlogic.tsv", 2803),
        ("umls", "rules.txt", 160),
    ],
)
def test_one_step_derives_the_known_number_of_triples(name, rules, derived):
    model, height = _model_of_data(load(DATA / name, DATA / name / rules), 1)
    assert model.complete and int((height >= 0).sum()) == derived


def _model_of_data(data, max_height):
    limits = {"max_height": max_height, "max_atoms": MANY}
    model = fixpoint.least_model(*kb.from_dataset(data), **limits)
    return model, fixpoint.atom_height(model, torch.from_numpy(data.test))


# -- hubs


@pytest.mark.parametrize(
    ("max_rows", "max_held"), [(200_000, MANY), (MANY, 100_000)]
)
def test_a_rule_over_a_hub_alone_is_sampled(monkeypatch, max_rows, max_held):
    """r0(X, Y) :- r1(Z, X), r2(Z, Y) over one hub with 3,000 neighbours: 9 million heads."""
    monkeypatch.setattr(fixpoint, "MAX_SAMPLE_ROWS", 200_000)
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 20_000)
    held, distinct = [], joins.distinct
    keep = lambda table, bits: held.append(table.size) or distinct(table, bits)
    monkeypatch.setattr(joins, "distinct", keep)
    n, hub = 3001, 3001
    x, y, z = n + 1, n + 2, n + 3
    r0, r1, r2 = 1, 2, 3
    ways = [(r0, 1), (r1, hub), (r2, hub)]
    facts = tuple((*way, i) for way in ways for i in range(1, hub))
    heads = (r0, x, y), (r1, z, x)
    rules = (*heads, (r2, z, y)), (*heads, (r0, x, y))
    world, sizes = kb.build(**Program(n, (2, 2, 2), facts, rules).arrays())
    budget, sampled = joins.RowBudget(max_rows, max_held=max_held), set()
    options = {"budget": budget, "sampled_rules": sampled}
    counts = fixpoint.count_rules(world, sizes, **options)
    assert sampled == {0} and budget.n_rows <= budget.max_rows
    assert max(held) < 1_000_000
    assert counts.body_pairs.tolist() == [9_000_000, 3_000]
    assert counts.support.tolist()[1] == counts.circular_support.tolist()[1]
    with pytest.raises(joins.RowBudgetExceeded):
        fixpoint.count_rules(world, sizes, budget=joins.RowBudget(200_000))


@given(programs, st.integers(0, 40))
def test_sampled_counts_of_few_constants_are_the_exact_ones(program, max_rows):
    world, sizes = kb.build(**program.arrays())
    exact = fixpoint.count_rules(world, sizes)
    budget = joins.RowBudget(max_rows, overhead=0)
    options = {"budget": budget, "sampled_rules": set()}
    counts = fixpoint.count_rules(world, sizes, **options)
    for i, (head, *_) in enumerate(program.rules):
        if any(t > program.n_constants for t in head[1:]):
            assert [int(c[i]) for c in counts] == [int(c[i]) for c in exact]
