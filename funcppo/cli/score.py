"""`funcppo score`: scores, probabilities and ranks of given triples."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from funcppo.cli import EXIT_UNFINISHED, Terminated
from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    bounded,
    cut_when,
    lock_output,
    print_notes,
    write_json,
)
from funcppo.cli.options import HIDDEN, Opt, OptionalFile, ScoreOptions
from funcppo.core.files import shorten
from funcppo.core.settings import DeviceName, Size
from funcppo.kg.graph.triples import (
    DEFAULT_CONFIG,
    DataConfig,
    find_columns,
    is_column_word,
    iter_rows,
)

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.kg.answers import Answerer, TripleScorer

    Row = list[str]

LABELS = {"1": True, "true": True, "0": False, "-1": False, "false": False}


@dataclass(frozen=True, kw_only=True)
class Score(ScoreOptions):
    """Score given triples: the probability that each is true, its rank on both sides, and why.

    TRIPLES has a head, a relation and a tail a line, with tabs between them or as CSV, and perhaps a label (1 or 0)
    after them; - is standard input. A known fact is scored without itself. The probability is fitted on the valid split
    against as many sampled and as many hard false triples; without that split there is none. The verdict is derived, no
    proof, or what name is unknown. With labels, the area under the ROC curve is printed, and how many labels the
    probability tells at the threshold that valid sets.

    Exit status: 0 scored, 2 bad input, 3 not all within --seconds.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo score runs/s1 triples.tsv --out scored.csv",
        "funcppo score runs/s1 triples.tsv --explain",
    )

    triples: str
    """File of triples, or - for standard input."""
    out: Annotated[str, Opt("FILE|-")] = "-"
    """Write to FILE: CSV, lines of JSON (.jsonl) or Parquet (.parquet) by its ending; - writes CSV to standard
    output."""
    explain: bool = False
    """Add the rule that says most for each triple, and its proof to lines of JSON. Default: off."""
    rules: Annotated[OptionalFile, HIDDEN] = None
    """Rule file to use instead of the data set's own rules (data sets only). Default: the data set's rules."""
    data: Annotated[DataConfig, HIDDEN] = DEFAULT_CONFIG
    """How files of triples are read and split."""
    score: Annotated[str, HIDDEN] = "auto"
    """Score of a candidate, as --score of `funcppo evaluate`. Default: that of `funcppo predict`."""
    height: Annotated[Size | None, HIDDEN] = None
    """Maximum height of a proof (data sets only). Default: chosen on the valid split."""
    device: Annotated[DeviceName, HIDDEN] = "cpu"
    """Device to score on."""
    json: Annotated[str | None, HIDDEN] = None
    """Write the summary as JSON to FILE. Default: no JSON."""

    def run(self) -> int:
        """Score the triples and write them; return the exit status.

        Returns:
          The exit status.
        """
        from funcppo.kg.answers import TripleScorer

        triples = self.triples if self.triples != "-" else None
        self.prepare(("--out", self.out), inputs=[triples])
        rows, has_labels = self._read()
        with (
            lock_output(self.out),
            bounded(self.seconds, self.device) as is_over,
        ):
            answerer, notes = self.open_answerer()
            scorer = TripleScorer(answerer, self.explain)
            summary = self._score(answerer, scorer, rows, has_labels, is_over)
        write_json(self.json, summary)
        print_notes([*notes, *_summary_notes(summary)])
        return EXIT_UNFINISHED if summary["n_left_out"] else 0

    def _read(self) -> tuple[list[Row], bool]:
        """Read the rows of the file, and whether they have labels.

        Raises:
          ValueError: a line is no triple, or lacks a label; names it.
        """
        place = "standard input" if self.triples == "-" else self.triples
        places: list[int] = []  # of the columns, by a header that names them
        rows: list[Row] = []
        for number, row in enumerate(_iter_file(self.triples, place), 1):
            if number == 1:
                places = _header_columns(row)
                if places:
                    continue
            if row in ([], [""]):
                continue
            if places:
                row = [x for i in places for x in row[i : i + 1]]
            is_labelled = all(x.lower() in LABELS for x in row[3:])
            widths = {len(row), *map(len, rows[:1])}
            if widths not in ({3}, {4}) or not is_labelled:
                raise ValueError(
                    f"{place}:{number}: expected head, relation and tail, with a label (1 or 0) on all lines or none, "
                    f"got {shorten(repr(row))}"
                )
            rows.append(row)
        if not rows:
            raise ValueError(f"{place}: expected triples, got none")
        return rows, len(rows[0]) == 4

    def _score(
        self,
        answerer: Answerer,
        scorer: TripleScorer,
        rows: Sequence[Row],
        has_labels: bool,
        is_over: Callable[[], bool],
    ) -> JsonObject:
        """Score the rows chunk by chunk, and write them, until --seconds are over; return the summary."""
        from funcppo.kg.answers import (
            JSON_ENDINGS,
            SCORE_COLUMNS,
            records_text,
            summarise_labels,
            write_records,
        )

        start, probabilities = time.perf_counter(), []
        labels = [LABELS[row[3].lower()] for row in rows if has_labels]
        counts: Counter[str] = Counter()
        columns = SCORE_COLUMNS[: None if self.explain else -1]
        columns += ("label",) * has_labels
        parts: list[str] = []  # for a file, when all are there
        write = sys.stdout.write if self.out == "-" else parts.append
        with WorkDisplay("scoring") as bar:
            for found in _iter_scored(scorer, rows, is_over):
                first = len(probabilities)
                for record, label in zip(found, labels[first:]):
                    record["label"] = label
                counts.update(record["verdict"] for record in found)
                probabilities += [record["probability"] for record in found]
                write(
                    records_text(
                        found,
                        columns,
                        as_json=Path(self.out).suffix in JSON_ENDINGS,
                        with_header=not first,
                    )
                )
                bar.update("scoring", len(probabilities), len(rows))
        if self.out != "-":
            write_records(Path(self.out), "".join(parts), columns)
        fitted = scorer.calibration
        summary: JsonObject = {
            "dataset": answerer.dataset.name,
            "score": answerer.subject.score.name,
            "n_triples": len(probabilities),
            "n_left_out": len(rows) - len(probabilities),
            "verdicts": counts,
            "calibration": fitted and fitted.to_json(),
            "seconds": time.perf_counter() - start,
        }
        if has_labels and fitted is not None:
            known = labels[: len(probabilities)]
            summary |= summarise_labels(probabilities, known, fitted.threshold)
        return summary


