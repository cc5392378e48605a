"""What a report measures of a run: ranks of an evaluation, rules, learnt weights, single queries, files and notes."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.ranking import explain
from funcppo.kg.run.run import open_run
from funcppo.kg.show import measure, report

# -- ranks


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_ranks_are_those_of_evaluate(runs, reports, name):
    evaluated = fp.open(runs[name]).evaluate("test")
    trained = reports[name].trained
    for metric in ("mrr", "hits@1", "hits@10", "ceiling", "n_queries"):
        assert trained[metric] == evaluated[metric]


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_single_queries_have_the_ranks_of_the_results(runs, reports, name):
    """All of test is shown, so that the mean of their reciprocal ranks is the recorded MRR without ties."""
    evaluation = reports[name].trained["by_group"]["all"]["both"]["mrr"]
    sides = [x for entry in reports[name].entries for x in entry["sides"]]
    assert len(sides) == reports[name].trained["n_queries"]
    ranks = np.array([side["rank"] for side in sides])
    assert (1 / ranks).mean() <= evaluation["expected"] + 1e-12
    best = np.array([1 + side["n_better"] for side in sides])
    assert (1 / best).mean() == pytest.approx(evaluation["optimistic"])


def test_a_run_whose_time_ended_before_what_is_learnt_was_ranked(
    runs, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(runs["questions"], folder)
    path = folder / "results.json"
    results = json.loads(path.read_text())
    names = [x for x in results["test"] if "trained" not in x and x != "fit"]
    results["test"] = {name: results["test"][name] for name in names}
    path.write_text(json.dumps(results))
    found = measure.measure(open_run(folder), folder, n_queries=2)
    text, tables = report.render(found)
    assert tables["results"][0]["score"] == names
    assert "by evidence, untrained" in tables["relations"]["problem"]
    assert "Not drawn: relations" in text


# -- rules


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_a_rule_is_used_where_it_is_the_last_step(runs, name):
    task = open_run(runs[name]).task
    atoms = torch.from_numpy(task.dataset.test).long()
    proofs = explain.smallest_proofs(task, atoms)
    uses = measure.count_uses(task, proofs)
    n_found = sum(proof is not None for proof in proofs)
    assert sum(use["last_step_of"] for use in uses) == n_found > 0
    smoothing = task.cfg.smoothing or 0.0
    counts = {
        format_rule(task.dataset, ids): (support, pairs - smoothing)
        for ids, support, pairs in zip(
            task.dataset.rules,
            task.kb.support.tolist(),
            task.kb.body_pairs.tolist(),
        )
    }
    for use in uses:
        support, pairs = counts[use["rule"]]
        assert (use["right_in_train"], use["of"]) == (support, pairs)
        assert use["confidence"] == pytest.approx(support / pairs)
    n_proofs = [use["last_step_of"] for use in uses]
    assert n_proofs == sorted(n_proofs, reverse=True)


# -- single queries


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_entries_say_why_and_why_not(reports, name):
    entries = reports[name].entries
    assert len(entries) == 14
    failed = [entry for entry in entries if entry["status"] == "no proof"]
    assert len(failed) == 2
    for entry in failed:
        assert entry["failure"]["n_matching_rules"] == 0
        assert all(side["score"] == 0 for side in entry["sides"])
    for entry in entries:
        if entry["status"] == "derived":
            assert "by rule" in entry["proof"][0]
            has_evidence = "log-odds" in "".join(entry["proof"])
            assert has_evidence == (name == "questions")


# -- files, notes and data


def test_a_run_is_measured_with_its_log_results_and_notes(reports):
    run = reports["questions"]
    assert run.is_trained and run.update == run.n_updates == 0
    assert run.sizes["test"] == run.n_ranked == 14
    assert run.log == ()
    assert run.results["versions"]["torch"]
    assert len(set(run.notes)) == len(run.notes)
    assert run.metrics == run.results["test"]
    proofs = reports["proofs"]
    assert proofs.is_trained and proofs.update == proofs.n_updates == 4
    assert [row["update"] for row in proofs.log][-1] == 4
    names = dict(reports["other"].changed_settings)
    assert names["seed"] == "1" and names["ppo.n_envs"] == "8"
    assert "ppo.gamma" not in names


def test_a_run_that_is_ranked_by_rules_says_so_before_the_numbers(runs):
    folder = runs["questions"]
    run = open_run(folder)
    metric = run.state.best_valid_metric * 0 + 0.25
    state = run.state._replace(best_valid_metric=metric)
    for is_better in (False, True):
        judged = dataclasses.replace(
            run, state=state, rule_metric=0.2, is_learnt_better=is_better
        )
        html, _ = report.render(measure.measure(judged, folder))
        line = "predict and serve: answers are ranked by the rule score"
        assert (line in html) != is_better


def test_missing_and_damaged_files_are_said(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["proofs"], folder)
    (folder / "results.json").unlink()
    run = open_run(folder)
    found = measure.measure(run, folder)
    assert found.results == {} and found.is_trained
    # it is ranked as the end of its training ranked it
    results = json.loads((runs["proofs"] / "results.json").read_text())
    mrr = {name: of["mrr"] for name, of in results["test"].items()}
    again = {name: of["mrr"] for name, of in found.metrics.items()}
    assert again == pytest.approx(mrr)
    notes = "\n".join(found.notes)
    assert "results.json is missing" in notes

    (folder / "metrics.jsonl").unlink()
    notes = "\n".join(measure.measure(run, folder).notes)
    assert "metrics.jsonl is missing" in notes
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        measure.measure(run, folder)
