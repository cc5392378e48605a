"""Networks with memory: cells beside torch.nn, gradients through whole sequences, and a task that needs a memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import funcppo as fp
from funcppo import losses, minibatch, rollout
from funcppo.core import random, tree
from funcppo.rollout import apply_agent
from funcppo.train_step import collect, init, train_step
from tests import learning
from tests.learning import WORLD, double

CELLS = {"gru": fp.nets.gru, "lstm": fp.nets.lstm}
TORCH_CELLS = {"gru": torch.nn.GRUCell, "lstm": torch.nn.LSTMCell}
SMALL = learning.SMALL | {"n_steps": 7, "n_updates": 5, "learning_rate": 1e-2}


def learner(cell, max_steps=5, **options):
    """CartPole, cut after so many steps, with a small network of a cell."""
    return fp.ppo(
        env=fp.envs.cartpole(max_steps=max_steps),
        network=CELLS[cell](6, hidden=(5,), then=fp.nets.mlp(3)),
        **(SMALL | options),
    )


def begun(cell, n_updates=1, **options):
    """A learner's config and its state after some updates, in which the memories are not zero; float64."""
    ppo = learner(cell, **options)
    state = double(ppo.init(random.key(0)))
    for _ in range(n_updates):
        state, _ = ppo.step(state)
    return ppo.cfg, state


def module_of(cell, params):
    """The cell of torch with the same weights."""
    sizes = (x.weight.shape[0] for x in (params.input, params.recurrent))
    module = TORCH_CELLS[cell](*sizes, dtype=torch.float64)
    for parameter, weight in zip(module.parameters(), as_in_torch(params)):
        parameter.data = weight.clone()
    return module


def as_in_torch(cell):
    """The weights of a cell, or their gradients, in torch's order."""
    layers = cell.input, cell.recurrent
    return [*(x.weight.T for x in layers), *(x.bias for x in layers)]


def loss_of_modules(cfg, state, batch):
    """The loss and its gradients, row by row and step by step, with cells of torch; one environment after another."""
    ppo, agent = cfg.ppo, cfg.agent
    leaves = [x.clone().requires_grad_() for x in tree.leaves(state.params)]
    params = tree.unflatten(state.params, leaves)
    is_gru = len(batch.sequence.memory) == 1
    cell = module_of("gru" if is_gru else "lstm", params.cell)
    by_step = lambda x: x.view(ppo.n_steps, -1, *x.shape[1:])
    obs, done = by_step(batch.obs), by_step(batch.sequence.done)

    outputs = []
    for b in range(obs.shape[1]):
        memory = [x[b : b + 1] for x in batch.sequence.memory]
        for t in range(ppo.n_steps):
            (first,), actor = params.hidden, agent.cfg.actor
            x = torch.tanh(obs[t, b : b + 1] @ first.weight + first.bias)
            memory = [cell(x, *memory)] if is_gru else [*cell(x, memory)]
            read = actor.cfg, WORLD, params.actor, memory[0]
            outputs.append(actor.apply(*read))
            if done[t, b]:
                memory = [torch.zeros_like(x) for x in memory]
    by_row = lambda *x: torch.stack(x).view(-1, ppo.n_steps, *x[0].shape[1:])
    by_time = lambda *x: by_row(*x).transpose(0, 1).flatten(0, 1)
    output = tree.map(by_time, *outputs)

    # the loss of these outputs, by an agent that returns them whatever it is given
    known = fp.Agent(cfg=None, init=agent.init, apply=lambda *_: output)
    plain = batch._replace(sequence=()), state.scalars
    loss, _ = losses.loss_fn(replace(cfg, agent=known), WORLD, (), *plain)
    loss.backward()
    return loss.detach(), leaves, cell


@pytest.mark.parametrize("cell", CELLS)
def test_the_gradient_through_a_sequence_equals_that_of_cells_of_torch(cell):
    """Episodes end in the middle of the seven steps. Float64, 1e-10."""
    cfg, state = begun(cell)
    # A policy unlike that of the rollout, and far from its values.
    batch = collect(cfg, WORLD, state).batch
    done = batch.sequence.done.view(7, 4)
    assert done[1:-1].any() and tree.ravel(batch.sequence.memory).any()
    state = state._replace(params=tree.map(lambda x: 1.2 * x, state.params))

    grads, metrics = minibatch.sequence_gradient(
        cfg, WORLD, state.params, batch, state.scalars, tree.scan
    )
    want, leaves, module = loss_of_modules(cfg, state, batch)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    close(metrics.loss, want)
    cell_grads = [p.grad for p in module.parameters()]
    close(as_in_torch(grads.cell), cell_grads)
    assert all(grad.any() for grad in cell_grads)
    expected = tree.unflatten(state.params, leaves)
    for part in ("hidden", "actor"):
        found = tree.leaves(getattr(grads, part))
        close(found, [x.grad for x in tree.leaves(getattr(expected, part))])


