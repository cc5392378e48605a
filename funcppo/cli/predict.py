"""`funcppo predict`: the best answers of an open query, or all new facts of a relation."""

from __future__ import annotations

import csv
import hashlib
import io
import json as jsonlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from funcppo.cli.common import (
    JSON_FORMAT,
    Interrupt,
    JsonObject,
    WorkDisplay,
    check_output_path,
    check_overwrites,
    data_files,
    defer_interrupt,
    graphs_allowed,
    lock_output,
    print_notes,
    select_device,
    set_target_threads,
    write_json,
    write_output,
)
from funcppo.cli.options import HIDDEN, JsonOutput, OptionalFile, ScoreOptions
from funcppo.core.files import shorten
from funcppo.core.settings import PositiveInt, UnitInterval
from funcppo.kg.graph.text import escape_unprintable, format_name
from funcppo.kg.show.names import score_text

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.core.record_log import RecordLog
    from funcppo.kg.answers import (
        Answer,
        Answerer,
        OpenQuery,
        QueryAnswers,
        RelationFile,
    )

# queries that are answered together at first; later as many as a second allows
FIRST_BATCH_QUERIES = 1
MAX_BATCH_QUERIES = 4096
BATCH_SECONDS = 1.0


class _ParsedQuery(NamedTuple):
    """A query, and how it was written."""

    query: OpenQuery
    text: str


class _AnsweredQuery(NamedTuple):
    """What is printed and written of the answers of a query; JSON values."""

    text: str
    fields: JsonObject  # of --json


