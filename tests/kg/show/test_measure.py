"""What a report measures of a run: ranks of an evaluation, rules, learnt weights, single queries, files and notes."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.core import tree
from funcppo.kg import answers
from funcppo.kg.answers import Answerer, OpenQuery
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import explain
from funcppo.kg.run import held_out
from funcppo.kg.run.run import build_run, open_run
from funcppo.kg.run.subject import run_subject
from funcppo.kg.show import measure, report
from tests.kg.show.graphs import ALSO, INVERSE, LIKES, write_graph

# -- ranks


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_ranks_are_those_of_evaluate(runs, reports, name):
    evaluated = fp.open(runs[name]).evaluate("test")
    trained = reports[name].trained.metrics
    for metric in ("mrr", "hits@1", "hits@10", "ceiling", "n_queries"):
        assert trained[metric] == evaluated[metric]
    for rows in reports[name].ranked.values():
        mean = rows.reciprocal_rank.mean()
        assert mean == pytest.approx(rows.metrics["mrr"], rel=1e-12)


def test_fewer_queries_are_ranked_if_asked_for(runs):
    run = open_run(runs["questions"])
    ranked = measure.rank_test(run, 3)
    assert len(ranked.queries) == 3 and len(ranked.side) == 6
    none = measure.rank_test(run, 0)
    assert none.ranked == {} and len(none.side) == 0
    rows, proofs = measure.prove_queries(Answerer(run_subject(run)), none, 5)
    assert len(rows) == len(proofs) == 0


def test_ranks_are_the_same_where_queries_derive_their_answers(
    runs, monkeypatch
):
    """In parts, whose queries are in another order."""
    held = open_run(runs["questions"])
    prover = dataclasses.replace(
        held.run_config.prover, max_atoms=len(held.task.kb.facts) + 1
    )
    config = dataclasses.replace(held.run_config, prover=prover)
    bare = build_run(config, held.task.dataset)
    assert bare.task.answers_plan is not None
    bare = dataclasses.replace(bare, questions=held.questions, state=held.state)
    monkeypatch.setattr(held_out, "FIRST_CHUNK_QUERIES", 3)
    monkeypatch.setattr(held_out, "MAX_CHUNK_ANSWERS", 20)

    found, expected = (measure.rank_test(run, None) for run in (bare, held))
    n = found.n_queries
    for ranked in (found, expected):
        assert torch.equal(ranked.atom[:n], ranked.atom[n:])
        assert ranked.side.tolist() == [HEAD] * n + [TAIL] * n
    assert by_query(found) == by_query(expected)
    for state, bins in expected.bins.items():
        assert found.bins[state].n.tolist() == bins.n.tolist()
    for name, ranks in expected.ranked.items():
        assert found.ranked[name].metrics["mrr"] == ranks.metrics["mrr"]


def by_query(ranked):
    """All numbers of each query and side."""
    trained = list(ranked.ranked.values())[-1]
    columns = (
        ranked.side,
        ranked.provable,
        ranked.n_better,
        ranked.n_candidates,
        ranked.answer_score,
        trained.rank,
    )
    rows = zip(ranked.atom.tolist(), *(column.tolist() for column in columns))
    return sorted(rows)


# -- rules


def opened(runs, name):
    """A run, the atoms of its test split that rules derive, and their proofs."""
    run = open_run(runs[name])
    atoms = torch.from_numpy(run.task.dataset.test[:-2]).long()
    found = [answers.most_probable_proof(run, atom) for atom in atoms]
    atoms = atoms[[proof is not None for proof in found]]
    return run, atoms, [proof for proof in found if proof]


def test_untrained_evidence_stands_for_the_confidence(runs):
    """The weights before training give a rule the odds of its confidence."""
    run, atoms, proofs = opened(runs, "questions")
    smoothing = run.task.cfg.smoothing or 0.0
    uses = measure.uses_by_rule(run, atoms, proofs).values()
    assert sum(use.n_proofs for use in uses) == len(proofs) > 0
    for use in uses:
        smoothed = use.support / (use.body_pairs + smoothing)
        assert use.before == pytest.approx(min(smoothed, 0.999), rel=1e-4)
    assert measure.uses_by_rule(run, atoms[:0], []) == {}


def test_choices_of_a_policy_are_those_of_its_proofs_before_and_after(runs):
    run, atoms, proofs = opened(runs, "proofs")
    rules, chances = explain.rule_choices(
        run.task, run.cfg, run.state.best_params, atoms[:1]
    )
    probability = dict(zip(rules.tolist(), chances.tolist()))
    root = proofs[0].nodes[0]
    assert probability[root.rule] == pytest.approx(root.probability, rel=1e-5)

    moved = tree.map(lambda x: x + 0.1, run.state.start_params)
    for params, is_kept in ((run.state.start_params, True), (moved, False)):
        state = run.state._replace(best_params=params)
        uses = measure.uses_by_rule(
            dataclasses.replace(run, state=state), atoms, proofs
        )
        same = [use.before == use.after for use in uses.values()]
        assert all(same) == is_kept


# -- learnt weights


def changed_run(run, **changes):
    """The run with the untrained weights, but for given ones: name to (place, value)."""
    untrained = next(iter(held_out.policies(run).values()))
    params = tree.map(torch.clone, untrained)
    score = params.score
    for name, (place, value) in changes.items():
        weight = getattr(score, name).clone()
        weight[place] = value
        score = score._replace(**{name: weight})
    state = run.state._replace(best_params=params._replace(score=score))
    return dataclasses.replace(run, state=state)


def test_each_weight_is_said_by_what_it_weighs(runs, monkeypatch):
    run = open_run(runs["questions"])
    names = run.task.dataset.predicates
    likes, also = names.index(LIKES) + 1, names.index(ALSO) + 1
    inverse = names.index(INVERSE) + 1
    run = changed_run(
        run,
        # of the third rule, as a question about the tail
        rule_weight=((1, 2), 3.0),
        # the candidate is the tail of a fact of likes, the question asks for the head of also
        link_weight=((2 * likes + 1, 2 * also), -4.0),
        own_degree_weight=((2 * inverse, 3), 2.0),
        linked_weight=((2 * inverse + 1,), -1.0),
        feature_weight=((2 * also, int(run.questions.aggregation.shape[2]), 0), 1.5),
    )  # fmt: skip
    found = measure.learnt_weights(run)
    rule = format_rule(run.task.dataset, run.task.dataset.rules[2])
    assert found.n_moved == 5
    assert [tuple(weight) for weight in found.weights] == [
        ("link", f"{LIKES} with the candidate as tail", ALSO, "head", 0, -4),
        ("rule", rule, ALSO, "tail", 0, 3),
        ("known answers", "it is 3 to 4 known answers", INVERSE, "head", 0, 2),
        ("linked", "some fact links it", INVERSE, "tail", 0, -1),
        (
            "feature of rules",
            "log-odds of the confidence, rules of 3 atoms and 0 constants",
            ALSO, "head", 1, 1.5,
        ),
    ]  # fmt: skip
    assert [of[:2] for of in found.relations] == [(ALSO, 3), (INVERSE, 2)]
    distances = [of[2] for of in found.relations]
    np.testing.assert_allclose(distances, np.sqrt([16 + 9 + 0.25, 4 + 1]))

    monkeypatch.setattr(measure, "MAX_WEIGHTS", 2)
    assert measure.learnt_weights(run).weights == found.weights[:2]
    assert measure.learnt_weights(changed_run(run)) == (0, (), ())


def test_degrees_and_priors_have_names_too(runs):
    run = open_run(runs["questions"])
    dataset = run.task.dataset
    label = 2 * (dataset.predicates.index(LIKES) + 1)
    likes = f"{LIKES} with the candidate as head"
    for name, place, text in (
        ("degree_weight", [6 * label + 5, 0], f"9 or more facts of {likes}"),
        ("degree_weight", [6 * label + 1, 0], f"1 fact of {likes}"),
        ("own_degree_weight", [label, 1], "it is 1 known answer"),
        ("prior_weight", [0], "prior by link embeddings"),
        ("network_prior_weight", [0], "prior by a Bellman-Ford network"),
    ):
        assert (
            measure.evidence_text(dataset, run.questions, name, place) == text
        )
    fields = set(run.state.best_params.score._fields)
    assert fields == set(measure.WEIGHT_KINDS)


# -- single queries


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_better_candidates_are_as_many_as_the_rank_says(runs, name):
    run = open_run(runs[name])
    answerer = Answerer(run_subject(run))
    ranked = measure.rank_test(run, None)
    n_listed = 0
    for i, atom in enumerate(ranked.atom.tolist()):
        if not ranked.provable[i]:
            continue
        side = int(ranked.side[i])
        query = OpenQuery(atom[0], side, atom[HEAD + TAIL - side])
        score = int(ranked.answer_score[i])
        entities, _ = measure.better_entities(answerer, query, score)
        assert len(entities) == ranked.n_better[i]
        n_listed += len(entities)
    assert n_listed > 0


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_entries_say_why_and_why_not(reports, name):
    entries = reports[name].entries
    assert len(entries) == 14
    failed = [entry for entry in entries if entry["status"] == "not derivable"]
    assert len(failed) == 2
    for entry in failed:
        assert entry["failure"]["n_matching_rules"] == 0
        assert all(side["score"] == 0 for side in entry["sides"])
    for entry in entries:
        if entry["status"] == "proved":
            assert "by rule" in entry["proof"][0]
            has_evidence = all(side["evidence"] for side in entry["sides"])
            assert has_evidence == (name == "questions")
        for side in entry["sides"]:
            assert len(side["better"]) == min(side["n_better"], 5)
            assert all(b["score"] > side["score"] for b in side["better"])


def test_a_failure_names_the_goal_that_nothing_satisfies(runs):
    run = open_run(runs["questions"])
    dataset = run.task.dataset
    relation, likes = (
        dataset.predicates.index(r) + 1 for r in (INVERSE, LIKES)
    )
    known = {tuple(row) for row in dataset.facts.tolist()}
    head = dataset.entities.index("e1") + 1
    entities = range(1, dataset.n_constants + 1)
    tail = next(
        e for e in entities if (likes, e, head) not in known and e != head
    )
    atom = torch.tensor([relation, head, tail])
    failure = measure.explain_failure(run.task, atom)
    assert failure["verdict"].name == "REFUTED"
    (rule,) = failure["failed_rules"]
    assert rule["rule"] == 0
    assert rule["rule_text"].startswith("'$p$ \"q\"'(X, Y) :- ")
    assert rule["goals"][0].startswith("'<b>likes</b>'(")


# -- files, notes and data


def test_a_run_is_measured_with_its_log_results_and_notes(reports):
    run = reports["questions"]
    assert run.is_trained and run.update == run.n_updates == 4
    assert run.sizes["test"] == run.n_ranked == 14
    assert [row["update"] for row in run.log][-1] == 4
    assert run.results["versions"]["torch"]
    assert any("no CUDA graph in training" in note for note in run.notes)
    assert len(set(run.notes)) == len(run.notes)
    assert list(run.ranked)[1:] == [
        "evidence, untrained", "evidence, listwise fit", "evidence, trained",
    ]  # fmt: skip
    names = dict(reports["other"].changed_settings)
    assert names["seed"] == "1" and names["ppo.n_envs"] == "8"
    assert "ppo.gamma" not in names


def test_a_run_that_is_ranked_by_rules_says_so_before_the_numbers(runs):
    folder = runs["questions"]
    run = open_run(folder)
    metric = run.state.best_valid_metric * 0 + 0.25
    state = run.state._replace(best_valid_metric=metric)
    for rule_metric, is_said in ((0.5, True), (0.2, False), (None, False)):
        judged = dataclasses.replace(run, state=state, rule_metric=rule_metric)
        html = report.render([measure.measure(judged, folder, max_ranked=1)])
        line = "predict and serve: answers are ranked by the rule score"
        assert (line in html) == is_said


def test_missing_and_damaged_files_are_said(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["proofs"], folder)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]))
    run = open_run(folder)
    found = measure.measure(run, folder, max_ranked=1)
    assert found.results == {} and found.is_trained
    notes = "\n".join(found.notes)
    assert "results.json is missing" in notes
    assert "metrics.jsonl: 2 updates have no line" in notes

    (folder / "metrics.jsonl").unlink()
    notes = "\n".join(measure.measure(run, folder, max_ranked=1).notes)
    assert "metrics.jsonl is missing" in notes
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        measure.measure(run, folder)


def test_other_data_are_refused_and_the_same_under_another_path_not(
    runs, tmp_path
):
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
