"""`funcppo provable`: how much of a split the rules can derive, step by step."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from funcppo.cli import write_json
from funcppo.cli.target import fixpoint_progress, open_dataset

if TYPE_CHECKING:
    import numpy as np

    from funcppo.data import Dataset
    from funcppo.logic.fixpoint import LeastModel


@dataclass(frozen=True, kw_only=True)
class Provable:
    """Count the triples of a split that the rules derive from the known facts within 1, 2, ... steps.

    A triple that is itself a known fact counts as derivable, as it is from step 0 on. For `--split train`, where that
    is all of them, a triple counts when a rule derives it from other facts, at height 1. A program (.pl) has no split:
    only its atoms are counted. The step that passes the budget is still taken for the split alone.

    Exit status: 0 counted (`complete` in the JSON says whether the budget ended it early), 2 bad input.
    """

    dataset: Annotated[Positional[str], arg(metavar="DATASET")]
    """Embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED), folder, or .pl program."""
    rules: Annotated[str | None, arg(metavar="FILE")] = None
    """Rule file to use in place of the data set's own."""
    split: Literal["test", "valid", "train"] = "test"
    """Triples to count."""
    height: Annotated[int | Literal["fixpoint"] | None, arg(metavar="H|fixpoint")] = None
    """Steps to take, or all until nothing new is derived; by default 3, and 1 for the train split."""
    object_identity: Annotated[bool, FlagCreatePairsOff] = False
    """Different variables of a rule bind different constants, as AnyBURL counts."""
    max_atoms: Annotated[int, arg(metavar="N")] = 50_000_000
    """Atoms to hold at most, at about 110 bytes each; a step that would pass it is taken for the split alone."""
    json: Annotated[str | None, arg(metavar="FILE|-")] = None
    """Write the counts as JSON to this file, or to standard output in place of the table for `-`."""

    def run(self) -> int:
        """Count, print, and return the exit status."""
        steps = self._steps()
        start = time.perf_counter()
        dataset = open_dataset(self.dataset, self.rules)
        if not len(dataset.rules) and len(dataset.test):
            raise ValueError(f"{dataset.name}: want rules (rules.txt, --rules FILE, or `funcppo mine`), got none")
        result = _count(self, dataset, steps)
        result["seconds_in_all"] = round(time.perf_counter() - start, 3)
        if self.json != "-":
            _print_table(result)
        elif result["stopped"]:
            print(f"note: {result['stopped']}", file=sys.stderr)
        write_json(self.json, result)
        return 0

    def _steps(self) -> int | None:
        """Steps of T_P, None for all."""
        if self.max_atoms < 1:
            raise ValueError(f"--budget {self.max_atoms}: want 1 or more")
        if self.split == "train":
            if self.height not in (None, 1):
                raise ValueError(f"--height {self.height}: want 1 for --split train, whose triples are all known facts")
            return 1
        if self.height == "fixpoint":
            return None
        steps = 3 if self.height is None else self.height
        if steps < 1:
            raise ValueError(f"--height {steps}: want 1 or more, or fixpoint")
        return steps


def _count(asked: Provable, dataset: Dataset, steps: int | None) -> dict[str, Any]:
    from funcppo.logic import fixpoint, kb

    with fixpoint_progress() as progress:
        world, sizes = kb.build(
            dataset.facts, dataset.rules, n_constants=dataset.n_constants, n_predicates=dataset.n_predicates
        )
        model = fixpoint.least_model(
            world,
            sizes,
            max_height=steps,
            max_atoms=asked.max_atoms,
            object_identity=asked.object_identity,
            progress=progress,
        )
        split = getattr(dataset, asked.split)
        is_program = not len(dataset.valid) and not len(dataset.test)
        if asked.split == "train":
            derivable = {"1": _left_out(world, sizes, split, asked.object_identity)}
        else:
            derivable = {} if is_program else _within(world, model, split, steps)
    atoms = list(model.n_atoms_after_step)
    if model.reached_fixpoint and steps is not None:
        atoms += [atoms[-1]] * (steps + 1 - len(atoms))
    return {
        "dataset": dataset.name,
        "split": None if is_program and asked.split != "train" else asked.split,
        "n_queries": len(split),
        "n_known": 0 if asked.split == "train" else int((fixpoint.atom_height(model, _rows(split)) == 0).sum()),
        "n_facts": sizes.n_facts,
        "n_rules": sizes.n_rules,
        "height": "fixpoint" if steps is None else steps,
        "derivable": derivable,
        "atoms": atoms,
        "complete": model.complete,
        "fixpoint": model.reached_fixpoint,
        "stopped": model.stop_reason,
        "seconds": round(model.seconds, 3),
        "object_identity": asked.object_identity,
        "leave_one_out": asked.split == "train",
    }


def _within(world: Any, model: LeastModel, split: np.ndarray, steps: int | None) -> dict[str, int]:
    """How many atoms of a split are derivable within each height up to the last, or to the step past the budget."""
    from funcppo.logic import fixpoint, query_answering

    rows = _rows(split)
    height = fixpoint.atom_height(model, rows)
    last = len(model.n_atoms_after_step) - 1
    if steps is not None and model.reached_fixpoint:
        last = steps
    if model.stop_reason:
        last += 1
        height = height.where((height >= 0) | ~query_answering.derived_in_next_step(world, model, rows), last)
    return {str(h): int(((height >= 0) & (height <= h)).sum()) for h in range(1, last + 1)}


def _left_out(world: Any, sizes: Any, split: np.ndarray, object_identity: bool) -> int:
    """How many facts a rule derives from other facts."""
    import torch

    from funcppo.logic import kb
    from funcppo.logic.consequences import iter_consequences

    row = kb.fact_id(world, sizes, _rows(split))
    derived = torch.zeros(sizes.n_facts, dtype=torch.bool)
    for part in iter_consequences(world, sizes, leave_one_out=True, object_identity=object_identity):
        derived = derived.index_fill(0, part.fact[part.fact >= 0], True)
    return int(derived[row].sum())


def _rows(split: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(split).long()


def _print_table(result: dict[str, Any]) -> None:
    """The counts as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    n, counted = result["n_queries"], bool(result["derivable"])
    headings = ["height", "atoms", *([f"{result['split']} derivable", f"of {n:,}"] if counted else [])]
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    past = [None] * (len(result["derivable"]) + 1 - len(result["atoms"]))  # the step taken for the split alone
    for step, atoms in enumerate([*result["atoms"], *past]):
        found = result["n_known"] if step == 0 else result["derivable"].get(str(step), 0)
        share = f"{found / n:.4f}" if n else ""
        table.add_row(*[str(step), "too many" if atoms is None else f"{atoms:,}", f"{found:,}", share][: len(headings)])
    print(f"{result['dataset']}: {result['n_facts']:,} facts, {result['n_rules']:,} rules")
    Console().print(table)
    how = "the fixpoint is reached" if result["fixpoint"] else result["stopped"] or "complete to this height"
    how += "; different variables bind different constants" if result["object_identity"] else ""
    how += "; a triple counts when a rule derives it from other facts" if result["leave_one_out"] else ""
    print(f"{how}; {result['seconds']:.2f} s")
