"""A run as a folder: moved, without its source, and on other facts: changed, permuted, renamed, of other relations."""

import itertools
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from funcppo.kg.answers import Answerer
from funcppo.kg.config import GRAPH_FILE, ProverTaskConfig, read_config
from funcppo.kg.graph import loaders
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.run import choices
from funcppo.kg.run.run import open_run, read_graph, resume_run, write_graph
from funcppo.kg.run.subject import dataset_subject, run_subject
from funcppo.kg.run.train import train_run
from funcppo.kg.search import task as prover_task
from tests.kg.run.runs import CONFIG, QUESTIONS, on_graph, random_graph

RULES = """r(X, Y) :- s(X, Y)
r(X, Y) :- s(X, Z), r(Z, Y)
r(X, Y) :- r(Y, X)
r(X, e1) :- s(X, Z)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run folders by what they learn from; their source is beside them."""
    top = tmp_path_factory.mktemp("runs")
    graph = random_graph(n_valid=6)
    priors = replace(QUESTIONS.questions, embedding=True, bellman_ford=True)
    # a link by a new relation would change what the links say of all entities
    rules_alone = replace(
        priors, embedding=False, bellman_ford=False, no_proof=None
    )
    high = replace(CONFIG.prover, max_height=2)
    configs = {
        "questions": replace(QUESTIONS, score="auto", questions=rules_alone),
        "priors": replace(QUESTIONS, questions=priors),
        "proofs": CONFIG,
        "height 2": replace(CONFIG, prover=high),
    }
    for name, config in configs.items():
        config = on_graph(config, graph, top / "graph")
        (top / "graph" / "rules.txt").write_text(RULES)
        with pytest.MonkeyPatch.context() as patch:
            if name == "questions":  # keep what is learnt from few triples
                patch.setattr(choices, "is_better", lambda *ranks: True)
            train_run(config, top / name)
    return top


def triples_of(dataset, tables=("facts", "valid", "test")):
    """The triples of a data set by names, split by split."""
    entities, relations = dataset.entities, dataset.predicates
    return [
        [
            (entities[h - 1], relations[r - 1], entities[t - 1])
            for r, h, t in getattr(dataset, name).tolist()
        ]
        for name in tables
    ]


def scores(run):
    """The score of every atom of r by names, on both sides."""
    found = {
        side: scores_on(run_subject(run, run.score), side)
        for side in (HEAD, TAIL)
    }
    return {
        (side, *pair): value
        for side, by_pair in found.items()
        for pair, value in by_pair.items()
    }


def scores_on(subject, side):
    """The score of every atom of r by names, as an answer on a side."""
    dataset = subject.task.dataset
    r = torch.tensor([dataset.predicates.index("r") + 1])
    entity = torch.arange(1, dataset.n_constants + 1)
    atoms = torch.cartesian_prod(r, entity, entity)
    pairs = itertools.product(dataset.entities, repeat=2)
    return dict(zip(pairs, Answerer(subject).score(atoms, side), strict=True))


def shuffled(triples, seed=0):
    order = np.random.default_rng(seed).permutation(len(triples))
    return [triples[i] for i in order.tolist()]


LEARNERS = ("questions", "priors", "proofs", "height 2")


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_moved_from_its_source_is_the_same(folders, tmp_path, learner):
    """Also zipped, and in a folder that cannot be written; only a file that is gone is an absolute path."""
    before = scores(open_run(folders / learner))
    assert len({round(x, 6) for x in before.values()}) > 5
    name = str(tmp_path / "run")
    packed = shutil.make_archive(name, "zip", folders / learner)
    moved = tmp_path / "elsewhere" / "run"
    shutil.unpack_archive(packed, moved)
    config = (moved / "config.json").read_text()
    source = str(folders / "graph")
    assert source in config
    (moved / "config.json").write_text(config.replace(source, "/gone/graph"))
    os.chmod(moved, 0o555)
    run = open_run(moved)
    os.chmod(moved, 0o755)
    assert scores(run) == before
    gone = "/gone/graph is not there: the facts are those of training"
    assert gone in run.task.notes
    resumed = resume_run(read_config(moved), moved)
    stored = read_graph(folders / learner)[0]
    assert resumed.task.dataset.fingerprint == stored.fingerprint


@pytest.mark.parametrize("learner", LEARNERS)
def test_names_tell_what_is_what(folders, learner):
    """Lines in another order change nothing, nor does a relation that no rule names."""
    run = open_run(folders / learner)
    facts, valid, test = triples_of(run.task.dataset)
    more = [("e1", "aaa", "e2"), ("e5", "zzz", "e5")]
    for known in (shuffled(facts), shuffled([*more, *facts])):
        graph = loaders.from_triples(known, valid, test)
        again = open_run(folders / learner, graph=graph)
        values, before = scores(again), scores(run)
        assert values.keys() == before.keys()
        for key, value in values.items():
            assert value == pytest.approx(before[key], abs=1e-6)
    assert again.task.dataset.predicates[-2:] == ("aaa", "zzz")
    (note,) = [x for x in again.task.notes if " new, " in x]
    assert note == (
        "facts: 2 new, 0 gone; relations: 2 new, which no rule names ('aaa', 'zzz'); rules and weights are those of "
        "training"
    )


