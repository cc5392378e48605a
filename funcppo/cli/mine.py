"""`funcppo mine`: rules from the training triples of a data set."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from funcppo.cli import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated
from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    check_outputs,
    data_files,
    lock_output,
    make_console,
    memory_limit,
    print_notes,
    select_device,
    write_json,
    write_output,
)
from funcppo.cli.options import (
    HIDDEN,
    DataOptions,
    JsonOutput,
    MemoryOption,
    Opt,
)
from funcppo.core.settings import (
    DeviceName,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    UnitInterval,
)
from funcppo.kg.graph.triples import DEFAULT_CONFIG
from funcppo.kg.mining import MAX_PATH_LENGTH, MiningConfig

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.run.rule_files import MinedDataset

_DEFAULT = MiningConfig()


@dataclass(frozen=True, kw_only=True)
class Mine:
    """Mine rules from the training triples of a data set and write them with their counts.

    The rules are closed paths h(X,Y) :- b1(X,Z), b2(Z,Y), each atom in either direction, and, with constants,
    h(X,c) :- b(X,Z), h(X,c) :- b(X,d), and the same with h(X,X). A rule is kept if it is the most
    confident one for some fact that it derives from other facts. The same options give the same file, unless the time
    is over before the work; a note then says so. Ctrl-C or SIGTERM ends the search, and the rules found by then are
    written.

    Exit status: 0 written, also if no rule was found; 2 bad input; 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo mine graph.tsv --out rules.tsv --seconds 60",
        "funcppo mine countries_s1 --out rules.txt --format AnyBURL",
    )

    dataset: str
    """Data set: embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED),
    a folder with train.txt, triples (text, CSV, JSON lines, RDF), or a Prolog program FILE.pl. Only the training
    triples are read; valid and test are not used."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    out: Annotated[Path, Opt("FILE|-")]
    """Rule file to write, or to replace; - writes to standard output."""
    format: Literal["tsv", "AnyBURL"] = "tsv"
    """Format of the rule file: funcppo's own table (tsv), or AnyBURL (also read by PyClause, which count under object
    identity). funcppo reads both."""
    max_length: Annotated[int, Range(1, MAX_PATH_LENGTH)] | None = None
    """Maximum number of atoms in a rule body, 1 to 5. Paths of 4 and 5 atoms are for sparse graphs: relations with too
    many of them are left out. Default: 3; 2 in a tiny dense graph (at most 2,000 facts, at least one for each pair of
    entities); 5 in a large sparse one (more than 50,000 facts, at most three for each entity)."""
    min_support: PositiveInt | None = None
    """Minimum support: facts that a rule derives from other facts. Default: 5; 3 in a tiny dense graph."""
    min_confidence: UnitInterval = _DEFAULT.min_confidence
    """Minimum leave-one-out confidence, 0 to 1."""
    constants: bool = True
    """Mine rules with constants too, h(X,c) :- b(X,Z) and h(X,c) :- b(X,d), and with h(X,X) in place of h(X,c).
    Default: on."""
    votes_per_fact: Annotated[PositiveInt | None, HIDDEN] = None
    """Keep a rule if it is among the N best rules for at least one fact that it derives. Default: 1; 3 in a tiny dense
    graph, and in one of 2,000 to 50,000 facts."""
    seconds: PositiveFloat = _DEFAULT.seconds
    """Time limit in seconds, without reading the data. It also sets max_rows, 7 million a second."""
    max_rows: Annotated[PositiveInt | None, HIDDEN] = _DEFAULT.max_rows
    """Maximum rows of work: what exceeds it is sampled, and what is too much even so is left out. Default: by
    --seconds."""
    memory: MemoryOption = None
    """Memory limit of this process, or of the GPU: a number of bytes or with a unit, such as 2GB or 512MiB. Default:
    three quarters of what is free."""
    seed: Annotated[Seed, HIDDEN] = _DEFAULT.seed
    """Random seed of the samples."""
    device: DeviceName = "cpu"
    """Device to count on: cpu, cuda, or cuda:N for GPU number N."""
    json: JsonOutput = None
    """Write a summary as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Mine the rules, write them and print a summary; return the exit status.

        Returns:
          The exit status.
        """
        select_device(self.device)
        self._check_outputs()
        with lock_output(self.out):
            return self._run()

    def _run(self) -> int:
        """Mine into a file that no other process writes; return the exit status."""
        from funcppo.kg.graph.loaders import load
        from funcppo.kg.run import rule_files
        from funcppo.runtime import memory

        start = time.perf_counter()
        console = make_console(str(self.out) == "-" or self.json == "-")
        with WorkDisplay("reading"):
            dataset = load(self.dataset, train_only=True, cfg=self.data)
            limit = memory_limit(self.memory, self.device)
            cfg = self._config(dataset)
            rule_files.check_memory(dataset, limit, self.device, cfg.max_length)
        memory.reset_peak(self.device)

        with WorkDisplay("mining rules") as display:
            mined = rule_files.mine_dataset(
                dataset, cfg, self.device, display.report
            )
        self._write(mined)
        summary = _summarise(mined) | {
            "settings": asdict(cfg),
            "file_format": self.format,
            "out": str(self.out),
            "total_seconds": round(time.perf_counter() - start, 3),
            "memory_limit_bytes": limit,
            "peak_bytes": memory.peak_bytes(self.device),
        }
        write_json(self.json, summary)
        notes = (*dataset.notes, *mined.result.notes)
        print_notes(notes, console, 3)
        _print_summary(console, mined, summary)
        interrupt = mined.result.interrupt
        if isinstance(interrupt, Terminated):
            return EXIT_TERMINATED
        return 0 if interrupt is None else EXIT_INTERRUPTED

    def _write(self, mined: MinedDataset) -> None:
        """Write the rules to the file or to standard output."""
        from funcppo.kg.graph.rules import format_rule_table
        from funcppo.kg.run import rule_files

        rules, counts, _ = mined
        if str(self.out) == "-":
            write_output(format_rule_table(rules, counts, self.format))
        else:
            rule_files.write_rule_file(self.out, rules, counts, self.format)

    def _config(self, dataset: Dataset) -> MiningConfig:
        """Build the miner's settings from the options; options not given take the data set's defaults."""
        from funcppo.kg.run import rule_files

        names = [field.name for field in fields(MiningConfig)]
        options = {name: getattr(self, name) for name in names}
        given = {k: v for k, v in options.items() if v is not None}
        return rule_files.mining_config(dataset, **given)

    def _check_outputs(self) -> None:
        """Check the output files before any work."""
        # Rules are not read, and may be written beside the triples.
        triple_files = [
            path
            for path in data_files(self.dataset)
            if not path.name.startswith("rules.")
        ]
        outputs = [("--out", self.out), ("--json", self.json)]
        check_outputs(outputs, triple_files)


def _summarise(mined: MinedDataset) -> JsonObject:
    """Build the JSON of --json, without settings, time, memory and files."""
    from funcppo.kg.mining.counts import SAME_ENTITY

    rules, _, result = mined
    kinds = {SAME_ENTITY: "with a head h(X, X)", 0: "of length {}"}
    columns = result.rules.body_length, result.rules.end_constants[:, 0]
    n_by_kind = Counter(
        kinds.get(head_end, "with constants").format(length)
        for length, head_end in zip(*(x.tolist() for x in columns))
    )
    return {
        "dataset": rules.name,
        "n_facts": len(rules.facts),
        "n_rules": len(rules.rules),
        "n_rules_by_kind": dict(sorted(n_by_kind.items())),
        "n_candidate_rules": result.n_candidates,
        "stages": [asdict(stage) for stage in result.stages],
        "rows": result.rows,
        "max_rows": result.max_rows,
        "interrupted": result.interrupt is not None,
        "mining_seconds": round(result.seconds, 3),
        "notes": result.notes,
    }


def _print_summary(
    console: Console, mined: MinedDataset, summary: JsonObject
) -> None:
    """Print the number of rules of each kind, and the first rules with support, body pairs and confidence."""
    from funcppo.kg.graph.rules import format_rule

    rules, counts, _ = mined
    kinds = [f"{n} {kind}" for kind, n in summary["n_rules_by_kind"].items()]
    console.print(
        f"{rules.name}: {summary['n_rules']} rules ({', '.join(kinds) or 'none'}) of {summary['n_candidate_rules']} "
        f"candidates in {summary['mining_seconds']:.1f} s: {summary['out']}"
    )
    if not kinds:
        reason = f"{summary['n_facts']} facts give no rule"
        if not all(stage["is_finished"] for stage in summary["stages"]):
            reason = "the limits of --seconds and max_rows left no rule"
        cfg = summary["settings"]
        console.print(
            f"{reason} with support {cfg['min_support']} and confidence {cfg['min_confidence']:g}"
        )
    for i, rule in enumerate(rules.rules[:5]):
        support, body_pairs = counts.support[i], counts.body_pairs[i]
        console.print(
            f"{support:8.0f} of {body_pairs:8.0f}  {support / body_pairs:.3f}  {format_rule(rules, rule)}"
        )
