"""`funcppo evaluate`: how well a trained run or an untrained score ranks a split."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from funcppo.cli import Terminated
from funcppo.cli.common import (
    Interrupt,
    JsonObject,
    Screen,
    WorkDisplay,
    bounded,
    check_outputs,
    defer_interrupt,
    describe_task,
    graphs_allowed,
    lock_output,
    make_console,
    memory_limit,
    metrics_exported,
    metrics_table,
    print_table,
    select_device,
    set_caches,
    set_target_threads,
    write_json,
)
from funcppo.cli.options import (
    HIDDEN,
    CudaGraphs,
    DataOptions,
    MemoryOption,
    MetricsPort,
    Opt,
    OptionalFile,
    ScoreOptions,
)
from funcppo.core.settings import PositiveInt, Range, Seed
from funcppo.kg.config import Note, read_config
from funcppo.kg.graph.triples import DEFAULT_CONFIG
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from funcppo.core.files import Record, RecordLog
    from funcppo.kg.answers import TripleScorer
    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.ranking.evaluate import Evaluator, ProofFinder
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.subject import Subject
    from funcppo.kg.run.telemetry import Exporter
    from funcppo.kg.search.beam import (
        ScoreName,
        SearchConfig,
        SearchResult,
        SearchStep,
    )
    from funcppo.kg.search.task import PhaseCallback

N_WRITTEN = 100  # candidates of a query, as AnyBURL writes by default


@dataclass(frozen=True, kw_only=True)
class Evaluate(ScoreOptions):
    """Evaluate a trained run or an untrained score by filtered link-prediction ranking on a split.

    A run is evaluated with its policy, a data set with a score that needs no training. Candidates are filtered by all
    splits; ties count by their expectation under random order.

    With --details FILE, each query and side is a line of JSON in FILE as soon as it is ranked: the rank of the
    answer first, last and in the middle of its equals; the numbers of better, of equal and of all candidates, which
    every rank follows from; the score of the answer (log_score, its natural logarithm, and quantised_score, its
    log-odds in steps of 1e-4, by which candidates are compared); its status: proved, no proof, or missed (provable,
    but not found by the search); a proof; by a score with other facts what these add (other_facts); and
    near_boundary: whether some score is so near to the edge of a step that another machine or batch size could rank
    it otherwise. The summary is computed from these lines. Ctrl-C or
    SIGTERM ends the evaluation after the queries in progress, a second one at once; a later --resume continues it.

    Exit status: 0 ranked, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo evaluate runs/s1",
        "funcppo evaluate graph/ --rules rules.tsv --score noisy-or --split valid",
    )

    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    split: Annotated[str, Opt("test|valid|NAME")] = "test"
    """Split whose queries are ranked: test, valid, or another file of triples, by its name in the folder of the data
    (test_hard) or its path. Those of test are then known to be true."""
    holes: Literal["entity", "relation"] = "entity"
    """What is asked of each triple: head and tail among entities, or the relation of the pair among all relations, by
    the probabilities of `funcppo score`."""
    negatives: Annotated[
        Literal["all"] | Annotated[int, Range(1, 999_999_999)], Opt("all|N")
    ] = "all"
    """Candidates of each query and side: all entities, or N sampled corruptions."""
    score: str = "auto"
    """Score of a candidate. For a run: evidence if it learnt from questions; success or best-proof if from
    proofs. For both: one by rule confidences, such as noisy-or; an unknown name lists them. For a data set also a file
    of rankings, as --out writes it, by which another system ranks.
    Default: auto, that of the run's policy or its rule score, whichever ranks valid better; for a data set the one that
    ranks its valid split best."""
    max_queries: PositiveInt | None = None
    """Rank at most N queries, a random sample, always the same one. Default: all queries."""
    seed: Seed = 0
    """Random seed of the sampled corruptions; unused with --negatives all."""
    compile: Annotated[Literal["on", "off"], HIDDEN] = "off"
    """Compile the search of a policy as one graph: on a GPU it takes half a minute with an empty cache and saves 3
    microseconds a candidate. It is an error where it fails."""
    cuda_graphs: CudaGraphs = "auto"
    """Replay the search as CUDA graphs on a GPU. auto: where they can be recorded; off: never, to rule them out;
    manual: always, and it is an error where one cannot be recorded."""
    cache_dir: Annotated[Path | None, HIDDEN] = None
    """Folder for compiled code, as --cache-dir of `funcppo train`. Default: $XDG_CACHE_HOME/funcppo."""
    memory: MemoryOption = None
    """Memory limit of this process, or of the GPU: a number of bytes or with a unit, such as 2GB or 512MiB. A search
    that exceeds it goes on with half the slots. Default: what it holds and three quarters of what is free."""
    details: OptionalFile = None
    """Write one JSON line per query and side to FILE, as soon as it is ranked. Default: no file."""
    resume: bool = False
    """Continue an interrupted evaluation from the lines in the --details FILE. Default: off."""
    overwrite: bool = False
    """Replace the --details FILE if it exists. Default: off."""
    out: OptionalFile = None
    """Write the 100 best candidates of each query to FILE, as AnyBURL writes rankings. Default: no file."""
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
        """Rank the split and print the metrics; return the exit status.

        Returns:
          The exit status.
        """
        set_caches(self.cache_dir)
        processes = distributed.current_processes()
        is_main = processes is None or processes.is_main
        if is_main:
            self._check_outputs()
        with (
            lock_output(self.details if is_main else None),
            graphs_allowed(self.cuda_graphs, self.device),
            metrics_exported(
                self.metrics_port, self.metrics_file, "evaluate"
            ) as exporter,
            _monitored(exporter),
            ExitStack() as limits,
        ):
            is_over = limits.enter_context(bounded(self.seconds, self.device))
            console = make_console(self.json == "-")
            screen = Screen(console)
            start = time.perf_counter()
            setup = self._prepare(console, exporter)

            limits.enter_context(setup.memory_limited(self.device))
            if is_main:
                status = self._run(setup, screen, start, limits, is_over)
            else:
                assert processes is not None, "this is not rank 0"
                done = set(processes.share("done"))
                for _ in self._iter_queries(setup, done):
                    pass  # rank 0 has the records
                status = 0
            if exporter and status == 0:
                exporter.telemetry.finish()
            return status

    @property
    def _is_ranking_file(self) -> bool:
        """Return whether the score is a file; one that is called as scores are has a folder before its name."""
        is_name = re.fullmatch(r"[a-z-]+[0-9]*(@[0-9.]+)?", self.score)
        return is_name is None and Path(self.score).is_file()

    def open_subject(self, on_phase: PhaseCallback) -> Subject:
        """Return what scores candidates: a file of rankings, or as other programs open it."""
        is_file = self.holes == "entity" and self._is_ranking_file
        if self.is_run or not is_file:
            return super().open_subject(on_phase)
        from funcppo.kg.run.subject import file_subject

        self.load_graph()
        dataset = self.load_triples()
        split = getattr(dataset, self.table)
        return file_subject(dataset, Path(self.score), self.device, split)

    def inputs(self) -> list[Path]:
        """List the files that are read, which an output must not overwrite."""
        return [*super().inputs(), *[Path(self.score)] * self._is_ranking_file]

    def _prepare(
        self, console: Console, exporter: Exporter | None
    ) -> EvaluationSetup:
        """Prepare the evaluator, and check that all processes agree on it."""
        set_target_threads(self.target, self.threads)
        with WorkDisplay("reading data", console) as status:
            setup = prepare_evaluation(
                self,
                status.update,
                with_proofs=self.details is not None and self.proofs,
            )
        setup.exporter = exporter

        processes = distributed.current_processes()
        if processes is not None:
            gpu = distributed.gpu_facts(self.device)
            processes.check_equal(setup.log_settings | gpu)
        if exporter:
            exporter.telemetry.describe(
                "run",
                program="evaluate",
                dataset=setup.evaluator.task.dataset.name,
                device=self.device,
                strategy="one-graph" if setup.is_compiled else "eager",
            )
            exporter.refresh(at_once=True)
        return setup

    def _run(
        self,
        setup: EvaluationSetup,
        screen: Screen,
        start: float,
        limits: ExitStack,
        is_over: Callable[[], bool],
    ) -> int:
        """Rank, with a --details FILE that no other process writes, and print the metrics; return the exit status.

        Args:
          limits: closed when the queries are ranked.
          is_over: whether --seconds is.
        """
        from funcppo.core.files import write_file
        from funcppo.kg.ranking.evaluate import format_rankings

        records, n_left, interrupt = self._rank_left(setup, screen)
        n_done = len(records) // len(setup.evaluator.protocol.sides)
        n_left -= n_done
        if is_over() and not n_done:
            raise Terminated
        limits.close()
        if n_left and is_over():
            text = f"{n_left} of {n_done + n_left} queries, drawn at random, for --seconds {self.seconds:g}"
            setup.notes.append(Note("cut", text))
        elif n_left:
            screen.print(
                f"interrupted after {n_done} of {n_done + n_left} queries; --resume needs --details FILE"
            )
            return interrupt.exit_status
        if self.out is not None:
            dataset, split = setup.evaluator.task.dataset, self.split_of(setup)
            text = format_rankings(records, dataset, split)
            write_file(Path(self.out), text)
        result = self._summarise(setup, records)
        if setup.relations is not None:
            result["accuracy"] = result["hits@1"]
        result["total_seconds"] = time.perf_counter() - start
        write_json(self.json, result)
        self._show_result(setup, screen, result)
        return 0

    def _rank_left(
        self, setup: EvaluationSetup, screen: Screen
    ) -> tuple[list[Record], int, Interrupt]:
        """Rank the queries that the --details FILE lacks; return all records, the number of queries, and any signal."""
        from funcppo.runtime import memory

        memory.reset_peak(self.device)
        task = setup.evaluator.task
        n_queries = len(self._query_rows(task.dataset))
        log = self._open_log(setup)
        records = list(log.records) if log else []
        n_left = n_queries - len({x["query_row"] for x in records})
        line = describe_task(task, setup.score)
        screen.print(line, f"{n_left:,} queries")
        screen.show_data(task.dataset)
        screen.print(*(log.notes if log else []))
        with defer_interrupt() as interrupt:
            self._rank(setup, records, log, screen.console, interrupt)
        return records, n_queries, interrupt

    def _show_result(
        self, setup: EvaluationSetup, screen: Screen, result: JsonObject
    ) -> None:
        """Print the notes, the table of metrics, and the path of the details."""
        notes = [*result["notes"], *search_notes(result)]
        screen.add(notes, "answers")
        screen.show_cut(notes)
        title = f"{result['dataset']}, {self.split}, {self.negatives} negatives"
        if setup.relations is not None:
            title = f"{result['dataset']}, {self.split}, relations of pairs (hits@1 is the accuracy)"
        default = setup.score if self.score == "auto" else ""
        table = metrics_table(title, {setup.score: result}, default)
        print_table(screen.console, table)
        where = f": {self.details}" if self.details else ""
        screen.print(f"done in {result['total_seconds']:.0f} s{where}")

    @property
    def table(self) -> str:
        """Return the field of the data set that holds the split: one that is named is read in place of test."""
        return "valid" if self.split == "valid" else "test"

    def split_of(self, setup: EvaluationSetup) -> np.ndarray:
        """Return the atoms of the split, [n, W]."""
        return getattr(setup.evaluator.task.dataset, self.table)

    def change_of_graph(self) -> Callable[[Dataset], Dataset] | None:
        """Return the function that reads the named split, adds known triples and limits the candidates, or None."""
        change = super().change_of_graph()
        if self.split in ("test", "valid"):
            return change
        from funcppo.kg.graph import loaders

        source = self.graph or self.target
        if self.is_run and not self.graph:
            source = read_config(Path(self.target)).dataset
        path = loaders.find_split(Path(source), self.split)

        def with_split(dataset: Dataset) -> Dataset:
            dataset = loaders.with_test(dataset, path, self.data)
            return change(dataset) if change else dataset

        return with_split

    def _check_outputs(self) -> None:
        """Check the output files before any work."""
        from funcppo.core import files

        outputs = [
            ("--json", self.json),
            ("--details", self.details),
            ("--metrics-file", self.metrics_file),
            ("--out", self.out),
        ]
        is_file = self._is_ranking_file
        for name in ("negatives", "out"):
            is_default = getattr(self, name) == getattr(Evaluate, name)
            if self.holes == "relation" and not is_default:
                raise ValueError(
                    f"--{name}: expected --holes entity, got relation"
                )
        if self.out and self.negatives != "all":
            raise ValueError(
                f"--out: expected --negatives all, got {self.negatives}"
            )
        if self.out == "-":
            raise ValueError("--out: expected a file, got -")
        if is_file and self.resume:
            raise ValueError(
                f"--resume: expected a score by its name, got {self.score}"
            )
        check_outputs(outputs, self.inputs())
        if self.details is not None:
            files.check_writable(
                Path(self.details),
                resume=self.resume,
                overwrite=self.overwrite,
            )
        elif self.resume or self.overwrite:
            raise ValueError(
                "--resume, --overwrite: expected --details FILE, the file to continue or to replace"
            )
        if self.seconds is not None and distributed.launched_size() > 1:
            raise ValueError("--seconds: expected one process, got several")

    def _query_rows(self, dataset: Dataset) -> np.ndarray:
        """Return the rows of the split that are ranked, int64 [Q]."""
        import numpy as np

        from funcppo.kg.ranking.ranking import random_rows

        split = getattr(dataset, self.table)
        if not len(split):
            raise ValueError(
                f"{dataset.name}: its {self.split} split is empty: expected triples, or --split-ratios to hold some out"
            )
        if self.max_queries is None and self.seconds is None:
            return np.arange(len(split))
        rows = random_rows(len(split), self.max_queries or len(split))
        # What there is time for is a sample too.
        return np.sort(rows) if self.seconds is None else rows

    def _open_log(self, setup: EvaluationSetup) -> RecordLog | None:
        """Open the result log at --details, with the records that it holds; None without --details."""
        from funcppo.kg.ranking.evaluate import open_log

        if self.details is None:
            return None
        sides = setup.evaluator.protocol.sides
        settings = {
            **setup.log_settings,
            "split": self.split,
            "queries": self.max_queries,
            "sides": list(sides),
        }
        return open_log(
            Path(self.details), settings, len(sides), resume=self.resume
        )

    def _rank(
        self,
        setup: EvaluationSetup,
        records: list[Record],
        log: RecordLog | None,
        console: Console,
        interrupt: Interrupt,
    ) -> None:
        """Add the records of all queries without records, until all are ranked or an interrupt comes."""
        from funcppo.core import files

        done = {record["query_row"] for record in records}
        processes = distributed.current_processes()
        if processes is not None:
            processes.share("done", sorted(done))
        n_sides = len(setup.evaluator.protocol.sides)
        n_queries = len(self._query_rows(setup.evaluator.task.dataset))
        n_scored = 0
        start = time.perf_counter()
        # A repeated signal ends the queries in progress; those before stay.
        with (
            suppress(KeyboardInterrupt),
            WorkDisplay("ranking", console) as status,
        ):
            for query in self._iter_queries(setup, done):
                if log:
                    files.append_records(log, query)
                # Proofs are in the file, and large.
                records += [{**record, "proof": None} for record in query]

                n_scored += sum(record["n_scored"] for record in query)
                speed = n_scored / (time.perf_counter() - start)
                n_done = len(records) // n_sides
                note = f"{speed:,.0f} candidates/s"
                status.update("ranking", n_done, n_queries, note=note)
                if interrupt.requested:
                    break
        if log:
            files.close_log(log)

    def _iter_queries(
        self, setup: EvaluationSetup, done: set[int]
    ) -> Iterator[list[Record]]:
        """Yield the records of each query without records; where processes share the work, on rank 0 alone.

        Args:
          done: rows of the queries that have records already.
        """
        from funcppo.kg.ranking.evaluate import plan_windows, rank_window

        split = self.split_of(setup)
        processes = distributed.current_processes()
        rows = self._query_rows(setup.evaluator.task.dataset)
        is_shared = processes is not None
        rank_rows = partial(rank_window, setup.evaluator, split)
        if setup.relations is not None:
            rank_rows = partial(setup.relations.rank_relations, split)
            windows = setup.relations.relation_windows(rows)
        else:
            windows = plan_windows(
                setup.evaluator, split, rows, is_shared=is_shared
            )
        # A window is ranked whole, so that its records do not depend on what is done.
        windows = [x for x in windows if not done.issuperset(x.tolist())]

        is_main = processes is None or processes.is_main

        def rank(place: int) -> list[list[Record]]:
            found = rank_rows(windows[place])
            if not is_main:
                _record_metrics(setup, found)
            return found

        if processes is None:
            blocks = map(rank, range(len(windows)))
        else:
            blocks = self._iter_shared(processes, setup, len(windows), rank)
        for queries in blocks:
            _record_metrics(setup, queries)
            for records in queries:
                if records[0]["query_row"] not in done:
                    yield records

    def _iter_shared(
        self,
        processes: Processes,
        setup: EvaluationSetup,
        n_windows: int,
        rank: Callable[[int], list[list[Record]]],
    ) -> Iterator[list[list[Record]]]:
        """Rank the windows that this process takes; on rank 0, yield the records of all windows in order.

        What the other processes counted and noted is added to the setup.
        """
        from funcppo.kg.ranking.scoring import graph_fallback_notes
        from funcppo.runtime import memory

        def work(place: int) -> bytes:
            before = Counter(setup.search_stats)
            result = {
                "rank": processes.rank,
                "records": rank(place),
                "stats": setup.search_stats - before,
                "notes": graph_fallback_notes(setup.search_step),
                "peak_bytes": memory.peak_bytes(self.device),
            }
            return json.dumps(result, ensure_ascii=False).encode()

        for block in processes.iter_results("window", n_windows, work):
            result = json.loads(block)
            if result["rank"] != processes.rank:
                setup.search_stats.update(result["stats"])
                lines = [f"rank {result['rank']}: {x}" for x in result["notes"]]
                setup.notes += [x for x in lines if x not in setup.notes]
                setup.peer_peak_bytes.append(result["peak_bytes"])
            yield result["records"]

    def _summarise(
        self, setup: EvaluationSetup, records: list[Record]
    ) -> JsonObject:
        """Build the JSON of --json, without the total time."""
        from funcppo.kg.ranking import scoring
        from funcppo.kg.ranking.evaluate import summarise_records
        from funcppo.logs import package_versions
        from funcppo.runtime import memory

        task, step = setup.evaluator.task, setup.search_step
        processes = distributed.current_processes()
        counts = setup.search_stats
        stats: JsonObject = {}
        if counts["row_steps"]:
            names = ("row_steps", "n_pruned", "n_overflowed", "n_halvings")
            stats = {name: counts[name] for name in names}
            active = counts["active_row_steps"]
            stats["active_fraction"] = active / counts["row_steps"]
        peak_bytes = memory.peak_bytes(self.device)
        return {
            **summarise_records(
                records, task.dataset.predicates, with_auc=task.is_countries
            ),
            "score": setup.score,
            "split": self.split,
            "holes": self.holes,
            "negatives": str(self.negatives),
            "height": task.max_height,
            "dataset": task.dataset.name,
            **stats,
            "memory_limit_bytes": setup.memory_limit,
            "peak_bytes": max(peak_bytes, *setup.peer_peak_bytes, 0),
            "processes": processes.world_size if processes else 1,
            "graphs": self.cuda_graphs,
            **scoring.search_replay(step),
            "compiled": setup.is_compiled,
            "notes": [
                *task.notes,
                *setup.notes,
                *scoring.graph_fallback_notes(step),
            ],
            "versions": package_versions(),
            "device": self.device,
        }


