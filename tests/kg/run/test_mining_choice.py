"""Mining settings of tiny dense graphs: two are tried, and the rules that rank valid better are taken."""

from __future__ import annotations

import pytest

from funcppo.core.deadline import Deadline
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.mining.config import MAX_TINY_FACTS, MiningConfig
from funcppo.kg.run import mining_choice
from funcppo.kg.search.config import ProverTaskConfig

OPEN = ProverTaskConfig(smoothing="auto", object_identity="auto")
# `likes` is the inverse of `knows`; `meets` says nothing.
GOOD = "likes(X, Y) :- knows(Y, X)\n"
BAD = "likes(X, Y) :- meets(X, Y)\n"


def small_graph(rules: str, n_valid: int = 4) -> Dataset:
    """A graph of which valid asks for `likes`."""
    pairs = [(a, b) for a in "abcde" for b in "vwxyz"]
    likes = [(b, "likes", a) for a, b in pairs]
    known = [(a, "knows", b) for a, b in pairs]
    known += [("v", "meets", "w"), ("w", "meets", "v")]
    return from_triples(
        [*known, *likes[n_valid:]], likes[:n_valid], rules=rules
    )


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_the_rules_that_rank_valid_better_are_chosen(order):
    rules = {"first": BAD, "second": GOOD}
    datasets = {name: small_graph(rules[name]) for name in order}
    choice = mining_choice.choose_rules(datasets, OPEN)
    assert choice.name == "second"
    first, second = (choice.note.index(f"those of {name} ") for name in order)
    assert first < second


def test_the_first_rules_are_kept_unless_others_gain():
    datasets = {name: small_graph(GOOD) for name in ("own", "usual")}
    assert mining_choice.choose_rules(datasets, OPEN).name == "own"
    # Without time nothing is ranked.
    late = Deadline(at=0.0, clock=lambda: 1.0)
    datasets = {"own": small_graph(BAD), "usual": small_graph(GOOD)}
    choice = mining_choice.choose_rules(datasets, OPEN, deadline=late)
    assert choice.name == "own"
    assert "not compared" in choice.note


def test_a_single_candidate_is_taken_without_a_note():
    datasets = {"default": small_graph(BAD)}
    assert mining_choice.choose_rules(datasets, OPEN) == ("default", "")


def test_only_a_tiny_dense_graph_with_a_valid_split_has_two_candidates():
    dense = [(a, "knows", b) for a in "abcd" for b in "abcd"]
    valid = [("a", "likes", "b")]
    tiny = mining_choice.candidate_configs(from_triples(dense, valid), 7.0)
    own, usual = tiny.values()
    assert own == MiningConfig(
        max_length=2, min_support=3, votes_per_fact=3, seconds=7.0
    )
    assert usual == MiningConfig(seconds=3.5, max_rows=mining_choice.USUAL_ROWS)
    unsplit = mining_choice.candidate_configs(from_triples(dense), 7.0)
    assert list(unsplit.values()) == [own]
    sparse = from_triples([(f"x{i}", "r", f"y{i}") for i in range(9)], valid)
    usual_alone = mining_choice.candidate_configs(sparse, 7.0)
    assert list(usual_alone.values()) == [MiningConfig(seconds=7.0)]
    facts = [(f"x{i}", "r", f"y{i}") for i in range(MAX_TINY_FACTS + 1)]
    small = mining_choice.candidate_configs(from_triples(facts, valid), 7.0)
    assert list(small.values()) == [MiningConfig(votes_per_fact=3, seconds=7.0)]
