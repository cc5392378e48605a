"""Scores as values: names, what each gives candidates worked by hand, sums, and a new one in one object."""

import math

import numpy as np
import pytest
import torch

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import evaluate, explain, ranking
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores import score as score_module
from funcppo.kg.scores.score import (
    MaxConfidence,
    Score,
    names_to_try,
    parse,
    register,
)
from funcppo.kg.search import task as prover_task
from tests.kg.ranking.scores import score_by_name

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
    ],
)
def test_a_name_is_that_of_its_score(name):
    score = parse(name)
    assert score.name == str(score) == name
    assert ("other-facts" in score.needs) == name.endswith("-other-facts")
    assert score.min_height == (2 if name == "exists@2" else 1)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "evidence",
        "exists@",
        "exists@0",
        "exists@²",
        "exists@" + "9" * 20,
        "max-confidence@2",
        "noisy-or@",
        "noisy-or@0",
        "noisy-or@100",
        "noisy-or@nan",
        "noisy-or-top-",
        "noisy-or-top-0",
        "noisy-or-linked-last",
        "noisy-or-other-facts-other-facts",
    ],
)
def test_another_name_is_one_error(name):
    with pytest.raises(ValueError, match=r"^score .*: expected exists@H ") as e:
        parse(name)
    assert str(e.value).count("\n") == 0 and len(str(e.value)) < 400


def test_a_run_adds_its_scores_to_the_names():
    learnt = MaxConfidence("success")
    assert parse("success", {"success": learnt}) is learnt
    with pytest.raises(ValueError, match="'evidence': expected success, exi"):
        parse("evidence", {"success": learnt})


# -- values


def test_other_facts_add_a_log_likelihood_ratio_for_each_side():
    """far(a, X): c and d by confidence 1/2; c has another fact of far as a tail, d has none; a has none as a head."""
    train = [
        ("a", "hop", "b"), ("b", "hop", "c"), ("b", "hop", "d"),
        ("x", "hop", "y"), ("y", "hop", "z"), ("x", "far", "z"),
        ("z", "far", "c"), ("x", "hop", "w"), ("w", "hop", "v"),
        ("x", "far", "v"),
    ]  # fmt: skip
    rules = "far(X, Y) :- hop(X, Z), hop(Z, Y)"
    dataset = loaders.from_triples(train, rules=rules)
    task = prover_task.build_task(
        dataset, ProverTaskConfig(max_height=1, smoothing=None)
    )
    far = dataset.predicates.index("far") + 1
    a, c, d, x, z = (dataset.entities.index(name) + 1 for name in "acdxz")
    atoms = torch.tensor(
        [[far, a, a], [far, a, c], [far, a, d], [far, x, z]], dtype=torch.int32
    )
    atoms = atoms[torch.argsort(atoms[:, 1] * 10 + atoms[:, 2])]
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
    register(
        "rule-count",
        "rule-count",
        lambda name: RuleCount(name.string),
        "of a candidate",
        tried=("rule-count",),
    )
    assert names_to_try()[-1] == "rule-count"
    dataset = loaders.load("family_tree:30:0")
    task = prover_task.build_task(dataset, ONE_STEP)
    for name in ("rule-count", "rule-count-other-facts"):
        ranks = Evaluator(
            task=task,
            protocol=RankingProtocol(),
            score=parse(name),
            prove=None,
            all_scores=True,
        )
        rows = np.arange(len(dataset.test))
        records = [
            record
            for query in evaluate.rank_window(ranks, dataset.test, rows)
            for record in query
        ]
        assert len(records) == 2 * len(rows)
        scores = {record["quantised_score"] for record in records} - {None}
        is_count = {score % 10_000 == 0 for score in scores}
        assert is_count == ({True} if name == "rule-count" else {True, False})
    with pytest.raises(
        ValueError, match=r"P\), rule-count \(of a candidate\); H"
    ):
        parse("rule-counts")


def test_scores_add_up():
    dataset = loaders.load("family_tree:30:0")
    task = prover_task.build_task(dataset, ONE_STEP)
    atoms = task.least_model.atoms[::9].int()
    both = parse("max-confidence") + parse("noisy-or@2")
    assert both.name == "max-confidence + noisy-or@2"
    got, one, other = (
        ranking.scoring.score_atoms(task, score, atoms, TAIL)
        for score in (both, parse("max-confidence"), parse("noisy-or@2"))
    )
    assert torch.equal(got, one + other)
