"""End a training run: choose and calibrate on valid, rank test, and gather the contents of results.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from funcppo import logs
from funcppo.core.files import Json
from funcppo.kg.ranking import calibration, ranking
from funcppo.kg.run import training, validation
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.config import Note
from funcppo.kg.run.run import Run
from funcppo.kg.run.subject import describe_default_score
from funcppo.kg.run.validation import Calibration, SampledMetrics
from funcppo.kg.search.task import PhaseCallback, false_negative_rate


def with_late_note(run: Run) -> Run:
    """The run with a note on where its time ended training, if it did."""
    if training.is_finished(run):
        return run
    note = (
        f"the time of the run (--seconds) ended training after update {int(run.state.train_state.update)} of "
        f"{run.cfg.ppo.n_updates}; --resume continues"
    )
    return dataclasses.replace(run, notes=(*run.notes, Note("cut", note)))


def rank_results(
    run: Run,
    training_seconds: float,
    run_time: RunTime,
    on_phase: PhaseCallback,
) -> tuple[Run, Json]:
    """Return the run as it answers, and the contents of results.json, without the total time.

    Args:
      training_seconds: time until training ended, validation included.
    """
    task = run.task
    ppo = run.run_config.ppo
    n_updates = int(run.state.train_state.update)
    n_all = len(task.dataset.test)
    on_phase("ranking valid, other facts counted")
    run, variant, more = validation.choose_other_facts(
        run, run_time.until(run_time.TEST).share(0.2)
    )
    calibrated = _calibrate(run, run_time, on_phase)
    notes = [*run.notes, *_end_notes(run, calibrated), *more]

    rule_scores = [run.run_config.rule_score]
    if variant is not None:
        rule_scores.append(variant)
    temperature = calibrated and calibrated.temperature
    test = _test_metrics(run, rule_scores, run_time, temperature, on_phase)
    run_time.end_phase("ranking of test")
    if test.n_queries < n_all:
        notes.append(Note("cut", _sample_note(test.n_queries, n_all)))
    return run, {
        "dataset": run.run_config.dataset,
        "rules": len(task.dataset.rules),
        "height": task.max_height,
        "learner": run.run_config.learner,
        "score": run.score,
        "default_score": run.default_score,
        "default_score_reason": run.default_score_reason,
        "rule_score": run.run_config.rule_score,
        "rule_valid_metric": run.rule_metric,
        "seed": run.run_config.seed,
        "steps": n_updates * ppo.n_envs * ppo.n_steps,
        "stopped_early": training.stopped_early(run),
        "best_update": int(run.state.best_update),
        "best_valid_metric": float(run.state.best_valid_metric)
        if len(task.dataset.valid)
        else None,
        "false_negative_rate": false_negative_rate(task),
        "test": test.metrics,
        "n_test_queries": test.n_queries,
        "test_is_sample": test.n_queries < n_all,
        "calibration": _describe_calibration(calibrated, test),
        "seconds_limit": run.run_config.seconds,
        "seconds": training_seconds,
        "phase_seconds": run_time.phases,
        "phase_peak_bytes": run_time.peak_bytes,
        "notes": notes,
        "versions": logs.package_versions(),
        "device": run.run_config.device,
    }


def _end_notes(run: Run, calibrated: Calibration | None) -> list[Note]:
    """What is said of a run that has ended, before test is ranked."""
    notes: list[Note] = []
    if training.stopped_early(run):
        notes.append(Note("detail", _early_stop_note(run)))
    if run.default_score_reason != "not-compared":
        notes.append(Note("answers", describe_default_score(run)))
    if calibrated is None and len(run.task.dataset.valid):
        note = "no temperature is chosen on valid: there was no time for it (--seconds)"
        notes.append(Note("cut", note))
    return notes


def _early_stop_note(run: Run) -> str:
    """Where early stopping ended a run, and why."""
    return (
        f"stopped early after update {int(run.state.train_state.update)} of {run.cfg.ppo.n_updates}: "
        f"none of the last {run.run_config.early_stop_validations} validations was better than that of update "
        f"{int(run.state.best_update)} (early_stop_validations)"
    )


def _calibrate(
    run: Run, run_time: RunTime, on_phase: PhaseCallback
) -> Calibration | None:
    """The temperature that valid chooses, in at most a half of the time that is left for the ranking of test."""
    deadline = run_time.until(run_time.TEST).share(0.5)
    on_phase("calibrating on valid")
    return validation.calibrate(run, deadline, on_phase)


def _describe_calibration(
    calibrated: Calibration | None, test: SampledMetrics
) -> Json:
    """How far probabilities can be read as chances, on valid and on test, before training and after it."""
    splits = {"valid": calibrated.bins if calibrated else {}, "test": test.bins}
    found: Json = {
        "temperature": calibrated.temperature if calibrated else None
    }
    for split, bins in splits.items():
        found[split] = {
            state: calibration.to_json(counted)
            for state, counted in bins.items()
        }
    return found


def _sample_note(n_queries: int, n_all: int) -> str:
    """Why test has no metrics, or those of a part of its queries."""
    if not n_queries:
        return (
            f"test: none of {n_all:,} queries is ranked: no time was left (--seconds; `funcppo evaluate` "
            "ranks all)"
        )
    return (
        f"test: the metrics are those of a random sample, {n_queries:,} of {n_all:,} queries: all would take "
        "too long (--seconds; `funcppo evaluate` ranks all)"
    )


def _test_metrics(
    run: Run,
    rule_scores: Sequence[str],
    run_time: RunTime,
    temperature: float | None,
    on_phase: PhaseCallback,
) -> SampledMetrics:
    """Metrics on queries of the test split of the untrained scores, of the untrained policy and of the trained one.

    Args:
      rule_scores: ranked beside those that always are.
      temperature: that valid has chosen; None for none.
    """
    task = run.task
    test = task.dataset.test
    if not len(test):
        return validation.SampledMetrics({}, 0, {})
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(task))

    names = (
        f"exists@{task.max_height}",
        "max-confidence",
        "noisy-or",
        *rule_scores,
    )
    n_candidates = ranking.estimate_candidates(task, test, protocol)
    on_phase(f"ranking test, about {n_candidates:,} candidates")
    return validation.evaluate_within(
        run,
        test,
        protocol,
        list(dict.fromkeys(names)),
        run_time.until(run_time.TEST),
        on_phase,
        temperature,
    )


def default_row(run: Run) -> str:
    """The row of the results table whose score ranks answers."""
    is_policy = run.default_score == run.score
    return f"{run.score}, trained" if is_policy else run.default_score
