"""Mined rules are kept by a hash of what they depend on, and found again."""

from __future__ import annotations

import dataclasses
import random

import pytest

from funcppo.data import from_triples, load
from funcppo.data.rule_tables import format_rule_table
from funcppo.experiment import rule_cache
from funcppo.mining.config import MiningConfig

SMALL = MiningConfig(max_length=1, min_support=2)


def ignore(message: str) -> None:
    """No progress is shown."""


def test_rules_are_mined_once(tmp_path, monkeypatch):
    dataset = load("family_tree:30:1")
    first = rule_cache.get_or_mine_rules(
        dataset, SMALL, "cpu", ignore, tmp_path
    )
    assert "mined in" in first.message and first.path.parent == tmp_path
    monkeypatch.setattr(rule_cache, "mine_dataset", None)
    again = rule_cache.get_or_mine_rules(
        dataset, SMALL, "cpu", ignore, tmp_path
    )
    assert again.path == first.path and "mined before" in again.message


def test_other_data_settings_or_miners_have_other_files(tmp_path, monkeypatch):
    dataset = load("family_tree:30:1")
    mine = lambda data, cfg: (
        rule_cache.get_or_mine_rules(data, cfg, "cpu", ignore, tmp_path).path
    )
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
    path = rule_cache.get_or_mine_rules(
        dataset, SMALL, "cpu", ignore, tmp_path
    ).path
    mined = rule_cache.mine_dataset(dataset, SMALL)
    again = load("family_tree:30:1", str(path))
    assert again.rules.tolist() == mined.dataset.rules.tolist() and len(
        mined.statistics.support
    ) == len(again.rules)


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
        paths.add(
            rule_cache.get_or_mine_rules(
                data, cfg, "cpu", ignore, tmp_path
            ).path
        )
    assert len(texts) == len(paths) == 1
    assert next(iter(paths)).read_text() in texts


def test_data_without_a_pattern_are_an_error(tmp_path):
    none = MiningConfig(max_length=1, min_support=10**6)
    with pytest.raises(
        ValueError,
        match=r"none with support 1000000 and confidence 0\.01: expected --rules FILE",
    ):
        rule_cache.get_or_mine_rules(
            load("family_tree:30:1"), none, "cpu", ignore, tmp_path
        )
