"""What the documents claim of accuracy and speed holds in the committed records."""

from __future__ import annotations

import json
import tomllib
from statistics import mean, stdev

import pytest

from experiments import paths
from funcppo.experiment.training import COMPILE_MIN_CALLS


def rows(name: str) -> list[dict]:
    return json.loads((paths.RESULTS / f"{name}.json").read_text())["rows"]


def cells(name: str) -> dict[str, dict]:
    return {row["cell"]: row for row in rows(name)}


def test_no_name_of_a_record_tells_its_history():
    stages = {
        "before",
        "earlier",
        "told",
        "traced",
        "kept",
        "bytecode",
        "stacked",
        "ranked",
        "turns",
    }
    for file in paths.RESULTS.glob("*.json"):
        assert not stages & set(file.stem.split("-")), file.name


def test_every_record_names_its_commit_and_versions():
    for file in paths.RESULTS.glob("*.json"):
        text = file.read_text()
        if file.stem == "published_miners":  # what others report
            assert all(row["url"] for row in json.loads(text)["rows"])
            continue
        assert '"commit"' in text and (
            '"torch"' in text or '"numpy"' in text
        ), file.name


def test_all_works_with_the_oldest_pytorch_that_is_taken():
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
    (bound,) = (
        text.removeprefix("torch>=")
        for text in project["project"]["dependencies"]
        if text.startswith("torch>=")
    )
    (row,) = (
        row
        for row in rows("older_pytorch")
        if row["torch"].startswith(f"{bound}.")
    )
    assert not any(row["failures"].values())
    assert row["tests"]["passed"] > 6_000 and not row["tests"]["failed"]


def test_the_tests_pass_with_one_gpu_and_with_two():
    record = json.loads((paths.RESULTS / "gpu_tests-h200.json").read_text())
    assert not record["n_files_left"]
    assert [row["n_gpus"] for row in record["rows"]] == [0, 1, 2]
    assert not any(row["failed"] for row in record["rows"])
    _, one, two = record["rows"]
    assert len(one["skipped_before"]) > 100
    assert len(two["skipped_before"]) == 1


def test_one_process_and_two_learn_the_same_on_gpus():
    compared = rows("process_equality-h100")
    assert all(row["is_equal"] for row in compared)
    eager = [row for row in compared if row["mode"] == "eager"]
    assert {(row["work"], row["processes"]) for row in eager} == {
        (work, n) for work in ("cartpole", "prover") for n in (1, 2)
    }
    assert not any(row["difference_after_all"] for row in eager)


def test_jax_learns_the_same_task():
    """A peer that does not learn would be no peer."""
    peers = [
        *(row for row in rows("cartpole-h100") if " jax " in row["cell"]),
        cells("cartpole-cpu-jax")["4x128 jax cpu highest"],
    ]
    assert min(row["mean_return"] for row in peers) > 100


@pytest.mark.parametrize(
    "name",
    [
        "prover-h200-s3",
        "prover-h200-s3-loop-body-graphs",
    ],
)
def test_the_prover_on_a_gpu_equals_its_eager_step(name):
    assert all(row["difference_from_eager"] < 1e-5 for row in rows(name))


def test_families_equal_their_eager_step_up_to_a_clip():
    for cell, row in cells("prover-h200-family").items():
        assert row["actions_differ"] == 0
        assert row["difference_from_eager"] < (
            0.04 if "family-130" in cell else 1e-5
        ), cell


def test_strategies_agree():
    assert (
        max(row["max_difference_from_eager"] for row in rows("strategies-h100"))
        < 2e-7
    )


def test_scores_of_both_designs_agree():
    assert all(
        row["largest_difference"] < 1e-5
        for row in rows("scoring-h200")
        if "largest_difference" in row
    )


def test_microbatches_of_cartpole_take_no_more_memory():
    assert {
        round(row["peak_bytes"] / 1e6)
        for row in rows("cartpole-h200-microbatches")
    } == {404}


