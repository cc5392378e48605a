"""Measure runs for a report, and draw the tables of one or several runs with matplotlib (extra `plot`).

Pictures are matplotlib's, without pyplot: no window, no global figure. Text of a picture is never read as mathematics,
whatever a name holds. Return curves show the interquartile mean over seeds, and its interval as a band.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree

import numpy as np

from funcppo import logs
from funcppo.core import files
from funcppo.core.files import Json
from funcppo.core.settings import METRICS_FILE
from funcppo.core.types import F64, I64
from funcppo.kg.answers import Answerer
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.ranking import policy_score
from funcppo.kg.ranking.ranking import selection_metric
from funcppo.kg.run import training
from funcppo.kg.run.config import RESULTS_FILE, read_config
from funcppo.kg.run.run import Run
from funcppo.kg.run.subject import describe_default_score, run_subject
from funcppo.kg.search.task import PhaseCallback, ignore_phase
from funcppo.kg.show.report import tables
from funcppo.kg.show.report.names import label
from funcppo.kg.show.report.tables import (
    Band,
    QueryEntry,
    RankedSplit,
    Reliability,
    RuleUse,
    RunMeasurements,
)
from funcppo.rl.run import POLICIES, Returns, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# relations and rules of a picture; pages list more
MAX_BARS = 25
MAX_RULE_LABEL = 60  # characters
MAX_UPDATE_TICKS = 6
MIN_METRIC_RANGE = 0.01  # of the axis of the metric on valid
BAR_INCHES = 0.28
WIDTH_INCHES = 7.2
PNG_DPI = 160
# mid tones, which stand out on white and on black, also for the colour-blind
COLOURS = ("#8c8c8c", "#2f7ed8", "#e07b39", "#2a9d6f")
GREY, BLUE, ORANGE, GREEN = COLOURS
# the colour of text and axes, which a page replaces by its own
INK = "#1b1b1f"
CURVES = (
    ("valid_metric", "valid"),
    ("loss", "loss"),
    ("policy_loss", "policy loss"),
    ("value_loss", "value loss"),
    ("entropy", "entropy"),
    ("episode_return", "return of an episode"),
)
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


class Picture(NamedTuple):
    """A figure and the table that it draws."""

    figure: Figure
    # of `tables`, or several tables
    table: NamedTuple | tuple[NamedTuple, ...]


Draw = Callable[[Sequence[RunMeasurements]], Picture]


def check_packages() -> None:
    """Check that the packages of the extra `plot` are installed.

    Raises:
      ValueError: one is missing.
    """
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"reports and pictures need {package} (pip install 'funcppo[plot]')"
            )


def draw_curves(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw quality on valid and losses over the updates.

    Raises:
      ValueError: no run has a line in its metrics log.
    """
    curves = [tables.curve(runs, name) for name, _ in CURVES]
    if not any(len(curve.update) for curve in curves):
        raise ValueError(
            "curves: expected lines in metrics.jsonl that all runs have, got none"
        )
    figure = new_figure(4.2)
    titles = dict(CURVES)
    titles["valid_metric"] = f"valid {runs[0].metric_name.upper()}"
    for axes, curve in zip(figure.subplots(2, 3).flat, curves):
        axes.set_title(titles[curve.name], fontsize=9)
        if not len(curve.update):
            axes.text(0.5, 0.5, "none logged", ha="center", va="center")
            axes.set_axis_off()
            continue
        drawn = tables.band(curve.value)
        # A line through few points hides where they are.
        marker = "o" if len(curve.update) <= 30 else None
        axes.plot(
            curve.update, drawn.mean, color=BLUE, marker=marker, markersize=3
        )
        # A band at a single update has no width.
        draw_band = axes.fill_between if len(curve.update) > 1 else axes.vlines
        draw_band(
            curve.update,
            drawn.low,
            drawn.high,
            color=BLUE,
            alpha=0.25,
            linewidth=0 if len(curve.update) > 1 else 6,
        )
        axes.margins(x=0.03)
        # An offset or a factor above the axis would stand in the title.
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        if curve.name == "valid_metric":
            _widen(axes, MIN_METRIC_RANGE)
        if len(curve.update) <= MAX_UPDATE_TICKS:
            axes.set_xticks(curve.update)
    figure.supxlabel("update", fontsize=9)
    return Picture(figure, tuple(curves))


