"""What the explorer answers: the scores of predict, verdicts, proofs, names of all kinds, pages of lists."""

import json

import pytest
import torch

from funcppo.kg.answers import Answerer
from funcppo.kg.graph import loaders
from funcppo.kg.graph.text import quote
from funcppo.kg.logic import proof as proofs
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.show import measure
from funcppo.kg.show.serve import explorer as explorer_module
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.explorer import Explorer
from tests.cli.runner import funcppo
from tests.kg.show.graphs import ALSO, HOSTILE, INVERSE, LIKES


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_answers_are_those_of_predict(
    name, explorers, runs, monkeypatch, capsys
):
    explorer = explorers[name]
    relation, entity = explorer.relation_id(ALSO), explorer.entity_id("e3")
    capsys.readouterr()
    query = f"'{ALSO}'(e3, X)"
    args = ("predict", runs[name], query, "--known", "--k", "7")
    assert funcppo(monkeypatch, *args, "--json", "-") == 0
    (expected,) = json.loads(capsys.readouterr().out)["queries"]

    found = explorer.answers(relation, entity, None, 7, True, 0.0)
    assert len(found["answers"]) == 7
    answers = [dict(answer) for answer in found["answers"]]
    for answer in answers:
        name_of_id = explorer.entity_name(answer.pop("entity_id"))["name"]
        assert name_of_id == answer["entity"]
    assert answers == expected["answers"]
    assert explorer.read(found["query"]) == (relation, entity, None)
    for field in ("side", "n_new", "n_known", "n_self", "n_entities"):
        assert found[field] == expected[field]


def test_a_proof_holds_and_its_score_is_that_of_the_ranking(explorers):
    for explorer in explorers.values():
        relation = explorer.relation_id(INVERSE)
        entity = explorer.entity_id("e5")
        for head, tail, side in (
            (entity, None, "tail"),
            (None, entity, "head"),
        ):
            found = explorer.answers(relation, head, tail, 3, True, 0.0)
            assert found["side"] == side
            proved = [a for a in found["answers"] if a["verdict"] == "proved"]
            assert proved
            for answer in proved:
                ids = [
                    explorer.entity_id(answer[place])
                    for place in ("head", "tail")
                ]
                why = explorer.why(relation, *ids, side)
                assert why["verdict"] == "proved"
                assert why["score"] == answer["score"]
                assert (why["atom"]["splits"] != []) == answer["known"]
                assert_holds(explorer, why)


def assert_holds(explorer, why):
    """Check a proof by the independent checker."""
    task = explorer.answerer.subject.task
    errors = proofs.check_proof(
        proofs.from_json(json.dumps(why["proof"])),
        {tuple(atom) for atom in task.kb.facts.tolist()},
        task.kb.rules.tolist(),
        n_constants=task.sizes.n_constants,
        max_height=task.max_height,
        leave_one_out=True,
    )
    assert errors == []


def test_a_name_may_stand_in_quotes_as_it_is_suggested(explorers):
    explorer = explorers["untrained"]
    for name, find in (
        (ALSO, explorer.relation_id),
        ("e3", explorer.entity_id),
    ):
        assert find(quote(name)) == find(name)
        with pytest.raises(RequestError) as error:
            find(name + "!")
        suggestion = str(error.value).split("close: ")[1]
        assert find(suggestion.split(", '")[0].rstrip(")")) == find(name)
    for text in (r"'\q'", "''", "'e3"):
        with pytest.raises(RequestError, match="unknown entity"):
            explorer.entity_id(text)


def not_derivable(explorer):
    """A relation, and an entity that is no answer to relation(1, X)."""
    relation = explorer.relation_id(ALSO)
    found = explorer.answers(relation, 1, None, 1000, True, 0.0, True)
    proved = {a["entity_id"] for a in found["answers"]}
    entities = range(1, explorer.dataset.n_constants + 1)
    return relation, next(i for i in entities if i not in proved)


def test_an_atom_without_a_proof_says_which_rules_fail(explorers):
    explorer = explorers["questions"]
    relation, other = not_derivable(explorer)
    why = explorer.why(relation, 1, other, "tail")
    assert (why["verdict"], why["score"], why["proof"]) == ("refuted", 0, None)
    assert why["n_matching_rules"] == len(why["failed_rules"]) == 2
    assert all(failed["goals"] for failed in why["failed_rules"])

    relation = explorer.relation_id(LIKES)
    why = explorer.why(relation, 1, 2, "tail")
    assert why["verdict"] == "refuted" and why["n_matching_rules"] == 0


def test_work_without_an_end_is_one_line(explorers, monkeypatch):
    monkeypatch.setattr(measure, "MAX_FACT_PROOF_ROWS", 1)
    explorer = explorers["untrained"]
    relation, other = not_derivable(explorer)
    why = explorer.why(relation, 1, other, "tail")
    assert why["verdict"] == "unknown" and why["proof"] is None
    assert "more than 1 rows" in why["note"]


