"""Rules: their counts, what they derive against brute force, and what the run makes of them."""

import numpy as np
import pytest

from funcppo.kg.show import measure
from funcppo.kg.show.serve import rule_view
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.rule_view import RuleView


@pytest.fixture(scope="module", params=["untrained", "questions", "proofs"])
def explorer(request, explorers):
    return explorers[request.param]


def test_rules_come_by_confidence_with_the_counts_of_the_score(explorer):
    rules = explorer.rules(None, 0)
    kb = explorer.answerer.subject.task.kb
    confidence = [rule["confidence"] for rule in rules["rules"]]
    assert confidence == sorted(confidence, reverse=True)
    assert rules["n_rules"] == len(rules["rules"]) == 3
    for rule in rules["rules"]:
        pairs = float(kb.body_pairs[rule["id"]])
        assert rule["support"] == float(kb.support[rule["id"]])
        assert rule["confidence"] == rule["support"] / pairs
    of_one = explorer.rules(rules["rules"][0]["relation"]["id"], 0)
    assert 0 < of_one["n_rules"] < 3


def test_what_a_rule_derives(explorer):
    """Rule 2 is also(X, Y) :- likes(X, Z), likes(Z, Y)."""
    dataset = explorer.dataset
    head, body, _ = dataset.rules[2, :, 0].tolist()
    facts = dataset.facts.tolist()
    likes = {(h, t) for p, h, t in facts if p == body}
    derived = {(x, y) for x, z in likes for w, y in likes if z == w}
    known = np.concatenate([dataset.facts, dataset.valid, dataset.test])
    known = {(h, t) for p, h, t in known.tolist() if p == head}

    detail = explorer.rule(2)
    assert detail["n_derived"] == len(derived)
    assert detail["n_known"] == len(derived & known)
    listed = [
        tuple(name["id"] for name in fact["arguments"])
        for fact in detail["derived"]
    ]
    assert len(listed) == rule_view.MAX_LISTED and set(listed) <= derived
    is_known = [pair in known for pair in listed]
    assert is_known == sorted(is_known)


def test_learning_is_that_of_a_report(explorers):
    for name in ("questions", "proofs"):
        explorer = explorers[name]
        sample = explorer._rules._sample(int(explorer.dataset.rules[0, 0, 0]))
        run = explorer.answerer.subject.policy_run
        uses = measure.uses_by_rule(run, sample.atoms, sample.proofs)
        learning = explorer.rule(0)["learning"]
        assert learning == {
            "before": uses[0].before,
            "after": uses[0].after,
            "n_weighed": uses[0].n_firings,
        }
        assert explorer.rule(0)["n_decided"] == uses[0].n_proofs > 0
    assert explorers["untrained"].rule(0)["learning"] is None


def test_sampling_ends_with_its_time_and_says_how_far_it_came(
    explorers, monkeypatch
):
    monkeypatch.setattr(rule_view, "SAMPLE_SECONDS", -1.0)
    view = RuleView(explorers["untrained"].answerer)
    assert view.detail(0).n_sampled == 0


def test_too_much_work_is_one_line(explorers, monkeypatch):
    monkeypatch.setattr(rule_view, "MAX_ROWS", 10)
    detail = explorers["untrained"].rule(2)
    assert detail["n_derived"] is None and detail["derived"] == []
    assert "more than 10 rows" in detail["note"]


def test_an_unknown_rule(explorer):
    for rule in (-1, 3):
        with pytest.raises(RequestError, match=f"0 to 2, got {rule}"):
            explorer.rule(rule)
