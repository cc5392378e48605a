"""A run that the first version of the program wrote is opened, evaluated and resumed; a newer format is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from funcppo import tree
from funcppo.evaluation.ranking import RankingProtocol, ranked_sides
from funcppo.experiment import (
    checkpoint,
    formats,
    metrics_log,
    run_start,
    training,
    validation,
)
from funcppo.experiment.config import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    read_config,
)
from funcppo.experiment.run import save_checkpoint
from funcppo.runtime.monitor import Monitor

# Written by commit bbc1d2d with family_tree:40:1 and settings other than the defaults: 12 updates without interruption
# ("complete"), and the same run interrupted after update 6. scores.json holds log-scores of its policy.
GOLDEN = Path(__file__).parent / "golden" / "run_format_1"


def run_to(run, folder, last_update):
    """The run after an update and its validation, trained from where it is."""
    captured, _ = training.prepare_train_step(run)
    updates = training.train(run, folder, captured, lambda: False, Monitor())
    for run, _ in updates:
        if int(captured.state.update) == last_update:
            save_checkpoint(run, folder)
            break
    return run


def test_a_config_of_format_1_is_read():
    config = read_config(GOLDEN / "complete")
    assert (
        config.n_validations,
        config.n_validation_queries,
        config.max_nonfinite_updates,
    ) == (3, 30, 3)
    assert config.prover.fact_selection == "oracle"
    assert (
        config.prover.negatives_per_positive == 2.0
        and config.prover.hard_negative_fraction == 0.25
    )
    assert (
        config.prover.n_residual_blocks == 1
        and config.prover.max_atoms == 100_000
    )
    assert config.ppo.learning_rate_schedule.warmup_updates == 2
    assert config.ppo.entropy_coef_schedule.end_factor == 0.5
    assert config.ppo.adam.decoupled_weight_decay is False


@pytest.mark.parametrize(
    ("old", "new"),
    [("chosen", "policy"), ("found", "oracle"), ("auto", "auto")],
)
def test_the_values_of_fact_selection_are_translated(old, new):
    raw = {"prover": {"facts": old}, "ppo": {"adam": {}}}
    assert formats.upgrade_config(raw)["prover"] == {"fact_selection": new}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state.params.term", "train_state.params.term_embedding"),
        ("state.params.state.weight", "train_state.params.state_layer.weight"),
        (
            "state.opt_state.mu.blocks.0.bias",
            "train_state.opt_state.mu.residual_blocks.0.bias",
        ),
        (
            "state.opt_state.nu.value.weight",
            "train_state.opt_state.nu.value_head.weight",
        ),
        ("state.opt_state.step", "train_state.opt_state.step"),
        ("state.env_state.goals.height", "train_state.env_state.goals.height"),
        ("state.env_state.label", "train_state.env_state.is_positive"),
        ("state.episode.total", "train_state.episode_stats.total_reward"),
        ("state.episode.length", "train_state.episode_stats.length"),
        ("state.update", "train_state.update"),
        ("best.hopeless", "best_params.dead_end_embedding"),
        ("best_valid", "best_valid_metric"),
        ("best_update", "best_update"),
    ],
)
def test_names_of_arrays_are_translated_by_path(old, new):
    assert formats.upgrade_array_name(old) == new


def test_metrics_of_format_1_are_read_under_the_names_of_today():
    rows = metrics_log.read(GOLDEN / "complete" / METRICS_FILE)
    assert [row["update"] for row in rows] == list(range(1, 13))
    raw = json.loads(
        (GOLDEN / "complete" / METRICS_FILE).read_text().splitlines()[3]
    )
    row = rows[3]
    assert row["n_episodes"] == raw["episodes"] == 32.0
    assert (
        row["episode_return"] == raw["return"]
        and row["episode_length"] == raw["length"]
    )
    assert (
        row["n_nonfinite_minibatches"] == raw["skipped"]
        and row["best_valid_metric"] == raw["best_valid"]
    )
    assert (
        row["cache_hits"] == raw["found"]
        and row["cudagraph_recordings"] == raw["recordings"]
    )
    assert row["loss"] == raw["loss"] and len(row) == len(raw)


def test_a_run_of_format_1_ranks_and_scores_as_it_did():
    run = run_start.open_run(GOLDEN / "complete")
    assert run.score == "success" and int(run.state.best_update) == 12
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    quality = validation.evaluate_policy(
        run, run.state.best_params, validation.validation_queries(run), protocol
    )
    assert torch.equal(
        torch.tensor(quality["mrr"], dtype=torch.float32),
        run.state.best_valid_metric,
    )

    golden = json.loads((GOLDEN / "scores.json").read_text())
    atoms = torch.tensor(golden["atoms"], dtype=torch.int32)
    scores = validation.run_policy_scorer(
        run, run.state.best_params, run.score
    )(atoms)
    # 1e-6 of float32 sums on other machines; training has moved the scores by 1e-2.
    torch.testing.assert_close(
        torch.nn.functional.logsigmoid(scores).float(),
        torch.tensor(golden["log_score"]),
        rtol=0,
        atol=1e-6,
    )
    initial = validation.run_policy_scorer(
        run, run.state.start_params, run.score
    )(atoms)
    assert (scores - initial).abs().max() > 1e-2


def test_a_run_of_format_1_resumes_to_the_parameters_of_the_uninterrupted_run(
    tmp_path,
):
    """Bit for bit with an uninterrupted run of this machine, and with the recorded one up to float32 rounding."""
    resumed_folder, whole_folder = tmp_path / "resumed", tmp_path / "whole"
    shutil.copytree(GOLDEN / "interrupted", resumed_folder)
    whole_folder.mkdir()
    before = run_start.open_run(resumed_folder)
    assert int(before.state.train_state.update) == 6

    whole = run_start.prepare_run(before.run_config, whole_folder, resume=False)
    run_to(whole, whole_folder, 6)
    halfway = checkpoint.read(whole_folder / CHECKPOINT_FILE).arrays
    stored = checkpoint.read(GOLDEN / "interrupted" / CHECKPOINT_FILE).arrays
    is_same_arithmetic = all(
        np.array_equal(halfway[name], stored[name])
        for name in stored
        if not name.startswith("best_")  # which version 1 chose otherwise
    )

    run_to(before, resumed_folder, 12)
    resumed = checkpoint.read(resumed_folder / CHECKPOINT_FILE)
    recorded = checkpoint.read(GOLDEN / "complete" / CHECKPOINT_FILE)
    assert (
        resumed.meta["format"] == formats.FORMAT
        and "format" not in recorded.meta
    )
    # No metric after update 4 is better; the recorded run took equal ones for better.
    best = {name: stored[name] for name in stored if name.startswith("best_")}
    assert best["best_update"] == 4
    expected = recorded.arrays | best
    assert {
        name
        for name in resumed.arrays
        if not name.startswith(("start_params.", "embedding.", "bellman_ford."))
    } == set(expected)
    for name, array in expected.items():
        if is_same_arithmetic or array.dtype.kind != "f":
            assert np.array_equal(resumed.arrays[name], array), name
        else:
            np.testing.assert_allclose(
                resumed.arrays[name], array, rtol=0, atol=1e-4, err_msg=name
            )

    lines = (resumed_folder / METRICS_FILE).read_text().splitlines()
    assert json.loads(lines[0]) == {"format": 2}
    rows = metrics_log.read(resumed_folder / METRICS_FILE)
    assert [row["update"] for row in rows] == list(range(1, 13))
    assert all(
        {"n_episodes", "episode_return", "loss"} <= set(row) for row in rows
    )


def test_a_checkpoint_without_the_first_parameters_has_those_of_its_seed():
    """As runs of format 1 and the first ones of format 2, which start where their seed says."""
    run = run_start.open_run(GOLDEN / "complete")
    arrays = checkpoint.read(GOLDEN / "complete" / CHECKPOINT_FILE).arrays
    added = set(tree.paths(run.state)) - set(arrays)
    empty = {
        name
        for name in added
        if name.startswith(("embedding.", "bellman_ford."))
    }
    assert {"embedding.entity", "bellman_ford.asked"} < empty
    added -= empty
    assert added and all(name.startswith("start_params.") for name in added)
    fresh = run_start.prepare_run(
        run.run_config, GOLDEN / "complete", resume=False
    )
    assert torch.equal(
        tree.ravel(run.state.start_params), tree.ravel(fresh.state.start_params)
    )
    assert not torch.equal(
        tree.ravel(run.state.start_params), tree.ravel(run.state.best_params)
    )


@pytest.mark.parametrize("version", [3, 10])
def test_a_newer_format_is_one_clear_error(version, tmp_path):
    message = f"expected a format version up to 2, got {version}: written by a newer version of funcppo$"
    config = json.loads((GOLDEN / "complete" / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(
        json.dumps({"format": version} | config)
    )
    with pytest.raises(ValueError, match=f"{CONFIG_FILE}: {message}"):
        read_config(tmp_path)

    checkpoint.save(
        tmp_path / CHECKPOINT_FILE, (torch.zeros(1),), {"format": version}
    )
    with pytest.raises(ValueError, match=f"{CHECKPOINT_FILE}: {message}"):
        checkpoint.read(tmp_path / CHECKPOINT_FILE)

    (tmp_path / METRICS_FILE).write_text(json.dumps({"format": version}) + "\n")
    with pytest.raises(ValueError, match=f"{METRICS_FILE}: {message}"):
        metrics_log.read(tmp_path / METRICS_FILE)


@pytest.mark.parametrize("version", [0, -1, "2", 2.0, None, True])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(
        ValueError, match="expected a format version from 1 to 2, got"
    ):
        formats.check_format(Path("config.json"), version)
    assert formats.check_format(Path("config.json"), 1) == 1
