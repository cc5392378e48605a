"""The comparison with a recount: the engine agrees on generated graphs, and an error in it is reported."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from funcppo.core import files
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.ranking import evaluate, explain, recount_check
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.ranking.recount_check import RecountCheck, read_details
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import build_task, with_other_facts

SECONDS = 3600.0  # no test depends on the speed of the machine
RULES = """
r(X, Y) :- s(X, Y)
r(X, Y) :- s(X, Z), r(Z, Y)
r(X, Y) :- r(Y, X)
r(X, e0) :- s(X, Z)
s(X, X) :- r(X, Z), r(Z, X)
"""
SETTINGS = {"split": "test", "score": "noisy-or@3", "height": 1}
SETTINGS |= {"smoothing": 5.0, "object_identity": False, "negatives": None}


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


def compare_details(subject, path):
    """The comparison of a details file with nine queries."""
    split, details = subject.task.dataset.test, read_details(path)
    check = RecountCheck(subject)
    found, lines = check.compare_details(details, split, range(9))
    assert lines.n_compared == 18 and not lines.disagreements
    return found


def compare(subject, ranked=None):
    """All comparisons, by kind."""
    check = RecountCheck(subject)
    if ranked is None:
        ranked = rank(subject)
    results = [
        check.compare_supports(range(len(check.logic.rules)), SECONDS),
        *check.compare_ranks(ranked, SECONDS),
        check.compare_proofs(ranked, SECONDS),
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
        dict(max_height=1, smoothing=5.0, score="noisy-or@3-other-facts"),
        dict(max_height=1, smoothing=0.3, score="max-confidence-other-facts")
        | dict(n_known=8, object_identity=True),
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
    found = compare(subject, wrong)["candidates"].disagreements
    ending = ": not derivable, recounted derivable"
    assert found and all(line.endswith(ending) for line in found)


def test_a_score_that_keeps_the_ranks_is_reported(subject):
    """Scores with ten steps of the grid more than they should have."""
    ranked = rank(subject)
    wrong = ranked._replace(log_odds=ranked.log_odds + 1e-3)
    found = compare(subject, wrong)
    assert not found["ranks"].disagreements
    lines = found["candidates"].disagreements
    assert len(lines) == len(ranked.listed_score)
    (score,) = {round(x, 6) for x in ranked.log_odds[:1].tolist()}
    expected = f"log-odds {score + 1e-3:.6f}, recounted {score:.6f}"
    assert expected in "\n".join(lines)


def test_other_facts_of_candidates_that_were_counted_wrong_are_reported():
    subject = evaluator_of(score="noisy-or-other-facts", max_height=1)
    task = with_other_facts(subject.task)
    degrees = task.other_facts.degrees
    wrong = degrees._replace(n_facts=degrees.n_facts * 0)
    counts = task.other_facts._replace(degrees=wrong)
    task = dataclasses.replace(task, other_facts=counts)
    ranked = rank(dataclasses.replace(subject, task=task))
    assert compare(subject, ranked)["candidates"].disagreements


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_answer_without_a_proof_is_reported(subject, is_refused):
    def prove(atoms):
        if is_refused:
            raise AssertionError("expected a proof that holds, got none")
        return [None] * len(atoms)

    proofs = compare(dataclasses.replace(subject, prove=prove))["proofs"]
    assert proofs.n_compared == len(proofs.disagreements) > 0


# -- lines of --details


def records_of(subject):
    """The records of all queries, which are ranked together."""
    split = subject.task.dataset.test
    window = evaluate.rank_window(subject, split, np.arange(len(split)))
    return [json.loads(json.dumps(x)) for records in window for x in records]


@pytest.fixture(scope="module")
def recording():
    return evaluator_of(max_height=1, smoothing=5.0, n_known=3)


@pytest.fixture(scope="module")
def records(recording):
    return records_of(recording)


def write(folder, records, **settings):
    """A details file."""
    path = folder / "details.jsonl"
    log = evaluate.open_log(path, SETTINGS | settings, 2, resume=False)
    files.append_records(log, records)
    files.close_log(log)
    return path


@pytest.mark.parametrize(
    "score", ["noisy-or@3-other-facts", "max-confidence", "exists@1"]
)
def test_what_evaluate_writes_agrees(tmp_path, score):
    subject = evaluator_of(score=score, max_height=1, smoothing=5.0, n_known=3)
    records = records_of(subject)
    compared = compare_details(subject, write(tmp_path, records))
    assert compared.disagreements == compared.notes == ()
    assert compared.n_compared == compared.n_total == len(records) == 18


@pytest.mark.parametrize(
    "name, change, text",
    [
        ("quantised_score", lambda x: x + 1, "quantised_score"),
        ("quantised_score", lambda _: None, "quantised_score None, recounted"),
        ("quantised_score", lambda _: "high", "quantised_score high"),
        ("n_better", lambda n: n + 1, "n_better 1, recounted 0"),
        ("n_candidates", lambda n: n + 1, "n_candidates "),
        ("answer_provable", lambda _: False, "False, recounted True"),
        ("status", lambda _: "no proof", "no proof, recounted proved"),
        ("rank", lambda _: None, "rank None, recounted"),
        ("reciprocal_rank", lambda x: x + 0.1, "reciprocal_rank"),
    ],
)
def test_a_changed_field_is_found(
    tmp_path, recording, records, name, change, text
):
    changed = copy.deepcopy(records)
    i = next(i for i, x in enumerate(records) if x["status"] == "proved")
    changed[i][name] = change(changed[i][name])
    path = write(tmp_path, changed)
    (line,) = compare_details(recording, path).disagreements
    assert line.startswith(f"line {i + 1}, {records[i]['atom']}, ")
    assert text in line


def test_a_missing_line_is_found(tmp_path, recording, records):
    path = write(tmp_path, records[:5] + records[6:])
    split = recording.task.dataset.test
    check = RecountCheck(recording)
    details = read_details(path)
    found, lines = check.compare_details(details, split, range(1))
    assert (found.n_compared, found.disagreements) == (2, ())
    row, side = records[5]["query_row"], records[5]["side"]
    assert lines.disagreements == (f"query_row {row}, {side}: no line",)


def test_a_file_of_another_evaluation_is_one_line(tmp_path, records):
    path = write(tmp_path, records, fingerprint="one")
    details = read_details(path)
    settings = details.settings | {"params_digest": None}
    recount_check.check_details(details, settings, "D", 9, (1, 2))
    for other, n_queries, sides, message in (
        ({"fingerprint": "two"}, 9, (1, 2), "expected two, that of D, got one"),
        ({}, 8, (1, 2), "jsonl:17: expected one of 8 queries"),
        ({}, 9, (1,), "jsonl:2: expected one of 9 queries and a side that is"),
    ):
        asked = settings | other, "D", n_queries, sides
        with pytest.raises(ValueError, match=message):
            recount_check.check_details(details, *asked)
    for lines, bad, message in (
        ([*records[:2], records[0]], {}, "jsonl:3: expected one line for each"),
        ([], {}, "expected a line for each query and"),
        (records, {"negatives": 5}, "negatives: expected None, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            read_details(write(tmp_path, lines, **bad))
