"""Dataset: ids, splits and rules worked out by hand; names that read back; the fingerprint; leaks; descriptions."""

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.dataset import (
    NEAR_INVERSE_SHARE,
    _canonical_rule,
    describe,
    facts_digest,
    from_splits,
    leakage_notes,
    order_facts,
    with_rules,
)
from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import parse_query
from funcppo.kg.graph.text import Atom, Clause, Variable
from tests.kg.graph.clause_strategies import NAMES
from tests.kg.graph.python_datalog import triples


def test_a_program_gives_facts_and_rules_of_any_arity():
    program = "edge(a, b). path(X,Y) :- edge(X,Y). hot. r(7, a, b).\n"
    d = from_text(program + "path(X,Y) :- path(X,Z), edge(Z,Y).")
    assert d.entities == ("a", "b", "7")
    assert d.predicates == ("edge", "path", "hot", "r")
    assert d.arities == (2, 2, 0, 3)
    facts = [[1, 1, 2, 0], [3, 0, 0, 0], [4, 3, 1, 2]]
    assert d.train.tolist() == d.facts.tolist() == facts
    assert d.rules.tolist()[0] == [[2, 4, 5, 0], [1, 4, 5, 0], [0] * 4]
    assert len(d.valid) == len(d.test) == 0
    assert parse_query(d, "hot").tolist() == [3, 0, 0, 0]


def test_the_fingerprint_tells_order_rules_and_splits_apart_but_not_weights():
    a, b = ("a", "r", "b"), ("b", "r", "a")
    splits = ([[a, b]], [[b, a]], [[a], [b]], [[a], [], [b]])
    sets = [from_triples(*of_splits) for of_splits in splits]
    sets += [from_triples([a, b], rules="r(X,Y) :- r(Y,X)")]
    assert len({d.fingerprint for d in sets}) == 5
    weighted = from_triples([a, b], rules="1\tr(X,Y) :- r(Y,X)")
    assert weighted.fingerprint == sets[-1].fingerprint


def test_the_ids_of_triples_follow_first_occurrence_worked_by_hand():
    splits = {
        "train": [("a", "r", "b"), ("b", "s", "a"), ("a", "r", "b")],
        "valid": [("c", "r", "a")],
        "test": [("a", "t", "d"), ("d", "t", "c")],
        "facts": [("b", "s", "a"), ("a", "s", "e")],
    }
    d = from_splits("by hand", splits)
    assert d.entities == ("a", "b", "c", "d", "e")
    assert d.predicates == ("r", "s", "t")
    assert d.arities == (2, 2, 2)
    assert d.train.tolist() == [[1, 1, 2], [2, 2, 1]]
    assert d.valid.tolist() == [[1, 3, 1]]
    assert d.test.tolist() == [[3, 1, 4], [3, 4, 3]]
    assert d.facts.tolist() == [[1, 1, 2], [2, 2, 1], [2, 1, 5]]
    assert (d.n_constants, d.n_predicates, d.atom_width) == (5, 3, 3)
    assert d.notes == (
        "train: 1 lines repeat another and were dropped",
        "valid, test: 2 entities occur in no known fact and are kept",
        "valid, test: 1 relation occurs in no known fact and is kept",
    )


TRIPLES = st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=6)


@given(TRIPLES, TRIPLES, TRIPLES)
def test_the_names_of_the_ids_are_the_triples(train, valid, test):
    d = from_triples(train, valid, test)
    assert triples(d, d.train) == triples(d, d.facts) == set(train)
    assert len(d.train) == len(set(train))
    assert triples(d, d.valid) == set(valid) and triples(d, d.test) == set(test)
    assert (len(d.valid), len(d.test)) == (len(valid), len(test))


def test_rules_that_define_relations_add_them_and_widen_all_atoms():
    d = from_triples(
        [("a", "r", "b")],
        rules="s(X, Y, Z) :- r(X, Y), r(Y, Z)\nt(X) :- u(X, X)\nu(X, Y) :- r(Y, X)",
    )
    # fingerprints of stored runs hold this order
    assert d.predicates == ("r", "u", "t", "s")
    assert d.arities == (2, 2, 1, 3)
    assert d.atom_width == 4 and d.train.tolist() == [[1, 1, 2, 0]]
    assert d.rules.tolist() == [
        [[4, 3, 4, 5], [1, 3, 4, 0], [1, 4, 5, 0]],
        [[3, 3, 0, 0], [2, 3, 3, 0], [0, 0, 0, 0]],
        [[2, 3, 4, 0], [1, 4, 3, 0], [0, 0, 0, 0]],
    ]
    # lines of the rules
    assert [note.split(":")[1] for note in d.notes] == ["3", "2", "1"]


