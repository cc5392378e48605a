"""What a report measures of a run: ranks of an evaluation, rules, learnt weights, single queries, files and notes."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import explain
from funcppo.kg.run import held_out
from funcppo.kg.run.run import build_run, open_run
from funcppo.kg.show import measure, report
from tests.kg.show.graphs import ALSO, LIKES, write_graph

# -- ranks


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_ranks_are_those_of_evaluate(runs, reports, name):
    evaluated = fp.open(runs[name]).evaluate("test")
    trained = reports[name].trained
    for metric in ("mrr", "hits@1", "hits@10", "ceiling", "n_queries"):
        assert trained[metric] == evaluated[metric]


def test_fewer_queries_are_ranked_if_asked_for(runs):
    folder = runs["questions"]
    run = open_run(folder)
    ranked = measure.rank_test(run, np.arange(3))
    assert len(ranked.queries) == 3 and len(ranked.side) == 6
    found = measure.measure(run, folder, max_ranked=0, n_queries=5)
    assert found.metrics == found.bins == {} and found.rules == ()
    assert found.n_ranked == 0


def test_ranks_are_the_same_where_queries_derive_them(runs, monkeypatch):
    """In parts, whose queries are in another order."""
    held = open_run(runs["questions"])
    prover = dataclasses.replace(
        held.run_config.prover, max_atoms=len(held.task.kb.facts) + 1
    )
    config = dataclasses.replace(held.run_config, prover=prover)
    bare = build_run(config, held.task.dataset)
    assert bare.task.answers_plan is not None
    bare = dataclasses.replace(
        bare,
        questions=held.questions,
        state=held.state,
        step_names=held.step_names,
    )
    monkeypatch.setattr(held_out, "FIRST_ROUND", 3)

    rows = np.arange(14)
    found, expected = (measure.rank_test(run, rows) for run in (bare, held))
    for ranked in (found, expected):
        assert ranked.side.tolist() == [HEAD] * 14 + [TAIL] * 14
    assert by_query(found) == by_query(expected)
    for state, bins in expected.bins.items():
        assert found.bins[state].n.tolist() == bins.n.tolist()
    for name, metrics in expected.metrics.items():
        assert found.metrics[name]["mrr"] == metrics["mrr"]


def by_query(ranked):
    """All numbers of each query and side."""
    columns = (
        ranked.side,
        ranked.provable,
        ranked.answer_score,
        *ranked.counts,
    )
    atoms = [*ranked.queries.tolist()] * 2
    rows = zip(atoms, *(column.tolist() for column in columns), strict=True)
    return sorted(rows)


# -- rules


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_a_rule_is_used_where_it_is_the_last_step(runs, name):
    task = open_run(runs[name]).task
    atoms = torch.from_numpy(task.dataset.test).long()
    proofs = explain.smallest_proofs(task, atoms)
    uses = measure.count_uses(task, proofs)
    n_found = sum(proof is not None for proof in proofs)
    assert sum(use.n_proofs for use in uses) == n_found > 0
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
        assert (use.support, use.body_pairs) == counts[use.text]


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
            has_evidence = all(side["evidence"] for side in entry["sides"])
            assert has_evidence == (name == "questions")
        for side in entry["sides"]:
            assert len(side["better"]) == min(side["n_better"], 5)
            assert all(b["score"] > side["score"] for b in side["better"])


# -- files, notes and data


def test_a_run_is_measured_with_its_log_results_and_notes(reports):
    run = reports["questions"]
    assert run.is_trained and run.update == run.n_updates == 0
    assert run.sizes["test"] == run.n_ranked == 14
    assert run.log == ()
    assert run.results["versions"]["torch"]
    assert len(set(run.notes)) == len(run.notes)
    assert list(run.metrics)[1] == "evidence, untrained"
    proofs = reports["proofs"]
    assert proofs.is_trained and proofs.update == proofs.n_updates == 4
    assert [row["update"] for row in proofs.log][-1] == 4
    assert any("no CUDA graph in training" in note for note in proofs.notes)
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
        html, _ = report.render([measure.measure(judged, folder, max_ranked=1)])
        line = "predict and serve: answers are ranked by the rule score"
        assert (line in html) != is_better


def test_missing_and_damaged_files_are_said(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["proofs"], folder)
    (folder / "results.json").unlink()
    run = open_run(folder)
    found = measure.measure(run, folder, max_ranked=1)
    assert found.results == {} and found.is_trained
    notes = "\n".join(found.notes)
    assert "results.json is missing" in notes

    (folder / "metrics.jsonl").unlink()
    notes = "\n".join(measure.measure(run, folder, max_ranked=1).notes)
    assert "metrics.jsonl is missing" in notes
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        measure.measure(run, folder)


def test_other_data_are_refused_and_another_path_is_not(runs, tmp_path):
    copies = {}
    for name in ("same", "other"):
        graph = write_graph(tmp_path / name / "graph")
        shutil.copytree(runs["questions"], tmp_path / name / "run")
        config = tmp_path / name / "run" / "config.json"
        old = str(runs["questions"].parent / "graph")
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, str(graph)))
        copies[name] = tmp_path / name / "run"
    # longer rules make other tables, not other data
    with (tmp_path / "same" / "graph" / "rules.txt").open("a") as file:
        file.write(
            f"'{ALSO}'(X, Y) :- '{LIKES}'(X, Z), '{LIKES}'(Z, W), '{LIKES}'(W, Y).\n"
        )
    with (tmp_path / "other" / "graph" / "train.txt").open("a") as file:
        file.write("e1\t<b>likes</b>\te1\n")
    measure.check_same_data([runs["questions"], copies["same"]])
    with pytest.raises(ValueError, match="other triples"):
        measure.check_same_data([runs["questions"], copies["other"]])
