"""`funcppo data`: what a data set is like, how much of it the rules derive, and its index."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from funcppo.cli.common import (
    JsonObject,
    OutputFolder,
    WorkDisplay,
    bounded,
    check_outputs,
    data_files,
    fixpoint_progress,
    make_console,
    make_table,
    open_dataset,
    print_notes,
    print_table,
    print_text,
    set_threads,
    write_json,
)
from funcppo.cli.options import (
    HIDDEN,
    CacheFolder,
    DataOptions,
    JsonOutput,
    Opt,
    OptionalFile,
)
from funcppo.core.host import Deadline
from funcppo.core.settings import PositiveFloat, PositiveInt, Size
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import (
    SPLITS,
    Dataset,
    StoredParts,
    describe,
)
from funcppo.kg.graph.rules import check_horn
from funcppo.kg.graph.text import escape_unprintable
from funcppo.kg.graph.triples import DEFAULT_CONFIG

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from funcppo.kg.logic.fixpoint import LeastModel
    from funcppo.kg.logic.kb import KnowledgeBase
    from funcppo.kg.search.task import PhaseCallback

MAX_NOTES = 3  # that are printed without -v
_SPLIT_COLUMNS = (
    *("split", "triples", "entities", "relations", "known"),
    *("linked\npairs", "new\nentities", "new\nrelations"),
)
_RELATION_COLUMNS = {
    "facts": "n_facts",
    "valid": "n_valid",
    "test": "n_test",
    "tails/\nhead": "tails_per_head",
    "heads/\ntail": "heads_per_tail",
    "func-\ntional": "functional_share",
    "sym-\nmetric": "symmetric_share",
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Describe a data set: splits and leaks, relations, degrees, what the rules derive; count and index it.

    Facts are those of train and facts.txt. Of a relation are shown the mean number of tails of a head and of heads of a
    tail, the share of its heads that have one tail (functional), the share of facts whose inverse it has (symmetric),
    and the other relation that has most of its facts with exchanged arguments. A pair is linked if a fact has both
    entities, either way round; of train, if another fact has.

    With --provable SPLIT the triples of a split are counted that the rules derive within height 1, 2, ... up to the
    fixpoint, beyond which nothing is derived. Their share, the ceiling, is about the most that a ranking by proofs can
    reach; `funcppo evaluate --json` has it by relation. A triple that is itself a known fact counts if other facts
    prove it, as in `funcppo evaluate`. Of train, where all are facts, that is counted at height 1. A program (.pl) has
    no split: only its atoms are counted.

    With --index DIR the data set is written to a folder that every program takes as a DATASET and opens at once,
    whatever its size: names, triples by split, the index of the facts, and the rules with their counts. Results are
    those of the files that it was made of.

    Exit status: 0 described, counted or written, 2 bad input.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo data graph.tsv",
        "funcppo data countries_s1 --provable test",
    )

    dataset: str
    """Data set: embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED),
    pykeen:NAME, a folder with train.txt, triples (text, CSV, JSON lines, RDF), or a Prolog program FILE.pl."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    provable: Literal["test", "valid", "train"] | None = None
    """Count the triples of this split that the rules derive, by height. Default: describe the data set."""
    index: CacheFolder = None
    """Write the data set to a folder that opens at once; one that exists is replaced if this program made it. Default:
    describe the data set."""
    height: Annotated[Size | Literal["fixpoint"] | None, Opt("N|fixpoint")] = (
        None
    )
    """Maximum height of a proof, or fixpoint for any. Default: 1; 3 with --provable test and valid."""
    out: Annotated[str | None, Opt("FILE", is_hidden=True)] = None
    """Write the triples to FILE, as its ending says: .tsv, .csv, .parquet or RDF. {split} in its name stands for train,
    valid and test; without it the known facts are written. Default: none."""
    object_identity: bool = False
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts). Default: off."""
    max_atoms: Annotated[PositiveInt, HIDDEN] = 50_000_000
    """Maximum number of derived atoms to hold, about 110 bytes each; the step that would exceed it is evaluated for
    the split only."""
    seconds: PositiveFloat = 300.0
    """Time limit of deriving, in seconds. The step that would exceed it is left out and reported."""
    threads: Annotated[PositiveInt | None, HIDDEN] = None
    """Number of CPU threads of an operation. Default: all cores."""
    json: JsonOutput = None
    """Write the result as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Describe, count or index the data set; return the exit status.

        Returns:
          The exit status.
        """
        sources = self._check_outputs()
        if self.threads is not None:
            set_threads(self.threads)

        if self.provable is not None:
            result, show = self._count_provable(), _print_counts
        elif self.index is not None:
            result, show = self._write_index(sources, self.index), _print_index
        elif self.out is not None:
            result = self._write_triples(self.out)
            show = lambda result: print_text("\n".join(result["files"]))
        else:
            result, show = self._describe(), _print_description
        write_json(self.json, result)
        if self.json != "-":
            show(result)
            notes = map(escape_unprintable, result.get("notes", ()))
            console = make_console(use_stderr=False)
            print_notes(notes, console, MAX_NOTES)
        elif result.get("stop_reason"):
            print_notes([result["stop_reason"]])
        return 0

    def _check_outputs(self) -> list[Path]:
        """Check the outputs before any work; return the files of the data set."""
        asked = (self.provable, self.index, self.out)
        if sum(x is not None for x in asked) > 1:
            raise ValueError(
                "--provable, --index, --set out: expected one of them"
            )
        sources = data_files(self.dataset, self.rules)
        folder = None
        if self.index is not None:
            folder = OutputFolder("--index", self.index, [loaders.STORED_FILE])
        names = (str(self.out).replace("{split}", x) for x in (*SPLITS, ""))
        written = [("--set out", x) for x in {*names} if self.out]
        outputs = [("--json", self.json), *written]
        check_outputs(outputs, sources, folder, can_be_parquet=True)
        for _, path in written:
            if Path(path).is_file():
                raise ValueError(f"--set out {path}: expected a new file")
        return sources

    def _write_triples(self, out: str) -> JsonObject:
        """Read the data set and write its triples; return the files."""
        with WorkDisplay("reading data"):
            dataset = loaders.load(self.dataset, self.rules, cfg=self.data)
            files = loaders.write_splits(dataset, out)
        print_notes(dataset.notes)
        return {"dataset": dataset.name, "files": [*map(str, files)]}

    def _derive(self, dataset: Dataset, default_height: int) -> Derived:
        """Derive the atoms that the rules entail within the options' limits.

        Args:
          default_height: maximum height of a proof without --height.
        """
        from funcppo.kg.logic import fixpoint, kb
        from funcppo.kg.logic.joins import RowBudget

        height = default_height if self.height is None else self.height
        max_height = None if height == "fixpoint" else height
        deadline = Deadline(at=time.monotonic() + self.seconds)
        with fixpoint_progress() as progress, bounded(None):
            knowledge_base, sizes = kb.from_dataset(dataset)
            model = fixpoint.least_model(
                knowledge_base,
                sizes,
                max_height=max_height,
                max_atoms=self.max_atoms,
                object_identity=self.object_identity,
                budget=RowBudget(deadline=deadline),
                progress=progress,
            )
        return Derived(knowledge_base, model, max_height, deadline)

    def _describe(self) -> JsonObject:
        """Describe the data set."""
        with WorkDisplay("reading data"):
            dataset = loaders.load(self.dataset, self.rules, cfg=self.data)
            return {
                "dataset": dataset.name,
                "n_entities": dataset.n_constants,
                "n_relations": dataset.n_predicates,
                "n_facts": len(dataset.facts),
                **describe(dataset),
            }

    def _count_provable(self) -> JsonObject:
        """Count by height the triples of a split that the rules derive."""
        start = time.perf_counter()
        dataset = open_dataset(self.dataset, self.rules, self.data)
        if not len(dataset.rules) and len(dataset.test):
            raise ValueError(
                f"{dataset.name}: expected rules (--rules FILE, as `funcppo mine` writes it, or rules.txt), got none"
            )
        is_train = self.provable == "train"
        if is_train and self.height not in (None, 1):
            raise ValueError(
                f"--height {self.height}: expected 1 for --provable train, whose triples are all known facts"
            )
        print_notes(dataset.notes, None, MAX_NOTES)
        check_horn(dataset)

        split: np.ndarray = getattr(dataset, str(self.provable))
        is_program = not len(dataset.valid) and not len(dataset.test)
        derived = self._derive(dataset, 1 if is_train else 3)
        model = derived.model
        n_known, n_undecided, n_derivable = 0, 0, {}
        if is_train or not is_program:
            height, last, n_known, n_undecided = _derivation_heights(
                derived, split, is_train=is_train
            )
            for limit in range(1, last + 1):
                is_within = (height >= 0) & (height <= limit)
                n_derivable[str(limit)] = int(is_within.sum())
        return {
            "dataset": dataset.name,
            "split": None if is_program and not is_train else self.provable,
            "n_queries": len(split),
            "n_known_facts": 0 if is_train else n_known,
            "n_facts": model.sizes.n_facts,
            "n_rules": model.sizes.n_rules,
            "height": derived.max_height or "fixpoint",
            "stop_reason": model.stop_reason,
            "stop_code": model.stop_code,
            "n_undecided_facts": n_undecided,
            "n_derivable_by_height": n_derivable,
            "n_atoms_after_step": list(model.n_atoms_after_step),
            "complete": model.complete,
            "fixpoint": model.reached_fixpoint,
            "fixpoint_seconds": round(model.seconds, 3),
            "object_identity": self.object_identity,
            "leave_one_out": is_train,
            "total_seconds": round(time.perf_counter() - start, 3),
        }

    def _write_index(self, sources: list[Path], out: Path) -> JsonObject:
        """Read, index and write the data set; return its sizes and the seconds of each phase."""
        from funcppo.kg.logic import kb

        seconds: dict[str, float] = {}
        start = time.perf_counter()

        def end_phase(name: str) -> None:
            past = sum(seconds.values())
            seconds[name] = round(time.perf_counter() - start - past, 3)

        with WorkDisplay("reading data") as status:
            dataset = loaders.load(self.dataset, self.rules, cfg=self.data)
            end_phase("read")
            status.update(f"indexing {len(dataset.facts):,} facts")
            tables = kb.index_facts(
                dataset.facts,
                n_constants=dataset.n_constants,
                n_predicates=dataset.n_predicates,
            )
            end_phase("index")
            dataset = _with_counts(dataset, tables, status.update)
            end_phase("count rules")
            status.update("writing")
            n_bytes = loaders.write(dataset, tables, sources, out)
            end_phase("write")
        print_notes(dataset.notes, None, MAX_NOTES)
        return {
            "dataset": dataset.name,
            "folder": str(out),
            "fingerprint": dataset.fingerprint,
            "n_facts": len(dataset.facts),
            "n_entities": dataset.n_constants,
            "n_relations": dataset.n_predicates,
            "n_rules": len(dataset.rules),
            "n_bytes": n_bytes,
            "seconds": seconds,
        }


# -- what the rules derive


class Derived(NamedTuple):
    """Least model of a data set, as far as the limits allowed."""

    knowledge_base: KnowledgeBase
    model: LeastModel
    max_height: int | None  # asked for; None for the fixpoint
    deadline: Deadline  # of all that is derived


def _derivation_heights(
    derived: Derived, split: np.ndarray, *, is_train: bool = False
) -> tuple[Tensor, int, int, int]:
    """Compute the height at which each atom of a split is derived, a fact from other facts.
    Return the heights [Q], the last height, the number of facts, and that of undecided ones.

    The last height is that of the model, which ends at the fixpoint, or of the step that would have exceeded the atoms
    to hold: that step is evaluated for the split only. The proof of a fact from other facts may need more.

    Args:
      derived: neither that step nor facts are evaluated after its deadline.
      is_train: all atoms are facts, which are proved at height 1.
    """
    import torch

    from funcppo.kg.logic import derive, fixpoint, prove
    from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded

    knowledge_base, model, max_height, deadline = derived
    budget = RowBudget(deadline=deadline)
    atoms = torch.from_numpy(split).long()
    height = fixpoint.atom_height(model, atoms)
    last_height = len(model.n_atoms_after_step) - 1
    if model.stop_reason and not deadline.is_over and not is_train:
        with suppress(RowBudgetExceeded):
            derived_next = derive.derived_in_next_step(
                knowledge_base, model, atoms, budget
            )
            last_height += 1
            height = height.where((height >= 0) | ~derived_next, last_height)
    is_fact = height == 0
    limit = last_height if model.stop_reason else max_height
    limits = prove.Limits(
        max_height=1 if is_train else limit,
        object_identity=model.object_identity,
        budget=RowBudget(deadline=deadline),
    )
    found = prove.fact_heights(
        knowledge_base, model.sizes, atoms[is_fact], limits
    )
    height = height.masked_scatter(is_fact, found.height)
    last_height = max([last_height, *found.height.tolist()])
    last_height = 1 if is_train else last_height
    return height, last_height, int(is_fact.sum()), found.n_undecided


def _with_counts(
    dataset: Dataset, tables: dict[str, np.ndarray], on_phase: PhaseCallback
) -> Dataset:
    """Return the data set with the counts of its rules, so that no later program needs to count."""
    # Rules with conditions are not counted.
    if not len(dataset.rules) or dataset.rules[:, :, 0].min() < 0:
        return dataset
    from funcppo.kg.search.task import with_rule_counts

    stored = StoredParts(dataset=dataset, fact_tables=tables)
    indexed = dataclasses.replace(dataset, stored=stored)
    return with_rule_counts(indexed, on_phase, with_estimates=False)[0]


# -- printing


def _print_rows(console: Console, rows: Sequence[JsonObject]) -> None:
    """Print rows as a table with their keys as headings, of which `inverse` holds texts."""
    table = make_table("", [*rows[0]], texts=("inverse",))
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    print_table(console, table)


def _cell(value: str | float | None) -> str:
    """Format a value; empty if it is None, which means undefined."""
    if isinstance(value, str):
        return escape_unprintable(value)
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _print_description(result: JsonObject) -> None:
    """Print the description as tables."""
    console = make_console(use_stderr=False)
    console.print(
        f"{escape_unprintable(result['dataset'])}: {result['n_entities']:,} entities, "
        f"{result['n_relations']:,} relations, {result['n_facts']:,} facts"
    )
    rows = [
        dict(zip(_SPLIT_COLUMNS, (name, *split.values())))
        for name, split in result["splits"].items()
    ]
    _print_rows(console, rows)
    _print_relations(console, result["relations"])
    quantiles = ", ".join(
        f"{share}: {value:g}"
        for share, value in result["degree_quantiles"].items()
    )
    console.print(f"facts of an entity, quantiles: {quantiles}")


def _print_relations(console: Console, relations: Sequence[JsonObject]) -> None:
    """Print the forty largest relations."""
    rows: list[JsonObject] = []
    for relation in relations[:40]:
        inverse = relation["inverse"]
        row = {"relation": relation["name"]}
        row |= {x: relation[key] for x, key in _RELATION_COLUMNS.items()}
        share = _cell(relation["inverse_share"])
        row["inverse"] = inverse and f"{inverse} {share}"
        rows.append(row)
    if rows:
        _print_rows(console, rows)
    n_more = len(relations) - len(rows)
    if n_more > 0:
        console.print(f"... and {n_more:,} smaller relations (--json FILE)")


def _print_index(result: JsonObject) -> None:
    """Print the sizes of an index and its folder."""
    print_text(
        f"{result['folder']}: {result['n_facts']:,} facts, {result['n_entities']:,} entities, "
        f"{result['n_relations']:,} relations, {result['n_rules']:,} rules; {result['n_bytes'] / 1e6:,.1f} MB in "
        f"{sum(result['seconds'].values()):.1f} s"
    )


def _print_counts(result: JsonObject) -> None:
    """Print the counts by height as a table, and how far they reach."""
    console = make_console(use_stderr=False)
    console.print(
        f"{result['dataset']}: {result['n_facts']:,} facts, {result['n_rules']:,} rules"
    )
    n_atoms = result["n_atoms_after_step"]
    n_derivable = {"0": 0, **result["n_derivable_by_height"]}
    n_queries = result["n_queries"]
    rows: list[JsonObject] = []
    # The split may be counted beyond the last step.
    beyond = "not held" if result["stop_reason"] else n_atoms[-1]
    for step in range(max(len(n_atoms), len(n_derivable))):
        atoms = n_atoms[step] if step < len(n_atoms) else beyond
        row = {"height": str(step), "atoms": atoms}
        if result["split"]:
            n = n_derivable.get(str(step), 0)
            row[f"{result['split']} derivable"] = n
            share = f"{n / n_queries:.4f}" if n_queries else ""
            row[f"of {n_queries:,}"] = share
        rows.append(row)
    _print_rows(console, rows)

    extent = result["stop_reason"] or "complete to this height"
    if result["fixpoint"]:
        extent = f"the fixpoint is reached at height {len(n_atoms) - 1}"
    if result["n_known_facts"] or result["leave_one_out"]:
        extent += "; a triple that is a known fact counts if a rule derives it from other facts"
    if result["n_undecided_facts"]:
        extent += f": of {result['n_undecided_facts']:,} this was not decided, and they do not count"
    console.print(f"{extent}; {result['fixpoint_seconds']:.2f} s")
