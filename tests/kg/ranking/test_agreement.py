"""The comparison with a recount: the engine agrees on generated graphs, and an error in it is reported."""

import dataclasses

import numpy as np
import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.ranking import agreement, explain, recount
from funcppo.kg.ranking.evaluator import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.scores.score import parse
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task, with_other_facts

SECONDS = 3600.0  # no test depends on the speed of the machine
RULES = """
r(X, Y) :- s(X, Y)
r(X, Y) :- s(X, Z), r(Z, Y)
r(X, Y) :- r(Y, X)
r(X, e0) :- s(X, Z)
s(X, X) :- r(X, Z), r(Z, X)
"""


def subject_of(seed=1, score="noisy-or@3", n_known=0, **settings):
    """An evaluator of an untrained score on a random graph of two relations over ten entities.

    So many of the test triples are known facts.
    """
    rng = np.random.default_rng(seed)
    cells = rng.permutation(200)[:64]
    triples = [
        (f"e{i % 10}", "rs"[int(i >= 100)], f"e{i // 10 % 10}") for i in cells
    ]
    dataset = loaders.from_triples(
        triples[:50],
        triples[50:55],
        triples[:n_known] + triples[55 + n_known :],
        rules=RULES,
    )
    task = build_task(dataset, ProverTaskConfig(**settings))
    program = explain.build_program(task)
    evaluator = Evaluator(
        task=task,
        protocol=RankingProtocol(sides=ranked_sides(task)),
        score=parse(score),
        prove=lambda atoms: explain.smallest_proofs(task, atoms, program),
        all_scores=False,
    )
    return agreement.make_subject(evaluator)


def rank(subject):
    split = subject.evaluator.task.dataset.test
    return agreement.rank_sample(subject.evaluator, split, range(len(split)))


def compare_ranks(subject, ranked, counts=None, seconds=SECONDS, lines=None):
    """The comparisons of candidates, by kind."""
    results = agreement.compare_ranks(
        subject, ranked, counts or {}, seconds, lines
    )
    return {result.kind: result for result in results}


def compare(subject, seconds=SECONDS):
    """All comparisons, by kind."""
    rule_ids = range(len(subject.logic.rules))
    supports, counts = agreement.compare_supports(subject, rule_ids, seconds)
    ranked = rank(subject)
    results = [
        supports,
        *agreement.compare_ranks(subject, ranked, counts, seconds),
        agreement.compare_proofs(subject, ranked, seconds),
    ]
    return {result.kind: result for result in results}


# -- agreement


@pytest.mark.parametrize("seed", (1, 2, 3))
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_height=1, smoothing=None, score="max-confidence"),
        dict(max_height=1, smoothing=5.0, object_identity=True),
        dict(max_height=1, smoothing=0.3, score="noisy-or"),
        dict(max_height=2, smoothing=None, score="noisy-or@2"),
        dict(max_height=3, smoothing=20.0, object_identity=True),
        dict(max_height=1, smoothing=5.0, score="noisy-or@3-other-facts"),
        dict(
            max_height=1,
            smoothing=None,
            n_known=8,
            object_identity=True,
            score="max-confidence-other-facts",
        ),
        dict(
            max_height=2,
            smoothing=0.3,
            n_known=8,
            score="noisy-or@3-other-facts",
        ),
        dict(max_height=1, smoothing=None, n_known=8),
        dict(max_height=2, smoothing=None, n_known=8),
        dict(max_height=3, object_identity=True, smoothing=5.0, n_known=8),
    ],
    ids=str,
)
def test_the_engine_agrees(seed, settings):
    compared = compare(subject_of(seed, **settings))
    for result in compared.values():
        assert (result.disagreements, result.notes) == ((), ())
        assert 0 < result.n_compared == result.n_total
    assert compared["supports"].n_total == 5
    assert compared["ranks"].n_total == 18  # nine queries, both sides


# -- disagreement


@pytest.fixture
def subject():
    return subject_of(max_height=1)


def with_evaluator(subject, **fields):
    evaluator = dataclasses.replace(subject.evaluator, **fields)
    return dataclasses.replace(subject, evaluator=evaluator)


def with_task(subject, **fields):
    task = dataclasses.replace(subject.evaluator.task, **fields)
    return with_evaluator(subject, task=task)


@pytest.mark.parametrize("field", ["support", "body_pairs"])
def test_a_wrong_count_is_reported_with_both_values(subject, field):
    kb = subject.evaluator.task.kb
    wrong = getattr(kb, field) + torch.tensor([0, 0, 1, 0, 0])
    result = compare(with_task(subject, kb=kb._replace(**{field: wrong})))
    supports = result["supports"]
    assert (supports.n_compared, supports.n_disagreeing) == (5, 1)
    (line,) = supports.disagreements
    right, wrong = (
        f"{int(counts.support[2])} of {int(counts.body_pairs[2])}"
        for counts in (kb, kb._replace(**{field: wrong}))
    )
    assert line.startswith("r(X, Y) :- r(Y, X): ")
    assert line.endswith(f"{wrong}, recounted {right}")


def test_a_dropped_candidate_is_reported(subject):
    """As if the rules did not derive the best candidate of the first row."""
    ranked = rank(subject)
    wrong = ranked._replace(
        scored_atom=ranked.scored_atom[1:],
        scored_side=ranked.scored_side[1:],
        log_odds=ranked.log_odds[1:],
    )
    verdicts = compare_ranks(subject, wrong)["verdicts"]
    assert verdicts.n_disagreeing > 0
    assert all(
        line.endswith(": not derivable, recounted derivable")
        for line in verdicts.disagreements
    )


