"""Answers of the explorer, one method for each, and its pages and JSON API (extra `serve`).

Scores, ranks and proofs are those of `Answerer`, which `funcppo predict` asks. Every list is bounded, and its whole
length is said.

A page and a path of the API are made of each method of `Explorer` that `RESOURCES` names, with the query string and the
answer that its annotations say.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from importlib import resources
from itertools import chain
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlencode

import jinja2
import numpy as np
import torch
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
)
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from funcppo.core import VERSION
from funcppo.core.files import Json, shorten
from funcppo.core.types import I64
from funcppo.kg.answers import Answerer, OpenQuery, format_query
from funcppo.kg.graph import drawing
from funcppo.kg.graph.dataset import Dataset, assign_ids
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.graph.text import (
    QUOTED_PATTERN,
    display,
    unknown_name_message,
    unquote,
)
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.kb import HEAD, SIDE_NAMES, TAIL, other_side
from funcppo.kg.ranking import explain
from funcppo.kg.ranking.scoring import graph_fallback_notes
from funcppo.kg.run.subject import describe_numbers
from funcppo.kg.show import values
from funcppo.kg.show.measure import explain_failure
from funcppo.kg.show.report import make_templates
from funcppo.kg.show.server import Guard, RequestError, Worker, is_api
from funcppo.kg.show.values import Fact, Name, Rule
from funcppo.runtime.capture import CaptureError

# rows of a page of relations, facts or rules
PAGE_ROWS = 50
# splits in the order of their bits
SPLITS = ("train", "facts", "valid", "test")


class KnownFacts:
    """Distinct facts of all splits of a data set.

    Attributes:
      atoms: int [n, W], in lexicographic order.
    """

    def __init__(self, dataset: Dataset) -> None:
        """Sort the facts, and record the splits of each."""
        facts = dataset.facts[len(dataset.train) :]
        parts = (dataset.train, facts, dataset.valid, dataset.test)
        self.atoms, number = np.unique(
            np.concatenate(parts), axis=0, return_inverse=True
        )
        split = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        self._is_in = np.zeros((len(self.atoms), len(parts)), dtype=bool)
        self._is_in[number.reshape(-1), split] = True

    def find(
        self, relation: int | None, arguments: Mapping[int, int]
    ) -> I64[np.ndarray, "n"]:
        """Return the rows of the facts of a relation, or of any for None, that have the given entities as arguments.

        Args:
          relation: None for any.
          arguments: entities by their place, from 1.
        """
        relations = self.atoms[:, 0]
        rows = np.arange(len(relations))
        if relation is not None:
            first, end = np.searchsorted(relations, [relation, relation + 1])
            rows = rows[first:end]
        for place, entity in arguments.items():
            if place >= self.atoms.shape[1]:
                return rows[:0]
            rows = rows[self.atoms[rows, place] == entity]
        return rows

    def splits_of(self, row: int) -> list[str]:
        """Return the splits that hold a fact."""
        pairs = zip(SPLITS, self._is_in[row])
        return [name for name, is_in in pairs if is_in]

    def facts_of(self, entity: int) -> I64[np.ndarray, "n W"]:
        """Return the first two hundred facts that have an entity as an argument."""
        return self.atoms[(self.atoms[:, 1:] == entity).any(1)][:200]

    def groups_of(self, entity: int) -> dict[tuple[int, int], list[int]]:
        """Return the rows of an entity's facts by relation and argument position."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, place in np.argwhere(self.atoms[:, 1:] == entity).tolist():
            key = int(self.atoms[row, 0]), place + 1
            groups.setdefault(key, []).append(row)
        return dict(sorted(groups.items()))


