"""Report of one or several runs: tables of their measurements, pictures by matplotlib, the page (extra `plot`).

A table is a mapping from names to columns of equal length, as --json writes it. A column of two dimensions has a row
for each run: pages show its mean with the standard deviation. Axes: K runs, E evaluations.

Pictures are matplotlib's, without pyplot: no window, no global figure. Text of a picture is never read as mathematics,
whatever a name holds. Return curves show the interquartile mean over seeds, and its interval as a band.

The page is one HTML file that needs no other file. Its template escapes every value. Only the pictures, which are SVG
of this package, are inserted as they are.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from funcppo.core import VERSION
from funcppo.core.files import Json
from funcppo.core.types import F64
from funcppo.kg.graph.drawing import MAX_LABEL, label
from funcppo.kg.graph.text import display, score_text
from funcppo.kg.ranking import evaluate
from funcppo.kg.run.held_out import TEMPERED, TRAINED, UNTRAINED
from funcppo.kg.show.measure import OF_TRIPLES, RuleUse, RunMeasurements
from funcppo.rl import POLICIES, Returns, estimate

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs: TypeAlias = Sequence[RunMeasurements]
Table: TypeAlias = dict[str, Any]

# relations and rules of a picture, and rows of a table of a page; what is left out is counted
MAX_BARS = 25
MAX_ROWS = 200
# mid tones, which stand out on white and on black, also for the colour-blind
COLOURS = ("#8c8c8c", "#2f7ed8", "#e07b39", "#2a9d6f")
GREY, BLUE, ORANGE, GREEN = COLOURS
RELIABILITY_COLOURS = {
    UNTRAINED: GREY,
    TRAINED: BLUE,
    TEMPERED: ORANGE,
    OF_TRIPLES: GREEN,
}
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


def check_packages(
    what: str = "reports and pictures need",
    extra: str = "plot",
    packages: Sequence[str] = ("matplotlib", "jinja2"),
) -> None:
    """Check that the packages of an extra are installed.

    Raises:
      ValueError: one is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{what} {package} (pip install 'funcppo[{extra}]')"
            )


# -- tables


def band(
    values: F64[np.ndarray, "K n"],
) -> tuple[F64[np.ndarray, "n"], F64[np.ndarray, "n"]]:
    """Compute mean and standard deviation over the runs that have a number; the deviation is 0 for one run."""
    found = np.ma.masked_invalid(values)
    return found.mean(0).filled(np.nan), found.std(0, ddof=1).filled(0.0)


