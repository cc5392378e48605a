"""Scores as values: names, what each gives candidates worked by hand, sums, and a new one in one object."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.fixpoint import Derivations, count_rules, with_confidence
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import evaluate, explain, rank_metrics, ranking
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores import score as by_rules
from funcppo.kg.scores import score as score_module
from funcppo.kg.scores.score import (
    MaxConfidence,
    Score,
    names_to_try,
    parse,
    register,
)
from funcppo.kg.search.task import build_task, with_other_facts
from tests import oracles
from tests.kg.ranking.scores import score_by_name
from tests.oracles import Program, programs

# -- by rules

SAME = Program(2, (2, 2), ((1, 1, 2),), (((2, 3, 4), (1, 3, 4)),) * 5)
# of an atom and a rule
pairs = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 4)))


def log_odds(score, support, found, pairs=4.0, **settings):
    """The scores of 7 atoms by rules that are right `support` times out of `pairs`."""
    world, _ = kb.build(**SAME.arrays())
    support = torch.tensor(support).float()
    pairs = torch.full_like(support, pairs)
    world = world._replace(support=support, body_pairs=pairs)
    table = torch.tensor(sorted(found), dtype=torch.int64)
    atom, rule = table.reshape(-1, 2).unbind(1)
    parts = [Derivations(atom[:3], rule[:3]), Derivations(atom[3:], rule[3:])]
    return score(world, parts, 7, **settings)


def noisy_or(confidences, power):
    return (1 - math.prod(1 - c**power for c in confidences)) ** (1 / power)


@given(
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    pairs,
    st.sampled_from([1.0, 1.5, 3.0]),
    st.integers(1, 6),
)
def test_each_atom_is_scored_by_its_rules(support, found, power, n_best):
    """By all of them, or by the best."""
    of = lambda atom: sorted(support[r] / 4 for a, r in found if a == atom)
    own = [of(atom) for atom in range(7)]
    best = {"n_best": n_best, "power": power}
    for score, settings, want in (
        (by_rules.max_confidence, {}, [max(c, default=0) for c in own]),
        (by_rules.noisy_or, {"power": power}, [noisy_or(c, power) for c in own]),
        (by_rules.noisy_or_of_best, best, [noisy_or(c[-n_best:], power) for c in own]),
    ):  # fmt: skip
        got = log_odds(score, support, found, **settings).sigmoid()
        assert got.tolist() == pytest.approx(want, rel=1e-12)


SUPPORT = [1, 30, 700, 990, 999] * 20  # of 1,000


@given(
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 99)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_noisy_or_keeps_apart_what_many_rules_derive(found, random):
    """Log-odds of exact fractions, up to 300; 1e-12 is float64. Another order of summation gives the same ranks."""
    got = log_odds(by_rules.noisy_or, SUPPORT, found, 1000.0)
    for atom in range(7):
        own = [SUPPORT[r] for a, r in found if a == atom]
        wrong = math.prod(Fraction(1000 - n, 1000) for n in own)
        right = 1 - Fraction(wrong)
        if not right:
            assert float(got[atom]) == -math.inf
            continue
        # of numerator and denominator alone: they exceed what a float holds
        exact = math.log(right.numerator) - math.log(right.denominator)
        exact -= math.log(wrong.numerator) - math.log(wrong.denominator)
        assert float(got[atom]) == pytest.approx(exact, rel=1e-12, abs=1e-12)

    order = random.sample(range(100), 100)
    moved = {(atom, order.index(r)) for atom, r in found}
    support = [SUPPORT[r] for r in order]
    shuffled = log_odds(by_rules.noisy_or, support, moved, 1000.0)
    lines = map(rank_metrics.quantise, (got, shuffled))
    assert torch.equal(*lines)


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_atoms_of_a_certain_rule_are_equal_and_above_all_others(power):
    """Whatever else derives them: their score is 1."""
    found = {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (2, 3), (2, 4)}
    score, support = partial(by_rules.noisy_or, power=power), [4, 3, 3, 3, 3]
    got = log_odds(score, support, found)
    assert torch.isposinf(got[:2]).all()
    assert torch.isfinite(got[2])
    line = rank_metrics.quantise(got)
    assert line[0] == line[1] > line[2]
    got = log_odds(by_rules.max_confidence, support, found)
    assert torch.isposinf(got[:2]).all()


def test_only_what_is_derived_within_the_height_exists():
    """path(1, 3) takes two steps on a chain of two edges, path(3, 1) cannot be derived."""
    x, y, z = 4, 5, 6
    path = (((2, x, y), (1, x, y)), ((2, x, y), (2, x, z), (1, z, y)))
    chain = Program(3, (2, 2), ((1, 1, 2), (1, 2, 3)), path)
    base = kb.build(**chain.arrays())
    model = fixpoint.least_model(*base, max_height=None, max_atoms=100)
    atoms = [[1, 1, 2], [2, 1, 2], [2, 1, 3], [2, 3, 1]]
    atoms = torch.tensor(atoms, dtype=torch.int32)
    for max_height in range(3):
        found = by_rules.is_derived_within(model, max_height, atoms).tolist()
        assert found == [i <= max_height for i in range(3)] + [False]


# Everybody has one city, and some cities have several people.
LIVES = ["ann lives rome", "bob lives rome", "cid lives oslo"]
FRIENDS = [
    "ann friend bob", "ann friend cid", "dan friend cid", "dan friend ann",
]  # fmt: skip
RULES = """
lives(X, Y) :- friend(X, Z), lives(Z, Y)
lives(X, Y) :- friend(Z, X), lives(Z, Y)
"""


def small_task(**settings):
    triples = [line.split() for line in LIVES + FRIENDS]
    dataset = loaders.from_triples(triples, rules=RULES)
    return build_task(dataset, ProverTaskConfig(max_height=1, **settings))


def test_an_own_fact_is_no_other_fact():
    task = with_other_facts(small_task())
    assert task.other_facts is not None
    ids = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    lives = task.dataset.predicates.index("lives") + 1
    pairs = [("ann", "rome"), ("cid", "oslo"), ("cid", "rome"), ("dan", "oslo")]
    atoms = torch.tensor([[lives, ids[x], ids[y]] for x, y in pairs])
    for side, expected in ((HEAD, [0, 0, 1, 0]), (TAIL, [1, 0, 2, 1])):
        found = by_rules.count_other_facts_of(
            task.kb, task.sizes, task.other_facts.degrees, atoms, side
        )
        assert found.tolist() == expected


def count_sets(program, found):
    """The counts by predicate and side, and by rule, from the sets of atoms that the rules derive."""
    facts = set(program.facts)

    def others(atom, side):
        like = lambda fact: fact[0] == atom[0] and fact[side] == atom[side]
        return [fact for fact in facts - {atom} if like(fact)]

    of_facts, of_rules = {}, []
    for predicate, arity in enumerate(program.arity, 1):
        own = [fact for fact in facts if fact[0] == predicate]
        for side in (HEAD, TAIL) if arity == 2 else ():
            n_with = sum(bool(others(fact, side)) for fact in own)
            of_facts |= {(predicate, side): (len(own), n_with)}
    for rule, (head, *_) in enumerate(program.rules):
        new = {atom for i, atom in found if i == rule} - facts
        if len(head) != 3:
            of_rules.append((0, 0, 0))
            continue
        n_with = (sum(bool(others(a, s)) for a in new) for s in (HEAD, TAIL))
        of_rules.append((len(new), *n_with))
    return of_facts, of_rules


@pytest.mark.parametrize("object_identity", [False, True])
@given(program=programs)
def test_counts_are_those_of_sets(program, object_identity):
    world, sizes = kb.build(**program.arrays())
    options = {"object_identity": object_identity}
    counts = by_rules.count_other_facts(world, sizes, **options)
    found = oracles.consequences(program, False, object_identity)
    of_facts, of_rules = count_sets(program, found)
    for (predicate, side), expected in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        own = counts.n_facts[label], counts.n_facts_with[label]
        assert expected == tuple(map(int, own))
    got = torch.cat([counts.n_derived[:, None], counts.n_derived_with], 1)
    assert got.tolist() == [list(row) for row in of_rules]

    # The shares weigh the rules by their confidences, in float64.
    rule_counts = count_rules(world, sizes, **options)
    world = with_confidence(world, rule_counts, 3.0)
    shares = by_rules.other_fact_shares(world, counts)
    support = rule_counts.support - rule_counts.circular_support
    pairs = rule_counts.body_pairs - rule_counts.circular_support + 3
    for (predicate, side), (n_facts, n_with) in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        confidence = (support.double() / pairs).tolist()
        heads = [rule[0][0] for rule in program.rules]
        rules = [
            (c, row)
            for c, row, head in zip(confidence, of_rules, heads)
            if head == predicate
        ]
        assert float(shares.of_facts[label]) == (n_with + 1) / (n_facts + 2)
        n_new = sum(c * row[0] for c, row in rules)
        n_new_with = sum(c * row[side] for c, row in rules)
        expected = (n_new_with + 1) / (n_new + 2)
        share = float(shares.of_derived[label])
        assert share == pytest.approx(expected, rel=1e-14)


ONE_STEP = ProverTaskConfig(max_height=1)

# -- names


@pytest.mark.parametrize(
    "name",
    [
        "exists@2",
        "max-confidence",
        "max-confidence-other-facts",
        "noisy-or",
        "noisy-or@3",
        "noisy-or@1.5-other-facts",
        "noisy-or-top-5@2",
        "linked-proof-product@2",
    ],
)
def test_a_name_is_that_of_its_score(name):
    score = parse(name)
    assert score.name == str(score) == name
    assert ("other-facts" in score.needs) == name.endswith("-other-facts")
    assert score.min_height == (
        2 if name in ("exists@2", "linked-proof-product@2") else 1
    )


@pytest.mark.parametrize(
    "name",
    [
        *("", "evidence", "max-confidence@2"),
        *(f"exists@{h}" for h in ("", "0", "²", "9" * 20)),
        *(f"noisy-or@{p}" for p in ("", "0", "100", "nan")),
        "linked-proof-product@0",
        *(f"noisy-or-{end}" for end in ("top-", "top-0", "other-facts-other-facts")),
    ],
)  # fmt: skip
def test_another_name_is_one_error(name):
    with pytest.raises(ValueError, match=r"^score .*: expected exists@H ") as e:
        parse(name)
    assert str(e.value).count("\n") == 0 and len(str(e.value)) < 420


def test_a_run_adds_its_scores_to_the_names():
    learnt = MaxConfidence("success")
    assert parse("success", {"success": learnt}) is learnt
    with pytest.raises(ValueError, match="'evidence': expected success, exi"):
        parse("evidence", {"success": learnt})


# -- values


def test_other_facts_add_a_log_likelihood_ratio_for_each_side():
    """far(a, X): c and d by confidence 1/2; c has another fact of far as a tail, d has none; a has none as a head."""
    hops = [
        (a, "hop", b) for a, b in ("ab", "bc", "bd", "xy", "yz", "xw", "wv")
    ]
    fars = [(a, "far", b) for a, b in ("xz", "zc", "xv")]
    rules = "far(X, Y) :- hop(X, Z), hop(Z, Y)"
    dataset = loaders.from_triples(hops + fars, rules=rules)
    settings = ProverTaskConfig(max_height=1, smoothing=None)
    task = build_task(dataset, settings)
    far = dataset.predicates.index("far") + 1
    a, c, d, x, z = (dataset.entities.index(name) + 1 for name in "acdxz")
    atoms = sorted([far, *pair] for pair in ((a, a), (a, c), (a, d), (x, z)))
    atoms = torch.tensor(atoms, dtype=torch.int32)
    plain = score_by_name(task, "max-confidence", atoms)

    # Facts: far of (x, z), (x, v), (z, c). Of their heads two have another fact, of their tails none.
    head_facts, tail_facts = (2 + 1) / (3 + 2), 1 / (3 + 2)
    # Derived beside them, by confidence 1/2: (a, c), (a, d). No head has a fact, one tail has.
    head_derived, tail_derived = 1 / (1 + 2), (1 / 2 + 1) / (1 + 2)
    ratio = {HEAD: (head_facts, head_derived), TAIL: (tail_facts, tail_derived)}
    n_facts = {(x, z): {HEAD: 1, TAIL: 0}, (a, c): {HEAD: 0, TAIL: 1}}
    score = parse("max-confidence-other-facts")
    for side in (HEAD, TAIL):
        found = score_by_name(task, score.name, atoms, side)
        terms = explain.other_facts(task, score, atoms.long(), side)
        for atom, log_odds, before, fields in zip(
            atoms.tolist(), found.tolist(), plain.tolist(), terms, strict=True
        ):
            own, derived = ratio[side]
            n = n_facts.get((atom[1], atom[2]), {}).get(side, 0)
            assert (fields["relation"], fields["n_facts"]) == ("far", n)
            shares = fields["share_of_facts"], fields["share_of_derived"]
            assert shares == pytest.approx(ratio[side])
            if not n:
                own, derived = 1 - own, 1 - derived
            added = math.log(own / derived)
            assert log_odds == pytest.approx(before + added, rel=1e-14)
            assert fields["log_odds"] == pytest.approx(added, rel=1e-14)
            line = explain.other_facts_line(fields)
            assert line.startswith(f"{added:+.4f} log-odds by other facts: it ")
    assert torch.isinf(plain).any()  # what no rule derives stays so


# -- a new score


class RuleCount(Score):
    """How many rules derive a candidate, as log-odds."""

    def log_odds(self, found):
        count = torch.zeros(len(found), dtype=torch.float64)
        for part in found.derivations():
            one = torch.ones(len(part.atom_row), dtype=torch.float64)
            count = count.index_add(0, part.atom_row, one)
        return torch.where(count > 0, count, -torch.inf)


def test_a_new_score_is_one_object_that_evaluate_ranks_by(monkeypatch):
    monkeypatch.setattr(score_module, "_FORMS", dict(score_module._FORMS))
    make, name = lambda name: RuleCount(name.string), "rule-count"
    register(name, name, make, "of a candidate", tried=(name,))
    assert names_to_try()[-1] == "rule-count"
    dataset = loaders.load("family_tree:30:0")
    task = build_task(dataset, ONE_STEP)
    for name in ("rule-count", "rule-count-other-facts"):
        options = {"protocol": RankingProtocol(), "prove": None}
        ranks = Evaluator(
            task=task, score=parse(name), all_scores=True, **options
        )
        rows = np.arange(len(dataset.test))
        queries = evaluate.rank_window(ranks, dataset.test, rows)
        records = [record for query in queries for record in query]
        assert len(records) == 2 * len(rows)
        scores = {record["quantised_score"] for record in records} - {None}
        is_count = {score % 10_000 == 0 for score in scores}
        assert is_count == ({True} if name == "rule-count" else {True, False})
    known = r"\), rule-count \(of a candidate\); H"
    with pytest.raises(ValueError, match=known):
        parse("rule-counts")


def test_scores_add_up():
    dataset = loaders.load("family_tree:30:0")
    task = build_task(dataset, ONE_STEP)
    atoms = task.least_model.atoms[::9].int()
    scores = parse("max-confidence"), parse("noisy-or@2")
    both = scores[0] + scores[1]
    assert both.name == "max-confidence + noisy-or@2"
    got, one, other = (
        ranking.scoring.score_atoms(task, score, atoms, TAIL)
        for score in (both, *scores)
    )
    assert torch.equal(got, one + other)