def _iter_scored(
    scorer: TripleScorer, rows: Sequence[Row], is_over: Callable[[], bool]
) -> Iterator[list[JsonObject]]:
    """Yield the records of one chunk of triples after another until the time is over."""
    from funcppo.kg.answers import CHUNK_TRIPLES

    first, size = 0, CHUNK_TRIPLES
    while first < len(rows):
        chunk = rows[first : first + size]
        found = None
        with cut_when(is_over):
            found = scorer.score([(x[0], x[1], x[2]) for x in chunk])
        if found is None and first:
            return
        if found is None:
            raise Terminated
        yield found
        # The more there are, the more they share: large chunks take a quarter less.
        first, size = first + size, min(2 * size, 8 * CHUNK_TRIPLES)


def _iter_file(name: str, place: str) -> Iterator[Row]:
    """Return an iterator over the rows of a file of triples, or of standard input."""
    from funcppo.kg.graph import loaders, text

    if name.endswith(".parquet"):
        return loaders.parquet_rows(Path(name))
    content = text.read_content(Path(name))
    text.decode(content, place)
    return iter_rows(content, place)


def _header_columns(row: Row) -> list[int]:
    """Return the columns of head, relation, tail and perhaps label that a header names; none if the row is a triple."""
    found = find_columns(row)
    if found is None or not all(is_column_word(row[i]) for i in found):
        return []
    others = [i for i in range(len(row)) if i not in found]
    return found + [i for i in others if len(others) == 1 or row[i] == "label"]


def _summary_notes(summary: JsonObject) -> list[str]:
    """Format the numbers of verdicts, the speed, the probability and what the labels say of it."""
    n, seconds = summary["n_triples"], summary["seconds"]
    verdicts = ", ".join(f"{k:,} {x}" for x, k in summary["verdicts"].items())
    notes = [
        f"{n:,} triples ({verdicts}) in {seconds:.1f} s, score {summary['score']}"
    ]
    if summary["n_left_out"]:
        notes.append(
            f"{summary['n_left_out']:,} triples are left out: --seconds"
        )

    fitted = summary["calibration"]
    if fitted is None:
        notes.append("no probability: there is no valid split to fit it on")
        return notes
    notes.append(
        f"probability: of {fitted['n_triples']:,} triples of valid among false ones, half of them hard; calibration "
        f"error {fitted['calibration_error']:.3f} on halves left out"
    )
    if summary.get("auc") is not None:
        notes.append(
            f"labels: AUC {summary['auc']:.4f}, accuracy {summary['accuracy']:.4f} at the threshold "
            f"{fitted['threshold']:.4f} of valid"
        )
    return notes
