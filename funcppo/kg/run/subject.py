"""What scores candidates: a trained run, or rule confidences over a data set; its task and its score."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.ranking import scoring
from funcppo.kg.ranking.ranking import selection_metric
from funcppo.kg.run import run_start, training, validation
from funcppo.kg.run.choices import (
    SettingsChoice,
    choose_settings,
    describe_choice,
)
from funcppo.kg.run.config import CHOICE_SECONDS, Note
from funcppo.kg.run.run import Run, RunScore
from funcppo.kg.scores import link_embedding
from funcppo.kg.scores.score import Score, parse
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.slot_scheduler import SearchStep
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    build_task,
    ignore_phase,
    with_rule_counts,
)
from funcppo.runtime.distributed import Processes

# of the seconds of a choice, what comparing may take: T_P up to the height that is chosen has the rest
COMPARISON_SHARE = 0.9


class Subject(NamedTuple):
    """A task and how its candidates are scored."""

    task: ProverTask
    score: Score
    # the run whose policy gives the scores; None for a score without a policy
    policy_run: Run | None
    notes: list[str]  # what was chosen, one line each
    # link embeddings of the run; None without any
    embedding: link_embedding.Params | None = None

    @property
    def search_step(self) -> SearchStep | None:
        """The step of the search by its policy; None without a policy."""
        return None if self.policy_run is None else self.policy_run.search_step


def open_run_subject(
    folder: Path,
    score: str = "auto",
    device: str = "cpu",
    on_phase: PhaseCallback = ignore_phase,
) -> Subject:
    """Open a trained run with one of its scores.

    Args:
      folder: of the run.
      score: auto for its default score.
      device: where it is scored.
      on_phase: receives what is being done.

    Raises:
      ValueError: the folder holds no run, or the run does not have the score.
    """
    run = run_start.open_run(folder, device, on_phase)
    return run_subject(run, score, on_phase)


def run_subject(
    run: Run,
    score: str = "auto",
    on_phase: PhaseCallback = ignore_phase,
) -> Subject:
    """A run with one of its scores.

    Args:
      run: at a checkpoint.
      score: auto for its default score.
      on_phase: receives what is being done.

    Raises:
      ValueError: the run does not have the score.
    """
    is_open = score == "auto"
    name = run.default_score if is_open else score
    value = parse(name, trained_scores(run))
    embedding = run.state.embedding
    if not link_embedding.n_models(embedding):
        embedding = None
    if not value.needs & {"search", "questions"}:
        notes: list[str] = []
        if is_open:
            notes = [Note("answers", describe_default_score(run))]
        task = scoring.with_score_counts(run.task, value, on_phase)
        return Subject(task, value, None, notes, embedding)
    update, n_updates = int(run.state.train_state.update), run.cfg.ppo.n_updates
    notes = [f"the run stands at update {update} of {n_updates}"]
    if training.is_finished(run):
        notes = []
    return Subject(run.task, value, run, notes, embedding)


def trained_scores(run: Run) -> dict[str, Score]:
    """The scores of candidates by the best parameters of a run, by name."""
    names: tuple[RunScore, ...] = ("success", "best-proof", "greedy")
    if run.questions is not None:
        names = ("evidence",)
    params = run.state.best_params
    return {name: validation.policy_score(run, params, name) for name in names}


def describe_default_score(run: Run) -> str:
    """Which score a run ranks by unless another is asked for, and how well both rank valid, as one line."""
    assert run.rule_metric is not None, "the scores are compared"
    state = run.state
    valid_of_policy = f"{float(state.best_valid_metric):.4f}"
    if run.default_score_reason == "policy-not-validated":
        valid_of_policy = "not validated"
    rule_score = run.run_config.rule_score
    rules = rule_score, f"the rule score {rule_score}", f"{run.rule_metric:.4f}"
    policy = (
        run.score,
        f"the trained policy (score {run.score})",
        valid_of_policy,
    )

    is_policy = run.default_score == run.score
    chosen, other = (policy, rules) if is_policy else (rules, policy)
    has_margin = is_policy and run.rule_margin > 0
    is_by_chance = has_margin and run.rule_metric > state.best_valid_metric
    chance = ", which is within two standard errors" if is_by_chance else ""
    return (
        f"answers are ranked by {chosen[1]}, {selection_metric(run.task)} {chosen[2]} on valid, rather than by "
        f"{other[1]}, {other[2]}{chance} (--score {other[0]} takes that one)"
    )


def describe_numbers(subject: Subject) -> str:
    """What the numbers of an answer and of its proof mean, as one line."""
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
    """A data set with a score by rule confidences; what is left open is chosen by its valid split.

    Args:
      cfg: `max_height` None, `smoothing` "auto" and `object_identity` "auto" are chosen.
      score: an untrained score; auto for the one that ranks valid best.
      device: where it is scored.
      on_phase: receives what is being done.
      choice_seconds: time limit of the choice, with T_P up to a height above 1 that is chosen; notes say what is left
        out for it. Counting the rules, which every score needs, is not cut.
      processes: those that share the work, each of which calls this: rank 0 chooses within the time, and a height is
        taken if every process has computed its T_P within the time; None for one process.

    Raises:
      ValueError: there are no rules, or a setting or the score is bad.
    """
    value = None if score == "auto" else parse(score)
    cfg = _with_height(cfg, value)
    # Whether T_P derives a candidate says nothing of how rules are counted.
    is_open = value is None or "rules" not in value.needs
    count_notes: list[str] = []
    if cfg.object_identity is not True:
        dataset, count_notes = with_rule_counts(dataset, on_phase)
    deadline = Deadline(at=time.monotonic() + choice_seconds)

    def choose() -> SettingsChoice:
        return choose_settings(
            dataset,
            cfg,
            None if is_open else score,
            on_phase,
            deadline.share(COMPARISON_SHARE),
        )

    choice = choose() if processes is None else _share_choice(processes, choose)
    task, chosen_score, notes = _build_chosen_task(
        dataset, choice, device, on_phase, deadline, processes
    )
    notes += count_notes
    value = value or parse(chosen_score)
    task = scoring.with_score_counts(task, value, on_phase)
    described = describe_choice(choice, task.max_height)
    return Subject(task, value, None, [*described, *notes])


def _with_height(
    cfg: ProverTaskConfig, score: Score | None
) -> ProverTaskConfig:
    """The settings with the height that a score asks for, unless one is set.

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
    return dataclasses.replace(cfg, max_height=cfg.max_height or height)


