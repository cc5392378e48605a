"""New facts of a relation: the same file after an interruption at any byte, and no file of other settings."""

import json
import os

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.run import relation_facts
from funcppo.kg.run.answers import Answerer
from funcppo.kg.run.relation_facts import RelationFile
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.search.config import ProverTaskConfig

SETTINGS = {"relation": "p"}


@pytest.fixture(scope="module")
def answerer():
    """11 new facts of p, of three heads and two scores."""
    return answerer_of([])


def answerer_of(more):
    """An answerer of these and more triples."""
    triples = [("ä b", "q", f"x{i}") for i in range(4)]
    triples += [("c", "q", f"x{i}") for i in range(3)]
    triples += [("d,e", "s", f"x{i}") for i in range(4)]
    triples += [("f", "s", "x0"), ("f", "p", "x0"), ("z", "r", "z"), *more]
    rules = "p(X, Y) :- q(X, Y).\np(X, Y) :- s(X, Y)."
    dataset = loaders.from_triples(triples, rules=rules)
    cfg = ProverTaskConfig(max_height=1, smoothing=5.0)
    return Answerer(dataset_subject(dataset, cfg, "noisy-or"))


def work(answerer, file, *, stop_after=None, resume=False, **options):
    """Derive the facts, and finish unless stopped after some steps."""
    first = relation_facts.open_file(file, resume=resume, overwrite=False)
    if first is None:
        return None
    predicate = answerer.dataset.predicates.index("p") + 1
    steps = relation_facts.derive(answerer, predicate, file, first, **options)
    for n_steps, progress in enumerate(steps, 1):
        assert progress.n_all_heads == answerer.dataset.n_constants
        if n_steps == stop_after:
            return None
    return relation_facts.finish(file)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Two heads a step, whatever the time."""
    monkeypatch.setattr(relation_facts, "FIRST_STEP_HEADS", 2)
    monkeypatch.setattr(relation_facts, "MAX_STEP_HEADS", 2)


def test_the_facts_are_sorted_by_score_and_the_part_is_gone(answerer, tmp_path):
    file = RelationFile(path=tmp_path / "facts.jsonl", settings=SETTINGS)
    assert work(answerer, file) == (11, 0)
    facts = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [fact["rank"] for fact in facts] == [1] * 4 + [5] * 7
    assert {fact["head"] for fact in facts[:4]} == {"d,e"}
    assert not file.part_path.exists()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_cut_at_any_byte_is_resumed_to_the_same_file(
    answerer, tmp_path, suffix
):
    whole = RelationFile(path=tmp_path / f"w.{suffix}", settings=SETTINGS)
    work(answerer, whole, stop_after=99)
    expected = whole.path.read_bytes()

    stopped = RelationFile(path=tmp_path / f"s.{suffix}", settings=SETTINGS)
    work(answerer, stopped, stop_after=4)
    part = stopped.part_path.read_bytes()
    assert part.count(b"\n") > 3 and not stopped.path.exists()
    for n_bytes in range(0, len(part) + 1, 7):
        stopped.path.unlink(missing_ok=True)
        stopped.part_path.write_bytes(part[:n_bytes])
        work(answerer, stopped, resume=True)
        assert stopped.path.read_bytes() == expected, n_bytes


def test_facts_that_link_an_entity_to_itself_are_left_out_and_counted(tmp_path):
    """Also after an interruption, which does not forget those that were counted before it."""
    answerer = answerer_of([(name, "q", name) for name in ("ä b", "c", "f")])
    counts = {}
    for with_self in (False, True):
        path = tmp_path / f"{with_self}.jsonl"
        file = RelationFile(path=path, settings=SETTINGS)
        work(answerer, file, with_self=with_self, stop_after=4)
        counts[with_self] = work(
            answerer, file, with_self=with_self, resume=True
        )
        facts = [json.loads(line) for line in path.read_text().splitlines()]
        n_loops = sum(fact["head"] == fact["tail"] for fact in facts)
        assert (n_loops, len(facts)) == (3 * with_self, counts[with_self][0])
    assert counts == {False: (11, 3), True: (14, 0)}


def test_complete_work_is_not_done_again(answerer, tmp_path):
    file = RelationFile(path=tmp_path / "facts.jsonl", settings=SETTINGS)
    work(answerer, file)
    assert relation_facts.open_file(file, resume=True, overwrite=False) is None


def test_other_work_is_neither_resumed_nor_replaced(answerer, tmp_path):
    file = RelationFile(path=tmp_path / "facts.jsonl", settings=SETTINGS)
    work(answerer, file, stop_after=1)
    other = RelationFile(path=file.path, settings={"relation": "q"})
    with pytest.raises(ValueError, match="made with relation q, got p"):
        relation_facts.open_file(other, resume=True, overwrite=False)
    with pytest.raises(ValueError, match=r"unfinished work in .*\.part"):
        relation_facts.open_file(other, resume=False, overwrite=False)
    file.settings_path.unlink()
    with pytest.raises(ValueError, match="got no file"):
        relation_facts.open_file(file, resume=True, overwrite=False)
    first = relation_facts.open_file(other, resume=False, overwrite=True)
    assert first == 1 and not file.part_path.read_bytes()


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"
)
def test_a_full_disk_is_an_error_that_names_the_part(answerer, tmp_path):
    file = RelationFile(path=tmp_path / "facts.jsonl", settings=SETTINGS)
    first = relation_facts.open_file(file, resume=False, overwrite=False)
    file.part_path.unlink()
    file.part_path.symlink_to("/dev/full")
    predicate = answerer.dataset.predicates.index("p") + 1
    with pytest.raises(OSError) as error:
        list(relation_facts.derive(answerer, predicate, file, first))
    assert error.value.filename == str(file.part_path)