def search_notes(result: JsonObject) -> list[Note]:
    """Format notes on the work of an evaluation and on what it may have missed.

    Args:
      result: the JSON of --json.
    """
    notes: list[Note] = []
    texts = {
        "n_pruned": "the beam pruned partial proofs of {:,} candidates",
        "n_overflowed": "successors of {:,} candidates did not fit",
        "n_halvings": "memory did not suffice: the slots were halved {} times",
        "n_missed": "{:,} provable answers were not found by the search",
    }
    for name, text in texts.items():
        if result.get("row_steps") and result[name]:
            notes.append(Note("cut", text.format(result[name])))
    if result["peak_bytes"] > result["memory_limit_bytes"]:
        text = f"the peak of {result['peak_bytes'] / 1e6:,.0f} MB exceeds the limit of --memory"
        notes.append(Note("cut", text))
    return notes


@contextmanager
def _monitored(exporter: Exporter | None) -> Iterator[None]:
    """Count compilations within the context, if metrics are exported."""
    if exporter is None:
        yield
        return

    from funcppo.runtime.monitor import Monitor

    with Monitor() as exporter.monitor:
        yield


def _record_metrics(
    setup: EvaluationSetup, queries: Sequence[Sequence[Record]]
) -> None:
    """Record what was ranked in the metrics that are exported, if any are."""
    from funcppo.kg.ranking.scoring import search_captures

    if not (exporter := setup.exporter):
        return
    records = [record for query in queries for record in query]
    exporter.telemetry.record_ranked(
        len(records),
        sum(record["n_scored"] for record in records),
        sum(record["status"] == "missed" for record in records),
    )
    exporter.telemetry.record_search(setup.search_stats)
    captures = search_captures(setup.search_step)
    exporter.telemetry.record_search_graphs(captures)
    exporter.refresh()