def _widen(axes: Axes, least: float) -> None:
    """Widen the range of the vertical axis to a least one, so that no rounding looks like a change."""
    low, high = axes.get_ylim()
    missing = least - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def draw_ranks(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw the histogram of ranks, untrained and trained.

    Raises:
      ValueError: a run has no ranked queries.
    """
    _check_ranked("ranks", runs)
    table = tables.ranks(runs)
    figure = new_figure(2.8)
    axes = figure.subplots()

    places = np.arange(len(table.bins))
    for shift, name, shares, colour in (
        (-0.2, "untrained", table.untrained, GREY),
        (0.2, "trained", table.trained, BLUE),
    ):
        drawn = tables.band(shares)
        axes.bar(
            places + shift,
            drawn.mean,
            width=0.4,
            color=colour,
            label=name,
            yerr=_bars(drawn, runs),
            ecolor=INK,
        )

    axes.set_xticks(places, table.bins, fontsize=8)
    axes.set_xlabel("rank of the answer (mean of ties)")
    axes.set_ylabel("share of answers")
    axes.legend(frameon=False, loc="best")
    return Picture(figure, table)


def draw_relations(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw MRR by relation: untrained, trained, and the share of answers that the rules derive.

    Raises:
      ValueError: a run has no ranked queries.
    """
    _check_ranked("relations", runs)
    table = tables.relations(runs)
    n = min(len(table.names), MAX_BARS)
    figure = new_figure(1.1 + BAR_INCHES * n)
    axes = figure.subplots()
    places = np.arange(n)

    trained = tables.band(table.trained)
    axes.barh(
        places,
        trained.mean[:n],
        height=0.62,
        color=BLUE,
        label="trained",
        xerr=_bars(Band(*(part[:n] for part in trained)), runs),
        ecolor=INK,
    )
    for values, marker, colour, name in (
        (table.untrained, "o", GREY, "untrained"),
        (table.ceiling, "|", ORANGE, "ceiling"),
    ):
        axes.plot(
            values.mean(0)[:n],
            places,
            marker,
            color=colour,
            label=name,
            markersize=7,
            markeredgewidth=2 if marker == "|" else 0.5,
        )

    axes.set_yticks(places, [label(name) for name in table.names[:n]])
    _finish_bars(axes, n, len(table.names), "relations, most queries first")
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("MRR")
    return Picture(figure, table)


def draw_gains(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw what training gains and loses by relation, the greatest losses first.

    Raises:
      ValueError: a run has no ranked queries.
    """
    _check_ranked("gains", runs)
    table = tables.gains(runs)
    n = min(len(table.names), MAX_BARS)
    figure = new_figure(1.1 + BAR_INCHES * n)
    axes = figure.subplots()
    places = np.arange(n)

    gain = table.gain.mean(0)[:n]
    axes.barh(
        places,
        gain,
        height=0.62,
        color=[ORANGE if x < 0 else BLUE for x in gain],
        xerr=np.nan_to_num(table.error[:n]),
        ecolor=INK,
    )
    axes.axvline(0.0, color=GREY, linewidth=1)
    axes.set_yticks(places, [label(name) for name in table.names[:n]])
    _order_bars(axes, n, len(table.names), "relations, greatest losses first")
    axes.set_xlabel("MRR trained less the better of untrained and rule score")
    return Picture(figure, table)


def draw_reliability(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw how often candidates are the answer, by their probability: untrained, trained, and with the temperature.

    Raises:
      ValueError: a run has no ranked queries, or the runs have other kinds of scores.
    """
    _check_ranked("reliability", runs)
    table = tables.calibrations(runs)
    figure = new_figure(3.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)

    _draw_reliability(axes, table.untrained, GREY, "untrained")
    trained = _draw_reliability(axes, table.trained, BLUE, "trained")
    for x, y, n in zip(*trained):
        axes.annotate(
            f"{n:,.0f}",
            (x, y),
            (4, -10),
            textcoords="offset points",
            fontsize=7,
        )
    if table.trained_at_temperature is not None:
        _draw_reliability(
            axes,
            table.trained_at_temperature,
            ORANGE,
            "trained, temperature of valid",
        )

    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("probability of a candidate (mean of its bin)")
    axes.set_ylabel("share that is the answer")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return Picture(figure, table)


def _draw_reliability(
    axes: Axes, table: Reliability, colour: str, name: str
) -> np.ndarray:
    """Draw one state of a policy; mean probability, frequency and number of candidates of each point."""
    has_mean = ~np.isnan(table.frequency).any(0)
    probability = table.probability[:, has_mean].mean(0)
    frequency = table.frequency[:, has_mean].mean(0)
    low, high = table.low[has_mean], table.high[has_mean]
    axes.errorbar(
        probability,
        frequency,
        yerr=np.maximum([frequency - low, high - frequency], 0.0),
        fmt="o-",
        color=colour,
        ecolor=colour,
        capsize=3,
        markersize=4,
        label=name,
    )
    return np.stack([probability, frequency, table.n[:, has_mean].sum(0)])


def draw_weights(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw the weights of evidence that training moved most, and how far it moved those of each relation.

    Raises:
      ValueError: a run searches proofs, or training moved no weight.
    """
    single, by_relation = tables.weights(runs)
    if not single.kind:
        raise ValueError(
            "weights: expected weights that training moved, got none"
        )
    n = min(len(single.kind), MAX_BARS)
    n_relations = min(len(by_relation.names), MAX_BARS)
    figure = new_figure(2.0 + BAR_INCHES * (n + n_relations))
    upper, lower = figure.subplots(2, height_ratios=(n + 2, n_relations + 2))

    places = np.arange(n)
    change = (single.after - single.before)[:n]
    upper.barh(
        places,
        change,
        height=0.62,
        color=[ORANGE if x < 0 else BLUE for x in change],
    )
    upper.axvline(0.0, color=GREY, linewidth=1)
    texts = [
        label(f"{relation}, {side}: {evidence}", MAX_RULE_LABEL)
        for evidence, relation, side in zip(
            single.evidence[:n], single.relation, single.side
        )
    ]
    upper.set_yticks(places, texts, fontsize=7.5)
    _order_bars(upper, n, len(single.kind), "weights, moved most first")
    upper.set_xlabel("change of the weight in the score, a logit")

    places = np.arange(n_relations)
    lower.barh(
        places, by_relation.distance[:n_relations], height=0.62, color=BLUE
    )
    texts = [label(name) for name in by_relation.names[:n_relations]]
    lower.set_yticks(places, texts, fontsize=7.5)
    lower.set_ylim(n_relations - 0.4, -0.6)
    lower.set_xlabel("root of the squared changes of all weights of a relation")
    return Picture(figure, (single, by_relation))


def draw_rules(runs: Sequence[RunMeasurements]) -> Picture:
    """Draw the probability that stands for each rule before and after learning.

    Raises:
      ValueError: no rule was used.
    """
    table = tables.rules(runs)
    if not table.texts:
        raise ValueError(
            "rules: expected test queries that rules derive, got none"
        )
    n = min(len(table.texts), MAX_BARS)
    figure = new_figure(1.1 + BAR_INCHES * n)
    axes = figure.subplots()
    places = np.arange(n)

    axes.hlines(
        places, table.before[:n], table.after[:n], color=GREY, linewidth=1.5
    )
    axes.plot(table.before[:n], places, "o", color=GREY, label="before")
    axes.plot(table.after[:n], places, "o", color=BLUE, label="after")

    texts = [label(text, MAX_RULE_LABEL) for text in table.texts[:n]]
    axes.set_yticks(places, texts, fontsize=7.5)
    _finish_bars(axes, n, len(table.texts), "rules, most proofs first")
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("probability that stands for the rule")
    return Picture(figure, table)


KINDS: dict[str, Draw] = {
    "curves": draw_curves,
    "ranks": draw_ranks,
    "relations": draw_relations,
    "gains": draw_gains,
    "reliability": draw_reliability,
    "rules": draw_rules,
    "weights": draw_weights,
}


def draw(kind: str, runs: Sequence[RunMeasurements]) -> Picture:
    """Draw a picture of some runs.

    Args:
      kind: a key of `KINDS`.

    Raises:
      ValueError: the runs have nothing to draw, or are on different data.
    """
    tables.check_same_data(runs)
    with style():
        return KINDS[kind](runs)


def to_png(picture: Picture) -> bytes:
    """A picture as PNG on white."""
    content = io.BytesIO()
    with style():
        picture.figure.savefig(
            content, format="png", dpi=PNG_DPI, facecolor="white"
        )
    return content.getvalue()


def to_svg(picture: Picture, background: str = "white") -> bytes:
    """A picture as an SVG file, whose text is text."""
    content = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style():
        picture.figure.savefig(
            content, format="svg", facecolor=background, metadata=nothing
        )
    return content.getvalue()


def to_inline_svg(picture: Picture, name: str, title: str) -> str:
    """A picture as an element of a page: in the colour of its text, without ids that another picture has.

    Args:
      name: in front of each id.
      title: what the picture shows, for readers that cannot see it.
    """
    root = ElementTree.fromstring(to_svg(picture, background="none"))
    # A style sheet would count for the whole page.
    for parent in root.findall(f"{{{_SVG}}}defs"):
        for sheet in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(sheet)
    root.set("stroke-linejoin", "round")

    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == f"{{{_XLINK}}}href":
                element.set(key, f"#{name}-{value[1:]}")
            else:
                value = value.replace("url(#", f"url(#{name}-")
                element.set(key, value.replace(INK, "currentColor"))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", title)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


@contextmanager
def style() -> Iterator[None]:
    """The settings that pictures are drawn and written with."""
    import matplotlib

    style = matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "funcppo",
            "text.parse_math": False,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.facecolor": "none",
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    with style, warnings.catch_warnings():
        # A font without the signs of a name: an SVG leaves them to the browser.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        yield


def new_figure(height: float) -> Figure:
    """An empty figure of the width of a page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained")


def _bars(drawn: Band, runs: Sequence[RunMeasurements]) -> np.ndarray | None:
    """The error bars of a band; None for one run."""
    if len(runs) == 1:
        return None
    return np.stack([drawn.mean - drawn.low, drawn.high - drawn.mean])


def _order_bars(axes: Axes, n: int, n_all: int, what: str) -> None:
    """Order bars from the top, and say how many there are."""
    axes.set_ylim(n - 0.4, -0.6)
    axes.set_title(f"{n} of {n_all:,} {what}", fontsize=9, loc="left")


def _finish_bars(axes: Axes, n: int, n_all: int, what: str) -> None:
    """Order bars from the top, say how many there are, and what their marks mean."""
    _order_bars(axes, n, n_all, what)
    axes.legend(
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.0,
        ncols=3,
    )


def _check_ranked(kind: str, runs: Sequence[RunMeasurements]) -> None:
    """Check that all runs have ranked queries.

    Raises:
      ValueError: one has none.
    """
    for run in runs:
        if not run.ranked:
            raise ValueError(
                f"{kind}: {run.name}: expected a test split, its data have none"
            )


if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = 2.6
MAX_MARKED_POINTS = 30  # a line through few points hides where they are


class RunReturns(NamedTuple):
    """The evaluations of a run."""

    name: str  # of its folder
    env: str
    returns: Returns


class ReturnCurve(NamedTuple):
    """What is drawn of a run and one of its policies."""

    run: str
    env: str
    policy: str  # greedy or sampled
    n_seeds: int
    steps: I64[np.ndarray, "E"]  # environment steps of each seed
    iqm: F64[np.ndarray, "E"]
    low: F64[np.ndarray, "E"]
    high: F64[np.ndarray, "E"]


def curve(run: RunReturns, policy: str) -> ReturnCurve:
    """The interquartile mean over seeds and its interval of 95 % at each evaluation."""
    returns: F64[np.ndarray, "K E"] = getattr(run.returns, policy)
    estimates = [estimate(column[:, None]) for column in returns.T]
    iqm, low, high = np.array(estimates).T
    return ReturnCurve(
        run=run.name,
        env=run.env,
        policy=policy,
        n_seeds=len(returns),
        steps=run.returns.steps,
        iqm=iqm,
        low=low,
        high=high,
    )


def draw_return_curves(runs: Sequence[RunReturns]) -> Picture:
    """Draw the curves of some runs, a row of panels for each environment and a panel for each policy."""
    curves = [curve(run, policy) for run in runs for policy in POLICIES]
    envs = list(dict.fromkeys(run.env for run in runs))
    with style():
        figure = new_figure(0.4 + PANEL_INCHES * len(envs))
        panels = figure.subplots(len(envs), len(POLICIES), squeeze=False)
        for row, env in zip(panels, envs):
            for axes, policy in zip(row, POLICIES):
                shown = [
                    c for c in curves if (c.env, c.policy) == (env, policy)
                ]
                _draw_panel(axes, shown)
                axes.set_title(f"{env}, {policy}", fontsize=9)
            row[0].set_ylabel("return")
            row[0].legend(frameon=False, fontsize=8, loc="best")
        figure.supxlabel("environment steps of each seed", fontsize=9)
    return Picture(figure, tuple(curves))


def _draw_panel(axes: Axes, curves: Sequence[ReturnCurve]) -> None:
    """Draw some curves over each other."""
    for i, one in enumerate(curves):
        # The first colour is a grey, for what others are compared with.
        colour = COLOURS[1:][i % len(COLOURS[1:])]
        axes.plot(
            one.steps,
            one.iqm,
            color=colour,
            label=f"{label(one.run)}, {one.n_seeds} seeds",
            marker="o" if len(one.steps) <= MAX_MARKED_POINTS else None,
            markersize=3,
        )
        axes.fill_between(
            one.steps, one.low, one.high, color=colour, alpha=0.2, linewidth=0
        )


class RunReport(NamedTuple):
    """A run as a report shows it."""

    measured: RunMeasurements
    entries: list[QueryEntry]


class _Files(NamedTuple):
    """What the folder of a run says beside its checkpoint."""

    log: list[Json]
    results: Json
    notes: list[str]


def check_same_data(folders: Sequence[Path]) -> None:
    """Check that runs are on the same data, before any of them is measured.

    Raises:
      ValueError: two are not, or a folder holds no run.
    """
    configs = [read_config(folder) for folder in folders]
    sources = [(config.dataset, config.data) for config in configs]
    if all(source == sources[0] for source in sources):
        return
    loaded = [loaders.load(name, cfg=cfg) for name, cfg in sources]
    first = loaded[0]
    for folder, dataset in zip(folders[1:], loaded[1:]):
        if fingerprint(dataset) != fingerprint(first):
            raise ValueError(
                f"{folder}: expected a run on the data of {folders[0]} ({first.name}), got one on {dataset.name}, with "
                "other triples"
            )


def fingerprint(dataset: Dataset) -> str:
    """A hash of names and splits, whatever the rules."""
    no_rules = dataset.rules[:0, :0]  # the longest rule widens the table
    return dataclasses.replace(dataset, rules=no_rules).fingerprint


def measure(
    run: Run,
    folder: Path,
    *,
    max_ranked: int | None = None,
    n_queries: int = 0,
    with_entries: bool = False,
    on_phase: PhaseCallback = ignore_phase,
) -> RunReport:
    """Measure a run.

    Args:
      run: at its last checkpoint.
      folder: of the run, with its metrics log and its results.
      max_ranked: the most test queries to rank, spread over relations; None for as many as the end of training ranks.
      n_queries: queries over which rules are counted, and which are shown.
      with_entries: whether single queries are shown.
      on_phase: receives what is being done.

    Raises:
      ValueError: a file of the run is damaged, or a query of test cannot be ranked.
    """
    files = _read_files(folder)
    calibrated = files.results.get("calibration") or {}
    ranked = tables.rank_test(
        run, max_ranked, on_phase, calibrated.get("temperature")
    )
    # The report is on the policy, whatever ranks valid better.
    answerer = Answerer(run_subject(run, run.score))
    shown = tables.choose_queries(answerer, ranked, n_queries, on_phase)

    entries: list[QueryEntry] = []
    if with_entries:
        for entry in tables.iter_entries(answerer, ranked, shown):
            entries.append(entry)
            on_phase("explaining queries", len(entries), len(shown.rows))
    rules = tables.rule_uses(run, shown.atoms, shown.proofs)
    return RunReport(_measure_run(run, folder, files, ranked, rules), entries)


def _measure_run(
    run: Run,
    folder: Path,
    files: _Files,
    ranked: RankedSplit,
    rules: tuple[RuleUse, ...],
) -> RunMeasurements:
    """The numbers of a run."""
    task, dataset = run.task, run.task.dataset
    notes = [*task.notes, *run.notes, *files.results.get("notes", [])]
    notes += policy_score.graph_fallback_notes(run.search_step)
    notes += [*files.notes, *_iter_log_notes(files.log)]

    return RunMeasurements(
        name=str(folder),
        config=run.run_config,
        score=run.score,
        dataset={
            "name": dataset.name,
            "entities": dataset.n_constants,
            "relations": dataset.n_predicates,
            "train": len(dataset.train),
            "valid": len(dataset.valid),
            "test": len(dataset.test),
            "rules": len(dataset.rules),
            "height": task.max_height,
        },
        data_fingerprint=fingerprint(dataset),
        results=files.results,
        notes=tuple(dict.fromkeys(notes)),
        search_replay=policy_score.search_replay(run.search_step),
        update=int(run.state.train_state.update),
        n_updates=run.cfg.ppo.n_updates,
        is_trained=training.is_finished(run),
        best_update=int(run.state.best_update),
        metric_name=selection_metric(task),
        default_score_note=(
            describe_default_score(run)
            if run.default_score != run.score
            else ""
        ),
        log=tuple(files.log),
        predicates=tuple(dataset.predicates),
        n_test=len(dataset.test),
        n_ranked=len(ranked.queries),
        relation=ranked.queries[:, 0].numpy()[ranked.query_row],
        provable=ranked.provable,
        ranked=ranked.ranked,
        bins=ranked.bins,
        rules=rules,
        learnt=tables.learnt_weights(run),
    )


def _read_files(folder: Path) -> _Files:
    """Read the metrics log and the results.

    Raises:
      ValueError: a file is damaged.
    """
    log: list[Json] = []
    results: Json = {}
    notes: list[str] = []
    path = folder / METRICS_FILE
    if path.is_file():
        log = logs.read(path)
    else:
        notes.append(f"{METRICS_FILE} is missing: there are no learning curves")
    path = folder / RESULTS_FILE
    if path.is_file():
        results = files.parse_object(path, path.read_bytes())
    else:
        notes.append(
            f"{RESULTS_FILE} is missing: times and versions of the training are not known"
        )
    return _Files(log, results, notes)


def _iter_log_notes(log: list[Json]) -> Iterator[str]:
    """Yield lines on what the metrics log says of missing lines, skipped minibatches and fallbacks."""
    updates = [row["update"] for row in log if row["update"] > 0]
    n_missing = max(updates, default=0) - len(set(updates))
    if n_missing > 0:
        yield f"{METRICS_FILE}: {n_missing:,} updates have no line"
    n_skipped = np.nansum(
        [row.get("n_nonfinite_minibatches") or 0 for row in log]
    )
    if n_skipped:
        yield f"{n_skipped:,.0f} minibatches were skipped: loss or gradient not finite"
    reasons = {row.get("fallback_reason") or "" for row in log} - {""}
    for reason in sorted(reasons):
        yield f"no CUDA graph in training: {reason}"
