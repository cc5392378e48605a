"""`funcppo predict`: the best answers of an open query, or all new facts of a relation."""

from __future__ import annotations

import hashlib
import json as jsonlib
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

from funcppo.cli import EXIT_UNFINISHED
from funcppo.cli.common import (
    JSON_FORMAT,
    Interrupt,
    JsonObject,
    WorkDisplay,
    bounded,
    check_outputs,
    defer_interrupt,
    lock_output,
    print_notes,
    print_text,
    select_device,
    set_target_threads,
    write_json,
    write_output,
)
from funcppo.cli.options import HIDDEN, JsonOutput, OptionalFile, ScoreOptions
from funcppo.core.files import close_log, shorten
from funcppo.core.settings import PositiveInt, UnitInterval
from funcppo.kg.graph.text import (
    escape_unprintable,
    format_name,
    read_text,
    score_text,
)

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.core.files import RecordLog
    from funcppo.kg.answers import (
        Answerer,
        OpenQuery,
        Predictions,
        TripleScorer,
    )

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
    answers of R(h, X) for each entity h, by whose score they are ordered; without --relation those of all relations, by
    the probability of `funcppo score`.

    With --queries FILE and --csv OUT (or --json OUT, without --csv), and with --new and --out OUT, answers are a line
    of JSON in OUT.part as soon as they are found, and OUT is written when all are; after an interruption the option
    resume continues them.

    In a query, ?x, _ and a single capital such as X are variables; a name in single quotes is always an entity.

    Exit status: 0 answered, 2 bad input, 3 not all within --seconds, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        'funcppo predict runs/s1 "locatedIn(france, X)" --known --explain',
        "funcppo predict runs/s1 --relation locatedIn --new --out new.jsonl",
    )

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
    """Relation whose new facts --new lists. Default: all."""
    new: bool = False
    """List all new facts, of --relation or of all relations. Default: off."""
    out: OptionalFile = None
    """Write the new facts to FILE: lines of JSON (.jsonl) or Parquet (.parquet) by its ending, else CSV. Default: print
    the first --k."""
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
            lock_output(self._log_target()),
            bounded(self.seconds, self.device) as is_over,
        ):
            set_target_threads(self.target, self.threads)
            answerer, notes = self.open_answerer()
            from funcppo.kg.answers import read_pair

            status, pair = 0, None
            if self.query is not None:
                pair = read_pair(answerer.dataset, self.query)
            if pair is not None:
                self._answer_pair(answerer, *pair)
            else:
                queries, query_notes = self._read_queries(answerer)
                status = self._answer_queries(answerer, queries, notes)
                notes = [*query_notes, *notes]
            if status and is_over():
                status = EXIT_UNFINISHED
                notes = [f"--seconds {self.seconds:g} is over", *notes]
            # Answers come first; an error stands alone.
            print_notes(notes, most=5)
        return status

    def _answer_pair(self, answerer: Answerer, head: str, tail: str) -> None:
        """Print the relations between two entities, the most probable first, or write them as JSON or CSV."""
        from funcppo.kg.answers import SCORE_COLUMNS, TripleScorer

        scorer = TripleScorer(answerer, self.explain)
        found = scorer.relations(head, tail, with_known=self.known)[: self.k]
        write_json(self.json, {"query": self.query, "answers": found})
        self._write_rows(self.csv, found, SCORE_COLUMNS)
        if self._is_quiet:
            return
        print_text(
            f"{self.query}: {len(found)} of {len(answerer.dataset.predicates)} relations"
        )
        for place, record in enumerate(found, 1):
            chance = record["probability"]
            shown = "" if chance is None else score_text(chance)
            name = _shown_name(answerer, record["relation"])
            print_text(
                f"  {place:>4}  {shown:<6}  {_known_text(record['known'])}  {record['verdict']:<8}  {name}"
            )

    def _check_options(self) -> None:
        """Check options and outputs before any work."""
        asked = [self.query is not None, self.queries is not None, self.new]
        if sum(asked) != 1:
            raise ValueError(
                f"expected QUERY, --queries FILE, or --new, got {sum(asked) or 'none'} of them"
            )
        for name in ("relation", "out"):
            if getattr(self, name) and not self.new:
                raise ValueError(f"--{name}: expected --new beside it")
        for name in ("resume", "overwrite"):
            if getattr(self, name) and self._log_target() is None:
                raise ValueError(
                    f"--{name}: expected --new --out FILE, or --queries FILE with --csv FILE or "
                    "--json FILE, beside it"
                )
        for name in ("explain", "known", "unproved", "csv"):
            if getattr(self, name) and self.new:
                raise ValueError(f"--{name}: expected a query, got --new")
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
        target, own = self._log_target(), []
        if target is not None:
            part = files.part_path(target)
            option = next(
                x for x, path in outputs if path and Path(path) == target
            )
            for path in (part, files.settings_path(target)):
                outputs.append((option, str(path)))
            own = [part, target] if self.new else [part]
        check_outputs(outputs, inputs, can_be_parquet=True)
        for path in own:
            files.check_writable(
                path, resume=self.resume, overwrite=self.overwrite
            )

    def _log_target(self) -> Path | None:
        """Return the output file beside which answers are collected for --resume; None if no file is written."""
        names = [self.csv, self.json] if self.queries else [self.out]
        paths = [Path(name) for name in names if name and name != "-"]
        # A device or a pipe has nothing beside it.
        files = [x for x in paths if x.is_file() or not x.exists()]
        return files[0] if files else None

    @property
    def _is_quiet(self) -> bool:
        """Return whether standard output is for a machine."""
        return "-" in (self.csv, self.json)

    # -- queries

    def _read_queries(
        self, answerer: Answerer
    ) -> tuple[list[WrittenQuery], tuple[str, ...]]:
        """Read the queries of the command line, the file or the relation; return them and notes on a single one.

        Raises:
          ValueError: a query is bad; of a file, the message names the line.
        """
        from funcppo.kg.answers import (
            format_query,
            read_open_query,
            relation_queries,
        )

        dataset = answerer.dataset
        if self.new:
            try:
                asked = relation_queries(dataset, self.relation)
            except ValueError as error:
                line = f"--relation {shorten(str(self.relation))}: {error}"
                raise ValueError(line) from None
            return [(x, format_query(dataset, x)) for x in asked], ()
        if self.query is not None:
            query, read = read_open_query(answerer.dataset, self.query)
            return [(query, self.query)], read.notes
        path = Path(str(self.queries))
        queries: list[WrittenQuery] = []
        text = read_text(path)
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
        self,
        answerer: Answerer,
        queries: Sequence[WrittenQuery],
        notes: Sequence[str],
    ) -> int:
        """Answer the queries in batches until all are answered or an interrupt; return the exit status."""
        settings = self._settings(answerer, queries)
        if self._is_complete(settings):
            print_text(f"{self._log_target()} is complete already")
            return 0

        log = self._open_log(settings)
        answered = list(log.records) if log else []
        n_before, start = len(answered), time.perf_counter()
        # A repeated signal ends the queries in progress; those before stay.
        with defer_interrupt() as interrupt, suppress(KeyboardInterrupt):
            self._answer_rest(answerer, queries, answered, log, interrupt)
        seconds = time.perf_counter() - start
        if log:
            close_log(log)

        is_whole = len(answered) == len(queries)
        if not is_whole and (log or self.new or not answered):
            count = f"{len(answered):,} of {len(queries):,} queries"
            hint = f"continues {log.path}" if log else "needs a FILE"
            print_notes([f"interrupted after {count}; --resume {hint}"])
            return interrupt.exit_status
        if self.new:
            self._write_facts(answerer, answered)
        else:
            self._write_answers(answerer, answered, seconds, notes)
        if log:
            log.path.unlink()
        print_notes(self._summary(answered, len(answered) - n_before, seconds))
        return 0 if is_whole else interrupt.exit_status

    def _answer_rest(
        self,
        answerer: Answerer,
        queries: Sequence[WrittenQuery],
        answered: list[JsonObject],
        log: RecordLog | None,
        interrupt: Interrupt,
    ) -> None:
        """Add the answers of the queries without answers, batch by batch, until an interrupt."""
        from funcppo.core import files
        from funcppo.kg.answers import TripleScorer
        from funcppo.kg.run.subject import describe_numbers

        legend = describe_numbers(answerer.subject) if self.explain else ""
        is_of_all = self.new and self.relation is None
        scorer = TripleScorer(answerer) if is_of_all else None
        size = FIRST_BATCH_QUERIES
        with WorkDisplay("answering") as bar:
            while len(answered) < len(queries) and not interrupt.requested:
                start = time.perf_counter()
                batch = queries[len(answered) :][:size]
                found = answerer.answer(
                    [query for query, _ in batch],
                    k=None if self.new else self.k,
                    with_known=self.known,
                    with_self=self.with_self,
                    min_score=self.min_score,
                    with_explanations=self.explain,
                    with_unproved=self.unproved,
                )
                # In files a query stands as it was written, so that they join with the queries.
                records = [
                    replace(answers, query=text).to_record()
                    for answers, (_, text) in zip(found, batch)
                ]
                _add_probabilities(scorer, records)
                if log:
                    files.append_records(log, records)
                answered += records
                if not (self.new or self._is_quiet):
                    for answers in found:
                        print_text(_answers_text(answers, self.known, legend))
                seconds = max(time.perf_counter() - start, 1e-3)
                speed = len(batch) / seconds
                note = f"{speed:,.1f} queries/s"
                bar.update("answering", len(answered), len(queries), note=note)
                size = max(1, int(min(4 * size, speed * BATCH_SECONDS, 4096)))

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
        names = ("relation", "min_score", "with_self", "k", "known", "explain")
        return {
            "format": JSON_FORMAT,
            **score_settings(answerer.subject),
            **{name: getattr(self, name) for name in (*names, "unproved")},
            "others_digest": weights and digest(weights),
            "queries_digest": hashlib.sha256(texts.encode()).hexdigest()[:16],
        }

    def _is_complete(self, settings: JsonObject) -> bool:
        """Return whether the resumed work has already written all its files.

        Raises:
          ValueError: it was done with other settings.
        """
        from funcppo.core import files

        path = self._log_target()
        if not self.resume or path is None:
            return False
        if not path.exists() or files.part_path(path).exists():
            return False
        files.check_settings(files.settings_path(path), settings, path)
        outputs = [name for name in (self.csv, self.json, self.out) if name]
        return all(Path(name).is_file() for name in outputs)

    def _open_log(self, settings: JsonObject) -> RecordLog | None:
        """Open the log of answers beside --csv, --json or --out FILE; None without such a file."""
        from funcppo.core import files

        path = self._log_target()
        if path is None:
            return None
        log = files.open_log(
            files.part_path(path),
            files.settings_path(path),
            settings,
            resume=self.resume,
        )
        print_notes(log.notes)
        return log

    # -- what is written

    def _write_answers(
        self,
        answerer: Answerer,
        answered: Sequence[JsonObject],
        seconds: float,
        notes: Sequence[str],
    ) -> None:
        """Write the answers to --json and to --csv."""
        subject = answerer.subject
        result: JsonObject = {
            "dataset": answerer.dataset.name,
            "score": subject.score.name,
            "trained": subject.policy_run is not None,
            "height": subject.task.max_height,
            "notes": list(notes),
            "queries": answered,
            "seconds": seconds,
        }
        write_json(self.json, result)
        # A query without a listed answer has one row with its text alone.
        rows = [
            {**answer, "query": query["query"]}
            for query in answered
            for answer in query["answers"] or [{}]
        ]
        self._write_rows(self.csv, rows, CSV_COLUMNS)

    def _write_rows(
        self,
        path: str | None,
        rows: Sequence[JsonObject],
        columns: Sequence[str],
    ) -> None:
        """Write rows to a file by its ending, or to standard output as CSV; None writes nothing."""
        from funcppo.kg.answers import (
            JSON_ENDINGS,
            records_text,
            write_records,
        )

        if path is None:
            return
        as_json = Path(path).suffix in JSON_ENDINGS
        text = records_text(rows, columns, as_json=as_json)
        if path != "-":
            write_records(Path(path), text, columns)
            return
        lines = text.split("\n")
        if sys.stdout.isatty():
            # Control characters of names are data in a file and commands to a terminal.
            lines = map(escape_unprintable, lines)
        write_output("\n".join(lines))

    def _write_facts(
        self, answerer: Answerer, answered: Sequence[JsonObject]
    ) -> None:
        """Write the new facts, best first, or print the first ones."""
        facts = _sort_facts(answered)
        shown, columns, of_what = facts[: self.k], CSV_COLUMNS, "all relations"
        if self.relation is None:
            columns = (*columns, "probability")
        else:
            of_what = _shown_name(answerer, self.relation)
        line = f"{len(facts):,} new facts of {of_what}, score {answerer.subject.score.name}"
        result: JsonObject = {"n_facts": len(facts)}
        if self.out is not None:
            self._write_rows(self.out, facts, columns)
            line, shown = f"{line}: {self.out}", []
            result["out"] = self.out
        else:
            result["facts"] = shown
        write_json(self.json, result)

        if self._is_quiet:
            return
        print_text(line)
        for fact in shown:
            relation, *ends = (
                _shown_name(answerer, fact[x])
                for x in ("relation", "head", "tail")
            )
            atom = f"{relation}({', '.join(ends)})"
            value = score_text(_value_of(fact, "score") or 0.0)
            print_text(f"  {fact['rank']:>4}  {value}  {atom}")
        if len(facts) > len(shown) and self.out is None:
            print_text(
                f"  ... and {len(facts) - len(shown):,} more (--out FILE)"
            )

    def _summary(
        self, answered: Sequence[JsonObject], n_new: int, seconds: float
    ) -> list[str]:
        """Format notes on what was left out and, for a query file, on the number of queries and the speed.

        Args:
          n_new: queries that were answered after an interruption.
        """
        notes: list[str] = []
        n_self = sum(query["n_self"] for query in answered)
        if n_self:
            notes.append(
                f"{n_self:,} derivable answers are left out, the entity of the query itself: no triple of the relation "
                "links an entity to itself (--set with_self=on keeps them)"
            )
        if self.queries is not None:
            n_before = len(answered) - n_new
            n_empty = sum(not query["answers"] for query in answered)
            before = f", after {n_before:,} before" if n_before else ""
            notes.append(
                f"{n_new:,} of {len(answered):,} queries in {seconds:.1f} s{before}; {n_empty:,} have no answer to list"
            )
        return notes