class Explorer:
    """Answers requests about a graph, its rules and their score.

    Attributes:
      answerer: ranks and proves.
      dataset: the names.
      known: the known facts.
    """

    def __init__(self, answerer: Answerer, results: Json | None = None) -> None:
        """Index the names and the known facts, and sort the rules by confidence.

        Args:
          results: the content of the run's results.json; None without one.
        """
        self._results = results or {}
        self.answerer = answerer
        self.dataset = dataset = answerer.dataset
        self.known = KnownFacts(dataset)
        self._names = {
            "relation": dataset.predicates,
            "entity": dataset.entities,
        }
        shown = dataset.shown
        self._labels = {"relation": shown.predicates, "entity": shown.entities}
        self._folded = {
            kind: [[*map(fold, names)] for names in (self._labels[kind], own)]
            for kind, own in self._names.items()
        }
        # of several relations of one name the first with two arguments
        places = range(1, dataset.n_predicates + 1)
        last = sorted(
            places, key=lambda i: (dataset.arities[i - 1] == TAIL, -i)
        )
        relations = {dataset.predicate_name(i): i for i in last}
        self._ids = {
            "relation": assign_ids(shown.predicates) | relations,
            "entity": assign_ids(shown.entities) | assign_ids(dataset.entities),
        }
        kb = answerer.subject.task.kb
        self._support = kb.support.double().cpu().numpy()
        self._pairs = kb.body_pairs.double().cpu().numpy()
        self._confidence = self._support / np.maximum(self._pairs, 1e-9)
        self._order = np.argsort(-self._confidence, kind="stable")

    # -- names

    def find(self, kind: str, name: str) -> int:
        """Return the id of a name, which may be quoted as it is suggested.

        Args:
          kind: entity or relation; of one with two arguments if several relations have the name.

        Raises:
          RequestError: there is none; the message has the nearest spellings.
        """
        ids = self._ids[kind]
        if name not in ids and re.fullmatch(QUOTED_PATTERN, name):
            with suppress(ValueError):
                name = unquote(name)
        if name not in ids:
            message = unknown_name_message(kind, name, self._names[kind])
            raise RequestError(404, message)
        return ids[name]

    def name(self, kind: str, number: int) -> Name:
        """Return a name by its id.

        Raises:
          RequestError: there is none.
        """
        names = self._names[kind]
        if not 1 <= number <= len(names):
            raise RequestError(
                404, f"{kind}_id: expected 1 to {len(names)}, got {number}"
            )
        label = self._labels[kind][number - 1]
        return Name(id=number, name=names[number - 1], label=label)

    def read(
        self, query: values.Query, field: str, *, is_needed: bool = False
    ) -> Name | None:
        """Return the name that a query gives in a field or by its id; None if it gives neither.

        Args:
          field: relation, entity, head or tail.
          is_needed: it must give one.

        Raises:
          RequestError: it is unknown, given twice, or needed and not given.
        """
        name: str | None = getattr(query, field)
        number: int | None = getattr(query, f"{field}_id")
        kind = "relation" if field == "relation" else "entity"
        is_twice = name is not None and number is not None
        if is_twice or (is_needed and name is number):
            got = "both" if is_twice else "nothing"
            raise RequestError(
                400, f"expected {field} or {field}_id, got {got}"
            )
        if name is not None:
            number = self.find(kind, name)
        return None if number is None else self.name(kind, number)

    def require(self, query: values.Query, field: str) -> Name:
        """Return the name that a query must give; raises as `read` does."""
        found = self.read(query, field, is_needed=True)
        assert found is not None
        return found

    def search(self, query: values.SearchQuery) -> values.NameMatches:
        """Return the names that contain a text: exact matches first, then names that start with it."""
        text, limit = fold(query.q.strip()), query.limit
        names: list[values.NameMatch] = []
        for kind, folded in self._folded.items():
            if not text or query.kind not in (kind, "any"):
                continue
            found = (search(names, text, limit + 1) for names in folded)
            for number in dict.fromkeys(chain.from_iterable(found)):
                name = self.name(kind, number)
                text = display(name.label)
                match = values.NameMatch(**dict(name), kind=kind, text=text)
                names.append(match)
        return values.NameMatches(
            query=query.q, names=names[:limit], has_more=len(names) > limit
        )

    # -- facts

    def graph(self, query: values.PageQuery) -> values.Graph:
        """Return the sizes, score and notes of the graph, with a page of its relations."""
        dataset, subject = self.dataset, self.answerer.subject
        ids = range(1, dataset.n_predicates + 1)
        notes = [*subject.task.notes, *subject.notes]
        notes += graph_fallback_notes(subject.search_step)
        recorded = self._results.get("test") or {}
        # three questions over all held-out facts
        held_out = dataset.test if len(dataset.test) else dataset.valid
        rows = held_out[:: max(1, len(held_out) // 3)][:3].tolist()

        return values.Graph(
            name=dataset.name,
            trained=subject.policy_run is not None,
            score=subject.score.name,
            height=subject.task.max_height,
            n_entities=dataset.n_constants,
            n_relations=dataset.n_predicates,
            n_rules=len(dataset.rules),
            n_train=len(dataset.train),
            n_valid=len(dataset.valid),
            n_test=len(dataset.test),
            notes=notes,
            test_mrr=recorded.get(subject.score.name, {}).get("mrr"),
            examples=[
                self._fact(atom)
                for atom in rows
                if dataset.arities[atom[0] - 1] == TAIL
            ],
            offset=query.offset,
            relations=[
                self._measure(i) for i in ids[query.offset :][:PAGE_ROWS]
            ],
        )

    def entity(self, query: values.EntityQuery) -> values.Entity:
        """Return an entity with its known facts, by relation and argument position."""
        name = self.require(query, "entity")
        groups = self.known.groups_of(name.id)
        listed = [
            values.FactGroup(
                relation=self.name("relation", relation),
                place=place,
                n_facts=len(rows),
                facts=self._facts(rows[:10]),
            )
            for (relation, place), rows in list(groups.items())[:100]
        ]

        return values.Entity(
            entity=name,
            n_facts=sum(map(len, groups.values())),
            n_groups=len(groups),
            groups=listed,
            expanded=[
                self.name("entity", int(x)).id
                for x in query.expand.split(",")
                if x
            ],
        )

    def relation(self, query: values.FactsQuery) -> values.Relation:
        """Return a relation with its most confident rules, and a page of its facts with the given head and tail."""
        relation = self.require(query, "relation")
        head, tail = self.read(query, "head"), self.read(query, "tail")
        given = {HEAD: head, TAIL: tail}
        rows = self.known.find(
            relation.id,
            {place: name.id for place, name in given.items() if name},
        )
        return values.Relation(
            relation=self._measure(relation.id),
            rules=list(map(self._rule, self._rules_of(relation.id)[:10])),
            head=head,
            tail=tail,
            n_facts=len(rows),
            offset=query.offset,
            facts=self._facts(rows[query.offset :][:PAGE_ROWS]),
        )

    def _measure(self, relation: int) -> values.RelationSize:
        """Return a relation with its arity and its numbers of facts and rules."""
        return values.RelationSize(
            id=relation,
            name=self.dataset.predicate_name(relation),
            label=self._labels["relation"][relation - 1],
            arity=self.dataset.arities[relation - 1],
            n_facts=len(self.known.find(relation, {})),
            n_rules=len(self._rules_of(relation)),
        )

    def _facts(self, rows: Iterable[int]) -> list[Fact]:
        """Return known facts by their rows."""
        return [self._fact(self.known.atoms[row].tolist()) for row in rows]

    def _fact(self, atom: Sequence[int]) -> Fact:
        """Return an atom of any arity, known or not, with its names and splits."""
        arguments = {i: term for i, term in enumerate(atom) if i and term}
        rows = self.known.find(atom[0], arguments)[:1].tolist()
        splits = [self.known.splits_of(row) for row in rows]
        return Fact(
            text=format_atom(self.dataset.shown, atom),
            relation=self.name("relation", atom[0]),
            arguments=[self.name("entity", i) for i in arguments.values()],
            splits=splits[0] if splits else [],
        )

    # -- rules

    def rules(self, query: values.RulesQuery) -> values.Rules:
        """Return a page of the rules, the most confident first: of one relation, of all, or a single one."""
        relation, n_all = self.read(query, "relation"), len(self.dataset.rules)
        rules = self._rules_of(relation.id if relation else None)
        if query.rule is not None:
            if query.rule >= n_all:
                raise RequestError(
                    404, f"rule: expected 0 to {n_all - 1}, got {query.rule}"
                )
            rules = [query.rule]
        listed = rules[query.offset :][:PAGE_ROWS]
        return values.Rules(
            relation=relation,
            n_rules=len(rules),
            offset=query.offset,
            rules=[self._rule(rule) for rule in listed],
        )

    def _rules_of(self, relation: int | None) -> list[int]:
        """Return the ids of a relation's rules, or of all rules for None, the most confident first."""
        rules = self._order
        if relation is not None:
            rules = rules[self.dataset.rules[rules, 0, 0] == relation]
        return rules.tolist()

    def _rule(self, rule: int) -> Rule:
        """Return a rule with its counts."""
        atoms = self.dataset.rules[rule]
        smoothing = self.answerer.subject.task.cfg.smoothing or 0.0
        return Rule(
            id=rule,
            text=format_rule(self.dataset.shown, atoms),
            relation=self.name("relation", int(atoms[0, 0])),
            support=round(self._support[rule]),
            body_pairs=round(self._pairs[rule] - smoothing),
            confidence=self._confidence[rule],
        )

    # -- queries

    def answers(self, query: values.AnswersQuery) -> values.Answers:
        """Return the ranked answers of relation(head, X) or relation(X, tail)."""
        relation = self._require_binary(query)
        head, tail = self.read(query, "head"), self.read(query, "tail")
        given = tail if head is None else head
        if given is None or (head and tail):
            number = "neither" if given is None else "both"
            raise RequestError(
                400,
                f"expected one of head and tail, and the other one open, got {number}",
            )

        side = HEAD if head is None else TAIL
        (found,) = self.answerer.answer(
            [OpenQuery(relation.id, side, given.id)],
            k=query.k,
            with_known=query.known,
            with_self=query.with_self,
            min_score=query.min_score,
        )
        answers: list[Json] = []
        for answer in found.answers:
            number = self._ids["entity"][answer.entity]
            label = self._labels["entity"][number - 1]
            more = {"entity_id": number, "label": label}
            answers.append(answer.to_json() | more)
        subject = self.answerer.subject
        asked = {
            "relation": relation,
            "given": given,
            "score": subject.score.name,
            "trained": subject.policy_run is not None,
            "answers": answers,
        }
        return values.Answers.model_validate(found.to_record() | asked)

    def why(self, query: values.WhyQuery) -> values.AtomExplanation:
        """Explain an atom as an answer on one side by its proof, or by the rules that fail to prove it."""
        relation = self._require_binary(query)
        head, tail = (self.require(query, side) for side in ("head", "tail"))
        place = HEAD if query.side == "head" else TAIL
        subject = self.answerer.subject
        atom = torch.zeros(subject.task.sizes.atom_width).long()
        atom[:3] = torch.tensor([relation.id, head.id, tail.id])
        given = int(atom[other_side(place)])
        (score,) = self.answerer.score(atom[None], place)

        # A search may miss what the rules derive; other evidence may score what they do not.
        reasons: Json = {"verdict": Verdict.PROVED}
        is_derivable = self.answerer.is_derivable(atom[None], place)
        if score <= 0 or not is_derivable:
            reasons = explain_failure(subject.task, atom)
        verdict = reasons["verdict"].name.lower()
        if verdict == "proved":
            proof = self.answerer.explain(atom, place)
            reasons |= proof._replace(dataset=self.dataset.shown).to_json()
            if query.proofs > 1:
                best = explain.best_proofs(
                    subject.task,
                    atom,
                    explain.MAX_FACT_PROOF_ROWS,
                    query.proofs,
                )
                reasons |= explain.best_proofs_json(self.dataset.shown, best)
        if verdict != "unknown":
            verdict = self.answerer.verdict(verdict == "proved")
        fields = {
            "atom": self._fact(atom.tolist()),
            "side": SIDE_NAMES[place],
            "query": format_query(
                self.dataset.shown, OpenQuery(relation.id, place, given)
            ),
            "score": score,
            "score_name": subject.score.name,
            "trained": subject.policy_run is not None,
            "verdict": verdict,
            "beside": self._beside(query),
        }
        return values.AtomExplanation.model_validate(reasons | fields)

    def _beside(self, query: values.WhyQuery) -> values.AtomExplanation | None:
        """Explain the other answer of a query; None without one."""
        if query.beside_id is None:
            return None
        asked = {query.side: None, f"{query.side}_id": query.beside_id}
        asked |= {"beside_id": None, "proofs": 1}
        return self.why(query.model_copy(update=asked))

    def _require_binary(self, query: values.RelationQuery) -> Name:
        """Return the relation of a query, which must have two arguments.

        Raises:
          RequestError: it is not given, unknown, or has not two.
        """
        name = self.require(query, "relation")
        arity = self.dataset.arities[name.id - 1]
        if arity != TAIL:
            raise RequestError(
                400,
                f"relation {shorten(name.name)}: expected two arguments, it has {arity}",
            )
        return name


def fold(text: str) -> str:
    """Normalise a text for comparison: composed, without case, on one line."""
    composed = unicodedata.normalize("NFKC", text)
    return composed.casefold().replace("\n", " ")


def search(names: Iterable[str], text: str, limit: int) -> list[int]:
    """Return positions, from 1, of names that contain a text: exact matches first, then names that start with it."""
    found = (
        (name != text, not name.startswith(text), i)
        for i, name in enumerate(names, 1)
        if text in name
    )
    return [i for *_, i in nsmallest(limit, found)]


def proof_tree(
    proof: values.Proof,
    position: int = 0,
    depth: int = 0,
    drawn: list[int] | None = None,
) -> Json:
    """Return a goal of a proof and its children as the nested values that a page draws.

    A goal that is proved again by a rule is drawn once. What is too deep or too much is cut, and marked, since browsers
    give up at some hundreds.

    Args:
      position: of the goal.
      drawn: the positions of what was drawn before.
    """
    drawn = [] if drawn is None else drawn
    node = proof.nodes[position]
    kind = "rule"
    if node.rule is None:
        kind = "fact"
    elif position in drawn:
        kind = "repeated"
    elif depth >= 40 or len(drawn) >= 300:
        kind = "cut"
    drawn.append(position)

    relation, *arguments = node.goal
    names = [_name_in(proof.constants, i) for i in arguments if i]
    children = node.children if kind == "rule" else []
    return {
        "kind": kind,
        "relation": _name_in(proof.predicates, relation),
        "arguments": names,
        "rule": node.rule,
        "rule_text": node.rule_text,
        "probability": node.probability,
        "children": [
            proof_tree(proof, child, depth + 1, drawn) for child in children
        ],
    }


def _name_in(names: Mapping[str, str], number: int) -> Name:
    """Return the name of a number in a proof."""
    name = names[str(number)]
    return Name(id=number, name=name, label=name)


def compare_terms(
    value: values.AtomExplanation, other: values.AtomExplanation
) -> list[tuple[str, tuple[float | None, float | None]]]:
    """Return the first forty terms of evidence of two answers, with what each adds; the largest difference first."""
    here, there = _adds_of(value), _adds_of(other)
    rows = [
        (text, (here.get(text), there.get(text))) for text in {**here, **there}
    ]
    rows.sort(key=lambda row: -abs((row[1][0] or 0) - (row[1][1] or 0)))
    return rows[:40]


def _adds_of(value: values.AtomExplanation) -> dict[str, float]:
    """Return what each term of the evidence of an answer adds, by a text that does not name the answer."""
    name = re.escape(value.atom.arguments[value.side == "tail"].label)
    return {
        "rules that derive it"
        if term.kind == "rules"
        else re.sub(rf"(?<!\w){name}(?!\w)", "it", term.text): term.log_odds
        for term in (value.evidence.terms if value.evidence else ())
    }


# of an answer in JSON; pages cut names that are very long
MAX_ANSWER_BYTES = 4_000_000
RESOURCES = {
    "graph": "What is explored: sizes, score, notes, relations",
    "search": "Names that contain a text",
    "answers": "Ranked answers of relation(head, X) or relation(X, tail)",
    "why": "Why an atom is an answer: score, proof, evidence; or why not",
    "entity": "An entity and its neighbours, by relation",
    "relation": "A relation with its best rules, and its facts with some names in their places",
    "rules": "Rules, the most confident first",
}
# these rank or prove, one after the other; all others do not wait for them
RANKING = ("answers", "why")
DESCRIPTION = (
    "Ranked, explained answers over a knowledge graph. Every request is a GET. Names may be given by their ids. "
    "An error is one line."
)
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {
        "model": values.Problem,
        "description": "A parameter is missing or wrong.",
    },
    404: {
        "model": values.Problem,
        "description": "A name or an id is unknown.",
    },
    503: {
        "model": values.Problem,
        "description": "It takes too much work, or others wait.",
    },
    "4XX": {"model": values.Problem, "description": "It is refused."},
}
FAILURES = (
    RequestError,
    RequestValidationError,
    HTTPException,
    CaptureError,
    Exception,
)
_FILES = resources.files("funcppo.kg.show") / "static"


class AnswerResponse(JSONResponse):
    """JSON response in ASCII, so that it contains no invisible characters."""

    def render(self, content: object) -> bytes:
        """Return the bytes of an answer.

        Raises:
          RequestError: it is too long.
        """
        text = json.dumps(content, allow_nan=False).encode()
        if len(text) > MAX_ANSWER_BYTES:
            raise RequestError(
                503,
                f"expected an answer of at most {MAX_ANSWER_BYTES:,} bytes, got {len(text):,}: ask for less",
            )
        return text


class Site:
    """Pages and API of an explorer.

    Attributes:
      explorer: answers.
      worker: ranks and proves.
      lookups: looks up names and facts meanwhile.
    """

    def __init__(self, explorer: Explorer, seconds: float) -> None:
        """Prepare the templates and start the workers.

        Args:
          seconds: that the work of a request may take.
        """
        self.explorer = explorer
        self.worker = Worker(seconds)
        self.lookups = Worker(seconds)
        self._templates = _make_templates(explorer)
        self._templates.globals |= {
            "root": "",
            "link": self._link,
            "picture_of": self._draw,
        }

    def make_app(
        self,
        host: str,
        allowed_hosts: Sequence[str] = (),
        path_prefix: str = "",
    ) -> ASGIApp:
        """Build the application.

        Args:
          host: the name or address that is listened on.
          allowed_hosts: names of a proxy, which requests may give in their Host header.
          path_prefix: path below which a proxy shows the site, such as /graphs; requests may begin with it or not.
        """
        self._templates.globals["root"] = path_prefix
        app = FastAPI(
            title="funcppo serve",
            version=VERSION,
            description=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            default_response_class=AnswerResponse,
            exception_handlers=dict.fromkeys(FAILURES, self._on_error),
            generate_unique_id_function=lambda route: route.name,
        )
        for name, summary in RESOURCES.items():
            app.get(
                f"/api/{name}",
                name=name,
                summary=summary,
                description=summary,
                responses=RESPONSES,
                response_model=get_type_hints(getattr(Explorer, name))[
                    "return"
                ],
            )(self._endpoint(name, lambda _, value: value))

        pages: dict[str, Callable[..., Any]] = {
            f"/{name}": self._endpoint(name, partial(self._respond, name))
            for name in RESOURCES
        }
        pages |= {
            "/": pages["/graph"],
            "/ask": self._ask,
            "/api": lambda: self._render("api", document=app.openapi()),
            # What a browser asks for beside JSON, which links no icon.
            "/favicon.ico": lambda: FileResponse(str(_FILES / "icon.svg")),
        }
        for path, page in pages.items():
            app.get(path, include_in_schema=False, response_model=None)(page)
        app.mount("/static", StaticFiles(directory=str(_FILES)))
        app.get("/health", include_in_schema=False)(lambda: {"status": "ok"})
        return Guard(app, (host, *allowed_hosts), self.problem, path_prefix)

    def problem(self, status: int, line: str, is_api: bool) -> Response:
        """Return the response to a request that has no answer."""
        if is_api:
            return AnswerResponse({"error": line}, status)
        return self._render("error", status, line=line, status=status)

    # -- answering

    def _endpoint(
        self, name: str, respond: Callable[[Any, Any], object]
    ) -> Callable[..., Awaitable[object]]:
        """Build the endpoint of a resource.

        Args:
          respond: makes the response of the query and its answer, within the time of the request.
        """
        method = getattr(self.explorer, name)
        worker = self.worker if name in RANKING else self.lookups

        async def answer(query: Any) -> object:
            work = worker.submit(lambda: respond(query, method(query)))
            return await asyncio.wrap_future(work)

        query = get_type_hints(method)["query"]
        answer.__annotations__ = {"query": Annotated[query, Query()]}
        return answer

    def _respond(
        self, name: str, query: values.Query, value: BaseModel
    ) -> Response:
        """Return the page of an answer."""
        fields = query.model_dump(exclude_unset=True)
        api = self._link(f"/api/{name}", **fields)
        return self._render(name, api=api, query=query, value=value)

    async def _ask(
        self, query: Annotated[values.AtomQuery, Query()]
    ) -> Response:
        """Redirect a form to the answers of its query, or to the explanation of its atom."""
        fields = query.model_dump(exclude_none=True)
        given = {name.removesuffix("_id") for name in fields}
        path = "/why" if {"head", "tail"} <= given else "/answers"
        return RedirectResponse(self._link(path, **fields), 303)

    # -- responses

    def _render(
        self, template: str, status_code: int = 200, **context: object
    ) -> HTMLResponse:
        """Render a page from a template."""
        page = self._templates.get_template(f"{template}.html")
        # A name may hold what is no character.
        content = page.render(context).encode("utf-8", "backslashreplace")
        return HTMLResponse(content, status_code)

    def _link(self, path: str, **fields: object) -> str:
        """Return the address of a page with its query string; fields of None are left out."""
        given = {
            name: value for name, value in fields.items() if value is not None
        }
        path = f"{self._templates.globals['root']}{path}"
        return f"{path}?{urlencode(given)}" if given else path

    def _draw(
        self,
        value: values.Entity | values.AtomExplanation,
        proof: values.Proof | None = None,
    ) -> str:
        """Draw an entity's neighbours, or a proof of an atom, as SVG; empty without a binary fact.

        Args:
          proof: None for that of the explanation.
        """
        names = self.explorer.dataset.shown

        def link(entity: int, **more: str) -> str:
            return self._link("/entity", entity_id=entity, **more)

        if isinstance(value, values.AtomExplanation):
            proof = proof or value.proof
            assert proof is not None
            goals = ((node.goal, node.rule) for node in proof.nodes)
            title = f"proof of {value.atom.text}"
            return drawing.draw_proof(names, goals, title, link)
        center, expanded = value.entity.id, value.expanded

        def more(entity: int) -> str | None:
            if entity in (center, *expanded) or len(expanded) == 10:
                return None
            ids = ",".join(map(str, (*expanded, entity)))
            return link(center, expand=ids)

        known, centers = self.explorer.known, (center, *expanded)
        return drawing.draw_neighbours(
            names, centers, known.facts_of, link, more
        )

    async def _on_error(self, request: Request, error: Exception) -> Response:
        """Return a one-line response for a request that failed; the server prints the traceback of a defect."""
        status = 500
        line = "internal error: the terminal of the server has the details"
        if isinstance(error, RequestError):
            status, line = error.status, str(error)
        elif isinstance(error, RequestValidationError):
            status, line = 400, describe_invalid(error.errors()[0])
        elif isinstance(error, HTTPException):
            status = error.status_code
            line = f"{error.detail.lower()}: {display(request.url.path)}"
        elif isinstance(error, CaptureError):
            line = f"--cuda-graphs manual: expected a CUDA graph, got none: {error}"
        response = self.problem(status, line, is_api(request.scope))
        if status == 503:
            response.headers["Retry-After"] = "5"
        return response


def describe_invalid(error: dict[str, Any]) -> str:
    """Describe a parameter that pydantic refuses in one line."""
    name = error["loc"][-1]
    if error["type"] == "missing":
        return f"expected {name}, got nothing"
    if error["type"] == "extra_forbidden":
        return f"unknown parameter {shorten(name)}"
    expected = error["msg"].split(", unable")[0]
    if error["type"] == "string_pattern_mismatch":
        expected = "ten ids at most, with commas between"
    expected = re.sub(
        "^Input should be (?=greater|less)", "a number ", expected
    )
    expected = expected.removeprefix("Input should be ")
    return f"{name}: expected {expected}, got {shorten(error['input'])}"


def _make_templates(explorer: Explorer) -> jinja2.Environment:
    """Return the environment of the templates, which escape every value."""
    environment = make_templates()
    environment.filters["tree"] = proof_tree

    subject = explorer.answerer.subject
    environment.globals |= {
        "graph_name": explorer.dataset.name,
        "is_trained": subject.policy_run is not None,
        "score_name": subject.score.name,
        "numbers": describe_numbers(subject),
        "compare": compare_terms,
        "smoothing": subject.task.cfg.smoothing or 0.0,
        "version": VERSION,
    }
    return environment