# -- what is prepared


@dataclass(kw_only=True, slots=True)
class EvaluationSetup:
    """Evaluator that is ready to rank, with what to report beside its results."""

    evaluator: Evaluator
    """Ranks queries and proves their answers."""
    score: str
    """Name of the score."""
    log_settings: JsonObject
    """What the ranks depend on, written beside the result log; --resume compares it."""
    search_stats: Counter[str]
    """Counts of the search, by their names in the JSON of --json; empty where nothing was searched."""
    notes: list[str]
    """What was chosen."""
    memory_limit: int
    """Bytes."""
    policy_run: Run | None
    """The run whose policy gives the scores; None for a score without a policy."""
    peer_peak_bytes: list[int] = field(default_factory=list)
    """Memory peaks that other processes of the evaluation reported."""
    is_compiled: bool = False
    """The search is compiled."""
    exporter: Exporter | None = None
    """Exports metrics."""
    relations: TripleScorer | None = None
    """Ranks the relations of pairs; None to rank entities."""

    def memory_limited(self, device: str) -> AbstractContextManager[None]:
        """Return a context that limits the memory of a search; without a search it does nothing."""
        from funcppo.runtime import memory

        has_search = self.search_step is not None
        return memory.limit_memory(
            self.memory_limit if has_search else None, device
        )

    search_step: SearchStep | None = None
    """The step of its search; None without a policy."""