def test_compiled_learning_departs_from_eager_learning_at_a_clip():
    record = rows("check_learning-h200")
    assert (
        len(record) == 80
        and max(row["step_difference"] for row in record) < 6e-6
    )
    for row in record[:54]:
        assert max(row["difference_from_eager"].values()) < 5e-5
        assert not any(
            difference["rows"]
            for difference in row["clip_differences"].values()
        )
    differ = {
        name: row
        for name, row in record[54]["clip_differences"].items()
        if row["rows"]
    }
    assert len(differ) == 8 and all(
        name.startswith("compiled") for name in differ
    )
    compiled = differ["compiled"]
    assert compiled["loss"] == "value" and compiled["rows"] == 1
    assert f"{compiled['here']:.0e} {compiled['eager']:.0e}" == "-6e-07 2e-06"
    assert record[58]["clip_differences"]["compiled"]["loss"] == "ratio"
    last = record[79]
    assert last["clip_differences"]["compiled"]["rows"] == 53
    assert f"{last['difference_from_eager']['compiled']:.1%}" == "3.3%"


def test_from_where_on_a_run_is_compiled_that_saves_more_than_it_takes():
    compiled, eager = (
        cells("prover-cpu-s3")[f"s3 {mode} cpu packed"]
        for mode in ("compiled", "eager")
    )
    saved_seconds = (
        1e-3 * (eager["processor_ms"] - compiled["processor_ms"]) / 128
    )  # rollout steps and minibatches
    assert saved_seconds * COMPILE_MIN_CALLS > 2 * compiled["cold_s"]


def test_the_miner_counts_as_the_rule_files_do():
    files = json.loads((paths.RESULTS / "check_mined_counts.json").read_text())[
        "files"
    ]
    assert len(files) == 5 and not any(
        row["different"] for row in files.values()
    )


@pytest.mark.parametrize(
    ("name", "n_seeds"), [("cartpole", 10), ("pendulum", 5)]
)
def test_control_is_learnt_by_every_seed(name, n_seeds):
    record = json.loads(
        (paths.RESULTS / f"learn_control-{name}.json").read_text()
    )
    assert record["holds"] and len(record["last_100_returns"]) == n_seeds
    assert (
        min(record["last_100_returns"].values())
        >= {"cartpole": 475.0, "pendulum": -250.0}[name]
    )


def test_mining_keeps_to_its_limits_on_all_generated_graphs():
    record = json.loads((paths.RESULTS / "mining_bounds.json").read_text())
    assert len(record["graphs"]) == 40
    for graph in record["graphs"]:
        assert graph["exit_status"] == 0
        assert graph["mining_seconds"] <= record["seconds"] + 2
        assert graph["peak_bytes"] <= record["memory_bytes"]
        assert graph["within_rows"]


def test_training_on_small_graphs_loses_on_none_beyond_its_errors():
    own: list[float] = []
    gains: list[float] = []
    n_beyond, n_gaining = 0, 0
    for row in rows("small_graphs-cpu"):
        assert row["default_score"] == row["score"]
        tests = [row, row["large_test"]]
        small, large = [test["gain"]["trained"] for test in tests]
        assert all(g["mean"] >= -2 * g["error"] for g in (small, large))
        own.append(small["mean"])
        gains.append(large["mean"])
        n_beyond += large["mean"] > 2 * large["error"]
        n_gaining += small["mean"] < -5e-5 and large["mean"] > 0
        key = (row["set"], row["triples"])
        if key in (("nations", 1500), ("kinships", 3000)):
            assert large["mean"] > 2 * large["error"]
        if row["set"] == "umls":
            assert abs(large["mean"]) < 2 * large["error"]

    error = stdev(gains) / len(gains) ** 0.5
    assert mean(gains) > 2 * error and 1 / 3 < max(gains) / sum(gains) < 0.4
    assert 0.4 * len(gains) < n_beyond < len(gains) / 2
    assert (sum(value < -5e-5 for value in own), n_gaining) == (7, 6)
