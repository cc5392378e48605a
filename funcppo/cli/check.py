"""`funcppo check`: an independent recount of supports, verdicts, ranks and proofs on a sample of the user's data."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from funcppo.cli.common import (
    WorkDisplay,
    check_outputs,
    make_console,
    open_dataset,
    print_notes,
    set_target_threads,
    write_json,
)
from funcppo.cli.evaluate import Evaluate, EvaluationSetup, prepare_evaluation
from funcppo.cli.options import HIDDEN, Opt, OptionalFile, TargetOptions
from funcppo.core.settings import PositiveFloat, Seed, Size

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.cli.common import WorkDisplay
    from funcppo.kg.ranking.ranking import Ranking
    from funcppo.kg.ranking.recount_check import (
        Comparison,
        Details,
        RecountCheck,
    )
    from funcppo.kg.run.run import Run

# parts of --seconds for supports, ranks, proofs and evidence
TIME_SHARES = (0.35, 0.35, 0.15, 0.15)


@dataclass(frozen=True, kw_only=True)
class Check(TargetOptions):
    """Check supports, verdicts, ranks, proofs and evidence on a sample of the data by an independent recount.

    The recount is plain Python over sets and shares no code with the prover. It counts the support of rules by
    backtracking over the facts, finds the candidates of queries with their scores and ranks, checks each step of the
    proofs of their answers, and counts the evidence that a run weighs which learnt from questions. A data set is
    checked at the settings that `funcppo evaluate` chooses, a run at its own; the scores of a policy are taken as they
    are. What --seconds does not suffice for is left out, and a line says so. With --details FILE, the lines of a file
    that `funcppo evaluate` wrote are compared with the recount: counts, scores and ranks, and lines that
    are not there. Of a file of proofs, which --json of a program wrote (PROOF.json), each step is checked
    with the facts and rules of --set graph=DATASET and --rules, and all texts and names; probabilities are no claims.

    Exit status: 0 all that was compared agrees, 1 something disagrees, 2 bad input, or nothing could be compared.
    """

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
    seconds: PositiveFloat = 60.0
    """Time limit of the recount, in seconds. Reading the data, choosing the settings and ranking the sample come on
    top; the seconds that they took are printed."""
    seed: Seed = 0
    """Random seed of the samples."""

    def run(self) -> int:
        """Check proofs or recount the sample and print how much agrees; return the exit status, 1 for a disagreement.

        Returns:
          The exit status.
        """
        self._check_outputs()
        is_file = self.target.endswith(".json")
        return self._check_proofs() if is_file else self._recount()

    def _recount(self) -> int:
        """Recount the sample and print how much agrees; return the exit status."""
        set_target_threads(self.target, self.threads)
        console = make_console(self.json == "-")
        comparisons: list[Comparison] = []
        start = time.perf_counter()
        with WorkDisplay("reading") as status:
            details = self._read_details()
            options = self._evaluation_options(details)
            setup = prepare_evaluation(options, status.update, with_proofs=True)
            task = setup.evaluator.task
            if details is not None:
                _check_details(details, setup, options)
            prepare_seconds = time.perf_counter() - start
            self._print_preparation(setup, prepare_seconds, console)
            for comparison in self._compare(
                setup, options, details, console, status
            ):
                _print_comparison(console, comparison)
                comparisons.append(comparison)
        notes = [note for part in comparisons for note in part.notes]
        print_notes(notes, console, self._most_notes)

        write_json(
            self.json,
            {
                "dataset": task.dataset.name,
                "split": options.split,
                "score": setup.score,
                "height": task.max_height,
                "smoothing": task.cfg.smoothing,
                "object_identity": task.cfg.object_identity,
                "seed": self.seed,
                "prepare_seconds": prepare_seconds,
                "checks": [part.to_json() for part in comparisons],
            },
        )
        if not any(part.n_compared for part in comparisons):
            raise ValueError(
                f"--seconds {self.seconds:g}: nothing could be compared"
            )
        has_disagreement = any(part.disagreements for part in comparisons)
        return int(has_disagreement)

    def _check_proofs(self) -> int:
        """Check the proofs of a file and print the first error of each; return the exit status."""
        from funcppo.kg.ranking.recount_check import compare_proof_file

        if self.graph is None:
            raise ValueError(
                f"{self.target}: expected --set graph=DATASET, the facts and rules of its proofs"
            )
        dataset = open_dataset(self.graph, self.rules, self.data)
        found = compare_proof_file(Path(self.target), dataset)
        console = make_console(self.json == "-")
        _print_comparison(console, found)
        fields = {"dataset": dataset.name, "checks": [found.to_json()]}
        write_json(self.json, fields)
        return int(bool(found.disagreements))

    def _print_preparation(
        self, setup: EvaluationSetup, seconds: float, console: Console
    ) -> None:
        """Print what was chosen and found in the data, and the time that it took."""
        prepared = f"data read and settings chosen in {seconds:.1f} s, not counted in --seconds"
        notes = [*setup.notes, *setup.evaluator.task.notes, prepared]
        print_notes(notes, console, self._most_notes)

    @property
    def _most_notes(self) -> int | None:
        """Return how many notes are printed before and after the comparisons."""
        return None if self.verbose else 1

    def _check_outputs(self) -> None:
        """Check that --json overwrites no input."""
        details = [] if self.details is None else [Path(self.details)]
        inputs = [*self.inputs(), *details]
        check_outputs([("--json", self.json)], inputs)

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
        options = Evaluate(
            target=self.target,
            split=self.split,
            score=self.score,
            rules=self.rules,
            graph=self.graph,
            recount=self.recount,
            data=self.data,
        )
        if details is None:
            return options
        names = ["split", "score"]
        if not self.is_run:  # a run has its own
            names += ["height", "smoothing", "object_identity"]
        settings = {name: details.settings.get(name) for name in names}
        return replace(options, **settings)

    def _compare(
        self,
        setup: EvaluationSetup,
        options: Evaluate,
        details: Details | None,
        console: Console,
        status: WorkDisplay,
    ) -> Iterator[Comparison]:
        """Yield the comparisons of supports, verdicts, proofs and evidence one after another."""
        from funcppo.kg.ranking import recount_check

        check = recount_check.RecountCheck(setup.evaluator)
        split = options.split_of(setup)
        rules, rows = self._draw_sample(
            len(check.logic.rules), len(split), details
        )
        seconds = [share * self.seconds for share in TIME_SHARES]

        status.update(f"counting {len(rules):,} rules")
        yield check.compare_supports(rules, seconds[0])
        if not rows:
            print_notes(
                [
                    f"the {options.split} split is empty: nothing else is compared"
                ],
                console,
            )
            return
        status.update(f"ranking {len(rows):,} queries")
        start = time.perf_counter()
        ranked = check.rank(split, rows)
        ranking_seconds = time.perf_counter() - start
        if self.verbose:
            note = f"{len(rows):,} queries ranked in {ranking_seconds:.1f} s, not counted in --seconds"
            print_notes([note], console)
        yield from check.compare_ranks(ranked, seconds[1])
        if details is not None:
            yield from check.compare_details(details, split, rows)
        status.update("checking proofs")
        yield check.compare_proofs(ranked, seconds[2])
        status.update("recounting evidence")
        yield from _compare_evidence(
            check, setup.policy_run, ranked, seconds[3]
        )

    def _draw_sample(
        self, n_rules: int, n_queries: int, details: Details | None
    ) -> tuple[list[int], list[int]]:
        """Draw the rules and queries to compare, in random order."""
        draw = random.Random(self.seed)
        rules = _sample(draw, range(n_rules), self.n_rules)
        queries: Sequence[int] = range(n_queries)
        if details is not None:
            queries = sorted({row for row, _ in details.lines})
        return rules, _sample(draw, queries, self.max_queries)


def _check_details(
    details: Details, setup: EvaluationSetup, options: Evaluate
) -> None:
    """Check that a details file belongs to this evaluation.

    Raises:
      ValueError: it was made of other data, rules or parameters, or at other settings.
    """
    from funcppo.kg.ranking.recount_check import check_details

    split = options.split_of(setup)
    sides = setup.evaluator.protocol.sides
    check_details(
        details, setup.log_settings, options.target, len(split), sides
    )


def _compare_evidence(
    check: RecountCheck, run: Run | None, ranked: Ranking, seconds: float
) -> Iterator[Comparison]:
    """Yield the comparison of the evidence, for a run that learnt from example queries; else nothing."""
    from funcppo.kg.answers import explain_answer
    from funcppo.kg.scores.learned import weighed_kinds

    if run is None or run.questions is None:
        return
    left_out = run.run_config.questions.left_out
    assert left_out != "auto", "a stored run has what it chose"
    kinds = weighed_kinds(run.questions.weighed)
    explain = partial(explain_answer, run)
    yield check.compare_evidence(explain, left_out, kinds, ranked, seconds)


def _sample(
    draw: random.Random, population: Sequence[int], size: int
) -> list[int]:
    """Draw at most `size` of some numbers, in random order."""
    return draw.sample(population, min(len(population), size))


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
