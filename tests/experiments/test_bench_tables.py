"""The tables of times in the README are those of the records."""

import json
from pathlib import Path

import pytest

from funcppo.experiment.training import COMPILE_MIN_CALLS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NOTES = (ROOT / "experiments/README.md").read_text()


def rows(name: str) -> dict[str, dict]:
    record = json.loads(
        (ROOT / "experiments/results" / f"{name}.json").read_text()
    )
    return {row["cell"]: row for row in record["rows"]}


@pytest.mark.parametrize(
    "work", ["4x128", "2048x128", "64 learners", "1024 learners"]
)
def test_iterations_of_cartpole(work):
    found = rows("bench_cartpole-h200-bfloat16") | rows("bench_cartpole-h200")
    of = [
        found[f"{work} captured cuda {precision}"]
        for precision in ("highest", "high", "bfloat16")
    ]
    times = " | ".join(f"{row['iteration_ms']:.3g}" for row in of)
    start = f"| {work.replace('x', ' x ')} "
    line = next(line for line in README.splitlines() if line.startswith(start))
    jax = [
        rows("bench_cartpole-h200-jax")[f"{work} jax cuda {precision}"]
        for precision in ("highest", "high")
    ]
    theirs = " | ".join(f"{row['iteration_ms']:.3g}" for row in jax)
    assert f"| {times} | {of[0]['kernels']} | {theirs} |" in line
    assert min(row["mean_return"] for row in jax) > 100  # a peer must learn


@pytest.mark.parametrize(
    ("record", "work"),
    [
        ("s3", "s3 captured"),
        ("s3-turns", "s3 eager-parts"),
        ("family", "family captured"),
        ("family", "family-large captured"),
        ("family", "family-130 captured"),
    ],
)
def test_iterations_of_the_prover(record, work):
    row = rows(f"bench_prover-h200-{record}")[f"{work} cuda .carry/data packed"]
    steps = f"{row['rollout_steps_per_s']:,.0f}"
    assert (
        f"| {row['iteration_ms']:.3g} | {row['rollout_ms']:.3g} | {steps} |"
        in README
    )
    assert (
        row["difference_from_eager"] < 1e-5
        or f"{row['difference_from_eager']:.1%}".replace("%", " %") in README
    )


def test_what_launches_take():
    of = [
        *rows("bench_prover-h200-s3").values(),
        *rows("bench_prover-h200-family").values(),
    ][:4]
    *first, last = (f"{row['launches_ms']:.1f}" for row in of)
    assert f"take {', '.join(first)} and {last} ms" in NOTES


def test_a_start():
    starts = [
        rows(f"bench_prover-h200-{record}")[
            f"s3 {how} cuda .carry/data packed"
        ]["cold_s"]
        for record, how in (
            ("s3", "captured"),
            ("s3-warm", "captured"),
            ("s3-turns", "eager-parts"),
        )
    ]
    told = "takes {:.2g} s with empty caches, {:.2g} s with full ones, and {:.2g} s where nothing is compiled"
    assert told.format(*starts) in " ".join(README.split())


def test_what_starts_came_to():
    for record in ("-before", "-traced", "-bytecode", "-kept", "-told", ""):
        cold, warm = (
            next(iter(rows(f"bench_prover-h200-s3{name}{record}").values()))[
                "cold_s"
            ]
            for name in ("", "-warm")
        )
        line = next(
            line
            for line in NOTES.splitlines()
            if f"| {f'`{record}`' if record else 'none'} |" in line
        )
        assert f"| {cold:.1f} | {warm:.1f} |" in line


def test_microbatches_and_recording():
    before, now = (
        rows(f"bench_cartpole-h200-microbatches{name}")
        for name in ("-before", "")
    )
    eight, one = (
        "2048x128 captured cuda highest 8",
        "2048x128 captured cuda highest 1",
    )
    ms = [row["iteration_ms"] for row in (now[eight], before[eight], now[one])]
    told = "{:.1f} ms where the one graph took {:.1f} and minibatches in one piece take {:.1f}"
    assert told.format(*ms) in " ".join(NOTES.split())
    assert {
        round(row["peak_bytes"] / 1e6)
        for row in (*before.values(), *now.values())
    } == {404}
    record = json.loads(
        (ROOT / "experiments/results/bench_capture-h200.json").read_text()
    )["rows"]
    captures = [row["capture_ms"] for row in record if "pool" in row["row"]]
    assert f"{min(captures):.0f} to {max(captures):.0f} ms a capture" in NOTES