def results(runs: Runs) -> list[Table]:
    """Return the metrics of each score on test, in the order of the stages of learning."""
    _check_ranked("results", runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    values = {
        column: np.array(
            [
                [
                    run.metrics.get(name, {}).get(column, np.nan)
                    for name in names
                ]
                for run in runs
            ]
        )
        for column in METRICS
    }
    n_runs = [sum(name in run.metrics for run in runs) for name in names]
    columns = {k: v for k, v in values.items() if not np.isnan(v).all()}
    return [{"score": names, **columns, "runs": n_runs}]


def curves(runs: Runs) -> list[Table]:
    """Return curves of the metrics logs at the updates that all runs have, a table for each quantity of `CURVES`.

    Raises:
      ValueError: the runs have no line in common.
    """
    tables = [curve(runs, name) for name in CURVES]
    if not any(len(table["update"]) for table in tables):
        raise ValueError(
            "curves: expected lines in metrics.jsonl that all runs have, got none"
        )
    return tables


def curve(runs: Runs, name: str) -> Table:
    """Return one quantity of the metrics logs at the updates at which all runs have a number for it."""
    points = [
        {
            row["update"]: row[name]
            for row in run.log
            if row.get(name) is not None
        }
        for run in runs
    ]
    common = sorted(set.intersection(*map(set, points)))
    values = [[of_run[update] for update in common] for of_run in points]
    return {"update": common, name: np.array(values, dtype=np.float64)}


def relations(runs: Runs) -> list[Table]:
    """Return MRR by relation, most queries first, for the relations that all runs have ranked queries of.

    The gain of training is that over the better of rule score and untrained policy.
    """
    _check_ranked("relations", runs)
    by_run = [
        [
            metrics["by_group"]["relations"]
            for metrics in (run.by_rules, run.untrained, run.trained)
        ]
        for run in runs
    ]
    n_rows = {
        name: min(of[0][name]["both"]["n_queries"] for of in by_run)
        for name in by_run[0][0]
        if all(name in of[0] for of in by_run)
    }
    names = sorted(n_rows, key=lambda name: -n_rows[name])

    def column(place: int, read: Callable[[Json], float]) -> np.ndarray:
        rows = [[of[place][name]["both"] for name in names] for of in by_run]
        return np.array([list(map(read, row)) for row in rows])

    by_rules, untrained, trained = (
        column(place, lambda group: group["mrr"]["expected"])
        for place in range(3)
    )
    return [
        {
            "relation": names,
            "queries_and_sides": [n_rows[name] for name in names],
            "rule_score": by_rules,
            "untrained": untrained,
            "trained": trained,
            "gain": trained - np.maximum(by_rules, untrained),
            "ceiling": column(2, lambda group: group["ceiling"]),
        }
    ]


def reliability(runs: Runs) -> list[Table]:
    """Return the losses, and in bins of the probability how often candidates are the answer, pooled over the runs.

    Raises:
      ValueError: a run has no ranked queries, or the scores of the runs are of different kinds.
    """
    _check_ranked("reliability", runs)
    scores = sorted({run.score for run in runs})
    if len(scores) > 1:
        raise ValueError(
            f"reliability: expected runs with one kind of score, got {' and '.join(scores)}"
        )
    found = {
        state: evaluate.bins_to_json(
            evaluate.add_bins(run.bins[state] for run in runs)
        )
        for state in RELIABILITY_COLOURS
        if all(state in run.bins for run in runs)
    }
    losses = [{"policy": k, **v} for k, v in found.items()]
    bins = [{"policy": k, **row} for k, v in found.items() for row in v["bins"]]
    return [
        _to_columns(losses, ("policy", "log_loss", "calibration_error")),
        _to_columns(bins, tuple(bins[0]) if bins else ()),
    ]


def rules(runs: Runs) -> list[Table]:
    """Return the rules that were used, most proofs first, with means over the runs that have the rule.

    Raises:
      ValueError: no rule was used.
    """
    uses: dict[str, list[RuleUse]] = {}
    for rule in (rule for run in runs for rule in run.rules):
        uses.setdefault(rule.text, []).append(rule)
    if not uses:
        raise ValueError(
            "rules: expected test queries that rules derive, got none"
        )
    rows: list[Json] = []
    for text, found in uses.items():
        _, support, pairs, n_proofs = zip(*found)
        row = {
            "rule": text,
            "right_in_train": round(np.mean(support)),
            "of": round(np.mean(pairs)),
            "confidence": np.mean(support) / max(np.mean(pairs), 1),
            "last_step_of": sum(n_proofs),
        }
        rows.append(row)

    rows.sort(key=lambda x: (-x["last_step_of"], x["rule"]))
    return [_to_columns(rows, tuple(rows[0]))]


def return_curve(name: str, env: str, returns: Returns, policy: str) -> Table:
    """Compute the interquartile mean over seeds and its 95 % interval at each evaluation.

    Args:
      name: of the run.
      policy: greedy or sampled.
    """
    by_seed: F64[np.ndarray, "K E"] = getattr(returns, policy)
    estimates = [estimate(column) for column in by_seed.T]
    iqm, low, high = np.array(estimates).T
    return {
        "run": name,
        "env": env,
        "policy": policy,
        "n_seeds": len(by_seed),
        "steps": returns.steps,
        "iqm": iqm,
        "low": low,
        "high": high,
    }


def to_json(value: Any) -> Any:
    """Return a table, or several, as JSON values; NaN becomes null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_json(column) for name, column in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _to_columns(rows: Sequence[Json], names: Sequence[str]) -> Table:
    """Return rows as a table of some columns."""
    return {name: [row[name] for row in rows] for name in names}


def _check_ranked(kind: str, runs: Runs) -> None:
    """Check that all runs have ranked queries.

    Raises:
      ValueError: one has none.
    """
    for run in runs:
        if not run.metrics:
            raise ValueError(
                f"{kind}: {run.name}: expected a test split, its data have none"
            )


# -- pictures


def draw(kind: str, runs: Runs) -> tuple[Figure, list[Table]]:
    """Draw a picture of runs on the same data; return it with the tables behind it.

    Args:
      kind: a key of `KINDS`.

    Raises:
      ValueError: the runs have nothing to draw.
    """
    _, make_tables, draw_tables = KINDS[kind]
    tables = make_tables(runs)
    with style():
        return draw_tables(tables), tables


def _draw_results(tables: list[Table]) -> Figure:
    """Draw the metric of each score in the order of the stages of learning."""
    (table,) = tables
    metric = "auc_pr" if "auc_pr" in table else "mrr"
    figure, axes = _new_list(table["score"], "scores, in the order of learning")
    mean, spread = (x[:MAX_BARS] for x in band(table[metric]))
    _draw_bars(axes, mean, spread)
    axes.set(xlim=(0, 1.02), xlabel=metric.upper())
    return figure


def _draw_curves(tables: list[Table]) -> Figure:
    """Draw the metric on valid and the losses over the updates."""
    figure = _new_figure(4.2)
    figure.supxlabel("update")
    for axes, table in zip(figure.subplots(2, 3).flat, tables):
        (_, update), (name, values) = table.items()
        axes.set_title(CURVES[name])
        if not len(update):
            axes.text(0.5, 0.5, "none logged", ha="center", va="center")
            axes.set_axis_off()
            continue
        mean, spread = band(values)
        low, high = mean - spread, mean + spread
        _draw_line(axes, np.array(update), mean, low, high, BLUE)
        # A band at a single update has no width.
        axes.vlines(update, low, high, color=BLUE, alpha=0.25)
        # An offset or a factor above the axis would stand in the title.
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        if name == "valid_metric":
            # Rounding errors do not look like changes.
            low, high = axes.get_ylim()
            missing = max(0.01 - (high - low), 0.0)
            axes.set_ylim(low - missing / 2, high + missing / 2)
        if len(update) <= 6:
            axes.set_xticks(update)
    return figure


def _draw_relations(tables: list[Table]) -> Figure:
    """Draw MRR by relation: before learning, trained, and the share of answers that the rules derive."""
    (table,) = tables
    figure, axes = _new_list(table["relation"], "relations, most queries first")
    trained, spread = (x[:MAX_BARS] for x in band(table["trained"]))
    before = (table["trained"] - table["gain"]).mean(0)[:MAX_BARS]
    ceiling = table["ceiling"].mean(0)[:MAX_BARS]
    places = np.arange(len(trained))
    _draw_bars(axes, trained, spread, "trained")
    text = "the better of untrained and rule score"
    axes.plot(before, places, "o", color=GREY, label=text, ms=7, mew=0.5)
    axes.plot(ceiling, places, "|", color=ORANGE, label="ceiling", ms=7, mew=2)
    axes.set(xlim=(0, 1.02), xlabel="MRR")
    _add_legend_above(axes)
    return figure


def _draw_reliability(tables: list[Table]) -> Figure:
    """Draw how often candidates are the answer, by their probability: untrained, trained, and with the temperature."""
    losses, bins = tables
    figure = _new_figure(3.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
    columns = {name: np.array(column) for name, column in bins.items()}
    for state in losses["policy"]:
        drawn = {k: x[columns["policy"] == state] for k, x in columns.items()}
        x, y = drawn["mean_probability"], drawn["share_right"]
        axes.errorbar(
            x,
            y,
            yerr=np.maximum([y - drawn["low"], drawn["high"] - y], 0.0),
            fmt="o-",
            color=RELIABILITY_COLOURS[state],
            capsize=3,
            markersize=4,
            label=state.replace("_", " "),
        )
        if state == TRAINED:
            offset = {"xytext": (4, -10), "textcoords": "offset points"}
            for place in zip(x, y, drawn["n_candidates"]):
                axes.annotate(f"{place[2]:,}", place[:2], size=7, **offset)

    axes.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.05),
        xlabel="probability of a candidate (mean of its bin)",
        ylabel="share that is the answer",
    )
    axes.legend(loc="upper left")
    return figure


def _draw_rules(tables: list[Table]) -> Figure:
    """Draw the numbers of proofs in which each rule is the last step."""
    (table,) = tables
    figure, axes = _new_list(table["rule"], "rules, most proofs first", 60)
    _draw_bars(axes, np.array(table["last_step_of"][:MAX_BARS]))
    axes.set_xlabel("proofs of shown queries in which it is the last step")
    return figure


# of each picture its title, and the functions that make its tables and draw them
KINDS: dict[
    str,
    tuple[str, Callable[[Runs], list[Table]], Callable[[list[Table]], Figure]],
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


def draw_returns(tables: Sequence[Table]) -> Figure:
    """Draw return curves, a row of panels for each environment and a panel for each policy."""
    envs = list(dict.fromkeys(table["env"] for table in tables))
    with style():
        figure = _new_figure(0.4 + 2.6 * len(envs))
        figure.supxlabel("environment steps of each seed")
        panels = figure.subplots(len(envs), len(POLICIES), squeeze=False)
        for table in tables:
            row = envs.index(table["env"])
            axes = panels[row, POLICIES.index(table["policy"])]
            axes.set_title(f"{table['env']}, {table['policy']}")
            _draw_line(
                axes,
                table["steps"],
                table["iqm"],
                table["low"],
                table["high"],
                # The first colour is a grey, for what others are compared with.
                COLOURS[1 + len(axes.lines) % 3],
                f"{label(table['run'])}, {table['n_seeds']} seeds",
            )
        for axes in panels[:, 0]:
            axes.set_ylabel("return")
            axes.legend(loc="best")
    return figure


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


def _draw_bars(
    axes: Axes,
    length: np.ndarray,
    error: np.ndarray | None = None,
    text: str = "",
) -> None:
    """Draw a bar for each name of a list."""
    places = np.arange(len(length))
    axes.barh(
        places, length, 0.62, color=BLUE, label=text, xerr=error, ecolor=INK
    )


def _draw_line(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    colour: str,
    text: str = "",
) -> None:
    """Draw a line with its band, and with marks where a line through few points would hide them."""
    marker = "o" if len(x) <= 30 else None
    axes.plot(x, y, color=colour, marker=marker, markersize=3, label=text)
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)


def _add_legend_above(axes: Axes) -> None:
    """Add a legend above a list."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=3
    )


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


