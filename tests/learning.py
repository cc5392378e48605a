"""What the tests of the learner share: small problems, compiled parts, and where recorded data lie."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from funcppo.config import Config, PPOConfig
from funcppo.core import tree
from funcppo.envs import classic
from funcppo.interfaces import NoWorld
from funcppo.nets import networks
from funcppo.runtime import compile

DATA = Path(
    os.environ.get("FUNCPPO_DATA", Path(__file__).parents[1] / "../shared/data")
)
WORLD = NoWorld()
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device"
)
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=on_gpu)]
)
# Of a learner of 4 environments.
SMALL: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 8,
    "n_updates": 10,
    "n_epochs": 2,
    "n_minibatches": 2,
}


def refused(
    problem: str, call: Any, *args: Any, error: Any = ValueError, **options: Any
) -> None:
    """Assert that a call raises an error of one line, which begins so."""
    with pytest.raises(error, match=f"^{problem}") as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


def oracle(name: str) -> dict[str, np.ndarray]:
    """A file of recorded numbers; skips the test where it is absent."""
    path = DATA / "oracles" / name
    if not path.exists():
        pytest.skip(
            f"{path} is absent: set FUNCPPO_DATA to the folder that holds oracles/"
        )
    return dict(np.load(path))


def cartpole_config(max_steps: int = 500, **ppo: Any) -> Config:
    """CartPole-v1 with the MLP."""
    return Config(
        ppo=PPOConfig(**ppo),
        env=classic.cartpole(max_steps=max_steps),
        agent=networks.mlp_agent(networks.MLPConfig(n_obs=4, n_actions=2)),
    )


def pendulum_config(max_steps: int = 200, **ppo: Any) -> Config:
    """Pendulum-v1 with the Gaussian MLP."""
    return Config(
        ppo=PPOConfig(**ppo),
        env=classic.pendulum(max_steps=max_steps),
        agent=networks.gaussian_agent(networks.MLPConfig(n_obs=3, n_actions=1)),
    )


@cache
def compiled(fn: Any, **options: Any) -> Any:
    """`fn` as one graph, compiled once for the whole run of the tests; a graph break is an error."""
    return compile.compile_function(fn, **options)


def double(x: Any) -> Any:
    """The tree with every float32 leaf in float64."""
    return tree.map(lambda t: t.double() if t.dtype == torch.float32 else t, x)


def assert_trees_equal(
    got: Any, want: Any, *, rtol: float, atol: float
) -> None:
    """Leaf by leaf, integers and booleans exactly."""
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(
        tree.paths(want), tree.leaves(got), tree.leaves(want)
    ):
        exact = not a.dtype.is_floating_point
        torch.testing.assert_close(
            a,
            b,
            rtol=0 if exact else rtol,
            atol=0 if exact else atol,
            msg=lambda m, path=path: f"{path}: {m}",
        )
