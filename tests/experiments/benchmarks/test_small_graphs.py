"""Small graphs: how they are drawn from a set, and the row of one run."""

import gzip
import itertools
import json
import random

import pytest
import torch

from experiments.benchmarks import default_results, small_graphs
from experiments.benchmarks.small_graphs import Spec
from funcppo.kg.graph.loaders import load
from funcppo.kg.run import run_start
from tests.experiments.benchmarks.forked_call import call_forked

# two parts: a ring of 400 entities with chords, and a pair of entities
RING = [
    (f"e{i}", relation, f"e{(i + step) % 400}")
    for i in range(400)
    for relation, step in (("next", 1), ("second", 2), ("far", 57))
]
PAIR = [("x", "next", "y"), ("y", "next", "x")]
TRIPLES = [*PAIR, *RING]


def entities(triples) -> set[str]:
    return {entity for head, _, tail in triples for entity in (head, tail)}


def n_parts(triples) -> int:
    """How many connected parts triples have."""
    parts: list[set[str]] = []
    for head, _, tail in triples:
        joined = {head, tail}
        apart = []
        for part in parts:
            if part & joined:
                joined |= part
            else:
                apart.append(part)
        parts = [*apart, joined]
    return len(parts)


@pytest.mark.parametrize("name", ["kinships", "wn18rr"])
@pytest.mark.parametrize("n", [10, 250, 1200])
def test_splits_are_disjoint_and_of_their_sizes(name, n):
    splits = small_graphs.draw_graph(TRIPLES, Spec(name, n, 4))
    sizes = {"train": n * 8 // 10, "valid": n // 10, "test": n // 10}
    assert {split: len(rows) for split, rows in splits.items()} == sizes
    drawn = set(itertools.chain(*splits.values()))
    assert len(drawn) == n and drawn <= set(TRIPLES)


@pytest.mark.parametrize("name", ["kinships", "wn18rr"])
def test_a_graph_depends_on_set_size_and_seed_alone(name):
    spec = Spec(name, 200, 4)
    graph = small_graphs.draw_graph(TRIPLES, spec)
    random.seed(1)
    assert small_graphs.draw_graph(TRIPLES, spec) == graph
    others = [spec._replace(seed=5), spec._replace(n_triples=210)]
    for other in others:
        drawn = small_graphs.draw_graph(TRIPLES, other)
        assert not set(drawn["test"]) <= set(graph["test"])


@pytest.mark.parametrize("seed", range(5))
def test_a_part_of_a_large_set_is_connected(seed):
    splits = small_graphs.draw_graph(TRIPLES, Spec("fb15k-237", 60, seed))
    drawn = list(itertools.chain(*splits.values()))
    assert n_parts(drawn) == 1
    assert not entities(drawn) & entities(PAIR)
    # The same number at random is not.
    assert n_parts(random.Random(seed).sample(TRIPLES, 60)) > 1


def test_of_an_entity_few_facts_are_followed():
    """Leaves of a hub have a twig each: a part holds those of the leaves that are followed, and of one to start at."""
    star = [("hub", "has", f"leaf{i}") for i in range(200)]
    twigs = [(f"leaf{i}", "has", f"twig{i}") for i in range(200)]
    most = 2 * small_graphs.MAX_FACTS
    for seed in range(5):
        rng = random.Random(seed)
        drawn = small_graphs.draw_connected(rng, star + twigs, most)
        assert n_parts(drawn) == 1 and len(set(drawn)) == most
        with pytest.raises(ValueError, match="connected triples"):
            small_graphs.draw_connected(rng, star + twigs, most + 3)


def test_too_large_a_part_is_an_error():
    with pytest.raises(ValueError, match="expected 3 connected triples"):
        small_graphs.draw_connected(random.Random(0), PAIR, 3)


def test_a_set_has_the_sizes_that_it_has_triples_for():
    triples = {"nations": TRIPLES[:20], "umls": TRIPLES[:30]}
    specs = small_graphs.make_specs(triples, (20, 30), (4, 5))
    by_seed = [("nations", 20), ("umls", 20), ("umls", 30)]
    assert specs == [(*of_seed, seed) for seed in (4, 5) for of_seed in by_seed]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_train_file_is_read_without_its_repetitions(tmp_path, is_packed):
    text = "".join("\t".join(row) + "\n" for row in [*PAIR, PAIR[0]])
    if is_packed:
        (tmp_path / "train.txt.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (tmp_path / "train.txt").write_text(text)
    assert small_graphs.read_triples(tmp_path) == PAIR


def test_triples_of_all_files_are_read_but_for_those_that_are_missing(
    tmp_path,
):
    folder = tmp_path / "set"
    small_graphs.write_splits(folder, {"train": PAIR, "test": RING[:3]})
    splits = ("train", "valid", "test")
    read = small_graphs.read_triples(folder, splits)
    assert read == [*PAIR, *RING[:3]]


@pytest.mark.parametrize("most", [5, 2000])
def test_a_larger_test_asks_what_the_graph_does_not_know_of_what_it_does(
    most, monkeypatch
):
    monkeypatch.setattr(small_graphs, "MAX_LARGE_TEST", most)
    spec = Spec("umls", 400, 4)
    splits = small_graphs.draw_graph(RING, spec)
    unseen_relation = ("e1", "unseen", "e2")
    triples = [*TRIPLES, ("e1", "next", "stranger"), unseen_relation]
    test = small_graphs.draw_test(triples, splits, spec)
    known = entities(splits["train"])
    expected = {
        triple
        for triple in RING
        if triple not in {*splits["train"], *splits["valid"]}
        and entities([triple]) <= known
    }
    assert len(set(test)) == len(test) == min(most, len(expected))
    assert set(test) <= expected and len(expected) > 100
    assert small_graphs.draw_test(triples, splits, spec) == test


def test_a_paired_gain_by_hand():
    rank = torch.tensor([1.0, 0.5, 0.25, 0.75])
    other = torch.tensor([0.5, 0.5, 0.5, 0.5])
    gain = small_graphs.paired_gain(rank, other)
    # differences .5, 0, -.25, .25; squares about their mean .125 add up to .3125
    assert gain == pytest.approx((0.125, (0.3125 / 3 / 4) ** 0.5))


def test_a_graph_is_read_as_it_was_drawn(tmp_path):
    splits = small_graphs.draw_graph(TRIPLES, Spec("umls", 300, 4))
    small_graphs.write_splits(tmp_path / "graph", splits)
    dataset = load(str(tmp_path / "graph"))
    for name, rows in splits.items():
        assert len(getattr(dataset, name)) == len(rows)
    assert set(dataset.entities) >= entities(splits["train"])


def test_a_record_goes_on_where_it_ended(tmp_path, monkeypatch):
    data, record = tmp_path / "data", tmp_path / "record.json"
    small_graphs.write_splits(data / "nations", {"train": TRIPLES})
    options = ["--steps", "64", "--ppo.n-envs", "8", "--strategy", "eager"]
    called = []

    def call(words):
        called.append(words)
        return call_forked([*words, *options])

    monkeypatch.setattr(default_results, "call", call)
    words = ["x", "--data", str(data), "--out", str(record)]
    words += ["--sets", "nations", "--triples", "600", "--seeds"]
    for seeds in (["4"], ["4", "5"]):
        monkeypatch.setattr("sys.argv", [*words, *seeds])
        small_graphs.main()

    rows = json.loads(record.read_text())["rows"]
    assert [row["seed"] for row in rows] == [4, 5] and len(called) == 2
    for row in rows:
        assert (row["set"], row["triples"]) == ("nations", 600)
        assert row["n_test_queries"] == 60 and row["n_rules"] > 0
        ways = {"untrained", "rule_score", "trained", "answers"}
        assert set(row["mrr"]) == ways
        assert all(0 < mrr <= 1 for mrr in row["mrr"].values())
        is_policy = row["default_score"] == row["score"]
        source = "trained" if is_policy else "rule_score"
        assert row["mrr"]["answers"] == row["mrr"][source]
        assert row["machine"]["torch"] and "commit" in row["machine"]

        # The test of the graph, ranked again, is ranked as in training.
        gain = row["mrr"]["trained"] - row["mrr"]["untrained"]
        assert row["gain"]["trained"]["mean"] == pytest.approx(gain, abs=1e-9)
        large = row["large_test"]
        assert large["n_test_queries"] > 200 and set(large["mrr"]) == ways
        gain = large["mrr"]["trained"] - large["mrr"]["untrained"]
        assert large["gain"]["trained"]["mean"] == pytest.approx(gain)
        gain = large["mrr"]["answers"] - large["mrr"]["rule_score"]
        assert large["gain"]["answers"]["mean"] == pytest.approx(gain)


@pytest.mark.parametrize(
    ("default", "answers"), [("evidence", 0.3), ("noisy-or", 0.1)]
)
def test_answers_are_by_the_score_that_the_run_ranks_by(
    default, answers, monkeypatch
):
    mrr = {"noisy-or": 0.1, "evidence, untrained": 0.2}
    mrr |= {"evidence, trained": 0.3, "max-confidence": 0.4}
    test = {name: {"mrr": value, "ceiling": 1.0} for name, value in mrr.items()}
    results = {"score": "evidence", "default_score": default, "test": test}
    results |= {"rules": 7, "height": 1, "n_test_queries": 10}
    training = {"seconds": 1.0, "peak_mb": 1.0}
    run = {"results": results, "rule_score": "noisy-or", "machine": {}}
    run |= {"training": training}
    monkeypatch.setattr(default_results, "train_into", lambda *_: run)
    monkeypatch.setattr(run_start, "open_run", lambda _: None)
    monkeypatch.setattr(small_graphs, "with_test", lambda *_: None)
    monkeypatch.setattr(small_graphs, "rank_test", lambda _: {"gain": {}})
    row = small_graphs.run_graph(Spec("umls", 100, 4), TRIPLES, TRIPLES)
    ways = {"untrained": 0.2, "rule_score": 0.1, "trained": 0.3}
    assert row["mrr"] == ways | {"answers": answers}


def test_at_the_defaults_nothing_but_the_seed_is_set(monkeypatch):
    def stop(words):
        assert words[0] == "train" and words[2] == "--out"
        assert words[4:] == ["--seed", "0"]
        raise InterruptedError

    monkeypatch.setattr(default_results, "call", stop)
    with pytest.raises(InterruptedError):
        small_graphs.run_graph(Spec("umls", 100, 4), TRIPLES, TRIPLES)
