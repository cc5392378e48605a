"""The tables of times in the README are those of the records."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NOTES = (ROOT / "experiments/README.md").read_text()


def rows(name: str) -> dict[str, dict]:
    record = json.loads((ROOT / "experiments/results" / f"{name}.json").read_text())
    return {row["cell"]: row for row in record["rows"]}


@pytest.mark.parametrize("work", ["4x128", "2048x128", "64 learners", "1024 learners"])
def test_iterations_of_cartpole(work):
    found = rows("bench_cartpole-h200")
    times = [f"{found[f'{work} captured cuda {p}']['iteration_ms']:.3g}" for p in ("highest", "high")]
    start = f"| {work.replace('x', ' x ')} "
    line = next(line for line in README.splitlines() if line.startswith(start))
    assert f"| {times[0]} | {times[1]} | {found[f'{work} captured cuda highest']['kernels']} |" in line


@pytest.mark.parametrize(("record", "work"), [("s3", "s3"), ("family", "family"), ("family", "family-large")])
def test_iterations_of_the_prover(record, work):
    row = rows(f"bench_prover-h200-{record}")[f"{work} captured cuda .carry/data"]
    steps = f"{row['rollout_steps_per_s']:,.0f}"
    assert f"| {row['iteration_ms']:.3g} | {row['rollout_ms']:.3g} | {steps} |" in README


@pytest.mark.parametrize(("work", "digits"), [("4x128", 1), ("2048x128", 0)])
def test_iterations_on_a_cpu(work, digits):
    found = rows("bench_cartpole-cpu")
    times = [f"{found[f'{work} {how} cpu highest']['iteration_ms']:.{digits}f}" for how in ("whole", "forward", "sb3")]
    assert f"| {work.replace('x', ' x ')} | {' | '.join(times)} |" in NOTES
