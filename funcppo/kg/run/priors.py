"""Priors that the candidates of a run may have: link embeddings and a Bellman-Ford network, trained within its time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo import optim
from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import I64
from funcppo.kg.logic.derive import LeftOut
from funcppo.kg.logic.row_index import unique_values
from funcppo.kg.run import evidence_fit
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.config import Note
from funcppo.kg.run.run import QuestionSetup, Run
from funcppo.kg.scores import (
    evidence,
    link_embedding,
    path_network,
)
from funcppo.kg.scores.link_embedding import Links
from funcppo.kg.scores.path_network import (
    Graph,
    NetworkConfig,
    Params,
    PathNetwork,
)
from funcppo.kg.scores.question_config import (
    EMBEDDING_SECONDS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    BellmanFordConfig,
    EmbeddingConfig,
)
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import memory
from funcppo.runtime.capture import GraphedStep

Config = TypeVar("Config", EmbeddingConfig, BellmanFordConfig)


# With fewer passes over the facts, or fewer steps of a network, there is little to gain.
MIN_EPOCHS = 8
MIN_STEPS = 200


class PriorPlan(NamedTuple, Generic[Config]):
    """What there is time for."""

    cfg: Config
    seconds: float  # that it takes, by count
    is_too_long: bool  # even what there is little to gain by takes more time


def embed(
    run: Run, setup: QuestionSetup, on_phase: PhaseCallback, run_time: RunTime
) -> tuple[Run, list[Note]]:
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
    most = min(
        deadline.seconds_left, config.embedding.seconds or EMBEDDING_SECONDS
    )
    plan = plan_embedding(run.task, config.embedding, device, most)
    if plan.is_too_long and not is_set:
        note = (
            f"link embeddings are not tried: {MIN_EPOCHS} passes over the facts would take over "
            f"{most:.0f} s (questions.embedding=on trains them)"
        )
        return run, [Note("cut", note)]

    cfg = config.embedding if is_set else plan.cfg
    embedding = train_embedding(
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
    return run, notes


def train_network(
    run: Run, setup: QuestionSetup, on_phase: PhaseCallback, run_time: RunTime
) -> tuple[PathNetwork | None, Note]:
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
    plan = plan_bellman_ford(
        run.task, config.bellman_ford, n_questions, config.device, seconds
    )
    if plan.is_too_long:
        note = (
            f"a Bellman-Ford network is not tried: {MIN_STEPS} steps and the priors of "
            f"{n_questions:,} questions would take over {seconds:.0f} s (questions.bellman_ford=on trains it)"
        )
        return None, Note("cut", note)

    on_phase(f"Bellman-Ford network, about {plan.seconds:.0f} s", 0, None)
    params, reason = train_bellman_ford(
        run.task,
        plan.cfg,
        left_out,
        config.seed,
        config.device,
        on_phase,
        deadline,
    )
    run_time.end_phase("Bellman-Ford network", is_set=is_set)
    n_wanted = config.bellman_ford.n_steps or N_NETWORK_STEPS
    note = (
        f"Bellman-Ford network: {plan.cfg.n_steps:,} of {n_wanted:,} steps and the priors of "
        f"{n_questions:,} questions, planned to take {plan.seconds:.0f} s"
    )
    if reason:
        note += f"; its steps replay no CUDA graph: {reason}"
    return make_network(run.task, params), Note("detail", note)


def make_network(task: ProverTask, params: path_network.Params) -> PathNetwork:
    """The prior by a trained network over the facts of a task."""
    facts = evidence.binary_facts(task.kb)
    return path_network.make_network(params, facts, task.sizes.n_constants)


def plan_embedding(
    task: ProverTask, cfg: EmbeddingConfig, device: str, seconds: float
) -> PriorPlan[EmbeddingConfig]:
    """Choose the passes over the facts that there is time for, by a count of the work.

    Args:
      seconds: that it may take; infinity for no bound.
    """
    n_links = 2 * len(evidence.binary_facts(task.kb))
    n_rows = min(cfg.batch_size, max(n_links, 1))
    n_steps = max(1, n_links // n_rows)
    n_entities, n_labels = task.sizes.n_constants, evidence.n_labels(task.sizes)
    width = 2 * cfg.rank * (cfg.n_folds + 1)

    # For each number of a vector: products of the logits and of their gradient, and what a step looks up and moves.
    operations = 3 * n_rows * n_entities
    operations += 100 * n_rows + 20 * (n_entities + n_labels)
    # Operations in a second, beside 3 ms of a step that does next to nothing. On an H100 WN18RR and FB15k-237 with
    # vectors of rank 256 took 1.5e13 and 1.4e13 (phases of `experiments/results/tuned_results.json`).
    speed = 1e13 if is_cuda(device) else 3e9
    per_epoch = n_steps * (3e-3 + operations * width / speed)

    n_epochs = max(1, int(min(cfg.n_epochs, seconds / per_epoch)))
    return PriorPlan(
        cfg=dataclasses.replace(cfg, n_epochs=n_epochs),
        seconds=n_epochs * per_epoch,
        is_too_long=n_epochs < min(MIN_EPOCHS, cfg.n_epochs),
    )


def train_embedding(
    task: ProverTask,
    cfg: EmbeddingConfig,
    left_out: LeftOut,
    seed: int,
    device: str,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> link_embedding.Params:
    """Train all models on the known facts of two arguments, nothing of valid or test.

    Args:
      left_out: what a training question leaves out, which its model must not have seen.
      seed: of the initial vectors and of the order of the questions.
      deadline: ends the training after the epoch in progress.
    """
    asked = evidence.training_questions(evidence.binary_facts(task.kb))
    label = evidence.make_label(asked.predicate, asked.side)
    links = link_embedding.training_links(asked, label, cfg.n_folds, left_out)
    links = Links(*(column.to(device) for column in links))

    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    n_labels = evidence.n_labels(task.sizes)
    params = link_embedding.init(
        cfg, task.sizes.n_constants, n_labels, init_key
    )
    state = link_embedding.TrainState(params, optim.init(params))

    n_links = len(links.label)
    batch_size = min(cfg.batch_size, n_links)
    n_steps = cfg.n_epochs * (n_links // batch_size)
    step = 0
    for epoch in range(cfg.n_epochs):
        on_phase("training link embeddings", epoch, cfg.n_epochs)
        order = random.permutation(random.fold_in(key, epoch), n_links)
        for rows in order.split(batch_size):
            if len(rows) < batch_size:  # beside others
                continue
            batch = Links(*(column[rows] for column in links))
            rate = cfg.learning_rate * (1.0 - step / n_steps)
            state = link_embedding.train_step(cfg.penalty, state, batch, rate)
            step += 1
        if deadline.is_over:
            break
    return state.params


def blank_embedding(
    task: ProverTask, cfg: EmbeddingConfig, device: str
) -> link_embedding.Params:
    """Vectors of zeros, as many as training gives."""
    n_labels = evidence.n_labels(task.sizes)
    key = random.key(0, device)
    params = link_embedding.init(cfg, task.sizes.n_constants, n_labels, key)
    return link_embedding.Params(*(torch.zeros_like(x) for x in params))


def plan_bellman_ford(
    task: ProverTask,
    cfg: BellmanFordConfig,
    n_questions: int,
    device: str,
    seconds: float,
) -> PriorPlan[BellmanFordConfig]:
    """Choose the steps that there is time for, by a count of the work.

    Args:
      n_questions: whose candidates are given priors before anything is gained.
      seconds: that it may take; infinity for no bound.
    """
    facts = evidence.binary_facts(task.kb)
    n_labels = evidence.n_labels(task.sizes)
    sizes = path_network.network_config(cfg, task.sizes.n_constants, n_labels)
    # Operations in a second, measured on one CPU core and on an H200, whose kernel keeps nothing of a source.
    n_sources, speed = _count_sources(sizes, facts), 2.5e9
    if is_cuda(device):
        n_sources, speed = 0, 4e11
    per_question = _count_operations(sizes, n_sources, len(facts)) / speed
    start = cfg.n_layers * 1e-3  # seconds of layers that do next to nothing

    # A gradient takes three passes, and a prior two, whose numbers are of float64.
    n_together = min(cfg.batch_size, max(1, 2 * len(facts)))
    per_step = 3 * (start + n_together * per_question)
    of_priors = 2 * n_questions * per_question

    wanted = cfg.n_steps or N_NETWORK_STEPS
    most = min(wanted, (seconds - of_priors) / per_step)
    n_steps = max(1, int(most))
    return PriorPlan(
        cfg=dataclasses.replace(cfg, n_steps=n_steps),
        seconds=n_steps * per_step + of_priors,
        is_too_long=most < min(MIN_STEPS, wanted),
    )


def _count_sources(cfg: NetworkConfig, facts: I64[Tensor, "N W"]) -> int:
    """How many pairs of a label and an entity have edges."""
    predicate, head, tail = facts.unbind(1)
    base = cfg.n_entities + 1
    ends = (predicate * base + entity for entity in (head, tail))
    return sum(len(unique_values(pair)) for pair in ends)


def _count_operations(
    cfg: NetworkConfig, n_sources: int, n_facts: int
) -> float:
    """Operations that a pass takes for a question."""
    # of a source, of an edge, of an entity, and of a label for each number of the state
    of_layer = 3 * n_sources + 2 * n_facts + 24 * cfg.n_entities
    of_layer += 0.1 * cfg.width * cfg.n_labels
    return cfg.n_layers * cfg.width * of_layer


def train_bellman_ford(
    task: ProverTask,
    cfg: BellmanFordConfig,
    left_out: LeftOut,
    seed: int,
    device: str,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[Params, str]:
    """Train a network on the known facts of two arguments, nothing of valid or test.

    Args:
      left_out: what a training question leaves out.
      seed: of the initial weights, of the order of the questions, and of what is dropped.
      deadline: ends the training after a step.
    """
    facts = evidence.binary_facts(task.kb).to(device)
    sizes = path_network.network_config(
        cfg, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )
    graph = path_network.build_graph(sizes, facts, left_out)
    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    state = path_network.init_training(path_network.init(sizes, init_key))
    per_question = path_network.bytes_per_question(sizes, graph)
    most = _max_step_bytes(device) * task.cfg.memory_share
    sizes = dataclasses.replace(
        sizes, n_at_once=max(1, int(most / per_question))
    )

    step_fn = make_step(device)
    steps = iter_steps(step_fn, sizes, graph, cfg, state, key)
    n_steps = cfg.n_steps or N_NETWORK_STEPS
    for step, after in enumerate(steps, 1):
        state = after
        on_phase("training a Bellman-Ford network", step, n_steps, deadline)
        if deadline.is_over:
            break
    params, reasons = tree.map(torch.clone, state.params), []
    if isinstance(step_fn, GraphedStep):
        reasons = step_fn.fallback_reasons()
        step_fn.release()
    return params, "; ".join(reasons)


def make_step(device: str) -> Callable[..., path_network.TrainState]:
    """A gradient step, on a GPU one whose calls replay a CUDA graph and write the state where the last one is."""
    if is_cuda(device):
        return GraphedStep(path_network.train_step)
    return path_network.train_step


def _max_step_bytes(device: str) -> float:
    """What the gradients of a step's questions may hold at once; the same on all GPUs of one model."""
    if not is_cuda(device):
        return 1e9
    return min(4e9, 0.1 * memory.total_bytes(device))


