"""The programs `train` and `evaluate`, run in this process as a user would run them."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from funcppo import cli, tree
from funcppo.data import load
from funcppo.evaluation import scorers
from funcppo.evaluation.slot_scheduler import evaluate_step
from funcppo.experiment import checkpoint, training
from funcppo.experiment.config import RunConfig
from funcppo.runtime.equivalence import BF16_TOLERANCE, DEFAULT_TOLERANCE
from funcppo.runtime.graphed import GraphedStep
from funcppo.runtime.monitor import Monitor
from funcppo.train_step import EAGER_PARTS
from tests.runtime.test_capture import on_gpu

SMALL = ["--ppo.n-envs", "8", "--ppo.n-steps", "4", "--ppo.n-minibatches", "2", "--prover.embed-dim", "4"]
SMALL += ["--prover.hidden-dim", "8", "--n-validations", "2", "--n-validation-queries", "6", "--score", "best-proof"]


def funcppo(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["funcppo", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert (
            funcppo(monkeypatch, "train", "countries_s1", "--out", out, "--steps", "128", "--strategy", "eager", *SMALL)
            == 0
        )
    return out


def test_a_run_leaves_its_config_metrics_checkpoint_and_results(trained):
    rows = [json.loads(line) for line in (trained / training.METRICS_FILE).read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    assert training.read_config(trained).steps == 128
    results = json.loads((trained / training.RESULTS_FILE).read_text())
    assert 0 < results["seconds"] < results["seconds_in_all"]
    assert set(results["test"]) == {
        "exists@1", "max-confidence", "noisy-or", "best-proof, untrained", "best-proof, trained"
    }  # fmt: skip
    assert all(0.0 < row["mrr"] <= 1.0 and "auc_pr" in row for row in results["test"].values())


def test_a_resumed_run_continues_bit_for_bit(trained, tmp_path):
    """The first half of the same run, stopped by an interrupt after update 2, then resumed."""
    whole, _ = checkpoint.read(trained / training.CHECKPOINT_FILE)
    config = training.read_config(trained)
    training.write_config(config, tmp_path)
    run = training.prepare_run(config, tmp_path, resume=False)
    stops = iter([False, True])
    for _ in training.train(run, tmp_path, training.prepare_train_step(run)[0], lambda: next(stops), Monitor()):
        pass
    again = training.prepare_run(config, tmp_path, resume=True)
    assert int(again.state.train_state.update) == 2
    for _ in training.train(again, tmp_path, training.prepare_train_step(again)[0], lambda: False, Monitor()):
        pass
    resumed, _ = checkpoint.read(tmp_path / training.CHECKPOINT_FILE)
    assert set(resumed) == set(whole)
    for name in whole:
        assert np.array_equal(resumed[name], whole[name]), name
    updates = [json.loads(line)["update"] for line in (tmp_path / training.METRICS_FILE).read_text().splitlines()]
    assert updates == [1, 2, 3, 4]


@pytest.mark.parametrize(("steps", "chosen"), [(120_000, "eager"), (5_100_000, "eager"), (5_200_000, "auto")])
def test_a_run_is_compiled_where_it_is_long_enough_to_repay_that(steps, chosen, trained, monkeypatch, tmp_path):
    """From 40,000 rollout steps and minibatches on, which are 5.12 million environment steps at the default sizes."""
    config = replace(training.read_config(trained), steps=steps, strategy="auto", ppo=RunConfig(dataset="").ppo)
    run = training.prepare_run(config, tmp_path, resume=False)

    def ask(*args, parity):
        raise LookupError(f"asked for {args[-1]} within {parity}")

    monkeypatch.setattr(training.ladder, "select_strategy", ask)
    for precision, parity in (
        ("highest", DEFAULT_TOLERANCE),
        ("high", DEFAULT_TOLERANCE),
        ("bfloat16", BF16_TOLERANCE),
    ):
        with pytest.raises(LookupError, match=f"asked for {chosen} within {parity}"):
            training.prepare_train_step(replace(run, run_config=replace(run.run_config, precision=precision)))


def test_the_best_params_are_kept_while_the_state_moves_on(trained, monkeypatch, tmp_path):
    """Valid quality peaks at update 2 of 4; the state's own leaves are overwritten by updates 3 and 4."""
    run = training.prepare_run(training.read_config(trained), tmp_path, resume=False)
    quality = iter([0.1, 0.5, 0.2])
    monkeypatch.setattr(training, "evaluate_policy", lambda *_: {"auc_pr": next(quality)})
    params = []
    captured = training.prepare_train_step(run)[0]
    for after, _ in training.train(run, tmp_path, captured, lambda: False, Monitor()):
        run = after
        params.append(tree.ravel(run.state.train_state.params))
    assert int(run.state.best_update) == 2 and float(run.state.best_valid_metric) == 0.5
    assert torch.equal(tree.ravel(run.state.best_params), params[1]) and not torch.equal(params[1], params[3])


