"""How far compiled learning strays from eager learning, minibatch by minibatch, and what of that is rounding.

    python experiments/check_learning.py --work family-130 --out experiments/results/check_learning-h200.json

Learners take the same minibatches of one eagerly collected batch of `bench_prover.py`'s work: eagerly, compiled,
eagerly in float64, and, eagerly and compiled, with the rows of every minibatch in other orders, which is the same
mathematics and rounds otherwise. A row of the record holds, of one minibatch and for each learner, how far it is from
the eager one as a share of the way that one has come, and how many rows of the minibatch lie on another side of a clip:
there the gradient of PPO's loss jumps, so that two learners that were as near as rounding lets them be part for good.
The first such row of a learner is told: how far its ratio or its value is beyond the clip there, and eagerly. `a step`
is how far a compiled step from where the eager learner is ends from the eager step, as a share of that step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks import side_by_side
import torch
from experiments.benchmarks.prover import WORK, Case
from torch import Tensor

from funcppo import random, train_step, tree
from funcppo.minibatch import UpdateState
from funcppo.runtime.compile import compile_function


def main() -> None:
    """Learn and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--work", default="family-130", choices=WORK)
    parser.add_argument("--minibatches", type=int, help="default: all of an update")
    parser.add_argument("--orders", type=int, default=8, help="other orders of rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    case = Case(args.work, "captured", args.device, args.data, "packed")
    rows = compared(case, args.minibatches, args.orders)
    told = {"machine": side_by_side.machine(args.device), "work": args.work}
    if args.out:
        args.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


def compared(case: Case, n: int | None, n_orders: int) -> list[dict[str, Any]]:
    """A row a minibatch."""
    got, like = train_step.collect(case.cfg, case.world, case.state), case.state.params
    inputs = case.world, like, got.batch, got.scalars
    doubled = tree.map(lambda x: x.double() if x.dtype == torch.float32 else x, (*inputs, got.update_state))
    step = partial(train_step.EAGER_PARTS.minibatch_step, case.cfg)
    eager, fast = partial(step, *inputs), partial(compile_function(step.func), case.cfg, *inputs)
    steps = {"eager": eager, "compiled": fast, "float64": partial(step, *doubled[:-1])}
    for i in range(1, n_orders + 1):
        shuffled = partial(_reordered, random.key(i, case.device))
        steps |= {f"eager, order {i}": partial(shuffled, eager), f"compiled, order {i}": partial(shuffled, fast)}
    learners = dict.fromkeys(steps, got.update_state) | {"float64": doubled[-1]}
    rows = []
    for i in range(n or len(tree.leaves(got.minibatches)[0])):
        minibatch = tree.map(lambda x, i=i: x[i], got.minibatches)
        before, once = learners["eager"], fast(learners["eager"], minibatch)[0].params
        beyond = {
            name: clipped(case, doubled[:-1] if name == "float64" else inputs, learner, minibatch.rows)
            for name, learner in learners.items()
        }
        learners = {name: step(learners[name], minibatch)[0] for name, step in steps.items()}
        at = {name: learner.params.double() for name, learner in learners.items()}
        way = float((at["eager"] - got.update_state.flat_params).norm())
        row = {
            "minibatch": i + 1,
            "way": way,
            "a step": _apart(once, at["eager"]) / _apart(before.flat_params, at["eager"]),
        }
        row["from eager"] = {name: _apart(x, at["eager"]) / way for name, x in at.items() if name != "eager"}
        row["clipped otherwise"] = {name: _parted(x, beyond["eager"]) for name, x in beyond.items() if name != "eager"}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _reordered(key: Tensor, step: Callable[..., Any], learner: UpdateState, minibatch: Any) -> Any:
    order = random.permutation(random.fold_in(key, learner.opt_state.step), len(minibatch.rows))
    return step(learner, minibatch._replace(rows=minibatch.rows[order]))


def clipped(case: Case, inputs: Any, learner: UpdateState, rows: Tensor) -> Tensor:
    """[2, M]: how far the ratio of each row, and its value, is beyond where a clip takes its gradient away."""
    world, like, batch, scalars = inputs
    agent, batch = case.cfg.update_agent or case.cfg.agent, tree.map(lambda x: x[rows], batch)
    out = agent.apply(agent.cfg, world, tree.unravel(like, learner.flat_params), batch.obs)
    ratio = (agent.distribution.log_prob(out, batch.action) - batch.log_prob).exp()
    upwards = batch.advantage > batch.advantage.mean()
    change, eps = out.value - batch.value, scalars.clip_eps
    gain = (batch.value + change.clamp(-eps, eps) - batch.target).abs() - (out.value - batch.target).abs()
    return torch.stack([torch.where(upwards, ratio - 1, 1 - ratio) - eps, torch.minimum(change.abs() - eps, gain)])


def _parted(one: Tensor, other: Tensor) -> dict[str, Any]:
    """On how many rows a clip holds in one learner alone, and of the first of them how far both are beyond it."""
    parted = ((one > 0) != (other > 0)).nonzero()
    if not len(parted):
        return {"rows": 0}
    loss, row = parted[0].tolist()
    first = {"of": ("ratio", "value")[loss], "here": float(one[loss, row]), "eagerly": float(other[loss, row])}
    return {"rows": len(parted.unique(dim=0)), **first}


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


if __name__ == "__main__":
    main()
