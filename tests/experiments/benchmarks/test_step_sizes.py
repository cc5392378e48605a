"""The sizes of networks: what is run for each, and what a record holds."""

from __future__ import annotations

import json
import os

from experiments import full_step_matrix  # noqa: F401  (registers the ways)
from experiments.benchmarks import step_sizes
from experiments.matrix import pool, problem, registry, tables
from experiments.paths import RESULTS


def test_every_size_runs_the_same_cells_beside_eager_training(
    tmp_path, monkeypatch
):
    ran = []

    def run(names, plan, done):
        ran.append((os.environ["MATRIX_SIZE"], plan.device, len(names)))
        for name in names:
            assert registry.by_id(name).id == name
            done(name, {"status": "fails", "error": {"cause": "none"}})

    monkeypatch.setenv("MATRIX_SIZE", "small")
    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(step_sizes.torch.cuda, "is_available", lambda: False)
    file = tmp_path / "step_sizes.json"
    words = ["step_sizes.py", "--out", str(file), "--sizes", "small", "large"]
    monkeypatch.setattr(step_sizes.sys, "argv", words)
    step_sizes.main()
    assert ran == [("small", "cpu", 5), ("large", "cpu", 5)]
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 10 and rows[-1]["hidden"] == 24_576
    assert rows[0]["cell"] == pool.BASELINE

    # The table names what failed in place of a time.
    monkeypatch.setattr(tables.record, "RESULTS", tmp_path)
    (tmp_path / "step_sizes-cpu.json").write_text(file.read_text())
    assert tables.sizes([]).count("fails: none") == 10


def test_the_large_network_has_fifty_million_parameters():
    size = problem.SIZES["large"]
    actor_and_critic = 2 * (size.obs + 1 + size.actions) * size.hidden
    assert 5.0e7 < actor_and_critic < 5.5e7


def compiled_rows(file, size):
    """The rows of a size in a record that compile anything."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    return [
        row
        for row in rows
        if row["size"] == size and "/none/" not in row["cell"]
    ]


def test_a_large_network_gains_less_than_a_fifth_on_a_gpu():
    rows = compiled_rows("step_sizes-h200.json", "large")
    failed = [row["cell"] for row in rows if "error" in row]
    assert len(failed) == 3 and all(name.startswith("C/") for name in failed)
    speedups = [row["speedup"] for row in rows if "speedup" in row]
    assert len(speedups) == 9 and 1.0 < min(speedups) <= max(speedups) < 1.2


def test_a_middling_network_gains_less_than_a_fifth_on_a_cpu():
    rows = compiled_rows("step_sizes-cpu.json", "middle")
    speedups = [row["speedup"] for row in rows]
    assert len(speedups) == 4 and 1.0 < min(speedups) <= max(speedups) < 1.2


def test_a_large_network_gains_nothing_beyond_the_spread_on_a_cpu():
    rows = compiled_rows("step_sizes-cpu-large.json", "large")
    spreads = [row["speedup_quartiles"] for row in rows]
    assert len(spreads) == 4 and all(low < 1.0 < high for low, high in spreads)
