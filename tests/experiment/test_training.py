"""Training runs: resumed bit for bit, validated at the right updates, stopped where numbers are not finite."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from funcppo import data, tree
from funcppo.config import PPOConfig
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.evaluation.slot_scheduler import evaluate_step
from funcppo.experiment import checkpoint, metrics_log, training
from funcppo.experiment.config import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    RunConfig,
    write_config,
)
from funcppo.logic.triple_index import HEAD
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import COUNTRIES_REGIONS, ignore_phase
from funcppo.runtime import compile as compilation
from funcppo.runtime.monitor import Monitor
from funcppo.train_step import EAGER_PARTS

CONFIG = RunConfig(
    dataset="countries_s1",
    steps=64,
    strategy="eager",
    learner="proofs",
    score="best-proof",
    n_validations=2,
    n_validation_queries=3,
    prover=ProverTaskConfig(max_height=1, embed_dim=4, hidden_dim=4),
    ppo=PPOConfig(
        n_envs=4, n_steps=4, n_epochs=1, n_minibatches=2, learning_rate=0.01
    ),
)
N_UPDATES = 4  # 64 steps of 4 environments in rollouts of 4


@pytest.fixture
def run(tmp_path):
    return training.prepare_run(CONFIG, tmp_path, resume=False)


def trained(run, folder, stop_at=None):
    """The run after its last update, and the metrics of each; stopped after an update or in its validation."""
    captured, _ = training.prepare_train_step(run)
    rows = []
    for after, metrics in training.train(
        run,
        folder,
        captured,
        lambda: int(captured.state.update) == stop_at,
        Monitor(),
    ):
        run = after
        rows.append(metrics)
    return run, rows


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was trained to its end."""
    folder = tmp_path_factory.mktemp("run")
    write_config(CONFIG, folder)
    trained(training.prepare_run(CONFIG, folder, resume=False), folder)
    return folder


@pytest.mark.parametrize("last_update", [1, 2, 3])
def test_a_run_stopped_anywhere_resumes_bit_for_bit(
    last_update, uninterrupted, run, tmp_path
):
    trained(run, tmp_path, stop_at=last_update)
    resumed = training.prepare_run(CONFIG, tmp_path, resume=True)
    assert int(resumed.state.train_state.update) == last_update
    _, metrics = trained(resumed, tmp_path)
    assert len(metrics) == N_UPDATES - last_update

    whole = checkpoint.read(uninterrupted / CHECKPOINT_FILE).arrays
    arrays = checkpoint.read(tmp_path / CHECKPOINT_FILE).arrays
    assert set(arrays) == set(whole)
    for name in whole:
        assert np.array_equal(arrays[name], whole[name]), name
    rows = metrics_log.read(tmp_path / METRICS_FILE)
    whole_rows = metrics_log.read(uninterrupted / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
    for name in ("loss", "valid_metric", "best_valid_metric"):
        assert [row.get(name) for row in rows] == [
            row.get(name) for row in whole_rows
        ]


def test_validations_are_spread_evenly_and_the_last_update_has_one(
    uninterrupted,
):
    rows = metrics_log.read(uninterrupted / METRICS_FILE)
    validations = [row for row in rows if "valid_metric" in row]
    assert [row["update"] for row in validations] == [0, 2, 4]
    assert all(row["seconds"] > 0 for row in rows[1:])


def test_every_validation_has_its_metric_and_the_best_so_far_in_the_log(
    run, monkeypatch, tmp_path
):
    quality = iter([0.25, 0.5, 0.125])
    monkeypatch.setattr(
        training, "evaluate_policy", lambda *_, **__: {"auc_pr": next(quality)}
    )
    trained(run, tmp_path)
    rows = metrics_log.read(tmp_path / METRICS_FILE)
    assert [
        (row["valid_metric"], row["best_valid_metric"], row["best_update"])
        for row in rows
        if "valid_metric" in row
    ] == [(0.25, 0.25, 0), (0.5, 0.5, 2), (0.125, 0.5, 2)]


def test_without_valid_queries_the_log_has_no_metric_of_valid(run, tmp_path):
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    task = replace(run.task, dataset=dataset)
    trained(replace(run, task=task), tmp_path)
    rows = metrics_log.read(tmp_path / METRICS_FILE)
    assert {row.get("valid_metric") for row in rows} == {None}


def test_a_yielded_run_is_at_the_update_just_made(run, tmp_path):
    captured, _ = training.prepare_train_step(run)
    updates = []
    for after, _ in training.train(
        run, tmp_path, captured, lambda: False, Monitor()
    ):
        updates.append(int(after.state.train_state.update))
        assert after.state.train_state is captured.state
    assert updates == [1, 2, 3, 4]


def test_the_best_parameters_are_kept_while_training_continues(
    run, monkeypatch, tmp_path
):
    """Valid quality 0.1 before training, 0.5 after update 2, 0.2 after update 4."""
    quality = iter([0.1, 0.5, 0.2])
    monkeypatch.setattr(
        training, "evaluate_policy", lambda *_, **__: {"auc_pr": next(quality)}
    )
    captured, _ = training.prepare_train_step(run)
    params = [tree.ravel(run.state.train_state.params)]
    for after, _ in training.train(
        run, tmp_path, captured, lambda: False, Monitor()
    ):
        run = after
        params.append(tree.ravel(run.state.train_state.params))
    assert (
        int(run.state.best_update) == 2
        and float(run.state.best_valid_metric) == 0.5
    )
    assert torch.equal(
        tree.ravel(run.state.best_params), params[2]
    ) and not torch.equal(params[2], params[4])


@pytest.mark.parametrize(
    ("metric", "best", "is_better"),
    [
        (0.25, 0.5, False),
        (0.5, 0.5, False),
        (0.75, 0.5, True),
        (0.7, 0.7, False),  # 0.7 is above its float32 value
    ],
)
def test_only_a_better_metric_replaces_the_best(
    metric, best, is_better, run, monkeypatch
):
    monkeypatch.setattr(
        training, "evaluate_policy", lambda *_, **__: {"auc_pr": metric}
    )
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.train_state.params),
        update=torch.tensor(9),
    )
    before = run.state._replace(
        train_state=moved, best_valid_metric=torch.tensor(best)
    )
    validated, valid_metric = training.validate(replace(run, state=before))
    after = validated.state
    assert valid_metric == float(torch.tensor(metric))
    assert torch.equal(after.best_valid_metric, torch.tensor(max(metric, best)))
    assert int(after.best_update) == (9 if is_better else 0)
    params = moved.params if is_better else before.best_params
    assert torch.equal(tree.ravel(after.best_params), tree.ravel(params))


