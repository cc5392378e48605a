"""Priors that the candidates of a run may have: link embeddings and a Bellman-Ford network, trained within its time."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Literal, NamedTuple, Protocol

from funcppo.deadline import NO_DEADLINE
from funcppo.experiment import (
    bellman_ford_training,
    embedding_training,
    question_run,
)
from funcppo.experiment.config import RunConfig
from funcppo.experiment.question_run import QuestionSetup
from funcppo.experiment.run import Run
from funcppo.experiment.run_time import RunTime
from funcppo.prover.task import PhaseCallback


class RunWithPrior(NamedTuple):
    """A run with a prior, and notes on it."""

    run: Run
    notes: list[str]


class PriorTrainer(Protocol):
    """Trains what gives candidates a prior."""

    def __call__(self, run: Run, setup: QuestionSetup, /) -> RunWithPrior:
        """The run with priors beside the evidence of its questions; the same run where there is no time for it."""
        ...


class Prior(NamedTuple):
    """A prior of candidates that a run may weigh."""

    name: str
    pronoun: str
    option: bool | Literal["auto"]
    train: PriorTrainer


def list_priors(
    run_config: RunConfig, on_phase: PhaseCallback, run_time: RunTime
) -> tuple[Prior, ...]:
    """The priors, in the order in which they are tried."""
    options = run_config.questions
    return (
        Prior(
            "link embeddings",
            "them",
            options.embedding,
            partial(_embed, on_phase=on_phase, run_time=run_time),
        ),
        Prior(
            "a Bellman-Ford network",
            "it",
            options.bellman_ford,
            partial(_add_network, on_phase=on_phase, run_time=run_time),
        ),
    )


def _embed(
    run: Run, setup: QuestionSetup, on_phase: PhaseCallback, run_time: RunTime
) -> RunWithPrior:
    """The run with link embeddings and the priors that they give; the same run where there is no time to train them.

    Args:
      setup: the questions, and the evidence to weigh beside.
    """
    config = run.run_config
    device, left_out = config.device, config.questions.left_out
    assert left_out != "auto", "what is left out is chosen before"
    is_set = config.questions.embedding is True
    deadline = run_time.until(run_time.EMBEDDING)
    if is_set:
        deadline = NO_DEADLINE
    plan = embedding_training.plan_training(
        run.task, config.embedding, device, deadline.seconds_left
    )
    if plan.is_too_long and not is_set:
        note = (
            f"link embeddings are not tried: {embedding_training.MIN_EPOCHS} passes over the facts would take over "
            f"{min(deadline.seconds_left, config.embedding.seconds):.0f} s (--questions.embedding True trains them)"
        )
        return RunWithPrior(run, [note])

    cfg = config.embedding if is_set else plan.cfg
    embedding = embedding_training.train(
        run.task, cfg, left_out, config.seed, device, on_phase, deadline
    )
    run_time.end_phase("link embeddings", is_set=is_set)
    notes: list[str] = []
    if cfg.n_epochs < config.embedding.n_epochs:
        notes = [
            f"link embeddings: {cfg.n_epochs} of {config.embedding.n_epochs} epochs, all that there is time for"
        ]
    valid = run.valid_evidence
    if valid is not None:
        valid = valid.with_embedding(embedding)
    setup = question_run.with_embedding(setup, embedding, left_out)
    run = dataclasses.replace(run, questions=setup, valid_evidence=valid)
    return RunWithPrior(run, notes)


def _add_network(
    run: Run, setup: QuestionSetup, on_phase: PhaseCallback, run_time: RunTime
) -> RunWithPrior:
    """The run with a Bellman-Ford network and the priors that it gives; the same run where there is no time for it.

    Args:
      setup: the questions, and the evidence to weigh beside.
    """
    config, valid = run.run_config, run.valid_evidence
    device, left_out = config.device, config.questions.left_out
    assert left_out != "auto", "what is left out is chosen before"
    assert setup.world is not None, "the questions are listed"
    is_set = config.questions.bellman_ford is True
    n_questions = len(setup.world.question)
    n_questions += valid.n_questions if valid is not None else 0
    deadline, seconds = NO_DEADLINE, math.inf
    if not is_set:
        deadline = run_time.until(run_time.EMBEDDING)
        seconds = min(deadline.seconds_left, config.bellman_ford.seconds)
    plan = bellman_ford_training.plan_training(
        run.task, config.bellman_ford, n_questions, device, seconds
    )
    if plan.is_too_long:
        note = (
            f"a Bellman-Ford network is not tried: {bellman_ford_training.MIN_STEPS} steps and the priors of "
            f"{n_questions:,} questions would take over {seconds:.0f} s (--questions.bellman-ford True trains it)"
        )
        return RunWithPrior(run, [note])

    on_phase(f"Bellman-Ford network, about {plan.seconds:.0f} s", 0, None)
    params = bellman_ford_training.train(
        run.task, plan.cfg, left_out, config.seed, device, on_phase, deadline
    )
    setup = question_run.with_network(
        run.task, setup, params, left_out, on_phase
    )
    if valid is not None and setup.facts.network is not None:
        valid = valid.with_network(setup.facts.network)
    run_time.end_phase("Bellman-Ford network", is_set=is_set)
    run = dataclasses.replace(run, questions=setup, valid_evidence=valid)
    note = (
        f"Bellman-Ford network: {plan.cfg.n_steps:,} of {config.bellman_ford.n_steps:,} steps and the priors of "
        f"{n_questions:,} questions, planned to take {plan.seconds:.0f} s"
    )
    return RunWithPrior(run, [note])