def test_a_truncated_episode_is_bootstrapped_with_the_memory_of_its_end():
    """V of the last observation, by all steps of the episode from its start, one row at a time."""
    cfg, state = begun("gru", max_steps=3, n_steps=6)
    agent, env = cfg.agent, cfg.env
    inputs = fp.train_step.sample_randomness(cfg, WORLD, state.key)
    began = state.env_state, state.episode_stats, state.memory
    step = partial(rollout.rollout_step, cfg, WORLD, state.params)
    first = rollout.RolloutState(*began)
    _, traj = tree.scan(step, first, inputs.random_inputs)
    got = rollout.estimate_final_value(cfg, WORLD, state.params, traj)
    assert traj.truncated.sum() == 8
    for b in range(4):
        memory = tree.map(lambda x, b=b: x[b : b + 1], state.memory)
        apply = partial(apply_agent, agent, WORLD, state.params)
        for t in range(6):
            _, memory = apply(traj.obs[t, b : b + 1], memory)
            if not traj.truncated[t, b]:
                assert got[t, b] == 0
                continue
            last, _ = apply(traj.final_obs[t, b : b + 1], memory)
            torch.testing.assert_close(got[t, b], last.value[0])
            memory = tree.map(torch.zeros_like, memory)
    assert env.truncates


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_reward_leaves_its_rows_out_but_not_from_memory(bad):
    """The rows of one step are left out: the loss of the others equals that by a mask."""
    cfg, state = begun("gru")
    batch = collect(cfg, WORLD, state).batch
    is_bad = torch.arange(28) // 4 == 2
    spoilt = batch._replace(advantage=torch.where(is_bad, bad, batch.advantage))
    of_params = lambda x: losses.loss_fn(cfg, WORLD, x, spoilt, state.scalars)
    gradient = torch.func.grad_and_value(of_params, has_aux=True)
    grads, (_, metrics) = gradient(state.params)
    assert tree.ravel(grads).isfinite().all()
    assert float(metrics.nonfinite_fraction) == pytest.approx(1 / 7)
    assert abs(float(metrics.approx_kl)) < 1e-12  # later rows are as they were


def test_two_memories_in_a_row_are_refused():
    network = fp.nets.gru(4, then=fp.nets.lstm(4))
    with pytest.raises(ValueError, match="then: expected a network without"):
        network(fp.envs.cartpole().spec)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda memory: memory._replace(c=memory.c[:, :1]), r"network: memory.c: expected .* \[4, 1\]"),
        (lambda memory: memory.h, "network: memory: expected a LSTMMemory of .*, got a Tensor"),
    ],
)  # fmt: skip
def test_a_memory_of_another_shape_is_refused_by_name(change, problem):
    cfg = learner("lstm").cfg
    agent = cfg.agent

    def apply(*arguments):
        output, memory = agent.apply_recurrent(*arguments)
        return output, change(memory)

    cfg = replace(cfg, agent=replace(agent, apply_recurrent=apply))
    with pytest.raises(TypeError, match=f"^{problem}$"):
        train_step(cfg, WORLD, init(cfg, WORLD, random.key(0)))


def success(network, n_updates=10):
    """Mean return of greedy episodes that end with the cue of their start, 4 steps before."""
    options = {"n_envs": 64, "n_steps": 8, "n_minibatches": 2}
    options |= {"learning_rate": 1e-2, "entropy_coef": 0.0}
    ppo = fp.ppo(env=fp.envs.recall(n_steps=4), network=network, **options)
    state = ppo.init(random.key(0))
    for _ in range(n_updates):
        state, _ = ppo.step(state)
    return fp.evaluate_policy(ppo, state, n_episodes=64)


@pytest.mark.parametrize("cell", CELLS)
def test_a_memory_learns_to_recall_a_cue(cell):
    result = success(CELLS[cell](16, hidden=(16,)))
    assert result.greedy.mean == 1.0 and result.sampled.mean > 0.9
