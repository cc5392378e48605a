"""Dataset: ids, splits and rules worked out by hand; names that read back; the fingerprint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.dataset import from_splits, with_rules
from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import parse_query
from tests.kg.graph.clause_strategies import NAMES
from tests.kg.graph.python_datalog import triples


def test_a_program_gives_facts_and_rules_of_any_arity():
    d = from_text(
        "edge(a, b). path(X,Y) :- edge(X,Y). hot. r(7, a, b).\npath(X,Y) :- path(X,Z), edge(Z,Y)."
    )
    assert (d.entities, d.predicates, d.arities) == (
        ("a", "b", "7"),
        ("edge", "path", "hot", "r"),
        (2, 2, 0, 3),
    )
    assert (
        d.train.tolist()
        == d.facts.tolist()
        == [[1, 1, 2, 0], [3, 0, 0, 0], [4, 3, 1, 2]]
    )
    assert d.rules.tolist()[0] == [[2, 4, 5, 0], [1, 4, 5, 0], [0] * 4]
    assert len(d.valid) == len(d.test) == 0
    assert parse_query(d, "hot").tolist() == [3, 0, 0, 0]


def test_the_fingerprint_tells_order_rules_and_splits_apart_but_not_weights():
    a, b = ("a", "r", "b"), ("b", "r", "a")
    sets = [
        from_triples([a, b]),
        from_triples([b, a]),
        from_triples([a], [b]),
        from_triples([a], [], [b]),
    ]
    sets += [from_triples([a, b], rules="r(X,Y) :- r(Y,X)")]
    assert len({d.fingerprint for d in sets}) == 5
    assert (
        from_triples([a, b], rules="1\tr(X,Y) :- r(Y,X)").fingerprint
        == sets[-1].fingerprint
    )


def test_the_ids_of_triples_follow_first_occurrence_worked_by_hand():
    splits = {
        "train": [("a", "r", "b"), ("b", "s", "a"), ("a", "r", "b")],
        "valid": [("c", "r", "a")],
        "test": [("a", "t", "d"), ("d", "t", "c")],
        "facts": [("b", "s", "a"), ("a", "s", "e")],
    }
    d = from_splits("by hand", splits)
    assert (d.entities, d.predicates, d.arities) == (
        ("a", "b", "c", "d", "e"),
        ("r", "s", "t"),
        (2, 2, 2),
    )
    assert d.train.tolist() == [[1, 1, 2], [2, 2, 1]]
    assert (d.valid.tolist(), d.test.tolist()) == (
        [[1, 3, 1]],
        [[3, 1, 4], [3, 4, 3]],
    )
    assert d.facts.tolist() == [[1, 1, 2], [2, 2, 1], [2, 1, 5]]
    assert (
        d.n_constants,
        d.n_predicates,
        d.atom_width,
        d.n_duplicates,
        d.n_unseen_entities,
    ) == (5, 3, 3, 1, 2)
    assert d.notes == (
        "train: 1 lines repeat another and were dropped",
        "valid, test: 2 entities occur in no known fact and are kept",
        "valid, test: 1 relation occurs in no known fact and is kept",
    )


def test_only_entities_count_as_unseen_entities():
    d = from_triples(
        [("a", "r", "b")],
        [("a", relation, "b") for relation in "stuvw"],
        [("b", "r", "c")],
    )
    assert (d.n_predicates, d.n_unseen_entities) == (6, 1)


TRIPLES = st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=6)


@given(TRIPLES, TRIPLES, TRIPLES)
def test_the_names_of_the_ids_are_the_triples(train, valid, test):
    d = from_triples(train, valid, test)
    assert triples(d, d.train) == triples(d, d.facts) == set(train) and len(
        d.train
    ) == len(set(train))
    assert triples(d, d.valid) == set(valid) and triples(d, d.test) == set(test)
    assert (len(d.valid), len(d.test)) == (len(valid), len(test))
    unseen = {name for h, _, t in valid + test for name in (h, t)} - {
        name for h, _, t in train for name in (h, t)
    }
    assert d.n_unseen_entities == len(unseen)


def test_rules_that_define_relations_add_them_and_widen_all_atoms():
    d = from_triples(
        [("a", "r", "b")],
        rules="s(X, Y, Z) :- r(X, Y), r(Y, Z)\nt(X) :- u(X, X)\nu(X, Y) :- r(Y, X)",
    )
    assert dict(zip(d.predicates, d.arities)) == {
        "r": 2,
        "s": 3,
        "t": 1,
        "u": 2,
    }
    # fingerprints of stored runs hold this order
    assert d.predicates == ("r", "u", "t", "s")
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
    ("rules", "n_left", "note"),
    [
        (
            "r(X,Y) :- r(Y,X)\nr(X,Y) :- rr(Y,X)\nr(X,c) :- r(X,b)",
            1,
            "rules:2: unknown relation 'rr': expected one of the data's (close: 'r'), in a rule for 'r'; "
            "2 of 3 rules have unknown names and were left out",
        ),
        # The rule for r goes too, since s has no rule then; the cause is named.
        (
            "r(X,Y) :- s(X,Y)\ns(X,Y) :- r(X,Y), r(Y,c)\nt(X,Y) :- r(Y,X)",
            1,
            "rules:2: unknown entity 'c': expected one of the data's (none of 2 is spelled like it), in a rule for "
            "'s'; 2 of 3 rules have unknown names and were left out",
        ),
    ],
)
def test_rules_of_unknown_names_are_left_out_and_counted(rules, n_left, note):
    d = from_triples(ONE, rules=rules)
    assert len(d.rules) == len(d.rule_weights) == n_left
    assert d.notes[0] == note
    assert "s" not in d.predicates


def test_rules_that_all_have_unknown_names_are_an_error():
    with pytest.raises(ValueError, match=r"^rules:1: unknown entity 'c'"):
        from_triples(ONE, rules="r(X,c) :- r(X,b)\nr(X,Y) :- q(Y,X)")
