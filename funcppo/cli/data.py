"""`funcppo data`: what a data set is like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from funcppo.cli.common import JsonObject, check_overwrites, write_json
from funcppo.cli.console import make_console, print_notes, show_status
from funcppo.cli.options import (
    DataOptions,
    DatasetArgument,
    JsonOutput,
    OptionalFile,
)
from funcppo.cli.target import data_files, fixpoint_progress
from funcppo.core.settings import PositiveInt, Size
from funcppo.kg.graph.config import DEFAULT_CONFIG
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.description import (
    Description,
    RelationDescription,
    describe,
)
from funcppo.kg.graph.lexer import escape_unprintable
from funcppo.kg.graph.loaders import load

if TYPE_CHECKING:
    from rich.console import Console

MAX_PRINTED_RELATIONS = 40
_RELATION_COLUMNS = {
    "facts": "n_facts",
    "valid": "n_valid",
    "test": "n_test",
    "tails/head": "tails_per_head",
    "heads/tail": "heads_per_tail",
    "functional": "functional_share",
    "symmetric": "symmetric_share",
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Describe a data set: splits and leaks between them, relations, degrees, and what the rules derive.

    Facts are those of train and facts.txt. Of a relation are shown the mean number of tails of a head and of heads of a
    tail, the share of its heads that have one tail (functional), the share of facts whose inverse it has (symmetric),
    and the other relation that has most of its facts with exchanged arguments. A pair is linked if a fact has both
    entities, either way round; of train, if another fact has.

    With rules, the triples of valid and test that they derive from the facts are counted by relation. Their share, the
    ceiling, is about the most that a ranking by proofs can reach.

    Exit status: 0 described, 2 bad input.
    """

    dataset: DatasetArgument
    """Data set: embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED),
    pykeen:NAME, a folder with train.txt, a file of triples (.txt, .tsv, .csv or .nt), or a Prolog program FILE.pl."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    height: Size = 1
    """Maximum height of a proof, for what the rules derive."""
    max_atoms: PositiveInt = 50_000_000
    """Maximum number of derived atoms to hold, about 110 bytes each; the step that would exceed it is evaluated for
    valid and test only."""
    json: JsonOutput = None
    """Write the description as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Describe the data set.

        Returns:
          The exit status.
        """
        check_overwrites(
            [("--json", self.json)], data_files(self.dataset, self.rules)
        )
        with show_status(make_console(use_stderr=True), "reading data"):
            dataset = load(self.dataset, self.rules, cfg=self.data)
            description = describe(dataset)
        reach = self._count_derivable(dataset) if len(dataset.rules) else None
        write_json(self.json, _to_json(dataset, description, reach))
        if self.json != "-":
            _print_description(dataset, description, reach)
        return 0

    def _count_derivable(self, dataset: Dataset) -> JsonObject:
        """How many triples of valid and test the rules derive, by relation."""
        from funcppo.cli.provable import derivation_heights
        from funcppo.kg.logic import fixpoint, kb

        with fixpoint_progress() as progress:
            knowledge_base, sizes = kb.from_dataset(dataset)
            model = fixpoint.least_model(
                knowledge_base,
                sizes,
                max_height=self.height,
                max_atoms=self.max_atoms,
                progress=progress,
            )
        counts: JsonObject = {
            "height": self.height,
            "n_rules": len(dataset.rules),
            "stop_reason": model.stop_reason,
            "stop_code": model.stop_code,
        }
        for split in ("valid", "test"):
            table = getattr(dataset, split)
            found, _ = derivation_heights(
                knowledge_base, model, table, self.height
            )
            is_derived = (found.height >= 0).numpy()
            derived = table[is_derived, 0].tolist()
            names = [dataset.predicates[i - 1] for i in derived]
            counts[split] = {name: names.count(name) for name in set(names)}
        return counts


def _to_json(
    dataset: Dataset, description: Description, reach: JsonObject | None
) -> JsonObject:
    """The JSON of --json; null where a number is not defined."""
    relations: list[JsonObject] = [
        {
            name: None
            if isinstance(value, float) and math.isnan(value)
            else value
            for name, value in relation._asdict().items()
        }
        for relation in description.relations
    ]

    return {
        "dataset": dataset.name,
        "n_entities": dataset.n_constants,
        "n_relations": dataset.n_predicates,
        "n_facts": len(dataset.facts),
        "n_other_atoms": description.n_other_atoms,
        "splits": {
            name: split._asdict() for name, split in description.splits.items()
        },
        "relations": relations,
        "degree_quantiles": description.degree_quantiles,
        "derivable": reach,
        "notes": description.notes,
    }


def _print_description(
    dataset: Dataset, description: Description, reach: JsonObject | None
) -> None:
    """Print the description as tables."""
    console = make_console(use_stderr=False)
    console.print(
        f"{escape_unprintable(dataset.name)}: {dataset.n_constants:,} entities, {dataset.n_predicates:,} relations, "
        f"{len(dataset.facts):,} facts"
    )

    splits = description.splits
    _print_table(
        console,
        "split triples entities relations known linked|pairs new|entities new|relations",
        [[name, *map(_cell, split)] for name, split in splits.items()],
    )
    _print_relations(console, description, reach)
    quantiles = ", ".join(
        f"{share}: {value:g}"
        for share, value in description.degree_quantiles.items()
    )
    console.print(f"facts of an entity, quantiles: {quantiles}")

    if reach is not None:
        parts = [
            f"{sum(reach[split].values()):,} of {splits[split].n_triples:,} {split} triples"
            for split in ("valid", "test")
        ]
        limit = f" ({reach['stop_reason']})" if reach["stop_reason"] else ""
        console.print(
            f"{reach['n_rules']:,} rules derive {' and '.join(parts)} within height {reach['height']}{limit}"
        )
    print_notes(console, map(escape_unprintable, description.notes))


def _print_relations(
    console: Console, description: Description, reach: JsonObject | None
) -> None:
    """Print the largest relations."""
    rows: list[list[str]] = []
    for relation in description.relations[:MAX_PRINTED_RELATIONS]:
        values = relation._asdict()
        cells = [_cell(values[name]) for name in _RELATION_COLUMNS.values()]
        inverse = ""
        if relation.inverse is not None:
            name = escape_unprintable(relation.inverse)
            inverse = f"{name} {_cell(relation.inverse_share)}"
        if reach is not None:
            cells.append(_ceiling_cell(relation, reach))
        rows.append([escape_unprintable(relation.name), *cells, inverse])

    # Without rules there is no ceiling: an empty column would read as if the next one were it.
    ceiling = [] if reach is None else ["ceiling"]
    headings = ["relation", *_RELATION_COLUMNS, *ceiling, "inverse"]
    _print_table(console, " ".join(headings), rows)
    n_more = len(description.relations) - len(rows)
    if n_more > 0:
        console.print(f"... and {n_more:,} smaller relations (--json FILE)")


def _ceiling_cell(relation: RelationDescription, reach: JsonObject) -> str:
    """The share of the relation's held-out triples that the rules derive; nothing where none is held out."""
    n_held_out = relation.n_valid + relation.n_test
    if not n_held_out:
        return ""
    derived = [
        reach[split].get(relation.name, 0) for split in ("valid", "test")
    ]
    return _cell(sum(derived) / n_held_out)


def _print_table(
    console: Console, headings: str, rows: Sequence[Sequence[str]]
) -> None:
    """Print a table; headings have spaces between them and | for a space."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for i, heading in enumerate(headings.split()):
        is_text = not i or heading == "inverse"
        table.add_column(
            heading.replace("|", " "),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cell(value: float | None) -> str:
    """A number as text; nothing where it is not defined."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
