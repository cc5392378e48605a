"""`funcppo evaluate`: how well a split is ranked, by a trained run or by scores that need no training."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from torch import Tensor

from funcppo import data, problem, protocol, training
from funcppo.checkpoint import write_atomically
from funcppo.cli import show, write_json
from funcppo.config import ProverSettings
from funcppo.data import show_atom
from funcppo.problem import Problem
from funcppo.protocol import Protocol, Ranking, Scorer
from funcppo.queries import HEAD
from funcppo.ranking import BOTTOM, GRID

POLICY = ("success", "best-proof", "greedy")


@dataclass
class Evaluate:
    """Rank a split: filtered by all splits, ties broken at random in expectation.

    A trained folder is judged by its policy; a data set by a score that needs no training.
    """

    target: Annotated[str, tyro.conf.Positional]
    """A folder that `funcppo train` wrote, or a data set."""
    split: Literal["test", "valid"] = "test"
    """Queries to rank."""
    negatives: str = "all"
    """all entities, or how many corruptions to draw for each query and side."""
    score: str = "auto"
    """success, best-proof, greedy, exists@H, max-confidence or noisy-or; auto is the trained run's own, and
    max-confidence for a data set."""
    rules: str | None = None
    """Rule file in place of the data set's own (data sets only)."""
    height: int | None = None
    """Rule applications on a branch of a proof (data sets only); the default chooses by the valid split."""
    queries: int | None = None
    """Rank only this many queries, drawn evenly over relations; the default ranks all."""
    seed: int = 0
    """Of the corruptions drawn."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to score."""
    details: str | None = None
    """Also write a line of JSON for each query and side to this file."""
    json: str | None = None
    """Write the result as JSON to this file, or - for standard output."""

    def run(self) -> int:
        """Rank and show; the exit status."""
        start, console = time.perf_counter(), show.console(self.json == "-")
        how = Protocol(negatives=self._negatives(), seed=self.seed)
        with show.progress(console) as bar:
            task = bar.add_task("scoring", total=None, note="")
            ready, scorer, name = self._scorer(lambda done: bar.update(task, completed=done))
            how = Protocol(
                sides=training.sides(ready), negatives=how.negatives, list_all=name == "greedy", seed=self.seed
            )
            rows = self._rows(ready)
            split = getattr(ready.dataset, self.split)[rows]
            ranked = problem.rank(ready, split, scorer, how)
        result = protocol.summarise(ranked, list(ready.dataset.predicates), with_auc=ready.regions)
        result |= {"score": name, "split": self.split, "negatives": self.negatives, "height": ready.max_height}
        result |= {"dataset": ready.dataset.name, "seconds": time.perf_counter() - start}
        if self.details is not None:
            _write_details(Path(self.details), ready, ranked, rows)
        show.notes(console, ready.notes)
        title = f"{ready.dataset.name}, {self.split}, {self.negatives} negatives"
        console.print(show.results_table(title, {name: result}))
        write_json(self.json, result)
        return 0

    def _negatives(self) -> int | None:
        if self.negatives == "all":
            return None
        if not self.negatives.isdigit() or int(self.negatives) < 1:
            raise ValueError(f"--negatives {self.negatives}: want all, or a number of 1 or more")
        return int(self.negatives)

    def _scorer(self, on_progress: Any) -> tuple[Problem, Scorer, str]:
        if (Path(self.target) / training.CONFIG).exists():
            run = training.open_run(Path(self.target), self.device)
            name = run.score if self.score == "auto" else self.score
            if name in POLICY:
                return run.problem, training.policy_scorer(run, run.saved.best, name, on_progress=on_progress), name
            return run.problem, problem.untrained_scorer(run.problem, name), name
        if self.score in POLICY:
            want = "exists@H, max-confidence or noisy-or"
            raise ValueError(f"--score {self.score}: {self.target} is no trained run, want {want}")
        settings = ProverSettings(max_height=self.height)
        ready = problem.build(data.load(self.target, self.rules), settings, self.device)
        name = "max-confidence" if self.score == "auto" else self.score
        return ready, problem.untrained_scorer(ready, name), name

    def _rows(self, ready: Problem) -> np.ndarray:
        split = getattr(ready.dataset, self.split)
        if not len(split):
            raise ValueError(f"{ready.dataset.name}: its {self.split} split is empty")
        return np.arange(len(split)) if self.queries is None else training.stratified(split, self.queries)


def _write_details(path: Path, ready: Problem, ranked: Ranking, rows: np.ndarray) -> None:
    """A line a query and side: what its rank is computed from, and the score of the answer (null: it scores 0)."""
    dataset, split, counts = ready.dataset, ranked.query.tolist(), ranked.counts
    columns = zip(split, ranked.side.tolist(), ranked.answer.tolist(), ranked.provable.tolist(), *map(_list, counts))
    lines = []
    for query, side, answer, provable, better, equal, candidates in columns:
        line = {"query": int(rows[query]), "atom": show_atom(dataset, ranked.split[query].numpy())}
        line |= {"side": "head" if side == HEAD else "tail", "better": better, "equal": equal}
        line |= {"candidates": candidates, "provable": provable}
        lines.append(json.dumps(line | {"log_score": answer * GRID if answer > BOTTOM else None}, ensure_ascii=False))
    write_atomically(path, lambda file: file.write("".join(line + "\n" for line in lines).encode()))


def _list(counts: Tensor) -> list[int]:
    return counts.tolist()
