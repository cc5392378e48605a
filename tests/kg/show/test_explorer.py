"""What the explorer answers: names and facts against slow oracles, the scores of predict, proofs, and rules."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.answers import Answerer
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.graph.text import quote
from funcppo.kg.logic import proof as proofs
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.show import explorer as explorer_module
from funcppo.kg.show import measure
from funcppo.kg.show.explorer import (
    Explorer,
    KnownFacts,
    compare_terms,
    fold,
    proof_tree,
    search,
)
from funcppo.kg.show.server import RequestError
from funcppo.kg.show.values import (
    AnswersQuery,
    EntityQuery,
    FactsQuery,
    PageQuery,
    Proof,
    RulesQuery,
    SearchQuery,
    WhyQuery,
)
from tests.cli.runner import funcppo
from tests.kg.logic.proof_cases import read_proof
from tests.kg.show.graphs import ALSO, HOSTILE, INVERSE, LIKES

# -- names

NAMES = st.lists(
    st.text(alphabet="aAbB é\u0301\n\u202e<", max_size=4),
    max_size=8,
    unique=True,
)


@given(NAMES, st.text(alphabet="aAbB é\n", min_size=1, max_size=3))
def test_equal_names_come_first_then_those_that_start_so(names, text):
    folded, wanted = list(map(fold, names)), fold(text)
    ranks = []
    for i, name in enumerate(folded, 1):
        if wanted in name:
            rank = (name != wanted) + (not name.startswith(wanted))
            ranks.append((rank, i))
    expected = [i for _, i in sorted(ranks)]
    for limit in (1, 3, 20):
        assert search(folded, wanted, limit) == expected[:limit]


def test_case_and_composition_do_not_count():
    names = ["Zürich", "Zu\u0308richberg", "STRASSE", "ﬁre"]
    folded = list(map(fold, names))
    texts = ["zu\u0308rich", "straße", "fire", "nothing"]
    found = [search(folded, fold(text), 9) for text in texts]
    assert found == [[1, 2], [3], [4], []]


def test_every_name_is_found_by_itself(explorers):
    explorer = explorers["untrained"]
    for name in HOSTILE:
        query = SearchQuery(q=name, kind="entity", limit=3)
        found = explorer.search(query).names
        assert name.strip() in [one.name.strip() for one in found], name
        number = explorer.find("entity", name)
        assert explorer.name("entity", number).name == name
    found = explorer.search(SearchQuery(q="E1", limit=2))
    assert [one.name for one in found.names] == ["e1", "e10"]
    assert found.has_more
    assert explorer.search(SearchQuery(q="  ")).names == []
    assert explorer.search(SearchQuery(q="e1", kind="relation")).names == []


def test_a_name_may_be_quoted_and_an_unknown_has_suggestions(explorers):
    explorer = explorers["untrained"]
    for kind, name in (("relation", ALSO), ("entity", "e3")):
        number = explorer.find(kind, name)
        assert explorer.find(kind, quote(name)) == number
        with pytest.raises(RequestError, match=f"unknown {kind}") as error:
            explorer.find(kind, name + "!")
        suggestion = str(error.value).split("close: ")[1]
        suggested = suggestion.split(", '")[0].rstrip(")")
        assert explorer.find(kind, suggested) == number
    for text in (r"'\q'", "''", "'e3"):
        with pytest.raises(RequestError, match="unknown entity"):
            explorer.find("entity", text)
    with pytest.raises(RequestError, match="relation_id: expected 1 to 3"):
        explorer.name("relation", 4)


# -- facts


@pytest.fixture(scope="module")
def dataset():
    rows = np.random.default_rng(0).integers(5, size=(60, 3))
    triples = [(f"e{h}", f"r{r % 3}", f"e{t}") for h, r, t in rows]
    return loaders.from_triples(triples[:40], triples[30:50], triples[45:])


def test_facts_are_found_by_any_of_their_names(dataset):
    known = KnownFacts(dataset)
    splits = [dataset.facts, dataset.valid, dataset.test]
    atoms = np.unique(np.concatenate(splits), axis=0)
    assert np.array_equal(known.atoms, atoms)
    entities = [None, *range(1, dataset.n_constants + 1)]
    for names in itertools.product([None, 1, 2, 3], entities, entities):
        arguments = {p: e for p, e in enumerate(names) if p and e is not None}
        agree = [all(n in (a, None) for a, n in zip(x, names)) for x in atoms]
        found = known.find(names[0], arguments)
        assert found.tolist() == np.flatnonzero(agree).tolist()
    for row, atom in enumerate(known.atoms):
        is_in = lambda split, a=atom: (
            (getattr(dataset, split) == a).all(1).any()
        )
        splits = [x for x in ("train", "valid", "test") if is_in(x)]
        assert known.splits_of(row) == splits


def test_groups_of_an_entity_hold_each_of_its_facts_by_place(dataset):
    known = KnownFacts(dataset)
    for entity in range(1, dataset.n_constants + 1):
        groups = known.groups_of(entity)
        pairs = [(p, row) for (_, p), rows in groups.items() for row in rows]
        expected = np.argwhere(known.atoms[:, 1:] == entity)
        assert sorted(pairs) == sorted((p + 1, i) for i, p in expected)
        for (relation, _), rows in groups.items():
            assert set(known.atoms[rows, 0]) == {relation}


def test_pages_of_facts_and_neighbours_hold_all_once(explorers, monkeypatch):
    explorer = explorers["untrained"]
    monkeypatch.setattr(explorer_module, "PAGE_ROWS", 7)
    listed = []
    for relation in (LIKES, INVERSE, ALSO):
        whole = explorer.relation(FactsQuery(relation=relation)).n_facts
        pages = [
            explorer.relation(FactsQuery(relation=relation, offset=offset))
            for offset in range(0, whole + 7, 7)
        ]
        texts = [fact.text for page in pages for fact in page.facts]
        assert len(texts) == len(set(texts)) == whole
        listed += texts
    assert len(set(listed)) == len(explorer.known.atoms)

    entity = explorer.entity(EntityQuery(entity="e1"))
    assert entity.n_facts == sum(group.n_facts for group in entity.groups)
    for group in entity.groups:
        for fact in group.facts:
            assert fact.arguments[group.place - 1] == entity.entity
            assert fact.relation == group.relation


def test_a_graph_says_what_it_is(explorers):
    graphs = {name: one.graph(PageQuery()) for name, one in explorers.items()}
    assert [graph.trained for graph in graphs.values()] == [False, True, True]
    graph = graphs["untrained"]
    assert sum(r.n_rules for r in graph.relations) == graph.n_rules
    rest = explorers["untrained"].graph(PageQuery(offset=2)).relations
    assert rest == graph.relations[2:]


def test_relations_of_other_arities_are_shown_and_not_ranked(tmp_path):
    path = tmp_path / "p.pl"
    path.write_text(
        "edge(a, b). edge(b, c). big(a). route(a, b, c).\n"
        "path(X, Y) :- edge(X, Y).\npath(X, Y) :- edge(X, Z), path(Z, Y).\n"
        "huge(X) :- big(X).\n"
    )
    options = {"smoothing": 0.0, "object_identity": False}
    settings = ProverTaskConfig(max_height=3, **options)
    data = loaders.load(str(path))
    subject = dataset_subject(data, settings, "max-confidence")
    explorer = Explorer(Answerer(subject))
    for relation in ("big", "route"):
        with pytest.raises(RequestError, match="expected two arguments"):
            explorer.answers(AnswersQuery(relation=relation, head="a"))
        shown = explorer.relation(FactsQuery(relation=relation))
        assert shown.relation.n_facts == 1
    query = AnswersQuery(relation="path", head="a", known=True)
    entities = {answer.entity for answer in explorer.answers(query).answers}
    assert entities == {"b", "c"}
    why = explorer.why(WhyQuery(relation="path", head="a", tail="c"))
    assert why.verdict == "proved" and len(why.proof.nodes) == 4
    assert why.proofs == []
    query = WhyQuery(relation="path", head="a", tail="c", proofs=5)
    (best,) = explorer.why(query).proofs
    assert len(best.proof.nodes) == 4 and best.probability == 1
    assert explorer.entity(EntityQuery(entity="a")).n_facts == 3
    assert len(explorer.known.find(None, {4: 1})) == 0
    names = [why.atom.relation, *why.atom.arguments]
    atom = torch.tensor([[*(name.id for name in names), 0]])
    assert [why.score] == Answerer(subject).score(atom, 2)


# -- rules


@pytest.fixture(scope="module", params=["untrained", "questions", "proofs"])
def explorer(request, explorers):
    return explorers[request.param]


def test_rules_come_by_confidence_with_the_counts_of_the_score(explorer):
    rules = explorer.rules(RulesQuery())
    kb = explorer.answerer.subject.task.kb
    confidence = [rule.confidence for rule in rules.rules]
    assert confidence == sorted(confidence, reverse=True)
    assert rules.n_rules == len(rules.rules) == 3
    for rule in rules.rules:
        assert rule.support == float(kb.support[rule.id])
        pairs = float(kb.body_pairs[rule.id])
        assert rule.confidence == rule.support / pairs
    relation = rules.rules[0].relation.id
    assert 0 < explorer.rules(RulesQuery(relation_id=relation)).n_rules < 3
    for rule in rules.rules:
        assert explorer.rules(RulesQuery(rule=rule.id)).rules == [rule]
    with pytest.raises(RequestError, match="0 to 2, got 3"):
        explorer.rules(RulesQuery(rule=3))


def test_too_much_work_is_said(explorers, monkeypatch):
    monkeypatch.setattr(measure, "MAX_FACT_PROOF_ROWS", 1)
    why = explorers["untrained"].why(not_derivable(explorers["untrained"]))
    assert why.verdict == "unknown" and why.proof is None
    assert "more than 1 rows" in why.note


# -- queries


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_answers_equal_predict(name, explorers, runs, monkeypatch, capsys):
    explorer = explorers[name]
    capsys.readouterr()
    query = f"'{ALSO}'(e3, X)"
    args = ("predict", runs[name], query, "--known", "--k", "7")
    assert funcppo(monkeypatch, *args, "--json", "-") == 0
    (expected,) = json.loads(capsys.readouterr().out)["queries"]

    query = AnswersQuery(relation=ALSO, head="e3", k=7, known=True)
    found = explorer.answers(query).model_dump()
    assert len(found["answers"]) == 7
    for answer in found["answers"]:
        number = answer.pop("entity_id")
        assert explorer.find("entity", answer["entity"]) == number
        assert answer.pop("label") == answer["entity"]
    del expected["query"]
    assert {name: found[name] for name in expected} == expected


def test_a_proof_holds_and_its_score_is_that_of_the_ranking(explorer):
    for fixed, side in (({"head": "e5"}, "tail"), ({"tail": "e5"}, "head")):
        query = AnswersQuery(relation=INVERSE, **fixed, k=3, known=True)
        found = explorer.answers(query)
        assert found.side == side
        proved = [a for a in found.answers if a.verdict == "derived"]
        assert proved
        for answer in proved:
            atom = {"head": answer.head, "tail": answer.tail}
            why = explorer.why(WhyQuery(relation=INVERSE, **atom, side=side))
            assert why.verdict == "derived"
            assert why.score == answer.score
            assert (why.atom.splits != []) == answer.known
            assert_holds(explorer, why.proof)


def assert_holds(explorer, proof):
    """Check a proof by the independent checker."""
    task = explorer.answerer.subject.task
    errors = proofs.check_proof(
        read_proof(proof.model_dump_json()),
        {tuple(atom) for atom in task.kb.facts.tolist()},
        task.kb.rules.tolist(),
        n_constants=task.sizes.n_constants,
        max_height=task.max_height,
        leave_one_out=True,
    )
    assert errors == []


def not_derivable(explorer):
    """A query for an atom of ALSO that the rules do not derive."""
    all_of = {"k": 1000, "known": True, "with_self": True}
    query = AnswersQuery(relation=ALSO, head_id=1, **all_of)
    proved = {a.entity_id for a in explorer.answers(query).answers}
    entities = range(1, explorer.dataset.n_constants + 1)
    other = next(i for i in entities if i not in proved)
    return WhyQuery(relation=ALSO, head_id=1, tail_id=other)


def test_an_answer_stands_beside_another(explorer):
    query = AnswersQuery(relation=ALSO, head="e3", k=50, known=True)
    first, second, *_ = explorer.answers(query).answers
    asked = {"relation": ALSO, "head": "e3", "tail_id": second.entity_id}
    why = explorer.why(WhyQuery(**asked, beside_id=first.entity_id))
    assert why.beside.atom.arguments[1].id == first.entity_id
    assert (why.beside.score, why.score) == (first.score, second.score)
    rows = compare_terms(why, why.beside)
    assert bool(rows) == bool(why.evidence)
    assert all(
        here is not None or there is not None for _, (here, there) in rows
    )


def test_neighbours_of_neighbours_are_drawn_where_they_are_asked_for(client):
    pictures = []
    for expand in ("", "16", "16,17"):
        text = client.get(f"/entity?entity=e5&expand={expand}").text
        picture = text[text.index("<svg") : text.index("</svg>")]
        assert picture.count("<rect") <= 2 * 30
        pictures.append(picture.count('rx="6"'))
    assert pictures == sorted(pictures) and pictures[0] < pictures[-1]
    for wrong in ("x", "1,,2", "999", "1," * 20):
        found = client.get(f"/api/entity?entity=e5&expand={wrong}")
        assert found.status_code in (400, 404) and found.json()["error"]


def test_an_atom_without_a_proof_says_which_rules_fail(explorers, monkeypatch):
    explorer = explorers["questions"]
    why = explorer.why(not_derivable(explorer))
    assert (why.verdict, why.score, why.proof) == ("no proof", 0, None)
    assert why.n_matching_rules == len(why.failed_rules) == 2
    assert all(failed.goals for failed in why.failed_rules)
    why = explorer.why(WhyQuery(relation=LIKES, head_id=1, tail_id=2))
    assert why.verdict == "no proof" and why.n_matching_rules == 0
    # whatever other evidence says of it
    monkeypatch.setattr(explorer.answerer, "score", lambda *_: [0.5])
    why = explorer.why(not_derivable(explorer))
    assert (why.verdict, why.score, why.proof) == ("no proof", 0.5, None)


# -- the drawing of proofs


def drawn(children):
    """The kinds and names of a drawn proof whose node i has these children, a fact without any."""
    by_rule = {"rule": 7, "rule_text": "p(X) :- p(Y)", "probability": 0.5}
    fact = dict.fromkeys(by_rule)
    node = {"goal_text": "", "substitution": []}
    nodes = [
        node | {"goal": [1, i + 1, 0], "children": below} | (by_rule if below else fact)
        for i, below in enumerate(children)
    ]  # fmt: skip
    constants = {str(i + 1): f"c{i}" for i in range(len(children))}
    names = {"predicates": {"1": "p"}, "constants": constants, "variables": {}}
    root = proof_tree(Proof(format=2, nodes=nodes, **names))

    def flat(node):
        below = [row for child in node["children"] for row in flat(child)]
        return [(node["kind"], node["arguments"][0].name), *below]

    return flat(root)


def test_children_stand_below_their_goal_and_a_shared_one_is_drawn_once():
    assert drawn([[1, 2], [3], [], []]) == [
        ("rule", "c0"), ("rule", "c1"), ("fact", "c3"), ("fact", "c2"),
    ]  # fmt: skip
    assert drawn([[1, 1], [2], []]) == [
        ("rule", "c0"), ("rule", "c1"), ("fact", "c2"), ("repeated", "c1"),
    ]  # fmt: skip


def test_what_is_too_deep_or_too_much_is_cut():
    chain = drawn([[i + 1] for i in range(3000)] + [[]])
    assert [kind for kind, _ in chain] == [*["rule"] * 40, "cut"]
    n = 1000
    wide = [list(range(1, n + 1)), *[[i + n] for i in range(1, n + 1)]]
    kinds = [kind for kind, _ in drawn([*wide, *[[]] * n])]
    assert kinds.count("rule") <= 300
    assert kinds.count("rule") + kinds.count("cut") == n + 1
