"""Subjects of an evaluation: a trained run or rule confidences over a data set, with task and score."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.kg.config import CHOICE_SECONDS, Note, ProverTaskConfig
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import check_horn
from funcppo.kg.ranking import scoring
from funcppo.kg.ranking.evaluate import RankedFile
from funcppo.kg.ranking.ranking import ranked_sides, selection_metric
from funcppo.kg.run import held_out
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.choices import (
    Settings,
    Trial,
    choose_settings,
    describe_choice,
)
from funcppo.kg.run.run import EVIDENCE_SCORE, Run
from funcppo.kg.scores.learned import LearnedScore
from funcppo.kg.scores.score import Score, parse
from funcppo.kg.search.beam import SearchStep
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    build_task,
    ignore_phase,
    with_rule_counts,
)
from funcppo.runtime.distributed import Processes


class Subject(NamedTuple):
    """Task with the score of its candidates."""

    task: ProverTask
    score: Score
    # the run whose policy gives the scores; None for a score without a policy
    policy_run: Run | None
    notes: list[str]  # what was chosen, one line each
    # score of the run that knows every entity; None without any
    others: LearnedScore | None = None

    @property
    def search_step(self) -> SearchStep | None:
        """Return the step of the search by the run's policy; None without a policy."""
        return None if self.policy_run is None else self.policy_run.search_step


def run_subject(
    run: Run,
    score: str = "auto",
    on_phase: PhaseCallback = ignore_phase,
) -> Subject:
    """Return a run at its checkpoint with one of its scores, auto for its default score.

    Raises:
      ValueError: the run does not have the score.
    """
    if run.task.is_guide:
        raise ValueError(
            "expected a run that ranks, got one of --learner guide, which orders the search of funcppo prove --guide"
        )
    is_open = score == "auto"
    name = run.default_score if is_open else score
    trained = held_out.trained_scores(run)
    value = parse(name, trained)
    others = trained.get(EVIDENCE_SCORE)
    if not (isinstance(others, LearnedScore) and others.knows_all):
        others = None
    notes: list[str] = []
    if not value.needs & {"search", "questions"}:
        if is_open:
            notes = [Note("answers", describe_default_score(run))]
        task = scoring.with_score_counts(run.task, value, on_phase)
        return Subject(task, value, None, notes, others)
    if not run.is_finished:
        notes = [f"the run stands at update {run.update} of {run.n_updates}"]
    return Subject(run.task, value, run, notes, others)


def describe_default_score(run: Run) -> str:
    """Describe in one line which score a run ranks by unless another is asked for, and how well both rank valid."""
    assert run.rule_metric is not None, "the scores are compared"
    best = float(run.state.best_valid_metric)
    is_validated = run.default_score_reason != "policy-not-validated"
    name = run.run_config.rule_score
    rule = name, f"the rule score {name}", f"{run.rule_metric:.4f}"
    policy = (
        run.score,
        f"what was learnt (score {run.score})",
        f"{best:.4f}" if is_validated else "not validated",
    )

    is_policy = run.default_score == run.score
    chosen, other = (policy, rule) if is_policy else (rule, policy)
    is_chance = run.default_score_reason.endswith("by-chance")
    is_same = policy[2] == rule[2]
    same = "training changed nothing on valid: " * is_same
    is_chance = is_chance and not is_same
    chance = ", which gains less than two standard errors" * is_chance
    return (
        f"{same}answers are ranked by {chosen[1]}, {selection_metric(run.task)} {chosen[2]} on valid, rather than by "
        f"{other[1]}, {other[2]}{chance} (--score {other[0]} takes that one)"
    )


def describe_numbers(subject: Subject) -> str:
    """Explain in one line the numbers shown with an answer and with its proof."""
    run = subject.policy_run
    if run is None:
        others = ""
        if "other-facts" in subject.score.needs:
            others = (
                ", and from whether the answer has other facts of the relation"
            )
        return f"score: {subject.score}, computed from the confidences of the rules that derive the answer{others}"
    if run.questions is not None:
        return (
            "score: the log-odds under evidence, as a number between 0 and 1; place and probability: of the answer "
            "among all candidates of the query, those that valid and test hold included; p: the share of the rule in "
            "the weight of all rules that derive the answer"
        )
    return (
        f"score: {subject.score}, of the whole answer; p: the probability with which the policy chooses the step; the "
        "product of all p is the probability of the proof"
    )


