"""T_P by DuckDB (extra `big`): as `fixpoint.least_model` derives it, on the disk where atoms do not fit in memory.

Each predicate is a table of arguments with the step that derives them. A step joins, for each rule and each atom of its
body, the atoms of the last step there with older ones before it and all others after it, and keeps what is new.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import I64
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.rules import (
    Rule,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
)

ROWS_OF_BLOCK = 1 << 20  # copied to DuckDB at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """What T_P derives, counted."""

    # number of atoms after step 0 (the facts), 1, 2, ...
    n_atoms_after_step: tuple[int, ...]
    reached_fixpoint: bool  # whether one more step would derive nothing
    # of the atoms that were asked for: the step that derives each, -1 for none
    height: I64[Tensor, "n"]


def count_steps(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atoms: I64[Tensor, "n W"],
    *,
    max_height: int | None,
    object_identity: bool = False,
    memory_limit: str | None = None,
) -> StepCounts:
    """Count the atoms that `max_height` steps of T_P derive, or its fixpoint.

    Args:
      atoms: ground, whose heights are asked for.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      memory_limit: of DuckDB, such as 512MB; None for its own, four fifths of the machine's.

    Raises:
      ValueError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ValueError(
            "T_P on the disk needs the extra `big` (pip install 'funcppo[big]'): No module named 'duckdb'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="funcppo-") as folder:
        config: Any = {"temp_directory": folder}
        if memory_limit is not None:
            config["memory_limit"] = memory_limit
        database = duckdb.connect(f"{folder}/atoms.db", config=config)
        with closing(database):
            return _Evaluation(database, kb, sizes, object_identity).run(
                atoms, max_height
            )


class _Evaluation:
    """The tables of one evaluation."""

    def __init__(
        self,
        database: Any,
        kb: KnowledgeBase,
        sizes: KBSizes,
        object_identity: bool,
    ) -> None:
        """Copy the facts."""
        self._database = database
        self._sizes = sizes
        self._object_identity = object_identity
        self._rules = rules_from_kb(kb)
        self._columns = [f"a{i}" for i in range(sizes.atom_width - 1)]
        declared = ", ".join(f"{name} INTEGER" for name in self._columns)
        for predicate in range(1, sizes.n_predicates + 1):
            self._execute(
                f"CREATE TABLE p{predicate} ({declared}, step INTEGER)"
            )
        for predicate, relation in relations_by_predicate(
            kb.facts, range(1, sizes.n_predicates + 1)
        ).items():
            columns = [np.asarray(column.cpu()) for column in relation.columns]
            self._insert(f"p{predicate}", columns, "0")

    def run(
        self, atoms: I64[Tensor, "n W"], max_height: int | None
    ) -> StepCounts:
        """Make the steps, and find the given atoms."""
        counts = [self._count()]
        reached_fixpoint = False
        while len(counts) - 1 != max_height and not reached_fixpoint:
            self._make_step(len(counts))
            n_atoms = self._count()
            reached_fixpoint = n_atoms == counts[-1]
            if not reached_fixpoint:
                counts.append(n_atoms)
        return StepCounts(
            n_atoms_after_step=tuple(counts),
            reached_fixpoint=reached_fixpoint,
            height=self._heights(atoms),
        )

    def _make_step(self, step: int) -> None:
        """Add what a step derives; all of it is derived before any is added."""
        queries: dict[int, list[str]] = {}
        for rule in self._rules:
            for query in self._bodies(rule, step):
                queries.setdefault(rule.head[0], []).append(query)
        columns = ", ".join(self._columns)
        for predicate, bodies in queries.items():
            self._execute(
                f"CREATE TABLE n{predicate} AS ({' UNION '.join(bodies)}) "
                f"EXCEPT SELECT {columns} FROM p{predicate}"
            )
        for predicate in queries:
            self._execute(
                f"INSERT INTO p{predicate} SELECT {columns}, {step} FROM n{predicate}"
            )
            self._execute(f"DROP TABLE n{predicate}")

    def _bodies(self, rule: Rule, step: int) -> Iterator[str]:
        """Yield queries for the heads whose bodies hold an atom of the step before."""
        if not rule.body and step == 1:
            heads = [f"{term} AS {c}" for c, term in self._arguments(rule.head)]
            yield f"SELECT {', '.join(heads)}"
        for newest in range(len(rule.body)):
            yield self._body(rule, step - 1, newest)

    def _body(self, rule: Rule, last: int, newest: int) -> str:
        """The query whose atom `newest` is of the last step; those before it are older, those after it of any step."""
        conditions = [f"b{newest}.step = {last}"]
        conditions += [f"b{i}.step < {last}" for i in range(newest)]
        places: dict[int, str] = {}
        occurrences = [
            (f"b{i}.{column}", term)
            for i, atom in enumerate(rule.body)
            for column, term in self._arguments(atom)
        ]
        for place, term in occurrences:
            value = self._value(term, places)
            if value is None:
                places[term] = place
            else:
                conditions.append(f"{place} = {value}")
        if self._object_identity:
            for left, right in object_identity_constraints(
                rule, self._sizes.n_constants
            ):
                pair = [self._value(side[0], places) for side in (left, right)]
                conditions.append(f"{pair[0]} <> {pair[1]}")

        heads = [
            f"{self._value(term, places)} AS {column}"
            for column, term in self._arguments(rule.head)
        ]
        tables = [f"p{atom[0]} AS b{i}" for i, atom in enumerate(rule.body)]
        return (
            f"SELECT DISTINCT {', '.join(heads)} FROM {', '.join(tables)} "
            f"WHERE {' AND '.join(conditions)}"
        )

    def _arguments(self, atom: tuple[int, ...]) -> list[tuple[str, int]]:
        """The columns of an atom and its terms, 0 where it is shorter."""
        return list(zip(self._columns, atom[1:]))

    def _value(self, term: int, places: dict[int, str]) -> str | None:
        """A term in SQL; None for a variable that has no place yet."""
        is_variable = term > self._sizes.n_constants
        return places.get(term) if is_variable else str(term)

    def _heights(self, atoms: I64[Tensor, "n W"]) -> I64[Tensor, "n"]:
        """The step that derives each atom, -1 for none."""
        table = np.asarray(atoms.cpu())
        height = np.full(len(table), -1)
        declared = ", ".join(f"{name} INTEGER" for name in self._columns)
        equal = " AND ".join(f"q.{c} = p.{c}" for c in self._columns)
        for predicate in np.unique(table[:, 0]):
            row = np.flatnonzero(table[:, 0] == predicate)
            self._execute(
                f"CREATE OR REPLACE TEMP TABLE q ({declared}, row BIGINT)"
            )
            self._insert("q", [*table[row, 1:].T, row])
            found = self._database.execute(
                f"SELECT q.row, p.step FROM q JOIN p{predicate} p ON {equal}"
            ).fetchnumpy()
            height[found["row"]] = found["step"]
        return torch.tensor(height)

    def _insert(
        self, name: str, columns: Sequence[np.ndarray], more: str = ""
    ) -> None:
        """Add rows to a table, and an expression as the last column."""
        for first in range(0, len(columns[0]), ROWS_OF_BLOCK):
            block = {
                f"c{i}": np.ascontiguousarray(
                    column[first : first + ROWS_OF_BLOCK]
                )
                for i, column in enumerate(columns)
            }
            self._database.register("block", block)
            selected = ", ".join([*block, *([more] if more else [])])
            self._execute(f"INSERT INTO {name} SELECT {selected} FROM block")
            self._database.unregister("block")

    def _count(self) -> int:
        """The number of atoms."""
        counts = " UNION ALL ".join(
            f"SELECT count(*) AS n FROM p{predicate}"
            for predicate in range(1, self._sizes.n_predicates + 1)
        )
        (n,) = self._database.execute(
            f"SELECT sum(n) FROM ({counts})"
        ).fetchone()
        return int(n)

    def _execute(self, statement: str) -> None:
        """Run a statement."""
        self._database.execute(statement)
