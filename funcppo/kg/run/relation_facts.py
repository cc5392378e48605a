"""All new facts of a relation that the rules derive, best first, in a file that a killed process can be resumed from.

`derive` works head entity by head entity and appends what it finds to FILE.part, a line of JSON for each fact;
`finish` sorts these lines by score into FILE. What the lines depend on stands in FILE.settings.json beside them.
"""

from __future__ import annotations

import csv
import io
import json
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from funcppo.core import json_io, record_log
from funcppo.core.atomic_io import named_errors, write_atomically
from funcppo.core.json_io import Json
from funcppo.kg.logic.triple_index import TAIL
from funcppo.kg.ranking.prediction import OpenQuery
from funcppo.kg.run.answers import (
    CSV_COLUMNS,
    Answer,
    Answerer,
    QueryAnswers,
    csv_row,
)

# head entities of a step; later steps are longer or shorter, as time and memory allow
FIRST_STEP_HEADS = 64
MAX_STEP_HEADS = 1 << 14
TARGET_STEP_SECONDS = 2.0
MAX_STEP_FACTS = 1 << 18
# quantised score that stands for 0 in FILE.part
_ZERO = -(2**53)


class Progress(NamedTuple):
    """How far the search for new facts is."""

    n_heads: int  # head entities that are done
    n_all_heads: int
    n_facts: int  # facts that were found


class FactCounts(NamedTuple):
    """What stands in FILE, and what does not."""

    n_facts: int
    # facts r(e, e) that were left out, as nothing says that the relation may link an entity to itself
    n_self: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationFile:
    """The file of the new facts of a relation."""

    path: Path
    """FILE: CSV if it ends in .csv, else lines of JSON."""
    settings: Json
    """What its lines depend on."""

    @property
    def part_path(self) -> Path:
        """The facts that were found, in the order of head entities."""
        return record_log.part_path(self.path)

    @property
    def settings_path(self) -> Path:
        """The settings beside the facts."""
        return record_log.settings_path(self.path)


def open_file(
    file: RelationFile, *, resume: bool, overwrite: bool
) -> int | None:
    """Prepare the files of new work, or find out where earlier work ended.

    Args:
      resume: continue from FILE.part, if it is there.
      overwrite: replace the files of earlier work.

    Returns:
      The head entity to continue with; facts of this one and of later ones are not in FILE.part. None if FILE is
      complete.

    Raises:
      ValueError: there is earlier work and neither is set, or it was done with other settings.
    """
    has_part = file.part_path.is_file()
    if (has_part or file.path.exists()) and not (resume or overwrite):
        got = (
            f"unfinished work in {file.part_path}"
            if has_part
            else "a file that exists"
        )
        raise ValueError(
            f"--out {file.path}: expected --resume, --overwrite or a new file, got {got}"
        )
    if resume and (has_part or file.path.exists()):
        record_log.check_settings(file.settings_path, file.settings, file.path)
        return _truncate_to_whole_heads(file.part_path) if has_part else None

    record_log.write_settings(file.settings_path, file.settings)
    write_atomically(file.part_path, lambda f: f.write(b""))
    return 1


def derive(
    answerer: Answerer,
    predicate: int,
    file: RelationFile,
    first_head: int,
    min_score: float = 0.0,
    *,
    with_self: bool = False,
) -> Iterator[Progress]:
    """Append the new facts of a relation to FILE.part, some head entities at a time.

    Args:
      first_head: what `open_file` returns.
      min_score: leave out facts that score less.
      with_self: keep facts r(e, e) of a relation without loops too; otherwise `finish` leaves them out.

    Returns:
      Yields the progress after each step, at which the work may end.
    """
    n_heads = answerer.dataset.n_constants
    n_facts = 0
    has_loops = bool(answerer.predictor.has_loops[predicate])
    leave_out_self = not (with_self or has_loops)
    head, size = first_head, FIRST_STEP_HEADS
    path = file.part_path
    with named_errors(path), open(path, "ab") as output:
        while head <= n_heads:
            start = time.perf_counter()
            heads = range(head, min(head + size, n_heads + 1))
            queries = [OpenQuery(predicate, TAIL, h) for h in heads]
            answers = answerer.answer(
                queries, k=None, with_self=True, min_score=min_score
            )
            lines = _part_lines(heads, answers, leave_out_self)
            output.write("".join(lines).encode())
            output.flush()

            head += len(heads)
            n_facts += len(lines)
            yield Progress(head - 1, n_heads, n_facts)
            seconds = max(time.perf_counter() - start, 1e-3)
            for_time = len(heads) * TARGET_STEP_SECONDS / seconds
            for_memory = len(heads) * MAX_STEP_FACTS / max(len(lines), 1)
            largest = min(4 * len(heads), for_time, for_memory, MAX_STEP_HEADS)
            size = max(FIRST_STEP_HEADS, int(largest))


