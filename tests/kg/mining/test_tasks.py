"""Tasks of mining: neither who does them, nor when, nor what was known then changes what is mined."""

from __future__ import annotations

from random import Random

import pytest
import torch

from funcppo.kg.mining import counting, miner, path_rules, paths
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.mining.tasks import map_alone


def random_graph(seed):
    """50 entities, 3 predicates, some 200 facts."""
    random = Random(seed)
    facts = {
        (
            random.randint(1, 3),
            int(50 * random.random() ** 2) + 1,
            random.randint(1, 50),
        )
        for _ in range(200)
    }
    return torch.tensor(sorted(facts))


def with_old_news(context, work, tasks, latest):
    """Do the tasks backwards, all with what was known before the first; yield in order."""
    known = latest()
    results = [list(work(context, lambda: known, task)) for task in tasks[::-1]]
    for result in results[::-1]:
        yield from result


@pytest.mark.parametrize(
    ("max_rows", "n_votes", "is_sampled"),
    [(10**9, 1, False), (12_000, 2, True), (3_000, 1, True)],
)
def test_what_was_known_when_a_task_was_done_does_not_matter(
    monkeypatch, max_rows, n_votes, is_sampled
):
    """Whole and sampled searches, exact counts and estimates, in small chunks; bit for bit."""
    cfg = MiningConfig(
        min_support=2, max_rows=max_rows, votes_per_fact=n_votes, seconds=1e6
    )
    for module in (paths, path_rules, counting):
        monkeypatch.setattr(module, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(path_rules, "MAX_BODY_ROWS", 2000)
    monkeypatch.setattr(path_rules, "SLICE_ROWS", 2000)
    monkeypatch.setattr(path_rules, "MIN_SAMPLE_SOURCES", 8)
    alone, other = (
        miner.mine_rules(
            random_graph(0), 3, 50, cfg, map_tasks=map_tasks, n_processes=n
        )
        for map_tasks, n in ((map_alone, 1), (with_old_news, 2))
    )
    for name, column in zip(alone.rules._fields, alone.rules):
        assert torch.equal(column, getattr(other.rules, name)), name
    assert alone.notes == other.notes
    assert alone.stages == other.stages
    assert alone.n_candidates == other.n_candidates
    assert alone.rows == other.rows
    assert len(alone.rules.support)
    assert any("searched from" in note for note in alone.notes) == is_sampled
