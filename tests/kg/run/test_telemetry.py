"""Metrics of real runs, over HTTP and in a file."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from funcppo.kg.run import telemetry
from funcppo.kg.run import train as training
from funcppo.kg.run.telemetry import COUNTERS_OF_ROW, LABELS, Telemetry
from funcppo.runtime.monitor import Monitor
from tests.kg.run.runs import CONFIG, N_UPDATES, new_run
from tests.ports import hold_ports, port_of

VERSIONS = {"funcppo": "1"}
ROOT = Path(__file__).parents[3]
OPS = ROOT / "ops"
RULES = (OPS / "prometheus" / "funcppo.rules.yml").read_text()
RULE_TESTS = (OPS / "prometheus" / "funcppo.test.yml").read_text()

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian package prometheus)",
)


def metric_names():
    """The name of each metric, with its kind, as Prometheus stores it."""
    names = {f"funcppo_{name}_info": "info" for name in telemetry.INFOS}
    names |= {f"funcppo_{n}_total": "counter" for n in telemetry.COUNTERS}
    names |= {f"funcppo_{name}": "gauge" for name in telemetry.GAUGES}
    histograms = telemetry.HISTOGRAMS
    return names | {f"funcppo_{n}_seconds": "histogram" for n in histograms}


def samples(text):
    """The value of each series, by name and labels."""
    return {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def train(folder, observer):
    folder.mkdir()
    run = new_run(CONFIG)
    captured, record = training.prepare_train_step(run)
    with Monitor() as monitor:
        if observer:
            observer.record_strategy(record, captured)
        for _ in training.train(
            run, folder, captured, lambda: False, monitor, observer=observer
        ):
            if observer:
                observer.record_machine(monitor)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The series after a run, as a file has them."""
    folder = tmp_path_factory.mktemp("telemetry")
    path = folder / "funcppo.prom"
    with telemetry.export(None, path, "train", VERSIONS) as exporter:
        train(folder / "run", exporter.telemetry)
        ended = time.time()
        exporter.telemetry.finish()
    checkpoint = (folder / "run" / "checkpoint.npz").stat()
    return samples(path.read_text()), checkpoint, ended


def test_a_run_emits_what_it_did(trained):
    values, checkpoint, ended = trained
    ppo = CONFIG.ppo
    assert values["funcppo_updates_total",] == N_UPDATES
    steps = N_UPDATES * ppo.n_envs * ppo.n_steps
    assert values["funcppo_env_steps_total",] == steps
    n_minibatches = N_UPDATES * ppo.n_epochs * ppo.n_minibatches
    assert values["funcppo_minibatches_total",] == n_minibatches
    assert values["funcppo_update_seconds_count",] == N_UPDATES
    assert values["funcppo_validation_seconds_count",] == 3
    assert values["funcppo_checkpoint_bytes",] == checkpoint.st_size
    written = values["funcppo_checkpoint_timestamp_seconds",]
    assert checkpoint.st_mtime <= written <= ended
    assert 0 < values["funcppo_valid_score_ratio",] <= 1
    assert values["funcppo_finished",] == 1
    assert values["funcppo_strategy_failures_total", "not_requested"] == 1
    assert values["funcppo_graph_fallbacks_total", "no_gpu"] == 1
    assert not [name for name, *_ in values if name.endswith("_created")]


def test_every_series_is_there_from_the_start(trained):
    values, *_ = trained
    names = {name for name, *_ in values}
    for name, kind in metric_names().items():
        assert name + "_count" * (kind == "histogram") in names
    for name, (_, labels) in LABELS.items():
        suffix = "_total" if name in telemetry.COUNTERS else ""
        for value in labels:
            assert (f"funcppo_{name}{suffix}", value) in values


def test_an_observed_run_waits_no_more_often(tmp_path, monkeypatch):
    """Every way to read a tensor on the host is counted, with the observer and without."""
    counts = {"": 0}

    def count(owner, name):
        plain = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[""] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("item", "tolist", "cpu", "numpy", "to", "__bool__"):
        count(torch.Tensor, name)
    for name in ("__float__", "__int__"):
        count(torch.Tensor, name)
    count(torch.cuda, "synchronize")
    count(torch.cuda.Event, "synchronize")
    count(torch.cuda.Stream, "synchronize")
    train(tmp_path / "plain", None)
    n_plain, counts[""] = counts[""], 0
    train(tmp_path / "observed", Telemetry())
    assert n_plain > 0 and counts[""] == n_plain


def test_each_update_with_rows_left_out_is_counted(tmp_path):
    """Also one of which a scrape sees only the next."""
    path = tmp_path / "funcppo.prom"
    row = dict.fromkeys(COUNTERS_OF_ROW.values(), 0.0) | {"seconds": 1.0}
    with telemetry.export(None, path, "train", VERSIONS) as exporter:
        for fraction in (0.0, 0.25, None, 0.5, 0.0):
            exporter.telemetry.record_update(
                row | {"nonfinite_fraction": fraction}, 1
            )
    values = samples(path.read_text())
    assert values["funcppo_updates_with_rows_left_out_total",] == 2
    assert values["funcppo_nonfinite_rows_ratio",] == 0


def test_metrics_are_served_until_the_program_ends():
    with hold_ports(1) as held:
        port = port_of(held[0])
        url = f"http://{telemetry.HOST}:{port}/metrics"
        with telemetry.export(port, None, "train", VERSIONS) as exporter:
            exporter.telemetry.record_ranked(2, 7)
            with urllib.request.urlopen(url, timeout=60) as answer:
                values = samples(answer.read().decode())
            assert values["funcppo_candidates_scored_total",] == 7
            message = f"expected a free port .* {port}"
            with (
                pytest.raises(ValueError, match=message),
                telemetry.export(port, None, "train", VERSIONS),
            ):
                pass
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=60)


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install 'funcppo\[metrics\]'"):
        Telemetry()


def test_a_file_that_cannot_be_written_any_more_ends_no_run(tmp_path):
    """One line says so, and the file is written again as soon as it can be."""
    path = tmp_path / "folder" / "m.prom"
    path.parent.mkdir()
    lines = []
    with telemetry.export(
        None, path, "train", VERSIONS, lines.append
    ) as exporter:
        path.unlink()
        path.parent.rmdir()
        for _ in range(2):
            exporter.refresh(at_once=True)
        (line,) = lines
        assert line.startswith(f"{path}: No such file or directory: ")
        path.parent.mkdir()
        exporter.refresh(at_once=True)
        assert path.exists() and len(lines) == 1
        path.unlink()
        path.parent.rmdir()
    assert len(lines) == 2


# -- alerts, dashboard and documents


def test_alerts_and_dashboard_use_metrics_that_exist():
    dashboard = (OPS / "grafana" / "funcppo.json").read_text()
    stored = {"process_resident_memory_bytes"}
    for name, kind in metric_names().items():
        of_histogram = ("_sum", "_count", "_bucket")
        suffixes = of_histogram if kind == "histogram" else ("",)
        stored |= {name + suffix for suffix in suffixes}
    for text in (re.sub(r"#.*", "", RULES), RULE_TESTS, dashboard):
        found = set(re.findall(r"\b(?:funcppo|process)_\w+", text))
        assert found and found - {"funcppo_"} <= stored


def test_the_dashboard_is_what_its_script_writes(tmp_path):
    script = OPS / "grafana" / "build_dashboard.py"
    scope = {"__name__": "dashboard", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    committed = (OPS / "grafana" / "funcppo.json").read_text()
    assert scope["to_text"]() == committed
    panels = json.loads(committed)["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places) > 15


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