def test_every_name_is_found_by_itself(explorers):
    explorer = explorers["untrained"]
    for name in HOSTILE:
        found = explorer.search(name, "entity", 3)["names"]
        assert name.strip() in [one["name"].strip() for one in found], name
        assert explorer.entity_name(explorer.entity_id(name))["name"] == name
    found = explorer.search("E1", "any", 2)
    assert [one["name"] for one in found["names"]] == ["e1", "e10"]
    assert found["has_more"]
    assert explorer.search("  ", "any", 2)["names"] == []
    assert explorer.search("e1", "relation", 2)["names"] == []


def test_unknown_names_have_suggestions(explorers):
    explorer = explorers["untrained"]
    with pytest.raises(RequestError, match=r"unknown entity 'e111'.*'e11'"):
        explorer.entity_id("e111")
    with pytest.raises(RequestError, match="unknown relation 'nothing'"):
        explorer.relation_id("nothing")
    with pytest.raises(RequestError, match="entity_id: expected 1 to"):
        explorer.entity(10**6)
    with pytest.raises(RequestError, match="relation_id: expected 1 to 3"):
        explorer.relation(4)


def test_neighbours_and_pages_of_facts_hold_every_fact_once(
    explorers, monkeypatch
):
    explorer = explorers["untrained"]
    monkeypatch.setattr(explorer_module, "PAGE_ROWS", 7)
    whole = explorer.facts(None, None, None, 0)["n_facts"]
    listed = []
    for offset in range(0, whole, 7):
        page = explorer.facts(None, None, None, offset)
        listed += [fact["text"] for fact in page["facts"]]
    assert len(listed) == len(set(listed)) == whole
    assert explorer.facts(None, None, None, whole)["facts"] == []

    entity = explorer.entity(explorer.entity_id("e1"))
    assert entity["n_facts"] == sum(g["n_facts"] for g in entity["groups"])
    for group in entity["groups"]:
        for fact in group["facts"]:
            assert fact["arguments"][group["place"] - 1] == entity["entity"]
            assert fact["relation"] == group["relation"]


def test_a_graph_says_what_it_is(explorers):
    graphs = {name: one.graph(0) for name, one in explorers.items()}
    assert {n: g["trained"] for n, g in graphs.items()} == {
        "untrained": False,
        "questions": True,
        "proofs": True,
    }
    graph = graphs["untrained"]
    assert graph["score"] == "max-confidence"
    assert sum(r["n_rules"] for r in graph["relations"]) == graph["n_rules"]
    assert (
        explorers["untrained"].graph(2)["relations"] == graph["relations"][2:]
    )


def test_relations_of_other_arities_are_shown_and_not_ranked(tmp_path):
    path = tmp_path / "p.pl"
    path.write_text(
        "edge(a, b). edge(b, c). big(a). route(a, b, c).\n"
        "path(X, Y) :- edge(X, Y).\npath(X, Y) :- edge(X, Z), path(Z, Y).\n"
        "huge(X) :- big(X).\n"
    )
    settings = ProverTaskConfig(
        max_height=3, smoothing=0.0, object_identity=False
    )
    dataset = loaders.load(str(path))
    subject = dataset_subject(dataset, settings, "max-confidence")
    explorer = Explorer(Answerer(subject))
    path_id, big, route = map(explorer.relation_id, ("path", "big", "route"))
    a, c = explorer.entity_id("a"), explorer.entity_id("c")
    for relation in (big, route):
        with pytest.raises(RequestError, match="expected two arguments"):
            explorer.answers(relation, a, None, 5, True, 0.0)
        assert explorer.relation(relation)["relation"]["n_facts"] == 1
    found = explorer.answers(path_id, a, None, 5, True, 0.0)["answers"]
    assert {answer["entity"] for answer in found} == {"b", "c"}
    why = explorer.why(path_id, a, c, "tail")
    assert why["verdict"] == "proved" and len(why["proof"]["nodes"]) == 4
    assert explorer.entity(a)["n_facts"] == 3
    assert explorer.rule(2)["n_derived"] == 1
    atom = torch.tensor([[path_id, a, c, 0]])
    assert [why["score"]] == Answerer(subject).score(atom, 2)


def test_queries_as_text(explorers):
    explorer = explorers["untrained"]
    relation = explorer.relation_id(ALSO)
    e1, e2 = explorer.entity_id("e1"), explorer.entity_id("e2")
    assert explorer.read(f"'{ALSO}'(e1, X)") == (relation, e1, None)
    assert explorer.read(f"'{ALSO}'(?x, e1)") == (relation, None, e1)
    assert explorer.read(f"'{ALSO}'(e1, e2)") == (relation, e1, e2)
    for text, status in (
        (f"'{ALSO}'(X, Y)", 400),
        (f"'{ALSO}'(e1", 400),
        ("nothing(e1, X)", 404),
    ):
        with pytest.raises(RequestError) as error:
            explorer.read(text)
        assert error.value.status == status
