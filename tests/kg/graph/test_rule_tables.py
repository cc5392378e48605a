"""Rule tables: worked lines of each format, and files that read back as the same rules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.graph.rules import (
    AMIE_HEADER,
    RULE_FILE_FORMATS,
    TSV_HEADER,
    RuleStatistics,
    compatibility_notes,
    format_rule_table,
    with_encoded_rules,
    with_read_counts,
)
from tests.kg.graph.clause_strategies import NAMES

TRIPLES = [("ann", "knows", "bob"), ("bob", "likes", "cid")]


def statistics(*rows):
    """Statistics of rules, one row of eight numbers each."""
    return RuleStatistics(*np.array(rows, np.float64).reshape(-1, 8).T)


def test_the_lines_of_each_format_worked_by_hand():
    """Support 6 of 8 body pairs, 2 of them circular, 7.2 PCA pairs, 12 facts of the head."""
    d = from_triples(TRIPLES, rules="likes(X,Y) :- knows(Y,Z), likes(Z,X)")
    counts = statistics([0.4, 6, 8, 2, 7.2, 12, 0.125, 0])
    header, line, _ = format_rule_table(d, counts, "tsv").splitlines()
    assert header.split("\t") == TSV_HEADER.split(" ")
    numbers = [
        "0.4",
        "6",
        "8",
        "0.75",
        "0.833333",
        "0.5",
        "4",
        "0.666667",
        "0.125",
        "0",
    ]
    assert line.split("\t") == [
        *numbers,
        "likes(X, Y) :- knows(Y, Z), likes(Z, X)",
    ]
    assert (
        format_rule_table(d, counts, "AnyBURL")
        == "8\t6\t0.75\tlikes(X,Y) <= knows(Y,A), likes(A,X)\n"
    )
    header, line = format_rule_table(d, counts, "AMIE").splitlines()
    assert header.split("\t") == AMIE_HEADER.split(",")
    rule = "?y  knows  ?z  ?z  likes  ?x   => ?x  likes  ?y"
    assert line.split("\t") == [
        rule,
        "0.5",
        "0.75",
        "0.833333",
        "6",
        "8",
        "7",
        "?x",
    ]


def test_counts_are_read_from_a_file_of_the_same_facts_that_nobody_edited():
    """The second rule's are estimates."""
    rules = "likes(X,Y) :- knows(Y,X)\nknows(X,Y) :- likes(Y,X)"
    d = from_triples(TRIPLES, rules=rules)
    counts = statistics(
        [0.4, 6, 8, 2, 7, 9, 0, 1], [0.1, 5, 9, 1, 9, 9, 0.1, 0]
    )
    text = format_rule_table(d, counts, "tsv")
    other_order = from_triples(TRIPLES[::-1], rules=rules)
    found = with_read_counts(text, other_order, [2, 3])
    assert found.rule_counts is not None and found.rule_estimates is not None
    assert found.rule_counts.tolist() == [[6, 8, 2], [-1, -1, -1]]
    assert found.rule_estimates.tolist() == [[-1, -1, -1], [5, 9, 1]]

    # A held-out triple changes nothing, a known one all.
    more = [("cid", "likes", "ann")]

    def has_counts(text, dataset):
        found = with_read_counts(text, dataset, [2])
        return found.rule_counts is not None

    assert has_counts(text, from_triples(TRIPLES, test=more))
    assert not has_counts(text, from_triples(TRIPLES + more))
    assert not has_counts(text.replace("\t8\t", "\t9\t"), d)
    assert not has_counts(text.replace("knows", "likes"), d)
    assert not has_counts(text.rpartition("#")[0], d)
    assert not has_counts("", d)


def test_a_rule_without_predictions_has_confidence_zero():
    d = from_triples(TRIPLES, rules="likes(X,Y) :- knows(Y,X)")
    line = format_rule_table(d, statistics([0] * 8), "tsv").splitlines()[1]
    assert line.split("\t")[:-1] == ["0"] * 10


