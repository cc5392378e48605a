"""The settings, the height, the score and the fits of a new run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest

from funcppo.kg.run import run_start, validation
from funcppo.kg.run.budget import with_time_bounds
from funcppo.kg.search.task import COUNTRIES_REGIONS, ignore_phase
from tests.kg.run.runs import CONFIG


def test_queries_that_cannot_be_ranked_are_refused_before_training(tmp_path):
    """Under the name of Countries, tails are ranked among the regions; lyon is none."""
    folder = tmp_path / "countries_of_cities"
    folder.mkdir()
    (folder / "train.txt").write_text(
        "".join(f"paris\tin\t{region}\n" for region in COUNTRIES_REGIONS)
    )
    (folder / "rules.txt").write_text("in(X, Y) :- in(Y, X)\n")
    run_config = replace(CONFIG, dataset=str(folder), score="auto")
    good = "lyon\tin\teurope\n"
    for name in ("valid", "test"):
        (folder / "valid.txt").write_text(good)
        (folder / "test.txt").write_text(good)
        (folder / f"{name}.txt").write_text(f"{good}paris\tin\tlyon\n")
        message = f"^countries_of_cities: {name}: expected an answer among the 5 candidates, got query 1"
        with pytest.raises(ValueError, match=message):
            run_start.prepare_run(run_config, tmp_path / "run", resume=False)
    (folder / "test.txt").write_text(good)
    run_start.prepare_run(run_config, tmp_path / "run", resume=False)


@pytest.mark.parametrize(
    ("success", "best_proof", "chosen"),
    [(0.5, 0.4, "success"), (0.4, 0.5, "best-proof")],
)
def test_the_score_that_ranks_valid_better_is_chosen(
    success, best_proof, chosen, run, monkeypatch
):
    mrr = {"success": success, "best-proof": best_proof}
    run = replace(run, run_config=replace(CONFIG, score="auto"))
    monkeypatch.setattr(
        validation, "evaluate_policy", lambda *args: {"mrr": mrr[args[4]]}
    )
    scored = run_start._choose_score(run, ignore_phase)
    assert (scored.run.score, scored.mrr) == (chosen, max(mrr.values()))
    assert scored.notes == [
        f"policy: score {chosen} chosen: MRR untrained on 3 valid triples: "
        f"success {success:.4f}, best-proof {best_proof:.4f}"
    ]


def open_settings(**fields):
    """A config whose height, smoothing and object identity are open."""
    prover = dataclasses.replace(
        CONFIG.prover,
        max_height=None,
        smoothing="auto",
        object_identity="auto",
        **fields,
    )
    return replace(CONFIG, prover=prover)


def test_a_new_run_holds_the_settings_that_were_chosen(tmp_path):
    run = run_start.prepare_run(open_settings(), tmp_path, resume=False)
    prover = run.run_config.prover
    assert prover.max_height == run.task.max_height
    assert prover.smoothing != "auto"
    assert isinstance(prover.object_identity, bool)
    assert run.run_config.rule_score != "auto"
    assert run.run_config == replace(
        with_time_bounds(open_settings(), math.inf),
        prover=prover,
        rule_score=run.run_config.rule_score,
    )
    assert any(note.startswith("height ") for note in run.notes)


@pytest.mark.parametrize(
    ("mrr", "height"),
    [
        ({1: 0.5, 2: 0.4, 3: 0.9}, 1),  # 3 is not tried after 2 is worse
        ({1: 0.5, 2: 0.6, 3: 0.6}, 2),
        ({1: 0.5, 2: 0.6, 3: 0.7}, 3),
    ],
)
def test_the_policy_chooses_among_the_heights(
    mrr, height, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        validation,
        "evaluate_policy",
        lambda run, *_: {"mrr": mrr[run.task.max_height]},
    )
    config = replace(open_settings(), dataset="countries_s3")
    run = run_start.prepare_run(config, tmp_path, resume=False)
    assert run.task.max_height == height


@pytest.mark.parametrize(
    ("module", "bound"),
    [
        (validation, "MAX_VALIDATION_SUCCESSORS"),
        (run_start, "MAX_TRIAL_SUCCESSORS"),
    ],
)
def test_a_height_whose_search_is_too_long_is_not_tried(
    module, bound, tmp_path, monkeypatch
):
    """By the rough count before the search, and by the count of what a search computes."""
    monkeypatch.setattr(module, bound, 1)
    config = replace(open_settings(), dataset="countries_s3")
    run = run_start.prepare_run(config, tmp_path, resume=False)
    assert run.task.max_height == 1
    assert any(
        note.startswith("policy: height 2 not tried: a search for ")
        for note in run.notes
    )