@pytest.mark.parametrize("learner", ["questions", "proofs"])
def test_entities_of_other_names_have_the_same_scores(folders, learner):
    """Where no rule names an entity: such a rule is left out; a policy that proves has vectors of entities."""
    dataset, _ = read_graph(folders / learner)
    parts = triples_of(dataset)
    other = [
        shuffled([(f"new {h}", r, f"new {t}") for h, r, t in part])
        for part in parts
    ]
    run = open_run(folders / learner, graph=loaders.from_triples(*other))
    texts = [format_rule(run.task.dataset, x) for x in run.task.dataset.rules]
    assert len(texts) == 3 and not any("e1" in text for text in texts)
    (note,) = [x for x in run.task.notes if " new, " in x]
    assert "entities: 9 new; rules: 1 left out for want of an entity" in note
    if learner == "questions":
        before, after = scores(open_run(folders / learner)), scores(run)
        for (side, h, t), value in before.items():
            if side == HEAD and t != "e1":
                moved = after[side, f"new {h}", f"new {t}"]
                assert moved == pytest.approx(value, abs=1e-6)


def test_changed_facts_give_what_an_index_made_anew_gives(folders, tmp_path):
    """By a rule score whose rules are counted again; by default they have the counts of training."""
    dataset, counts = read_graph(folders / "questions")
    facts, valid, test = triples_of(dataset)
    facts = [*facts[3:], ("e3", "s", "x1"), ("x1", "r", "e4")]
    graph = loaders.from_triples(facts, valid, test, rules=RULES)
    score = "noisy-or"
    prover = read_config(folders / "questions").prover
    options = {"object_identity": prover.object_identity, "max_height": 1}
    cfg = ProverTaskConfig(smoothing=prover.smoothing, **options)
    recounted, kept = (
        open_run(folders / "questions", graph=graph, recount=recount)
        for recount in (True, False)
    )
    found, of_training = (
        answers(run_subject(run, score)) for run in (recounted, kept)
    )
    assert found == answers(dataset_subject(graph, cfg, score))
    assert of_training.keys() == found.keys() and of_training != found
    support = kept.task.kb.support
    assert torch.equal(support.long(), counts.support)
    assert not torch.equal(recounted.task.kb.support, support)
    assert any("x1" in atom for atom in found)


def answers(subject):
    """The rounded score of each derivable atom of r by names."""
    found = scores_on(subject, TAIL)
    return {pair: round(value, 9) for pair, value in found.items() if value}


def test_the_source_is_read_as_it_is_now(folders, tmp_path):
    """Also where triples were held out at random: those stay held out, and a new triple is a fact."""
    graph = random_graph(n_valid=0)
    lines = [f"{h}\t{r}\t{t}\n" for h, r, t in triples_of(graph)[0]]
    source, folder = tmp_path / "graph.tsv", tmp_path / "run"
    source.write_text("".join(lines))
    rules = tmp_path / "rules.txt"
    rules.write_text(RULES)
    data = replace(QUESTIONS.data, split_ratios="0.8,0.1,0.1")
    config = replace(
        QUESTIONS, dataset=str(source), rules=str(rules), data=data
    )
    train_run(config, folder)
    rules.unlink()
    before = open_run(folder).task.dataset
    source.write_text("".join([*lines[1:], "e0\tr\tnew\n"]))
    run = open_run(folder)
    after = run.task.dataset
    note = "facts: 1 new, 1 gone; entities: 1 new"
    assert any(note in x for x in run.task.notes)
    for split in ("valid", "test"):
        was, is_ = (set(triples_of(d, [split])[0]) for d in (before, after))
        assert is_ <= was
    # a run is resumed on the facts of its training
    resumed = resume_run(read_config(folder), folder)
    assert resumed.task.dataset.fingerprint == before.fingerprint
    source.write_text("bad line\n")
    problem = r"run: the run needs its data set .*:1: "
    with pytest.raises(ValueError, match=problem):
        open_run(folder)


@pytest.mark.parametrize(
    ("triples", "problem"),
    [
        ([("a", "q", "b")], "expected facts of relations .*'r', 's'"),
        ([("a", "likes", "e1")], "that the rules of the run name"),
    ],
)
def test_a_graph_that_no_rule_speaks_of_is_refused(folders, triples, problem):
    with pytest.raises(ValueError, match=problem):
        open_run(folders / "questions", graph=loaders.from_triples(triples))


def test_a_damaged_graph_is_one_line(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders / "questions", folder)
    (folder / GRAPH_FILE).write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ValueError, match=r"graph\.npz: expected a checkpoint"):
        open_run(folder)


def test_names_of_all_kinds_are_kept(folders, tmp_path):
    names = [" a ", "b,c", "d'e", 'f"g', "#h", "i\tj", "Zoë 🙂", "\x1b[0m"]
    dataset = loaders.from_triples(
        [(name, "in here", names[0]) for name in names],
        test=[("new", "other", "b,c")],
        rules="'in here'(X, Y) :- 'in here'(Y, X)",
    )
    task = prover_task.build_task(dataset, CONFIG.prover)
    write_graph(task, tmp_path)
    read, _ = read_graph(tmp_path)
    assert read.entities == dataset.entities
    assert read.fingerprint == dataset.fingerprint


def test_a_proof_is_by_the_rule_that_says_most_for_what_is_asked(folders):
    """Its p is the share of that rule in the answer on the side that is asked for."""
    run = open_run(folders / "questions")
    answerer = Answerer(run_subject(run, run.score))
    dataset, n_other = run.task.dataset, 0
    r = dataset.predicates.index("r") + 1
    for h in range(1, 10):
        for t in range(1, 10, 2):
            atom = torch.tensor([r, h, t])
            found = [answerer.explain(atom, side) for side in (HEAD, TAIL)]
            for why in found:
                if why.evidence is None:
                    continue
                root, first = why.proof.nodes[0], why.evidence.rules[0]
                assert root.rule == first.rule
                assert root.probability == pytest.approx(first.share)
            shares = [x.evidence and x.evidence.rules[0].share for x in found]
            n_other += shares[0] != shares[1]
    assert n_other > 5  # the sides differ