@dataclass(frozen=True, kw_only=True)
class Predict(ScoreOptions):
    """Rank the answers of an open query r(h, X) or r(X, t), or list all new facts of a relation, best first.

    Candidates are the entities that the rules derive from the facts of train (and facts.txt). They have the score that
    the lines of `funcppo evaluate --details` give them; all other entities score 0. Known answers, those that some
    split or facts.txt holds, are left out and counted; --known lists them too, each scored without its own fact. The
    verdict of an answer is proved (the rules derive it from other facts) or not derivable; --unproved lists others too.

    A trained run scores by its policy, or by rule confidences where these rank its valid split better. A data set
    scores by rule confidences: what is best on its valid split, as chosen by `funcppo evaluate`.

    With --relation R --new, all facts R(h, t) that the rules derive and no split holds are listed. They are found head
    by head and sorted at the end: FILE.part beside --out FILE grows meanwhile, and after an interruption the option
    resume continues it. Under the score evidence each is scored as an answer to R(h, X).

    With --queries FILE and --csv OUT (or --json OUT, without --csv), answers are a line of JSON in OUT.part as soon as
    they are found, and OUT is written when all are; after an interruption the option resume continues them.

    In a query, ?x, _ and a single capital such as X are variables; a name in single quotes is always an entity.

    Exit status: 0 answered, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    query: str | None = None
    """Query with one variable, such as "locatedIn(france, X)" or "'citizen of'(?who, China)". Default: the queries of
    --queries, or the facts of --new."""
    k: PositiveInt = 10
    """Number of answers of a query."""
    known: bool = False
    """List known answers too, marked. Default: they are left out and counted."""
    with_self: Annotated[bool, HIDDEN] = False
    """List the entity of a query among its own answers, as `funcppo evaluate` ranks it. Default: only if some triple of
    the relation, or the head of a rule, links an entity to itself."""
    min_score: Annotated[UnitInterval, HIDDEN] = 0.0
    """Leave out answers with a smaller score."""
    unproved: bool = False
    """List after all others the entities that no rule derives, marked unproved, by their prior by link embeddings. It
    proves nothing; the run must have link embeddings. Default: off."""
    explain: bool = False
    """Show the proof of each answer and, of a run that learnt from questions, the evidence; by a score with
    other facts what these add. Default: off."""
    queries: OptionalFile = None
    """Answer the queries in FILE, one a line. Default: QUERY."""
    relation: str | None = None
    """Relation whose new facts --new lists. Default: none."""
    new: bool = False
    """List all new facts of --relation. Default: off."""
    out: OptionalFile = None
    """Write the new facts to FILE: CSV if it ends in .csv, otherwise lines of JSON. Default: print the first --k."""
    resume: bool = False
    """Continue the interrupted work on --out FILE, or on the answers to --queries in --csv or --json FILE. Default:
    off."""
    overwrite: bool = False
    """Replace --out FILE if it exists, or unfinished answers to --queries. Default: off."""
    csv: JsonOutput = None
    """Write the answers as CSV to FILE; - writes them to standard output in place of the text. Default: no CSV."""

    def run(self) -> int:
        """Answer the queries and print the answers.

        Returns:
          The exit status.
        """
        self._check_options()
        with (
            lock_output(self._part_target()),
            graphs_allowed(self.cuda_graphs, self.device),
        ):
            return self._run()

    def _run(self) -> int:
        """Answer with a file that no other process writes; the exit status."""
        from funcppo.kg.ranking.policy_score import graph_fallback_notes

        set_target_threads(self.target, self.threads)
        answerer, notes = self.open_answerer()
        if self.new:
            status = self._list_new_facts(answerer)
        else:
            queries, query_notes = self._read_queries(answerer)
            settings = self._query_settings(answerer, queries)
            status = self._answer_queries(answerer, queries, settings)
            notes += query_notes
        notes += graph_fallback_notes(answerer.subject.search_step)
        # Answers come first; an error stands alone.
        print_notes(notes)
        return status

    def _check_options(self) -> None:
        """Check options and outputs, before any work."""
        asked = [self.query is not None, self.queries is not None, self.new]
        if sum(asked) != 1:
            raise ValueError(
                f"expected QUERY, --queries FILE, or --relation R --new, got {sum(asked) or 'none'} of them"
            )

        if self.new != (self.relation is not None):
            raise ValueError("--relation, --new: expected both or neither")
        if self.out and not self.new:
            raise ValueError(
                "--out: expected --relation R --new --out FILE beside it"
            )
        for name in ("resume", "overwrite"):
            if getattr(self, name) and self._part_target() is None:
                raise ValueError(
                    f"--{name}: expected --relation R --new --out FILE, or --queries FILE with --csv FILE or "
                    "--json FILE, beside it"
                )
        for name in ("explain", "known", "unproved", "csv"):
            if getattr(self, name) and self.new:
                raise ValueError(
                    f"--{name}: expected a query, got --relation with --new"
                )

        if self.unproved and self.min_score:
            raise ValueError(
                "--unproved, --set min_score: expected one of them: unproved answers score 0"
            )
        if self.csv == "-" and self.json == "-":
            raise ValueError("--csv -, --json -: expected one of them")
        select_device(self.device)
        self._check_outputs()

    def _check_outputs(self) -> None:
        """Check the files to write, before any work."""
        from funcppo.core import record_log

        inputs = data_files(self.target, self.rules)
        inputs += [Path(self.queries)] if self.queries else []
        files = [("--csv", self.csv), ("--out", self.out)]
        for option, path in files:
            if path is not None and path != "-":
                check_output_path(option, Path(path))
        files.append(("--json", self.json))

        part_of = self._part_target()
        if part_of is None:
            check_overwrites(files, inputs)
            return
        part = record_log.part_path(part_of)
        option = next(x for x, path in files if path and Path(path) == part_of)
        files += [(option, str(part))]
        files += [(option, str(record_log.settings_path(part_of)))]
        check_overwrites(files, inputs)
        if not self.new:
            record_log.check_writable(
                part, resume=self.resume, overwrite=self.overwrite
            )

    def _part_target(self) -> Path | None:
        """The file that has its parts beside it until all are there, for --resume to go on with; None without one."""
        names = [self.csv, self.json] if self.queries else [self.out]
        paths = [Path(name) for name in names if name and name != "-"]
        # A device or a pipe has nothing beside it.
        files = [x for x in paths if x.is_file() or not x.exists()]
        return files[0] if files else None

    # -- queries

    def _answer_queries(
        self,
        answerer: Answerer,
        queries: Sequence[_ParsedQuery],
        settings: JsonObject,
    ) -> int:
        """Answer the queries, some at a time, until all are answered or an interrupt.

        Args:
          settings: what the answers depend on.
        """
        if self._is_complete(settings):
            print(f"{self._part_target()} is complete already")
            return 0

        log = self._open_log(queries, settings)
        answered = list(log.records) if log else []
        n_before = len(answered)
        with defer_interrupt() as interrupt:
            seconds = self._answer_rest(
                answerer, queries, answered, log, interrupt
            )

        is_whole = len(answered) == len(queries)
        if log and not is_whole:
            _print_interrupted(log, len(answered), len(queries))
            return interrupt.exit_status
        self._write_answers(answerer, answered, seconds)
        if log:
            log.path.unlink()
        self._print_summary(answered, n_before, len(queries), seconds)
        return 0 if is_whole else interrupt.exit_status

    def _answer_rest(
        self,
        answerer: Answerer,
        queries: Sequence[_ParsedQuery],
        answered: list[JsonObject],
        log: RecordLog | None,
        interrupt: Interrupt,
    ) -> float:
        """Add the answers of the queries that have none, until all have or an interrupt; the seconds it took."""
        from funcppo.core import record_log

        is_quiet = "-" in (self.csv, self.json)
        n_before = len(answered)
        start = time.perf_counter()
        # A repeated signal ends the queries in progress; those before stay.
        with (
            suppress(KeyboardInterrupt),
            WorkDisplay("answering") as bar,
        ):
            for batch in self._iter_batches(answerer, queries[n_before:]):
                records = [query.fields for query in batch]
                if log:
                    record_log.append(log, records)
                answered += records
                if not is_quiet:
                    write_output("".join(query.text for query in batch))

                n_new = len(answered) - n_before
                note = _speed_text(n_new, time.perf_counter() - start)
                bar.update("answering", len(answered), len(queries), note=note)
                if interrupt.requested:
                    break
        if log:
            record_log.close(log)
        return time.perf_counter() - start

    def _is_complete(self, settings: JsonObject) -> bool:
        """Whether earlier work is resumed that has written all files.

        Raises:
          ValueError: it was done with other settings.
        """
        from funcppo.core import record_log

        path = self._part_target()
        if not self.resume or path is None:
            return False
        if not path.exists() or record_log.part_path(path).exists():
            return False
        beside = record_log.settings_path(path)
        record_log.check_settings(beside, settings, path)
        outputs = [name for name in (self.csv, self.json) if name]
        return all(Path(name).is_file() for name in outputs)

    def _open_log(
        self, queries: Sequence[_ParsedQuery], settings: JsonObject
    ) -> RecordLog | None:
        """The answers to a file of queries that stand beside --csv or --json FILE; None without such a file."""
        from funcppo.core import record_log

        path = self._part_target()
        if path is None:
            return None
        part = record_log.part_path(path)
        log = record_log.open_log(
            part,
            record_log.settings_path(path),
            settings,
            resume=self.resume,
            select=partial(_check_answers, path=part, queries=queries),
        )
        print_notes(log.notes)
        return log

    def _print_self(self, n_self: int) -> None:
        """Print how many answers were left out that are the entity of their query."""
        if not n_self:
            return
        is_one = n_self == 1
        answers = "answer that is" if is_one else "answers that are"
        print_notes(
            [
                f"left out {n_self:,} derivable {answers} the entity of the query itself: no triple of the relation "
                f"links an entity to itself (--set with_self=on keeps {'it' if is_one else 'them'})"
            ]
        )

    def _print_summary(
        self,
        answered: Sequence[JsonObject],
        n_before: int,
        n_queries: int,
        seconds: float,
    ) -> None:
        """Print what was left out; of a file also how many queries were answered, and how fast.

        Args:
          n_before: queries that were answered before an interruption.
        """
        self._print_self(sum(query["n_self"] for query in answered))
        if self.queries is None:
            return
        n_new = len(answered) - n_before
        n_empty = sum(not query["answers"] for query in answered)
        before = f", after {n_before:,} before" if n_before else ""
        print_notes(
            [
                f"{n_new:,} of {n_queries:,} queries in {seconds:.1f} s, {_speed_text(n_new, seconds)}{before}; "
                f"{n_empty:,} have no answer to list"
            ]
        )

    def _iter_batches(
        self, answerer: Answerer, queries: Sequence[_ParsedQuery]
    ) -> Iterator[list[_AnsweredQuery]]:
        """Yield the answers of some queries after others, about a second's work at a time."""
        first, size = 0, FIRST_BATCH_QUERIES
        while first < len(queries):
            start = time.perf_counter()
            batch = queries[first : first + size]
            yield self._answer(answerer, batch)
            first += len(batch)
            seconds = time.perf_counter() - start
            fitting = len(batch) * BATCH_SECONDS / max(seconds, 1e-3)
            size = max(1, int(min(4 * size, fitting, MAX_BATCH_QUERIES)))

    def _answer(
        self, answerer: Answerer, queries: Sequence[_ParsedQuery]
    ) -> list[_AnsweredQuery]:
        """The answers of some queries."""
        from funcppo.kg.run.subject import describe_numbers

        score = answerer.subject.score.name
        legend = describe_numbers(answerer.subject) if self.explain else ""
        found = answerer.answer(
            [asked.query for asked in queries],
            k=self.k,
            with_known=self.known,
            with_self=self.with_self,
            min_score=self.min_score,
            with_explanations=self.explain,
            with_unproved=self.unproved,
        )
        answered: list[_AnsweredQuery] = []
        for asked, answers in zip(queries, found):
            # In files a query stands as it was written, so that they join with the queries.
            as_written = answers._replace(query=asked.text)
            answered.append(
                _AnsweredQuery(
                    text=_answers_text(answers, score, self.known, legend),
                    fields=as_written.to_json(),
                )
            )
        return answered

    def _read_queries(
        self, answerer: Answerer
    ) -> tuple[list[_ParsedQuery], tuple[str, ...]]:
        """The queries of the command line or of the file, and notes on a single one.

        Raises:
          ValueError: a query is bad; of a file, the message names the line.
        """
        from funcppo.kg.answers import read_open_query

        if self.query is not None:
            query, read = read_open_query(answerer.dataset, self.query)
            return [_ParsedQuery(query, self.query)], read.notes
        path = Path(str(self.queries))
        queries: list[_ParsedQuery] = []
        text = path.read_text(encoding="utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                query, _ = read_open_query(answerer.dataset, line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            queries.append(_ParsedQuery(query, line.removesuffix("\r")))
        if not queries:
            raise ValueError(f"{path}: expected a query a line, got none")
        return queries, ()

    def _write_answers(
        self,
        answerer: Answerer,
        answered: Sequence[JsonObject],
        seconds: float,
    ) -> None:
        """Write the answers of --json and of --csv."""
        from funcppo.kg.ranking import policy_score

        subject = answerer.subject
        step = subject.search_step
        result: JsonObject = {
            "dataset": answerer.dataset.name,
            "score": subject.score.name,
            "trained": subject.policy_run is not None,
            "height": subject.task.max_height,
            "notes": [*subject.notes, *policy_score.graph_fallback_notes(step)],
            "graphs": self.cuda_graphs,
            **policy_score.search_replay(step)._asdict(),
            "queries": answered,
            "seconds": seconds,
        }
        write_json(self.json, result)
        self._write_csv(answered)

    def _write_csv(self, answered: Sequence[JsonObject]) -> None:
        """Write the answers of --csv."""
        if self.csv is None:
            return
        from funcppo.core.files import write_atomically

        text = _csv_text(answered)
        if self.csv == "-":
            # Control characters of names are data in a file and commands to a terminal.
            is_terminal = sys.stdout.isatty()
            lines = map(escape_unprintable, text.split("\n"))
            write_output("\n".join(lines) if is_terminal else text)
            return
        content = text.encode()
        write_atomically(Path(self.csv), lambda file: file.write(content))

    # -- new facts of a relation

    def _list_new_facts(self, answerer: Answerer) -> int:
        """List the new facts of the relation."""
        if self.out is not None:
            return self._derive(answerer, Path(self.out))
        with tempfile.TemporaryDirectory() as folder:
            return self._derive(answerer, Path(folder) / "facts.jsonl")

    def _derive(self, answerer: Answerer, path: Path) -> int:
        """Write the new facts of the relation to a file, sorted at the end."""
        from funcppo.kg.answers import (
            derive_relation_facts,
            finish_relation_file,
            open_relation_file,
        )

        predicate = _find_relation(answerer, str(self.relation))
        file = self._relation_file(answerer, path)
        first = open_relation_file(
            file, resume=self.resume, overwrite=self.overwrite
        )
        if first is None:
            print(f"{path} is complete already")
            return 0
        n_heads = answerer.dataset.n_constants
        done = first - 1
        with (
            defer_interrupt() as interrupt,
            suppress(KeyboardInterrupt),
            WorkDisplay("deriving") as bar,
        ):
            for progress in derive_relation_facts(
                answerer,
                predicate,
                file,
                first,
                self.min_score,
                with_self=self.with_self,
            ):
                done = progress.n_heads
                note = f"{progress.n_facts:,} facts"
                bar.update("deriving", done, n_heads, note=note)
                if interrupt.requested:
                    break
        if done < n_heads:
            hint = (
                f"--resume continues {file.part_path}"
                if self.out
                else "with --out FILE, --resume could continue"
            )
            print_notes(
                [f"interrupted after {done:,} of {n_heads:,} entities; {hint}"]
            )
            return interrupt.exit_status
        n_facts, n_self = finish_relation_file(file)
        self._print_facts(answerer, file, n_facts)
        self._print_self(n_self)
        return 0

    def _relation_file(self, answerer: Answerer, path: Path) -> RelationFile:
        """The file with what its lines depend on."""
        from funcppo.kg.answers import RelationFile

        settings: JsonObject = {
            "relation": self.relation,
            **self._answer_settings(answerer),
            "is_csv": path.suffix == ".csv",
        }
        return RelationFile(path=path, settings=settings)

    def _query_settings(
        self, answerer: Answerer, queries: Sequence[_ParsedQuery]
    ) -> JsonObject:
        """What the answers of queries depend on, these included."""
        from funcppo.kg.answers import digest

        texts = jsonlib.dumps([query.text for query in queries])
        embedding = answerer.subject.embedding
        return {
            "format": JSON_FORMAT,
            **self._answer_settings(answerer),
            "k": self.k,
            "known": self.known,
            "explain": self.explain,
            "unproved": self.unproved,
            "embedding_digest": embedding and digest(embedding),
            "queries_digest": hashlib.sha256(texts.encode()).hexdigest()[:16],
        }

    def _answer_settings(self, answerer: Answerer) -> JsonObject:
        """What the answers depend on, beside what is asked."""
        from funcppo.kg.answers import digest

        subject = answerer.subject
        run = subject.policy_run
        cfg = subject.task.cfg
        return {
            "fingerprint": answerer.dataset.fingerprint,
            "score": subject.score.name,
            "height": subject.task.max_height,
            "smoothing": cfg.smoothing,
            "object_identity": cfg.object_identity,
            "min_score": self.min_score,
            "with_self": self.with_self,
            "params_digest": run and digest(run.state.best_params),
        }

    def _print_facts(
        self, answerer: Answerer, file: RelationFile, n_facts: int
    ) -> None:
        """Print how many facts there are and, without --out, the first of them."""
        score = answerer.subject.score.name
        relation = format_name(str(self.relation))
        headline = f"{n_facts:,} new facts of {relation}, score {score}"
        if self.out is not None:
            write_json(self.json, {"n_facts": n_facts, "out": self.out})
            if self.json != "-":
                print(f"{headline}: {file.path}")
            return

        with open(file.path, encoding="utf-8") as lines:
            facts = [jsonlib.loads(line) for line in islice(lines, self.k)]
        write_json(self.json, {"n_facts": n_facts, "facts": facts})
        if self.json == "-":
            return
        print(headline)
        for fact in facts:
            names = [format_name(fact[name]) for name in ("head", "tail")]
            atom = f"{relation}({', '.join(names)})"
            print(f"  {fact['rank']:>4}  {score_text(fact['score'])}  {atom}")
        if n_facts > len(facts):
            print(f"  ... and {n_facts - len(facts):,} more (--out FILE)")


def _csv_text(answered: Sequence[JsonObject]) -> str:
    """The rows of --csv."""
    from funcppo.kg.answers import CSV_COLUMNS

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for query in answered:
        writer.writerows(_csv_rows(query))
    return text.getvalue()


def _csv_rows(query: JsonObject) -> list[list[object]]:
    """The rows of --csv of a query; one without a listed answer has one row with its text alone."""
    from funcppo.kg.answers import CSV_COLUMNS, csv_row

    if not query["answers"]:
        return [[query["query"], *[""] * (len(CSV_COLUMNS) - 1)]]
    return [
        csv_row({"query": query["query"], **answer})
        for answer in query["answers"]
    ]


def _check_answers(
    records: list[JsonObject], path: Path, queries: Sequence[_ParsedQuery]
) -> list[JsonObject]:
    """The answers that a file holds, which are those of the first queries.

    Args:
      path: of the file, for the error.

    Raises:
      ValueError: they are not.
    """
    texts = [query.text for query in queries]
    for number, record in enumerate(records, 1):
        for name in ("query", "answers", "n_self"):
            if name not in record:
                raise ValueError(f"{path}:{number}: expected {name}, got none")
        expected = texts[number - 1] if number <= len(texts) else "no line"
        if record["query"] != expected:
            raise ValueError(
                f"{path}:{number}: expected {shorten(expected)}, got {shorten(str(record['query']))}"
            )
    return records


def _print_interrupted(log: RecordLog, n_answered: int, n_queries: int) -> None:
    """Print how many queries are answered, and how to continue."""
    count = f"{n_answered:,} of {n_queries:,} queries"
    hint = f"--resume continues {log.path}"
    print_notes([f"interrupted after {count}; {hint}"])


def _speed_text(n_queries: int, seconds: float) -> str:
    """How many queries were answered a second."""
    return f"{n_queries / max(seconds, 1e-9):,.1f} queries/s"


def _find_relation(answerer: Answerer, name: str) -> int:
    """The id of a relation of two arguments.

    Raises:
      ValueError: the data have none of that name.
    """
    from funcppo.kg.graph.text import unknown_name_message

    dataset = answerer.dataset
    binary = {
        predicate: i
        for i, (predicate, arity) in enumerate(
            zip(dataset.predicates, dataset.arities), 1
        )
        if arity == 2
    }
    if name not in binary:
        message = unknown_name_message("relation", name, tuple(binary))
        raise ValueError(f"--relation {shorten(name)}: {message}")
    return binary[name]


def _answers_text(
    answers: QueryAnswers, score: str, with_known: bool, legend: str
) -> str:
    """The answers of a query as lines, what the numbers mean before those with proofs."""
    n_shown = sum(
        not answer.known and answer.prior is None for answer in answers.answers
    )
    n_listable = answers.n_new + answers.n_known + answers.n_self
    n_others = answers.n_entities - n_listable
    known = "ranked too" if with_known else "left out"
    lines = [
        f"{answers.query}: {n_shown:,} of {answers.n_new:,} new answers, score {score}; "
        f"{answers.n_known:,} known {known}; {n_others:,} other entities are not derivable, score 0"
    ]
    if answers.n_unproved is not None:
        n_listed = sum(answer.prior is not None for answer in answers.answers)
        lines.append(
            f"  {n_listed:,} of {answers.n_unproved:,} unproved answers are listed last: no rule derives them, and "
            "their prior by link embeddings proves nothing"
        )

    width = max([6, *(len(format_name(a.entity)) for a in answers.answers)])
    if answers.answers and legend:
        lines.append(f"  {legend}")
    if answers.answers:
        lines.append(f"  rank  {'entity':<{width}}  score   known  verdict")
    for answer in answers.answers:
        lines += _answer_lines(answer, width)
    return "\n".join(lines) + "\n"


def _answer_lines(answer: Answer, width: int) -> list[str]:
    """An answer as lines, with its proof if it has one."""
    status = "known" if answer.known else "new  "
    prior = "" if answer.prior is None else f", prior {answer.prior:+.2f}"
    lines = [
        f"  {answer.rank:>4}  {format_name(answer.entity):<{width}}  {score_text(answer.score):<6}  {status}  "
        f"{answer.verdict}{prior}"
    ]
    if answer.explanation is not None:
        lines += ["        " + x for x in answer.explanation.to_lines()]
    return lines
