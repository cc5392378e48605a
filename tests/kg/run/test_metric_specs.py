"""The list of metrics, and the alerts, the dashboard and the documents that use it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from funcppo.kg.run import telemetry
from funcppo.kg.run.metric_specs import METRICS
from funcppo.runtime import reasons
from funcppo.runtime.capture import capture

ROOT = Path(__file__).parents[3]
OPS = ROOT / "ops"
RULES = (OPS / "prometheus" / "funcppo.rules.yml").read_text()
RULE_TESTS = (OPS / "prometheus" / "funcppo.test.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
PAGE = (ROOT / "docs" / "operate.md").read_text()
UNITS = r"_(seconds|bytes|ratio|nats|total|info|rate|norm|return|update|loss|finished|enabled|size)$"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian package prometheus)",
)


def series():
    """All names that Prometheus stores."""
    names = {"process_resident_memory_bytes"}
    for spec in METRICS:
        suffixes = ("_sum", "_count", "_bucket")
        is_histogram = spec.kind == "histogram"
        names |= {spec.name + s for s in (suffixes if is_histogram else ("",))}
    return names


def names_in(text):
    return set(re.findall(r"\b(?:funcppo|process)_\w+", text))


def test_names_are_unique_and_end_in_a_unit():
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    for spec in METRICS:
        assert re.search(UNITS, spec.name), spec.name
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert spec.text.endswith(".") and bool(spec.label) == bool(spec.values)


def test_alerts_and_dashboard_use_metrics_that_exist():
    dashboard = (OPS / "grafana" / "funcppo.json").read_text()
    for text in (re.sub(r"#.*", "", RULES), RULE_TESTS, dashboard):
        found = names_in(text) - {"funcppo_"}
        assert found and found <= series()


def test_the_dashboard_is_what_its_script_writes(tmp_path):
    script = OPS / "grafana" / "build_dashboard.py"
    scope = {"__name__": "dashboard", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    committed = (OPS / "grafana" / "funcppo.json").read_text()
    assert scope["to_text"]() == committed
    panels = json.loads(committed)["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places) > 15


def test_every_alert_has_a_firing_and_a_silent_case_and_a_section():
    for alert in ALERTS:
        assert f"name: {alert} fires" in RULE_TESTS
        assert f"name: {alert} is silent" in RULE_TESTS
        assert f"docs/operate.md#{alert.lower()}" in RULES
    assert re.findall(r"^### (Funcppo\w+)$", PAGE, re.M) == ALERTS


@pytest.mark.parametrize(
    "codes",
    [
        reasons.FallbackCode,
        reasons.FailureCode,
        reasons.UntimedCode,
        reasons.SkipCode,
        reasons.RecompileCode,
    ],
)
def test_the_page_on_operation_names_every_code(codes):
    for code in codes:
        assert f"`{code}`" in PAGE, code


@promtool
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "funcppo.rules.yml"],
        ["test", "rules", "funcppo.test.yml"],
    ],
)
def test_promtool_accepts_the_rules(command):
    done = subprocess.run(
        ["promtool", *command],
        cwd=OPS / "prometheus",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.parametrize(("capture_ms", "fires"), [(8500, True), (7500, False)])
def test_a_recording_of_more_than_eight_seconds_raises_the_alert(
    tmp_path, capture_ms, fires
):
    """What a run exports of such a recording, read by the rules."""
    captured = replace(
        capture(lambda state: (state, ()), torch.zeros(1)),
        capture_ms=capture_ms,
    )
    exported = tmp_path / "funcppo.prom"
    with telemetry.export(None, exported, "train", {}) as exporter:
        exporter.telemetry.record_search_graphs(
            [replace(captured, replay_mode="cuda-graph", n_graphs=1)]
        )
    name = "funcppo_graph_capture_seconds"
    line = re.search(rf"^{name} (\S+)$", exported.read_text(), re.M)
    assert line is not None

    series = {"series": name, "values": f"{line[1]}x5"}
    alert = {"alertname": "FuncppoSlowCapture", "eval_time": "5m"}
    humanized = f"{capture_ms / 1000:.3g}s"
    raised = {
        "exp_labels": {"severity": "info"},
        "exp_annotations": {
            "summary": f"Recording the CUDA graphs took {humanized}",
            "runbook_url": "docs/operate.md#funcpposlowcapture",
        },
    }
    case = {
        "interval": "1m",
        "input_series": [series],
        "alert_rule_test": [{**alert, "exp_alerts": [raised] * fires}],
    }
    rules = str(OPS / "prometheus" / "funcppo.rules.yml")
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [rules], "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_accepts_the_expressions_of_the_dashboard(tmp_path):
    """Each as a recording rule: what builds the dashboard checks none of them."""
    text = (OPS / "grafana" / "funcppo.json").read_text()
    panels = json.loads(text)["panels"]
    expressions = [
        target["expr"].replace("$instance", "a")
        for panel in panels
        for target in panel.get("targets", ())
    ]
    assert len(expressions) > len(panels)
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(expressions)
    ]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(
        json.dumps({"groups": [{"name": "panels", "rules": rules}]})
    )
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
