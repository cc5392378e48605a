"""The set-up of an evaluation: options as numbers, counts of the search, and the notes on them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from funcppo.cli import evaluation_setup
from funcppo.cli.evaluate import Evaluate
from funcppo.cli.evaluation_setup import prepare_evaluation, search_notes
from funcppo.kg.ranking import policy_score
from funcppo.kg.run import validation
from funcppo.kg.search.task import ignore_phase
from funcppo.runtime.equivalence import EquivalenceError
from funcppo.runtime.reasons import ReasonCode

RESULT = {"peak_bytes": 10, "memory_limit_bytes": 10, "n_missed": 0}
SEARCHED = RESULT | {
    "row_steps": 2000,
    "active_fraction": 0.5,
    "n_pruned": 0,
    "n_overflowed": 0,
    "n_halvings": 0,
}


@pytest.mark.parametrize(
    ("result", "notes"),
    [
        (RESULT, []),
        (
            RESULT | {"peak_bytes": 3e6},
            ["the peak of 3 MB exceeds the limit of --memory"],
        ),
        (SEARCHED, ["slot utilisation: 50.0% of 2,000 row-steps"]),
        (
            SEARCHED | {"n_pruned": 7, "n_overflowed": 8, "n_missed": 9},
            [
                "slot utilisation: 50.0% of 2,000 row-steps",
                "the beam pruned partial proofs of 7 candidates",
                "successors of 8 candidates did not fit",
                "9 provable answers were not found by the search",
            ],
        ),
    ],
)
def test_notes_say_what_the_search_may_have_missed(
    result: dict[str, Any], notes: list[str]
):
    assert search_notes(result) == notes


def test_an_untrained_score_has_no_policy_and_no_search():
    setup = prepare_evaluation(
        Evaluate(target="countries_s1", height=1, negatives="4", seed=5),
        ignore_phase,
    )
    assert (setup.score, setup.search_step) == ("max-confidence", None)
    assert [note.split(" chosen: MRR ")[0] for note in setup.notes] == [
        "object identity off",
        "smoothing none",
        "rule score max-confidence",
    ]
    protocol = setup.evaluator.protocol
    assert (protocol.n_negatives, protocol.seed, protocol.score_unprovable) == (
        4,
        5,
        False,
    )
    assert (
        setup.log_settings["params_digest"] is None
        and setup.log_settings["negatives"] == 4
    )
    assert setup.evaluator.prove is None


def test_the_policy_of_a_run_is_tuned_and_identified(trained, monkeypatch):
    setups = [
        prepare_evaluation(
            Evaluate(target=str(trained), score=score), ignore_phase
        )
        for score in ("auto", "greedy")
    ]
    assert [setup.score for setup in setups] == ["best-proof", "greedy"]
    assert [setup.evaluator.protocol.score_unprovable for setup in setups] == [
        False,
        True,
    ]
    assert (
        setups[0].log_settings["params_digest"]
        == setups[1].log_settings["params_digest"]
        is not None
    )
    assert all(
        "of 4,000 MB" in "".join(setup.notes)
        for setup in [
            prepare_evaluation(
                Evaluate(target=str(trained), memory="4GB"), ignore_phase
            )
        ]
    )
    assert all(setup.search_step is not None for setup in setups)
    assert (
        prepare_evaluation(
            Evaluate(target=str(trained), score="noisy-or"), ignore_phase
        ).log_settings["params_digest"]
        is None
    )


def test_the_search_is_compiled_where_that_is_asked_for_or_worth_it():
    """By hand: 28 s to compile are repaid by 3 microseconds a candidate after some 10 million."""
    enough = evaluation_setup.COMPILE_MIN_CANDIDATES
    for asked, device, n, expected in (
        ("auto", "cuda", enough, None),
        ("auto", "cuda:1", enough, None),
        ("auto", "cuda", enough - 1, ReasonCode.SHORT_RUN),
        ("auto", "cpu", 100 * enough, ReasonCode.NO_GPU),
        ("on", "cpu", 1, None),
        ("off", "cuda", enough, ReasonCode.NOT_REQUESTED),
    ):
        options = Evaluate(target="x", compile=asked, device=device)
        got = evaluation_setup.why_not_compile(options, n)
        assert (got and got.code) == expected, (asked, device, n)
        assert got is None or got.reason
    assert pytest.approx(enough, rel=0.1) == 28 / 3e-6


def test_a_search_that_is_not_compiled_has_its_reason(trained, monkeypatch):
    """The compiler is turned off, it is wrong, it was not to be tried, or there is no search."""
    wrong = Mock(side_effect=EquivalenceError("off by one"))
    monkeypatch.setattr(policy_score, "compile_search_step", wrong)

    def uncompiled(score, **options):
        evaluate = Evaluate(target=str(trained), score=score, **options)
        return prepare_evaluation(evaluate, ignore_phase).uncompiled

    assert uncompiled("best-proof") == evaluation_setup.NO_SEARCH
    assert uncompiled("noisy-or") == evaluation_setup.NO_SEARCH
    monkeypatch.setattr(policy_score, "needs_search", lambda task, cfg: True)
    monkeypatch.setattr(
        evaluation_setup, "_tune_batch_size", untuned_batch_size
    )
    assert uncompiled("success").code is ReasonCode.NO_GPU
    # as on a GPU, where it is tried
    monkeypatch.setattr(evaluation_setup, "why_not_compile", lambda *_: None)
    reason = uncompiled("success")
    assert (*reason,) == ("off by one", ReasonCode.WRONG_RESULT)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert uncompiled("success").code is ReasonCode.DISABLED


def untuned_batch_size(run, score, split, memory_limit):
    return validation.run_search_config(run, score), []