def test_evaluate_reports_the_documented_keys(trained, monkeypatch, capsys, tmp_path):
    details = tmp_path / "ranks.jsonl"
    assert funcppo(monkeypatch, "evaluate", trained, "--json", "-", "--details", details) == 0
    result = json.loads(capsys.readouterr().out)
    keys = ("mrr", "hits@1", "hits@3", "hits@10", "n_tied", "ceiling", "n_queries", "n_candidates", "seconds", "score")
    assert all(key in result for key in keys)
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    expected = [np.mean([1 / (x["n_better"] + 1 + i) for i in range(x["n_equal"] + 1)]) for x in lines]
    assert result["mrr"] == pytest.approx(np.mean(expected), abs=1e-12)
    proved = [line for line in lines if line["status"] == "proved"]
    assert proved and all(0 < line["proof"]["nodes"][0]["probability"] <= 1 for line in proved)


@pytest.mark.parametrize("score", ["exists@1", "max-confidence", "noisy-or@3", "greedy", "success"])
def test_every_score_can_be_asked_for(trained, monkeypatch, capsys, score):
    args = ("evaluate", trained, "--score", score, "--negatives", "3", "--split", "valid", "--json", "-")
    assert funcppo(monkeypatch, *args) == 0
    assert json.loads(capsys.readouterr().out)["score"] == score


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("train", "no_such_set", "--out", "{tmp}/x"), "no_such_set"),
        (("train", "countries_s1", "--out", "{run}"), "holds a run already"),
        (("train", "countries_s2", "--out", "{run}", "--resume"), "holds a run on countries_s1"),
        (("train", "countries_s1", "--out", "{tmp}/x", "--steps", "0"), "steps=0: want 1 or more"),
        (
            ("train", "countries_s1", "--out", "{tmp}/x", "--prover.hard-negative-fraction", "2"),
            "want a share from 0 to 1",
        ),
        (("train", "countries_s1", "--out", "{tmp}/x", "--ppo.n-minibatches", "7"), "n_minibatches=7: want a divisor"),
        (
            ("train", "countries_s1", "--out", "{tmp}/x", "--ppo.n-microbatches", "0"),
            "n_microbatches=0: want 1 or more",
        ),
        (("train", "countries_s1", "--out", "{tmp}/x", "--prover.max-height", "0"), "max_height=0: want 1 or more"),
        (("train", "countries_s1", "--out", "{run}/config.json"), "config.json: File exists"),
        (("train", "countries_s1", "--out", "{tmp}/x", "--strategy", "magic"), "strategy 'magic': want auto"),
        (("evaluate", "{run}", "--negatives", "-3"), "want all, or a number"),
        (("evaluate", "{run}", "--score", "loud"), "expected success, best-proof, greedy, exists@H"),
        (("evaluate", "{run}", "--object-identity"), "is a trained run, which has its own"),
        (("evaluate", "countries_s1", "--smoothing", "-1"), "smoothing=-1.0: want 0 or more"),
        (
            ("train", "countries_s2", "--out", "{tmp}/x", "--prover.max-height", "2", "--prover.object-identity"),
            "object_identity wants fact_selection=oracle, at height 1",
        ),
        (("evaluate", "countries_s1", "--score", "success"), "no trained run"),
        (("evaluate", "{tmp}"), "train.txt"),
        (("evaluate", "countries_s1", "--memory", "1MB"), "--memory 1000000: want at least"),
        (("evaluate", "{run}", "--memory", "1MB"), "--memory 1000000: expected at least"),
        (("train", "countries_s1", "--out", "{tmp}/x", "--steps", "abc"), "--steps: invalid literal"),
        (("train", "--out", "{tmp}/x"), "Missing from funcppo train"),
        (("train", "countries_s1", "--out", "{tmp}/x", "--lern", "3"), "Unrecognized options: --lern"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trained, monkeypatch, capsys, tmp_path, args, line):
    before = (trained / training.CHECKPOINT_FILE).read_bytes()
    filled = [a.format(tmp=tmp_path, run=trained) for a in args]
    assert (
        funcppo(monkeypatch, *filled, *(SMALL if args[0] == "train" and "--ppo.n-minibatches" not in args else ())) == 2
    )
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert line in error
    assert error.startswith("funcppo: ") and error.count("\n") == 1
    assert (trained / training.CHECKPOINT_FILE).read_bytes() == before


