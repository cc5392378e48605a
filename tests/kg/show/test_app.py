"""Pages: every one whole and escaped with hostile names, the scores of predict, redirects, statuses, bounded work."""

import re
import threading
import time
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from funcppo.kg.answers import Answerer
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.graph.text import display, score_text
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.show import explorer, values
from funcppo.kg.show.explorer import RESOURCES, Explorer, Site
from tests.kg.show.conftest import make_client
from tests.kg.show.graphs import ALSO, HOSTILE, INVERSE, LIKES
from tests.kg.show.html_page import Page


def page_of(client, path, status=200):
    response = client.get(path)
    assert response.status_code == status, (path, response.text)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return Page(response.text)


def paths(explorer, n_names):
    """A path of every page, some with hostile names."""
    ids = [explorer.find("entity", name) for name in HOSTILE[:n_names]]
    names = LIKES, INVERSE, ALSO
    relations = [explorer.find("relation", name) for name in names]
    found = ["/", "/graph?offset=1", "/search?q=e", "/api", "/rules"]
    found += [f"/entity?entity_id={i}" for i in ids]
    found += [f"/rules?rule={i}" for i in range(3)]
    for relation in relations:
        found += [f"/relation?relation_id={relation}&head_id={ids[0]}"]
        found += [f"/rules?relation_id={relation}"]
    for relation, entity in zip(relations * 5, ids):
        query = f"relation_id={relation}&known=1&k=50"
        found += [f"/answers?{query}&head_id={entity}"]
        found += [f"/answers?{query}&tail_id={entity}"]
        found += [
            f"/why?relation_id={relation}&head_id={entity}&tail_id={ids[0]}"
        ]
    return found