def _shown_name(answerer: Answerer, name: str) -> str:
    """Format the label of a name, or the name without one."""
    return format_name(answerer.dataset.labels.get(name, name))


def _value_of(fact: JsonObject, name: str) -> float | None:
    """Return the probability of a new fact, or what it has in its place."""
    chance = fact.get("probability")
    return fact[name] if chance is None else chance


def _add_probabilities(
    scorer: TripleScorer | None, records: Sequence[JsonObject]
) -> None:
    """Add to each answer of some queries the probability that it is true; nothing without a scorer."""
    if scorer is None:
        return
    answers = [answer for record in records for answer in record["answers"]]
    names = ("head", "relation", "tail")
    triples = [tuple(answer[name] for name in names) for answer in answers]
    for answer, found in zip(answers, scorer.score(triples)):
        answer["probability"] = found["probability"]


def _sort_facts(answered: Sequence[JsonObject]) -> list[JsonObject]:
    """Sort the answers of all queries as facts, best first; equal scores share the rank of their first fact."""
    facts = [
        {"rank": 0, "query": query["query"]} | answer
        for query in answered
        for answer in query["answers"]
    ]

    def minus_score(fact: JsonObject) -> float:
        score = _value_of(fact, "quantised_score")
        return sys.maxsize if score is None else -score

    facts.sort(key=minus_score)
    for _, equal in groupby(enumerate(facts, 1), lambda x: minus_score(x[1])):
        members = list(equal)
        for _, fact in members:
            fact["rank"] = members[0][0]
    return facts


