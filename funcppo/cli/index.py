"""`funcppo index`: a data set as a folder that every program opens at once."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from funcppo.cli.common import (
    JsonObject,
    check_overwrites,
    set_threads,
    write_json,
)
from funcppo.cli.console import make_console, show_status
from funcppo.cli.options import (
    DataOptions,
    DatasetArgument,
    JsonOutput,
    OptionalFile,
)
from funcppo.cli.target import data_files, print_notes_to_stderr
from funcppo.core.settings import PositiveInt
from funcppo.kg.graph import stored_graph
from funcppo.kg.graph.config import DEFAULT_CONFIG
from funcppo.kg.graph.loaders import load

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    import numpy as np

    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.search.task import PhaseCallback


@dataclass(frozen=True, kw_only=True)
class Index:
    """Index a data set: write it to a folder that every program opens at once, whatever its size.

    The folder holds names, triples by split, the index of the facts, and the rules with their counts, if there are any.
    Programs take it as a DATASET. They map it from the disk, so that all processes of a host share its memory. Results
    are those of the files that it was made of. A folder that exists is replaced if this program made it.

    Exit status: 0 written, 2 bad input.
    """

    dataset: DatasetArgument
    """Data set: a folder with train.txt, a file of triples (.txt, .tsv, .csv, .nt or .parquet), an embedded or
    generated name, or pykeen:NAME."""
    out: Annotated[str, arg(metavar="DIR")]
    """Folder to write; it may not exist, unless this program made it."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    threads: PositiveInt = 1
    """Number of CPU threads that an operation uses."""
    json: JsonOutput = None
    """Write sizes and seconds as JSON to FILE; - writes them to standard output in place of the text. Default: no
    JSON."""

    def run(self) -> int:
        """Write the folder.

        Returns:
          The exit status.
        """
        out = Path(self.out)
        sources = data_files(self.dataset, self.rules)
        check_overwrites([("--out", out), ("--json", self.json)], sources)
        stored_graph.check_output(out)
        set_threads(self.threads)
        result = _index(self, sources, out)
        write_json(self.json, result)
        if self.json != "-":
            print(
                f"{out}: {result['n_facts']:,} facts, {result['n_entities']:,} entities, {result['n_relations']:,} "
                f"relations, {result['n_rules']:,} rules; {result['n_bytes'] / 1e6:,.1f} MB in "
                f"{sum(result['seconds'].values()):.1f} s"
            )
        return 0


def _index(options: Index, sources: list[Path], out: Path) -> JsonObject:
    """Read, index and write the data set; returns the JSON of --json."""
    from funcppo.kg.logic import kb

    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def end_phase(name: str) -> None:
        seconds[name] = round(
            time.perf_counter() - start - sum(seconds.values()), 3
        )

    with show_status(make_console(use_stderr=True), "reading data") as status:
        dataset = load(options.dataset, options.rules, cfg=options.data)
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
        n_bytes = stored_graph.write(dataset, tables, sources, out)
        end_phase("write")
    print_notes_to_stderr(dataset.notes)
    return {
        "dataset": dataset.name,
        "fingerprint": dataset.fingerprint,
        "n_facts": len(dataset.facts),
        "n_entities": dataset.n_constants,
        "n_relations": dataset.n_predicates,
        "n_rules": len(dataset.rules),
        "n_bytes": n_bytes,
        "seconds": seconds,
    }


def _with_counts(
    dataset: Dataset, tables: dict[str, np.ndarray], on_phase: PhaseCallback
) -> Dataset:
    """The data set with the counts of its rules, so that no program makes them again."""
    if not len(dataset.rules):
        return dataset

    import torch

    from funcppo.kg.logic import kb
    from funcppo.kg.logic.consequences import count_rules
    from funcppo.kg.search.task import as_counts

    on_phase("counting rules")
    built, sizes = kb.build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
        tables=tables,
    )
    counts = count_rules(
        built,
        sizes,
        known=as_counts(dataset.rule_counts),
        progress=lambda done, total: on_phase("counting rules", done, total),
    )
    return dataclasses.replace(
        dataset, rule_counts=torch.stack(counts, dim=1).numpy()
    )
