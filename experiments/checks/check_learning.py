"""How far compiled learning departs from eager learning, minibatch by minibatch, and what of that is rounding.

    python experiments/checks/check_learning.py --work family-130 --out experiments/results/check_learning-h200.json

Learners take the same minibatches of one eagerly collected batch of the prover benchmark: eagerly, compiled, eagerly in
float64, and, eagerly and compiled, with the rows of every minibatch in other orders, which is the same mathematics and
rounds differently. A row of the record is one minibatch:

    distance                 how far the eager learner has come, the norm of its change since the first minibatch
    step_difference          how far a compiled step from where the eager learner is ends from the eager step, as a
                             share of that step
    difference_from_eager    of each other learner: how far it is from the eager one, as a share of the distance
    clip_differences         of each other learner: on how many rows of the minibatch a clip holds in one of the two
                             alone, and how far the first such row is beyond the clip there and eagerly

At such a row the gradient of PPO's loss jumps: two learners that were as near as rounding allows part for good.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.prover import WORK, ProverCase
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import DATA
from experiments.provenance import describe_machine
from funcppo import train_step
from funcppo.core import random, tree
from funcppo.losses import Batch, Scalars
from funcppo.minibatch import UpdateState
from funcppo.runtime.compile import compile_function

# The update state after a minibatch, and its metrics.
UpdateStep = Callable[[UpdateState, Any], tuple[UpdateState, Any]]


class UpdateInputs(NamedTuple):
    """What all minibatches of an update share."""

    world: Any
    params: Any  # whose structure the flat params have
    batch: Batch
    scalars: Scalars


class Learners(NamedTuple):
    """The learners by name; those in float64 have inputs of their own."""

    steps: dict[str, UpdateStep]
    states: dict[str, UpdateState]
    inputs: UpdateInputs
    float64_inputs: UpdateInputs


def main() -> None:
    """Train, compare, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--data", default=str(DATA), help="folder of the standard data sets"
    )
    parser.add_argument("--work", default="family-130", choices=WORK)
    parser.add_argument(
        "--minibatches", type=int, help="all of an update by default"
    )
    parser.add_argument(
        "--orders", type=int, default=8, help="other orders of rows"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()
    case = ProverCase(args.work, "captured", args.device, "packed", args.data)
    rows = compare_learners(case, args.minibatches, args.orders)
    if args.out:
        write_record(
            args.out,
            {
                "machine": describe_machine(args.device),
                "work": args.work,
                "rows": rows,
            },
        )


def compare_learners(
    case: ProverCase, n_minibatches: int | None, n_orders: int
) -> list[Row]:
    """A row for each minibatch."""
    collected = train_step.collect(case.cfg, case.world, case.state)
    inputs = UpdateInputs(
        case.world, case.state.params, collected.batch, collected.scalars
    )
    learners = make_learners(case, inputs, collected.update_state, n_orders)
    states = learners.states
    start = states["eager"].flat_params
    rows = []
    for i in range(n_minibatches or len(tree.leaves(collected.minibatches)[0])):
        minibatch = tree.map(lambda x, i=i: x[i], collected.minibatches)
        before = states["eager"].flat_params
        compiled_step, _ = learners.steps["compiled"](
            states["eager"], minibatch
        )
        excess = {
            name: clip_excess(
                case,
                learners.float64_inputs if name == "float64" else inputs,
                state.flat_params,
                minibatch.rows,
            )
            for name, state in states.items()
        }

        states = {
            name: step(states[name], minibatch)[0]
            for name, step in learners.steps.items()
        }
        params = {name: state.flat_params for name, state in states.items()}
        eager = params.pop("eager")
        eager_excess = excess.pop("eager")
        distance = norm_of_difference(eager, start)
        rows.append(
            {
                "minibatch": i + 1,
                "distance": distance,
                "step_difference": norm_of_difference(
                    compiled_step.flat_params, eager
                )
                / norm_of_difference(before, eager),
                "difference_from_eager": {
                    name: norm_of_difference(x, eager) / distance
                    for name, x in params.items()
                },
                "clip_differences": {
                    name: compare_clips(x, eager_excess)
                    for name, x in excess.items()
                },
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def make_learners(
    case: ProverCase, inputs: UpdateInputs, first: UpdateState, n_orders: int
) -> Learners:
    """Learners that start from one state."""
    float64_inputs, float64_first = tree.map(
        lambda x: x.double() if x.dtype == torch.float32 else x, (inputs, first)
    )
    step = partial(train_step.EAGER_PARTS.minibatch_step, case.cfg)
    eager = partial(step, *inputs)
    compiled = partial(compile_function(step.func), case.cfg, *inputs)
    steps: dict[str, UpdateStep] = {
        "eager": eager,
        "compiled": compiled,
        "float64": partial(step, *float64_inputs),
    }
    for i in range(1, n_orders + 1):
        in_other_order = partial(
            step_in_other_order, random.key(i, case.device)
        )
        steps[f"eager, order {i}"] = partial(in_other_order, eager)
        steps[f"compiled, order {i}"] = partial(in_other_order, compiled)
    states = dict.fromkeys(steps, first) | {"float64": float64_first}
    return Learners(steps, states, inputs, float64_inputs)


def step_in_other_order(
    key: Tensor, step: UpdateStep, state: UpdateState, minibatch: Any
) -> tuple[UpdateState, Any]:
    """A step on the rows of a minibatch in a random order."""
    order = random.permutation(
        random.fold_in(key, state.opt_state.step), len(minibatch.rows)
    )
    return step(state, minibatch._replace(rows=minibatch.rows[order]))


def clip_excess(
    case: ProverCase, inputs: UpdateInputs, flat_params: Tensor, rows: Tensor
) -> Tensor:
    """[2, M]: how far the ratio of each row, and its value, are beyond where a clip takes their gradient away."""
    agent = case.cfg.update_agent or case.cfg.agent
    batch = tree.map(lambda x: x[rows], inputs.batch)
    out = agent.apply(
        agent.cfg,
        inputs.world,
        tree.unravel(inputs.params, flat_params),
        batch.obs,
    )
    eps = inputs.scalars.clip_eps

    ratio = (
        agent.distribution.log_prob(out, batch.action) - batch.log_prob
    ).exp()
    upwards = batch.advantage > batch.advantage.mean()
    ratio_excess = torch.where(upwards, ratio - 1, 1 - ratio) - eps

    # The clipped value counts where it is beyond the clip, and its error is the larger one.
    change = out.value - batch.value
    clipped_value = batch.value + change.clamp(-eps, eps)
    gain = (clipped_value - batch.value_target).abs() - (
        out.value - batch.value_target
    ).abs()
    return torch.stack([ratio_excess, torch.minimum(change.abs() - eps, gain)])


def compare_clips(excess: Tensor, eager_excess: Tensor) -> Row:
    """On how many rows a clip holds in one of two learners alone, and the first of these rows in both."""
    different = ((excess > 0) != (eager_excess > 0)).nonzero()
    if not len(different):
        return {"rows": 0}
    loss, row = different[0].tolist()
    return {
        "rows": len(different.unique(dim=0)),
        "loss": ("ratio", "value")[loss],
        "here": float(excess[loss, row]),
        "eager": float(eager_excess[loss, row]),
    }


def norm_of_difference(a: Tensor, b: Tensor) -> float:
    """|a - b| in float64."""
    return float((a.double() - b.double()).norm())


if __name__ == "__main__":
    main()
