"""What the explorer answers: names, facts, ranked answers and why, by one method each.

Scores, ranks and proofs are those of `Answerer`, which `funcppo predict` asks. Every list is bounded, and its whole
length is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core.files import shorten
from funcppo.kg.answers import (
    Answerer,
    OpenQuery,
    format_query,
    read_open_query,
)
from funcppo.kg.graph.dataset import assign_ids
from funcppo.kg.graph.rules import format_atom, read_query
from funcppo.kg.graph.text import QUOTED_PATTERN, unknown_name_message, unquote
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL
from funcppo.kg.ranking.policy_score import graph_fallback_notes
from funcppo.kg.show import measure
from funcppo.kg.show.names import display
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.known_facts import KnownFacts
from funcppo.kg.show.serve.name_index import NameIndex
from funcppo.kg.show.serve.rule_view import RuleView
from funcppo.kg.show.serve.values import (
    Answer,
    Answers,
    AtomExplanation,
    Entity,
    Fact,
    FactGroup,
    Facts,
    Graph,
    Name,
    NameMatch,
    NameMatches,
    Relation,
    RelationSize,
    RuleDetail,
    Rules,
)

# facts that a group of an entity, and a relation, list before the page of all
GROUP_FACTS = 10
MAX_GROUPS = 100
# rows of a page of relations, facts or rules
PAGE_ROWS = 50
RELATION_RULES = 10


class Explorer:
    """Answers about a graph, its rules and their score.

    Attributes:
      answerer: ranks and proves.
      dataset: the names.
      facts_index: the known facts.
    """

    def __init__(self, answerer: Answerer) -> None:
        """Index the names and the known facts."""
        self.answerer = answerer
        self.dataset = answerer.dataset
        self.facts_index = KnownFacts(self.dataset)
        self._entity_index = NameIndex(self.dataset.entities)
        self._relation_index = NameIndex(self.dataset.predicates)
        self._entity_ids = assign_ids(self.dataset.entities)
        self._rules = RuleView(answerer)

    # -- names

    def entity_id(self, name: str) -> int:
        """The id of an entity.

        Raises:
          RequestError: there is none; the message has the nearest spellings.
        """
        name = _unquote_name(name, self._entity_ids)
        if name not in self._entity_ids:
            message = unknown_name_message(
                "entity", name, self.dataset.entities
            )
            raise RequestError(404, message)
        return self._entity_ids[name]

    def relation_id(self, name: str) -> int:
        """The id of a relation, of one with two arguments if several have the name.

        Raises:
          RequestError: there is none; the message has the nearest spellings.
        """
        name = _unquote_name(name, self.dataset.predicates)
        named = zip(self.dataset.predicates, self.dataset.arities)
        found = [
            (arity != TAIL, i)
            for i, (other, arity) in enumerate(named, 1)
            if other == name
        ]
        if not found:
            message = unknown_name_message(
                "relation", name, self.dataset.predicates
            )
            raise RequestError(404, message)
        return min(found)[1]

    def entity_name(self, entity: int) -> Name:
        """An entity with its name.

        Raises:
          RequestError: there is none with this id.
        """
        return _name_of("entity", entity, self.dataset.entities)

    def relation_name(self, relation: int) -> Name:
        """A relation with its name.

        Raises:
          RequestError: there is none with this id.
        """
        return _name_of("relation", relation, self.dataset.predicates)

    def search(self, q: str, kind: str, limit: int) -> NameMatches:
        """The names that contain a text.

        Args:
          kind: entity, relation or any.
          limit: the most names.
        """
        kinds = {
            "relation": self._relation_index,
            "entity": self._entity_index,
        }
        names: list[NameMatch] = []
        for name, index in kinds.items():
            if kind not in (name, "any") or not q.strip():
                continue
            for i in index.find(q.strip(), limit + 1):
                text = index.names[i - 1]
                found: NameMatch = {
                    "kind": name,
                    "id": i,
                    "name": text,
                    "text": display(text),
                }
                names.append(found)

        return {
            "query": q,
            "names": names[:limit],
            "has_more": len(names) > limit,
        }

    # -- facts

    def graph(self, offset: int) -> Graph:
        """What is explored, with a page of its relations."""
        dataset, subject = self.dataset, self.answerer.subject
        last = min(offset + PAGE_ROWS, dataset.n_predicates)

        return {
            "name": dataset.name,
            "trained": subject.policy_run is not None,
            "score": subject.score.name,
            "height": subject.task.max_height,
            "n_entities": dataset.n_constants,
            "n_relations": dataset.n_predicates,
            "n_rules": len(dataset.rules),
            "n_train": len(dataset.train),
            "n_valid": len(dataset.valid),
            "n_test": len(dataset.test),
            "notes": [
                *subject.task.notes,
                *subject.notes,
                *graph_fallback_notes(subject.search_step),
            ],
            "offset": offset,
            "relations": [
                self._relation_size(i) for i in range(offset + 1, last + 1)
            ],
        }

    def entity(self, entity: int) -> Entity:
        """An entity with its known facts, by relation and place."""
        name = self.entity_name(entity)
        groups = self.facts_index.groups_of(entity)
        listed: list[FactGroup] = [
            {
                "relation": self.relation_name(group.relation),
                "place": group.place,
                "n_facts": len(group.rows),
                "facts": self._facts(group.rows[:GROUP_FACTS]),
            }
            for group in groups[:MAX_GROUPS]
        ]
        return {
            "entity": name,
            "n_facts": sum(len(group.rows) for group in groups),
            "n_groups": len(groups),
            "groups": listed,
        }

    def relation(self, relation: int) -> Relation:
        """A relation with its first facts and its most confident rules."""
        self.relation_name(relation)
        rows = self.facts_index.find(relation, {})
        return {
            "relation": self._relation_size(relation),
            "facts": self._facts(rows[:GROUP_FACTS]),
            "rules": self._rules.page(relation, 0, RELATION_RULES)["rules"],
        }

    def facts(
        self,
        relation: int | None,
        head: int | None,
        tail: int | None,
        offset: int,
    ) -> Facts:
        """A page of the known facts with some names in their places."""
        given = {HEAD: head, TAIL: tail}
        arguments = {
            place: entity
            for place, entity in given.items()
            if entity is not None
        }
        names = {
            place: self.entity_name(entity)
            for place, entity in arguments.items()
        }

        rows = self.facts_index.find(relation, arguments)
        return {
            "relation": None
            if relation is None
            else self.relation_name(relation),
            "head": names.get(HEAD),
            "tail": names.get(TAIL),
            "n_facts": len(rows),
            "offset": offset,
            "facts": self._facts(rows[offset : offset + PAGE_ROWS]),
        }

    # -- rules

    def rules(self, relation: int | None, offset: int) -> Rules:
        """A page of the rules, of one relation or of all.

        Raises:
          RequestError: there is no relation with this id.
        """
        if relation is not None:
            self.relation_name(relation)
        return self._rules.page(relation, offset, PAGE_ROWS)

    def rule(self, rule: int) -> RuleDetail:
        """A rule, what it derives and what it decides.

        Raises:
          RequestError: there is none with this id.
        """
        n_rules = len(self.dataset.rules)
        if not 0 <= rule < n_rules:
            raise RequestError(
                404, f"rule: expected 0 to {n_rules - 1}, got {rule}"
            )
        detail = self._rules.detail(rule)
        return {
            "rule": self._rules.rule(rule),
            "learning": detail.learning,
            "sampled_from": detail.sampled_from,
            "n_sampled": detail.n_sampled,
            "n_decided": len(detail.decided),
            "decided": self._facts_of(detail.decided),
            "n_derived": detail.n_derived,
            "n_known": detail.n_known,
            "derived": self._facts_of(detail.derived),
            "note": detail.note,
        }

    # -- questions

    def answers(
        self,
        relation: int,
        head: int | None,
        tail: int | None,
        k: int,
        known: bool,
        min_score: float,
        with_self: bool = False,
    ) -> Answers:
        """The ranked answers of relation(head, X) or relation(X, tail).

        Raises:
          RequestError: not exactly one of head and tail is given, or the relation has not two arguments.
        """
        if (head is None) == (tail is None):
            given = "neither" if head is None else "both"
            raise RequestError(
                400,
                f"expected one of head and tail, and the other one open, got {given}",
            )
        name = self._binary_relation(relation)
        side = HEAD if head is None else TAIL
        given_id = cast("int", tail if head is None else head)
        given_name = self.entity_name(given_id)
        (found,) = self.answerer.answer(
            [OpenQuery(relation, side, given_id)],
            k=k,
            with_known=known,
            with_self=with_self,
            min_score=min_score,
        )

        answers: list[Answer] = []
        for answer in found.answers:
            entity = {"entity_id": self._entity_ids[answer.entity]}
            answers.append(cast("Answer", answer.to_json() | entity))
        return {
            "query": found.query,
            "side": found.side,
            "relation": name,
            "given": given_name,
            "score": self.answerer.subject.score.name,
            "trained": self.answerer.subject.policy_run is not None,
            "n_new": found.n_new,
            "n_known": found.n_known,
            "n_self": found.n_self,
            "n_entities": found.n_entities,
            "answers": answers,
        }

    def why(
        self, relation: int, head: int, tail: int, side: str
    ) -> AtomExplanation:
        """Why an atom is an answer about one side, or why it is none.

        Raises:
          RequestError: an id is unknown, or the relation has not two arguments.
        """
        self._binary_relation(relation)
        for entity in (head, tail):
            self.entity_name(entity)
        place = HEAD if side == "head" else TAIL

        subject = self.answerer.subject
        width = subject.task.sizes.atom_width
        atom = torch.zeros(width, dtype=torch.int64)
        atom = torch.cat([torch.tensor([relation, head, tail]), atom[3:]])
        query = OpenQuery(relation, place, int(atom[HEAD + TAIL - place]))
        (score,) = self.answerer.score(atom[None], place)

        why: AtomExplanation = {
            "atom": self._fact(atom.tolist()),
            "side": SIDE_NAMES[place],
            "query": format_query(self.dataset, query),
            "score": score,
            "score_name": subject.score.name,
            "trained": subject.policy_run is not None,
            "verdict": Verdict.UNKNOWN.name.lower(),
            "proof": None,
            "evidence": None,
            "other_facts": None,
            "failed_rules": [],
            "n_matching_rules": 0,
            "note": "",
        }
        self._add_reasons(why, atom, place)
        return why

    def _add_reasons(
        self, why: AtomExplanation, atom: Tensor, place: int
    ) -> None:
        """Add the verdict on an atom with its proof, or with the rules that fail."""
        if why["score"] > 0:
            self._add_proof(why, atom, place)
            return

        # A search may miss what the rules derive, and a rule may have the confidence 0.
        failure = measure.explain_failure(self.answerer.subject.task, atom)
        if failure["verdict"] is Verdict.PROVED:
            self._add_proof(why, atom, place)
            return
        why["verdict"] = failure["verdict"].name.lower()
        why["note"] = failure["note"]
        why["failed_rules"] = failure["failed_rules"]
        why["n_matching_rules"] = failure["n_matching_rules"]

    def _add_proof(
        self, why: AtomExplanation, atom: Tensor, place: int
    ) -> None:
        """Add the proof of an atom that the rules derive, and what its score is made of."""
        reasons = self.answerer.explain(atom, place).to_json()
        why["verdict"] = Verdict.PROVED.name.lower()
        # JSON alone has lists where Python has tuples
        why["proof"] = json.loads(json.dumps(reasons["proof"]))
        why["evidence"] = reasons.get("evidence")
        why["other_facts"] = reasons.get("other_facts")

    def read(self, query: str) -> tuple[int, int | None, int | None]:
        """The relation, head and tail of a query as text; None in the place of a variable.

        Raises:
          RequestError: it is no query of two arguments with at most one variable, or a name is unknown.
        """
        try:
            read = read_query(self.dataset, query)
            if read.variables or read.dataset is not self.dataset:
                open_query, _ = read_open_query(self.dataset, query)
                relation, side, given = open_query
                is_tail = side == HEAD
                return (
                    relation,
                    None if is_tail else given,
                    given if is_tail else None,
                )
        except ValueError as error:
            status = 404 if "unknown" in str(error) else 400
            raise RequestError(status, str(error)) from None
        relation, head, tail = read.atom[: TAIL + 1].tolist()
        self._binary_relation(relation)
        return relation, head, tail

    # -- parts

    def _binary_relation(self, relation: int) -> Name:
        """A relation of two arguments.

        Raises:
          RequestError: it has not two.
        """
        name = self.relation_name(relation)
        arity = self.dataset.arities[relation - 1]
        if arity != TAIL:
            raise RequestError(
                400,
                f"relation {shorten(name['name'])}: expected two arguments, it has {arity}",
            )
        return name

    def _relation_size(self, relation: int) -> RelationSize:
        """A relation with its numbers."""
        return {
            "id": relation,
            "name": self.dataset.predicates[relation - 1],
            "arity": self.dataset.arities[relation - 1],
            "n_facts": len(self.facts_index.find(relation, {})),
            "n_rules": self._rules.count(relation),
        }

    def _facts(self, rows: np.ndarray) -> list[Fact]:
        """Known facts by their rows."""
        return [
            self._fact(self.facts_index.atoms[row].tolist(), int(row))
            for row in rows
        ]

    def _facts_of(self, atoms: Sequence[Sequence[int]]) -> list[Fact]:
        """Atoms of any arity, known or not."""
        return [self._fact(atom) for atom in atoms]

    def _fact(self, atom: Sequence[int], row: int | None = None) -> Fact:
        """An atom with its names and splits.

        Args:
          row: among the known facts; None to look it up.
        """
        arguments = {i: term for i, term in enumerate(atom) if i and term}
        if row is None:
            rows = self.facts_index.find(atom[0], arguments)
            row = int(rows[0]) if len(rows) else None
        return {
            "text": format_atom(self.dataset, atom),
            "relation": self.relation_name(atom[0]),
            "arguments": [
                self.entity_name(term) for term in arguments.values()
            ],
            "splits": [] if row is None else self.facts_index.splits_of(row),
        }


def _unquote_name(name: str, known: Container[str]) -> str:
    """The name that stands in single quotes, as in a query or a suggestion; any other text as it is."""
    if name in known or re.fullmatch(QUOTED_PATTERN, name) is None:
        return name
    with suppress(ValueError):
        return unquote(name)
    return name


def _name_of(kind: str, number: int, names: Sequence[str]) -> Name:
    """A name by its id.

    Raises:
      RequestError: there is none.
    """
    if not 1 <= number <= len(names):
        raise RequestError(
            404, f"{kind}_id: expected 1 to {len(names)}, got {number}"
        )
    return {"id": number, "name": names[number - 1]}