def test_what_memory_microbatches_spare():
    told = (
        "of {} MB on padded minibatches 8 microbatches leave {} (predicted: 400 of 2,700), at {} ms an iteration for "
        "{}, and of {} MB on packed ones {}, at {} for {}"
    )
    numbers = []
    for record, room in (("padded", "padded"), ("family", "packed")):
        names = (
            f"{work} captured cuda .carry/data {room}"
            for work in ("family-130", "family-130-microbatches")
        )
        whole, parts = (
            rows(f"bench_prover-h200-{record}")[name] for name in names
        )
        numbers += [
            whole["peak_bytes"] / 1e6,
            parts["peak_bytes"] / 1e6,
            parts["iteration_ms"],
            whole["iteration_ms"],
        ]
    assert told.format(*map(round, numbers)) in " ".join(NOTES.split())


def test_the_last_changes_in_the_notes_are_those_of_the_records():
    found = rows("bench_cartpole-h200")
    of = [
        found[f"{work} captured cuda highest"]
        for work in ("4x128", "2048x128", "64 learners", "1024 learners")
    ]
    (line,) = (
        line for line in NOTES.splitlines() if line.startswith("| 7 | restarts")
    )
    assert [float(cell.split(",")[0]) for cell in line.split("|")[4:8]] == [
        pytest.approx(row["iteration_ms"], rel=5e-3) for row in of
    ]
    assert [int(cell.split(",")[1]) for cell in line.split("|")[4:8]] == [
        row["kernels"] for row in of
    ]
    prover = [
        *rows("bench_prover-h200-s3").values(),
        *rows("bench_prover-h200-family").values(),
    ][:4]
    for row in prover:
        assert (
            f"| {row['iteration_ms']:.3g}, {row['rollout_ms']:.3g} |" in NOTES
        )


def test_iterations_by_rung():
    record = json.loads(
        (ROOT / "experiments/results/bench_rungs-h200.json").read_text()
    )["rows"]
    for work, start in (
        ("cartpole 4x128", "4 x 128, 4"),
        ("cartpole 2048x128", "2048 x 128"),
        ("prover 64x64", "S3"),
    ):
        times = [row["iteration_ms"] for row in record if row["work"] == work]
        cells = " | ".join(
            f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" for ms in times
        )
        assert any(
            start in line and line.endswith(f"| {cells} |")
            for line in README.splitlines()
        )
    assert max(row["max_difference_from_eager"] for row in record) < 2e-7


def test_where_compiled_learning_parts_from_eager_learning():
    record = json.loads(
        (ROOT / "experiments/results/check_learning-h200.json").read_text()
    )["rows"]
    assert len(record) == 80 and max(row["a step"] for row in record) < 6e-6
    for row in record[:54]:
        assert max(row["from eager"].values()) < 5e-5
        assert not any(
            parted["rows"] for parted in row["clipped otherwise"].values()
        )
    parted = {
        name: told
        for name, told in record[54]["clipped otherwise"].items()
        if told["rows"]
    }
    assert len(parted) == 8 and all(
        name.startswith("compiled") for name in parted
    )
    assert (
        parted["compiled"]["of"] == "value" and parted["compiled"]["rows"] == 1
    )
    assert (
        f"{parted['compiled']['here']:.0e} {parted['compiled']['eagerly']:.0e}"
        == "-6e-07 2e-06"
    )
    assert record[58]["clipped otherwise"]["compiled"]["of"] == "ratio"
    last = record[79]
    assert (
        last["clipped otherwise"]["compiled"]["rows"] == 53
        and f"{last['from eager']['compiled']:.1%}" == "3.3%"
    )


