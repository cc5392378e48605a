"""Report of one or several runs: tables of their measurements, pictures by matplotlib, the page (extra `plot`).

A table is a mapping from names to columns, as --json writes it. Arrays of measurements have a row for each run. Axes: K
runs, U updates, B bins, P relations, R rules, E evaluations.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from funcppo.core import VERSION
from funcppo.core.files import Json
from funcppo.core.types import F64
from funcppo.kg.graph.text import display, score_text
from funcppo.kg.ranking import evaluate
from funcppo.kg.run.held_out import TEMPERED, TRAINED, UNTRAINED
from funcppo.kg.show.drawing import MAX_LABEL, label
from funcppo.kg.show.measure import (
    MovedWeight,
    RuleUse,
    RunMeasurements,
    ScoreRanks,
)
from funcppo.rl import POLICIES, Returns, estimate

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs: TypeAlias = Sequence[RunMeasurements]
Table: TypeAlias = dict[str, Any]

# upper ends of the bins of ranks; a rank of tied answers is their mean
RANK_BINS = (1, 3, 10, 30, 100, 300, 1000)
# relations, weights and rules of a picture; pages list more
MAX_BARS = 25
# mid tones, which stand out on white and on black, also for the colour-blind
COLOURS = ("#8c8c8c", "#2f7ed8", "#e07b39", "#2a9d6f")
GREY, BLUE, ORANGE, GREEN = COLOURS
# the colour of text and axes, which a page replaces by its own
INK = "#1b1b1f"
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
    """Compute the mean and the standard deviation over runs, by column; the deviation is 0 for one run."""
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    return mean, spread


def curves(runs: Runs) -> list[Table]:
    """Return curves of the metrics logs at the updates that all runs have, a table for each quantity of `CURVES`.

    Raises:
      ValueError: the runs have no line in common.
    """
    titles = CURVES | {"valid_metric": f"valid {runs[0].metric_name.upper()}"}
    tables = [curve(runs, name) | {"title": t} for name, t in titles.items()]
    if not any(len(table["update"]) for table in tables):
        raise ValueError(
            "curves: expected lines in metrics.jsonl that all runs have, got none"
        )
    return tables


def curve(runs: Runs, name: str) -> Table:
    """Return one quantity of the metrics logs at the updates at which all runs have a number for it."""
    points = [
        {
            int(row["update"]): float(row[name])
            for row in run.log
            if row.get(name) is not None
        }
        for run in runs
    ]
    common = sorted(set.intersection(*map(set, points)))
    value = [[of_run[update] for update in common] for of_run in points]
    return {
        "name": name,
        "update": np.array(common, dtype=np.int64),
        "value": np.array(value, dtype=np.float64),
        # updates at which only some runs have it
        "n_left_out": len(set().union(*points)) - len(common),
    }


def ranks(runs: Runs) -> Table:
    """Return the share of answers in each bin of ranks; the last bin holds answers that the rules do not derive."""
    _check_ranked("ranks", runs)
    lower = (1, *(edge + 1 for edge in RANK_BINS[:-1]))
    bins = [
        f"{low}" if low == high else f"{low}-{high}"
        for low, high in zip(lower, RANK_BINS)
    ]
    return {
        "bins": [*bins, f"> {RANK_BINS[-1]}", "not derivable"],
        "untrained": np.stack([_count_ranks(r, r.untrained) for r in runs]),
        "trained": np.stack([_count_ranks(r, r.trained) for r in runs]),
    }


def _count_ranks(
    run: RunMeasurements, rows: ScoreRanks
) -> F64[np.ndarray, "B"]:
    """Compute the share of rows in each bin of ranks."""
    place = np.searchsorted(RANK_BINS, rows.rank)
    place = np.where(run.provable, place, len(RANK_BINS) + 1)
    return np.bincount(place, minlength=len(RANK_BINS) + 2) / len(place)


def relations(runs: Runs) -> Table:
    """Compute MRR by relation, most queries first, for the relations that all runs have ranked queries of.

    The gain of training is that over the better of rule score and untrained policy. Its error is a standard error by
    rows for one run, NaN for one row, and a standard deviation for several runs.
    """
    _check_ranked("relations", runs)
    counts = _sum_by_relation(runs, [np.ones(len(r.relation)) for r in runs])
    n_rows = counts.min(0).astype(np.int64)
    order = np.argsort(-n_rows, kind="stable")
    order = order[n_rows[order] > 0]
    rows = {
        "rules": [r.by_rules.reciprocal_rank for r in runs],
        "untrained": [r.untrained.reciprocal_rank for r in runs],
        "trained": [r.trained.reciprocal_rank for r in runs],
        "ceiling": [r.provable.astype(np.float64) for r in runs],
    }
    means = {
        name: (_sum_by_relation(runs, values) / counts.clip(1))[:, order]
        for name, values in rows.items()
    }

    better = np.maximum(means["rules"], means["untrained"])
    gain = means["trained"] - better
    if len(runs) > 1:
        error = gain.std(0, ddof=1)
    else:
        is_by_rules = (means["rules"] > means["untrained"])[0]
        error = np.array(
            [
                _paired_error(runs[0], int(relation) + 1, is_better)
                for relation, is_better in zip(order, is_by_rules)
            ]
        )
    return {
        "names": np.array(runs[0].predicates, dtype=object)[order],
        "n_rows": n_rows[order],
        **means,
        "gain": gain,
        "error": error,
    }


def _sum_by_relation(
    runs: Runs, values: Sequence[np.ndarray]
) -> F64[np.ndarray, "K P"]:
    """Sum values over the rows of each relation, for each run."""
    n = len(runs[0].predicates)
    pairs = zip(runs, values)
    sums = [np.bincount(r.relation - 1, weights, n) for r, weights in pairs]
    return np.stack(sums)


def _paired_error(
    run: RunMeasurements, relation: int, is_by_rules: bool
) -> float:
    """Compute the standard error of a relation's mean gain over a score, rows paired; NaN for one row.

    Args:
      is_by_rules: the score is by rule confidences, not of the untrained policy.
    """
    base = run.by_rules if is_by_rules else run.untrained
    gain = run.trained.reciprocal_rank - base.reciprocal_rank
    gain = gain[run.relation == relation]
    return gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else np.nan


def gains(runs: Runs) -> Table:
    """Return the table of relations, sorted by the gain of training from the greatest loss on."""
    _check_ranked("gains", runs)
    table = relations(runs)
    order = np.argsort(table["gain"].mean(0), kind="stable")
    return {name: column[..., order] for name, column in table.items()}


def reliability(runs: Runs) -> Table:
    """Return how often candidates of a probability are the answer: untrained, trained, and at valid's temperature.

    Raises:
      ValueError: a run has no ranked queries, or the scores of the runs are of different kinds.
    """
    _check_ranked("reliability", runs)
    scores = sorted({run.score for run in runs})
    if len(scores) > 1:
        raise ValueError(
            f"reliability: expected runs with one kind of score, got {' and '.join(scores)}"
        )
    temperatures = [run.temperature for run in runs]
    has_all = None not in temperatures
    return {
        "untrained": _reliability_of(runs, UNTRAINED),
        "trained": _reliability_of(runs, TRAINED),
        "trained_at_temperature": _reliability_of(runs, TEMPERED)
        if has_all
        else None,
        "temperature": temperatures if has_all else [],
    }


def _reliability_of(runs: Runs, state: str) -> Table:
    """Return how often candidates are the answer in each bin of probability; NaN for a bin without candidates."""
    bins = [run.bins[state] for run in runs]
    n, n_right, sums = (np.stack(column) for column in list(zip(*bins))[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        frequency, probability = n_right / n, sums / n
    if len(runs) == 1:
        # an interval of 95 %
        low, high = evaluate.wilson(n_right[0], n[0])
    else:
        mean, spread = band(frequency)
        low, high = mean - spread, mean + spread
    error = [evaluate.calibration_error(of_run) for of_run in bins]
    return {
        "edges": np.linspace(0.0, 1.0, n.shape[1] + 1),
        "n": n,
        "probability": probability,  # mean over the candidates of a bin
        "frequency": frequency,
        "low": low,
        "high": high,
        "log_loss": np.array([evaluate.log_loss(b) for b in bins]),
        "calibration_error": np.array(error),
    }


def weights(runs: Runs) -> tuple[Table, Table]:
    """Return the weights of evidence that training moved and its movement by relation, the largest change first.

    Single weights are means over the runs that list one; a run that moved none of a relation counts with 0.

    Raises:
      ValueError: a run searches proofs, or training moved no weight.
    """
    moved: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    total: dict[str, np.ndarray] = {}
    for run in runs:
        if run.learnt is None:
            raise ValueError(
                f"weights: {run.name}: expected a run that learns from questions, got one that learns from proofs"
            )
        for weight in run.learnt.weights:
            moved.setdefault(weight[:4], []).append(weight[4:])
        for name, *values in run.learnt.relations:
            total[name] = total.get(name, np.zeros(2)) + values
    if not moved:
        raise ValueError(
            "weights: expected weights that training moved, got none"
        )

    before, after = np.array([np.mean(x, 0) for x in moved.values()]).T
    order = np.argsort(-np.abs(after - before), kind="stable")
    names = [list(moved)[i] for i in order]
    single: Table = {
        **dict(zip(MovedWeight._fields, map(list, zip(*names)))),
        "n_runs": np.array([len(moved[name]) for name in names]),
        "before": before[order],
        "after": after[order],
    }

    farthest = sorted(total, key=lambda name: -total[name][1])
    means = np.array([total[name] for name in farthest]).reshape(-1, 2)
    n_moved, distance = (means / len(runs)).T
    columns = {"names": farthest, "n_moved": n_moved, "distance": distance}
    return single, columns


def rules(runs: Runs) -> Table:
    """Return the rules that were used, most proofs first, with means over the runs that have the rule.

    Raises:
      ValueError: no rule was used.
    """
    uses: dict[str, list[RuleUse]] = {}
    for run in runs:
        for rule in run.rules:
            uses.setdefault(rule.text, []).append(rule)
    if not uses:
        raise ValueError(
            "rules: expected test queries that rules derive, got none"
        )
    listed = sorted(
        uses.values(),
        key=lambda of_rule: (
            -sum(use.n_proofs for use in of_rule),
            -sum(use.n_firings for use in of_rule),
            of_rule[0].text,
        ),
    )

    support, pairs, before, after = (
        np.array([np.mean([getattr(u, name) for u in of]) for of in listed])
        for name in ("support", "body_pairs", "before", "after")
    )
    n_firings, n_proofs = (
        np.array([sum(getattr(u, name) for u in of) for of in listed])
        for name in ("n_firings", "n_proofs")
    )
    return {
        "texts": [of_rule[0].text for of_rule in listed],
        "n_runs": np.array([len(of_rule) for of_rule in listed]),
        "support": support.astype(np.int64),
        "body_pairs": pairs,
        "confidence": support / np.maximum(pairs, 1.0),
        "before": before,
        "after": after,
        "n_firings": n_firings,
        "n_proofs": n_proofs,
    }


def return_curve(name: str, env: str, returns: Returns, policy: str) -> Table:
    """Compute the interquartile mean over seeds and its 95 % interval at each evaluation.

    Args:
      name: of the run.
      policy: greedy or sampled.
    """
    by_seed: F64[np.ndarray, "K E"] = getattr(returns, policy)
    estimates = [estimate(column[:, None]) for column in by_seed.T]
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
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_json(column) for name, column in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _check_ranked(kind: str, runs: Runs) -> None:
    """Check that all runs have ranked queries.

    Raises:
      ValueError: one has none.
    """
    for run in runs:
        if not run.ranked:
            raise ValueError(
                f"{kind}: {run.name}: expected a test split, its data have none"
            )


# -- pictures


def draw(kind: str, runs: Runs) -> tuple[Figure, Any]:
    """Draw a picture of runs on the same data; return it with the table or tables behind it.

    Args:
      kind: a key of `KINDS`.

    Raises:
      ValueError: the runs have nothing to draw.
    """
    make_table, draw_table = KINDS[kind]
    table = make_table(runs)
    with style():
        return draw_table(table), table


def _draw_curves(tables: list[Table]) -> Figure:
    """Draw the metric on valid and the losses over the updates."""
    figure = _new_figure(4.2)
    figure.supxlabel("update")
    for axes, table in zip(figure.subplots(2, 3).flat, tables):
        update = table["update"]
        axes.set_title(table["title"])
        if not len(update):
            axes.text(0.5, 0.5, "none logged", ha="center", va="center")
            axes.set_axis_off()
            continue
        mean, spread = band(table["value"])
        low, high = mean - spread, mean + spread
        _draw_line(axes, update, mean, low, high, BLUE)
        # A band at a single update has no width.
        axes.vlines(update, low, high, color=BLUE, alpha=0.25)
        # An offset or a factor above the axis would stand in the title.
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        if table["name"] == "valid_metric":
            _widen(axes, 0.01)
        if len(update) <= 6:
            axes.set_xticks(update)
    return figure


def _widen(axes: Axes, least: float) -> None:
    """Widen the vertical axis to a least range, so that rounding errors do not look like changes."""
    low, high = axes.get_ylim()
    missing = max(least - (high - low), 0.0)
    axes.set_ylim(low - missing / 2, high + missing / 2)


def _draw_ranks(table: Table) -> Figure:
    """Draw the histogram of ranks, untrained and trained."""
    figure = _new_figure(2.8)
    axes = figure.subplots()
    places = np.arange(len(table["bins"]))
    for shift, name, colour in (
        (-0.2, "untrained", GREY),
        (0.2, "trained", BLUE),
    ):
        mean, spread = band(table[name])
        axes.bar(
            places + shift,
            mean,
            0.4,
            color=colour,
            label=name,
            yerr=spread,
            ecolor=INK,
        )

    axes.set_xticks(places, table["bins"], fontsize=8)
    axes.set(
        xlabel="rank of the answer (mean of ties)", ylabel="share of answers"
    )
    axes.legend(loc="best")
    return figure


def _draw_relations(table: Table) -> Figure:
    """Draw MRR by relation: untrained, trained, and the share of answers that the rules derive."""
    figure, axes = _new_list(table["names"], "relations, most queries first")
    trained, spread = band(table["trained"][:, :MAX_BARS])
    untrained, ceiling = (
        table[name].mean(0)[:MAX_BARS] for name in ("untrained", "ceiling")
    )
    places = np.arange(len(trained))
    axes.barh(
        places,
        trained,
        0.62,
        color=BLUE,
        label="trained",
        xerr=spread,
        ecolor=INK,
    )
    axes.plot(
        untrained, places, "o", color=GREY, label="untrained", ms=7, mew=0.5
    )
    axes.plot(ceiling, places, "|", color=ORANGE, label="ceiling", ms=7, mew=2)

    axes.set(xlim=(0, 1.02), xlabel="MRR")
    _add_legend_above(axes)
    return figure


def _draw_gains(table: Table) -> Figure:
    """Draw the gains and losses of training by relation, the greatest losses first."""
    title = "relations, greatest losses first"
    figure, axes = _new_list(table["names"], title)
    errors = np.nan_to_num(table["error"][:MAX_BARS])
    _draw_changes(axes, table["gain"].mean(0), errors)
    axes.set_xlabel("MRR trained less the better of untrained and rule score")
    return figure


def _draw_reliability(table: Table) -> Figure:
    """Draw how often candidates are the answer, by their probability: untrained, trained, and with the temperature."""
    figure = _new_figure(3.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
    tempered = "trained, temperature of valid"
    for name, colour, text in (
        ("untrained", GREY, "untrained"),
        ("trained", BLUE, "trained (numbers: candidates)"),
        ("trained_at_temperature", ORANGE, tempered),
    ):
        drawn = table[name]
        if drawn is None:
            continue
        has_mean = ~np.isnan(drawn["frequency"]).any(0)
        probability, frequency = (
            drawn[column][:, has_mean].mean(0)
            for column in ("probability", "frequency")
        )
        low, high = drawn["low"][has_mean], drawn["high"][has_mean]
        axes.errorbar(
            probability,
            frequency,
            yerr=np.maximum([frequency - low, high - frequency], 0.0),
            fmt="o-",
            color=colour,
            capsize=3,
            markersize=4,
            label=text,
        )
        if name == "trained":
            numbers = drawn["n"][:, has_mean].sum(0)
            for x, y, n in zip(probability, frequency, numbers):
                offset = {"xytext": (4, -10), "textcoords": "offset points"}
                axes.annotate(f"{n:,}", (x, y), size=7, **offset)

    axes.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.05),
        xlabel="probability of a candidate (mean of its bin)",
        ylabel="share that is the answer",
    )
    axes.legend(loc="upper left")
    return figure


def _draw_weights(tables: tuple[Table, Table]) -> Figure:
    """Draw the weights of evidence that training moved most, and how far it moved those of each relation."""
    single, by_relation = tables
    columns = zip(single["relation"], single["side"], single["evidence"])
    texts = [f"{relation}, {side}: {text}" for relation, side, text in columns]
    names, distance = by_relation["names"], by_relation["distance"]
    heights = [min(len(listed), MAX_BARS) + 2 for listed in (texts, names)]
    figure = _new_figure(0.9 + 0.28 * sum(heights))
    upper, lower = figure.subplots(2, height_ratios=heights)
    _list_names(upper, texts, "weights, moved most first", 60)
    _draw_changes(upper, single["after"] - single["before"])
    upper.set_xlabel("change of the weight in the score, a logit")
    _list_names(lower, names, "relations, moved most first")
    _draw_changes(lower, distance)
    lower.set_xlabel("root of the squared changes of all weights of a relation")
    return figure


def _draw_rules(table: Table) -> Figure:
    """Draw the probability that stands for each rule before and after learning."""
    figure, axes = _new_list(table["texts"], "rules, most proofs first", 60)
    before, after = (table[name][:MAX_BARS] for name in ("before", "after"))
    places = np.arange(len(before))
    axes.hlines(places, before, after, color=GREY)
    axes.plot(before, places, "o", color=GREY, label="before")
    axes.plot(after, places, "o", color=BLUE, label="after")
    axes.set(xlim=(-0.02, 1.02), xlabel="probability that stands for the rule")
    _add_legend_above(axes)
    return figure


KINDS: dict[str, tuple[Callable[[Runs], Any], Callable[[Any], Figure]]] = {
    "curves": (curves, _draw_curves),
    "ranks": (ranks, _draw_ranks),
    "relations": (relations, _draw_relations),
    "gains": (gains, _draw_gains),
    "reliability": (reliability, _draw_reliability),
    "rules": (rules, _draw_rules),
    "weights": (weights, _draw_weights),
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
    """Return a figure that lists the first names from the top on its vertical axis."""
    figure = _new_figure(1.1 + 0.28 * min(len(names), MAX_BARS))
    axes = figure.subplots()
    _list_names(axes, names, what, width)
    return figure, axes


def _list_names(
    axes: Axes, names: Sequence[str], what: str, width: int = MAX_LABEL
) -> None:
    """Put the first names on the vertical axis, from the top, and title it with their number out of all."""
    texts = [label(name, width) for name in names[:MAX_BARS]]
    axes.set_yticks(np.arange(len(texts)), texts, fontsize=8)
    axes.set_ylim(len(texts) - 0.4, -0.6)
    axes.set_title(f"{len(texts)} of {len(names):,} {what}", loc="left")


def _draw_changes(
    axes: Axes, changes: np.ndarray, errors: np.ndarray | None = None
) -> None:
    """Draw the first gains and losses as bars on both sides of 0."""
    changes = changes[:MAX_BARS]
    colours = np.where(changes < 0, ORANGE, BLUE)
    places = np.arange(len(changes))
    axes.barh(places, changes, 0.62, color=colours, xerr=errors, ecolor=INK)
    axes.axvline(0.0, color=GREY, linewidth=1)


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


# ---- The page.

SCORE_COLUMNS = (
    "mrr",
    "hits@1",
    "hits@3",
    "hits@10",
    "auc_pr",
    "proved",
    "ceiling",
)
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
    # what a kind of learning does not have is left out
    has_content = dict.fromkeys(TITLES, True)
    has_content["curves"] = any(run.n_updates for run in runs)
    has_content["weights"] = any(run.learnt for run in runs)
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
                if has_content[kind]
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
        figure, table = draw(kind, runs)
    except ValueError as error:
        return section | {"svg": "", "problem": display(str(error))}
    svg = to_inline_svg(figure, kind, TITLES[kind])
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