def test_no_rules_are_an_empty_table_and_replace_those_that_were_there():
    d = from_triples([("a", "r", "b")], rules="0.5\tr(X,Y) :- r(Y,X)")
    assert (d.rules.shape, d.rule_weights.tolist()) == ((1, 2, 3), [0.5])
    bare = with_rules(d, [], "none")
    assert (bare.rules.shape, bare.rule_weights.shape) == ((0, 1, 3), (0,))
    assert bare.fingerprint == from_triples([("a", "r", "b")]).fingerprint


ONE = [("a", "r", "b")]


@pytest.mark.parametrize(
    ("rules", "note"),
    [
        ("r(X,Y) :- r(Y,X)\nr(X,Y) :- rr(Y,X)\nr(X,c) :- r(X,b)",
         "relation 'rr': expected one of the data's (close: 'r'), in a rule for 'r'"),
        # The rule for r goes too, since s has no rule then; the cause is named.
        ("r(X,Y) :- s(X,Y)\ns(X,Y) :- r(X,Y), r(Y,c)\nt(X,Y) :- r(Y,X)",
         "entity 'c': expected one of the data's (none of 2 is spelled like it), in a rule for 's'"),
    ],
)  # fmt: skip
def test_rules_of_unknown_names_are_left_out_and_counted(rules, note):
    d = from_triples(ONE, rules=rules)
    assert len(d.rules) == len(d.rule_weights) == 1
    count = "2 of 3 rules have unknown names and were left out"
    assert d.notes[0] == f"rules:2: unknown {note}; {count}"
    assert "s" not in d.predicates


ATOMS = st.tuples(
    st.sampled_from("pq"), st.tuples(*[st.sampled_from("XYZWa")] * 2)
)


def _clause(head, body, weight=0.5, line=1):
    def atom(text):
        args = [Variable(t) if t.isupper() else t for t in text[1]]
        return Atom(text[0], tuple(args))

    return Clause(atom(head), tuple(map(atom, body)), weight, line)


def _is_renaming(one, other):
    """Compare by all permutations of the variables."""
    names = [Variable(x) for x in "XYZW"]
    for permuted in itertools.permutations(names):
        new = dict(zip(names, permuted))
        head, *body = (
            Atom(a.predicate, tuple(new.get(t, t) for t in a.args))
            for a in (one.head, *one.body)
        )
        if head == other.head and {*body} == {*other.body}:
            return True
    return False


@given(
    ATOMS,
    st.lists(ATOMS, min_size=1, max_size=4),
    st.permutations("XYZW"),
    st.data(),
)
def test_equal_rules_have_one_key_and_no_others_have(head, body, names, data):
    one = _clause(head, body)
    new = dict(zip("XYZW", names))
    head, *body = (
        (p, tuple(new.get(t, t) for t in args)) for p, args in (head, *body)
    )
    body = data.draw(st.permutations([*body, body[0]]))
    renamed = _clause(head, body)
    assert _canonical_rule(renamed) == _canonical_rule(one)
    other = _clause(head, data.draw(st.lists(ATOMS, min_size=1, max_size=4)))
    assert (_canonical_rule(other) == _canonical_rule(one)) == _is_renaming(
        other, one
    )


# One rule twice in each format, one of them with other names, another order and another weight.
REPEATED = {
    "weighted": "0.5\tr(X,Y) :- r(X,Z), s(Z,Y)\n0.6\tr(A,B) :- s(C,B), r(A,C)\n",
    "AnyBURL": "9\t5\t0.5\tr(X,Y) <= r(X,A), s(A,Y)\n9\t5\t0.6\tr(X,Y) <= s(B,Y), r(X,B)\n",
    "AMIE": "?a  r  ?c  ?c  s  ?b   => ?a  r  ?b\t0\t0.5\n?d  s  ?b  ?a  r  ?d   => ?a  r  ?b\t0\t0.6\n",
    "Prolog": "r(X,Y) :- r(X,Z), s(Z,Y).\nr(A,B) :- s(C,B),\n  r(A,C).\n",
}


@pytest.mark.parametrize("file_format", REPEATED)
def test_a_rule_that_stands_twice_is_one_rule(file_format):
    triples = [("a", "r", "b"), ("b", "s", "a")]
    d = from_triples(triples, rules=REPEATED[file_format])
    assert len(d.rules) == len(d.rule_weights) == 1
    weight = "; 1 of them have another weight: that of the first one stays"
    assert d.notes == (
        "rules:2: 1 rules repeat an earlier one, as this one line 1, and were dropped"
        + weight * (file_format != "Prolog"),
    )
    program = REPEATED["Prolog"] + "r(a,b). s(b,a)."
    assert len(from_text(program).rules) == 1


