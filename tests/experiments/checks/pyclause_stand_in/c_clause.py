"""Stands in for PyClause in tests: its documented interface, with rules without constants whose body is one path.

It is written from the documentation (rule syntax, object identity, confidence, `maxplus`, `noisyor`, ties by frequency)
and from nothing of funcppo, over sets, one walk at a time. It refuses what it does not know.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Triple = tuple[str, str, str]
ATOM = re.compile(r"(.+)\(([A-Z]),([A-Z])\)")
HEAD_ATOM = re.compile(r"(.+)\(X,Y\)")


class Loader:
    """Triples and rules."""

    def __init__(self, options: dict[str, str]) -> None:
        """Begin with neither."""
        self.options = options

    def load_data(self, data: str, filter: str = "", target: str = "") -> None:
        """Read files of triples."""
        self.data, self.filter, self.target = (
            _read_triples(path) for path in (data, filter, target)
        )
        self.edges: dict[tuple[str, str, bool], set[str]] = {}
        for head, relation, tail in self.data:
            self.edges.setdefault((relation, head, True), set()).add(tail)
            self.edges.setdefault((relation, tail, False), set()).add(head)
        self.entities = {
            end for head, _, tail in self.data for end in (head, tail)
        }

    def load_rules(self, rules: str) -> None:
        """Read a file of rules; what is derived, and with which confidence."""
        self.rules: list[tuple[float, set[Triple]]] = []
        unseen = int(self.options["b_num_unseen"])
        assert self.options["load_zero_rules"] == "False"
        for line in Path(rules).read_text().splitlines():
            predictions, right, _, text = line.split("\t")
            if text.endswith("<= "):
                continue
            confidence = int(right) / (int(predictions) + unseen)
            self.rules.append((confidence, self.materialise(text)))

    def materialise(self, text: str) -> set[Triple]:
        """What a rule derives, its variables bound to different entities."""
        head, body = text.split(" <= ")
        head_atom = HEAD_ATOM.fullmatch(head)
        assert head_atom, f"expected a head r(X,Y), got {head}"
        steps = []
        atoms = body.split(", ")
        variables = "X" + "ABCDEFGHIJKLMNOPQRSTUVW"[: len(atoms) - 1] + "Y"
        for atom, start, end in zip(atoms, variables, variables[1:]):
            match = ATOM.fullmatch(atom)
            assert match, f"expected an atom of two variables, got {atom}"
            relation, first, second = match.groups()
            assert {first, second} == {start, end}, f"expected a path: {text}"
            steps.append((relation, first == start))
        return {
            (walk[0], head_atom[1], walk[-1])
            for entity in self.entities
            for walk in self._walks([entity], steps)
        }

    def _walks(
        self, walk: list[str], steps: list[tuple[str, bool]]
    ) -> Iterator[list[str]]:
        """The walks that go on from a walk without coming back to an entity."""
        if not steps:
            yield walk
            return
        (relation, forward), *others = steps
        for entity in self.edges.get((relation, walk[-1], forward), ()):
            if entity not in walk:
                yield from self._walks([*walk, entity], others)


class RankingHandler:
    """Candidates of the queries of the target."""

    def __init__(self, options: dict[str, str]) -> None:
        """Begin without rankings."""
        assert options["filter_w_train"] == "True"
        self.is_max = options["aggregation_function"] == "maxplus"

    def calculate_ranking(self, loader: Loader) -> None:
        """Score and sort."""
        confidences: dict[Triple, list[float]] = {}
        for confidence, derived in loader.rules:
            for triple in derived - loader.data - loader.filter:
                confidences.setdefault(triple, []).append(confidence)
        frequency = Counter(
            end for head, _, tail in loader.data for end in (head, tail)
        )
        self.rankings: dict[str, Any] = {"head": {}, "tail": {}}
        asked = {
            direction: {_query(direction, triple) for triple in loader.target}
            for direction in self.rankings
        }
        for triple, values in confidences.items():
            values.sort(reverse=True)
            key = values if self.is_max else [_noisy_or(values)]
            for direction, table in self.rankings.items():
                relation, source = _query(direction, triple)
                if (relation, source) in asked[direction]:
                    candidate = triple[0] if direction == "head" else triple[2]
                    by_source = table.setdefault(relation, {})
                    by_source.setdefault(source, []).append(
                        (key, frequency[candidate], candidate)
                    )
        for table in self.rankings.values():
            for by_source in table.values():
                for source, rows in by_source.items():
                    rows.sort(reverse=True)
                    by_source[source] = [
                        (candidate, key[0]) for key, _, candidate in rows
                    ]

    def get_ranking(self, direction: str, as_string: bool) -> dict[str, Any]:
        """Candidates with scores by relation and known entity."""
        assert as_string
        return self.rankings[direction]


class RulesHandler:
    """What rules derive."""

    def __init__(self, options: dict[str, str]) -> None:
        """Begin without counts."""
        assert options["collect_statistics"] == "True"

    def calculate_predictions(self, rules: list[str], loader: Loader) -> None:
        """Apply the rules."""
        derived = [loader.materialise(text) for text in rules]
        self.counts = [
            (len(triples), len(triples & loader.data)) for triples in derived
        ]

    def get_statistics(self) -> list[tuple[int, int]]:
        """Predictions and right ones of each rule."""
        return self.counts


def _read_triples(path: str) -> set[Triple]:
    """The triples of a file."""
    lines = Path(path).read_text().splitlines()
    return {tuple(line.split("\t")) for line in lines}  # type: ignore[misc]


def _query(direction: str, triple: Triple) -> tuple[str, str]:
    """Relation and known entity of a query that a triple answers."""
    head, relation, tail = triple
    return relation, tail if direction == "head" else head


def _noisy_or(confidences: list[float]) -> float:
    """The noisy-or, by the sum of the logarithms."""
    return -math.expm1(sum(math.log1p(-value) for value in confidences))
