"""`funcppo evaluate`: how well a trained run or an untrained score ranks a split."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from funcppo.cli.common import (
    Interrupt,
    JsonObject,
    WorkDisplay,
    check_overwrites,
    data_files,
    debug_files,
    debug_mode,
    defer_interrupt,
    graphs_allowed,
    is_run_folder,
    lock_output,
    make_console,
    metrics_exported,
    metrics_table,
    print_notes,
    print_table,
    set_caches,
    set_target_threads,
    write_json,
)
from funcppo.cli.evaluation_setup import (
    CompileChoice,
    EvaluationSetup,
    prepare_evaluation,
    search_notes,
)
from funcppo.cli.options import (
    HIDDEN,
    CacheFolder,
    CudaGraphs,
    MemoryOption,
    MetricsPort,
    Opt,
    OptionalFile,
    ScoreOptions,
)
from funcppo.core.settings import PositiveInt, Seed
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from funcppo.core.record_log import Record, RecordLog
    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.ranking.evaluator import Evaluator
    from funcppo.kg.run.telemetry import Exporter


@dataclass(frozen=True, kw_only=True)
class Evaluate(ScoreOptions):
    """Evaluate a trained run or an untrained score by filtered link-prediction ranking on a split.

    A run is evaluated with its policy, a data set with a score that needs no training. Candidates are filtered by all
    splits; ties count by their expectation under random order.

    With --details FILE, each query and side is a line of JSON in FILE as soon as it is ranked: the rank of the
    answer first, last and in the middle of its equals; the numbers of better, of equal and of all candidates, which
    every rank follows from; the score of the answer (log_score, its natural logarithm, and quantised_score, its
    log-odds in steps of 1e-4, by which candidates are compared); its status: proved, refuted, or missed (provable,
    but not found by the search); a proof; by a score with other facts what these add (other_facts); and
    near_boundary: whether some score is so near to the edge of a step that another machine or batch size could rank
    it otherwise. The summary is computed from these lines. Ctrl-C or
    SIGTERM ends the evaluation after the queries in progress, a second one at once; a later --resume continues it.

    Exit status: 0 ranked, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    split: Literal["test", "valid"] = "test"
    """Split whose queries are ranked."""
    negatives: Annotated[str, Opt("all|N")] = "all"
    """Candidates of each query and side: all entities, or N sampled corruptions."""
    score: str = "auto"
    """Score of a candidate. For a run: evidence if it learnt from questions; success, best-proof or greedy if from
    proofs. For both: exists@H (derivable within height H), max-confidence,
    noisy-or, noisy-or@P (confidences raised to the power
    P, so that many weak rules add up to less), or noisy-or-top-N (of the N most confident rules); with
    -other-facts at its end, as in noisy-or-other-facts, it also counts whether a candidate has other facts of the
    relation (not with exists@H).
    Default: auto, that of the run's policy or its rule score, whichever ranks valid better; for a data set the one that
    ranks its valid split best."""
    max_queries: PositiveInt | None = None
    """Rank at most N queries, a random sample, always the same one. Default: all queries."""
    seed: Seed = 0
    """Random seed of the sampled corruptions; unused with --negatives all."""
    debug: bool = False
    """Run as a bug report needs it: record nothing, wait for each kernel, use deterministic algorithms, print
    tracebacks, and say what to attach. Default: off."""
    compile: CompileChoice = "auto"
    """Compile the search of a policy as one graph, after its batch size is chosen. auto: on a GPU, for so many
    candidates that it saves more time than it takes, half a minute with an empty cache; on: always, and it is an error
    where that fails; off: never."""
    cuda_graphs: CudaGraphs = "auto"
    """Replay the search as CUDA graphs on a GPU. auto: where they can be recorded; off: never, to rule them out;
    manual: always, and it is an error where one cannot be recorded."""
    cache_dir: CacheFolder = None
    """Folder for compiled code, as --cache-dir of `funcppo train`. Default: $XDG_CACHE_HOME/funcppo."""
    memory: MemoryOption = None
    """Memory limit of this process, or of the GPU: a number of bytes or with a unit, such as 2GB or 512MiB. The batch
    size is tuned within it. Default: what it holds and three quarters of what is free."""
    details: OptionalFile = None
    """Write one JSON line per query and side to FILE, as soon as it is ranked. Default: no file."""
    resume: bool = False
    """Continue an interrupted evaluation from the lines in the --details FILE. Default: off."""
    overwrite: bool = False
    """Replace the --details FILE if it exists. Default: off."""
    proofs: Annotated[bool, HIDDEN] = True
    """Include a proof of each proved answer in the --details FILE. Default: on."""
    all_scores: Annotated[bool, HIDDEN] = False
    """Include the scores of all scored candidates in the --details FILE. Default: off."""
    metrics_port: MetricsPort = None
    """Serve metrics in Prometheus' format at http://127.0.0.1:PORT/metrics while the program runs. Of several processes
    the n-th of a host serves at PORT + n, from 0 on. Default: not served."""
    metrics_file: OptionalFile = None
    """Write the same metrics to FILE, every second or at the next queries after it. Default: no file."""

    def run(self) -> int:
        """Rank the split and print the metrics.

        Returns:
          The exit status.
        """
        set_caches(self.cache_dir)
        processes = distributed.current_processes()
        if processes is not None and not processes.is_main:
            with (
                graphs_allowed(self.cuda_graphs, self.device),
                metrics_exported(
                    self.metrics_port, None, "evaluate"
                ) as exporter,
                _monitored(exporter),
            ):
                return self._rank_for_main(processes, exporter)
        self._check_outputs()
        with (
            lock_output(self.details),
            debug_mode(self.debug, self._debug_files()),
            graphs_allowed(self.cuda_graphs, self.device),
            metrics_exported(
                self.metrics_port, self.metrics_file, "evaluate"
            ) as exporter,
            _monitored(exporter),
        ):
            status = self._run(exporter)
            if exporter and status == 0:
                exporter.telemetry.finish()
            return status

    def _run(self, exporter: Exporter | None) -> int:
        """Rank with a --details FILE that no other process writes; the exit status."""
        from funcppo.runtime import memory

        start = time.perf_counter()
        console = make_console(self.json == "-")
        setup = self._prepare(console)
        if exporter:
            _describe_run(exporter, setup)
        evaluator = setup.evaluator
        memory.reset_peak(self.device)

        rows = self._query_rows(evaluator.task.dataset)
        log = self._open_log(setup)
        with defer_interrupt() as interrupt:
            records = self._rank(setup, rows, log, console, interrupt, exporter)

        n_sides = len(evaluator.protocol.sides)
        n_done = len(records) // n_sides
        if len(records) < len(rows) * n_sides:
            hint = (
                f"--resume continues with {self.details}"
                if log
                else "with --details FILE, --resume could continue"
            )
            console.print(
                f"interrupted after {n_done} of {len(rows)} queries; {hint}"
            )
            return interrupt.exit_status

        result = self._summarise(setup, records)
        result["total_seconds"] = time.perf_counter() - start
        write_json(self.json, result)
        self._print_result(console, setup, result)
        return 0

    def _rank_for_main(
        self, processes: Processes, exporter: Exporter | None
    ) -> int:
        """Rank windows of the split, whose records rank 0 writes; the exit status."""
        from funcppo.cli.evaluation_setup import (
            iter_shared_queries,
        )

        setup = self._prepare(make_console(use_stderr=True))
        if exporter:
            _describe_run(exporter, setup)

        def count(records: Sequence[Record]) -> None:
            _count_scored(records, setup, exporter)

        rows = self._query_rows(setup.evaluator.task.dataset)
        split = getattr(setup.evaluator.task.dataset, self.split)
        done = processes.share("done")
        for _ in iter_shared_queries(
            processes, setup, split, rows, set(done), count
        ):
            pass  # rank 0 has the records
        if exporter:
            exporter.telemetry.finish()
        return 0

    def _prepare(self, console: Console) -> EvaluationSetup:
        """The evaluator, on which all processes agree."""
        set_target_threads(self.target, self.threads)
        with WorkDisplay("reading data", console) as status:
            setup = prepare_evaluation(
                self,
                with_proofs=self.details is not None and self.proofs,
                on_phase=status.update,
            )
        processes = distributed.current_processes()
        if processes is not None:
            from funcppo.cli.evaluation_setup import (
                check_same_setup,
            )

            check_same_setup(processes, setup, self.device)
        return setup

    def _debug_files(self) -> list[Path]:
        """Files to attach to a report of a bug: of the run, if one is evaluated, and of this evaluation."""
        files = (
            debug_files(Path(self.target)) if is_run_folder(self.target) else []
        )
        return files + [Path(x) for x in [self.details] if x]

    def _check_outputs(self) -> None:
        """Check the files to write, before any work."""
        from funcppo.core import record_log

        outputs = [
            ("--json", self.json),
            ("--details", self.details),
            ("--metrics-file", self.metrics_file),
        ]
        if self.details is not None:
            settings_path = record_log.settings_path(Path(self.details))
            outputs.append(("--details", str(settings_path)))
        check_overwrites(outputs, data_files(self.target, self.rules))
        if self.details is not None:
            record_log.check_writable(
                Path(self.details), resume=self.resume, overwrite=self.overwrite
            )
        elif self.resume or self.overwrite:
            raise ValueError(
                "--resume, --overwrite: expected --details FILE, the file to continue or to replace"
            )

    def _query_rows(self, dataset: Dataset) -> np.ndarray:
        """The rows of the split that are ranked, int64 [Q]."""
        import numpy as np

        from funcppo.kg.ranking.ranking import random_rows

        split = getattr(dataset, self.split)
        if not len(split):
            raise ValueError(
                f"{dataset.name}: its {self.split} split is empty: expected triples, or --split-ratios to hold some out"
            )
        if self.max_queries is None:
            return np.arange(len(split))
        return np.sort(random_rows(len(split), self.max_queries))

    def _open_log(self, setup: EvaluationSetup) -> RecordLog | None:
        """The result log at --details, with the records that it holds; None without --details."""
        from funcppo.kg.ranking import result_log

        if self.details is None:
            return None
        sides = setup.evaluator.protocol.sides
        settings = {
            **setup.log_settings,
            "split": self.split,
            "queries": self.max_queries,
            "sides": list(sides),
        }
        return result_log.open_log(
            Path(self.details), settings, len(sides), resume=self.resume
        )

    def _rank(
        self,
        setup: EvaluationSetup,
        rows: np.ndarray,
        log: RecordLog | None,
        console: Console,
        interrupt: Interrupt,
        exporter: Exporter | None,
    ) -> list[Record]:
        """The records of all queries, or of those ranked before an interrupt."""
        from funcppo.core import record_log

        records = list(log.records) if log else []
        print_notes(log.notes if log else [], console)
        done = {record["query_row"] for record in records}
        n_sides = len(setup.evaluator.protocol.sides)

        split = getattr(setup.evaluator.task.dataset, self.split)
        left = split[_rows_left(rows, done)]
        _print_work(console, setup.evaluator, left)
        n_scored = 0
        start = time.perf_counter()
        # A repeated signal ends the queries in progress; those before stay.
        with (
            suppress(KeyboardInterrupt),
            WorkDisplay("ranking", console) as status,
        ):
            for query in self._iter_queries(setup, rows, done):
                if log:
                    record_log.append(log, query)
                # Proofs are in the file, and large.
                records += [{**record, "proof": None} for record in query]

                n_scored += _count_scored(query, setup, exporter)
                note = _speed_text(n_scored, start)
                n_done = len(records) // n_sides
                status.update("ranking", n_done, len(rows), note=note)
                if interrupt.requested:
                    break
        if log:
            record_log.close(log)
        return records

    def _iter_queries(
        self, setup: EvaluationSetup, rows: np.ndarray, done: set[int]
    ) -> Iterator[list[Record]]:
        """Yield the records of each query without records, by this process alone or with others."""
        from funcppo.cli.evaluation_setup import (
            iter_shared_queries,
        )
        from funcppo.kg.ranking import evaluator as evaluation

        split = getattr(setup.evaluator.task.dataset, self.split)
        processes = distributed.current_processes()
        if processes is None:
            return evaluation.evaluate_queries(
                setup.evaluator, split, _rows_left(rows, done)
            )
        processes.share("done", sorted(done))
        return iter_shared_queries(processes, setup, split, rows, done)

    def _summarise(
        self, setup: EvaluationSetup, records: list[Record]
    ) -> JsonObject:
        """The JSON of --json, without the total time."""
        from funcppo.kg.ranking import policy_score, result_log
        from funcppo.logs import package_versions
        from funcppo.runtime import memory

        task = setup.evaluator.task
        uncompiled = setup.uncompiled
        replay = policy_score.search_replay(setup.search_step)
        return {
            **result_log.summarise_records(
                records, task.dataset.predicates, with_auc=task.is_countries
            ),
            "score": setup.score,
            "split": self.split,
            "negatives": self.negatives,
            "height": task.max_height,
            "dataset": task.dataset.name,
            **setup.search_stats.as_metrics(),
            "memory_limit_bytes": setup.memory_limit,
            "peak_bytes": max(
                memory.peak_bytes(self.device), *setup.peer_peak_bytes, 0
            ),
            "processes": _n_processes(),
            "graphs": self.cuda_graphs,
            **replay._asdict(),
            "compiled": uncompiled is None,
            "uncompiled_reason": uncompiled.reason if uncompiled else "",
            "uncompiled_code": uncompiled and uncompiled.code,
            "notes": _notes(setup),
            "versions": package_versions(),
            "device": self.device,
        }

    def _print_result(
        self, console: Console, setup: EvaluationSetup, result: JsonObject
    ) -> None:
        """Print the notes and the table of metrics."""
        print_notes([*result["notes"], *search_notes(result)], console)
        title = f"{result['dataset']}, {self.split}, {self.negatives} negatives"
        default = setup.score if self.score == "auto" else ""
        print_table(
            console, metrics_table(title, {setup.score: result}, default)
        )


