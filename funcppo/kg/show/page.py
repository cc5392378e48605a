"""Page of a report: one HTML file that needs no other file. Needs the extra `plot`.

The template escapes every value. Only the pictures, which are SVG of this package, are inserted as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from funcppo.core.files import Json
from funcppo.kg.ranking import evaluate
from funcppo.kg.show import figures
from funcppo.kg.show.figures import Runs, Table, band
from funcppo.kg.show.names import display, make_templates
from funcppo.version import VERSION

SCORE_COLUMNS = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr", "ceiling")
TITLES = {
    "curves": "Learning curves",
    "ranks": "Ranks of the answers",
    "relations": "MRR by relation",
    "gains": "What learning gains and loses, by relation",
    "reliability": "Reliability of the probabilities",
    "rules": "Rules",
    "weights": "What learning moved",
}


def render(runs: Runs) -> str:
    """Render the page of runs on the same data, with the queries of the first run that has entries."""
    return (
        make_templates()
        .get_template("report.html")
        .render(
            runs=runs,
            first=runs[0],
            results=results_table(runs) if runs[0].ranked else None,
            sections=[
                _make_section(kind, runs)
                for kind in TITLES
                if kind != "weights" or any(run.learnt for run in runs)
            ],
            shown_run=next((run for run in runs if run.entries), runs[0]),
            version=VERSION,
        )
    )


def results_table(runs: Runs) -> Json:
    """Return the metrics of each score: means over the runs that have it, with a deviation for several runs."""
    by_name: dict[str, list[Json]] = {}
    for run in runs:
        for name, ranks in run.ranked.items():
            by_name.setdefault(name, []).append(ranks.metrics)
    every = [metrics for found in by_name.values() for metrics in found]
    columns = [c for c in SCORE_COLUMNS if any(c in found for found in every)]
    rows: list[tuple[str, ...]] = []
    for name, found in by_name.items():
        values = np.array([[m[column] for column in columns] for m in found])
        rows.append((name, *means(values), str(len(found))))
    return {
        "columns": ("score", *columns, "runs"),
        "rows": rows,
        "n_rows": len(rows),
    }


def _make_section(kind: str, runs: Runs) -> Json:
    """Build a section of the page: a picture of the runs with its tables, or the reason why there is no picture."""
    section: Json = {"kind": kind, "title": TITLES[kind], "tables": []}
    try:
        figure, table = figures.draw(kind, runs)
    except ValueError as error:
        return section | {"svg": "", "problem": display(str(error))}
    svg = figures.to_inline_svg(figure, kind, TITLES[kind])
    return section | {"svg": svg, "tables": list(_iter_tables(kind, table))}


def _iter_tables(kind: str, table: Any) -> Iterator[Json]:
    """Yield the tables of a picture; curves have none, because they have too many numbers."""
    if kind == "reliability":
        yield from map(_cut_table, _iter_reliability(table))
    numbers = table if isinstance(table, tuple) else (table,)
    for columns, values in zip(COLUMNS.get(kind, ()), numbers):
        yield _cut_table(
            {
                title: to_texts(values if name is None else values[name])
                for title, (name, to_texts) in columns.items()
            }
        )


def _cut_table(columns: Mapping[str, Iterable[str]]) -> Json:
    """Return the first 200 rows of a table of a page, with the number of all rows."""
    rows = list(zip(*columns.values()))
    return {"columns": list(columns), "rows": rows[:200], "n_rows": len(rows)}


def _names(names: Iterable[str]) -> list[str]:
    """Return names as they are displayed."""
    return [display(name) for name in names]


def _numbers(form: str) -> Callable[[Iterable[float]], list[str]]:
    """Return a function that formats numbers in the given form."""
    return lambda values: [f"{value:{form}}" for value in values]


def means(values: np.ndarray) -> list[str]:
    """Format means over runs, with the standard deviation if there are several runs."""
    mean, spread = band(values)
    if len(values) == 1:
        return [f"{x:.4f}" for x in mean]
    return [f"{x:.4f} ± {error:.4f}" for x, error in zip(mean, spread)]


def _gain_texts(table: Table) -> list[str]:
    """Format gains, with their errors where these are known."""
    return [
        f"{gain:+.4f}" if np.isnan(error) else f"{gain:+.4f} ± {error:.4f}"
        for gain, error in zip(table["gain"].mean(0), table["error"])
    ]


def _confidence_texts(table: Table) -> list[str]:
    """Format confidences of rules with their 95 % intervals."""
    support, pairs = table["support"], table["body_pairs"]
    columns = (table["confidence"], *evaluate.wilson(support, pairs))
    return [
        f"{x:.3f} ({low:.2f} to {high:.2f})" for x, low, high in zip(*columns)
    ]


def _iter_reliability(table: Table) -> Iterator[Mapping[str, Iterable[str]]]:
    """Yield two tables: the losses of each state of the policy, and its bins."""
    temperature = ", ".join(f"{t:.3g}" for t in table["temperature"])
    named = {"untrained": table["untrained"], "trained": table["trained"]}
    if temperature:
        name = f"trained, temperature {temperature}"
        named[name] = table["trained_at_temperature"]
    yield {
        "policy": named,
        **{
            name.replace("_", " "): [
                means(of_state[name][:, None])[0] for of_state in named.values()
            ]
            for name in ("log_loss", "calibration_error")
        },
    }

    is_one = len(table["trained"]["n"]) == 1
    interval = "95 % interval" if is_one else "± standard deviation"
    columns = ("policy", "probability", "candidates", "mean", "are the answer")
    rows = [(name, *row) for name, t in named.items() for row in _iter_bins(t)]
    yield dict(zip((*columns, interval), zip(*rows)))


def _iter_bins(table: Table) -> Iterator[tuple[str, ...]]:
    """Yield the texts of the bins that have candidates in every run."""
    edges = table["edges"]
    means = (table[name].mean(0) for name in ("probability", "frequency"))
    columns = (edges[:-1], edges[1:], table["n"].sum(0), *means)
    rows = np.stack([*columns, table["low"], table["high"]], 1)
    for start, end, n, p, frequency, low, high in rows[(table["n"] > 0).all(0)]:
        yield (
            f"{start:.1f} to {end:.1f}",
            f"{n:,.0f}",
            f"{p:.4f}",
            f"{frequency:.4f}",
            f"{low:.4f} to {high:.4f}",
        )


_COUNTS, _DECIMALS, _SIGNED = map(_numbers, (",", ".3f", "+.3f"))
_BY_RELATION: dict[str, Column] = {
    "relation": ("names", _names),
    "queries and sides": ("n_rows", _COUNTS),
}
_UNTRAINED: dict[str, Column] = {"untrained": ("untrained", means)}
_TRAINED = {"trained": ("trained", means)}
Column: TypeAlias = tuple[str | None, Callable[[Any], list[str]]]
# the columns of each table of a page: its column among the numbers, None for all, and what makes texts of it
COLUMNS: dict[str, list[Mapping[str, Column]]] = {
    "ranks": [{"rank": ("bins", list), **_UNTRAINED, **_TRAINED}],
    "relations": [
        _BY_RELATION | _UNTRAINED | _TRAINED | {"ceiling": ("ceiling", means)}
    ],
    "gains": [
        {
            **_BY_RELATION,
            "rule score": ("rules", means),
            **_UNTRAINED,
            **_TRAINED,
            "gain over the better of the two": (None, _gain_texts),
        }
    ],
    "rules": [
        {
            "rule": ("texts", _names),
            "right in train": (
                None,
                lambda table: [
                    f"{support:,} of {pairs:,.0f}"
                    for support, pairs in zip(
                        table["support"], table["body_pairs"]
                    )
                ],
            ),
            "confidence": (None, _confidence_texts),
            "before": ("before", _DECIMALS),
            "after": ("after", _DECIMALS),
            "weighed for": ("n_firings", _COUNTS),
            "last step of": ("n_proofs", _COUNTS),
        }
    ],
    "weights": [
        {
            "evidence": ("evidence", _names),
            "kind": ("kind", list),
            "relation": ("relation", _names),
            "asked for": ("side", list),
            "before": ("before", _SIGNED),
            "after": ("after", _SIGNED),
        },
        {
            "relation": ("names", _names),
            "weights that moved": ("n_moved", _numbers(",.0f")),
            "root of squared changes": ("distance", _DECIMALS),
        },
    ],
}