def test_queries_that_cannot_be_ranked_are_refused_before_training(tmp_path):
    """Under the name of Countries, tails are ranked among the regions; lyon is none."""
    folder = tmp_path / "countries_of_cities"
    folder.mkdir()
    (folder / "train.txt").write_text(
        "".join(f"paris\tin\t{region}\n" for region in COUNTRIES_REGIONS)
    )
    (folder / "rules.txt").write_text("in(X, Y) :- in(Y, X)\n")
    run_config = replace(CONFIG, dataset=str(folder), score="auto")
    good = "lyon\tin\teurope\n"
    for name in ("valid", "test"):
        (folder / "valid.txt").write_text(good)
        (folder / "test.txt").write_text(good)
        (folder / f"{name}.txt").write_text(f"{good}paris\tin\tlyon\n")
        message = f"^countries_of_cities: {name}: expected an answer among the 5 candidates, got query 1"
        with pytest.raises(ValueError, match=message):
            training.prepare_run(run_config, tmp_path / "run", resume=False)
    (folder / "test.txt").write_text(good)
    training.prepare_run(run_config, tmp_path / "run", resume=False)


def test_a_policy_is_not_evaluated_on_queries_that_cannot_be_ranked(run):
    with pytest.raises(ValueError, match="answer among the 5 candidates"):
        training.evaluate_policy(
            run,
            run.state.best_params,
            run.task.dataset.test,
            RankingProtocol(sides=(HEAD,)),
        )


def test_without_valid_queries_the_last_parameters_are_kept(run):
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.train_state.params),
        update=torch.tensor(9),
    )
    run = replace(
        run,
        task=replace(run.task, dataset=dataset),
        state=run.state._replace(train_state=moved),
    )
    validated, valid_metric = training.validate(run)
    after = validated.state
    assert valid_metric is None
    assert (
        int(after.best_update) == 9 and float(after.best_valid_metric) == -1.0
    )
    assert torch.equal(tree.ravel(after.best_params), tree.ravel(moved.params))
    assert (
        tree.leaves(after.best_params)[0].data_ptr()
        != tree.leaves(moved.params)[0].data_ptr()
    )