def test_a_body_of_many_variables_that_are_alike_is_read_in_little_time():
    body = ", ".join(f"r(X,V{i})" for i in range(100))
    d = from_triples(ONE, rules=f"r(X,X) :- {body}\n" * 2)
    assert len(d.rules) == 1


@pytest.mark.parametrize("sign", ["!", "~", "\u00ac", "-"])
@pytest.mark.parametrize(
    "rules",
    [
        "1\tr(X,Y) :- r(Y,X)\n1\tr(X,Y) :- r(X,Y), '{}r'(Y,X)",
        "1\tr(X,Y) :- r(Y,X)\n1\t'{}r'(X,Y) :- r(X,Y)",
        "?a  r  ?b   => ?b  r  ?a\t0\t1\n?a  {}r  ?b   => ?a  r  ?b\t0\t1",
    ],
)
def test_a_sign_of_negation_before_a_relation_is_an_error(rules, sign):
    expected = f"rules:2: expected a relation, got the negation '{sign}r', in a rule for '"
    with pytest.raises(ValueError, match=re.escape(expected)):
        from_triples(ONE, rules=rules.format(sign))
    with pytest.raises(ValueError, match="negation"):
        parse_query(from_triples(ONE), f"{sign}r(a, X)")
    # A relation of the data may be called so.
    d = from_triples([*ONE, ("a", f"{sign}r", "b")], rules=rules.format(sign))
    assert len(d.rules) == 2


# -- known facts in the order of names

SOME_TRIPLES = st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=6)


@given(SOME_TRIPLES, SOME_TRIPLES, st.integers(0, 9))
def test_sets_of_facts_have_one_digest_whatever_their_order(one, two, seed):
    first = from_triples(one)
    shuffled = random.Random(seed).sample(one, len(one))
    again = from_triples(shuffled + one[:1], test=two)
    assert facts_digest(first) == facts_digest(again)
    assert (facts_digest(first) == facts_digest(from_triples(two))) == (
        set(one) == set(two)
    )


def test_numbers_follow_the_order_of_names():
    dataset = from_triples([("c", "q", "a"), ("b", "p", "c")])
    facts, predicates, entities = order_facts(dataset)
    assert facts.tolist() == [[1, 2, 3], [2, 3, 1]]
    assert [dataset.entities[i - 1] for i in entities[1:]] == ["a", "b", "c"]
    assert [dataset.predicates[i - 1] for i in predicates[1:]] == ["p", "q"]


# -- leaks


def notes_of(known, valid, test):
    return from_triples(known, valid, test).notes


def test_held_out_triples_that_are_known_or_repeated_are_counted():
    known = [("a", "r", "b"), ("b", "r", "c")]
    valid = [("a", "r", "b"), ("a", "r", "c"), ("a", "r", "c")]
    test = [("a", "r", "c"), ("b", "r", "c"), ("c", "r", "c")]
    assert notes_of(known, valid, test) == (
        "valid: 1 of 3 triples are known facts (train or facts)",
        "valid: 1 of 3 triples repeat another and are ranked again",
        "test: 1 of 3 triples are known facts (train or facts)",
        "test: 1 of 3 triples are in valid too",
    )
    assert notes_of(known, [], []) == ()
    assert notes_of(known, [("c", "r", "a")], [("a", "r", "c")]) == ()


def test_inverses_of_known_facts_are_counted_worked_by_hand():
    """married is symmetric, child and parent are inverses, and likes is neither."""
    known = [
        *[(f"h{i}", "married", f"w{i}") for i in range(9)],
        *[(f"w{i}", "married", f"h{i}") for i in range(8)],
        *[(f"c{i}", "child", f"p{i}") for i in range(5)],
        *[(f"p{i}", "parent", f"c{i}") for i in range(4)],
        *[(f"a{i}", "likes", f"b{i}") for i in range(5)],
    ]
    lines = ["w8 married h8", "w8 married w8", "p4 parent c4", "b0 likes a0"]
    test = [tuple(line.split()) for line in lines]
    assert notes_of(known, [], test) == (
        "test: 2 of 4 triples are inverses of known facts: 'married' is symmetric, 'child' and 'parent'",
    )


LEAKY_FACT = st.tuples(*map(st.sampled_from, ("rstu", "abcde", "abcde")))
LEAKY = st.lists(LEAKY_FACT, max_size=30)


