"""I: the whole step as one Triton kernel that is written by hand: forward, loss, backward, clipping and Adam."""

from typing import Any

import torch
from torch import Tensor

from experiments.matrix.problem import Problem
from experiments.matrix.registry import Compiler, Training, way
from funcppo.config import PPOConfig
from funcppo.core import tree
from funcppo.losses import Batch

SHIP = "other ways to run it"
# Rows of a minibatch and units of the hidden layer that one block of threads can hold.
BLOCK_SIZES = (16, 32, 64, 128)


@way(
    "I",
    SHIP,
    "one Triton kernel, backward written by hand",
    backends=("none",),
    modes=("manual graph",),
)
def hand_written_kernel(problem: Problem, compiler: Compiler) -> Training:
    """One launch a step. It is for this network, this loss, and minibatches that one block of threads holds."""
    _check(problem)
    params = tree.leaves(problem.params)
    sizes = [p.numel() for p in params]
    flat = torch.cat([p.reshape(-1) for p in params])
    zeros = lambda: torch.zeros_like(flat)
    state = (flat, zeros(), zeros(), zeros(), flat.new_zeros(()))
    launch = _launcher(problem, state)

    def parts() -> list[Tensor]:
        pieces = flat.split(sizes)
        return [x.view(p.shape) for x, p in zip(pieces, params)]

    return Training(step=launch, params=parts, graphs=1)


def _check(problem: Problem) -> None:
    """Refuse what the kernel does not compute."""
    ppo, batch = problem.cfg.ppo, problem.batches[0]
    written_for = PPOConfig(
        learning_rate=ppo.learning_rate,
        clip_eps=ppo.clip_eps,
        value_coef=ppo.value_coef,
        entropy_coef=ppo.entropy_coef,
        max_grad_norm=ppo.max_grad_norm,
        adam=ppo.adam,
    )
    n_rows, n_units = (
        batch.obs.shape[0],
        problem.params.hidden[0].bias.shape[-1],
    )
    if n_rows not in BLOCK_SIZES or n_units not in BLOCK_SIZES:
        raise ValueError(
            f"expected numbers of rows and units among {BLOCK_SIZES}, got {n_rows} and {n_units}"
        )
    if ppo != written_for or ppo.adam.weight_decay:
        raise ValueError(
            f"expected the default loss and no weight decay, got {ppo}"
        )


def _launcher(problem: Problem, state: tuple[Tensor, ...]) -> Any:
    """A function of a batch that launches the kernel, which overwrites the state."""
    kernel = _kernel()
    settings = _settings(problem)
    weight = problem.params.hidden[0].weight
    n_actions = problem.params.heads.weight.shape[-1]

    def launch(batch: Batch) -> None:
        kernel[(1,)](
            *state,
            settings,
            batch.obs,
            batch.action,
            batch.log_prob,
            batch.value,
            batch.advantage,
            batch.value_target,
            ROWS=batch.obs.shape[0],
            OBS=weight.shape[1],
            HIDDEN=weight.shape[2],
            ACTIONS=n_actions,
            BLOCK=1 << (state[0].numel() - 1).bit_length(),
            N_PARAMS=state[0].numel(),
            num_warps=8,
        )

    return launch