def render(runs: Runs) -> tuple[str, Json]:
    """Render the page of runs on the same data, with the queries of the first run that has entries.

    Returns:
      The page; and as JSON values by the kind of the picture its tables, or the problem that it cannot be drawn.
    """
    sections: list[Json] = []
    tables: Json = {}
    for kind, (title, *_) in KINDS.items():
        section: Json = {"kind": kind, "title": title, "svg": "", "tables": []}
        try:
            figure, found = draw(kind, runs)
        except ValueError as error:
            section["problem"] = display(str(error))
            tables[kind] = {"problem": str(error)}
        else:
            section["svg"] = to_inline_svg(figure, kind, title)
            # curves have too many numbers
            section["tables"] = [] if kind == "curves" else map(_to_text, found)
            tables[kind] = to_json(found)
        # a run that makes no update has no curves
        if kind != "curves" or any(run.n_updates for run in runs):
            sections.append(section)
    page = make_templates().get_template("report.html")
    shown_run = next((run for run in runs if run.entries), runs[0])
    text = page.render(
        runs=runs,
        first=runs[0],
        sections=sections,
        shown_run=shown_run,
        version=VERSION,
    )
    return text, tables


def _to_text(table: Table) -> Json:
    """Return the first rows of a table as texts, with the number of all rows."""
    rows = list(zip(*map(_format_column, table.values())))
    names = [name.replace("_", " ") for name in table]
    return {"columns": names, "rows": rows[:MAX_ROWS], "n_rows": len(rows)}


def _format_column(column: Sequence[Any] | np.ndarray) -> list[str]:
    """Format a column: names as they are displayed, numbers, and means over runs with their deviations."""
    if isinstance(column, np.ndarray):
        return [
            f"{x:.4f} ± {error:.4f}" if error else f"{x:.4f}"
            for x, error in zip(*band(column))
        ]
    formats = {int: "{:,}".format, str: display}
    return [formats.get(type(x), "{:.4f}".format)(x) for x in column]


def make_templates() -> jinja2.Environment:
    """Return the environment of the page templates, which escape every value."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("funcppo.kg.show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["display"] = display
    environment.filters["score"] = score_text
    environment.filters["number"] = "{:,}".format
    return environment