def prepare_evaluation(
    options: Evaluate,
    on_phase: PhaseCallback,
    *,
    with_proofs: bool = False,
) -> EvaluationSetup:
    """Load the run or data set, build its scorer for this machine, and build the evaluator.

    Args:
      options: the command line of `funcppo evaluate`.
      on_phase: receives what is being done.
      with_proofs: the evaluator proves answers.

    Raises:
      ValueError: an option is bad or does not fit the target, or the memory limit is too small.
    """
    from funcppo.kg.answers import Answerer, TripleScorer
    from funcppo.kg.logic.kb import TAIL
    from funcppo.kg.ranking.evaluate import Evaluator
    from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
    from funcppo.kg.search.task import with_ranking_on
    from funcppo.runtime import memory

    select_device(options.device)
    negatives = options.negatives
    n_negatives = None if negatives == "all" else negatives
    max_bytes = memory_limit(options.memory, options.device)
    subject = options.open_subject(on_phase)
    task, run = subject.task, subject.policy_run
    if run is not None and run.questions is None:
        task = with_ranking_on(task, "cpu")
    evaluator = Evaluator(
        task=task,
        protocol=RankingProtocol(
            sides=ranked_sides(task) if options.holes == "entity" else (TAIL,),
            n_negatives=n_negatives,
            seed=options.seed,
            n_best=N_WRITTEN if options.out else 0,
        ),
        score=subject.score,
        prove=_make_prover(subject) if with_proofs else None,
        all_scores=options.all_scores,
    )
    relations = None
    if options.holes == "relation":
        relations = TripleScorer(Answerer(subject))
    setup = EvaluationSetup(
        evaluator=evaluator,
        relations=relations,
        score=subject.score.name,
        log_settings=_log_settings(options, subject, n_negatives),
        search_stats=Counter(),
        notes=[*subject.notes],
        memory_limit=max_bytes,
        policy_run=run,
    )
    used_bytes = memory.used_bytes(options.device)
    if used_bytes > max_bytes:
        raise ValueError(
            f"--memory {max_bytes}: expected at least {used_bytes} bytes, which the data and T_P take by themselves"
        )
    if run is not None and run.questions is None:
        _prepare_search(options, setup, run)
    return setup


