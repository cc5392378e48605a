"""The page of a report: one HTML file that needs no other. Needs the extra `plot`.

The template escapes every value. Only the pictures, which are SVG of this package, are inserted as they are.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from funcppo.kg.ranking import calibration
from funcppo.kg.show.report import figures, tables
from funcppo.kg.show.report.figures import RunReport
from funcppo.kg.show.report.names import display, score_text
from funcppo.kg.show.report.tables import Band, RunMeasurements

# rows of a table on a page
MAX_TABLE_ROWS = 200
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
TRAINED_BY = {
    "questions": "questions (which of the candidates that the rules derive is the answer)",
    "proofs": "proofs (which rules and facts prove an atom)",
}


class Table(NamedTuple):
    """A table of a page."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    n_rows: int  # of the whole table, of which the first are listed


class Section(NamedTuple):
    """A picture with its tables, or the reason why there is none."""

    kind: str
    title: str
    svg: str
    tables: tuple[Table, ...]
    problem: str


def render(reports: Sequence[RunReport]) -> str:
    """The page of some runs on the same data.

    Args:
      reports: of each run; the queries of the first that has some are shown.

    Raises:
      ValueError: the runs are on different data.
    """
    import jinja2

    runs = [report.measured for report in reports]
    tables.check_same_data(runs)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("funcppo.kg.show.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["display"] = display
    environment.filters["score"] = score_text
    shown = next((report for report in reports if report.entries), reports[0])
    return environment.get_template("page.html").render(
        runs=runs,
        first=runs[0],
        warnings=[line for run in runs for line in _warnings(run)],
        results=results_table(runs) if runs[0].ranked else None,
        run_tables=[(run, _run_table(run)) for run in runs],
        sections=[_section(kind, runs) for kind in figures.KINDS],
        entries=shown.entries,
        shown_run=shown.measured,
        version=_version(),
    )


def _version() -> str:
    """The version of the installed package; empty if it runs without being installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("funcppo")
    return ""


def results_table(runs: Sequence[RunMeasurements]) -> Table:
    """The metrics of each score: means over the runs that have it, with a standard deviation for several."""
    names = list(dict.fromkeys(name for run in runs for name in run.ranked))
    by_name = {
        name: [run.ranked[name].metrics for run in runs if name in run.ranked]
        for name in names
    }
    columns = [
        column
        for column in SCORE_COLUMNS
        if any(
            column in metrics for found in by_name.values() for metrics in found
        )
    ]
    rows: list[tuple[str, ...]] = []
    for name, found in by_name.items():
        values = np.array([[m[column] for column in columns] for m in found])
        cells = [name, *_band_cells(tables.band(values), len(found))]
        rows.append((*cells, str(len(found))))
    return Table(("score", *columns, "runs"), rows, len(rows))


def _band_cells(drawn: Band, n_runs: int) -> list[str]:
    """Means as text, with the deviation of several runs."""
    if n_runs == 1:
        return [f"{mean:.4f}" for mean in drawn.mean]
    return [
        f"{mean:.4f} ± {high - mean:.4f}"
        for mean, high in zip(drawn.mean, drawn.high)
    ]


def _warnings(run: RunMeasurements) -> list[str]:
    """What a reader must know before the numbers."""
    lines: list[str] = []
    if not run.is_trained:
        lines.append(
            f"unfinished: the run stands at update {run.update:,} of {run.n_updates:,}"
        )
    elif not run.results:
        lines.append("the run has not been evaluated at its end")
    if run.best_update == 0:
        start = (
            "the weights that it started from (the listwise fit, or the confidences)"
            if run.score == "evidence"
            else "the untrained policy"
        )
        reason = (
            f"ranked valid better than {start}" if run.update else "was made"
        )
        lines.append(
            f"no update of PPO {reason}: 'trained' is what it started from"
        )

    if run.default_score_note:
        lines.append(f"predict and serve: {run.default_score_note}")

    if not run.n_test:
        lines.append(
            "the data have no test split: nothing is ranked, and no query is shown"
        )
    elif run.n_ranked < run.n_test:
        lines.append(
            f"{run.n_ranked:,} of {run.n_test:,} test queries are ranked, evenly over relations"
        )
    return [f"{display(run.name)}: {line}" for line in lines]


def _run_table(run: RunMeasurements) -> Table:
    """How a run was made."""
    sizes = run.dataset
    versions: dict[str, str] = run.results.get("versions", {})
    updates = f"{run.update:,} of {run.n_updates:,}"
    if run.is_trained and run.update < run.n_updates:
        updates += ", stopped early"
    rows = [
        ("data set", display(str(sizes["name"]))),
        (
            "size",
            f"{sizes['entities']:,} entities, {sizes['relations']:,} relations, {sizes['train']:,} train / "
            f"{sizes['valid']:,} valid / {sizes['test']:,} test triples",
        ),
        ("rules", f"{sizes['rules']:,}, proofs up to height {sizes['height']}"),
        (
            "learnt from",
            TRAINED_BY.get(run.config.learner, run.config.learner),
        ),
        ("score", run.score),
        ("seed", str(run.config.seed)),
        (
            "updates",
            f"{updates}; parameters of update {run.best_update:,}, chosen on valid"
            if sizes["valid"]
            else f"{updates}; there is no valid split to choose parameters by",
        ),
        ("device", f"{run.config.device}, {run.config.precision} precision"),
        (
            "versions",
            ", ".join(f"{k} {v}" for k, v in versions.items()) or "not known",
        ),
    ]
    if "seconds" in run.results:
        rows.append(("training time", f"{run.results['seconds']:,.0f} s"))

    settings = tables.changed_settings(run)
    rows += [(name, display(v)) for name, v in settings]
    return Table(("setting", "value"), rows, len(rows))


def _section(kind: str, runs: Sequence[RunMeasurements]) -> Section:
    """A picture of the runs with its tables, or why there is none."""
    title = TITLES[kind]
    try:
        picture = figures.draw(kind, runs)
    except ValueError as error:
        return Section(kind, title, "", (), display(str(error)))
    svg = figures.to_inline_svg(picture, kind, title)
    return Section(kind, title, svg, _TABLES[kind](runs), "")


def _no_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    """Curves have too many numbers for a table."""
    return ()


def _ranks_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    table = tables.ranks(runs)
    columns = [
        _band_cells(tables.band(shares), len(runs))
        for shares in (table.untrained, table.trained)
    ]
    return (
        _table(("rank", "untrained", "trained"), zip(table.bins, *columns)),
    )


def _relations_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    table = tables.relations(runs)
    columns = [
        _band_cells(tables.band(values), len(runs))
        for values in (table.untrained, table.trained, table.ceiling)
    ]
    listed = _table(
        ("relation", "queries and sides", "untrained", "trained", "ceiling"),
        zip(
            map(display, table.names),
            (f"{n:,}" for n in table.n_rows),
            *columns,
        ),
    )
    return (listed,)


def _gains_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    table = tables.gains(runs)
    columns = [
        _band_cells(tables.band(values), len(runs))
        for values in (table.rules, table.untrained, table.trained)
    ]
    gain = [
        f"{mean:+.4f}" if np.isnan(error) else f"{mean:+.4f} ± {error:.4f}"
        for mean, error in zip(table.gain.mean(0), table.error)
    ]

    names = ("relation", "queries and sides", "rule score", "untrained")
    listed = _table(
        (*names, "trained", "gain over the better of the two"),
        zip(
            map(display, table.names),
            (f"{n:,}" for n in table.n_rows),
            *columns,
            gain,
        ),
    )
    return (listed,)


def _reliability_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    table = tables.calibrations(runs)
    named = {"untrained": table.untrained, "trained": table.trained}
    if table.trained_at_temperature is not None:
        values = ", ".join(f"{t:.3g}" for t in table.temperature)
        named[f"trained, temperature {values}"] = table.trained_at_temperature

    overall = [
        (
            name,
            *_band_cells(
                tables.band(np.stack([t.log_loss, t.calibration_error], 1)),
                len(runs),
            ),
        )
        for name, t in named.items()
    ]

    interval = "95 % interval" if len(runs) == 1 else "± standard deviation"
    columns = ("policy", "probability", "candidates", "mean", "are the answer")
    return (
        _table(("policy", "log loss", "calibration error"), overall),
        _table(
            (*columns, interval),
            (
                (name, *row)
                for name, of_state in named.items()
                for row in _iter_reliability_rows(of_state)
            ),
        ),
    )


def _iter_reliability_rows(
    table: tables.Reliability,
) -> Iterator[tuple[str, ...]]:
    """Yield the bins that have candidates in every run."""
    edges = [f"{low:.1f} to {high:.1f}" for low, high in _pairs(table.edges)]
    n = table.n.sum(0)
    for i in np.flatnonzero((table.n > 0).all(0)):
        yield (
            edges[i],
            f"{n[i]:,}",
            f"{table.probability[:, i].mean():.4f}",
            f"{table.frequency[:, i].mean():.4f}",
            f"{table.low[i]:.4f} to {table.high[i]:.4f}",
        )


def _weights_tables(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    single, by_relation = tables.weights(runs)
    return (
        _table(
            ("evidence", "kind", "relation", "asked for", "before", "after"),
            zip(
                map(display, single.evidence),
                single.kind,
                map(display, single.relation),
                single.side,
                (f"{x:+.3f}" for x in single.before),
                (f"{x:+.3f}" for x in single.after),
            ),
        ),
        _table(
            ("relation", "weights that moved", "root of squared changes"),
            zip(
                map(display, by_relation.names),
                (f"{n:,.0f}" for n in by_relation.n_moved),
                (f"{x:.3f}" for x in by_relation.distance),
            ),
        ),
    )


def _pairs(edges: np.ndarray) -> Iterable[tuple[float, float]]:
    """The ends of each bin."""
    return zip(edges[:-1].tolist(), edges[1:].tolist())


def _rules_table(runs: Sequence[RunMeasurements]) -> tuple[Table, ...]:
    table = tables.rules(runs)
    columns = (
        "rule",
        "right in train",
        "confidence",
        "before",
        "after",
        "weighed for",
        "last step of",
    )

    rows = zip(
        map(display, table.texts),
        (
            f"{s:,} of {pairs:,.0f}"
            for s, pairs in zip(table.support, table.body_pairs)
        ),
        (
            f"{value:.3f} ({low:.2f} to {high:.2f})"
            for value, low, high in zip(
                table.confidence,
                *calibration.wilson(table.support, table.body_pairs),
            )
        ),
        *(
            [f"{value:.3f}" for value in values]
            for values in (table.before, table.after)
        ),
        (f"{n:,}" for n in table.n_firings),
        (f"{n:,}" for n in table.n_proofs),
    )
    return (_table(columns, rows),)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """A table with its first rows."""
    listed = list(rows)
    return Table(columns, listed[:MAX_TABLE_ROWS], len(listed))


_TABLES = {
    "curves": _no_table,
    "ranks": _ranks_table,
    "relations": _relations_table,
    "gains": _gains_table,
    "reliability": _reliability_table,
    "rules": _rules_table,
    "weights": _weights_tables,
}
