"""Networks with memory and without, applied alike: one step, a sequence of steps, and what a new episode remembers.

The memory of a network without one is the empty tuple.

A compiler unrolls the loop of `apply_sequence`. Its gradient by `backpropagate` needs two loops over the steps, which
can be operators of their own (`tree.graph_scan`); all else is computed for all steps at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.tree import scan
from funcppo.core.types import Bool, Obs, Params, Scan, World
from funcppo.interfaces import Agent, AnyAgent, Memory, Output

Tree = TypeVar("Tree")


class StepMemories(NamedTuple):
    """What a network remembers before each of some steps, not only before the first."""

    memory: Memory  # [T * B, ...]

    def floating_leaves(self) -> list[Tensor]:
        """The tensors that have gradients."""
        return [x for x in tree.leaves(self.memory) if x.is_floating_point()]

    def with_floating_leaves(self, new: list[Tensor]) -> StepMemories:
        """The memories with other tensors in place of those that have gradients."""
        others = iter(new)
        leaves = [
            next(others) if x.is_floating_point() else x
            for x in tree.leaves(self.memory)
        ]
        return StepMemories(tree.unflatten(self.memory, leaves))


def initial_memory(
    agent: AnyAgent, n_rows: int, device: torch.device
) -> Memory:
    """The memory of `n_rows` rows at the start of an episode."""
    if agent.initial_memory is None:
        return ()
    return agent.initial_memory(agent.cfg, n_rows, device)


def reset_memory(
    agent: AnyAgent, done: Bool[Tensor, "B"], memory: Memory
) -> Memory:
    """The memory with that of finished rows as at the start of an episode."""
    if agent.initial_memory is None:
        return ()
    first = initial_memory(agent, done.shape[0], done.device)
    return tree.where(done, first, memory)


def apply_agent(
    agent: Agent[World, Params, Obs, Output],
    world: World,
    params: Params,
    obs: Obs,
    memory: Memory,
) -> tuple[Output, Memory]:
    """The network's output for the observations of one step, and the memory after them.

    Args:
      memory: before the observations.
    """
    if agent.apply_recurrent is None:
        return agent.apply(agent.cfg, world, params, obs), ()
    encoded = encode(agent, world, params, obs)
    return agent.apply_recurrent(agent.cfg, world, params, encoded, memory)


def encode(agent: AnyAgent, world: object, params: object, obs: Any) -> Any:
    """What the network makes of the observations of any rows before its memory comes in."""
    if agent.encode is None:
        return obs
    return agent.encode(agent.cfg, world, params, obs)


def apply_sequence(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memory: Memory | StepMemories,
) -> Any:
    """The output of a network with memory for T steps of B rows, flattened to T * B rows.

    Args:
      obs: a tree of tensors [T, B, ...].
      done: an episode ends with the step; the memory is reset after it.
      memory: before the first step; or `StepMemories`, those before each.
    """
    if not isinstance(memory, StepMemories):
        memory = step_memories(agent, world, params, obs, done, memory)
    output, _ = apply_agent(agent, world, params, _rows(obs), memory.memory)
    return output


def step_memories(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memory: Memory,
    scan: Scan = scan,
) -> StepMemories:
    """What a network remembers before each of T steps; arguments as those of `apply_sequence`.

    Args:
      scan: the loop over steps.
    """
    encoded = _encode_steps(agent, world, params, obs, done)
    params = tree.map(
        torch.clone, params
    )  # a loop reads no views of one vector

    def step(
        memory: Memory, x: tuple[Any, Bool[Tensor, "B"]]
    ) -> tuple[Memory, Memory]:
        return _advance(agent, world, params, *x, memory), memory

    _, before = scan(step, memory, (encoded, done))
    return StepMemories(_rows(before))


def backpropagate(
    agent: AnyAgent,
    world: object,
    params: Params,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memories: StepMemories,
    memory_grads: list[Tensor],
    scan: Scan,
) -> Params:
    """The gradient of a loss in the parameters, as far as it goes through what is remembered from step to step.

        d_t = g_t + (dm_{t+1} / dm_t)^T d_{t+1},    sum over t of (dm_{t+1} / dparams)^T d_{t+1}

    where m_t is the memory before step t, and g_t the gradient of the loss in it, all other memories being fixed.

    Args:
      memories: m, of `step_memories`.
      memory_grads: g, of their `floating_leaves`.
      scan: the loop over steps.

    Source: Werbos 1990, "Backpropagation through time: what it does and how to do it".
    """
    if not memory_grads:
        return tree.zeros_like(params)
    encoded = _encode_steps(agent, world, params, obs, done)
    loop_params = tree.map(torch.clone, params)

    def step_back(
        adjoint: list[Tensor],
        x: tuple[list[Tensor], Any, Bool[Tensor, "B"], StepMemories],
    ) -> tuple[list[Tensor], list[Tensor]]:
        grads, encoded, done, before = x

        def advance(leaves: list[Tensor]) -> list[Tensor]:
            memory = before.with_floating_leaves(leaves).memory
            after = _advance(agent, world, loop_params, encoded, done, memory)
            return StepMemories(after).floating_leaves()

        pull_back = torch.func.vjp(advance, before.floating_leaves())[1]
        (through_step,) = pull_back(adjoint)
        return tree.map(torch.add, grads, through_step), adjoint

    # From the last step, after which nothing is remembered, to the first.
    grads, before = tree.map(
        lambda x: x.unflatten(0, done.shape), (memory_grads, memories)
    )
    xs = (grads, encoded, done, before)
    last = tree.map(lambda x: torch.zeros_like(x[0]), grads)
    _, adjoints = scan(step_back, last, tree.map(_reverse, xs))

    # All steps at once.
    def advance_all(params: Params) -> list[Tensor]:
        rows = encode(agent, world, params, _rows(obs))
        after = _advance(
            agent, world, params, rows, done.flatten(), memories.memory
        )
        return StepMemories(after).floating_leaves()

    pull_back = torch.func.vjp(advance_all, params)[1]
    (params_grads,) = pull_back(_rows(tree.map(_reverse, adjoints)))
    return params_grads


def _encode_steps(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
) -> Any:
    """The observations of T steps, read at once."""
    encoded = encode(agent, world, params, _rows(obs))
    return tree.map(lambda x: x.unflatten(0, done.shape), encoded)


def _advance(
    agent: AnyAgent,
    world: object,
    params: object,
    encoded: Any,
    done: Bool[Tensor, "B"],
    memory: Memory,
) -> Memory:
    """The memory before the next step."""
    assert agent.apply_recurrent is not None
    _, after = agent.apply_recurrent(agent.cfg, world, params, encoded, memory)
    return reset_memory(agent, done, after)


def _rows(steps: Tree) -> Tree:
    """[T, B, ...] as [T * B, ...]."""
    return tree.map(lambda x: x.flatten(0, 1), steps)


def _reverse(x: Tensor) -> Tensor:
    return x.flip(0)