def _n_processes() -> int:
    """The number of processes that share the evaluation."""
    processes = distributed.current_processes()
    return 1 if processes is None else processes.world_size


def _rows_left(rows: np.ndarray, done: set[int]) -> np.ndarray:
    """The rows of the queries that have no records yet."""
    import numpy as np

    return rows[~np.isin(rows, list(done))]


def _notes(setup: EvaluationSetup) -> list[str]:
    """What was chosen, left out or fallen back from, one line each."""
    from funcppo.kg.ranking.policy_score import graph_fallback_notes

    task_notes = setup.evaluator.task.notes
    fallback_notes = graph_fallback_notes(setup.search_step)
    return [*task_notes, *setup.notes, *fallback_notes]


@contextmanager
def _monitored(exporter: Exporter | None) -> Iterator[None]:
    """Count compilations meanwhile, if metrics are exported."""
    if exporter is None:
        yield
        return

    from funcppo.runtime.monitor import Monitor

    with Monitor() as exporter.monitor:
        yield


def _describe_run(exporter: Exporter, setup: EvaluationSetup) -> None:
    """Tell the metrics what ranks, and how."""
    uncompiled = setup.uncompiled
    exporter.telemetry.describe(
        "run",
        program="evaluate",
        dataset=setup.evaluator.task.dataset.name,
        device=setup.device,
        strategy="eager" if uncompiled else "one-graph",
    )
    if uncompiled:
        exporter.telemetry.record_failure(uncompiled.code)
    exporter.refresh(at_once=True)


def _count_scored(
    query: Sequence[Record], setup: EvaluationSetup, exporter: Exporter | None
) -> int:
    """The number of candidates scored for a query; the metrics record it."""
    from funcppo.kg.ranking.policy_score import search_captures

    n_scored = sum(record["n_scored"] for record in query)
    if exporter:
        n_missed = sum(record["status"] == "missed" for record in query)
        exporter.telemetry.record_ranked(len(query), n_scored, n_missed)
        exporter.telemetry.record_search(setup.search_stats.counts())
        captures = search_captures(setup.search_step)
        exporter.telemetry.record_search_graphs(captures)
        exporter.refresh()
    return n_scored


def _speed_text(n_scored: int, start: float) -> str:
    """How many candidates were scored a second since a time of the performance counter."""
    return f"{n_scored / (time.perf_counter() - start):,.0f} candidates/s"


def _print_work(
    console: Console, evaluator: Evaluator, queries: np.ndarray
) -> None:
    """Print how much is to be ranked."""
    from funcppo.kg.ranking.ranking import estimate_candidates

    n_candidates = estimate_candidates(
        evaluator.task, queries, evaluator.protocol
    )
    work = f"{len(queries):,} queries, about {n_candidates:,} candidates"
    print_notes([work], console)
