"""The comparison with a recount: the engine agrees on generated graphs, and an error in it is reported."""

import dataclasses

import numpy as np
import pytest
import torch

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.ranking import explain
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.ranking.recount_check import RecountCheck
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import build_task

SECONDS = 3600.0  # no test depends on the speed of the machine
RULES = """
r(X, Y) :- s(X, Y)
r(X, Y) :- s(X, Z), r(Z, Y)
r(X, Y) :- r(Y, X)
r(X, e0) :- s(X, Z)
s(X, X) :- r(X, Z), r(Z, X)
"""


def evaluator_of(seed=1, score="noisy-or@3", n_known=0, **settings):
    """An evaluator of an untrained score on a random graph of two relations over ten entities.

    So many of the test triples are known facts.
    """
    rng = np.random.default_rng(seed)
    cells = rng.permutation(200)[:64]
    triple = lambda i: (f"e{i % 10}", "rs"[int(i >= 100)], f"e{i // 10 % 10}")
    triples = list(map(triple, cells))
    splits = (
        triples[:50],
        triples[50:55],
        triples[:n_known] + triples[55 + n_known :],
    )
    dataset = loaders.from_triples(*splits, rules=RULES)
    task = build_task(dataset, ProverTaskConfig(**settings))
    protocol = RankingProtocol(sides=ranked_sides(task))
    prove = lambda atoms: explain.smallest_proofs(task, atoms)
    options = {"protocol": protocol, "prove": prove, "all_scores": False}
    return Evaluator(task=task, score=parse(score), **options)


def rank(subject):
    split = subject.task.dataset.test
    return RecountCheck(subject).rank(split, range(len(split)))


def compare_ranks(subject, ranked):
    """The comparisons of candidates, by kind."""
    results = RecountCheck(subject).compare_ranks(ranked, SECONDS)
    return {result.kind: result for result in results}


def compare(subject, seconds=SECONDS):
    """All comparisons, by kind."""
    check = RecountCheck(subject)
    ranked = rank(subject)
    results = [
        check.compare_supports(range(len(check.logic.rules)), seconds),
        *check.compare_ranks(ranked, seconds),
        check.compare_proofs(ranked, seconds),
    ]
    return {result.kind: result for result in results}


@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_height=1, smoothing=None, score="max-confidence"),
        dict(max_height=1, smoothing=5.0, object_identity=True),
        dict(max_height=2, smoothing=None, score="noisy-or@2", n_known=8),
        dict(max_height=3, smoothing=20.0, object_identity=True, n_known=8),
        dict(max_height=1, smoothing=0.3, n_known=8, object_identity=True),
    ],
    ids=str,
)
def test_the_engine_agrees(seed, settings):
    compared = compare(evaluator_of(seed, **settings))
    for result in compared.values():
        assert (result.disagreements, result.notes) == ((), ())
        assert 0 < result.n_compared == result.n_total
    assert compared["supports"].n_total == 5
    assert compared["ranks"].n_total == 18  # nine queries, both sides


# -- disagreement


@pytest.fixture
def subject():
    return evaluator_of(max_height=1)


@pytest.mark.parametrize("field", ["support", "body_pairs"])
def test_a_wrong_count_is_reported_with_both_values(subject, field):
    kb = subject.task.kb
    wrong = getattr(kb, field) + torch.tensor([0, 0, 1, 0, 0])
    task = dataclasses.replace(subject.task, kb=kb._replace(**{field: wrong}))
    supports = compare(dataclasses.replace(subject, task=task))["supports"]
    assert supports.n_compared == 5
    (line,) = supports.disagreements
    told = lambda kb: f"{int(kb.support[2])} of {int(kb.body_pairs[2])}"
    right, wrong = told(kb), told(task.kb)
    assert line.startswith("r(X, Y) :- r(Y, X): ")
    assert line.endswith(f"{wrong}, recounted {right}")


def test_a_dropped_candidate_is_reported(subject):
    """As if the rules did not derive the best candidate of the first row."""
    ranked = rank(subject)
    names = "scored_atom", "scored_side", "log_odds"
    wrong = ranked._replace(**{x: getattr(ranked, x)[1:] for x in names})
    found = compare_ranks(subject, wrong)["candidates"].disagreements
    ending = ": not derivable, recounted derivable"
    assert found and all(line.endswith(ending) for line in found)


def test_a_score_that_keeps_the_ranks_is_reported(subject):
    """Scores with ten steps of the grid more than they should have."""
    ranked = rank(subject)
    wrong = ranked._replace(log_odds=ranked.log_odds + 1e-3)
    found = compare_ranks(subject, wrong)
    assert not found["ranks"].disagreements
    lines = found["candidates"].disagreements
    assert len(lines) == len(ranked.listed_score)
    (score,) = {round(x, 6) for x in ranked.log_odds[:1].tolist()}
    expected = f"log-odds {score + 1e-3:.6f}, recounted {score:.6f}"
    assert expected in "\n".join(lines)


def test_rank_counts_that_scores_contradict_are_reported(subject):
    """One candidate more is counted as better, as an equal, or at all."""
    ranked = rank(subject)
    for name in ranked.counts._fields:
        wrong = getattr(ranked.counts, name) + 1
        counts = ranked.counts._replace(**{name: wrong})
        found = compare_ranks(subject, ranked._replace(counts=counts))
        assert len(found["ranks"].disagreements) == 18
        assert not found["candidates"].disagreements


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_answer_without_a_proof_is_reported(subject, is_refused):
    def prove(atoms):
        if is_refused:
            raise AssertionError("expected a proof that holds, got none")
        return [None] * len(atoms)

    proofs = compare(dataclasses.replace(subject, prove=prove))["proofs"]
    assert proofs.n_compared == len(proofs.disagreements) > 0