def test_a_wrong_rank_is_reported_with_both_values(subject):
    ranked = rank(subject)
    n_better = ranked.counts.n_better + torch.eye(18, dtype=torch.int64)[4]
    wrong = ranked._replace(counts=ranked.counts._replace(n_better=n_better))
    ranks = compare_ranks(subject, wrong)["ranks"]
    assert (ranks.n_compared, ranks.n_disagreeing) == (18, 1)
    assert f"{int(n_better[4])} better" in ranks.disagreements[0]
    assert f"recounted {int(n_better[4]) - 1} better" in ranks.disagreements[0]


def test_a_wrong_score_is_reported(subject):
    """Ranks by another score are not those of the recount."""
    ranked = rank(with_evaluator(subject, score=parse("exists@1")))
    assert compare_ranks(subject, ranked)["ranks"].n_disagreeing


def test_a_score_that_keeps_the_ranks_is_reported(subject):
    """Scores with ten steps of the grid more than they should have."""
    ranked = rank(subject)
    wrong = ranked._replace(log_odds=ranked.log_odds + 1e-3)
    found = compare_ranks(subject, wrong)
    assert found["ranks"].n_disagreeing == 0
    scores = found["scores"]
    assert 0 < scores.n_disagreeing == scores.n_compared
    (score,) = {round(x, 6) for x in ranked.log_odds[:1].tolist()}
    assert f"log-odds {score + 1e-3:.6f}, recounted {score:.6f}" in "\n".join(
        scores.disagreements
    )


@pytest.mark.parametrize(
    "field", ["n_facts", "n_facts_with", "n_derived", "n_derived_with"]
)
def test_other_facts_that_were_counted_wrong_are_reported(field):
    subject = subject_of(score="noisy-or-other-facts", max_height=1)
    task = with_other_facts(subject.evaluator.task)
    counts = task.other_facts
    assert counts is not None
    wrong = counts._replace(**{field: getattr(counts, field) + 1})
    wrong_task = dataclasses.replace(task, other_facts=wrong)
    ranked = rank(with_evaluator(subject, task=wrong_task))
    scores = compare_ranks(subject, ranked)["scores"]
    assert 0 < scores.n_disagreeing <= scores.n_compared


def test_a_relation_whose_candidates_take_too_long_is_said(monkeypatch):
    """Its share of facts is recounted even so."""
    subject = subject_of(score="noisy-or-other-facts", max_height=1)

    def time_out(*args):
        raise recount.RecountLimitError

    monkeypatch.setattr(recount, "share_of_derived_with_others", time_out)
    found = compare(subject)
    assert not any(result.disagreements for result in found.values())
    assert found["ranks"].n_compared == 18
    (note,) = found["ranks"].notes
    assert note.startswith("of 2 relations the share of derived atoms with")
    monkeypatch.setattr(recount, "share_of_facts_with_others", lambda *_: 0.5)
    assert compare(subject)["scores"].n_disagreeing


def test_a_wrong_leaf_of_a_proof_is_reported(subject):
    def prove(atoms):
        (built,) = subject.evaluator.prove(atoms)
        *nodes, leaf = built.nodes
        goal = (leaf.goal[0], leaf.goal[1], leaf.goal[2] % 10 + 1)
        wrong = dataclasses.replace(leaf, goal=goal)
        return [dataclasses.replace(built, nodes=(*nodes, wrong))]

    proofs = compare(with_evaluator(subject, prove=prove))["proofs"]
    assert proofs.n_compared == proofs.n_disagreeing > 0
    assert "no instance of its rule" in proofs.disagreements[0]


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_answer_without_a_proof_is_reported(subject, is_refused):
    def prove(atoms):
        if is_refused:
            raise AssertionError("expected a proof that holds, got none")
        return [None] * len(atoms)

    proofs = compare(with_evaluator(subject, prove=prove))["proofs"]
    assert proofs.n_compared == proofs.n_disagreeing > 0


# -- what is not compared


def test_what_there_is_no_time_for_is_said(subject):
    for result in compare(subject, seconds=1e-9).values():
        assert (result.n_compared, result.disagreements) == (0, ())
        # verdicts and scores are of the same rows as the ranks
        if result.kind not in ("verdicts", "scores"):
            assert "not compared within 1e-09 seconds" in result.notes[0]


def test_a_model_that_is_too_large_is_said(monkeypatch):
    monkeypatch.setattr(agreement, "MAX_ATOMS", 10)
    ranks = compare(subject_of(max_height=2))["ranks"]
    assert ranks.n_compared == 0
    assert "holds more than 10 atoms" in ranks.notes[1]


def test_rules_that_were_not_counted_are_said(subject):
    ranks = compare_ranks(subject, rank(subject))["ranks"]
    assert ranks.n_disagreeing == 0
    assert "the confidences of 5 rules as funcppo counts them" in ranks.notes[0]


def test_a_difference_by_rounding_alone_is_counted_apart(subject, monkeypatch):
    """Every rank is possible if scores may be wrong by any amount."""
    ranked = rank(subject)
    n_better = (ranked.counts.n_better + 1).clamp_max(
        ranked.counts.n_candidates - 1 - ranked.counts.n_equal
    )
    wrong = ranked._replace(counts=ranked.counts._replace(n_better=n_better))
    monkeypatch.setattr(agreement, "LOG_ODDS_TOLERANCE", 1e6)
    monkeypatch.setattr(
        recount, "rule_score", lambda name, confidences: len(confidences) * 1.0
    )
    ranks = compare_ranks(subject, wrong)["ranks"]
    assert ranks.n_disagreeing == 0
    assert "differ by the rounding of scores alone" in ranks.notes[0]