@given(LEAKY, LEAKY, LEAKY)
def test_leaks_are_those_of_sets_of_names(known, valid, test):
    ids = {name: i for i, name in enumerate("abcde", 1)}
    relations = {name: i for i, name in enumerate("rstu", 1)}

    def encode(rows):
        table = [(relations[r], ids[h], ids[t]) for r, h, t in rows]
        return np.array(table, np.int32).reshape(-1, 3)

    held_out = {"valid": encode(valid), "test": encode(test)}
    notes = leakage_notes(encode(known), held_out, list("rstu"))
    counts = Counter()
    for note in notes:
        split, count, *_ = note.split()
        what = note.split(" triples ")[1].split(":")[0]
        counts[split[:-1], what] = int(count)
    assert counts == slow_counts(known, valid, test)


def slow_counts(known, valid, test):
    """The counts of the notes, over Python sets."""
    everything = {*known, *valid, *test}
    pairs = {
        r: {(h, t) for q, h, t in everything if q == r and h != t}
        for r in "rstu"
    }

    def are_inverse(r, s):
        common = pairs[r] & {(t, h) for h, t in pairs[s]}
        larger = max(len(pairs[r]), len(pairs[s]))
        return bool(common) and len(common) >= NEAR_INVERSE_SHARE * larger

    counts = Counter()
    for split, rows in (("valid", valid), ("test", test)):
        n_known = sum(row in known for row in rows)
        n_inverse = sum(
            h != t
            and any((s, t, h) in known and are_inverse(r, s) for s in "rstu")
            for r, h, t in rows
        )
        counts[split, "are known facts (train or facts)"] = n_known
        n_repeats = len(rows) - len(set(rows))
        counts[split, "repeat another and are ranked again"] = n_repeats
        counts[split, "are inverses of known facts"] = n_inverse
    counts["test", "are in valid too"] = sum(row in valid for row in test)
    return +counts


# -- descriptions

GRAPH = [("a", "r", "b"), ("b", "r", "a"), ("a", "r", "c"), ("d", "r", "d")]
GRAPH += [("a", "s", "e"), ("e", "t", "a"), ("f", "t", "c")]
HELD_OUT = [("c", "s", "a"), ("a", "s", "d"), ("x", "new", "d")]


def test_a_small_graph_by_hand():
    found = describe(from_triples(GRAPH, HELD_OUT, [("a", "r", "b")]))
    train, valid, test = found["splits"].values()
    assert list(valid.values()) == [3, 4, 2, 0, 1, 1, 1]
    assert (test["n_known"], test["n_linked"]) == (1, 1)
    assert train["n_linked"] == 4
    r, t, s, new = found["relations"]
    assert list(r.values()) == [
        *("r", 4, 0, 1, 4 / 3, 1.0, 2 / 3, 1.0, 2 / 3, None, None)
    ]
    assert (t["inverse"], t["inverse_share"]) == ("s", 0.5)
    assert t["symmetric_share"] == 0.0
    assert (s["inverse"], s["inverse_share"]) == ("t", 1.0)
    assert new["n_facts"] == 0 and new["functional_share"] is None
    # x has no fact, a and d have 5 and 2 ends of facts
    assert found["degree_quantiles"]["0"] == 0
    assert found["degree_quantiles"]["1"] == 5


@pytest.mark.parametrize("seed", range(3))
def test_random_graphs_against_sets(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, [8, 3, 8], size=(90, 3)).tolist()
    triples = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows]
    train, test = triples[:60], triples[60:]
    found = describe(from_triples(train, [], test))
    facts = set(train)
    pairs = [frozenset((h, t)) for h, _, t in facts]
    assert found["splits"]["test"]["n_known"] == sum(t in facts for t in test)
    linked = [frozenset((h, t)) in pairs for h, _, t in test]
    assert found["splits"]["test"]["n_linked"] == sum(linked)
    twice = [pairs.count(pair) > 1 for pair in pairs]
    assert found["splits"]["train"]["n_linked"] == sum(twice)
    for relation in found["relations"]:
        own = {(h, t) for h, r, t in facts if r == relation["name"] and h != t}
        inverse = sum((t, h) in own for h, t in own)
        assert relation["symmetric_share"] == inverse / len(own)
        shares = [
            sum((t, other["name"], h) in facts for h, t in own) / len(own)
            for other in found["relations"]
            if other is not relation
        ]
        assert relation["inverse_share"] == max(shares)


def test_facts_that_are_no_triples_are_counted():
    found = describe(from_text("p(a). q(a, b). r(a, b, c)."))
    assert [relation["name"] for relation in found["relations"]] == ["q"]
    assert found["n_other_atoms"] == 2
    with pytest.raises(ValueError, match="facts of two arguments"):
        describe(from_text("p(a)."))
