"""Report of a run: tables of its measurements, pictures by matplotlib, the page (extra `plot`).

A table is a mapping from names to columns of equal length, as --json writes it.

Pictures are matplotlib's, without pyplot: no window, no global figure. Text of a picture is never read as mathematics,
whatever a name holds.

The page is one HTML file that needs no other file. Its template escapes every value. Only the pictures, which are SVG
of this package, are inserted as they are.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from funcppo.core import VERSION
from funcppo.core.files import Json
from funcppo.core.host import import_extra
from funcppo.kg.graph import drawing
from funcppo.kg.graph.drawing import MAX_LABEL, label
from funcppo.kg.graph.text import display, score_text
from funcppo.kg.show.measure import RunMeasurements

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table: TypeAlias = dict[str, Any]

# relations and rules of a picture, and rows of a table of a page; what is left out is counted
MAX_BARS = 25
MAX_ROWS = 200
# mid tones, which stand out on white and on black, also for the colour-blind
COLOURS = ("#8c8c8c", "#2f7ed8", "#e07b39", "#2a9d6f")
GREY, BLUE, ORANGE, _ = COLOURS
# the colour of text and axes, which a page replaces by its own
INK = "#1b1b1f"
METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr", "proved", "ceiling")
CURVES = {
    "valid_metric": "valid",
    "loss": "loss",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "entropy": "entropy relative to the prior",
    "episode_return": "return of an episode",
}
_COLOURED = ("axes.edgecolor", "axes.labelcolor", "text.color")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "funcppo",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    **dict.fromkeys((*_COLOURED, "xtick.color", "ytick.color"), INK),
}


def check_packages() -> None:
    """Raise MissingPackageError if a package of the extra `plot` is not installed."""
    for package in ("matplotlib", "jinja2"):
        import_extra(package, "plot", "a report")


# -- tables


def results(run: RunMeasurements) -> list[Table]:
    """Return the metrics of each score on test, in the order of the stages of learning."""
    _check_ranked("results", run)
    rows = run.metrics.values()
    columns = {
        name: [row[name] for row in rows]
        for name in METRICS
        if all(name in row for row in rows)
    }
    return [{"score": list(run.metrics), **columns}]


def curves(run: RunMeasurements) -> list[Table]:
    """Return a table for each quantity of `CURVES` that the metrics log has.

    Raises:
      ValueError: it has none.
    """
    if not run.log:
        raise ValueError("curves: expected lines in metrics.jsonl, got none")
    return [curve(run, name) for name in CURVES]


def curve(run: RunMeasurements, name: str) -> Table:
    """Return one quantity of the metrics log at the updates that have a number for it."""
    rows = [row for row in run.log if row.get(name) is not None]
    return _to_columns(rows, ("update", name))


def relations(run: RunMeasurements) -> list[Table]:
    """Return MRR by relation, most queries first; its gain is over the better of rule score and untrained policy."""
    _check_ranked("relations", run, f"{run.score}, untrained")
    stages = (run.by_rules, run.untrained, run.trained)
    rows: list[Json] = []
    for name, group in run.trained["by_group"]["relations"].items():
        by_rules, untrained, trained = (
            metrics["by_group"]["relations"][name]["both"]["mrr"]["expected"]
            for metrics in stages
        )
        row = {
            "relation": run.labels.get(name, name),
            "queries_and_sides": group["both"]["n_queries"],
            "rule_score": by_rules,
            "untrained": untrained,
            "trained": trained,
            "gain": trained - max(by_rules, untrained),
            "ceiling": group["both"]["ceiling"],
        }
        rows.append(row)

    rows.sort(key=lambda row: -row["queries_and_sides"])
    return [_to_columns(rows)]


def reliability(run: RunMeasurements) -> list[Table]:
    """Return the losses of the probabilities of triples, and in bins of them how often triples are true.

    Raises:
      ValueError: none are counted.
    """
    if not run.reliability:
        raise ValueError(
            f"reliability: {run.name}: expected ranks of test and triples of valid, got none"
        )
    columns = ("log_loss", "calibration_error")
    bins = run.reliability["bins"]
    return [_to_columns([run.reliability], columns), _to_columns(bins)]


def rules(run: RunMeasurements) -> list[Table]:
    """Return the rules that were used, most proofs first.

    Raises:
      ValueError: no rule was used.
    """
    if not run.rules:
        raise ValueError(
            "rules: expected test queries that rules derive, got none"
        )
    return [_to_columns(run.rules)]


def to_json(value: Any) -> Any:
    """Return a table, or several, as JSON values; NaN becomes null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_json(column) for name, column in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _to_columns(rows: Sequence[Json], names: Sequence[str] = ()) -> Table:
    """Return rows as a table of some columns, by default of all."""
    names = names or tuple(rows[0] if rows else ())
    return {name: [row[name] for row in rows] for name in names}


