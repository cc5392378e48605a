"""Training a Bellman-Ford network on known facts, within a time that is counted before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import I64
from funcppo.kg.logic.question_types import LeftOut
from funcppo.kg.logic.sorting import unique_values
from funcppo.kg.scores import bellman_ford, evidence, network_prior
from funcppo.kg.scores.bellman_ford import (
    Graph,
    NetworkConfig,
    Params,
    StepConfig,
    TrainState,
)
from funcppo.kg.scores.question_config import N_NETWORK_STEPS, BellmanFordConfig
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import memory
from funcppo.runtime.graphed import GraphedStep

# what is being done
TEXT = "training a Bellman-Ford network"
# With fewer steps there is little to gain.
MIN_STEPS = 200
# what the gradients of a step's questions may hold at once, in bytes
MAX_STEP_BYTES = 1e9
# the same on a GPU, and at most this share of its memory
MAX_GPU_STEP_BYTES = 4e9
GPU_STEP_SHARE = 0.1
# passes that a gradient takes, and that a prior takes, whose numbers are of float64
GRADIENT_PASSES = 3
PRIOR_PASSES = 2
# operations for each number of a state in each layer: of a source, of an edge, of an entity, and of a label for each
# number of the state
SOURCE_OPERATIONS = 3
EDGE_OPERATIONS = 1
ENTITY_OPERATIONS = 24
LABEL_OPERATIONS = 0.1
# operations in a second, and seconds of a layer that does next to nothing: measured on one CPU core and on an H200
CPU_OPERATIONS_PER_SECOND = 2.5e9
GPU_OPERATIONS_PER_SECOND = 4e11
LAYER_SECONDS = 1e-3


class BellmanFordPlan(NamedTuple):
    """What there is time for."""

    cfg: BellmanFordConfig
    seconds: float  # that training and priors take, by count
    n_wanted: int  # steps, if there were time for all
    # fewer than `MIN_STEPS` steps, and the priors, take more time than there is
    is_too_long: bool


class TrainedWeights(NamedTuple):
    """The weights of a network, and why its steps on a GPU were no replays of a CUDA graph; empty where they were."""

    params: Params
    fallback_reason: str


def plan_training(
    task: ProverTask,
    cfg: BellmanFordConfig,
    n_questions: int,
    device: str,
    seconds: float,
) -> BellmanFordPlan:
    """Choose the steps that there is time for, by a count of the work.

    Args:
      n_questions: whose candidates are given priors before anything is gained.
      seconds: that it may take; infinity for no bound.
    """
    facts = evidence.binary_facts(task.kb)
    n_labels = evidence.n_labels(task.sizes)
    sizes = network_prior.network_config(cfg, task.sizes.n_constants, n_labels)
    n_sources, speed = _count_sources(sizes, facts), CPU_OPERATIONS_PER_SECOND
    if is_cuda(device):  # its kernel keeps nothing of a source
        n_sources, speed = 0, GPU_OPERATIONS_PER_SECOND
    per_question = _count_operations(sizes, n_sources, len(facts)) / speed
    start = cfg.n_layers * LAYER_SECONDS

    n_together = min(cfg.batch_size, max(1, 2 * len(facts)))
    per_step = GRADIENT_PASSES * (start + n_together * per_question)
    of_priors = PRIOR_PASSES * n_questions * per_question

    wanted = cfg.n_steps or N_NETWORK_STEPS
    most = min(wanted, (seconds - of_priors) / per_step)
    n_steps = max(1, int(most))
    return BellmanFordPlan(
        cfg=dataclasses.replace(cfg, n_steps=n_steps),
        seconds=n_steps * per_step + of_priors,
        n_wanted=wanted,
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
    of_layer = SOURCE_OPERATIONS * n_sources
    of_layer += EDGE_OPERATIONS * 2 * n_facts
    of_layer += ENTITY_OPERATIONS * cfg.n_entities
    of_layer += LABEL_OPERATIONS * cfg.width * cfg.n_labels
    return cfg.n_layers * cfg.width * of_layer


def train(
    task: ProverTask,
    cfg: BellmanFordConfig,
    left_out: LeftOut,
    seed: int,
    device: str,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> TrainedWeights:
    """Train a network on the known facts of two arguments, nothing of valid or test.

    Args:
      left_out: what a training question leaves out.
      seed: of the initial weights, of the order of the questions, and of what is dropped.
      deadline: ends the training after a step.
    """
    facts = evidence.binary_facts(task.kb)
    sizes = network_prior.network_config(
        cfg, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )
    graph = bellman_ford.build_graph(sizes, facts, left_out)
    graph = tree.map(lambda x: x.to(device), graph)
    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    state = bellman_ford.init_training(bellman_ford.init(sizes, init_key))
    per_question = bellman_ford.bytes_per_question(sizes, graph)
    most = _max_step_bytes(device) * task.cfg.memory_share
    n_at_once = max(1, int(most / per_question))

    step_fn = make_step(device)
    steps = iter_steps(step_fn, sizes, graph, cfg, state, key, n_at_once)
    n_steps = cfg.n_steps or N_NETWORK_STEPS
    for step, after in enumerate(steps, 1):
        state = after
        on_phase(TEXT, step, n_steps, deadline)
        if deadline.is_over:
            break
    params, reasons = tree.map(torch.clone, state.params), []
    if isinstance(step_fn, GraphedStep):
        reasons = step_fn.fallback_reasons()
        step_fn.release()
    return TrainedWeights(params, "; ".join(reasons))


def make_step(device: str) -> Callable[..., TrainState]:
    """A gradient step, on a GPU one whose calls replay a CUDA graph and write the state where the last one is."""
    if is_cuda(device):
        return GraphedStep(bellman_ford.train_step)
    return bellman_ford.train_step


def _max_step_bytes(device: str) -> float:
    """What the gradients of a step's questions may hold at once; the same on all GPUs of one model."""
    if not is_cuda(device):
        return MAX_STEP_BYTES
    return min(MAX_GPU_STEP_BYTES, GPU_STEP_SHARE * memory.total_bytes(device))


def iter_steps(
    step_fn: Callable[..., TrainState],
    sizes: NetworkConfig,
    graph: Graph,
    cfg: BellmanFordConfig,
    state: TrainState,
    key: I64[Tensor, "2"],
    n_at_once: int,
) -> Iterator[TrainState]:
    """Yield the state after each step of the settings; none without facts.

    Args:
      step_fn: from `make_step`.
      graph: of all known facts.
      key: of the order of the edges and of what is dropped.
      n_at_once: questions that are in memory together.
    """
    n_edges, device = len(graph.edge_target), graph.source.device
    if not n_edges:
        return
    step_cfg = StepConfig(
        network=sizes, dropped=cfg.dropped, n_at_once=n_at_once
    )
    world = bellman_ford.make_world(sizes, graph)
    size, n_steps = min(cfg.batch_size, n_edges), cfg.n_steps or N_NETWORK_STEPS
    batches = _batches(key, n_edges, size, n_steps)
    host_key = key.cpu()  # A key takes a hundred operations.
    for step, edge in enumerate(batches, 1):
        drop_key = random.fold_in(random.fold_in(host_key, step), 1)
        rate = cfg.learning_rate * (1.0 - (step - 1) / n_steps)
        state = step_fn(
            step_cfg,
            world,
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


def blank(task: ProverTask, cfg: BellmanFordConfig, device: str) -> Params:
    """Weights of zeros, as many as training gives."""
    sizes = network_prior.network_config(
        cfg, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )
    return tree.zeros_like(bellman_ford.init(sizes, random.key(0, device)))
