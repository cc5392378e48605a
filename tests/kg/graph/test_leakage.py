"""Leakage: worked notes, a slow oracle over generated triples, and a time that grows with the triples alone."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph import dataset
from funcppo.kg.graph.dataset import NEAR_INVERSE_SHARE, leakage_notes
from funcppo.kg.graph.loaders import from_triples, load
from tests.learning import DATA


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
    test = [
        ("w8", "married", "h8"),
        ("w8", "married", "w8"),
        ("p4", "parent", "c4"),
        ("b0", "likes", "a0"),
    ]
    assert notes_of(known, [], test) == (
        "test: 2 of 4 triples are inverses of known facts: 'married' is symmetric, 'child' and 'parent'",
    )


def test_a_loop_is_not_its_own_inverse():
    known = [(f"a{i}", "r", f"a{i}") for i in range(5)]
    assert notes_of(known, [], [("a5", "r", "a5")]) == (
        "valid, test: 1 entity occurs in no known fact and is kept",
    )


TRIPLES = st.lists(
    st.tuples(
        st.sampled_from("rstu"),
        st.sampled_from("abcde"),
        st.sampled_from("abcde"),
    ),
    max_size=30,
)


@given(TRIPLES, TRIPLES, TRIPLES, st.integers(1, 7))
def test_leaks_are_those_of_sets_of_names(known, valid, test, chunk):
    ids = {name: i for i, name in enumerate("abcde", 1)}
    relations = {name: i for i, name in enumerate("rstu", 1)}
    tables = [
        np.array(
            [(relations[r], ids[h], ids[t]) for r, h, t in rows], np.int32
        ).reshape(-1, 3)
        for rows in (known, valid, test)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "PAIRS_PER_CHUNK", chunk)
        notes = leakage_notes(
            tables[0], {"valid": tables[1], "test": tables[2]}, list("rstu")
        )
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
        counts[split, "are known facts (train or facts)"] = sum(
            row in known for row in rows
        )
        counts[split, "repeat another and are ranked again"] = len(rows) - len(
            set(rows)
        )
        counts[split, "are inverses of known facts"] = sum(
            h != t
            and any((s, t, h) in known and are_inverse(r, s) for s in "rstu")
            for r, h, t in rows
        )
    counts["test", "are in valid too"] = sum(row in valid for row in test)
    return +counts


def test_what_is_not_searched_is_told(monkeypatch):
    monkeypatch.setattr(dataset, "MAX_PAIRS", 3)
    known = [("a", "r", "b"), ("b", "r", "a"), ("c", "r", "d")]
    assert notes_of(known, [], [("d", "r", "c")]) == (
        "inverse triples between the splits were not searched: 4 pairs of triples, over 3",
    )


def test_pairs_are_counted_before_they_are_made():
    """10 entities, 1000 relations: 90,000 triples, of which each has 1000 inverses."""
    relation, head, tail = np.indices((1000, 10, 10)).reshape(3, -1) + 1
    table = np.stack([relation, head, tail], 1)[head != tail]
    notes = leakage_notes(
        table[1000:], {"test": table[:1000]}, [f"r{i}" for i in range(1000)]
    )
    assert notes == [
        "inverse triples between the splits were not searched: 90,000,000 pairs of triples, over 30,000,000"
    ]


def test_a_third_of_wn18rr_is_the_inverse_of_a_training_triple():
    """Its three symmetric relations; counted by the file alone, in Python sets."""
    if not (DATA / "wn18rr").is_dir():
        pytest.skip(f"no {DATA / 'wn18rr'}: set FUNCPPO_DATA")
    (note,) = [n for n in load(DATA / "wn18rr").notes if n.startswith("test:")]
    symmetric = ("_derivationally_related_form", "_verb_group", "_similar_to")
    train, test = (
        {
            tuple(line.split("\t"))
            for line in (DATA / "wn18rr" / f"{split}.txt")
            .read_text()
            .splitlines()
        }
        for split in ("train", "test")
    )
    n_leaked = sum((t, r, h) in train for h, r, t in test if r in symmetric)
    names = ", ".join(f"'{name}' is symmetric" for name in symmetric)
    assert note == (
        f"test: {n_leaked} of {len(test)} triples are inverses of known facts: {names}"
    )