@pytest.mark.parametrize("file_format", RULE_FILE_FORMATS)
def test_a_table_without_rules_is_its_header(file_format):
    text = format_rule_table(from_triples(TRIPLES), statistics(), file_format)
    assert len(text.splitlines()) == (file_format != "AnyBURL")


@given(st.lists(NAMES, min_size=4, max_size=4, unique=True), st.floats(0, 1))
def test_a_table_reads_back_as_the_same_rules_and_weights(names, weight):
    a, b, relation, other = names
    known = [(a, relation, b), (b, other, a)]
    table = np.zeros((3, 3, 3), np.int32)
    table[0, :2] = [[1, 3, 4], [2, 4, 3]]
    table[1] = [[2, 3, 4], [1, 3, 5], [1, 5, 4]]
    table[2, :2] = [[1, 3, 1], [2, 2, 3]]  # relation(X, a) :- other(b, X)
    counts = statistics(*[[weight, 3, 4, 0, 4, 6, 0, 0]] * 3)
    d = with_encoded_rules(from_triples(known), table, counts)
    for file_format in RULE_FILE_FORMATS:
        again = from_triples(
            known, rules=format_rule_table(d, counts, file_format)
        )
        assert again.rules.tolist() == table.tolist()
        expected = weight if file_format == "tsv" else 0.75
        # files hold six digits
        assert again.rule_weights == pytest.approx([expected] * 3, rel=1e-5)


def test_encoded_rules_are_cut_to_the_longest_and_padded_to_the_atoms_of_the_data():
    wide = from_triples(TRIPLES, rules="p(X,Y,Z) :- knows(X,Y), likes(Y,Z)")
    atoms = np.zeros((2, 5, 3), np.int32)
    atoms[:, 0] = [1, 4, 5]
    atoms[:, 1] = [2, 5, 4]
    d = with_encoded_rules(wide, atoms, statistics([0.5] * 8, [0.25] * 8))
    assert d.rules.tolist() == [[[1, 4, 5, 0], [2, 5, 4, 0]]] * 2
    assert d.rule_weights.tolist() == [0.5, 0.25]
    assert with_encoded_rules(wide, atoms[:0], statistics()).rules.shape == (
        0,
        1,
        4,
    )


def test_names_that_a_tool_would_misread_are_counted():
    known = [("ann lee", "knows", "b"), ("b", "likes", "X")]
    rules = "knows(X,b) :- likes(X,'X')\nknows(X,Y) :- likes(Y,X)\nknows(X,'ann lee') :- likes(X,Y)"
    d = from_triples(known, rules=rules)
    assert compatibility_notes(d, "tsv") == []
    (anyburl,) = compatibility_notes(d, "AnyBURL")
    assert (
        anyburl.startswith("2 rules hold names in quotes, of one character ")
        and "AnyBURL or PyClause takes them" in anyburl
    )
    (amie,) = compatibility_notes(d, "AMIE")
    assert amie.startswith("1 rules hold names in quotes: ")
    plain = from_triples(
        [("ann", "knows", "bob"), ("ED", "knows", "Q42")],
        rules="knows(X,ann) :- knows(bob,X)\nknows(X,'ED') :- knows('Q42',X)",
    )
    assert (
        compatibility_notes(plain, "AnyBURL")
        == compatibility_notes(plain, "AMIE")
        == []
    )


@pytest.mark.parametrize(
    ("name", "n"), [("DE", 1), ("MN", 1), ("ED", 0), ("D1", 0), ("de", 0)]
)
def test_capitals_in_the_order_of_the_alphabet_are_variables_of_pyclause(
    name: str, n: int
):
    d = from_triples(
        [(name, "in", "eu"), ("eu", "has", name)],
        rules=f"in(X,Y) :- has(Y,X)\nin('{name}',Y) :- has(X,Y)",
    )
    assert len(compatibility_notes(d, "AnyBURL")) == n