def test_a_run_with_infinite_rewards_stops_and_keeps_its_last_good_checkpoint(
    monkeypatch, tmp_path
):
    """Targets are infinite from update 2 on; two bad updates in a row are allowed."""
    n_calls = 0

    def poisoned(*args):
        nonlocal n_calls
        n_calls += 1
        batch, metrics = EAGER_PARTS.build_batch(*args)
        factor = 1.0 if n_calls < 2 else float("inf")
        return batch._replace(value_target=batch.value_target * factor), metrics

    config = replace(CONFIG, max_nonfinite_updates=2, n_validations=4)
    run = training.prepare_run(config, tmp_path, resume=False)
    monkeypatch.setattr(
        training, "EAGER_PARTS", replace(EAGER_PARTS, build_batch=poisoned)
    )
    message = r"not finite in each of the 2 updates up to 3; .*checkpoint\.npz holds update 1"
    with pytest.raises(training.DivergenceError, match=message):
        trained(run, tmp_path)
    arrays = checkpoint.read(tmp_path / CHECKPOINT_FILE).arrays
    assert int(arrays["train_state.update"]) == 1
    assert all(
        np.isfinite(array).all()
        for array in arrays.values()
        if array.dtype.kind == "f"
    )
    rows = metrics_log.read(tmp_path / METRICS_FILE)
    assert rows.pop(0)["update"] == 0
    assert [row["n_nonfinite_minibatches"] for row in rows] == [0, 2, 2]
    assert [row["n_applied_minibatches"] for row in rows] == [2, 0, 0]


@pytest.mark.parametrize(
    ("steps", "strategy", "selected"),
    [
        (5_100_000, "auto", "eager"),
        (5_120_000, "auto", "auto"),
        (1, "one-graph", "one-graph"),
    ],
)
def test_a_run_is_compiled_if_it_is_long_or_a_strategy_is_set(
    steps, strategy, selected, run, monkeypatch
):
    """By hand: an update has 8 rollout steps and 2 * 4 minibatches, and 5,120,000 / (256 * 8) updates make 40,000."""
    asked = []

    def select_strategy(*args, tolerance):
        asked.append(args[-1])
        raise LookupError

    monkeypatch.setattr(compilation, "select_strategy", select_strategy)
    run_config = replace(
        CONFIG, steps=steps, strategy=strategy, ppo=RunConfig(dataset="").ppo
    )
    cfg = training._learner_config(run_config, run.task)
    with pytest.raises(LookupError):
        training.prepare_train_step(
            replace(run, run_config=run_config, cfg=cfg)
        )
    assert asked == [selected]


def test_the_initial_parameters_are_those_of_a_fresh_run(run, uninterrupted):
    params = tree.ravel(training.open_run(uninterrupted).state.start_params)
    assert torch.equal(params, tree.ravel(run.state.best_params))
    assert not torch.equal(
        params,
        tree.ravel(training.open_run(uninterrupted).state.train_state.params),
    )


def test_the_number_of_updates_is_rounded_up_to_whole_rollouts(run):
    assert [
        training._learner_config(
            replace(CONFIG, steps=steps), run.task
        ).ppo.n_updates
        for steps in (1, 16, 17)
    ] == [1, 1, 2]


@pytest.mark.parametrize(
    ("success", "best_proof", "chosen"),
    [(0.5, 0.4, "success"), (0.4, 0.5, "best-proof")],
)
def test_the_score_that_ranks_valid_better_is_chosen(
    success, best_proof, chosen, run, monkeypatch
):
    mrr = {"success": success, "best-proof": best_proof}
    run = replace(run, run_config=replace(CONFIG, score="auto"))
    monkeypatch.setattr(
        training, "evaluate_policy", lambda *args: {"mrr": mrr[args[4]]}
    )
    scored = training._choose_score(run, ignore_phase)
    assert (scored.run.score, scored.mrr) == (chosen, max(mrr.values()))
    assert scored.notes == [
        f"score {chosen} chosen by MRR on 3 valid queries: success {success:.4f}, best-proof {best_proof:.4f}"
    ]