def _make_prover(subject: Subject) -> ProofFinder:
    """Return a function from answers to proofs: the policy's, or smallest ones without a policy."""
    from funcppo.kg.answers import most_probable_proofs
    from funcppo.kg.ranking import explain

    run = subject.policy_run
    if run is None:
        return partial(explain.smallest_proofs, subject.task)
    return partial(most_probable_proofs, run)


def _log_settings(
    options: Evaluate, subject: Subject, n_negatives: int | None
) -> JsonObject:
    """Return the settings on which the rank of a query depends, besides the split."""
    from funcppo.kg.answers import score_settings

    return {
        "dataset": subject.task.dataset.name,
        **score_settings(subject),
        "negatives": "relations"
        if options.holes == "relation"
        else n_negatives,
        "seed": options.seed,
        "all_scores": options.all_scores,
        **({"n_best": N_WRITTEN} if options.out else {}),
    }


# -- the search of a policy


def _prepare_search(
    options: Evaluate, setup: EvaluationSetup, run: Run
) -> None:
    """Compile the search of a policy if asked for, and put its score in the setup."""
    from funcppo.kg.ranking import scoring
    from funcppo.kg.run import held_out

    stats = setup.search_stats
    cfg = held_out.run_search_config(run, cast("ScoreName", setup.score))
    setup.search_step = run.search_step
    if options.compile == "on" and scoring.needs_search(run.task, cfg):
        _compile_step(setup, run, cfg, options.split_of(setup))

    def count(
        result: SearchResult | None, active_row_steps: int, row_steps: int
    ) -> None:
        stats.update(active_row_steps=active_row_steps, row_steps=row_steps)
        if result is not None:
            stats.update(
                n_pruned=int(result.pruned_log_mass.isfinite().sum()),
                n_overflowed=int(result.overflow_log_mass.isfinite().sum()),
            )

    setup.evaluator = replace(
        setup.evaluator,
        score=scoring.PolicyScore(
            cfg,
            run.task,
            run.state.best_params,
            setup.search_step,
            on_scored=count,
            on_halved=lambda cfg: stats.update(n_halvings=1),
        ),
    )


def _compile_step(
    setup: EvaluationSetup, run: Run, cfg: SearchConfig, split: np.ndarray
) -> None:
    """Compile the step of a search.

    Raises:
      ValueError: it cannot be compiled.
    """
    import torch

    from funcppo.kg.ranking import scoring
    from funcppo.runtime.compile import reason_against_compiling

    step = scoring.make_search_step(run.run_config.device, compiled=True)
    sample = torch.from_numpy(split[:2048])
    start = time.perf_counter()
    problem = reason_against_compiling(torch.device(run.run_config.device).type)
    cause = None
    if not problem:
        params = run.state.best_params
        try:
            scoring.compile_search_step(cfg, run.task, params, sample, step)
        except Exception as error:
            problem = next(iter(str(error).splitlines()), type(error).__name__)
            cause = error
    if problem:
        raise ValueError(
            f"compile: expected a search that can be compiled, got: {problem}"
        ) from cause
    setup.search_step, setup.is_compiled = step, True
    seconds = time.perf_counter() - start
    setup.notes.append(f"the search is compiled, ready in {seconds:.0f} s")
