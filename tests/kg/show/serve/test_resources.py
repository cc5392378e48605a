"""Parameters of requests: kinds, bounds, names and ids; the OpenAPI document against what is answered."""

import pytest
from starlette.testclient import TestClient

from funcppo.kg.answers import Answerer
from funcppo.kg.graph import loaders
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.show.serve import resources
from funcppo.kg.show.serve.app import Site
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.explorer import Explorer
from funcppo.kg.show.serve.resources import (
    RESOURCES,
    read_arguments,
    read_fields,
)
from tests.kg.show.graphs import ALSO
from tests.kg.show.serve.conftest import BASE
from tests.kg.show.serve.test_values import problems

BY_NAME = {resource.name: resource for resource in RESOURCES}


@pytest.fixture(scope="module")
def explorer(explorers):
    return explorers["questions"]


def test_fields_are_decoded_strictly():
    assert read_fields(b"q=%C3%A9%00&kind=&limit=3") == {
        "q": "é\x00",
        "limit": "3",
    }
    assert read_fields(b"q=a+b%2Bc") == {"q": "a b+c"}
    for query, problem in (
        (b"q=%ff", "UTF-8"),
        (b"q=\xc3\xa9", "UTF-8"),
        (b"q=1&q=2", "got it twice"),
        (b"&".join(b"a%d=1" % i for i in range(30)), "at most 20 fields"),
    ):
        with pytest.raises(RequestError, match=problem) as error:
            read_fields(query)
        assert error.value.status == 400


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("search", {"Q": "a"}, "unknown parameter 'Q'"),
        ("search", {"limit": "0"}, "limit: expected a number from 1 to 100, got '0'"),
        ("search", {"limit": "1e1"}, "limit: expected a number"),
        ("search", {"limit": "9" * 99}, "limit: expected a number"),
        ("search", {"limit": "\u0665"}, "limit: expected a number"),
        ("search", {"kind": "x"}, "kind: expected one of any, entity, relation"),
        ("answers", {"relation": ALSO, "known": "maybe"}, "known: expected true or"),
        ("answers", {"relation": ALSO, "min_score": "nan"}, "min_score: expected"),
        ("answers", {"relation": ALSO, "min_score": "-1"}, "min_score: expected"),
        ("answers", {"relation": ALSO, "relation_id": "1"}, "got both"),
        ("answers", {"head": "e1"}, "expected relation or relation_id, got nothing"),
        ("rule", {"rule": "x"}, "rule: expected a number"),
        ("entity", {"entity_id": "-1"}, "entity_id: expected a number"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_one_line(explorer, name, fields, problem):
    with pytest.raises(RequestError) as error:
        read_arguments(BY_NAME[name], explorer, fields)
    assert error.value.status == 400
    assert problem in str(error.value)


def test_names_become_ids(explorer):
    relation = explorer.relation_id(ALSO)
    entity = explorer.entity_id("e1")
    expected = {
        "relation": relation, "head": entity, "tail": None, "k": 20,
        "known": True,
            "with_self": False, "min_score": 0.25,
    }  # fmt: skip
    options = {"known": "1", "min_score": "0.25"}
    for fields in (
        {"relation": ALSO, "head": "e1"},
        {"relation_id": str(relation), "head_id": str(entity)},
    ):
        found = read_arguments(BY_NAME["answers"], explorer, fields | options)
        assert found == expected


def test_the_document_describes_what_is_answered(client):
    document = client.get("/openapi.json").json()
    assert document == resources.openapi(document["info"]["version"])
    schemas = document["components"]["schemas"]
    fields = {
        "graph": {}, "search": {"q": "e1"}, "entity": {"entity": "e1"},
        "answers": {"relation": ALSO, "head": "e1", "known": "true"},
        "why": {"relation": ALSO, "head": "e1", "tail": "e2"},
        "relation": {"relation": ALSO}, "facts": {"head": "e1"},
        "rules": {}, "rule": {"rule": "0"},
    }  # fmt: skip
    assert {path.removeprefix("/api/") for path in document["paths"]} == set(
        fields
    )
    for name, given in fields.items():
        operation = document["paths"][f"/api/{name}"]["get"]
        names = {p["name"] for p in operation["parameters"]}
        assert set(given) <= names
        answers = [client.get(f"/api/{name}", params=given)]
        answers.append(client.get(f"/api/{name}", params={"nothing": "1"}))
        for response in answers:
            described = operation["responses"][str(response.status_code)]
            schema = described["content"]["application/json"]["schema"]
            assert problems(response.json(), schema, schemas) == [], name
        assert [r.status_code for r in answers] == [200, 400]


def test_a_proof_and_evidence_fit_the_document(client, explorer):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    answers = client.get(
        "/api/answers", params={"relation": ALSO, "head": "e3"}
    ).json()["answers"]
    fields = {"relation": ALSO, "head": "e3", "tail": answers[0]["tail"]}
    why = client.get("/api/why", params=fields).json()
    assert why["proof"] and why["evidence"]
    assert (
        problems(why, {"$ref": "#/components/schemas/AtomExplanation"}, schemas)
        == []
    )


def test_what_other_facts_add_is_shown(graph):
    settings = ProverTaskConfig(max_height=1, object_identity=False)
    dataset = loaders.load(str(graph))
    subject = dataset_subject(dataset, settings, "noisy-or-other-facts")
    site = Site(Explorer(Answerer(subject)), seconds=60)
    client = TestClient(site.make_app("127.0.0.1"), base_url=BASE)
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    asked = {"relation": ALSO, "head": "e3"}
    answers = client.get("/api/answers", params=asked).json()["answers"]
    fields = asked | {"tail": answers[0]["tail"]}
    why = client.get("/api/why", params=fields).json()
    schema = {"$ref": "#/components/schemas/AtomExplanation"}
    assert problems(why, schema, schemas) == []
    others = why["other_facts"]
    assert (others["relation"], others["side"]) == (ALSO, "tail")
    page = client.get(why_link(why)).text
    assert "Other facts" in page and f"{others['log_odds']:+.4f}" in page


def why_link(why):
    """The page of an explanation."""
    head, tail = (name["id"] for name in why["atom"]["arguments"])
    relation = why["atom"]["relation"]["id"]
    return f"/why?relation_id={relation}&head_id={head}&tail_id={tail}&side={why['side']}"


def test_every_id_out_of_range_is_one_line(client):
    for resource in RESOURCES:
        ids = [
            field
            for parameter in resource.parameters
            for field in parameter.fields
            if field.endswith("_id")
        ]
        for unknown in ids:
            given = dict.fromkeys(ids, 1) | {unknown: 999}
            if resource.name == "answers":
                # one of the two is asked for
                del given["tail_id" if unknown == "head_id" else "head_id"]
            response = client.get(f"/api/{resource.name}", params=given)
            assert response.status_code == 404, (resource.name, unknown)
            assert "_id: expected 1 to" in response.json()["error"]
