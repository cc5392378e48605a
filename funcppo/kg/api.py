"""Knowledge graphs in Python: load or make a graph, mine rules, train, ask.

    import funcppo as fp

    graph = fp.load([("ann", "parent", "bob"), ...])    # or a name, a folder, a file, an array, a data frame
    graph = fp.mine(graph)                               # the graph with rules
    run = fp.fit(graph)                                  # a trained run; fp.open(graph) scores without training
    run.predict("parent", head="ann", k=10)              # ranked answers
    run.predict_many(["parent(ann, X)", "parent(X, eve)"]).to_dataframe()
    run.new_facts("parent")                              # the best answers that no split holds
    run.prove("parent(ann, bob)")                        # a verdict and a proof
    run.evaluate("test")                                 # the metrics of a ranking

Results print as tables, also in notebooks, and turn into data frames where pandas is installed.
"""

from __future__ import annotations

import dataclasses
import html
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch

from funcppo.core.files import Json
from funcppo.core.settings import (
    DeviceName,
    FieldError,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check_value,
    checks_arguments,
)
from funcppo.kg.answers import (
    Answer,
    Answerer,
    AnswerProof,
    OpenQuery,
    Predictions,
    Table,
    TripleScorer,
    proof_html,
    read_open_query,
    relation_queries,
)
from funcppo.kg.config import (
    CHOICE_SECONDS,
    MINED_RULES_FILE,
    FitOptions,
    ProverTaskConfig,
    RunConfig,
)
from funcppo.kg.graph import drawing, loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import to_triples
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    format_rule_table,
    proof_names,
    read_query,
)
from funcppo.kg.graph.text import (
    display,
    quote,
    read_text,
    similar_names_hint,
)
from funcppo.kg.graph.triples import DEFAULT_CONFIG, DataConfig
from funcppo.kg.logic import proof as proofs
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.prove import BestProofs
from funcppo.kg.mining import MiningOptions
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.explain import (
    best_proofs,
    best_proofs_json,
    proof_json,
    proof_text,
    prove_from_other_facts,
)
from funcppo.kg.ranking.rank_metrics import Metrics
from funcppo.kg.ranking.ranking import HEADLINE_METRICS
from funcppo.kg.run import budget, rule_files, train
from funcppo.kg.run.run import Run, open_run
from funcppo.kg.run.subject import (
    Subject,
    dataset_subject,
    run_subject,
)
from funcppo.kg.search.task import ignore_phase
from funcppo.kg.show import measure, report
from funcppo.logs import LoggerName

# What `funcppo prove` allows by default: rows that the joins of T_P make.
MAX_PROOF_ROWS = 300_000_000