def iter_steps(
    step_fn: Callable[..., path_network.TrainState],
    sizes: NetworkConfig,
    graph: Graph,
    cfg: BellmanFordConfig,
    state: path_network.TrainState,
    key: I64[Tensor, "2"],
) -> Iterator[path_network.TrainState]:
    """Yield the state after each step of the settings; none without facts.

    Args:
      step_fn: from `make_step`.
      graph: of all known facts.
      key: of the order of the edges and of what is dropped.
    """
    n_edges, device = len(graph.edge_target), graph.source.device
    if not n_edges:
        return
    size, n_steps = min(cfg.batch_size, n_edges), cfg.n_steps or N_NETWORK_STEPS
    batches = _batches(key, n_edges, size, n_steps)
    host_key = key.cpu()  # A key takes a hundred operations.
    for step, edge in enumerate(batches, 1):
        drop_key = random.fold_in(random.fold_in(host_key, step), 1)
        rate = cfg.learning_rate * (1.0 - (step - 1) / n_steps)
        state = step_fn(
            sizes,
            graph,
            edge,
            drop_key.to(device),
            torch.full((), rate, device=device),
            state,
        )
        yield state


def _batches(
    key: I64[Tensor, "2"], n_edges: int, size: int, n_steps: int
) -> Iterator[I64[Tensor, "n"]]:
    """Yield batches of edges: passes in random order, each without an incomplete batch."""
    n_in_epoch = n_edges // size
    for first in range(0, n_steps, n_in_epoch):
        order = random.permutation(random.fold_in(key, first), n_edges)
        of_epoch = order[: n_in_epoch * size].split(size)
        yield from of_epoch[: n_steps - first]


def blank_bellman_ford(
    task: ProverTask, cfg: BellmanFordConfig, device: str
) -> Params:
    """Weights of zeros, as many as training gives."""
    sizes = path_network.network_config(
        cfg, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )
    return tree.zeros_like(path_network.init(sizes, random.key(0, device)))
