"""Listing the firings of questions in fixed shapes: its time beside that of the other listing, and what does not fit.

    OMP_NUM_THREADS=1 python experiments/benchmarks/fixed_firings.py --data DIR
    python experiments/benchmarks/fixed_firings.py --data DIR --out experiments/results/fixed_firings-h100.json

Rules are mined at the defaults. A sample of the questions of train is listed by `firing_chunks` (`ragged`), by
`fixed_firings.list_firings` and by compiled code of it, whose capacities are chosen by another sample. Questions that
overflow are listed by the first afterwards, which takes `rest` seconds. The firings of all others are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.default_results import mine
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo import tree
from funcppo.data import load
from funcppo.logic import fixed_firings
from funcppo.logic import kb as kbase
from funcppo.logic.firing_chunks import iter_firing_chunks, sorted_firings
from funcppo.logic.firings import FiringPlan, plan_firings
from funcppo.logic.fixed_listing import ListFirings, PreparedListing
from funcppo.logic.question_types import (
    Firings,
    Questions,
    select_firings,
    select_questions,
)
from funcppo.prover.evidence import training_questions
from funcppo.runtime.compile import compile_function

SETS = ("nations", "kinships", "wn18rr", "fb15k-237")
N_QUESTIONS = 1024  # a batch at most
N_SAMPLED = 48  # questions by which capacities are chosen
MAX_BYTES = 1 << 30  # of the stages of a batch


def main() -> None:
    """Measure what the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "fixed_firings-cpu.json"
    )
    args = parser.parse_args()

    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {(row["set"], row["object_identity"]) for row in record["rows"]}
    for name in args.only:
        todo = [i for i in (False, True) if (name, i) not in present]
        if not todo:
            continue
        target = args.data / name
        rules, _ = mine(str(target.resolve()), [])
        dataset = load(target, str(rules))
        kb, sizes = kbase.from_dataset(dataset)
        kb = tree.map(lambda x: x.to(args.device), kb)
        plan = plan_firings(kb, sizes)
        facts = torch.from_numpy(dataset.train).long().to(args.device)
        for object_identity in todo:
            row = measure(plan, facts, object_identity)
            record["rows"].append({"set": name, "rules": sizes.n_rules, **row})
            record["machine"] = describe_machine(args.device)
            write_record(args.out, record)
            print(json.dumps(record["rows"][-1]), flush=True)


def measure(
    plan: FiringPlan, facts: torch.Tensor, object_identity: bool
) -> dict[str, Any]:
    """The row of one set of rules."""
    asked, sampled = (
        sample_questions(facts, n, seed)
        for seed, n in enumerate((N_QUESTIONS, N_SAMPLED))
    )

    def ragged(questions: Questions) -> list[Any]:
        chunks = iter_firing_chunks(
            plan, questions, object_identity=object_identity
        )
        return list(chunks)

    fixed = fixed_firings.plan_fixed_firings(
        plan, left_out="fact", object_identity=object_identity
    )
    cfg = fixed_firings.choose_capacities(fixed, sampled, MAX_BYTES)
    expected = sorted_firings(plan, asked, "fact", object_identity)
    row: dict[str, Any] = {
        "object_identity": object_identity,
        "questions": len(asked.entity),
        "questions_a_batch": cfg.n_questions,
        "firings": len(expected.rule),
        "ragged_seconds": time_second_call(lambda: ragged(asked))[1],
        "commit": current_commit(),
    }
    ways: dict[str, ListFirings] = {
        "eager": fixed_firings.list_firings,
        "compiled": compile_function(
            fixed_firings.list_firings, use_custom_passes=False
        ),
    }
    for name, list_firings in ways.items():
        listing = PreparedListing(cfg, fixed.world, list_firings)
        first, seconds = time_second_call(lambda of=listing: of(asked))
        row |= {f"{name}_seconds": seconds, f"{name}_first_seconds": first}
        found = listing(asked)
        check_firings(found.firings, expected, found.overflow)
        rest = select_questions(asked, found.overflow.nonzero().squeeze(1))
        n_overflowed = len(rest.entity)
        row["overflowed"] = n_overflowed
        row["rest_seconds"] = (
            time_second_call(lambda of=rest: ragged(of))[1]
            if n_overflowed
            else 0.0
        )
    return row


def sample_questions(facts: torch.Tensor, n: int, seed: int) -> Questions:
    """So many questions of known facts, at random, each without its fact."""
    questions = training_questions(facts)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(questions.entity), generator=generator)
    return select_questions(questions, order[:n].to(facts.device))


def check_firings(
    found: Firings, expected: Firings, overflow: torch.Tensor
) -> None:
    """Check the firings of the questions that fit.

    Raises:
      RuntimeError: they are others.
    """
    expected = select_firings(expected, ~overflow[expected.question])
    for got, want in zip(found, expected, strict=True):
        if not torch.equal(got, want):
            raise RuntimeError("fixed shapes: other firings than expected")


def time_second_call(fn: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, in which code may be compiled, and of another one."""
    seconds: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 4))
    return seconds[0], seconds[1]


if __name__ == "__main__":
    main()