def test_equal_scores_choose_success_and_a_set_score_is_taken(run, monkeypatch):
    monkeypatch.setattr(training, "evaluate_policy", lambda *_: {"mrr": 0.5})
    is_open = replace(run, run_config=replace(CONFIG, score="auto"))
    assert training._choose_score(is_open, ignore_phase).run.score == "success"
    as_set = training._choose_score(run, ignore_phase)
    assert (as_set.run.score, as_set.notes) == ("best-proof", [])


def open_settings(**fields):
    """A config whose height, smoothing and object identity are open."""
    prover = dataclasses.replace(
        CONFIG.prover,
        max_height=None,
        smoothing="auto",
        object_identity="auto",
        **fields,
    )
    return replace(CONFIG, prover=prover)


def test_a_new_run_holds_the_settings_that_were_chosen(tmp_path):
    run = training.prepare_run(open_settings(), tmp_path, resume=False)
    prover = run.run_config.prover
    assert prover.max_height == run.task.max_height
    assert prover.smoothing != "auto"
    assert isinstance(prover.object_identity, bool)
    assert run.run_config.rule_score != "auto"
    assert run.run_config == replace(
        open_settings(), prover=prover, rule_score=run.run_config.rule_score
    )
    assert any(note.startswith("height ") for note in run.notes)


@pytest.mark.parametrize(
    ("mrr", "height"),
    [
        ({1: 0.5, 2: 0.4, 3: 0.9}, 1),  # 3 is not tried after 2 is worse
        ({1: 0.5, 2: 0.6, 3: 0.6}, 2),
        ({1: 0.5, 2: 0.6, 3: 0.7}, 3),
    ],
)
def test_the_policy_chooses_among_the_heights(
    mrr, height, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        training,
        "evaluate_policy",
        lambda run, *_: {"mrr": mrr[run.task.max_height]},
    )
    config = replace(open_settings(), dataset="countries_s3")
    run = training.prepare_run(config, tmp_path, resume=False)
    assert run.task.max_height == height


def test_negatives_are_derived_where_t_p_is_held_in_part(tmp_path):
    dataset = "family_tree:60:3"
    n_facts = len(data.load(dataset).facts)
    prover = replace(CONFIG.prover, max_atoms=n_facts + 1)
    config = replace(CONFIG, dataset=dataset, prover=prover)
    run = training.prepare_run(config, tmp_path, resume=False)
    assert run.run_config.prover.hard_negative_fraction == 1.0
    assert any(note.startswith("all negatives are") for note in run.notes)
    trained(run, tmp_path)

    # What is set stays, and none are needed without negatives.
    for change in (
        {"hard_negative_fraction": 0.5},
        {"negatives_per_positive": 0},
        {"max_atoms": 1000 * n_facts},
    ):
        config = replace(
            CONFIG, dataset=dataset, prover=replace(prover, **change)
        )
        if "hard_negative_fraction" in change:
            with pytest.raises(ValueError, match="hard-negative-fraction 1"):
                training.prepare_run(config, tmp_path, resume=False)
            continue
        run = training.prepare_run(config, tmp_path, resume=False)
        assert run.run_config.prover == config.prover


@pytest.mark.parametrize(
    "bound", ["MAX_VALIDATION_SUCCESSORS", "MAX_TRIAL_SUCCESSORS"]
)
def test_a_height_whose_search_is_too_long_is_not_tried(
    bound, tmp_path, monkeypatch
):
    """By the rough count before the search, and by the count of what a search computes."""
    monkeypatch.setattr(training, bound, 1)
    config = replace(open_settings(), dataset="countries_s3")
    run = training.prepare_run(config, tmp_path, resume=False)
    assert run.task.max_height == 1
    assert any(
        note.startswith("height 2 not tried: a search for ")
        for note in run.notes
    )


def test_the_rough_count_of_a_search_is_of_the_valid_queries_there_are(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "MAX_VALIDATION_SUCCESSORS", 1)
    monkeypatch.setattr(training, "MIN_VALIDATION_QUERIES", 10**6)
    config = replace(open_settings(), dataset="countries_s3")
    run = training.prepare_run(config, tmp_path, resume=False)
    assert any("a search for 24 valid queries" in note for note in run.notes)


