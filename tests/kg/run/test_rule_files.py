"""Mined rules are kept by a hash of what they depend on."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from funcppo.kg.graph.dataset import from_splits
from funcppo.kg.graph.loaders import from_triples, load, with_rule_file
from funcppo.kg.graph.rules import format_rule_table
from funcppo.kg.logic import kb
from funcppo.kg.logic.fixpoint import count_rules
from funcppo.kg.mining import MiningConfig
from funcppo.kg.mining.counts import ignore_progress
from funcppo.kg.run import rule_files

SMALL = MiningConfig(max_length=1, min_support=2)


def get_or_mine_rules(dataset, cfg, folder, **seconds):
    return rule_files.get_or_mine_rules(
        dataset, cfg, "cpu", ignore_progress, folder, **seconds
    )


def build_kb(dataset):
    sizes = {x: getattr(dataset, x) for x in ("n_constants", "n_predicates")}
    return kb.build(dataset.facts, dataset.rules, **sizes)


def test_notes_on_mining_are_repeated_with_cached_rules(tmp_path):
    dataset = load("family_tree:30:1")
    cfg = dataclasses.replace(SMALL, max_rows=1000, max_length=2)
    first = get_or_mine_rules(dataset, cfg, tmp_path)
    assert first.notes
    assert get_or_mine_rules(dataset, cfg, tmp_path).notes == first.notes

    first.path.with_suffix(".notes.json").unlink()
    (note,) = get_or_mine_rules(dataset, cfg, tmp_path).notes
    assert str(first.path) in note and "is not known" in note
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="nobody else may write"):
        get_or_mine_rules(dataset, cfg, tmp_path)


def test_rules_that_time_cut_are_not_kept(tmp_path):
    """A run beside busy processes leaves the next one its time."""
    dataset = load("family_tree:30:1")
    cfg = MiningConfig(max_length=2, min_support=2)
    cut = get_or_mine_rules(dataset, cfg, tmp_path, seconds=1e-9)
    whole = get_or_mine_rules(dataset, cfg, tmp_path)
    assert "not kept" in cut.notes[-1] and cut.path.parent != tmp_path
    assert whole.path.parent == tmp_path
    assert len(cut.path.read_text()) < len(whole.path.read_text())


def test_rules_are_mined_where_no_cache_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    dataset = load("family_tree:30:1")
    found = get_or_mine_rules(dataset, SMALL, None)
    assert found.path.read_text() and "not kept" in found.notes[-1]
    with pytest.raises(OSError):
        get_or_mine_rules(dataset, SMALL, tmp_path / "file" / "given")


def test_rules_are_mined_from_train_and_not_from_further_facts(tmp_path):
    people = load("family_tree:60:1")
    entities, predicates = people.entities, people.predicates
    rows = people.train[:, :3].tolist()
    names = [
        (entities[h - 1], predicates[r - 1], entities[t - 1])
        for r, h, t in rows
    ]
    splits = {"train": names[::2], "valid": [], "test": []}
    alone, wider = (
        from_splits("people", splits | {"facts": facts})
        for facts in ([], names[1::2])
    )
    paths = []
    for dataset in (alone, wider):
        folder = tmp_path / str(len(dataset.facts))
        paths.append(get_or_mine_rules(dataset, SMALL, folder).path)
    assert paths[0].name == paths[1].name
    assert paths[0].read_bytes() == paths[1].read_bytes()
    # Its counts are those of train.
    mined = rule_files.mine_dataset(wider, SMALL)
    assert mined.dataset.rule_counts is None
    assert len(mined.dataset.facts) == len(names)
    read = with_rule_file(wider, paths[1])
    assert read.rule_counts is None and len(read.rules)


def test_the_counts_of_the_file_are_those_of_the_joins(tmp_path):
    dataset = load("family_tree:60:1")
    cfg = dataclasses.replace(SMALL, max_length=3, constants=True)
    mined = load(
        "family_tree:60:1", get_or_mine_rules(dataset, cfg, tmp_path).path
    )
    assert mined.rule_counts is not None and (mined.rule_counts >= 0).all()
    counted = count_rules(*build_kb(mined))
    assert np.stack(counted, axis=1).tolist() == mined.rule_counts.tolist()
    in_memory = rule_files.mine_dataset(dataset, cfg).dataset
    assert np.array_equal(in_memory.rule_counts, mined.rule_counts)

    # Counts that are known are not made again, and those that are not are.
    known = torch.from_numpy(mined.rule_counts) + 1
    known[1] = -1
    counted = torch.stack(count_rules(*build_kb(mined), known=known), dim=1)
    known[1] = torch.from_numpy(mined.rule_counts)[1]
    assert torch.equal(counted, known)


def test_neither_order_nor_held_out_names_change_rules(tmp_path):
    """Many of these rules tie: they are taken in the order of names. `max_rows` samples entities and facts."""
    generator = random.Random(0)
    names = [f"entity{i}" for i in range(30)]
    name, number = lambda: generator.choice(names), generator.randrange
    triples = {(name(), f"relation{number(6)}", name()) for _ in range(300)}
    triples = list(triples)
    cfg = MiningConfig(
        max_length=2, min_support=1, constants=True, max_rows=1000
    )
    held_out = [("unseen", "zeroth", "aaa")]
    texts: set[str] = set()
    paths = set()
    for valid in ([], [], held_out):
        generator.shuffle(triples)
        data = from_triples(triples, valid=valid)
        mined = rule_files.mine_dataset(data, cfg)
        texts.add(format_rule_table(mined.dataset, mined.statistics, "tsv"))
        paths.add(get_or_mine_rules(data, cfg, tmp_path).path)
    assert len(texts) == len(paths) == 1
    assert next(iter(paths)).read_text() in texts


def test_time_that_ends_before_a_rule_is_said(tmp_path):
    """A grid has rules of length 3 alone."""
    at = lambda i, j: f"{i}-{j}"
    steps = {"right": (0, 1), "down": (1, 0)}
    triples = [
        (at(i, j), name, at(i + down, j + right))
        for i in range(6)
        for j in range(6)
        for name, (down, right) in steps.items()
    ]
    grid, cfg = from_triples(triples), MiningConfig(max_length=3)
    line = "none found in the 0 s that there were for mining: .* more --seconds"
    with pytest.raises(ValueError, match=line):
        get_or_mine_rules(grid, cfg, tmp_path, seconds=1e-9)
    assert "mined in" in get_or_mine_rules(grid, cfg, tmp_path).message


def test_data_without_a_pattern_are_an_error(tmp_path):
    none = MiningConfig(max_length=1, min_support=10**6)
    problem = (
        r"none with support 1000000 and confidence 0\.01: expected --rules FILE"
    )
    with pytest.raises(ValueError, match=problem):
        get_or_mine_rules(load("family_tree:30:1"), none, tmp_path)