def _settings(problem: Problem) -> Tensor:
    """The numbers of loss and optimizer in float64, in the order in which the kernel reads them."""
    ppo = problem.cfg.ppo
    numbers = [
        ppo.clip_eps,
        ppo.value_coef,
        ppo.entropy_coef,
        ppo.max_grad_norm,
        ppo.learning_rate,
        ppo.adam.b1,
        ppo.adam.b2,
        ppo.adam.eps,
    ]
    device = problem.batches[0].obs.device
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _kernel() -> Any:
    """The kernel. Triton is imported here, because builds of PyTorch for CPUs come without it."""
    import triton
    import triton.language as tl

    @triton.jit
    def step_kernel(
        weights,
        mu,
        nu,
        grads,
        step,
        settings,
        obs,
        action,
        old_log_prob,
        old_value,
        advantage,
        value_target,
        ROWS: tl.constexpr,
        OBS: tl.constexpr,
        HIDDEN: tl.constexpr,
        ACTIONS: tl.constexpr,
        BLOCK: tl.constexpr,
        N_PARAMS: tl.constexpr,
    ):
        rows = tl.arange(0, ROWS)
        units = tl.arange(0, HIDDEN)
        actions = tl.arange(0, ACTIONS)
        dtype = weights.dtype.element_ty
        clip_eps = tl.load(settings).to(dtype)
        value_coef = tl.load(settings + 1).to(dtype)
        entropy_coef = tl.load(settings + 2).to(dtype)

        # Parameters, leaf by leaf: weights and biases of the hidden layers,
        # then of the heads; of each the actor's and then the critic's.
        bias = weights + 2 * OBS * HIDDEN
        head = bias + 2 * HIDDEN
        head_bias = head + 2 * HIDDEN * ACTIONS

        # Forward: two networks side by side, tanh(x W + b) V + c.
        actor = tl.zeros((ROWS, HIDDEN), dtype) + tl.load(bias + units)[None, :]
        critic = (
            tl.zeros((ROWS, HIDDEN), dtype)
            + tl.load(bias + HIDDEN + units)[None, :]
        )
        for i in tl.static_range(OBS):
            x = tl.load(obs + rows * OBS + i)[:, None]
            actor += x * tl.load(weights + i * HIDDEN + units)[None, :]
            critic += x * tl.load(weights + (OBS + i) * HIDDEN + units)[None, :]
        # tanh(x) = 2 sigmoid(2 x) - 1, which is exact enough at both ends.
        actor = 2 / (1 + tl.exp(-2 * actor)) - 1
        critic = 2 / (1 + tl.exp(-2 * critic)) - 1

        logits = tl.zeros((ROWS, ACTIONS), dtype)
        for a in tl.static_range(ACTIONS):
            column = tl.load(head + units * ACTIONS + a)[None, :]
            logit = tl.sum(actor * column, 1) + tl.load(head_bias + a)
            logits += tl.where(actions[None, :] == a, logit[:, None], 0.0)
        critic_head = tl.load(head + (HIDDEN + units) * ACTIONS)
        value = tl.sum(critic * critic_head[None, :], 1)
        value += tl.load(head_bias + ACTIONS)

        # Loss: its derivatives by the logits and the value of each row.
        adv = tl.load(advantage + rows)
        centred = adv - tl.sum(adv, 0) / ROWS
        deviation = tl.sqrt(tl.sum(centred * centred, 0) / (ROWS - 1))
        adv = centred / (deviation + 1e-8)

        shifted = logits - tl.max(logits, 1)[:, None]
        log_probs = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
        probs = tl.exp(log_probs)
        entropy = -tl.sum(probs * log_probs, 1)
        chosen = actions[None, :] == tl.load(action + rows)[:, None]
        log_prob = tl.sum(tl.where(chosen, log_probs, 0.0), 1)
        ratio = tl.exp(log_prob - tl.load(old_log_prob + rows))
        clipped = tl.minimum(tl.maximum(ratio, 1 - clip_eps), 1 + clip_eps)
        d_log_prob = tl.where(ratio * adv <= clipped * adv, -adv * ratio, 0.0)
        d_logits = d_log_prob[:, None] * (tl.where(chosen, 1.0, 0.0) - probs)
        d_logits += entropy_coef * probs * (log_probs + entropy[:, None])
        d_logits /= ROWS

        old = tl.load(old_value + rows)
        target = tl.load(value_target + rows)
        moved = value - old
        inside = (moved >= -clip_eps) & (moved <= clip_eps)
        near = old + tl.minimum(tl.maximum(moved, -clip_eps), clip_eps)
        plain_error = (value - target) * (value - target)
        clipped_error = (near - target) * (near - target)
        d_plain = value - target
        d_clipped = tl.where(inside, near - target, 0.0)
        d_value = tl.where(plain_error >= clipped_error, d_plain, d_clipped)
        d_value *= value_coef / ROWS

        # Backward, into the buffer of gradients; the critic's unused outputs
        # keep their zeros.
        g_bias = grads + 2 * OBS * HIDDEN
        g_head = g_bias + 2 * HIDDEN
        g_head_bias = g_head + 2 * HIDDEN * ACTIONS
        d_actor = tl.zeros((ROWS, HIDDEN), dtype)
        for a in tl.static_range(ACTIONS):
            d = tl.sum(tl.where(actions[None, :] == a, d_logits, 0.0), 1)
            column = tl.load(head + units * ACTIONS + a)[None, :]
            d_actor += d[:, None] * column
            tl.store(
                g_head + units * ACTIONS + a, tl.sum(actor * d[:, None], 0)
            )
            tl.store(g_head_bias + a, tl.sum(d, 0))
        tl.store(
            g_head + (HIDDEN + units) * ACTIONS,
            tl.sum(critic * d_value[:, None], 0),
        )
        tl.store(g_head_bias + ACTIONS, tl.sum(d_value, 0))
        d_actor *= 1 - actor * actor
        d_critic = d_value[:, None] * critic_head[None, :]
        d_critic *= 1 - critic * critic
        tl.store(g_bias + units, tl.sum(d_actor, 0))
        tl.store(g_bias + HIDDEN + units, tl.sum(d_critic, 0))
        for i in tl.static_range(OBS):
            x = tl.load(obs + rows * OBS + i)[:, None]
            tl.store(grads + i * HIDDEN + units, tl.sum(x * d_actor, 0))
            tl.store(
                grads + (OBS + i) * HIDDEN + units, tl.sum(x * d_critic, 0)
            )

        # Clipping and Adam, on the flat vectors. The threads read gradients
        # that other threads of the block have written.
        tl.debug_barrier()
        index = tl.arange(0, BLOCK)
        mask = index < N_PARAMS
        g = tl.load(grads + index, mask=mask, other=0.0)
        norm = tl.sqrt(tl.sum(g * g, 0))
        scale = tl.load(settings + 3).to(dtype) / (norm + 1e-6)
        g *= tl.minimum(scale, 1.0)

        b1 = tl.load(settings + 5)
        b2 = tl.load(settings + 6)
        t = tl.load(step) + 1
        m = tl.load(mu + index, mask=mask, other=0.0)
        v = tl.load(nu + index, mask=mask, other=0.0)
        m = b1.to(dtype) * m + (1 - b1).to(dtype) * g
        v = b2.to(dtype) * v + (1 - b2).to(dtype) * g * g
        # In float64, because 1 - b^t loses digits.
        m_hat = m / (1 - tl.exp(t.to(tl.float64) * tl.log(b1))).to(dtype)
        v_hat = v / (1 - tl.exp(t.to(tl.float64) * tl.log(b2))).to(dtype)
        rate = tl.load(settings + 4).to(dtype)
        eps = tl.load(settings + 7).to(dtype)
        p = tl.load(weights + index, mask=mask, other=0.0)
        p -= rate * m_hat / (tl.sqrt(v_hat) + eps)
        tl.store(weights + index, p, mask=mask)
        tl.store(mu + index, m, mask=mask)
        tl.store(nu + index, v, mask=mask)
        tl.store(step, t)

    return step_kernel