def test_a_trial_of_a_height_counts_the_places_of_its_tables(
    tmp_path, monkeypatch
):
    """A bound of what the searches of height 2 compute admits it, one less does not."""
    counts = []

    def counted_step(cfg, *inputs):
        counts.append(cfg.rows_per_step * cfg.resolve.max_successors)
        return evaluate_step(cfg, *inputs)

    monkeypatch.setattr(
        training.scorers, "make_search_step", lambda _: counted_step
    )
    config = replace(
        open_settings(), dataset="countries_s2", n_validation_queries=24
    )
    run = training.prepare_run(
        replace(config, prover=replace(config.prover, max_height=2)),
        tmp_path,
        resume=False,
    )
    assert run.task.max_height == 2
    bound = sum(counts)
    for limit, is_tried in ((bound, True), (bound - 1, False)):
        monkeypatch.setattr(training, "MAX_TRIAL_SUCCESSORS", limit)
        run = training.prepare_run(config, tmp_path, resume=False)
        notes = "; ".join(run.notes)
        assert ("height 2 not tried" not in notes) == is_tried


def test_a_validation_ranks_fewer_queries_where_a_search_is_long(
    tmp_path, monkeypatch
):
    prover = dataclasses.replace(CONFIG.prover, max_height=2)
    config = replace(
        CONFIG, dataset="countries_s2", prover=prover, n_validation_queries=24
    )
    whole = training.prepare_run(config, tmp_path, resume=False)
    assert len(training.validation_queries(whole)) == 24
    n_successors = 35 * training._n_search_successors(
        whole.cfg.env.cfg.resolve.max_successors, 2
    )  # 35 candidates are derived
    monkeypatch.setattr(
        training, "MAX_VALIDATION_SUCCESSORS", n_successors * 22 / 24
    )
    part = training.prepare_run(config, tmp_path, resume=False)
    assert len(training.validation_queries(part)) == 22
    assert any("ranks 22 of 24 valid queries" in note for note in part.notes)


def test_a_validation_by_rules_ranks_fewer_queries_where_it_is_long(
    tmp_path, monkeypatch
):
    config = replace(CONFIG, dataset="countries_s2", n_validation_queries=24)
    whole = training.prepare_run(config, tmp_path, resume=False)
    queries = training.validation_queries(whole)
    protocol = RankingProtocol(sides=training.ranked_sides(whole.task))
    n_successors = training.ranking.count_candidates(
        whole.task, queries, protocol
    ) * (whole.cfg.env.cfg.resolve.max_successors)
    assert len(queries) == 24 and whole.task.fact_selection == "oracle"
    name = "MAX_VALIDATION_SUCCESSORS_BY_RULES"
    for bound, n_queries in ((n_successors, 24), (n_successors * 22 / 24, 22)):
        monkeypatch.setattr(training, name, bound)
        part = training.prepare_run(config, tmp_path, resume=False)
        assert len(training.validation_queries(part)) == n_queries
        noted = any("ranks 22 of 24" in note for note in part.notes)
        assert noted == (n_queries < 24)


def test_the_search_settings_bound_rows_and_successors(run):
    """By hand: 4096 successors in all, at most 512 rows, 16 times as many on a GPU, not below the beam of 64."""
    env_cfg = run.cfg.env.cfg

    def settings(max_successors, score, device="cpu"):
        resolve = replace(env_cfg.resolve, max_successors=max_successors)
        cfg = replace(
            run.cfg,
            env=replace(run.cfg.env, cfg=replace(env_cfg, resolve=resolve)),
        )
        run_config = replace(CONFIG, device=device)
        config = training.run_search_config(
            replace(run, cfg=cfg, run_config=run_config), score
        )
        return config.rows_per_step, config.beam, config.slots

    assert settings(4, "success") == (512, 64, 256)
    assert settings(16, "success") == (256, 64, 128)
    assert settings(1024, "best-proof") == (64, 64, 32)
    assert settings(1024, "greedy") == (4, 1, 4)
    assert settings(16, "success", "cuda") == (16 * 256, 64, 16 * 128)


def test_validation_queries_are_a_fixed_sample(run):
    first, again = (
        training.validation_queries(run),
        training.validation_queries(run),
    )
    assert len(first) == 3 and np.array_equal(first, again)
    assert {tuple(query) for query in first} <= {
        tuple(query) for query in data.load("countries_s1").valid
    }