def test_a_checkpoint_of_another_data_set_or_shape_is_refused(trained, tmp_path):
    run = training.open_run(trained)
    path = trained / training.CHECKPOINT_FILE
    with pytest.raises(ValueError, match="made for another data set"):
        checkpoint.restore(path, run.state, load("countries_s2").fingerprint)
    term = run.state.best_params.term[:, :2]
    wrong = run.state._replace(best_params=run.state.best_params._replace(term_embedding=term))
    with pytest.raises(ValueError, match=r"best\.term: want .* got "):
        checkpoint.restore(path, wrong, run.task.dataset.fingerprint)
    (tmp_path / "c.npz").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="none or a damaged one"):
        checkpoint.read(tmp_path / "c.npz")


def test_a_run_whose_loss_is_not_finite_stops_with_the_last_good_checkpoint(monkeypatch, capsys, tmp_path):
    """A reward of infinity from update 2 on: nothing moves, three updates are waited for, update 1 stays on disk."""
    observe, calls = EAGER_PARTS.build_batch, []

    def poisoned(*args):
        batch, seen = observe(*args)
        calls.append(1)
        return batch._replace(value_target=batch.target * (1 if len(calls) < 2 else float("inf"))), seen

    monkeypatch.setattr(training, "EAGER_PARTS", replace(EAGER_PARTS, build_batch=poisoned))
    args = ("train", "countries_s1", "--out", tmp_path, "--steps", "256", "--max-nonfinite-updates", "3", *SMALL)
    assert funcppo(monkeypatch, *args, "--n-validations", "8") == 2
    line = " ".join(capsys.readouterr().err.split())
    assert "not finite in each of the 3 updates up to 4" in line and "checkpoint.npz holds update 1" in line
    saved, _ = checkpoint.read(tmp_path / training.CHECKPOINT_FILE)
    assert int(saved["state.update"]) == 1 and all(np.isfinite(x).all() for x in saved.values() if x.dtype.kind == "f")
    rows = [json.loads(row) for row in (tmp_path / training.METRICS_FILE).read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0, 4, 4, 4]


def test_watch_tells_what_compilers_and_graphs_did(monkeypatch, capsys, tmp_path):
    assert (
        funcppo(monkeypatch, "train", "countries_s1", "--out", tmp_path, "--steps", "64", "--log-compiles", *SMALL) == 0
    )
    out = capsys.readouterr().out
    line = next(row for row in " ".join(out.split()).split("watch: ")[1:])
    assert (
        "compiles 0, found 0, recompiles 0, recordings 0" in line
        and "fallback_reason no CUDA tensor in the state" in line
    )


def test_steps_that_are_not_replayed_on_a_gpu_are_told_with_the_reason(monkeypatch, capsys, tmp_path):
    """Here for want of a GPU."""
    monkeypatch.setattr(scorers, "make_search_step", lambda device: GraphedStep(evaluate_step))
    args = ("countries_s2", "--out", tmp_path, "--steps", "64", "--score", "best-proof", "--prover.max-height", "2")
    assert funcppo(monkeypatch, "train", *args, *SMALL) == 0
    assert funcppo(monkeypatch, "evaluate", tmp_path) == 0
    line = "steps of a search were not replayed as a CUDA graph: no CUDA tensor in the state"
    assert " ".join(capsys.readouterr().out.split()).count(line) == 2


@on_gpu
def test_a_short_run_on_a_gpu_records_two_turns_that_stay(monkeypatch, capsys, tmp_path):
    args = ("train", "countries_s1", "--out", tmp_path, "--steps", "128", "--device", "cuda")
    assert funcppo(monkeypatch, *args, "--log-compiles", *SMALL) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "strategy eager on cuda:0, replayed by: cuda-graph-per-loop-body; compiling would take longer" in out
    assert "cudagraph_recordings 2, cudagraph_rerecordings 0" in out and "warning" not in out
