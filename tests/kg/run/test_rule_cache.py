"""Mined rules are kept by a hash of what they depend on, and found again."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from funcppo.kg.graph.loaders import from_triples, load
from funcppo.kg.graph.rule_tables import format_rule_table
from funcppo.kg.logic import kb
from funcppo.kg.logic.consequences import count_rules
from funcppo.kg.mining import miner
from funcppo.kg.mining.budget import ignore_progress
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.run import rule_cache

SMALL = MiningConfig(max_length=1, min_support=2)


def get_or_mine_rules(dataset, cfg, folder, announce=lambda _: None):
    return rule_cache.get_or_mine_rules(
        dataset, cfg, "cpu", ignore_progress, announce, folder
    )


def build_kb(dataset):
    return kb.build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )


def test_rules_are_mined_once(tmp_path, monkeypatch):
    dataset = load("family_tree:30:1")
    first = get_or_mine_rules(dataset, SMALL, tmp_path)
    assert "mined in" in first.message and first.path.parent == tmp_path
    monkeypatch.setattr(rule_cache, "mine_dataset", None)
    again = get_or_mine_rules(dataset, SMALL, tmp_path)
    assert again.path == first.path and "mined before" in again.message


def test_settings_that_are_not_given_are_chosen_by_the_known_facts_alone():
    dense = [(a, "knows", b) for a in "abcd" for b in "abcd"]
    held_out = [(f"x{i}", "knows", f"y{i}") for i in range(10)]
    dataset = from_triples(dense, held_out)
    cfg = rule_cache.mining_config(dataset, seconds=7, max_length=1)
    assert (cfg.seconds, cfg.max_length) == (7, 1)
    assert cfg.votes_per_fact == 3 and cfg.min_support == 3

    sparse = from_triples([*dense, *held_out])
    assert rule_cache.mining_config(sparse) == MiningConfig()


def test_notes_on_mining_are_repeated_with_cached_rules(tmp_path):
    dataset = load("family_tree:30:1")
    cfg = dataclasses.replace(SMALL, max_rows=100)
    first = get_or_mine_rules(dataset, cfg, tmp_path)
    assert first.notes
    assert get_or_mine_rules(dataset, cfg, tmp_path).notes == first.notes

    first.path.with_suffix(".notes.json").unlink()
    (note,) = get_or_mine_rules(dataset, cfg, tmp_path).notes
    assert str(first.path) in note and "is not known" in note


def test_other_data_settings_or_miners_have_other_files(tmp_path, monkeypatch):
    dataset = load("family_tree:30:1")
    mine = lambda data, cfg: get_or_mine_rules(data, cfg, tmp_path).path
    paths = {
        mine(dataset, SMALL),
        mine(load("family_tree:30:2"), SMALL),
        mine(dataset, dataclasses.replace(SMALL, min_support=3)),
    }
    monkeypatch.setattr(
        rule_cache, "MINER_VERSION", rule_cache.MINER_VERSION + 1
    )
    assert len(paths | {mine(dataset, SMALL)}) == 4


def test_the_file_holds_the_rules_that_mining_returns(tmp_path):
    dataset = load("family_tree:30:1")
    path = get_or_mine_rules(dataset, SMALL, tmp_path).path
    mined = rule_cache.mine_dataset(dataset, SMALL)
    again = load("family_tree:30:1", str(path))
    assert again.rules.tolist() == mined.dataset.rules.tolist() and len(
        mined.statistics.support
    ) == len(again.rules)


def test_the_counts_of_the_file_are_those_of_the_joins(tmp_path):
    dataset = load("family_tree:60:1")
    cfg = dataclasses.replace(SMALL, max_length=3, constants=True)
    mined = load(
        "family_tree:60:1", get_or_mine_rules(dataset, cfg, tmp_path).path
    )
    assert mined.rule_counts is not None and (mined.rule_counts >= 0).all()
    counted = count_rules(*build_kb(mined))
    assert np.stack(counted, axis=1).tolist() == mined.rule_counts.tolist()
    in_memory = rule_cache.mine_dataset(dataset, cfg).dataset
    assert np.array_equal(in_memory.rule_counts, mined.rule_counts)

    # Counts that are known are not made again, and those that are not are.
    known = torch.from_numpy(mined.rule_counts) + 1
    known[1] = -1
    counted = torch.stack(count_rules(*build_kb(mined), known=known), dim=1)
    known[1] = torch.from_numpy(mined.rule_counts)[1]
    assert torch.equal(counted, known)


def test_neither_the_order_of_lines_nor_held_out_names_change_the_rules(
    tmp_path,
):
    """Many of these rules tie: they are taken in the order of names. `max_rows` samples entities and facts."""
    generator = random.Random(0)
    names = [f"entity{i}" for i in range(30)]
    triples = list(
        {
            (
                generator.choice(names),
                f"relation{generator.randrange(6)}",
                generator.choice(names),
            )
            for _ in range(300)
        }
    )
    cfg = MiningConfig(
        max_length=2, min_support=1, constants=True, max_rows=1000
    )
    held_out = [("unseen", "zeroth", "aaa")]
    texts: set[str] = set()
    paths = set()
    for valid in ([], [], held_out):
        generator.shuffle(triples)
        data = from_triples(triples, valid=valid)
        mined = rule_cache.mine_dataset(data, cfg)
        texts.add(format_rule_table(mined.dataset, mined.statistics, "tsv"))
        paths.add(get_or_mine_rules(data, cfg, tmp_path).path)
    assert len(texts) == len(paths) == 1
    assert next(iter(paths)).read_text() in texts


def test_data_without_a_pattern_are_an_error(tmp_path):
    none = MiningConfig(max_length=1, min_support=10**6)
    with pytest.raises(
        ValueError,
        match=r"none with support 1000000 and confidence 0\.01: expected --rules FILE",
    ):
        get_or_mine_rules(load("family_tree:30:1"), none, tmp_path)


def test_kept_rules_are_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dataset = load("family_tree:30:1")
    mined = rule_cache.mine_dataset(dataset, SMALL)
    path = rule_cache.cache_rules(dataset, SMALL, mined)
    assert get_or_mine_rules(dataset, SMALL, None).path == path


def test_an_interrupt_keeps_the_rules_elsewhere(tmp_path, monkeypatch):
    def stop_search(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(miner, "_count_pca_pairs", stop_search)
    lines: list[str] = []
    dataset = load("family_tree:30:1")
    with pytest.raises(KeyboardInterrupt):
        get_or_mine_rules(dataset, SMALL, tmp_path, lines.append)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".partial.tsv") and str(path) in lines[-1]
    assert len(load("family_tree:30:1", str(path)).rules)


def test_what_was_sampled_is_noted_when_it_is_mined(tmp_path):
    cfg = dataclasses.replace(SMALL, max_length=3, max_rows=20_000)
    found = get_or_mine_rules(load("family_tree:400:1"), cfg, tmp_path)
    assert any("from" in note for note in found.notes)


def test_rules_beyond_what_can_be_held_are_left_out_and_counted(tmp_path):
    # Everybody knows everybody by the second rule, a few by the first.
    lines = "#train_body_pairs\trule\n2\tp(X, Y) :- q(X, Y)\n16\tp(X, Y) :- r(X, Z), r(Y, Z)\n"
    path = tmp_path / "rules.tsv"
    path.write_text(lines)
    names = [f"e{i}" for i in range(4)]
    train = [("e0", "q", "e1"), ("e2", "q", "e3")]
    train += [(name, "r", "e0") for name in names]
    dataset = from_triples(
        train,
        valid=[("e0", "p", "e1")],
        test=[("e0", "p", "e2")],
        rules="p(X, Y) :- q(X, Y)\np(X, Y) :- r(X, Z), r(Y, Z)",
    )
    mined = rule_cache.RuleFile(path, "mined", ("a note",))

    # One of four heads and two of four tails are asked for: 1 - 3/4 * 2/4 of all pairs.
    share = 1 - 3 / 4 * 2 / 4
    assert rule_cache.keep_holdable(mined, dataset, 18 * share) == mined
    kept = rule_cache.keep_holdable(mined, dataset, 18 * share - 0.1)
    assert kept.path != path and path.read_text() == lines
    assert kept.path.read_text().splitlines() == lines.splitlines()[:2]
    assert kept.notes[0] == "a note"
    assert kept.notes[1].startswith("the last 1 of 2 mined rules are left out")
    # One rule is always kept.
    least = rule_cache.keep_holdable(mined, dataset, 0.1)
    assert len(least.path.read_text().splitlines()) == 2

    # Counts that are those of the facts stay so.
    counts = np.array([[1, 2, 0], [1, 16, 0]])
    counted = dataclasses.replace(dataset, rule_counts=counts)
    kept = rule_cache.keep_holdable(mined, counted, 18 * share - 0.1)
    *rows, mark = kept.path.read_text().splitlines()
    assert rows == lines.splitlines()[:2] and mark.startswith("#counts\t")