def dataset_subject(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    score: str = "auto",
    device: str = "cpu",
    on_phase: PhaseCallback = ignore_phase,
    choice_seconds: float = CHOICE_SECONDS,
    processes: Processes | None = None,
) -> Subject:
    """Return a data set with a score by rule confidences; settings that are left open are chosen by its valid split.

    Args:
      cfg: `max_height` None, `smoothing` "auto" and `object_identity` "auto" are chosen.
      score: an untrained score; auto for the one that ranks valid best.
      device: where it is scored.
      on_phase: receives what is being done.
      choice_seconds: time limit of the choice, with T_P up to a height above 1 that is chosen; notes say what is left
        out for it. Counting the rules, which every score needs, has as much before, and is estimated beyond.
      processes: those that share the work, each of which calls this: rank 0 chooses within the time, and a height is
        taken if every process has computed its T_P within the time; None for one process.

    Raises:
      ValueError: there are no rules, or a setting or the score is bad.
    """
    check_horn(dataset)
    value = None if score == "auto" else parse(score)
    cfg = _with_height(cfg, value)
    # Whether T_P derives a candidate says nothing of how rules are counted.
    is_open = value is None or "rules" not in value.needs
    count_notes: list[str] = []
    if cfg.object_identity is not True:
        counting = Deadline(at=time.monotonic() + choice_seconds)
        dataset, count_notes = with_rule_counts(dataset, on_phase, counting)
    deadline = Deadline(at=time.monotonic() + choice_seconds)
    run_time = RunTime(on_phase=on_phase)

    def choose() -> tuple[Settings, list[str]]:
        # T_P up to the height that is chosen has the rest of the time.
        settings = choose_settings(
            dataset,
            cfg,
            None if is_open else score,
            run_time,
            deadline.share(0.9),
        )
        chosen = [
            Note("answers", describe_choice(choice))
            for choice in run_time.choices
        ]
        return settings, [*chosen, *run_time.notes]

    if processes is None:
        settings, notes = choose()
    elif processes.is_main:
        # It alone knows which settings there was time for; every process has counted the rules.
        settings, notes = choose()
        chosen = settings._replace(rule_counts=None, identity_counts=None)
        processes.share_bytes(
            "choice of settings", pickle.dumps((chosen, notes))
        )
    else:
        settings, notes = pickle.loads(
            processes.share_bytes("choice of settings")
        )
    task, rule_score, build_notes = _build_chosen_task(
        dataset, cfg, settings, device, run_time.on_phase, deadline, processes
    )
    value = value or parse(rule_score)
    task = scoring.with_score_counts(task, value, on_phase)
    return Subject(task, value, None, [*notes, *build_notes, *count_notes])


def file_subject(
    dataset: Dataset, path: Path, device: str, split: np.ndarray
) -> Subject:
    """Return a data set without rules with the score that a file of rankings gives; raises as `RankedFile` does.

    Args:
      split: triples that it is to rank; a note counts those that are not in the file.
    """
    cfg = ProverTaskConfig(max_height=1, smoothing=0.0, object_identity=False)
    score = RankedFile(path, dataset)
    dataset = replace(dataset, rules=dataset.rules[:0], rule_counts=None)
    task = build_task(
        dataset, cfg, device, with_derivations=False, needs_rules=False
    )
    sides = ranked_sides(task)
    n_missing = score.count_missing(split, sides)
    n_asked = len(sides) * len(split)
    text = f"{path}: {n_missing:,} of {n_asked:,} questions have no ranking there: all their candidates tie"
    return Subject(task, score, None, [Note("answers", text)] * (n_missing > 0))


def _with_height(
    cfg: ProverTaskConfig, score: Score | None
) -> ProverTaskConfig:
    """Return the settings with the height that a score asks for, unless a height is set.

    Raises:
      ValueError: less is set.
    """
    if score is None or "heights" not in score.needs:
        return cfg
    height = score.min_height
    if cfg.max_height is not None and cfg.max_height < height:
        raise ValueError(
            f"--score {score.name}: expected --height {height} or more, got {cfg.max_height}"
        )
    return replace(cfg, max_height=cfg.max_height or height)


def _build_chosen_task(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    settings: Settings,
    device: str,
    on_phase: PhaseCallback,
    deadline: Deadline,
    processes: Processes | None,
) -> tuple[ProverTask, str, list[str]]:
    """Build the task with the chosen settings, or with the best of a lower height if its T_P takes too much.

    Args:
      deadline: of T_P where there is a lower height; none is tried instead of the lowest one.
      processes: a height is not taken if its T_P takes too much in one of them.

    Returns:
      The task, the score at its height, and a note for each height that took too much.
    """
    notes: list[str] = []

    def build(trial: Trial) -> tuple[ProverTask, str, list[str]]:
        is_lowest = trial is settings.by_height[0]
        task, problem = None, ""
        try:
            task = build_task(
                dataset,
                trial.apply(cfg),
                device,
                on_phase,
                with_derivations=trial.height > 1,
                deadline=NO_DEADLINE if is_lowest else deadline,
            )
        except ValueError as error:
            problem = str(error)
        if processes is not None and not is_lowest:
            name = f"T_P to height {trial.height}"
            problem = next(filter(None, processes.exchange(name, problem)), "")
        if problem or task is None:
            raise ValueError(problem)
        return task, trial.score, notes

    return settings.build_highest(
        build, lambda line: notes.append(Note("cut", line))
    )
