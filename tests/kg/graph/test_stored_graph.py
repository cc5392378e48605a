"""A stored graph is the data set that was written, mapped; what is no stored graph, or a damaged one, is one line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.graph.config import DataConfig
from funcppo.kg.graph.dataset import entity_ids
from funcppo.kg.graph.loaders import from_text, load
from funcppo.kg.logic import kb

RULES = "0.5\tnew(X,Y) :- knows(X,Y)\n0.5\tknows(X,Y) :- knows(Y,X)\n"


@pytest.fixture
def source(tmp_path):
    """A folder with splits and rules, of which one defines a relation."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.tsv").write_text("Zoë\tknows\ta b\na b\tis\tQ1\nZoë\tknows\ta b\n")  # fmt: skip
    (folder / "test.tsv").write_text("late\tknows\tZoë\n")
    (folder / "facts.tsv").write_text("Q1\tis\tZoë\n")
    (folder / "rules.txt").write_text(RULES)
    return folder


@pytest.fixture
def stored(source, tmp_path):
    """The folder of the stored graph."""
    write(load(source), tmp_path / "stored", [source / "train.tsv"])
    return tmp_path / "stored"


def write(dataset, folder, sources=()):
    tables = kb.index_facts(
        dataset.facts,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )
    return loaders.write(dataset, tables, sources, folder)


def same_fields(read, expected):
    """Whether two data sets are equal, field by field."""
    for field in dataclasses.fields(expected):
        a, b = getattr(read, field.name), getattr(expected, field.name)
        if field.name in ("stored", "rule_counts"):
            continue
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name
        elif field.name == "entities":
            assert tuple(a) == b
        elif field.name != "name":
            assert a == b, field.name


def test_what_is_read_is_what_was_written(source, stored):
    expected, read = load(source), load(stored)
    same_fields(read, expected)
    assert read.fingerprint == expected.fingerprint
    assert np.shares_memory(read.train, read.facts)
    assert dict(entity_ids(read.entities)) == entity_ids(expected.entities)


def test_a_knowledge_base_shares_the_mapped_index(source, stored):
    read = load(stored)
    sizes = {"n_constants": read.n_constants, "n_predicates": read.n_predicates}
    mapped, mapped_sizes = kb.build(
        read.facts, read.rules, **sizes, tables=read.fact_tables
    )
    made, made_sizes = kb.build(read.facts, read.rules, **sizes)
    assert mapped_sizes == made_sizes
    for a, b in zip(kb.tree.leaves(mapped), kb.tree.leaves(made)):
        assert a.equal(b)
    assert np.shares_memory(mapped.facts.numpy(), read.fact_tables["facts"])


def test_other_rules_facts_or_names_do_not_pass_for_the_stored_ones(
    source, stored
):
    rules = source / "other.txt"
    rules.write_text("0.5\tis(X,Y) :- knows(X,Y)\n")
    # The relation that the stored rules define stays.
    read = load(stored, rules)
    bare = dataclasses.replace(read, entities=tuple(read.entities), stored=None)
    assert read.fingerprint == bare.fingerprint
    assert read.fingerprint != load(stored).fingerprint
    assert read.fact_tables is not None
    rules.write_text("0.5\tother(X,Y) :- knows(X,Y)\n")
    assert load(stored, rules).fact_tables is None
    shorter = dataclasses.replace(read, facts=read.facts[:1])
    assert shorter.fact_tables is None
    alone = load(stored, facts_only=True)
    assert not len(alone.test) and not len(alone.rules)


def test_a_changed_source_is_noted(source, stored):
    assert not any("has changed since" in note for note in load(stored).notes)
    (source / "train.tsv").write_text("a\tr\tb\n")
    assert any("has changed since" in note for note in load(stored).notes)


@pytest.mark.parametrize("size", [0, 1, -1])
def test_a_file_of_another_size_is_named(stored, size):
    path = stored / "index.argument_postings"
    content = path.read_bytes()
    path.write_bytes((content + b"x")[: len(content) + size] if size else b"")
    with pytest.raises(ValueError, match=r"argument_postings: expected \d+ b"):
        load(stored)
    path.unlink()
    with pytest.raises(ValueError, match="got no file"):
        load(stored)


def test_a_damaged_or_foreign_description_is_named(stored):
    path = stored / loaders.MANIFEST
    manifest = json.loads(path.read_text())
    for changed, problem in (
        ({**manifest, "n_train": 1}, "a changed or damaged one"),
        ({**manifest, "format": 99}, "expected format 1, got 99"),
        ({"kind": "other"}, "got another or a damaged file"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=problem):
            load(stored)
    path.write_text("{")
    with pytest.raises(ValueError, match="got another or a damaged file"):
        load(stored)


def test_a_folder_appears_whole_and_takes_the_place_of_one_of_its_kind_alone(
    source, stored, tmp_path, monkeypatch
):
    before = load(stored)
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(load(source), stored)
    monkeypatch.undo()
    shutil.rmtree(stored, ignore_errors=True)
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(loaders, "_digest", interrupt)
        write(load(source), stored)
    monkeypatch.undo()
    assert not stored.exists() and not list(tmp_path.glob("*.part"))

    # What a killed process leaves goes with the next one.
    (tmp_path / "stored.999999999.part").mkdir()
    write(load(source), stored)
    assert load(stored).fingerprint == before.fingerprint
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(ValueError, match=r"--index .*text: expected a folder"):
        write(load(source), source)


def interrupt(*args):
    raise KeyboardInterrupt


def test_programs_and_reading_options_are_refused(stored, tmp_path):
    with pytest.raises(ValueError, match="expected triples, got a program"):
        write(from_text("p(a)."), tmp_path / "program")
    with pytest.raises(ValueError, match="options of reading and splitting"):
        load(stored, cfg=DataConfig(columns="1,2,3"))
