"""Write the Grafana dashboard of funcppo's metrics.

python ops/grafana/build_dashboard.py          # writes ops/grafana/funcppo.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("funcppo.json")
WIDTH, HEIGHT = 8, 7  # of a panel; a row has 24 columns
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """A graph of some expressions over time."""

    title: str
    unit: str  # in Grafana's names
    queries: dict[str, str]  # legend -> expression


def _of(metric: str) -> str:
    """The series of a metric that the variable at the top selects."""
    return f'{metric}{{instance=~"$instance"}}'


def _rate(metric: str) -> str:
    return f"rate({_of(metric)}[5m])"


def _mean(metric: str) -> str:
    return f"{_rate(metric + '_sum')} / {_rate(metric + '_count')}"


ROWS = {
    "Learning": [
        Panel(
            "Return of episodes",
            "none",
            {"mean": _of("funcppo_episode_return")},
        ),
        Panel(
            "Valid",
            "percentunit",
            {
                "latest": _of("funcppo_valid_score_ratio"),
                "best": _of("funcppo_best_valid_score_ratio"),
            },
        ),
        Panel("Loss", "none", {"{{part}}": _of("funcppo_loss")}),
        Panel("Entropy", "none", {"nats": _of("funcppo_entropy_nats")}),
        Panel(
            "Change of the policy",
            "none",
            {
                "KL, nats": _of("funcppo_approx_kl_nats"),
                "clipped share": _of("funcppo_clip_fraction_ratio"),
            },
        ),
        Panel(
            "Gradient and value",
            "none",
            {
                "gradient norm": _of("funcppo_grad_norm"),
                "explained variance": _of("funcppo_explained_variance_ratio"),
            },
        ),
    ],
    "Speed": [
        Panel(
            "Time of an update", "s", {"mean": _mean("funcppo_update_seconds")}
        ),
        Panel(
            "Device time of a step",
            "s",
            {"median": _of("funcppo_graph_replay_seconds")},
        ),
        Panel(
            "Environment steps",
            "ops",
            {"a second": _rate("funcppo_env_steps_total")},
        ),
        Panel(
            "Validation and checkpoint",
            "s",
            {
                "validation": _mean("funcppo_validation_seconds"),
                "checkpoint": _mean("funcppo_checkpoint_seconds"),
            },
        ),
        Panel(
            "Candidates scored",
            "ops",
            {"a second": _rate("funcppo_candidates_scored_total")},
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "GPU, {{kind}}": _of("funcppo_device_memory_bytes"),
                "process": _of("process_resident_memory_bytes"),
            },
        ),
    ],
    "Ranking": [
        Panel(
            "Dropped by the search",
            "none",
            {
                "pruned": _of("funcppo_search_pruned_total"),
                "did not fit": _of("funcppo_search_overflow_total"),
                "answers lost": _of("funcppo_answers_lost_total"),
                "slots halved": _of("funcppo_search_halvings_total"),
            },
        ),
        Panel(
            "Copies to the GPU",
            "s",
            {"a chunk": _mean("funcppo_stage_copy_seconds")},
        ),
        Panel(
            "Time of a compilation",
            "s",
            {"mean": _mean("funcppo_compile_seconds")},
        ),
    ],
    "Compilation and graphs": [
        Panel(
            "CUDA graphs",
            "none",
            {
                "enabled": _of("funcppo_graph_enabled"),
                "recorded": _of("funcppo_graph_recordings_total"),
                "recorded again": _of("funcppo_graph_rerecordings_total"),
            },
        ),
        Panel(
            "Compilations",
            "none",
            {
                "compiled": _of("funcppo_compiles_total"),
                "again, {{reason}}": _of("funcppo_recompiles_total"),
            },
        ),
        Panel(
            "Fallbacks",
            "none",
            {
                "no graph: {{reason}}": _of("funcppo_graph_fallbacks_total"),
                "skipped: {{reason}}": _of("funcppo_graph_skips_total"),
                "failed: {{reason}}": _of("funcppo_strategy_failures_total"),
            },
        ),
    ],
    "Health": [
        Panel(
            "Minibatches and rows left out",
            "none",
            {
                "minibatches a second": _rate(
                    "funcppo_minibatches_skipped_total"
                ),
                "share of rows": _of("funcppo_nonfinite_rows_ratio"),
            },
        ),
        Panel(
            "Age",
            "s",
            {
                "progress": f"time() - {_of('funcppo_progress_timestamp_seconds')}",
                "checkpoint": f"time() - {_of('funcppo_checkpoint_timestamp_seconds')}",
            },
        ),
        Panel(
            "Leaves that moved",
            "none",
            {"in all": _of("funcppo_leaves_moved_total")},
        ),
    ],
}


def build() -> dict[str, Any]:
    """The dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        position = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "gridPos": position})
        y += 1
        for i, panel in enumerate(row):
            panels.append(_panel(panel, x=i * WIDTH % 24, y=y))
            y += HEIGHT * (i % 3 == 2)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "funcppo",
        "uid": "funcppo",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_datasource(), _instance()]},
        "panels": panels,
    }


def _panel(panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _instance() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": "label_values(funcppo_build_info, instance)",
        "multi": True,
        "includeAll": True,
        "refresh": 2,
    }


def to_text() -> str:
    """The contents of the file."""
    return json.dumps(build(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_text())
    print(FILE, file=sys.stderr)
