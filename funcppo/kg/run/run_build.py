"""Build a run before its first update, with what its updates and validations read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcppo import checkpoint, logs, train_step
from funcppo.core import random
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.files import shorten
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic.derive import RulePlan
from funcppo.kg.ranking import policy_score, scoring
from funcppo.kg.run import evidence_fit, priors
from funcppo.kg.run.config import Note, RunConfig
from funcppo.kg.run.run import (
    EVIDENCE_SCORE,
    PROOF_SCORES,
    QuestionSetup,
    Run,
    RunScore,
    RunState,
    find_checkpoint,
    initial_run_state,
    initial_train_state,
    learner_config,
    ppo_config,
    question_world,
    set_up,
    training_world,
)
from funcppo.kg.run.validation import (
    count_validation_queries,
    max_validation_successors,
    most_validation_queries,
    with_valid_evidence,
)
from funcppo.kg.scores import link_embedding, path_network
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase


def build_run(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback,
    deadline: Deadline = NO_DEADLINE,
    plan: RulePlan | None = None,
) -> Run:
    """A run before its first update, whose score is not chosen yet.

    Args:
      deadline: of what the rules derive at a height above 1.
      plan: as in `prover.task.build_task`.

    Raises:
      ValueError: see `prover.task.build_task`.
    """
    if run_config.learner == "questions":
        return _build_question_run(run_config, dataset, on_phase, plan)
    task = prover_task.build_task(
        dataset,
        run_config.prover,
        run_config.device,
        on_phase,
        deadline=deadline,
    )
    task = scoring.with_score_counts(
        task, parse(run_config.rule_score), on_phase
    )
    notes = _task_notes(task)
    cfg = learner_config(run_config, task)
    n_queries = count_validation_queries(run_config, task, cfg)
    if n_queries < most_validation_queries(run_config, task):
        note = (
            f"a validation ranks {n_queries} of {len(task.dataset.valid)} valid queries: "
            f"more would compute over {max_validation_successors(task):,} successors"
        )
        notes.append(Note("cut", note))
    return Run(
        run_config=run_config,
        task=task,
        cfg=cfg,
        score="best-proof",
        state=initial_run_state(initial_train_state(cfg, task, run_config)),
        notes=tuple(notes),
        search_step=policy_score.make_search_step(run_config.device),
        n_validation_queries=n_queries,
        pending_row={"update": 0},
    )


def _task_notes(task: ProverTask) -> list[Note]:
    """The notes on a task: on its data set, and on what was counted or derived in part."""
    of_data = frozenset(task.dataset.notes)
    return [
        Note("data" if text in of_data else "cut", text) for text in task.notes
    ]


def _build_question_run(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback,
    plan: RulePlan | None,
) -> Run:
    """A run before its first update that learns from questions, which are not listed yet.

    Raises:
      ValueError: its height is not 1.
    """
    if run_config.prover.max_height != 1:
        raise ValueError(
            f"learner questions: expected height 1, got {run_config.prover.max_height}"
        )

    task = prover_task.build_task(
        dataset,
        run_config.prover,
        run_config.device,
        on_phase,
        with_derivations=False,
        plan=plan,
    )

    task = scoring.with_score_counts(
        task, parse(run_config.rule_score), on_phase
    )
    setup = set_up(task, run_config.questions)
    cfg = evidence_fit.learner_config(setup.policy, ppo_config(run_config))
    world = question_world(setup, run_config.device)
    key = random.key(run_config.seed, run_config.device)
    embedding, network = _blank_priors(task, setup, run_config)

    return Run(
        run_config=run_config,
        task=task,
        cfg=cfg,
        score=EVIDENCE_SCORE,
        state=initial_run_state(
            train_step.init(cfg, world, key), embedding, network
        ),
        notes=tuple(_task_notes(task)),
        search_step=policy_score.make_search_step(run_config.device),
        n_validation_queries=min(
            run_config.n_validation_queries or len(dataset.valid),
            len(dataset.valid),
        ),
        pending_row={"update": 0},
        questions=setup,
    )


def _blank_priors(
    task: ProverTask, setup: QuestionSetup, run_config: RunConfig
) -> tuple[link_embedding.Params | None, path_network.Params | None]:
    """What link embeddings and a Bellman-Ford network are before training, where the settings ask for them."""
    weighed, device = setup.policy.aggregation, run_config.device
    embedding, network = None, None
    if weighed.uses_embedding:
        embedding = priors.blank_embedding(task, run_config.embedding, device)
    if weighed.uses_bellman_ford:
        network = priors.blank_bellman_ford(
            task, run_config.bellman_ford, device
        )
    return embedding, network


def _with_questions(run: Run, start_params: Any) -> Run:
    """The run, whose questions are listed, ready for PPO from given parameters on."""
    setup = run.questions
    assert setup is not None and setup.world is not None
    world = evidence_fit.with_prior(setup.policy, setup.world, start_params)
    return dataclasses.replace(
        run,
        questions=dataclasses.replace(setup, world=world),
        cfg=evidence_fit.learner_config(
            setup.policy, ppo_config(run.run_config)
        ),
    )


def at_start(run: Run, params: Any) -> Run:
    """The run, whose questions are listed, before its first update, from given parameters on."""
    run = _with_questions(run, params)
    key = random.key(run.run_config.seed, run.run_config.device)
    state = train_step.init(run.cfg, training_world(run), key)
    assert run.questions is not None
    facts = run.questions.facts
    state = initial_run_state(
        state._replace(params=params),
        facts.embedding,
        None if facts.network is None else facts.network.params,
    )
    return dataclasses.replace(run, state=state)


def with_training_data(
    run: Run,
    on_phase: PhaseCallback = ignore_phase,
    *,
    for_validation: bool = True,
) -> Run:
    """The run with what an update reads, and a validation; a run that learns from questions lists them anew."""
    setup = run.questions
    if setup is None:
        return run
    if setup.world is None:
        config = run.run_config
        setup, _ = evidence_fit.collect(
            run.task,
            setup,
            config.questions,
            config.seed,
            config.device,
            on_phase,
        )
        run = dataclasses.replace(run, questions=setup)
        run = _with_questions(run, run.state.start_params)
    return with_valid_evidence(run) if for_validation else run


# -- a run at its checkpoint


def load_dataset_of(run_config: RunConfig, folder: Path) -> Dataset:
    """Load the data set of a trained run.

    Args:
      folder: of the run, for the error.

    Raises:
      ValueError: it is not where it was in training, or cannot be read.
    """
    try:
        return loaders.load(
            run_config.dataset, run_config.rules, cfg=run_config.data
        )
    except ValueError as error:
        raise ValueError(
            f"{folder}: the run needs its data set {shorten(run_config.dataset)} as in training: {error}"
        ) from None


def resume_run(
    run_config: RunConfig, folder: Path, on_phase: PhaseCallback = ignore_phase
) -> Run:
    """The run of some settings at the last checkpoint in a folder.

    Raises:
      ValueError: the data set cannot be read or has changed, or the checkpoint does not belong to it.
    """
    on_phase("reading data")
    dataset = load_dataset_of(run_config, folder)
    path, damage_notes = find_checkpoint(folder)
    _check_unchanged(path, run_config, dataset)
    run = build_run(run_config, dataset, on_phase)
    state, meta = checkpoint.restore(path, run.state, dataset.fingerprint)
    scores = (EVIDENCE_SCORE,) if run.questions else PROOF_SCORES
    _check_meta(path, meta, scores)
    # What reads a run shows the notes on its task.
    task = dataclasses.replace(run.task, notes=(*run.task.notes, *damage_notes))
    return dataclasses.replace(
        run,
        task=task,
        questions=_with_stored_priors(run, state),
        score=meta["score"],
        state=state,
        notes=tuple(Note(kind, text) for kind, text in meta["notes"]),
        pending_row=meta["pending_row"],
        rule_metric=meta["rule_metric"],
        rule_margin=meta["rule_margin"],
    )


def _with_stored_priors(run: Run, state: RunState) -> QuestionSetup | None:
    """The evidence of a run, with which its questions are listed, with the priors of a checkpoint."""
    setup = run.questions
    if setup is None:
        return None
    if link_embedding.n_models(state.embedding):
        setup = evidence_fit.with_embedding(setup, state.embedding, "fact")
    if path_network.is_network(state.bellman_ford):
        network = priors.make_network(run.task, state.bellman_ford)
        setup = evidence_fit.with_network(
            setup, network, "fact", run.run_config.seed
        )
    return setup


def _check_unchanged(
    path: Path, run_config: RunConfig, dataset: Dataset
) -> None:
    """Check that the data set of a run is the one that it was trained on.

    Args:
      path: of the run's checkpoint.

    Raises:
      ValueError: it is not; names the run, the data set and the rule file.
    """
    expected = checkpoint.read(path)[1].get("fingerprint")
    if expected != dataset.fingerprint:
        rules = "" if run_config.rules is None else f" or {run_config.rules}"
        raise ValueError(
            f"{path.parent}: the run was trained on other data: {run_config.dataset}{rules} has changed since; "
            f"expected fingerprint {expected}, got {dataset.fingerprint} ({len(dataset.train):,} train triples, "
            f"{dataset.n_constants:,} entities, {len(dataset.rules):,} rules)"
        )


def _check_meta(
    path: Path, meta: checkpoint.Meta, scores: tuple[RunScore, ...]
) -> None:
    """Check what a checkpoint says of a run beside its tensors.

    Raises:
      ValueError: names the file and what is wrong.
    """
    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "score": (f"one of {', '.join(scores)}", lambda x: x in scores),
        "pending_row": (
            "the metrics of an update",
            lambda x: x is None or logs.is_row(x),
        ),
        "rule_metric": (
            "a number from 0 to 1 or null",
            lambda x: x is None or (isinstance(x, float) and 0 <= x <= 1),
        ),
        "rule_margin": (
            "a number from 0 on",
            lambda x: isinstance(x, float) and x >= 0,
        ),
        "notes": (
            "pairs of a kind and a text",
            lambda x: (
                isinstance(x, list)
                and all(isinstance(note, list) and len(note) == 2 for note in x)
            ),
        ),
    }
    for name, (expected, is_valid) in checks.items():
        found = meta.get(name)
        if not is_valid(found):
            raise ValueError(
                f"{path}: {name}: expected {expected}, got {found!r}"
            )