@pytest.mark.parametrize(
    ("name", "n_names"),
    [("untrained", 3), ("questions", len(HOSTILE)), ("proofs", 1)],
)
def test_pages_with_hostile_names_are_whole(name, n_names, clients, explorers):
    client = clients[name]
    wanted, seen = paths(explorers[name], n_names), set()
    for path in wanted:
        response = client.get(path)
        assert response.status_code == 200, (path, response.text)
        text = response.text
        page = Page(text)
        assert [t for t, _ in page.tags].count("h1") == 1
        invisible = re.sub(r"[\n\u2026]", "", text)
        assert invisible.isprintable(), path
        assert "<script>alert" not in text and "<img" not in text
        assert not any("style" in attributes for _, attributes in page.tags)
        scripts = [a for t, a in page.tags if t == "script"]
        assert scripts == [{"src": "/static/explorer.js", "defer": None}]
        assert max(map(len, page.words)) < 5000
        is_untrained = "no trained policy" in page.text
        assert is_untrained == (name == "untrained")
        for link in page.links:
            assert link.startswith(("/", "#")) and not link.startswith("//")
            if "?" in link:  # the action of a form lacks what is typed
                seen.add(link.partition("#")[0])

    kinds = {}
    for link in sorted(seen):
        kinds.setdefault(urlsplit(link).path, []).append(link)
    assert {"/why", "/rules", "/entity", "/answers"} <= set(kinds)
    for links in kinds.values():
        for link in links[:: max(1, len(links) // 3)]:
            assert client.get(link).status_code == 200, link


def test_names_are_shown_with_escapes_and_kept_in_json(client, explorers):
    explorer = explorers["questions"]
    for name in HOSTILE:
        entity = explorer.find("entity", name)
        page = page_of(client, f"/entity?entity_id={entity}")
        assert display(name) in page.words
        response = client.get("/api/entity", params={"entity_id": entity})
        expected = {"id": entity, "name": name, "label": name}
        assert response.json()["entity"] == expected
        assert response.text.isascii() and response.text.isprintable()
        if len(name) < 1000:
            by_name = client.get("/api/entity", params={"entity": name})
            assert by_name.json() == response.json()


def test_a_page_shows_the_scores_of_the_api(client):
    fields = {"relation": ALSO, "tail": "e4", "known": "true"}
    expected = client.get("/api/answers", params=fields).json()["answers"]
    assert len(expected) > 5
    page = page_of(client, f"/answers?{urlencode(fields)}")
    scores = [a["value"] for t, a in page.tags if t == "data"]
    assert list(map(float, scores)) == [a["score"] for a in expected]
    for answer in expected:
        assert score_text(answer["score"]) in page.words
        assert display(answer["entity"]) in page.words


def test_a_proof_is_a_tree_that_leads_from_entity_to_entity(clients):
    client = clients["proofs"]
    fields = {"relation": INVERSE, "tail_id": 20, "k": 1, "known": "1"}
    found = client.get("/api/answers", params=fields).json()["answers"][0]
    path = f"relation={INVERSE}&head_id={found['entity_id']}&tail_id=20"
    text = client.get(f"/why?{path}").text
    assert "proofs=5" in text
    again = client.get(f"/why?{path}&proofs=5").text
    assert again.count("by the confidences of its rules") >= 1
    tree = text[text.index('<ul class="tree">') : text.index("</section>")]
    page = Page(tree)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("details") == tags.count("summary") >= 1
    assert "fact" in page.words and "rules?rule=0" in tree
    assert tree.count("/entity?entity_id=") >= 4


def test_queries_of_the_form_lead_to_their_pages(client, explorers):
    e1 = explorers["questions"].find("entity", "e1")
    for fields, path in (
        ({"relation": ALSO, "head": "e1", "tail": ""}, "/answers"),
        ({"relation": ALSO, "head_id": e1}, "/answers"),
        ({"relation": ALSO, "head": "e1", "tail": "e1"}, "/why"),
    ):
        response = client.get("/ask", params=fields)
        assert response.status_code == 303, response.text
        location = response.headers["location"]
        given = {k: [str(x)] for k, x in fields.items() if x}
        assert urlsplit(location).path == path
        assert parse_qs(urlsplit(location).query) == given
        assert client.get(location).status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "line"),
    [
        ("/answers", 400, "expected relation or relation_id, got nothing"),
        (f"/answers?{urlencode({'relation': ALSO})}", 400, "got neither"),
        ("/answers?relation=nothing&head=e1", 404, "unknown relation"),
        ("/search?limit=0", 400, "limit: expected a number greater than or equal to 1, got '0'"),
        ("/search?limit=1e1", 400, "limit: expected a valid integer, got '1e1'"),
        ("/search?kind=x", 400, "kind: expected 'any', 'entity' or 'relation', got 'x'"),
        ("/entity", 400, "expected entity or entity_id, got nothing"),
        ("/entity?entity=e1&entity_id=1", 400, "got both"),
        ("/entity?entity_id=-1", 400, "entity_id: expected a number"),
        ("/entity?entity_id=999", 404, "entity_id: expected 1 to"),
        ("/entity?entity=e111", 404, "'e11'"),
        ("/entity?entity=%3Cscript%3E", 404, "unknown entity '<script>'"),
        ("/entity?entity=%ff", 400, "UTF-8"),
        ("/why?relation_id=1&head_id=1", 400, "expected tail or tail_id"),
        ("/answers?head=e1", 400, "expected relation or relation_id, got nothing"),
        ("/answers?relation_id=1&head_id=1&tail_id=1", 400, "got both"),
        ("/answers?relation_id=1&k=1001", 400, "k: expected a number less than or equal to 1000"),
        ("/answers?relation_id=1&known=maybe", 400, "known: expected a valid boolean, got 'maybe'"),
        ("/answers?relation_id=1&min_score=nan", 400, "min_score: expected a number"),
        ("/rules?rule=x", 400, "rule: expected a valid integer, got 'x'"),
        ("/rules?rule=3", 404, "rule: expected 0 to 2, got 3"),
        ("/rules?nothing=1", 400, "unknown parameter 'nothing'"),
        ("/nothing", 404, "not found: /nothing"),
        ("/static/../app.py", 404, "not found"),
        ("/static/..%2fapp.py", 404, "not found"),
        ("/entity/", 404, "not found"),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_line_with_its_status(client, path, status, line):
    response = client.get(path)
    page = Page(response.text)
    assert response.status_code == status
    assert line in page.text
    assert [a for _, a in page.tags if a.get("role") == "alert"]
    if path.split("?")[0].strip("/") in RESOURCES:
        answer = client.get(f"/api{path}")
        assert answer.status_code == status
        assert line in answer.json()["error"]


def test_a_search_finds_names(client):
    for path in ("/search", "/search?q=", "/search?q=%20"):
        assert "Nothing to search for" in page_of(client, path).text
    found = page_of(client, "/search?q=zzz")
    assert "No entity and no relation contains zzz" in found.text


def test_static_files_have_their_types(client):
    for path, kind in (
        ("/static/explorer.css", "text/css"),
        ("/static/explorer.js", "text/javascript"),
        ("/favicon.ico", "image/svg+xml"),
    ):
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)


def test_work_that_takes_too_long_is_one_line(explorers, monkeypatch):
    explorer = explorers["untrained"]

    def spin(*args, **options):
        while True:
            time.sleep(0.001)

    monkeypatch.setattr(explorer.answerer, "answer", spin)
    site = Site(explorer, seconds=0.05)
    # however slow the machine is, the request does not wait for its turn
    site.worker.clock = lambda: 0.0
    client = make_client(site)
    query = "relation_id=1&head_id=1"
    response = client.get(f"/api/answers?{query}")
    assert response.status_code == 503
    assert response.json() == {
        "error": "stopped: the answer takes longer than 0.05 s (`request_seconds` of `funcppo serve`)"
    }
    assert response.headers["retry-after"] == "5"
    page_of(client, f"/answers?{query}", 503)
    site.worker.seconds = 60
    assert client.get(f"/api/why?{query}&tail_id=2").status_code == 200


def test_names_are_looked_up_while_others_rank(explorers):
    site = Site(explorers["untrained"], seconds=60)
    client = make_client(site)
    may_end = threading.Event()
    ranking = site.worker.submit(lambda: may_end.wait(60))
    for path in ("search?q=e1", "entity?entity=e1", "rules", "graph"):
        assert client.get(f"/api/{path}").status_code == 200
    assert not ranking.done()
    may_end.set()


def test_an_answer_that_is_too_long_is_one_line(client, monkeypatch):
    monkeypatch.setattr(explorer, "MAX_ANSWER_BYTES", 100)
    response = client.get("/api/graph")
    assert response.status_code == 503
    assert "at most 100 bytes" in response.text


def test_the_document_describes_what_is_answered(client):
    """Parameters of each resource, and answers that the models take without a change."""
    document = client.get("/openapi.json").json()
    fields = {
        "graph": {}, "search": {"q": "e1"}, "entity": {"entity": "e1"},
        "answers": {"relation": ALSO, "head": "e1", "known": "true"},
        "why": {"relation": ALSO, "head": "e1", "tail": "e2"},
        "relation": {"relation": ALSO, "head": "e1"},
        "rules": {"rule": "0"},
    }  # fmt: skip
    assert set(document["paths"]) == {f"/api/{name}" for name in fields}
    for name, given in fields.items():
        operation = document["paths"][f"/api/{name}"]["get"]
        assert operation["operationId"] == name and operation["summary"]
        assert set(given) <= {p["name"] for p in operation["parameters"]}
        assert set(operation["responses"]) == {
            "200",
            "400",
            "404",
            "503",
            "4XX",
        }
        described = operation["responses"]["200"]["content"]
        schema = described["application/json"]["schema"]["$ref"]
        model = getattr(values, schema.rpartition("/")[2])
        answer = client.get(f"/api/{name}", params=given).json()
        assert model.model_validate(answer).model_dump() == answer
    why = client.get("/api/why", params=fields["why"] | {"tail": "e1"}).json()
    assert why["evidence"] is None or why["proof"]


def test_what_other_facts_add_is_shown(graph):
    settings = ProverTaskConfig(max_height=1, object_identity=False)
    dataset = loaders.load(str(graph))
    subject = dataset_subject(dataset, settings, "noisy-or-other-facts")
    client = make_client(Site(Explorer(Answerer(subject)), seconds=60))
    fields = {"relation": ALSO, "head": "e3"}
    answers = client.get("/api/answers", params=fields).json()["answers"]
    fields["tail"] = answers[0]["tail"]
    others = client.get("/api/why", params=fields).json()["other_facts"]
    assert (others["relation"], others["side"]) == (ALSO, "tail")
    page = client.get("/why", params=fields).text
    assert "Other facts" in page and f"{others['log_odds']:+.4f}" in page
