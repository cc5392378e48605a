"""`funcppo check`: an independent recount of supports, verdicts, ranks and proofs on a sample of the user's data."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from funcppo.cli.common import (
    WorkDisplay,
    bounded,
    cut_when,
    make_console,
    open_dataset,
    print_notes,
    write_json,
)
from funcppo.cli.evaluate import Evaluate, EvaluationSetup, prepare_evaluation
from funcppo.cli.options import HIDDEN, Opt, OptionalFile, TargetOptions
from funcppo.core.settings import PositiveFloat, Seed, Size

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.cli.common import WorkDisplay
    from funcppo.kg.ranking.recount_check import (
        Comparison,
        Details,
    )

# parts of --seconds for supports, ranks, proofs and evidence
TIME_SHARES = (0.35, 0.35, 0.15, 0.15)


@dataclass(frozen=True, kw_only=True)
class Check(TargetOptions):
    """Check supports, verdicts, ranks, proofs and evidence on a sample of the data by an independent recount.

    The recount is plain Python over sets and shares no code with the prover. It counts the support of rules by
    backtracking over the facts, finds the candidates of queries with their scores and ranks, checks each step of the
    proofs of their answers, and counts the groundings of rules that a run weighs which learnt from questions. A data
    set is checked at the settings that `funcppo evaluate` chooses, a run at its own; the scores of a policy are taken
    as they are. What --seconds does not suffice for is left out, and a line says so. With --details FILE, the lines of
    a file that `funcppo evaluate` wrote are compared with the recount, and lines that are not there. Of a file of
    proofs, which --json of a program wrote (PROOF.json), each step is checked with the facts and rules of --set
    graph=DATASET and --rules, and all texts and names; probabilities are no claims.

    Exit status: 0 all that was compared agrees, 1 something disagrees, 2 bad input, or nothing could be compared.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo check runs/s1",
        "funcppo check graph/ --rules rules.tsv --split valid",
    )

    graph: Annotated[str | None, HIDDEN] = None
    """Facts that a run is asked about, as --graph of `funcppo evaluate`, or that proofs are of. Default: those of its
    data set."""
    split: Annotated[str, Opt("test|valid|NAME")] = "test"
    """Split whose queries are ranked; with --details that of the file."""
    score: str = "auto"
    """Score of a candidate, as --score of `funcppo evaluate`. Default: auto, the one that `evaluate` ranks by."""
    details: OptionalFile = None
    """Compare the lines of a --details FILE of `funcppo evaluate` too, at the settings beside it. Default: no file."""
    max_queries: Size = 50
    """Number of queries, a random sample, of --details of those in FILE; each is ranked on both sides."""
    n_rules: Annotated[Size, HIDDEN] = 1000
    """Number of rules to count, a random sample."""
    seconds: PositiveFloat = 300.0
    """Time limit of the whole program, in seconds. Those for reading the data and choosing the settings are printed."""
    seed: Seed = 0
    """Random seed of the samples."""

    def run(self) -> int:
        """Check proofs or recount the sample and print how much agrees; return the exit status, 1 for a disagreement.

        Returns:
          The exit status.
        """
        self.prepare(inputs=[self.details])
        is_file = self.target.endswith(".json")
        with bounded(self.seconds) as is_over:
            return self._check_proofs() if is_file else self._recount(is_over)

    def _recount(self, is_over: Callable[[], bool]) -> int:
        """Recount the sample and print how much agrees; return the exit status."""
        console = make_console(self.json == "-")
        comparisons: list[Comparison] = []
        start = time.perf_counter()
        with WorkDisplay("reading") as status:
            details = self._read_details()
            options = self._evaluation_options(details)
            setup = prepare_evaluation(options, status.update, with_proofs=True)
            task = setup.evaluator.task
            seconds = time.perf_counter() - start
            prepared = f"data read and settings chosen in {seconds:.1f} s"
            print_notes([*setup.notes, *task.notes, prepared], console, 1)
            parts = self._compare(
                setup, options, details, status, self.seconds - seconds
            )
            with cut_when(is_over):
                for comparison in parts:
                    _print_comparison(console, comparison)
                    comparisons.append(comparison)
        notes = [note for part in comparisons for note in part.notes]
        late = f"--seconds {self.seconds:g}: no more is compared"
        print_notes([late] * is_over() + notes, console, 1)

        result = {
            "dataset": task.dataset.name,
            "split": options.split,
            "score": setup.score,
            "height": task.max_height,
            "smoothing": task.cfg.smoothing,
            "object_identity": task.cfg.object_identity,
            "seed": self.seed,
            "prepare_seconds": seconds,
            "checks": [part.to_json() for part in comparisons],
        }
        write_json(self.json, result)
        if not any(part.n_compared for part in comparisons):
            raise ValueError(
                f"--seconds {self.seconds:g}: nothing could be compared"
            )
        return int(any(part.disagreements for part in comparisons))

    def _check_proofs(self) -> int:
        """Check the proofs of a file and print the first error of each; return the exit status."""
        from funcppo.kg.ranking.recount_check import compare_proof_file

        if self.graph is None:
            raise ValueError(
                f"{self.target}: expected --set graph=DATASET, the facts and rules of its proofs"
            )
        dataset = open_dataset(self.graph, self.rules, self.data)
        found = compare_proof_file(Path(self.target), dataset)
        _print_comparison(make_console(self.json == "-"), found)
        fields = {"dataset": dataset.name, "checks": [found.to_json()]}
        write_json(self.json, fields)
        return int(bool(found.disagreements))

    def _read_details(self) -> Details | None:
        """Read the --details FILE; None without one.

        Raises:
          ValueError: it is bad, or was ranked by another score.
        """
        if self.details is None:
            return None
        from funcppo.kg.ranking.recount_check import read_details

        details = read_details(Path(self.details))
        score = details.settings.get("score")
        if self.score not in ("auto", score):
            raise ValueError(
                f"--score {self.score}: {self.details} was ranked by {score}"
            )
        return details

    def _evaluation_options(self, details: Details | None) -> Evaluate:
        """Build the options of the evaluation that is checked."""
        shared = ("target", "split", "score", "rules", "graph", "recount")
        settings = {name: getattr(self, name) for name in (*shared, "data")}
        if details is not None:
            names = ["split", "score"]
            if not self.is_run:  # a run has its own
                names += ["height", "smoothing", "object_identity"]
            settings |= {name: details.settings.get(name) for name in names}
        return Evaluate(**settings)

    def _compare(
        self,
        setup: EvaluationSetup,
        options: Evaluate,
        details: Details | None,
        status: WorkDisplay,
        seconds_left: float,
    ) -> Iterator[Comparison]:
        """Yield the comparisons of supports, candidates, ranks, proofs and evidence one after another."""
        from funcppo.kg.answers import explain_answer
        from funcppo.kg.ranking import recount_check
        from funcppo.kg.run.fit import left_out_of

        check = recount_check.RecountCheck(setup.evaluator)
        split = options.split_of(setup)
        if details is not None:
            recount_check.check_details(
                details,
                setup.log_settings,
                options.target,
                len(split),
                setup.evaluator.protocol.sides,
            )
        rules, rows = self._draw_sample(
            len(check.logic.rules), len(split), details
        )
        status.update(f"counting {len(rules):,} rules")
        yield check.compare_supports(rules, TIME_SHARES[0] * seconds_left)
        if not rows:
            note = (
                f"the {options.split} split is empty: nothing else is compared"
            )
            print_notes([note], make_console(self.json == "-"))
            return
        status.update(f"ranking {len(rows):,} queries")
        ranked = check.rank(split, rows)
        yield from check.compare_ranks(ranked, TIME_SHARES[1] * seconds_left)
        if details is not None:
            yield from check.compare_details(details, split, rows)
        status.update("checking proofs")
        yield check.compare_proofs(ranked, TIME_SHARES[2] * seconds_left)
        run = setup.policy_run
        if run is not None and run.questions is not None:
            status.update("recounting evidence")
            yield check.compare_evidence(
                partial(explain_answer, run),
                left_out_of(run.run_config.questions),
                ranked,
                TIME_SHARES[3] * seconds_left,
            )

    def _draw_sample(
        self, n_rules: int, n_queries: int, details: Details | None
    ) -> tuple[list[int], list[int]]:
        """Draw the rules and queries to compare, in random order."""
        queries: Sequence[int] = range(n_queries)
        if details is not None:
            queries = sorted({row for row, _ in details.lines})
        draw = random.Random(self.seed)
        rules = draw.sample(range(n_rules), min(n_rules, self.n_rules))
        n = min(len(queries), self.max_queries)
        return rules, draw.sample(queries, n)


def _print_comparison(console: Console, comparison: Comparison) -> None:
    """Print one line on a kind of comparison, and one for each disagreement."""
    n_agreeing = comparison.n_compared - len(comparison.disagreements)
    is_sample = comparison.n_total > comparison.n_compared
    total = f"of {comparison.n_total:,}; " if is_sample else ""
    console.print(
        f"{comparison.kind}: {n_agreeing:,} of {comparison.n_compared:,} {comparison.unit} agree "
        f"({total}{comparison.seconds:.1f} s)"
    )
    for line in comparison.disagreements:
        console.print(f"  {line}")
