"""Single queries: better candidates are as many as the rank says and unknown to all splits, proofs hold, why-not."""

import pytest
import torch

from funcppo.kg.answers import Answerer, OpenQuery
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.run import run_start
from funcppo.kg.run.subject import run_subject
from funcppo.kg.search.task import ignore_phase
from funcppo.kg.show.report import tables


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_better_candidates_are_as_many_as_the_rank_says(runs, name):
    run = run_start.open_run(runs[name])
    answerer = Answerer(run_subject(run))
    ranked = tables.rank_test(run, None, ignore_phase)
    n_listed = 0
    for i, row in enumerate(ranked.query_row):
        if not ranked.provable[i]:
            continue
        atom, side = ranked.queries[row].tolist(), int(ranked.side[i])
        query = OpenQuery(atom[0], side, atom[HEAD + TAIL - side])
        better = tables.better_entities(
            answerer, query, int(ranked.answer_score[i])
        )
        assert len(better.entity) == ranked.n_better[i]
        n_listed += len(better.entity)
    assert n_listed > 0


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_entries_say_why_and_why_not(reports, name):
    entries = reports[name].entries
    assert len(entries) == 14
    failed = [entry for entry in entries if entry.status == "not derivable"]
    assert len(failed) == 2
    for entry in failed:
        assert entry.proof == ("no rule's head matches it",)
        assert all(side.score == 0 for side in entry.sides)
    for entry in entries:
        if entry.status == "proved":
            assert "by rule" in entry.proof[0]
            has_evidence = all(side.evidence for side in entry.sides)
            assert has_evidence == (name == "questions")
        for side in entry.sides:
            assert len(side.better) == min(side.n_better, 5)
            assert all(b.score > side.score for b in side.better)


def test_why_not_names_the_goal_that_nothing_satisfies(runs):
    run = run_start.open_run(runs["questions"])
    dataset = run.task.dataset
    ids = {name: i for i, name in enumerate(dataset.entities, 1)}
    relation = dataset.predicates.index('$p$ "q"') + 1
    known = {tuple(row) for row in dataset.facts.tolist()}
    likes = dataset.predicates.index("<b>likes</b>") + 1
    head = ids["e1"]
    tail = next(
        e for e in ids.values() if (likes, e, head) not in known and e != head
    )
    lines = tables.why_not(run.task, torch.tensor([relation, head, tail]))
    assert lines[0].startswith("rule 0: '$p$ \"q\"'(X, Y) :- ")
    assert "nothing derived satisfies '<b>likes</b>'(" in lines[1]


def test_no_entries_without_ranked_queries(runs):
    run = run_start.open_run(runs["questions"])
    ranked = tables.rank_test(run, 0, ignore_phase)
    answerer = Answerer(run_subject(run))
    shown = tables.choose_queries(answerer, ranked, 5)
    assert list(tables.iter_entries(answerer, ranked, shown)) == []