def _check_ranked(kind: str, run: RunMeasurements, score: str = "") -> None:
    """Raise ValueError if a run has no results on test, or none of a score."""
    if not run.metrics or (score and score not in run.metrics):
        raise ValueError(
            f"{kind}: {run.name}: expected ranks of test by {score or 'a score'}, got none"
        )


# -- pictures


def draw(kind: str, run: RunMeasurements) -> tuple[Figure, list[Table]]:
    """Draw a picture of a run; return it with the tables behind it.

    Args:
      kind: a key of `KINDS`.

    Raises:
      ValueError: the run has nothing to draw.
    """
    _, make_tables, draw_tables = KINDS[kind]
    tables = make_tables(run)
    with style():
        return draw_tables(tables), tables


def _draw_results(tables: list[Table]) -> Figure:
    """Draw the metric of each score in the order of the stages of learning."""
    (table,) = tables
    metric = "auc_pr" if "auc_pr" in table else "mrr"
    figure, axes = _new_list(table["score"], "scores, in the order of learning")
    _draw_bars(axes, table[metric])
    axes.set(xlim=(0, 1.02), xlabel=metric.upper())
    return figure


def _draw_curves(tables: list[Table]) -> Figure:
    """Draw the metric on valid and the losses over the updates."""
    figure = _new_figure(4.2)
    figure.supxlabel("update")
    for axes, table in zip(figure.subplots(2, 3).flat, tables):
        (_, update), (name, values) = table.items()
        axes.set_title(CURVES[name])
        if not update:
            axes.text(0.5, 0.5, "none logged", ha="center", va="center")
            axes.set_axis_off()
            continue
        marker = "o" if len(update) <= 30 else None
        axes.plot(update, values, color=BLUE, marker=marker, markersize=3)
        # An offset or a factor above the axis would stand in the title.
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        if len(update) <= 6:
            axes.set_xticks(update)
    return figure


def _draw_relations(tables: list[Table]) -> Figure:
    """Draw MRR by relation: before learning, trained, and the share of answers that the rules derive."""
    (table,) = tables
    figure, axes = _new_list(table["relation"], "relations, most queries first")
    _draw_bars(axes, table["trained"], "trained")
    before = np.maximum(table["rule_score"], table["untrained"])[:MAX_BARS]
    ceiling = table["ceiling"][:MAX_BARS]
    places = np.arange(len(ceiling))
    text = "the better of untrained and rule score"
    axes.plot(before, places, "o", color=GREY, label=text, ms=7, mew=0.5)
    axes.plot(ceiling, places, "|", color=ORANGE, label="ceiling", ms=7, mew=2)
    axes.set(xlim=(0, 1.02), xlabel="MRR")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=3
    )
    return figure


def _draw_reliability(tables: list[Table]) -> Figure:
    """Draw how often triples are true, by their probability."""
    columns = {name: np.array(column) for name, column in tables[1].items()}
    figure = _new_figure(3.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
    x, y = columns["mean_probability"], columns["share_right"]
    spread = np.maximum([y - columns["low"], columns["high"] - y], 0.0)
    axes.errorbar(x, y, spread, fmt="o-", color=BLUE, capsize=3, markersize=4)
    axes.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.05),
        xlabel="probability of a triple (mean of its bin)",
        ylabel="share that is true",
    )
    return figure


def _draw_rules(tables: list[Table]) -> Figure:
    """Draw the numbers of proofs in which each rule is the last step."""
    (table,) = tables
    figure, axes = _new_list(table["rule"], "rules, most proofs first", 60)
    _draw_bars(axes, table["last_step_of"])
    axes.set_xlabel("proofs of shown queries in which it is the last step")
    return figure


# of each picture its title, and the functions that make its tables and draw them
KINDS: dict[
    str,
    tuple[
        str,
        Callable[[RunMeasurements], list[Table]],
        Callable[[list[Table]], Figure],
    ],
] = {
    "results": ("Results on test", results, _draw_results),
    "curves": ("Learning curves", curves, _draw_curves),
    "relations": ("MRR by relation", relations, _draw_relations),
    "reliability": (
        "Reliability of the probabilities",
        reliability,
        _draw_reliability,
    ),
    "rules": ("Rules", rules, _draw_rules),
}


# -- parts of pictures