def _share_choice(
    processes: Processes, choose: Callable[[], SettingsChoice]
) -> SettingsChoice:
    """The settings that rank 0 chooses; it alone knows which of them there was time for."""
    if processes.is_main:
        # Every process has counted the rules.
        choice = choose()._replace(rule_counts=None)
        processes.share_bytes("choice of settings", pickle.dumps(choice))
        return choice
    return pickle.loads(processes.share_bytes("choice of settings"))


def _build_chosen_task(
    dataset: Dataset,
    choice: SettingsChoice,
    device: str,
    on_phase: PhaseCallback,
    deadline: Deadline,
    processes: Processes | None,
) -> tuple[ProverTask, str, list[str]]:
    """The task with the settings that are chosen, or if its T_P takes too much with the best of the next lower height.

    Args:
      deadline: of T_P where there is a lower height; none is tried instead of the lowest one.
      processes: a height is not taken if its T_P takes too much in one of them.

    Returns:
      The task, the score at its height, and a note for each height that took too much.
    """
    notes: list[str] = []
    chosen_height = choice.settings.max_height or 1
    candidates = [
        candidate
        for candidate in reversed(choice.by_height)
        if (candidate.settings.max_height or 1) <= chosen_height
    ]
    for candidate in candidates:
        height = candidate.settings.max_height
        is_lowest = candidate is candidates[-1]
        # Of a stored graph nothing is held that each query can derive.
        derives_by_query = dataset.fact_tables is not None and height == 1
        task, problem = None, ""
        try:
            task = build_task(
                dataset,
                candidate.settings,
                device,
                on_phase,
                with_derivations=not derives_by_query,
                by_query_if_large=True,
                deadline=NO_DEADLINE if is_lowest else deadline,
            )
        except ValueError as error:
            if is_lowest:
                raise
            problem = str(error)
        if processes is not None and not is_lowest:
            problems = processes.exchange(f"T_P to height {height}", problem)
            problem = next(filter(None, problems), "")
        if task is not None and not problem:
            return task, candidate.score, notes
        note = f"height {height} not taken: {problem}"
        notes.append(Note("cut", note))
    raise AssertionError("a choice has settings for a height")