def test_what_scoring_takes():
    read = lambda name: json.loads(
        (ROOT / f"experiments/results/bench_scoring-{name}.json").read_text()
    )
    of = {
        row["row"]: row
        for name in ("h200", "h200-ranked")
        for row in read(name)["rows"]
    }
    for name in (
        "replaced",
        "refilled",
        "refilled, not compiled",
        "prefiltered",
    ):
        row = of[name]
        cells = (
            f"{row['slots']:,}",
            f"{row['ms_per_candidate']:.2g}",
            f"{row['times_replaced']:.3g}",
        )
        assert (
            f"| {' | '.join(cells)} | {row['warmup_seconds']:.2g} |" in README
        )
        assert row["largest_difference"] < 1e-5
    for name, digits in (("rules.txt", 2), ("rules_rnnlogic.tsv", 1)):
        assert f"{of[f'wn18rr, {name}']['seconds']:.{digits}f} s with" in README
    seconds, prepared, peak = (
        read("cpu")["rows"][0][key]
        for key in ("seconds", "prepared_seconds", "peak_bytes")
    )
    told = f"{seconds:.0f} s with RNNLogic's 15,000 after {prepared:.0f} s, in {peak / 1e9:.2f} GB, on one core"
    assert told in " ".join(README.split())


@pytest.mark.parametrize(("work", "digits"), [("4x128", 1), ("2048x128", 0)])
def test_iterations_on_a_cpu(work, digits):
    found = rows("bench_cartpole-cpu")
    times = [
        f"{found[f'{work} {how} cpu highest']['iteration_ms']:.{digits}f}"
        for how in ("whole", "forward", "sb3")
    ]
    assert f"| {work.replace('x', ' x ')} | {' | '.join(times)} |" in NOTES


def test_jax_on_a_cpu():
    found, notes = rows("bench_cartpole-cpu-jax"), " ".join(NOTES.split())
    row = lambda work, how: found[f"{work} {how} cpu highest"]
    small, jax_small, large, jax_large = (
        row(work, how)["iteration_ms"]
        for work in ("4x128", "2048x128")
        for how in ("whole", "jax")
    )
    assert (
        f"{jax_small:.1f} ms where `whole` takes {small:.1f}, and {jax_large:.0f} where it takes {large:.0f}:"
        in notes
    )
    assert (
        f"needs {small / jax_small:.2f} times as long as JAX at 4 x 128 and {large / jax_large:.2f} times at"
        in notes
    )
    assert row("4x128", "jax")["mean_return"] > 100  # a peer must learn


def test_learning_to_prove_on_a_cpu():
    """From where on a run is compiled, that saves more than it takes."""
    compiled, eager = (
        rows("bench_prover-cpu-s3")[f"s3 {how} cpu ../shared/data packed"]
        for how in ("compiled", "eager")
    )
    saved, notes = (
        (eager["processor_ms"] - compiled["processor_ms"]) / 128,
        " ".join(NOTES.split()),
    )
    assert (
        f"takes {compiled['processor_ms']:.0f} ms of processor an iteration compiled part by part"
        in notes
    )
    assert f"where eager takes {eager['processor_ms']:.0f} " in notes
    assert (
        f"{saved:.1f} ms less for each of its 128 " in notes
        and f"after {compiled['cold_s']:.0f} s of" in notes
    )
    assert 1e-3 * saved * COMPILE_MIN_CALLS > 2 * compiled["cold_s"]


@pytest.mark.parametrize("work", ["family", "s3"])
def test_packed_successors_on_a_cpu(work):
    found, notes = rows("bench_prover-cpu"), " ".join(NOTES.split())
    padded, packed = (
        found[f"{work} eager cpu ../shared/data {room}"]
        for room in ("padded", "packed")
    )
    assert (
        f"{padded['processor_ms'] / 1e3:.2f} to {packed['processor_ms'] / 1e3:.2f} on "
        in notes
    )
    assert f"{packed['filled']:.3f} of {packed['successors']}" in notes
