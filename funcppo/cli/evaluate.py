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

from funcppo.cli import show, write_json
from funcppo.cli.judging import on_work, prepare

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    import numpy as np
    from rich.console import Console

    from funcppo.judge import Judge
    from funcppo.records import Journal, Record


@dataclass
class Evaluate:
    """Rank a split: filtered by all splits, ties broken at random in expectation.

    A trained folder is judged by its policy; a data set by a score that needs no training. With --details FILE each
    query and side is a line of JSON there as soon as it is ranked: the answer's rank under every tie policy, the counts
    of better, equal and all candidates that it follows from, its score (natural logarithm, on the grid of 1e-4 nats
    that scores are compared on), its status (proved, refuted, or lost: provable, but not found by the search), a proof,
    and whether some candidate scores so near to the edge of a grid line that another machine or number of slots could
    rank it otherwise (near_grid). The summary is computed from these lines. Ctrl-C ends after the part in progress,
    --resume goes on.

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
        from funcppo import records
        from funcppo.runtime import memory

        start, console = time.perf_counter(), show.console(self.json == "-")
        if (self.resume or self.overwrite) and self.details is None:
            raise ValueError("--resume, --overwrite: want --details FILE, the file that they are about")
        if self.details is not None:
            records.check_writable(Path(self.details), resume=self.resume, overwrite=self.overwrite)
        ready = prepare(self)
        memory.reset_peak(self.device)
        judge, dataset = ready.judge, ready.judge.problem.dataset
        rows, journal = self._rows(dataset), None
        if self.details is not None:
            settings = ready.settings | {"split": self.split, "queries": self.queries, "side": list(judge.how.sides)}
            journal = records.begin(Path(self.details), settings, len(judge.how.sides), resume=self.resume)
        found = self._judge(judge, rows, journal, console)
        if len(found) < len(rows) * len(judge.how.sides):
            done = len(found) // len(judge.how.sides)
            how = f"--resume goes on with {self.details}" if journal else "--details FILE would keep what is done"
            console.print(f"stopped after {done} of {len(rows)} queries; {how}")
            return 130
        result = records.summarise(found, dataset.predicates, with_auc=judge.problem.regions)
        result |= {"score": ready.name, "split": self.split, "negatives": self.negatives}
        result |= {"height": judge.problem.max_height, "dataset": dataset.name} | ready.work.told()
        result |= {"memory": ready.budget, "peak_bytes": memory.peak_bytes(self.device)}
        result |= {"seconds": time.perf_counter() - start}
        show.notes(console, [*judge.problem.notes, *ready.notes, *on_work(result), *ready.fallbacks()])
        title = f"{dataset.name}, {self.split}, {self.negatives} negatives"
        console.print(show.results_table(title, {ready.name: result}))
        write_json(self.json, result)
        return 0

    def _judge(self, judge: Judge, rows: np.ndarray, journal: Journal | None, console: Console) -> list[Record]:
        """The records of all queries, or of those ranked before a Ctrl-C."""
        import numpy as np

        from funcppo import judge as judging
        from funcppo import records

        found = list(journal.done) if journal else []
        rows = rows[~np.isin(rows, [record["query"] for record in found])]
        split, n_sides = getattr(judge.problem.dataset, self.split), len(judge.how.sides)
        done, start, scored = len(found) // n_sides, time.perf_counter(), 0
        with show.progress(console) as bar, interrupts() as asked:
            task = bar.add_task("ranking", total=done + len(rows), completed=done, note="")
            for part in judging.judged(judge, split, rows):
                if journal:
                    records.append(journal, part)
                found += [{**record, "proof": None} for record in part]
                done, scored = done + len(part) // n_sides, scored + sum(record["scored"] for record in part)
                speed = scored / (time.perf_counter() - start)
                bar.update(task, completed=done, note=f"{speed:,.0f} candidates/s")
                if asked:
                    break
        return found

    def _rows(self, dataset: Any) -> np.ndarray:
        import numpy as np

        from funcppo import training

        split = getattr(dataset, self.split)
        if not len(split):
            raise ValueError(f"{dataset.name}: its {self.split} split is empty")
        if self.queries is not None and self.queries < 1:
            raise ValueError(f"--queries {self.queries}: want 1 or more")
        return np.arange(len(split)) if self.queries is None else training.stratified(split, self.queries)


@contextmanager
def interrupts() -> Iterator[list[int]]:
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