class Graph(Table):
    """Knowledge graph: triples and, optionally, rules.

    Attributes:
      dataset: its facts, held-out triples and rules as tables of ids.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        source: str | None = None,
        rules: str | None = None,
        rules_text: str | None = None,
        config: DataConfig = DEFAULT_CONFIG,
    ) -> None:
        """Wrap a data set that was loaded; see `load`.

        Args:
          dataset: what was read.
          source: what `data.load` reads the triples from; None for triples in memory.
          rules: a rule file in place of the source's own rules.
          rules_text: the content of one.
          config: how files of triples are read.
        """
        self.dataset = dataset
        self._source = source
        self._rules = rules
        self._rules_text = rules_text
        self._config = config

    @property
    def entities(self) -> Sequence[str]:
        """Return the names of all entities."""
        return self.dataset.entities

    @property
    def relations(self) -> tuple[str, ...]:
        """Return the names of all relations."""
        return self.dataset.predicates

    @property
    def triples(self) -> list[tuple[str, str, str]]:
        """Return the names of head, relation and tail of each train fact that has two arguments."""
        entities, relations = self.entities, self.relations
        table = self.dataset.train
        is_binary = np.array([0, *self.dataset.arities]) == TAIL
        rows: list[list[int]] = table[is_binary[table[:, 0]], :3].tolist()
        return [
            (entities[head - 1], relations[relation - 1], entities[tail - 1])
            for relation, head, tail in rows
        ]

    @property
    def rules(self) -> list[str]:
        """Return the rules as text."""
        return [format_rule(self.dataset, rule) for rule in self.dataset.rules]

    def store_settings(self, folder: Path) -> tuple[RunConfig, Path | None]:
        """Return the settings of a run on this graph, and its rules in a file of the folder where they are in none."""
        path = None
        if self._rules_text is not None:
            path = folder / MINED_RULES_FILE
            path.write_text(self._rules_text, encoding="utf-8")
        source = self._source or self.dataset.name
        config = RunConfig(dataset=source, rules=self._rules, data=self._config)
        return config, path

    def with_rules(self, dataset: Dataset, rules_text: str) -> Graph:
        """Return the graph with the rules of a data set, which are also given as text."""
        return Graph(
            dataset,
            source=self._source,
            rules_text=rules_text,
            config=self._config,
        )

    def _repr_html_(self) -> str:
        """Format the picture of an entity with its neighbours, and the table of relations, as HTML."""
        facts = self.dataset.facts
        if not len(facts):
            return super()._repr_html_()
        # the first argument of the most facts
        center = int(np.bincount(facts[:, HEAD]).argmax())
        rows = facts[(facts[:, [HEAD, TAIL]] == center).any(1)]
        picture = drawing.draw_neighbours(
            self.dataset, [center], lambda _: rows, limit=10
        )
        return picture + super()._repr_html_()

    def _title(self) -> str:
        return f"Graph {self.dataset.describe()}"

    def _columns(self) -> tuple[str, ...]:
        return ("relation", "facts", "rules")

    def _rows(self) -> list[tuple[object, ...]]:
        dataset = self.dataset
        size = dataset.n_predicates + 1
        n_facts = np.bincount(dataset.facts[:, 0], minlength=size)
        n_rules = np.bincount(dataset.rules[:, 0, 0], minlength=size)
        return [
            (name, int(n_facts[i]), int(n_rules[i]))
            for i, name in enumerate(dataset.predicates, 1)
        ]


@dataclass(frozen=True, repr=False)
class ProofResult:
    """Verdict on an atom, with a proof if the verdict is proved."""

    query: str
    """The atom."""
    verdict: str
    """proved, refuted (no proof exists up to the height), or unknown (a limit was reached)."""
    known: bool
    """Whether train or facts.txt state it; the proof is from other facts."""
    proof: Proof | None
    """None unless it is proved."""
    height: int
    """Of the proofs that were looked for."""
    dataset: Dataset
    """The names of the proof."""
    best: BestProofs | None = None
    """The most probable proofs, if more than one is asked for."""

    @property
    def tree(self) -> str:
        """Return the proof as an indented tree; empty without a proof."""
        if self.proof is None:
            return ""
        return proof_text(self.dataset, self.proof)

    def to_json(self) -> Json:
        """Return the verdict and the proof as JSON values."""
        return {
            "query": self.query,
            "verdict": self.verdict,
            "known": self.known,
            "proof": self.proof and proof_json(self.dataset, self.proof),
            **(best_proofs_json(self.dataset, self.best) if self.best else {}),
        }

    def to_dot(self) -> str:
        """Return the proof as a Graphviz graph, which has no nodes without a proof."""
        if self.proof is None:
            return "digraph proof {\n}\n"
        names = proof_names(self.dataset.shown)
        return proofs.to_dot(self.proof, names.format_atom, names.format_rule)

    def __repr__(self) -> str:
        """Format the verdict and the tree."""
        known = " (stated as a fact)" if self.known else ""
        headline = (
            f"{self.verdict} within height {self.height}: {self.query}{known}"
        )
        return "\n".join([headline, self.tree]).rstrip("\n")

    def _repr_html_(self) -> str:
        """Format the verdict, a picture of the proof and its tree as HTML, with names escaped."""
        return proof_html(self.dataset, self.proof, repr(self))


class Answers(Table, Sequence[Answer]):
    """Answers of several queries, one after the other: a sequence of `Answer` objects.

    Attributes:
      queries: of each answer the query.
    """

    def __init__(
        self, title: str, answers: Iterable[tuple[str, Answer]]
    ) -> None:
        """Set the title and each query with its answer."""
        self._text = title
        rows = tuple(answers)
        self.queries = tuple(query for query, _ in rows)
        self._answers = tuple(answer for _, answer in rows)

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._answers)

    def __getitem__(self, index: Any) -> Any:
        """Return the answer at a position, or the answers of a slice."""
        return self._answers[index]

    def _title(self) -> str:
        return self._text

    def _columns(self) -> tuple[str, ...]:
        names = ("head", "relation", "tail", "score", "known", "verdict")
        return ("query", "rank", *names)

    def _rows(self) -> list[tuple[object, ...]]:
        names = self._columns()[1:]
        return [
            (query, *(getattr(answer, name) for name in names))
            for query, answer in zip(self.queries, self._answers)
        ]


@dataclass(frozen=True, repr=False)
class Evaluation(Table):
    """Metrics of a filtered ranking of a split."""

    split: str
    """test or valid."""
    score: str
    """The name of the score."""
    metrics: Metrics
    """All metrics, as `funcppo evaluate --json` writes them."""

    def __getitem__(self, name: str) -> Any:
        """Return a metric by its name, such as "mrr" or "hits@10"."""
        return self.metrics[name]

    def _title(self) -> str:
        return f"{self.split}, score {self.score}: MRR {self['mrr']:.4f}, ceiling {self['ceiling']:.4f}"

    def _columns(self) -> tuple[str, ...]:
        return ("relation", *HEADLINE_METRICS, "ceiling", "n_queries")

    def _rows(self) -> list[tuple[object, ...]]:
        groups = self.metrics["by_group"]
        named = [("all", groups["all"]), *groups["relations"].items()]
        rows: list[tuple[object, ...]] = []
        for name, sides in named:
            group = sides["both"]
            means = [group[metric]["expected"] for metric in HEADLINE_METRICS]
            rows.append((name, *means, group["ceiling"], group["n_queries"]))
        return rows


class Knowledge:
    """Graph with rules and a score, which answers queries: a trained run, or rule confidences alone.

    Attributes:
      notes: what was chosen, one line each.
      folder: of the run; None without one.
    """

    def __init__(
        self,
        subject: Subject,
        run: Run | None = None,
        folder: Path | None = None,
    ) -> None:
        """Wrap a task and its score; see `fit` and `open`.

        Args:
          subject: a task and its score.
          run: a trained run; None for rule confidences.
          folder: of the run; None if it is not kept.
        """
        notes = (*subject.task.notes, *subject.notes)
        self.notes = (*notes, *(run.notes if run else ()))
        self.folder = folder
        self._subject = subject
        self._run = run

    @property
    def score(self) -> str:
        """Return the name of the score."""
        return self._subject.score.name

    @property
    def trained(self) -> bool:
        """Return whether a trained policy gives the score."""
        return self._subject.policy_run is not None

    @property
    def dataset(self) -> Dataset:
        """Return facts, held-out triples and rules as tables of ids."""
        return self._subject.task.dataset

    @cached_property
    def _answerer(self) -> Answerer:
        return Answerer(self._subject)

    @checks_arguments
    def predict(
        self,
        relation: str,
        *,
        head: str | None = None,
        tail: str | None = None,
        k: PositiveInt | None = 10,
        known: bool = False,
        with_self: bool = False,
        min_score: UnitInterval = 0.0,
        explain: bool = False,
        unproved: bool = False,
    ) -> Predictions:
        """Rank the answers of relation(head, X) or relation(X, tail); return the best.

            run.predict("locatedIn", head="france")
            run.predict("locatedIn(france, X)")

        Args:
          relation: a relation of two arguments; or the whole query, as `funcppo predict` reads it.
          head: the known head; give either this or the tail, of a relation.
          tail: the known tail.
          k: the number of answers; None for all.
          known: list known answers too. Otherwise they are left out and counted.
          with_self: list the given entity too, where no triple of the relation links an entity to itself.
          min_score: leave out answers that score less.
          explain: give each answer its proof, and the evidence of a run that weighs evidence.
          unproved: list the entities that no rule derives too, by all other evidence, with the verdict "no proof".

        Returns:
          Ranked answers; a candidate of a split query has the score that an evaluation gives it.

        Raises:
          ValueError: a name is unknown, not exactly one of head and tail is given, a query has no or several variables,
            k is below 1, or unproved answers are asked for beside a smallest score, or of a run without evidence.
        """
        if unproved and min_score:
            raise ValueError(
                "predict: expected unproved or min_score, got both: answers without a proof may score 0"
            )
        text = relation
        is_query = "(" in relation and relation not in self.dataset.predicates
        if not (head is tail is None and is_query):
            if (head is None) == (tail is None):
                raise ValueError(
                    f"predict: expected head or tail, got {'neither' if head is None else 'both'}"
                )
            # A name in quotes is no variable.
            names = ("?x" if x is None else quote(str(x)) for x in (head, tail))
            text = f"{quote(relation)}({', '.join(names)})"
        query, read = read_open_query(self.dataset, text)
        (found,) = self._answerer.answer(
            [query],
            k=k,
            with_known=known,
            with_self=with_self,
            min_score=min_score,
            with_explanations=explain,
            with_unproved=unproved,
        )
        return dataclasses.replace(
            found, notes=read.notes if text == relation else ()
        )

    @checks_arguments
    def predict_many(
        self,
        queries: Sequence[str],
        *,
        k: PositiveInt | None = 10,
        known: bool = False,
        min_score: UnitInterval = 0.0,
    ) -> Answers:
        """Rank the answers of many queries; return the best of each in one table.

            run.predict_many(["locatedIn(france, X)", "locatedIn(X, europe)"]).to_dataframe()

        Args:
          queries: as `funcppo predict` reads them.
          k: the number of answers of a query; None for all.
          known: list known answers too.
          min_score: leave out answers that score less.

        Raises:
          ValueError: a name is unknown, or a query has no or several variables; the message has its place.
        """
        if isinstance(queries, str):
            raise FieldError("queries", "a list of texts", queries)
        read: list[OpenQuery] = []
        for place, text in enumerate(queries):
            check_value(f"queries[{place}]", str, text)
            try:
                read.append(read_open_query(self.dataset, text)[0])
            except ValueError as error:
                raise ValueError(f"queries[{place}]: {error}") from None

        found = self._answerer.answer(
            read, k=k, with_known=known, min_score=min_score
        )
        rows = [(text, x) for text, of in zip(queries, found) for x in of]
        title = f"{len(rows):,} answers of {len(read):,} queries, score {self.score}"
        return Answers(title, rows)

    @checks_arguments
    def new_facts(
        self,
        relation: str,
        *,
        k: PositiveInt = 100,
        min_score: UnitInterval = 0.0,
    ) -> Answers:
        """Return the best answers that no split holds, of the queries for the tails of every entity.

            run.new_facts("locatedIn", k=1000).to_dataframe()

        Args:
          relation: of two arguments.
          k: the number of facts.
          min_score: leave out facts that score less.

        Returns:
          The facts, best first; equal scores share a rank.

        Raises:
          ValueError: the relation is unknown.
        """
        queries = relation_queries(self.dataset, relation)
        best: list[tuple[str, Answer]] = []

        def order(row: tuple[str, Answer]) -> float:
            score = row[1].quantised_score
            return sys.maxsize if score is None else -score

        # in parts, so that the answers of all entities are never held at once
        for start in range(0, len(queries), 1024):
            part = queries[start : start + 1024]
            found = self._answerer.answer(part, k=k, min_score=min_score)
            best += [(of.query, answer) for of in found for answer in of]
            best = sorted(best, key=order)[:k]
        places = [order(row) for row in best]
        ranked = [
            (query, answer._replace(rank=1 + places.index(place)))
            for (query, answer), place in zip(best, places)
        ]
        title = f"{len(best):,} new facts of {relation}, score {self.score}"
        return Answers(title, ranked)

    @checks_arguments
    def prove(
        self,
        query: str,
        proofs: PositiveInt = 1,
        height: PositiveInt | None = None,
    ) -> ProofResult:
        """Prove an atom from other facts, up to a height.

            run.prove("locatedIn(france, europe)")

        Args:
          query: an atom without variables.
          proofs: how many of the most probable proofs `best` is to hold, by the confidences of their rules; 1 for none.
          height: of the proof, the most rules above one another; None for that of the score.

        Returns:
          The verdict; if it is proved a proof, of a trained run the one that its policy finds most probable.

        Raises:
          ValueError: a name is unknown, there is a variable, or `proofs` is below 1.
        """
        atom = self._read_atom(query)
        task = self._subject.task
        task = dataclasses.replace(task, max_height=height or task.max_height)
        found = prove_from_other_facts(task, atom, MAX_PROOF_ROWS)
        proof = found.proof
        if proof is not None and self.trained and height is None:
            proof = self._answerer.explain(atom, TAIL).proof or proof

        best = None
        if proof is not None and proofs > 1:
            best = best_proofs(task, atom, MAX_PROOF_ROWS, proofs)
        return ProofResult(
            query=format_atom(self.dataset, atom.numpy()),
            verdict=Verdict(found.verdict).name.lower(),
            known=found.is_fact,
            proof=proof,
            height=task.max_height,
            dataset=self.dataset,
            best=best,
        )

    @checks_arguments
    def explain(
        self, query: str, side: Literal["head", "tail"] = "tail"
    ) -> AnswerProof:
        """Explain the score of an atom: return its proof and, of a run that weighs evidence, the evidence.

            print("\\n".join(run.explain("locatedIn(france, europe)").to_lines()))

        Args:
          query: an atom of two arguments without variables.
          side: head or tail: the place in which the atom is an answer.

        Raises:
          ValueError: a name is unknown, there is a variable, or another side.
        """
        atom = self._read_atom(query)
        if self.dataset.arities[int(atom[0]) - 1] != TAIL:
            raise ValueError(f"query {query!r}: expected two arguments")
        return self._answerer.explain(atom, HEAD if side == "head" else TAIL)

    @cached_property
    def _scorer(self) -> TripleScorer:
        return TripleScorer(self._answerer)

    @checks_arguments
    def score_triples(self, triples: object) -> list[Json]:
        """Score given triples: the probability that each is true, its scores and ranks on both sides, and a verdict.

            run.score_triples([("france", "locatedIn", "europe")])[0]["probability"]

        Args:
          triples: in memory, as `load` takes them; a name that is unknown is the verdict of its triple.

        Returns:
          The columns of `funcppo score` for each triple; the probability is None without a valid split.

        Raises:
          ValueError: they are no triples.
        """
        return self._scorer.score(to_triples(triples))

    @checks_arguments
    def evaluate(self, split: Literal["test", "valid"] = "test") -> Evaluation:
        """Rank a split against all entities, filtered and on both sides; return the metrics of `funcppo evaluate`.

            run.evaluate("test")["mrr"]

        Args:
          split: test or valid.

        Raises:
          ValueError: another split, an empty one, or a query of it that cannot be ranked.
        """
        task = self._subject.task
        queries: np.ndarray = getattr(self.dataset, split)
        if not len(queries):
            raise ValueError(f"{self.dataset.name}: its {split} split is empty")
        protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(task))
        ranking.check_split(task, queries, protocol)
        metrics = ranking.summarise_ranking(
            ranking.rank_split(task, queries, self._subject.score, protocol),
            list(self.dataset.predicates),
            with_auc=task.is_countries,
        )
        return Evaluation(split, self.score, metrics)

    @checks_arguments
    def report(self, path: str | Path, queries: int = 100) -> None:
        """Write the page of `funcppo report`: results, learning curves, reliability, rules, and queries with proofs.

            run.report("report.html")

        Args:
          path: of the HTML file; one that exists is replaced.
          queries: test queries that are shown, spread over relations.

        Raises:
          ValueError: it is not a trained run in a folder, or the packages of the extra `plot` are missing.
        """
        run = self._run
        if run is None or self.folder is None:
            raise ValueError(
                "report: expected a trained run in a folder, as fit(graph, out=...) or open(folder) give"
            )
        report.check_packages()
        found = measure.measure(
            run, self.folder, n_queries=queries, with_entries=True
        )
        page, _ = report.render(found)
        Path(path).write_text(page, encoding="utf-8")

    def _read_atom(self, query: str) -> torch.Tensor:
        """Return a query without variables as ids.

        Raises:
          ValueError: a name is unknown, or there is a variable.
        """
        read = read_query(self.dataset, query)
        if read.variables:
            raise ValueError(
                f"query {query!r}: expected no variables (predict answers r(h, X) and r(X, t))"
            )
        if read.dataset is not self.dataset:
            raise ValueError(f"query {query!r}: {read.notes[-1]}")
        return torch.from_numpy(read.atom)

    def __repr__(self) -> str:
        """Describe the graph, the kind of score, the height and the number of rules in one line."""
        kind = "trained policy" if self.trained else "rule confidences"
        folder = f", {self.folder}" if self.folder else ""
        return (
            f"Knowledge of {self.dataset.name}: {kind}, score {self.score}, height {self._subject.task.max_height}, "
            f"{len(self.dataset.rules):,} rules{folder}"
        )

    def _repr_html_(self) -> str:
        """Format the line of `repr` and the notes as HTML, with names escaped."""
        notes = "".join(
            f"<li>{html.escape(display(x))}</li>" for x in self.notes
        )
        title = f"<p><b>{html.escape(repr(self))}</b></p>"
        return f"{title}<details><summary>{len(self.notes)} notes</summary><ul>{notes}</ul></details>"


@checks_arguments
def load(
    source: object,
    *,
    valid: object = None,
    test: object = None,
    rules: str | Path | None = None,
    split_ratios: str | None = None,
) -> Graph:
    """Load a knowledge graph by name, from files or from triples in memory.

        graph = fp.load("countries_s1")
        graph = fp.load([("ann", "parent", "bob"), ("bob", "parent", "eve")])

    Args:
      source: an embedded name, a folder, a file of triples or a Prolog program; or triples in memory: tuples of (head,
        relation, tail), an array of names [n, 3], a data frame of pandas or polars, or a TriplesFactory of PyKEEN.
      valid: held-out triples to choose settings and parameters by, if the source is in memory; as the source.
      test: held-out triples for the evaluation, if the source is in memory; as the source.
      rules: a rule file, or its text if it has a line break or an arrow; in place of the source's own rules.
      split_ratios: shares of train, valid and test, such as "0.8,0.1,0.1", for one file of triples.

    Returns:
      The graph; without rules unless the source or `rules` has some.

    Raises:
      ValueError: a triple, a file or a rule is wrong.
    """
    is_text = isinstance(rules, str) and any(
        mark in rules for mark in ("\n", ":-", "<=", "=>")
    )
    if isinstance(source, str | Path):
        if valid is not None or test is not None:
            raise ValueError(
                "load: expected valid and test only beside triples in memory"
            )
        if is_text:
            raise ValueError(
                "load: expected a rule file beside a file or name, got the text of rules"
            )
        config = DataConfig(split_ratios=split_ratios)
        path = None if rules is None else str(Path(rules).absolute())
        name = str(Path(source).absolute()) if Path(source).exists() else source
        dataset = loaders.load(name, path, cfg=config)
        return Graph(dataset, source=str(name), rules=path, config=config)

    if split_ratios is not None:
        raise ValueError("load: expected split_ratios only beside a file")
    text = None
    if rules is not None:
        text = str(rules) if is_text else read_text(Path(rules))
    triples = to_triples(source)
    if not triples:
        raise ValueError("load: expected at least one triple, got none")
    dataset = loaders.from_triples(
        triples,
        None if valid is None else to_triples(valid),
        None if test is None else to_triples(test),
        rules=text or "",
    )
    return Graph(dataset, rules_text=text)


@checks_arguments
def mine(
    graph: Graph | object,
    progress: bool | None = None,
    **options: Unpack[MiningOptions],
) -> Graph:
    """Mine the rules that the facts of a graph support; return the graph with these rules.

        graph = fp.mine("countries_s1", seconds=10)

    Args:
      graph: a graph, or what `load` takes.
      progress: show what is being done, as `fit` does.
      options: fields of `MiningConfig`, such as max_length, min_support, constants and seconds.

    Returns:
      The graph with the mined rules in place of its own.

    Raises:
      ValueError: an option is out of range, or the graph cannot be loaded.
      TypeError: an option is unknown.
      KeyboardInterrupt: mining was interrupted.
    """
    _check_options(MiningOptions, options, "mine")
    graph = _as_graph(graph)
    cfg = rule_files.mining_config(graph.dataset, **options)
    with _progress(progress) as on_phase:
        mined = rule_files.mine_dataset(graph.dataset, cfg, progress=on_phase)
    if mined.result.interrupt is not None:
        raise mined.result.interrupt
    text = format_rule_table(mined.dataset, mined.statistics, "tsv")
    return graph.with_rules(mined.dataset, text)


@checks_arguments
def fit(
    graph: Graph | object,
    out: str | Path | None = None,
    on_update: Callable[[int, dict[str, float]], object] = lambda *_: None,
    log: Sequence[LoggerName] = (),
    memory: PositiveInt | None = None,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> Knowledge:
    """Train a prover on a graph and return the trained run; rules are mined first if the graph has none.

        run = fp.fit(graph, steps=2000)

    Args:
      graph: a graph, or what `load` takes.
      out: folder of the run, which the command line reads too; None: no files are left behind.
      on_update: receives the number of each update and its metrics.
      log: where these go too: csv, tensorboard, wandb or mlflow, in the folder `out`.
      memory: limit of this process, or of the GPU, in bytes, as `funcppo train --memory`; None for no limit. What would
        exceed it is computed in smaller parts, and a note of the run says so.
      progress: show on one line what is being done; None: in a notebook and on a terminal.
      options: fields of `RunConfig`, such as steps, seed, learner, prover and ppo; their defaults are those of
        `funcppo train`.

    Returns:
      The trained run.

    Raises:
      ValueError: a setting is bad, the graph supports no rules, or the folder holds a run.
      TypeError: an option is unknown.
    """
    _check_options(FitOptions, options, "fit")
    if options.get("learner") == "guide":
        raise ValueError(
            "fit: learner: expected one that ranks, got 'guide' (`funcppo train` trains it)"
        )
    if log and out is None:
        raise ValueError("log: expected a folder `out` for it, got none")
    if not callable(on_update):
        raise FieldError("on_update", "a function", on_update)
    RunConfig(dataset="", **options)
    graph = _as_graph(graph)
    device = options.get("device", RunConfig(dataset="").device)
    with (
        tempfile.TemporaryDirectory() as name,
        _progress(progress) as on_phase,
        budget.within_memory(memory, device),
    ):
        folder = Path(name) / "run" if out is None else Path(out)

        def tell(update: int, metrics: dict[str, float]) -> None:
            on_phase(f"update {update} of PPO")
            on_update(update, metrics)

        config, rules_file = graph.store_settings(Path(name))
        run = train.train_run(
            dataclasses.replace(config, **options),
            folder,
            on_phase,
            tell,
            log=log,
            memory_limit=memory,
            dataset=graph.dataset,
            rules_file=rules_file,
        )
    return Knowledge(run_subject(run), run, None if out is None else folder)


@checks_arguments
def open(
    source: str | Path | Graph,
    *,
    graph: Graph | object = None,
    recount: bool = False,
    score: str = "auto",
    device: DeviceName = "cpu",
    choice_seconds: PositiveFloat = CHOICE_SECONDS,
) -> Knowledge:
    """Open a trained run, or a graph with rules to score it without training.

        run = fp.open("runs/s3")

    Args:
      source: the folder of a run, or a graph.
      graph: facts that a run is asked about, matched by name: a graph, or what `load` takes; None for the data set that
        it was trained on, as it is now, or for the facts of training where it is gone.
      recount: count the rules of a run over these facts; their confidences are those of training otherwise.
      score: a score of `funcppo evaluate`; auto for that of its policy or its rule score, whichever ranks valid better;
        of a graph the one that ranks its valid split best.
      device: cpu or cuda.
      choice_seconds: time limit of choosing settings and score of a graph; notes say what is left out for it.

    Returns:
      What answers questions.

    Raises:
      ValueError: the folder holds no run, the graph does not fit it or has no rules, or a graph is asked about another.
    """
    if isinstance(source, Graph):
        if graph is not None or recount:
            raise ValueError(
                "open: expected graph and recount only beside the folder of a run"
            )
        if not len(source.dataset.rules):
            raise ValueError(
                f"{source.dataset.name}: expected rules (funcppo.mine(graph), or funcppo.load with rules=), got none"
            )
        cfg = ProverTaskConfig(smoothing="auto", object_identity="auto")
        subject = dataset_subject(
            source.dataset,
            cfg,
            score,
            device,
            choice_seconds=choice_seconds,
        )
        return Knowledge(subject)
    if not isinstance(source, str | Path):
        raise FieldError("source", "the folder of a run, or a graph", source)
    folder = Path(source)
    if folder.is_file():
        raise ValueError(
            f"{folder}: expected the folder of a run, or a graph (funcppo.load(file)), got a file"
        )
    facts = None if graph is None else _as_graph(graph).dataset
    run = open_run(folder, device, graph=facts, recount=recount)
    return Knowledge(run_subject(run, score), run, folder)


@contextmanager
def _progress(is_shown: bool | None) -> Iterator[Callable[..., None]]:
    """Yield a callback that shows on one line of standard error what is being done.

    Args:
      is_shown: None for whether somebody reads it: in a notebook, or on a terminal.
    """
    if is_shown is None:
        is_shown = "ipykernel" in sys.modules or sys.stderr.isatty()
    if not is_shown:
        yield ignore_phase
        return
    start = last = time.monotonic()

    def show(text: str, done: float = 0, total: float | None = 0, *_: Any):
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2:
            last = now
            part = f" {done:,.0f} of {total:,.0f}" if total else ""
            line = f"{text}{part}, {now - start:.0f} s"
            print(f"\r{line[:79]:<79}", end="\r", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(f"\r{'':79}", end="\r", file=sys.stderr, flush=True)


def _as_graph(graph: Graph | object) -> Graph:
    """Return the graph; load it first if it is not a `Graph`."""
    return graph if isinstance(graph, Graph) else load(graph)


def _check_options(
    config: type[FitOptions] | type[MiningOptions],
    options: Iterable[str],
    function: str,
) -> None:
    """Check that all options are fields of the settings.

    Raises:
      TypeError: one is not; the message has the nearest spellings.
    """
    known = [*config.__annotations__]
    for name in options:
        if name not in known:
            hint = similar_names_hint(name, known)
            raise TypeError(
                f"{function}: unknown setting {name}: expected one of {config.__name__} ({hint})"
            )
