"""`funcppo provable`: how many triples of a split the rules derive, step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from funcppo.cli.common import JsonObject, check_overwrites, write_json
from funcppo.cli.options import (
    DataOptions,
    DatasetArgument,
    JsonOutput,
    OptionalFile,
)
from funcppo.cli.target import (
    data_files,
    fixpoint_progress,
    open_dataset,
    print_notes_to_stderr,
)
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import PositiveFloat, PositiveInt, Size
from funcppo.kg.graph.config import DEFAULT_CONFIG
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.logic.fact_proofs import FactHeights
    from funcppo.kg.logic.fixpoint import HeadsOfRules, LeastModel
    from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
    from funcppo.kg.logic.relations import Columns

DEFAULT_HEIGHT = 3
# of the rules, so that no process waits long for the last one
PARTS_PER_PROCESS = 8


@dataclass(frozen=True, kw_only=True)
class Provable:
    """Count the triples of a split that the rules derive from the training facts within height 1, 2, ...

    The counts end at the fixpoint, beyond which nothing is derived. A triple that is itself a known fact counts if
    other facts prove it, as in `funcppo evaluate`. With `--split train`, where all are facts, that is counted at
    height 1. A program (.pl) has no split: only its atoms are counted. The step that would exceed --max-atoms is
    evaluated for the split only.

    Exit status: 0 counted (`complete` in the JSON is false if --max-atoms or --seconds ended it early), 2 bad input.
    """

    dataset: DatasetArgument
    """Data set: embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED),
    a folder with train.txt, a file of triples (.txt, .tsv, .csv or .nt), or a Prolog program FILE.pl."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    split: Literal["test", "valid", "train"] = "test"
    """Split whose triples are counted; train counts facts derivable from other facts, at height 1."""
    height: Annotated[
        Size | Literal["fixpoint"] | None, arg(metavar="N|fixpoint")
    ] = None
    """Number of steps of the immediate-consequence operator T_P, or fixpoint for all. Default: 3, and 1 with --split
    train."""
    object_identity: bool = False
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts). Default: off."""
    max_atoms: PositiveInt = 50_000_000
    """Maximum number of atoms to hold, about 110 bytes each; the step that would exceed it is evaluated for the split
    only."""
    out_of_core: bool = False
    """Where more atoms are derived than --max-atoms, count them all by DuckDB (extra `big`), which holds what does not
    fit in memory on the disk, in a folder below TMPDIR; --seconds does not bound it. Default: off."""
    seconds: Annotated[PositiveFloat, arg(metavar="SECONDS")] = 300.0
    """Time limit of T_P in one process, in seconds. The step that would exceed it is left out and reported. Several
    processes have no limit."""
    json: JsonOutput = None
    """Write the result as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Count the triples and print the table.

        Returns:
          The exit status.
        """
        max_height = self._max_height()
        processes = distributed.current_processes()
        if processes is not None and not processes.is_main:
            _count(self, self._open_dataset(processes), max_height, processes)
            return 0
        from funcppo.kg.logic.fixpoint import StopCode

        check_overwrites(
            [("--json", self.json)], data_files(self.dataset, self.rules)
        )
        start = time.perf_counter()
        dataset = self._open_dataset(processes)
        result = _count(self, dataset, max_height, processes)
        is_too_large = result["stop_code"] == StopCode.MAX_ATOMS
        if is_too_large and self.out_of_core:
            result = _count_out_of_core(self, dataset, max_height)
        result["total_seconds"] = round(time.perf_counter() - start, 3)
        write_json(self.json, result)
        if self.json != "-":
            _print_table(result)
        elif result["stop_reason"]:
            print(f"note: {result['stop_reason']}", file=sys.stderr)
        return 0

    def _open_dataset(self, processes: Processes | None) -> Dataset:
        """The data set, the same in all processes.

        Raises:
          ValueError: it has no rules, or another process has other data.
        """
        dataset = open_dataset(self.dataset, self.rules, self.data)
        if not len(dataset.rules) and len(dataset.test):
            raise ValueError(
                f"{dataset.name}: expected rules (--rules FILE, as `funcppo mine` writes it, or rules.txt), got none"
            )
        print_notes_to_stderr(dataset.notes)
        if processes is not None:
            processes.check_equal("setup", {"data": dataset.fingerprint})
        return dataset

    def _max_height(self) -> int | None:
        """The number of steps of T_P; None for all."""
        if self.split == "train":
            if self.out_of_core:
                raise ValueError(
                    "--out-of-core: expected --split valid or test, whose atoms are counted, got train"
                )
            if self.height not in (None, 1):
                raise ValueError(
                    f"--height {self.height}: expected 1 for --split train, whose triples are all known facts"
                )
            return 1
        if self.height == "fixpoint":
            return None
        return DEFAULT_HEIGHT if self.height is None else self.height


def _count(
    options: Provable,
    dataset: Dataset,
    max_height: int | None,
    processes: Processes | None,
) -> JsonObject:
    """The JSON of --json, without the total time.

    Of several processes each derives some of the rules' heads; what is counted is that of rank 0.
    """
    from funcppo.kg.logic import fixpoint, kb
    from funcppo.kg.logic.joins import RowBudget

    # Several processes would stop at different steps.
    deadline = NO_DEADLINE
    if processes is None:
        deadline = Deadline(at=time.monotonic() + options.seconds)
    split: np.ndarray = getattr(dataset, options.split)
    is_train = options.split == "train"
    is_program = not len(dataset.valid) and not len(dataset.test)

    with fixpoint_progress() as progress:
        knowledge_base, sizes = kb.from_dataset(dataset)
        model = fixpoint.least_model(
            knowledge_base,
            sizes,
            max_height=max_height,
            max_atoms=options.max_atoms,
            object_identity=options.object_identity,
            budget=RowBudget(sys.maxsize, deadline=deadline),
            progress=progress,
            share=processes and partial(_share_step, processes),
        )

        n_derivable: dict[str, int] = {}
        n_undecided = 0
        if is_train:
            n_derivable["1"] = _count_leave_one_out(
                knowledge_base,
                sizes,
                split,
                options.object_identity,
                processes,
            )
        elif processes is not None and not processes.is_main:
            pass  # rank 0 counts
        elif not is_program:
            n_derivable, n_undecided = _count_by_height(
                knowledge_base, model, split, max_height, deadline
            )

    n_known_facts = 0
    if not is_train:
        n_known_facts = int(
            (fixpoint.atom_height(model, _as_tensor(split)) == 0).sum()
        )
    return {
        "dataset": dataset.name,
        "split": None if is_program and not is_train else options.split,
        "n_queries": len(split),
        "n_known_facts": n_known_facts,
        "n_facts": sizes.n_facts,
        "n_rules": sizes.n_rules,
        "height": "fixpoint" if max_height is None else max_height,
        "n_undecided_facts": n_undecided,
        "n_derivable_by_height": n_derivable,
        "n_atoms_after_step": list(model.n_atoms_after_step),
        "complete": model.complete,
        "fixpoint": model.reached_fixpoint,
        "stop_reason": model.stop_reason,
        "stop_code": model.stop_code,
        "fixpoint_seconds": round(model.seconds, 3),
        "object_identity": options.object_identity,
        "leave_one_out": is_train,
        "out_of_core": False,
    }


def _count_out_of_core(
    options: Provable,
    dataset: Dataset,
    max_height: int | None,
) -> JsonObject:
    """As `_count` in one process, of atoms that do not fit in memory."""
    from funcppo.kg.logic import duckdb_fixpoint, fact_proofs, kb
    from funcppo.kg.logic.joins import RowBudget

    knowledge_base, sizes = kb.from_dataset(dataset)
    start = time.perf_counter()
    split: np.ndarray = getattr(dataset, options.split)
    counts = duckdb_fixpoint.count_steps(
        knowledge_base,
        sizes,
        _as_tensor(split),
        max_height=max_height,
        object_identity=options.object_identity,
    )
    last_height = len(counts.n_atoms_after_step) - 1
    is_fact = counts.height == 0
    found = fact_proofs.fact_heights(
        knowledge_base,
        sizes,
        _as_tensor(split)[is_fact],
        max_height=max_height,
        max_atoms=options.max_atoms,
        budget=RowBudget(fact_proofs.MAX_FACT_ROWS),
        object_identity=options.object_identity,
    )
    height = counts.height.masked_scatter(is_fact, found.height)
    last_height = max([last_height, *found.height.tolist()])
    n_derivable = _count_heights(height, last_height)
    is_program = not len(dataset.valid) and not len(dataset.test)
    return {
        "dataset": dataset.name,
        "split": None if is_program else options.split,
        "n_queries": len(split),
        "n_known_facts": int(is_fact.sum()),
        "n_facts": sizes.n_facts,
        "n_rules": sizes.n_rules,
        "height": "fixpoint" if max_height is None else max_height,
        "n_undecided_facts": found.n_undecided,
        "n_derivable_by_height": {} if is_program else n_derivable,
        "n_atoms_after_step": list(counts.n_atoms_after_step),
        "complete": True,
        "fixpoint": counts.reached_fixpoint,
        "stop_reason": "",
        "stop_code": None,
        "fixpoint_seconds": round(time.perf_counter() - start, 3),
        "object_identity": options.object_identity,
        "leave_one_out": False,
        "out_of_core": True,
    }


def _count_by_height(
    knowledge_base: KnowledgeBase,
    model: LeastModel,
    split: np.ndarray,
    max_height: int | None,
    deadline: Deadline,
) -> tuple[dict[str, int], int]:
    """The number of atoms of a split that are derivable within each height, and of those that are not decided.

    The heights go up to the last one of `derivation_heights`.
    """
    found, last_height = derivation_heights(
        knowledge_base, model, split, max_height, deadline
    )
    return _count_heights(found.height, last_height), found.n_undecided


def _count_heights(height: Tensor, last_height: int) -> dict[str, int]:
    """The number of atoms that are derived within each height."""
    counts: dict[str, int] = {}
    for limit in range(1, last_height + 1):
        counts[str(limit)] = int(((height >= 0) & (height <= limit)).sum())
    return counts


def derivation_heights(
    knowledge_base: KnowledgeBase,
    model: LeastModel,
    split: np.ndarray,
    max_height: int | None,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[FactHeights, int]:
    """The height at which each atom of a split is derived, a fact from other facts, and the last height.

    The last height is that of the model, which ends at the fixpoint, or of the step that would have exceeded the atoms
    to hold: that step is evaluated for the split only. The proof of a fact from other facts may need more.

    Args:
      max_height: what the model was asked for; None for the fixpoint.
      deadline: when the evaluation ends; neither that step nor facts are evaluated then.
    """
    from funcppo.kg.logic import fact_proofs, fixpoint
    from funcppo.kg.logic.fact_proofs import FactHeights
    from funcppo.kg.logic.joins import RowBudget

    atoms = _as_tensor(split)
    height = fixpoint.atom_height(model, atoms)
    last_height = len(model.n_atoms_after_step) - 1
    if model.stop_reason and not deadline.is_over:
        last_height += 1
        derived_next = fixpoint.derived_in_next_step(
            knowledge_base, model, atoms
        )
        height = height.where((height >= 0) | ~derived_next, last_height)
    is_fact = height == 0
    found = fact_proofs.fact_heights(
        knowledge_base,
        model.sizes,
        atoms[is_fact],
        max_height=last_height if model.stop_reason else max_height,
        max_atoms=sys.maxsize,  # they are among those of the model
        budget=RowBudget(fact_proofs.MAX_FACT_ROWS, deadline=deadline),
        object_identity=model.object_identity,
    )
    height = height.masked_scatter(is_fact, found.height)
    last_height = max([last_height, *found.height.tolist()])
    return FactHeights(height, found.n_undecided), last_height


def _share_step(
    processes: Processes, step: int, heads_of: HeadsOfRules
) -> Iterator[dict[int, Columns]]:
    """Share the rules of a step of T_P; see `fixpoint.ShareStep`."""
    from funcppo.runtime.task_pool import decode, encode

    n_parts = PARTS_PER_PROCESS * processes.world_size
    for block in processes.iter_results(
        f"part of step {step}",
        n_parts,
        lambda part: encode(heads_of(part, n_parts)),
        everywhere=True,
    ):
        yield decode(block, "cpu")


def _count_leave_one_out(
    knowledge_base: KnowledgeBase,
    sizes: KBSizes,
    split: np.ndarray,
    object_identity: bool,
    processes: Processes | None,
) -> int:
    """The number of facts of a split that a rule derives from other facts; of several processes rank 0 counts all."""
    import torch

    from funcppo.kg.logic import kb
    from funcppo.kg.logic.consequences import iter_consequences
    from funcppo.runtime.task_pool import decode, encode

    is_derived = torch.zeros(sizes.n_facts, dtype=torch.bool)

    def derived_facts(part: int) -> Iterator[Tensor]:
        for consequences in iter_consequences(
            knowledge_base,
            sizes,
            rule_ids=range(part, sizes.n_rules, n_parts),
            leave_one_out=True,
            object_identity=object_identity,
        ):
            yield consequences.fact[consequences.fact >= 0]

    if processes is None:
        n_parts = 1
        found = derived_facts(0)
    else:
        n_parts = PARTS_PER_PROCESS * processes.world_size
        blocks = processes.iter_results(
            "part of the rules",
            n_parts,
            lambda part: encode(torch.cat([*derived_facts(part)]).unique()),
        )
        found = (decode(block, "cpu") for block in blocks)
    for fact in found:
        is_derived = is_derived.index_fill(0, fact, True)
    fact_row = kb.fact_id(knowledge_base, sizes, _as_tensor(split))
    return int(is_derived[fact_row].sum())


def _as_tensor(split: np.ndarray) -> Tensor:
    """The atoms of a split as int64 [Q, W]."""
    import torch

    return torch.from_numpy(split).long()


def _print_table(result: JsonObject) -> None:
    """Print the counts as a table on standard output, and how far they reach."""
    from rich.table import Table

    from funcppo.cli.console import make_console

    console = make_console(use_stderr=False)
    console.print(
        f"{result['dataset']}: {result['n_facts']:,} facts, {result['n_rules']:,} rules"
    )

    table = Table()
    headings = ["height", "atoms"]
    if result["split"]:
        headings += [
            f"{result['split']} derivable",
            f"of {result['n_queries']:,}",
        ]
    for heading in headings:
        table.add_column(heading, justify="right")
    for cells in _table_rows(result):
        table.add_row(*cells[: len(headings)])
    console.print(table)

    _print_extent(console, result)


def _table_rows(result: JsonObject) -> list[list[str]]:
    """Height, atoms, derivable triples and their fraction for each step, step 0 first."""
    n_queries = result["n_queries"]
    n_atoms = [f"{n:,}" for n in result["n_atoms_after_step"]]
    n_more = len(result["n_derivable_by_height"]) + 1 - len(n_atoms)
    # A last step was evaluated for the split only; past the fixpoint there are proofs of known facts from others.
    n_atoms += n_more * ["too many" if result["stop_reason"] else n_atoms[-1]]

    rows = []
    for step, atoms in enumerate(n_atoms):
        n_derivable = result["n_derivable_by_height"].get(str(step), 0)
        fraction = f"{n_derivable / n_queries:.4f}" if n_queries else ""
        rows.append([str(step), atoms, f"{n_derivable:,}", fraction])
    return rows


def _print_extent(console: Console, result: JsonObject) -> None:
    """Print how far the counts reach and what they count."""
    parts = [result["stop_reason"] or "complete to this height"]
    if result["fixpoint"]:
        height = len(result["n_atoms_after_step"]) - 1
        parts = [f"the fixpoint is reached at height {height}"]
    if result["out_of_core"]:
        parts.append("counted by DuckDB, out of core")

    # what counts as a proof
    if result["object_identity"]:
        parts.append(
            "object identity: the variables of a rule bind different constants, none of which it names"
        )
    if result["leave_one_out"]:
        parts.append("a triple counts if a rule derives it from other facts")
    elif result["n_known_facts"]:
        parts.append(
            f"{result['n_known_facts']:,} triples are known facts: they count if other facts prove them"
        )
    if result["n_undecided_facts"]:
        parts.append(
            f"of {result['n_undecided_facts']:,} this was not decided: they do not count"
        )

    parts.append(f"{result['fixpoint_seconds']:.2f} s")
    console.print("; ".join(parts))
