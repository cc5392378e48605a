"""`funcppo evaluate`: how well a split is ranked, by a trained run or by scores that need no training."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from funcppo.cli import console as terminal
from funcppo.cli import write_json
from funcppo.cli.judging import prepare_evaluation, search_notes
from funcppo.evaluation import ranking

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    import numpy as np
    from rich.console import Console

    from funcppo.evaluation.evaluator import Evaluator
    from funcppo.evaluation.result_log import Record, ResultLog


@dataclass
class Evaluate:
    """Rank a split: filtered by all splits, ties broken at random in expectation.

    A trained folder is judged by its policy; a data set by a score that needs no training. With --details FILE each
    query and side is a line of JSON there as soon as it is ranked: the answer's rank under every tie policy, the counts
    of better, equal and all candidates that it follows from, its score (natural logarithm, on the grid of 1e-4 nats
    that scores are compared on), its status (proved, refuted, or missed: provable, but not found by the search), a
    proof, and whether some candidate scores so near to the edge of a grid line that another machine or number of slots
    could rank it otherwise (near_boundary). The summary is computed from these lines. Ctrl-C ends after the part in
    progress, --resume goes on.

    Exit status: 0 ranked, 2 bad input, 130 interrupted.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """A folder that `funcppo train` wrote, or a data set."""
    split: Literal["test", "valid"] = "test"
    """Queries to rank."""
    negatives: Annotated[str, arg(metavar="all|N")] = "all"
    """all entities, or how many corruptions to draw for each query and side."""
    score: str = "auto"
    """success, best-proof, greedy, exists@H, max-confidence, noisy-or or noisy-or@P (of confidences to the power P, so
    that several rules count for less together); auto is the trained run's own, and max-confidence for a data set."""
    rules: Annotated[str | None, arg(metavar="FILE")] = None
    """Rule file in place of the data set's own (data sets only)."""
    height: Annotated[int | None, arg(metavar="N")] = None
    """Rule applications on a branch of a proof (data sets only); the default chooses by the valid split."""
    smoothing: Annotated[float | None, arg(metavar="X")] = None
    """Confidences from leave-one-out counts with X wrong pairs added (data sets only); the default is plain counts."""
    object_identity: Annotated[bool, FlagCreatePairsOff] = False
    """Different variables of a rule bind different constants, as AnyBURL counts (data sets only)."""
    queries: Annotated[int | None, arg(metavar="N")] = None
    """Rank only this many queries, drawn evenly over relations; the default ranks all."""
    seed: int = 0
    """Of the corruptions drawn."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to score."""
    memory: Annotated[str | None, arg(metavar="BYTES")] = None
    """Most memory to hold, such as 2GB: of this process, or of a GPU; the default is three quarters of what there is.
    As many candidates are scored at once as are fastest within it."""
    details: Annotated[str | None, arg(metavar="FILE")] = None
    """Also write a line of JSON for each query and side to this file, as they are ranked."""
    resume: Annotated[bool, FlagCreatePairsOff] = False
    """Go on with the file of --details that an interrupted evaluation left."""
    overwrite: Annotated[bool, FlagCreatePairsOff] = False
    """Replace the file of --details."""
    proofs: bool = True
    """Put a proof of each answer that has one into --details."""
    all_scores: Annotated[bool, FlagCreatePairsOff] = False
    """Put the scores of all candidates into --details."""
    json: Annotated[str | None, arg(metavar="FILE|-")] = None
    """Write the result as JSON to this file, or - for standard output."""

    def run(self) -> int:
        """Rank and show; the exit status."""
        from funcppo.evaluation import result_log
        from funcppo.runtime import memory

        start, console = time.perf_counter(), terminal.make_console(self.json == "-")
        if (self.resume or self.overwrite) and self.details is None:
            raise ValueError("--resume, --overwrite: want --details FILE, the file that they are about")
        if self.details is not None:
            result_log.check_writable(Path(self.details), resume=self.resume, overwrite=self.overwrite)
        ready = prepare_evaluation(self)
        memory.reset_peak(self.device)
        judge, dataset = ready.evaluator, ready.evaluator.task.dataset
        rows, journal = self._rows(dataset), None
        if self.details is not None:
            settings = ready.log_settings | {
                "split": self.split,
                "queries": self.queries,
                "sides": list(judge.protocol.sides),
            }
            journal = result_log.open_log(Path(self.details), settings, len(judge.protocol.sides), resume=self.resume)
        found = self._judge(judge, rows, journal, console)
        if len(found) < len(rows) * len(judge.protocol.sides):
            done = len(found) // len(judge.protocol.sides)
            how = f"--resume goes on with {self.details}" if journal else "--details FILE would keep what is done"
            console.print(f"stopped after {done} of {len(rows)} queries; {how}")
            return 130
        result = result_log.summarise_records(found, dataset.predicates, with_auc=judge.task.is_countries)
        result |= {"score": ready.score, "split": self.split, "negatives": self.negatives}
        result |= {"height": judge.task.max_height, "dataset": dataset.name} | ready.search_stats.as_metrics()
        result |= {"memory": ready.memory_limit, "peak_bytes": memory.peak_bytes(self.device)}
        result |= {"seconds": time.perf_counter() - start}
        terminal.print_notes(
            console, [*judge.task.notes, *ready.notes, *search_notes(result), *ready.fallback_reasons()]
        )
        title = f"{dataset.name}, {self.split}, {self.negatives} negatives"
        console.print(terminal.metrics_table(title, {ready.score: result}))
        write_json(self.json, result)
        return 0

    def _judge(self, judge: Evaluator, rows: np.ndarray, journal: ResultLog | None, console: Console) -> list[Record]:
        """The records of all queries, or of those ranked before a Ctrl-C."""
        import numpy as np

        from funcppo.evaluation import evaluator as judging
        from funcppo.evaluation import result_log

        found = list(journal.complete_records) if journal else []
        rows = rows[~np.isin(rows, [record["query_row"] for record in found])]
        split, n_sides = getattr(judge.task.dataset, self.split), len(judge.protocol.sides)
        done, start, scored = len(found) // n_sides, time.perf_counter(), 0
        with terminal.progress_bar(console) as bar, defer_interrupt() as asked:
            task = bar.add_task("ranking", total=done + len(rows), completed=done, note="")
            for part in judging.evaluate_chunks(judge, split, rows):
                if journal:
                    result_log.append(journal, part)
                found += [{**record, "proof": None} for record in part]
                done, scored = done + len(part) // n_sides, scored + sum(record["n_scored"] for record in part)
                speed = scored / (time.perf_counter() - start)
                bar.update(task, completed=done, note=f"{speed:,.0f} candidates/s")
                if asked:
                    break
        return found

    def _rows(self, dataset: Any) -> np.ndarray:
        import numpy as np

        split = getattr(dataset, self.split)
        if not len(split):
            raise ValueError(f"{dataset.name}: its {self.split} split is empty")
        if self.queries is not None and self.queries < 1:
            raise ValueError(f"--queries {self.queries}: want 1 or more")
        return np.arange(len(split)) if self.queries is None else ranking.stratified_sample(split, self.queries)


@contextmanager
def defer_interrupt() -> Iterator[list[int]]:
    """A list that a first Ctrl-C puts something into; a second one interrupts at once."""
    asked: list[int] = []

    def ask(*_: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(1)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
