"""How far compiled learning strays from eager learning, minibatch by minibatch, and which of the two is right.

    python experiments/check_learning.py --work family-130 --out experiments/results/check_learning-h200.json

Four learners take the same minibatches of one eagerly collected batch of `bench_prover.py`'s work: compiled, eager,
eager in float64, and eager from params that are off by one part in ten million. A row holds how far each is from the
eager one, and compiled from float64, as shares of the way that params have come; the last one also how far each leaf is
from float64.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side
import torch
from bench_prover import WORK, Case

from funcppo import random, train_step, tree
from funcppo.runtime.compile import compiled
from funcppo.runtime.products import GPU, Products


def main() -> None:
    """Learn and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--work", default="family-130", choices=WORK)
    parser.add_argument("--minibatches", type=int, help="default: all of an update")
    parser.add_argument("--as-on-a-gpu", action="store_true", help="rewrite products on a CPU as on a GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    case = Case(args.work, "captured", args.device, args.data, "packed")
    rows = compared(
        case, args.minibatches, {"post_grad_custom_pre_pass": Products(cpu=GPU)} if args.as_on_a_gpu else {}
    )
    told = {"machine": side_by_side.machine(args.device), "work": args.work, "products as on a GPU": args.as_on_a_gpu}
    if args.out:
        args.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


def compared(case: Case, n: int | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a minibatch."""
    got, params = train_step.collect(case.cfg, case.world, case.state), case.state.params
    eager = train_step.EAGER.minibatch_step
    inputs = case.world, params, got.batch, got.scalars
    off = 1.0 + 1e-7 * random.normal(random.key(1, case.device), got.learner.params.shape)
    steps = {
        "eager": (partial(eager, case.cfg, *inputs), got.learner),
        "compiled": (partial(compiled(eager, **options), case.cfg, *inputs), got.learner),
        "float64": (partial(eager, case.cfg, *map(doubled, inputs)), doubled(got.learner)),
        "off by 1e-7": (partial(eager, case.cfg, *inputs), got.learner._replace(params=got.learner.params * off)),
    }
    learners = {name: learner for name, (_, learner) in steps.items()}
    rows = []
    for i in range(n or len(tree.leaves(got.minibatches)[0])):
        minibatch = tree.map(lambda x, i=i: x[i], got.minibatches)
        learners = {name: step(learners[name], minibatch)[0] for name, (step, _) in steps.items()}
        at = {name: learner.params.double() for name, learner in learners.items()}
        way = float((at["eager"] - got.learner.params).norm())
        apart = lambda a, b, at=at, way=way: float((at[a] - at[b]).norm()) / way
        row = {f"{name} from eager": apart(name, "eager") for name in steps if name != "eager"}
        rows.append({"minibatch": i + 1, "way": way} | row | {"compiled from float64": apart("compiled", "float64")})
        print(json.dumps(rows[-1]), flush=True)
    leaves = {name: tree.leaves(tree.unravel(params, learner.params)) for name, learner in learners.items()}
    norms = [
        {f"{name} from float64": float((x.double() - z).norm()) for name, x in (("compiled", a), ("eager", b))}
        | {"way": float((z - c).norm())}
        for a, b, z, c in zip(leaves["compiled"], leaves["eager"], leaves["float64"], tree.leaves(params))
    ]
    rows[-1]["leaves"] = dict(zip(tree.paths(params), norms))
    return rows


def doubled(x: Any) -> Any:
    """A tree with its float32 leaves in float64."""
    return tree.map(lambda leaf: leaf.double() if leaf.dtype == torch.float32 else leaf, x)


if __name__ == "__main__":
    main()
