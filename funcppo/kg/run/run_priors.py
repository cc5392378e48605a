"""Priors that the candidates of a run may have: link embeddings and a Bellman-Ford network, trained within its time."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from funcppo.core.deadline import NO_DEADLINE
from funcppo.kg.run import (
    bellman_ford_training,
    embedding_training,
    evidence_fit,
)
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.config import Note
from funcppo.kg.run.run import QuestionSetup, Run
from funcppo.kg.scores import bellman_ford, evidence, network_prior
from funcppo.kg.scores.network_prior import NetworkPrior
from funcppo.kg.scores.question_config import NETWORK_SECONDS
from funcppo.kg.search.task import PhaseCallback, ProverTask


class RunWithPrior(NamedTuple):
    """A run with a prior, and notes on it."""

    run: Run
    notes: list[Note]


class TrainedNetwork(NamedTuple):
    """A Bellman-Ford network, None where there was no time for it, and a note on it."""

    network: NetworkPrior | None
    note: Note


def embed(
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
            f"{plan.most_seconds:.0f} s (--questions.embedding True trains them)"
        )
        return RunWithPrior(run, [Note("cut", note)])

    cfg = config.embedding if is_set else plan.cfg
    embedding = embedding_training.train(
        run.task, cfg, left_out, config.seed, device, on_phase, deadline
    )
    run_time.end_phase("link embeddings", is_set=is_set)
    notes: list[Note] = []
    if cfg.n_epochs < config.embedding.n_epochs:
        note = f"link embeddings: {cfg.n_epochs} of {config.embedding.n_epochs} epochs, all that there is time for"
        notes = [Note("cut", note)]
    valid = run.valid_evidence
    if valid is not None:
        valid = valid.with_embedding(embedding)
    setup = evidence_fit.with_embedding(setup, embedding, left_out)
    run = dataclasses.replace(run, questions=setup, valid_evidence=valid)
    return RunWithPrior(run, notes)


def train_network(
    run: Run, setup: QuestionSetup, on_phase: PhaseCallback, run_time: RunTime
) -> TrainedNetwork:
    """A Bellman-Ford network, if there is time for it and for the priors of all questions.

    Args:
      setup: the questions.
    """
    config, valid = run.run_config, run.valid_evidence
    left_out = config.questions.left_out
    assert left_out != "auto", "what is left out is chosen before"
    assert setup.world is not None, "the questions are listed"
    n_questions = evidence_fit.n_asked(setup.world)
    n_questions += valid.n_questions if valid is not None else 0
    deadline, seconds = NO_DEADLINE, math.inf
    is_set = config.questions.bellman_ford is True
    if not is_set:
        deadline = run_time.until(run_time.EMBEDDING)
        most = config.bellman_ford.seconds or NETWORK_SECONDS
        seconds = min(deadline.seconds_left, most)
    plan = bellman_ford_training.plan_training(
        run.task, config.bellman_ford, n_questions, config.device, seconds
    )
    if plan.is_too_long:
        note = (
            f"a Bellman-Ford network is not tried: {bellman_ford_training.MIN_STEPS} steps and the priors of "
            f"{n_questions:,} questions would take over {seconds:.0f} s (--questions.bellman-ford True trains it)"
        )
        return TrainedNetwork(None, Note("cut", note))

    on_phase(f"Bellman-Ford network, about {plan.seconds:.0f} s", 0, None)
    params, reason = bellman_ford_training.train(
        run.task,
        plan.cfg,
        left_out,
        config.seed,
        config.device,
        on_phase,
        deadline,
    )
    run_time.end_phase("Bellman-Ford network", is_set=is_set)
    note = (
        f"Bellman-Ford network: {plan.cfg.n_steps:,} of {plan.n_wanted:,} steps and the priors of "
        f"{n_questions:,} questions, planned to take {plan.seconds:.0f} s"
    )
    if reason:
        note += f"; its steps replay no CUDA graph: {reason}"
    return TrainedNetwork(make_network(run.task, params), Note("detail", note))


def make_network(task: ProverTask, params: bellman_ford.Params) -> NetworkPrior:
    """The prior by a trained network over the facts of a task."""
    facts = evidence.binary_facts(task.kb)
    return network_prior.make_prior(params, facts, task.sizes.n_constants)
