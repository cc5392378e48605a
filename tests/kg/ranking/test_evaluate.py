"""Records of queries by hand, whatever the chunks; summarised, resumed and refused."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import evaluate, ranking
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from tests.cli.runner import funcppo, read_records, write_graph
from tests.kg.logic.proof_cases import make_node
from tests.kg.ranking.scores import FunctionScore

TWO_STEPS = ProverTaskConfig(max_height=2)


def make_evaluator(dataset: Dataset, score: str, **protocol) -> Evaluator:
    task = prover_task.build_task(dataset, TWO_STEPS)
    how = {"protocol": RankingProtocol(**protocol), "all_scores": False}
    return Evaluator(task=task, score=parse(score), prove=None, **how)


def all_records(evaluator_, split, rows=None):
    rows = np.arange(len(split)) if rows is None else np.array(rows)
    parts = evaluate.rank_window(evaluator_, split, rows)
    return [record for part in parts for record in part]


# -- a worked example

HOPS = [("a", "hop", "b"), ("b", "hop", "c"), ("c", "hop", "d")]
HOPS += [("a", "far", "c")]


def test_the_records_of_a_query_are_worked_by_hand():
    """far(b, d) follows by the rule, as far(b, c) does; of log-odds -1 and -0.5, it ranks second of four tails.

    Of the heads ?, far(?, d): only c, by hop(c, d), and b are derived.
    """
    dataset = loaders.from_triples(
        HOPS,
        rules="far(X, Y) :- hop(X, Z), hop(Z, Y)\nfar(X, Y) :- hop(X, Y)",
        valid=[("b", "far", "d")],
    )
    task = prover_task.build_task(dataset, ProverTaskConfig(max_height=1))
    b, d = (dataset.entities.index(name) + 1 for name in "bd")

    def score(atoms):
        return torch.where((atoms[:, 1] == b) & (atoms[:, 2] == d), -1.0, -0.5)

    root = make_node((2, b, d), rule=0)
    proof, calls = Proof(nodes=(root,)), []
    evaluator_ = Evaluator(
        task=task,
        protocol=RankingProtocol(),
        score=FunctionScore(score),
        prove=lambda atoms: calls.append(atoms.tolist()) or [proof],
        all_scores=True,
    )
    head, tail = all_records(evaluator_, dataset.valid)
    assert calls == [[[2, b, d]]]  # one proof for both sides
    common = {"query_row": 0, "relation": "far", "atom": "far(b, d)"}
    common |= {"n_better": 1, "n_equal": 0, "n_candidates": 4, "n_scored": 2}
    common |= {"answer_provable": True, "status": "proved"}
    common |= {"log_score": round(-math.log(1 + math.e), 4)}
    common |= {"quantised_score": -10000, "other_quantised_scores": [-5000]}
    ways = ("optimistic", "pessimistic", "realistic")
    common |= {"rank": dict.fromkeys(ways, 2)}
    common |= {"reciprocal_rank": 0.5, "near_boundary": False}
    for record, side in ((head, "head"), (tail, "tail")):
        assert record["side"] == side and common.items() <= record.items()
        assert record["proof"]["nodes"][0]["goal_text"] == "far(b, d)"
        assert record.keys() == common.keys() | {"side", "proof"}


def test_a_status_says_whether_an_answer_was_proved_missed_or_without_proof():
    status = evaluate._answer_status
    assert status(True, -0.5) == "proved"
    for score in (None, -float("inf")):
        assert status(True, score) == "missed"
        assert status(False, score) == "no proof"


# -- the ranking of a whole split


@pytest.mark.parametrize(
    ("offset", "near"),
    [(0.0, 0), (0.5e-4 - 2e-6, 69), (0.5e-4 + 2e-6, 69), (0.5e-4 + 8e-6, 0)],
)
def test_queries_whose_scores_could_round_otherwise_are_counted(offset, near):
    """Every score is a grid line plus the offset; half a line is where rounding goes the other way."""
    evaluator_ = make_evaluator(FAMILY, "noisy-or", sides=(2,))
    value = torch.tensor(-0.25 + offset, dtype=torch.float64)
    scorer = lambda atoms: value.expand(len(atoms))
    evaluator_ = dataclasses.replace(evaluator_, score=FunctionScore(scorer))
    split = evaluator_.task.dataset.valid
    found, names = all_records(evaluator_, split), FAMILY.predicates
    summary = evaluate.summarise_records(found, names, with_auc=False)
    assert summary["n_near_boundary"] == near


# -- windows, which processes share


@pytest.mark.parametrize("is_shared", [False, True])
def test_windows_hold_each_query_once_and_change_no_record(is_shared):
    dataset = loaders.load("family_tree:30:1")
    evaluator_ = make_evaluator(dataset, "noisy-or")
    rows = np.arange(len(dataset.test))
    asked = evaluator_, dataset.test, rows
    windows = evaluate.plan_windows(*asked, is_shared=is_shared)
    assert (len(windows) > 1) == is_shared
    assert np.concatenate(windows).tolist() == rows.tolist()
    records = [
        record
        for window in windows
        for query in evaluate.rank_window(evaluator_, dataset.test, window)
        for record in query
    ]
    assert records == all_records(evaluator_, dataset.test)


# -- files of records


WORDS = "evaluate family_tree:60:0 --split valid --score noisy-or --height 1 --details"
EVALUATE = WORDS.split()


def close(got, want):
    """Equal but for the order in which floating-point numbers were added."""
    if isinstance(want, dict):
        assert got.keys() >= want.keys()
        for key in want:
            close(got[key], want[key])
    else:
        assert got == pytest.approx(want, abs=1e-12)


COUNTRIES = loaders.load("countries_s2")
FAMILY = loaders.load("family_tree:60:0")
# Under another name it is ranked against all entities, not against the regions.
RENAMED_COUNTRIES = dataclasses.replace(COUNTRIES, name="renamed")


@pytest.mark.parametrize(
    ("dataset", "protocol"),
    [
        (COUNTRIES, {"sides": (2,)}),
        (COUNTRIES, {"sides": (2,), "n_negatives": 3}),
        (RENAMED_COUNTRIES, {}),
        (FAMILY, {}),
        (FAMILY, {"n_negatives": 7}),
        (FAMILY, {"score_unprovable": True}),
    ],
)
@pytest.mark.parametrize("score", ["exists@1", "noisy-or"])
def test_a_summary_of_records_is_that_of_all_ranks(dataset, protocol, score):
    evaluator_ = make_evaluator(dataset, score, **protocol)
    # Countries' records hold all scores anyway.
    evaluator_ = dataclasses.replace(
        evaluator_, all_scores=not evaluator_.task.is_countries
    )
    split = dataset.test if len(dataset.test) else dataset.valid
    how, names = evaluator_, list(dataset.predicates)
    ranked = ranking.rank_split(how.task, split, how.score, how.protocol)
    want = ranking.summarise_ranking(ranked, names, with_auc=True)
    found = all_records(evaluator_, split)[::-1]
    got = evaluate.summarise_records(found, names, with_auc=True)
    # Atoms of several queries count once there, and once a query here.
    del want["n_scored"]
    close(got, want)


def test_another_evaluation_is_not_resumed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "ranks.jsonl"

    def evaluated(*options):
        words = (*EVALUATE, path, "--max-queries", "4", *options)
        status = funcppo(monkeypatch, *words)
        return status, capsys.readouterr().err.splitlines()[-1:]

    assert evaluated()[0] == 0
    before = path.read_bytes()
    for options, expected in (
        ("", "expected --resume, --overwrite or a new file, got a file that"),
        ("--resume --negatives 3", "made with negatives 3, got None"),
        ("--resume --set smoothing=7", "made with smoothing 7.0, got "),
    ):
        status, (line,) = evaluated(*options.split())
        assert status == 2 and expected in line
        assert path.read_bytes() == before
    path.write_text("not a record\n")
    status, (line,) = evaluated("--resume")
    assert status == 2 and "ranks.jsonl:1: expected a JSON object" in line
    assert evaluated("--overwrite")[0] == 0 and path.read_bytes() == before


def test_ranks_and_summary_follow_from_the_recorded_scores(
    tmp_path, monkeypatch
):
    """By lists of scores and fractions, which share no code with the program."""
    path, summary = tmp_path / "ranks.jsonl", tmp_path / "summary.json"
    folder = write_graph(
        tmp_path / "hops",
        train="a\thop\tb\nb\thop\tc\nc\thop\td\na\tfar\tc\nc\tfar\td\n",
        valid="a\thop\td\n",
        test="b\tfar\td\na\tfar\td\n",
        rules="far(X,Y) :- hop(X,Z), hop(Z,Y)\nfar(X,Y) :- hop(X,Y)\n",
    )
    words = ("evaluate", folder, "--score", "noisy-or", "--height", "1")
    words += ("--set", "all_scores=on", "--details", path, "--json", summary)
    assert funcppo(monkeypatch, *words) == 0

    values = {}
    rows = read_records(path)
    assert {"proved", "no proof"} <= {row["status"] for row in rows}
    for row in rows:
        assert bool(row["proof"]) == (row["status"] == "proved")
        answer, *others = (
            -math.inf if x is None else x
            for x in [row["quantised_score"], *row["other_quantised_scores"]]
        )
        others += [-math.inf] * (row["n_candidates"] - 1 - len(others))
        n_better = sum(x > answer for x in others)
        assert row["n_better"] == n_better
        assert row["n_equal"] == others.count(answer)
        places = range(n_better + 1, n_better + others.count(answer) + 2)
        ends = places[0], places[-1], (places[0] + places[-1]) / 2
        names = ("optimistic", "pessimistic", "realistic")
        assert row["rank"] == dict(zip(names, ends))
        expected = [("expected", place) for place in places]
        for name, place in [*zip(names, ends), *expected]:
            share = 1 / len(places) if name == "expected" else 1
            metrics = {"mrr": 1 / place}
            metrics |= {f"hits@{k}": place <= k for k in (1, 3, 10)}
            for metric, value in metrics.items():
                for side in ("both", row["side"]):
                    key = side, metric, name
                    values[key] = values.get(key, 0) + share * value
        expected = np.mean([1 / place for place in places])
        assert row["reciprocal_rank"] == pytest.approx(expected)

    by_side = json.loads(summary.read_text())["by_group"]["all"]
    assert {"both", "head", "tail"} >= {side for side, *_ in values}
    for (side, metric, name), total in values.items():
        n = sum(side in ("both", row["side"]) for row in rows)
        assert by_side[side][metric][name] == pytest.approx(total / n)


# -- other formats


def test_wilson_of_published_values():
    """Newcombe 1998, table I: 81 of 263 is .2553 to .3662; 0 of 20 is 0 to .1611; 15 of 148 is .0624 to .1605."""
    counts = np.array([81, 0, 15, 0]), np.array([263, 20, 148, 0])
    low, high = evaluate.wilson(*counts)
    np.testing.assert_allclose(low[:3], [0.2553, 0.0, 0.0624], atol=5e-5)
    np.testing.assert_allclose(high[:3], [0.3662, 0.1611, 0.1605], atol=5e-5)
    assert np.isnan([low[3], high[3]]).all()


def test_candidates_are_counted_in_the_bin_of_their_probability():
    bins = evaluate.bin_probabilities(
        np.array([0.0, 0.05, 0.1, 0.99, 1.0]),
        np.array([False, True, False, True, True]),
    )
    assert bins.n.tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert bins.n_right.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    sums = bins.probability_sum[[0, 1, 9]]
    np.testing.assert_allclose(sums, [0.05, 0.1, 1.99])
    losses = -np.log([0.05, 0.9, 0.99])
    np.testing.assert_allclose(bins.log_loss_sum[[0, 1, 9]], losses)
    assert evaluate.log_loss(bins) == pytest.approx(losses.sum() / 5)
    # |1 - .05| + |0 - .1| + |2 - 1.99| over five candidates
    assert evaluate.calibration_error(bins) == pytest.approx(1.06 / 5)
