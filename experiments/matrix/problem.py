"""What every cell is given - parameters, batches, the loss - and the eager oracle that it must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcppo import optim
from funcppo.config import Config, PPOConfig
from funcppo.core import tree
from funcppo.envs import classic
from funcppo.interfaces import NoWorld
from funcppo.losses import SCALARS, Batch, LossMetrics, Scalars, loss_fn
from funcppo.nets import networks as mlp
from funcppo.nets.networks import Agent, PolicyValue, dense


class Size(NamedTuple):
    """Numbers in an observation, units of the hidden layer, actions, and rows of a minibatch."""

    obs: int
    hidden: int
    actions: int
    rows: int


SIZE = Size(obs=4, hidden=64, actions=2, rows=64)  # bound by launches
BATCHES = 3
WORLD = NoWorld()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A PPO update of CartPole's network on made-up transitions."""

    cfg: Config
    params: Any
    batches: tuple[
        Batch, ...
    ]  # one a step, all different, so that data baked into a graph shows
    scalars: Scalars

    def loss(self, params: Any, batch: Batch) -> tuple[Tensor, LossMetrics]:
        """The loss as `torch.func` wants it: what is differentiated comes first."""
        return loss_fn(self.cfg, WORLD, params, batch, self.scalars)

    def finish(
        self, params: Any, opt_state: Any, grads: Any
    ) -> tuple[Any, Any]:
        """Clipping and Adam."""
        grads, _ = optim.clip_by_global_norm(grads, self.scalars.max_grad_norm)
        return optim.update(
            self.cfg.ppo.adam,
            grads,
            opt_state,
            params,
            self.scalars.learning_rate,
        )


def make(
    dtype: torch.dtype, device: str, *, residual: bool = False, seed: int = 0
) -> Problem:
    """The same numbers for every dtype and device.

    Args:
      residual: the network adds the input of its activation to its output.
    """
    net = mlp.MLPConfig(
        n_obs=SIZE.obs, n_actions=SIZE.actions, hidden=(SIZE.hidden,)
    )
    agent = Agent(
        cfg=net,
        init=mlp.init_mlp,
        apply=residual_apply if residual else mlp.apply_mlp,
    )
    ppo = PPOConfig(learning_rate=1e-2)
    generator = torch.Generator().manual_seed(seed)
    cast = lambda x: x.to(
        device=device, dtype=dtype if x.is_floating_point() else x.dtype
    )
    params = tree.unflatten(
        _structure(net),
        [_draw(p.shape, generator) * 0.3 for p in tree.leaves(_structure(net))],
    )
    return Problem(
        cfg=Config(ppo=ppo, env=classic.cartpole(), agent=agent),
        params=tree.map(cast, params),
        batches=tuple(
            tree.map(cast, _batch(generator)) for _ in range(BATCHES)
        ),
        scalars=Scalars(
            *(
                torch.tensor(getattr(ppo, name), dtype=dtype, device=device)
                for name in SCALARS
            )
        ),
    )


def _structure(net: mlp.MLPConfig) -> mlp.MLPParams:
    return mlp.init_mlp(net, torch.zeros(2, dtype=torch.int64))


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _batch(generator: torch.Generator) -> Batch:
    draw = lambda *shape: _draw((SIZE.rows, *shape), generator)
    return Batch(
        obs=draw(SIZE.obs),
        action=torch.randint(SIZE.actions, (SIZE.rows,), generator=generator),
        log_prob=-0.7 + 0.2 * draw(),
        value=draw(),
        advantage=draw(),
        value_target=3.0
        * draw(),  # far from the values: the gradient is long enough to be clipped
    )


def residual_apply(
    cfg: Any, world: Any, params: mlp.MLPParams, obs: Tensor
) -> PolicyValue:
    """`mlp.apply` with a residual connection around the activation."""
    x = dense(params.hidden[0], obs.expand(2, *obs.shape))
    return heads(params, torch.tanh(x) + x)


def heads(params: mlp.MLPParams, x: Tensor) -> PolicyValue:
    """Logits and value of the last hidden layer."""
    out = dense(params.heads, x)
    return PolicyValue(logits=out[0], value=out[1, :, 0])


class Policy(nn.Module):
    """The network behind the module API, its leaves as Parameters."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.weights = nn.ParameterList(
            [nn.Parameter(p.clone()) for p in tree.leaves(problem.params)]
        )

    def tree(self) -> Any:
        """The Parameters in the structure of the functional network."""
        return tree.unflatten(self.problem.params, list(self.weights))

    def forward(self, obs: Tensor) -> PolicyValue:
        """What a user of the policy calls."""
        agent = self.problem.cfg.agent
        return agent.apply(agent.cfg, WORLD, self.tree(), obs)

    def loss(self, batch: Batch) -> Tensor:
        """What learning calls; a method beside `forward`."""
        return self.problem.loss(self.tree(), batch)[0]


def adam(
    problem: Problem, params: list[Tensor], **options: Any
) -> torch.optim.Adam:
    """torch's Adam with the problem's settings."""
    cfg = problem.cfg.ppo
    lr, betas = cfg.learning_rate, (cfg.adam.b1, cfg.adam.b2)
    return torch.optim.Adam(
        params, lr=lr, betas=betas, eps=cfg.adam.eps, **options
    )


def eager_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch], Tensor],
    batch: Batch,
) -> None:
    """One step as it is usually written."""
    optimizer.zero_grad()
    learn(policy, optimizer, loss, batch)


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch], Tensor],
    batch: Batch,
) -> None:
    """The part of it that one would like to compile."""
    loss(batch).backward()
    nn.utils.clip_grad_norm_(
        policy.parameters(), policy.problem.cfg.ppo.max_grad_norm
    )
    optimizer.step()


def oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
    """The parameters after one eager step a batch: autograd, clip_grad_norm_, torch.optim.Adam."""
    policy = Policy(problem)
    optimizer = adam(problem, list(policy.parameters()), foreach=False)
    for batch in batches:
        eager_step(policy, optimizer, policy.loss, batch)
    return [p.detach() for p in policy.parameters()]