def _known_text(is_known: bool) -> str:
    """Return the word of a table for a known or a new answer."""
    return "known" if is_known else "new  "


def _answers_text(answers: Predictions, with_known: bool, legend: str) -> str:
    """Format the answers of a query as lines; a legend of the numbers precedes answers with proofs."""
    listed = [x for x in answers.answers if x.prior is None]
    n_shown = sum(not answer.known for answer in listed)
    n_listable = answers.n_new + answers.n_known + answers.n_self
    lines = [
        f"{answers.query}: {n_shown:,} of {answers.n_new:,} new answers, score {answers.score}; "
        f"{answers.n_known:,} known {'ranked too' if with_known else 'left out'}; "
        f"{answers.n_entities - n_listable:,} other entities have no proof"
    ]
    if answers.n_unproved is not None:
        lines.append(
            f"  {len(answers) - len(listed):,} of {answers.n_unproved:,} answers without a proof are listed: no rule "
            "derives them"
        )
    names = [format_name(a.label or a.entity) for a in answers.answers]
    width = max([6, *map(len, names)])
    if len(answers):
        lines += [f"  {legend}"] * bool(legend)
        lines.append(f"  rank  {'entity':<{width}}  score   known  verdict")
    for answer, name in zip(answers.answers, names):
        prior = "" if answer.prior is None else f", prior {answer.prior:+.2f}"
        lines.append(
            f"  {answer.rank:>4}  {name:<{width}}  {score_text(answer.score):<6}  "
            f"{_known_text(answer.known)}  {answer.verdict}{prior}"
        )
        if answer.explanation is not None:
            lines += ["        " + x for x in answer.explanation.to_lines()]
    return "\n".join(lines)