def finish(file: RelationFile) -> FactCounts:
    """Write FILE, the facts of FILE.part with the best first, and remove FILE.part.

    Returns:
      The number of facts, and of those that were left out.
    """
    offsets, scores, n_self = _read_part(file.part_path)
    order = np.argsort(-np.array(scores, np.int64), kind="stable")
    starts = np.array(offsets, np.int64)[order]
    sorted_scores = np.array(scores, np.int64)[order]
    # A score that is repeated has the rank of its first fact.
    ranks = 1 + np.searchsorted(-sorted_scores, -sorted_scores)
    is_csv = file.path.suffix == ".csv"

    def write(output: IO[bytes]) -> None:
        if is_csv:
            output.write(_format_row(CSV_COLUMNS))
        with open(file.part_path, "rb") as part:
            for start, rank in zip(starts.tolist(), ranks.tolist()):
                part.seek(start)
                fields = {"rank": rank, **json.loads(part.readline())}
                del fields["head_id"], fields["is_self"]
                output.write(_format_line(fields, is_csv))

    write_atomically(file.path, write)
    file.part_path.unlink()
    return FactCounts(len(ranks), n_self)


def _read_part(path: Path) -> tuple[array[int], array[int], int]:
    """Where the lines of FILE.part start that stand in FILE, their scores, and the number of the others."""
    offsets, scores = array("q"), array("q")
    n_self, offset = 0, 0
    with open(path, "rb") as part:
        for line in part:
            fields = json.loads(line)
            score = fields["quantised_score"]
            if fields["is_self"]:
                n_self += 1
            else:
                offsets.append(offset)
                scores.append(_ZERO if score is None else score)
            offset += len(line)
    return offsets, scores, n_self


def _format_line(fields: Json, is_csv: bool) -> bytes:
    """A fact as a line of CSV or JSON."""
    if is_csv:
        return _format_row(csv_row(fields))
    text = json.dumps(fields, ensure_ascii=False) + "\n"
    return json_io.escape_unprintable(text).encode()


def _format_row(values: Iterable[object]) -> bytes:
    """A row of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


def _part_lines(
    heads: Iterable[int], answers: Iterable[QueryAnswers], leave_out_self: bool
) -> list[str]:
    """The facts of some heads as lines of FILE.part."""
    lines: list[str] = []
    for head, found in zip(heads, answers):
        for answer in found.answers:
            is_self = leave_out_self and answer.head == answer.tail
            lines.append(_part_line(head, found.query, answer, is_self))
    return lines


def _part_line(head_id: int, query: str, answer: Answer, is_self: bool) -> str:
    """A fact as a line of FILE.part."""
    marks = {"head_id": head_id, "is_self": is_self}
    fields = {**marks, "query": query, **answer.to_json()}
    del fields["rank"]  # among the answers of the query
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _truncate_to_whole_heads(path: Path) -> int:
    """Cut off the facts of the last head entity, which may be incomplete; return it, 1 if there is none."""
    with open(path, "rb+") as part:
        offset, start, head = 0, 0, 1
        for line in part:
            if not line.endswith(b"\n"):
                break
            head_id = int(json.loads(line)["head_id"])
            if head_id != head:
                head, start = head_id, offset
            offset += len(line)
        part.truncate(start)
    return head
