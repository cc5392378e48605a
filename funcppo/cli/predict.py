"""`funcppo predict`: the best answers of an open query, or all new facts of a relation."""

from __future__ import annotations

import csv
import hashlib
import io
import json as jsonlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from funcppo.cli.common import (
    JSON_FORMAT,
    Interrupt,
    JsonObject,
    WorkDisplay,
    check_outputs,
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
from funcppo.kg.graph.text import escape_unprintable, format_name, score_text

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.core.files import RecordLog
    from funcppo.kg.answers import Answer, Answerer, OpenQuery, Predictions

    # A query, and how it was written.
    WrittenQuery: TypeAlias = tuple[OpenQuery, str]

# queries that are answered together at first; later as many as a second allows
FIRST_BATCH_QUERIES = 1
BATCH_SECONDS = 1.0
CSV_COLUMNS = (
    "query",
    "rank",
    "entity",
    "score",
    "known",
    "verdict",
    "head",
    "relation",
    "tail",
)


@dataclass(frozen=True, kw_only=True)
class Predict(ScoreOptions):
    """Rank the answers of an open query r(h, X) or r(X, t), or list all new facts of a relation, best first.

    Candidates are the entities that the rules derive from the facts of train (and facts.txt). They have the score that
    the lines of `funcppo evaluate --details` give them; all other entities score 0. Known answers, those that some
    split or facts.txt holds, are left out and counted; --known lists them too, each scored without its own fact. The
    verdict of an answer is derived (by rules, from other facts; proved by the clauses of a program) or no proof;
    --unproved lists others too.

    A trained run scores by its policy, or by rule confidences where these rank its valid split better. A data set
    scores by rule confidences: what is best on its valid split, as chosen by `funcppo evaluate`.

    With --relation R --new, all facts R(h, t) that the rules derive and no split holds are listed, best first: the
    answers of R(h, X) for each entity h, by whose score they are ordered.

    With --queries FILE and --csv OUT (or --json OUT, without --csv), and with --new and --out OUT, answers are a line
    of JSON in OUT.part as soon as they are found, and OUT is written when all are; after an interruption the option
    resume continues them.

    In a query, ?x, _ and a single capital such as X are variables; a name in single quotes is always an entity.

    Exit status: 0 answered, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    query: str | None = None
    """Query with one variable, such as "locatedIn(france, X)", "'citizen of'(?who, China)" or, for the relations of a
    pair by probability, "?r(france, europe)". Default: the queries of
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
    """List the entities that no rule derives too, marked "no proof", by all other evidence of a run that learnt from
    questions. Default: off."""
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
    """Write the new facts to FILE: CSV or Parquet if it ends so, otherwise lines of JSON. Default: print the first
    --k."""
    resume: bool = False
    """Continue the interrupted work on --out FILE, or on the answers to --queries in --csv or --json FILE. Default:
    off."""
    overwrite: bool = False
    """Replace --out FILE if it exists, or unfinished answers to --queries. Default: off."""
    csv: JsonOutput = None
    """Write the answers as CSV to FILE; - writes them to standard output in place of the text. Default: no CSV."""

    def run(self) -> int:
        """Answer the queries and print the answers; return the exit status.

        Returns:
          The exit status.
        """
        self._check_options()
        with (
            lock_output(self._part_target()),
            graphs_allowed(self.cuda_graphs, self.device),
        ):
            set_target_threads(self.target, self.threads)
            answerer, notes = self.open_answerer()
            from funcppo.kg.answers import read_pair

            pair = self.query and read_pair(answerer.dataset, self.query)
            if pair:
                self._answer_pair(answerer, *pair)
                print_notes(notes)
                return 0
            queries, query_notes = self._read_queries(answerer)
            status = self._answer_queries(answerer, queries)
            # Answers come first; an error stands alone.
            replay = _replay_notes(answerer)
            notes = [*query_notes, *notes, *replay]
            print_notes(notes, most=None if self.verbose else 5)
        return status

    def _answer_pair(self, answerer: Answerer, head: str, tail: str) -> None:
        """Print the relations between two entities, the most probable first, or write them as JSON or CSV."""
        from funcppo.kg.answers import TripleScorer

        scorer = TripleScorer(answerer, self.explain)
        found = scorer.relations(head, tail, with_known=self.known)[: self.k]
        write_json(self.json, {"query": self.query, "answers": found})
        if self.csv is not None:
            columns = [x for x in found[0] if x != "proof"] if found else []
            text = _rows_text(columns, found)
            if self.csv == "-":
                write_output(text)
            else:
                Path(self.csv).write_text(text, encoding="utf-8")
        if "-" in (self.csv, self.json):
            return
        print(
            f"{self.query}: {len(found)} of {len(answerer.dataset.predicates)} relations"
        )
        for place, record in enumerate(found, 1):
            chance = record["probability"]
            shown = "" if chance is None else score_text(chance)
            known = "known" if record["known"] else "new  "
            name = format_name(record["relation"])
            print(
                f"  {place:>4}  {shown:<6}  {known}  {record['verdict']:<8}  {name}"
            )

    def _check_options(self) -> None:
        """Check options and outputs before any work."""
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
                "--unproved, --set min_score: expected one of them: answers without a proof may score 0"
            )
        if self.csv == "-" and self.json == "-":
            raise ValueError("--csv -, --json -: expected one of them")
        select_device(self.device)
        self._check_outputs()

    def _check_outputs(self) -> None:
        """Check the output files before any work."""
        from funcppo.core import files

        inputs = self.inputs()
        inputs += [Path(self.queries)] if self.queries else []
        outputs = [("--csv", self.csv), ("--out", self.out)]
        outputs.append(("--json", self.json))

        target = self._part_target()
        if target is None:
            check_outputs(outputs, inputs, can_be_parquet=True)
            return
        part = files.part_path(target)
        option = next(x for x, path in outputs if path and Path(path) == target)
        outputs += [(option, str(part))]
        outputs += [(option, str(files.settings_path(target)))]
        check_outputs(outputs, inputs, can_be_parquet=True)
        for path in [part, target] if self.new else [part]:
            files.check_writable(
                path, resume=self.resume, overwrite=self.overwrite
            )

    def _part_target(self) -> Path | None:
        """Return the output file beside which answers are collected for --resume; None if no file is written."""
        names = [self.csv, self.json] if self.queries else [self.out]
        paths = [Path(name) for name in names if name and name != "-"]
        # A device or a pipe has nothing beside it.
        files = [x for x in paths if x.is_file() or not x.exists()]
        return files[0] if files else None

    # -- queries

    def _read_queries(
        self, answerer: Answerer
    ) -> tuple[list[WrittenQuery], tuple[str, ...]]:
        """Read the queries of the command line, the file or the relation; return them and notes on a single one.

        Raises:
          ValueError: a query is bad; of a file, the message names the line.
        """
        from funcppo.kg.answers import read_open_query

        if self.new:
            return _relation_queries(answerer, str(self.relation)), ()
        if self.query is not None:
            query, read = read_open_query(answerer.dataset, self.query)
            return [(query, self.query)], read.notes
        path = Path(str(self.queries))
        queries: list[WrittenQuery] = []
        text = path.read_text(encoding="utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                query, _ = read_open_query(answerer.dataset, line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            queries.append((query, line.removesuffix("\r")))
        if not queries:
            raise ValueError(f"{path}: expected a query a line, got none")
        return queries, ()

    def _answer_queries(
        self, answerer: Answerer, queries: Sequence[WrittenQuery]
    ) -> int:
        """Answer the queries in batches until all are answered or an interrupt; return the exit status."""
        settings = self._settings(answerer, queries)
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
        if not is_whole and (log or self.new):
            count = f"{len(answered):,} of {len(queries):,} queries"
            hint = "with --out FILE, --resume could continue"
            hint = f"--resume continues {log.path}" if log else hint
            print_notes([f"interrupted after {count}; {hint}"])
            return interrupt.exit_status
        if self.new:
            self._write_facts(answerer, answered)
        else:
            self._write_answers(answerer, answered, seconds)
        if log:
            log.path.unlink()
        self._print_summary(answered, n_before, len(queries), seconds)
        return 0 if is_whole else interrupt.exit_status

    def _answer_rest(
        self,
        answerer: Answerer,
        queries: Sequence[WrittenQuery],
        answered: list[JsonObject],
        log: RecordLog | None,
        interrupt: Interrupt,
    ) -> float:
        """Add the answers of the queries without answers, until an interrupt; return the seconds that it took."""
        from funcppo.core import files
        from funcppo.kg.run.subject import describe_numbers

        is_quiet = self.new or "-" in (self.csv, self.json)
        legend = describe_numbers(answerer.subject) if self.explain else ""
        n_before = len(answered)
        start = time.perf_counter()
        # A repeated signal ends the queries in progress; those before stay.
        with suppress(KeyboardInterrupt), WorkDisplay("answering") as bar:
            for batch in self._iter_batches(answerer, queries[n_before:]):
                # In files a query stands as it was written, so that they join with the queries.
                texts = queries[len(answered) : len(answered) + len(batch)]
                records = [
                    replace(found, query=text).to_record()
                    for found, (_, text) in zip(batch, texts)
                ]
                if log:
                    files.append_records(log, records)
                answered += records
                if not is_quiet:
                    lines = (
                        _answers_text(x, self.known, legend) for x in batch
                    )
                    write_output("".join(lines))

                n_new = len(answered) - n_before
                note = _speed_text(n_new, time.perf_counter() - start)
                bar.update("answering", len(answered), len(queries), note=note)
                if interrupt.requested:
                    break
        if log:
            files.close_log(log)
        return time.perf_counter() - start

    def _iter_batches(
        self, answerer: Answerer, queries: Sequence[WrittenQuery]
    ) -> Iterator[list[Predictions]]:
        """Yield the answers of consecutive batches of queries, each about a second's work."""
        first, size = 0, FIRST_BATCH_QUERIES
        while first < len(queries):
            start = time.perf_counter()
            batch = queries[first : first + size]
            yield answerer.answer(
                [query for query, _ in batch],
                k=None if self.new else self.k,
                with_known=self.known,
                with_self=self.with_self,
                min_score=self.min_score,
                with_explanations=self.explain,
                with_unproved=self.unproved,
            )
            first += len(batch)
            seconds = time.perf_counter() - start
            fitting = len(batch) * BATCH_SECONDS / max(seconds, 1e-3)
            size = max(1, int(min(4 * size, fitting, 4096)))

    # -- work that is resumed

    def _settings(
        self, answerer: Answerer, queries: Sequence[WrittenQuery]
    ) -> JsonObject:
        """Return everything on which the answers depend, including the queries."""
        from funcppo.kg.answers import digest, score_settings

        texts = jsonlib.dumps([text for _, text in queries])
        others = answerer.subject.others
        facts = others and others.facts
        weights = others and (others.weights.params, facts and facts.embedding)
        return {
            "format": JSON_FORMAT,
            **score_settings(answerer.subject),
            "relation": self.relation,
            "min_score": self.min_score,
            "with_self": self.with_self,
            "k": self.k,
            "known": self.known,
            "explain": self.explain,
            "unproved": self.unproved,
            "others_digest": weights and digest(weights),
            "queries_digest": hashlib.sha256(texts.encode()).hexdigest()[:16],
        }

    def _is_complete(self, settings: JsonObject) -> bool:
        """Return whether the resumed work has already written all its files.

        Raises:
          ValueError: it was done with other settings.
        """
        from funcppo.core import files

        path = self._part_target()
        if not self.resume or path is None:
            return False
        if not path.exists() or files.part_path(path).exists():
            return False
        beside = files.settings_path(path)
        files.check_settings(beside, settings, path)
        outputs = [name for name in (self.csv, self.json, self.out) if name]
        return all(Path(name).is_file() for name in outputs)

    def _open_log(
        self, queries: Sequence[WrittenQuery], settings: JsonObject
    ) -> RecordLog | None:
        """Open the log of answers beside --csv, --json or --out FILE; None without such a file."""
        from funcppo.core import files

        path = self._part_target()
        if path is None:
            return None
        part = files.part_path(path)

        def check(records: list[JsonObject]) -> list[JsonObject]:
            """Check that the records answer the first queries in order; return them."""
            for number, record in enumerate(records, 1):
                expected = "no line"
                if number <= len(queries):
                    expected = queries[number - 1][1]
                got = str(record.get("query"))
                if got != expected or not {"answers", "n_self"} <= set(record):
                    raise ValueError(
                        f"{part}:{number}: expected answers of {shorten(expected)}, got {shorten(got)}"
                    )
            return records

        log = files.open_log(
            part,
            files.settings_path(path),
            settings,
            resume=self.resume,
            select=check,
        )
        print_notes(log.notes)
        return log

    # -- what is written

    def _write_answers(
        self,
        answerer: Answerer,
        answered: Sequence[JsonObject],
        seconds: float,
    ) -> None:
        """Write the answers to --json and to --csv."""
        from funcppo.core.files import write_atomically
        from funcppo.kg.ranking import scoring

        subject = answerer.subject
        replay = scoring.search_replay(subject.search_step)
        result: JsonObject = {
            "dataset": answerer.dataset.name,
            "score": subject.score.name,
            "trained": subject.policy_run is not None,
            "height": subject.task.max_height,
            "notes": [
                *answerer.dataset.notes,
                *subject.notes,
                *_replay_notes(answerer),
            ],
            "graphs": self.cuda_graphs,
            **replay._asdict(),
            "queries": answered,
            "seconds": seconds,
        }
        write_json(self.json, result)
        if self.csv is None:
            return
        rows: list[JsonObject] = []
        for query in answered:
            # One without a listed answer has one row with its text alone.
            for answer in query["answers"] or [{}]:
                rows.append({**answer, "query": query["query"]})
        text = _csv_text(rows)
        if self.csv == "-":
            # Control characters of names are data in a file and commands to a terminal.
            is_terminal = sys.stdout.isatty()
            lines = map(escape_unprintable, text.split("\n"))
            write_output("\n".join(lines) if is_terminal else text)
            return
        content = _table_content(Path(self.csv), text)
        write_atomically(Path(self.csv), lambda file: file.write(content))

    def _write_facts(
        self, answerer: Answerer, answered: Sequence[JsonObject]
    ) -> None:
        """Write the relation's new facts, best first, or print the first ones."""
        facts = _sort_facts(answered)
        relation = format_name(str(self.relation))
        headline = f"{len(facts):,} new facts of {relation}, score {answerer.subject.score.name}"
        if self.out is not None:
            _write_fact_file(Path(self.out), facts)
            write_json(self.json, {"n_facts": len(facts), "out": self.out})
            if self.json != "-":
                print(f"{headline}: {self.out}")
            return

        shown = facts[: self.k]
        write_json(self.json, {"n_facts": len(facts), "facts": shown})
        if self.json == "-":
            return
        print(headline)
        for fact in shown:
            names = [format_name(fact[name]) for name in ("head", "tail")]
            atom = f"{relation}({', '.join(names)})"
            print(f"  {fact['rank']:>4}  {score_text(fact['score'])}  {atom}")
        if len(facts) > len(shown):
            print(f"  ... and {len(facts) - len(shown):,} more (--out FILE)")

    def _print_summary(
        self,
        answered: Sequence[JsonObject],
        n_before: int,
        n_queries: int,
        seconds: float,
    ) -> None:
        """Print what was left out; for a query file also the number of answered queries and the speed.

        Args:
          n_before: queries that were answered before an interruption.
        """
        notes: list[str] = []
        n_self = sum(query["n_self"] for query in answered)
        if n_self:
            answers = "answers that are" if n_self > 1 else "answer that is"
            notes.append(
                f"left out {n_self:,} derivable {answers} the entity of the query itself: no triple of the relation "
                f"links an entity to itself (--set with_self=on keeps {'them' if n_self > 1 else 'it'})"
            )
        if self.queries is not None:
            n_new = len(answered) - n_before
            n_empty = sum(not query["answers"] for query in answered)
            before = f", after {n_before:,} before" if n_before else ""
            notes.append(
                f"{n_new:,} of {n_queries:,} queries in {seconds:.1f} s, {_speed_text(n_new, seconds)}{before}; "
                f"{n_empty:,} have no answer to list"
            )
        print_notes(notes)


def _relation_queries(answerer: Answerer, name: str) -> list[WrittenQuery]:
    """Build the queries for the tails of every entity by a binary relation.

    Raises:
      ValueError: the data have none of that name.
    """
    from funcppo.kg.answers import OpenQuery, format_query
    from funcppo.kg.graph.text import unknown_name_message
    from funcppo.kg.logic.kb import TAIL

    dataset = answerer.dataset
    relations = dict(zip(dataset.predicates, dataset.arities))
    if relations.get(name) != TAIL:
        binary = [x for x, arity in relations.items() if arity == TAIL]
        message = unknown_name_message("relation", name, tuple(binary))
        raise ValueError(f"--relation {shorten(name)}: {message}")
    number = dataset.predicates.index(name) + 1
    queries = [
        OpenQuery(number, TAIL, entity)
        for entity in range(1, dataset.n_constants + 1)
    ]
    return [(query, format_query(dataset, query)) for query in queries]


def _sort_facts(answered: Sequence[JsonObject]) -> list[JsonObject]:
    """Sort the answers of all queries as facts, best first; equal scores share the rank of their first fact."""
    facts = [
        {"rank": 0, "query": query["query"]} | answer
        for query in answered
        for answer in query["answers"]
    ]

    def minus_score(fact: JsonObject) -> float:
        score = fact["quantised_score"]
        return sys.maxsize if score is None else -score

    facts.sort(key=minus_score)
    rank, last = 0, None
    for number, fact in enumerate(facts, 1):
        if fact["quantised_score"] != last or not rank:
            rank, last = number, fact["quantised_score"]
        fact["rank"] = rank
    return facts


def _write_fact_file(path: Path, facts: Sequence[JsonObject]) -> None:
    """Write facts as CSV or Parquet if the file ends so, else as lines of JSON."""
    from funcppo.core.files import write_atomically

    if path.suffix in (".csv", ".parquet"):
        text = _csv_text(facts)
    else:
        lines = [jsonlib.dumps(fact, ensure_ascii=False) for fact in facts]
        text = "".join(f"{escape_unprintable(line)}\n" for line in lines)
    content = _table_content(path, text)
    write_atomically(path, lambda file: file.write(content))


def _table_content(path: Path, text: str) -> bytes:
    """Return CSV, or other text, as the content of a file; Parquet if its name ends so."""
    if path.suffix != ".parquet":
        return text.encode()
    from funcppo.kg.graph.loaders import format_parquet

    kinds = {"rank": "BIGINT", "score": "DOUBLE", "known": "BOOLEAN"}
    types = {name: kinds.get(name, "VARCHAR") for name in CSV_COLUMNS}
    return format_parquet(text, types)


def _csv_text(rows: Sequence[JsonObject]) -> str:
    """Format answers with their queries as CSV; booleans are written as in JSON, missing fields empty."""
    return _rows_text(CSV_COLUMNS, rows)


def _rows_text(columns: Sequence[str], rows: Sequence[JsonObject]) -> str:
    """Format some columns of rows as CSV; booleans are written as in JSON, missing fields empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        known = {True: "true", False: "false", None: ""}[row.get("known")]
        values = {**row, "known": known}
        writer.writerow([values.get(name, "") for name in columns])
    return text.getvalue()


def _replay_notes(answerer: Answerer) -> list[str]:
    """Format notes on why steps of a search were not replayed as a CUDA graph."""
    from funcppo.kg.ranking.scoring import graph_fallback_notes

    return graph_fallback_notes(answerer.subject.search_step)


def _speed_text(n_queries: int, seconds: float) -> str:
    """Format the number of queries answered per second."""
    return f"{n_queries / max(seconds, 1e-9):,.1f} queries/s"


def _answers_text(answers: Predictions, with_known: bool, legend: str) -> str:
    """Format the answers of a query as lines; a legend of the numbers precedes answers with proofs."""
    n_shown = sum(
        not answer.known and answer.prior is None for answer in answers.answers
    )
    n_listable = answers.n_new + answers.n_known + answers.n_self
    n_others = answers.n_entities - n_listable
    known = "ranked too" if with_known else "left out"
    lines = [
        f"{answers.query}: {n_shown:,} of {answers.n_new:,} new answers, score {answers.score}; "
        f"{answers.n_known:,} known {known}; {n_others:,} other entities have no proof"
    ]
    if answers.n_unproved is not None:
        n_listed = sum(answer.prior is not None for answer in answers.answers)
        lines.append(
            f"  {n_listed:,} of {answers.n_unproved:,} answers without a proof are listed: no rule derives them"
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
    """Format an answer as lines, with its proof if it has one."""
    status = "known" if answer.known else "new  "
    prior = "" if answer.prior is None else f", prior {answer.prior:+.2f}"
    lines = [
        f"  {answer.rank:>4}  {format_name(answer.entity):<{width}}  {score_text(answer.score):<6}  {status}  "
        f"{answer.verdict}{prior}"
    ]
    if answer.explanation is not None:
        lines += ["        " + x for x in answer.explanation.to_lines()]
    return lines