def _new_figure(height: float) -> Figure:
    """Return an empty figure as wide as a page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(7.2, height), layout="constrained")


def _new_list(
    names: Sequence[str], what: str, width: int = MAX_LABEL
) -> tuple[Figure, Axes]:
    """Return a figure that lists the first names from the top on its vertical axis, with their number out of all."""
    texts = [label(name, width) for name in names[:MAX_BARS]]
    figure = _new_figure(1.1 + 0.28 * len(texts))
    axes = figure.subplots()
    axes.set_yticks(np.arange(len(texts)), texts, fontsize=8)
    axes.set_ylim(len(texts) - 0.4, -0.6)
    axes.set_title(f"{len(texts)} of {len(names):,} {what}", loc="left")
    return figure, axes


def _draw_bars(axes: Axes, lengths: Sequence[float], text: str = "") -> None:
    """Draw a bar for each name of a list."""
    shown = lengths[:MAX_BARS]
    axes.barh(np.arange(len(shown)), shown, 0.62, color=BLUE, label=text)


# -- files


def to_png(figure: Figure) -> bytes:
    """Return a picture as PNG on white."""
    content = io.BytesIO()
    with style():
        figure.savefig(content, format="png", dpi=160, facecolor="white")
    return content.getvalue()


def to_svg(figure: Figure, background: str = "white", salt: str = "") -> bytes:
    """Return a picture as an SVG file that keeps text as text.

    Args:
      salt: of the ids in the file, which pictures of one page share otherwise.
    """
    content = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style({"svg.hashsalt": f"funcppo{salt}"}):
        figure.savefig(
            content, format="svg", facecolor=background, metadata=nothing
        )
    return content.getvalue()


def to_inline_svg(figure: Figure, name: str, title: str) -> str:
    """Return a picture as an SVG element of a page, with the page's text colour and ids that no other picture has.

    Args:
      name: of the picture, which its ids depend on.
      title: what the picture shows, for readers that cannot see it.
    """
    text = to_svg(figure, "none", name).decode()
    text = text[text.index("<svg") :]
    # A style sheet would count for the whole page; no reference leads to the id of a group.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<g|<text) id="[^"]*"', r"\1", text)
    text = re.sub(rf"(fill|stroke): {INK}", r"\1: currentColor", text)
    # of the picture itself, whose size is that of the page
    text = re.sub(r' (width|height)="[^"]*pt"', "", text, count=2)
    attributes = f'role="img" aria-label="{html.escape(title)}"'
    return text.replace("<svg", f'<svg {attributes} stroke-linejoin="round"', 1)


@contextmanager
def style(more: dict[Any, Any] | None = None) -> Iterator[None]:
    """Apply the settings of pictures inside the block."""
    import matplotlib

    rc = matplotlib.rc_context(STYLE | (more or {}))
    with rc, warnings.catch_warnings():
        # A font without the signs of a name: an SVG leaves them to the browser.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        yield


# -- the page


def render(run: RunMeasurements) -> tuple[str, Json]:
    """Render the page of a run.

    Returns:
      The page; and as JSON values by the kind of the picture its tables, or the problem that it cannot be drawn.
    """
    sections: list[Json] = []
    tables: Json = {}
    for kind, (title, *_) in KINDS.items():
        section: Json = {"kind": kind, "title": title, "svg": "", "tables": []}
        try:
            figure, found = draw(kind, run)
        except ValueError as error:
            section["problem"] = display(str(error))
            tables[kind] = {"problem": str(error)}
        else:
            section["svg"] = to_inline_svg(figure, kind, title)
            # curves have too many numbers
            section["tables"] = [] if kind == "curves" else map(_to_text, found)
            tables[kind] = to_json(found)
        # a run that makes no update has no curves
        if kind != "curves" or run.n_updates:
            sections.append(section)
    page = make_templates().get_template("report.html")
    return page.render(run=run, sections=sections, version=VERSION), tables


def _to_text(table: Table) -> Json:
    """Return the first rows of a table as texts, with the number of all rows."""
    formats = {int: "{:,}".format, str: display}
    rows = [
        [formats.get(type(x), "{:.4f}".format)(x) for x in row]
        for row in zip(*table.values())
    ]
    names = [name.replace("_", " ") for name in table]
    return {"columns": names, "rows": rows[:MAX_ROWS], "n_rows": len(rows)}


def make_templates() -> jinja2.Environment:
    """Return the environment of the page templates."""
    environment = drawing.make_templates("funcppo.kg.show")
    environment.filters["display"] = display
    environment.filters["score"] = score_text
    environment.filters["number"] = "{:,}".format
    return environment
