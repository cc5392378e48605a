"""Why a lookup of many atoms at once costs more among 20 million facts, other layouts, and the gain of huge pages.

    python experiments/benchmarks/lookup.py --out experiments/results/lookup.json

Microseconds a batch, 20 thousand facts against 20 million of the same fan-out, by turns in one process, medians; in one
process with the large tables in huge pages, as the library has them, in another without. Rows:

    key        the keys of the atoms, before any table is read: what no layout can save
    buckets    the read of `fact_id`: the start of a bucket, then a window as wide as the fullest bucket, as one row
    words      the same places read word by word, keys and values side by side
    columns    the same, keys and values in tables of their own
    perfect    the reads of a perfect hash, a lower bound of any: a seed out of a table of a quarter as many words, then
               one key and its value anywhere; the words that it reads are random, so it answers nothing
    facts_for  the whole of `lookup_facts`, object open, 8 slots

The four reads include the time of `key`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.logic import (
    LARGE,
    MAX_FACTS_PER_LOOKUP,
    SEED,
    SMALL,
    RandomKB,
    build_random_kb,
    compare_sizes,
    random_facts,
    timed,
)
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.provenance import describe_machine
from funcppo.kg.logic import hugepages, kb, row_index

BATCHES = (1024, 16384)
REPEATS = 100

# The value of each key, and whether the table has it.
Read = Callable[[Tensor], tuple[Tensor, Tensor]]


def main() -> None:
    """Measure in two fresh processes and write the record; or in this one with --here."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument(
        "--here",
        choices=("huge", "small"),
        help="measure in this process, with pages of this size",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.here is not None:
        if args.here == "small":
            hugepages.MIN_HUGE_PAGE_BYTES = 1 << 62
        print(json.dumps(measure()))
        return

    rows: list[Row] = []
    for pages in ("huge", "small"):
        done = subprocess.run(
            [sys.executable, __file__, "--here", pages],
            stdout=subprocess.PIPE,
            check=True,
        )
        rows += [{"pages": pages} | row for row in json.loads(done.stdout)]
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "seed": SEED,
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    if args.out is not None:
        write_record(args.out, record)


def measure() -> list[Row]:
    """The rows of this process."""
    sides = [
        build_random_kb(random_facts(*size), size[1]) for size in (SMALL, LARGE)
    ]
    reads = [layouts(side.kb) for side in sides]
    draw = np.random.default_rng(SEED + 1)
    rows = []
    for batch in BATCHES:
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            for i, side in enumerate(sides):
                for name, seconds in time_reads(
                    side, reads[i], batch, draw
                ).items():
                    times.setdefault((name, i), []).append(1e6 * seconds)
        for name in ("key", *reads[0], "facts_for"):
            rows.append(
                {"batch": batch, "reads": name}
                | compare_sizes(times[name, 0], times[name, 1])
            )
    return rows


def time_reads(
    side: RandomKB,
    reads: dict[str, Read],
    batch: int,
    draw: np.random.Generator,
) -> dict[str, float]:
    """Seconds of each read, each for random facts of its own."""
    seconds = {}
    for name, read in reads.items():
        row = torch.from_numpy(draw.integers(0, len(side.facts), batch))
        atoms = side.kb.facts[row].long()
        key_seconds, (key, _) = timed(
            kb.encode_atoms, side.kb.key_prefixes, side.sizes, atoms
        )
        read_seconds, (value, is_found) = timed(read, key)
        if name != "perfect":
            assert bool(is_found.all()) and torch.equal(value, row)
        seconds["key"] = key_seconds
        seconds[name] = key_seconds + read_seconds

    row = torch.from_numpy(draw.integers(0, len(side.facts), batch))
    variable = torch.full((batch, 1), side.sizes.n_constants + 1)
    goals = torch.cat([side.kb.facts[row, :2].long(), variable], dim=1)
    seconds["facts_for"], _ = timed(
        kb.lookup_facts, side.kb, side.sizes, goals, MAX_FACTS_PER_LOOKUP
    )
    return seconds


def layouts(knowledge_base: kb.KnowledgeBase) -> dict[str, Read]:
    """The ways to read the table of facts."""
    table = knowledge_base.fact_index
    return {
        "buckets": lambda key: row_index.hash_lookup(table, key),
        "words": words_layout(table),
        "columns": columns_layout(table),
        "perfect": perfect_layout(table),
    }


def words_layout(table: row_index.HashTable) -> Read:
    """Word by word, keys and values side by side."""
    last_start = table.entries.numel() // 2 - table.bucket_slots.numel()

    def read(key: Tensor) -> tuple[Tensor, Tensor]:
        start = bucket_start(table, key).clamp_max(last_start)
        place = 2 * (start[:, None] + table.bucket_slots)
        same = (
            table.entries.index_select(0, place.view(-1)).view(place.shape)
            == key[:, None]
        )
        value = table.entries.index_select(
            0, torch.where(same, place, 0).sum(1) + 1
        )
        return value, same.any(1)

    return read


def columns_layout(table: row_index.HashTable) -> Read:
    """Word by word, keys and values in tables of their own."""
    columns = table.entries.view(-1, 2).T.contiguous().unbind()
    keys, values = (hugepages.on_huge_pages(column) for column in columns)
    last_start = len(keys) - table.bucket_slots.numel()

    def read(key: Tensor) -> tuple[Tensor, Tensor]:
        place = (
            bucket_start(table, key).clamp_max(last_start)[:, None]
            + table.bucket_slots
        )
        same = (
            keys.index_select(0, place.view(-1)).view(place.shape)
            == key[:, None]
        )
        return values.index_select(
            0, torch.where(same, place, 0).sum(1)
        ), same.any(1)

    return read


def bucket_start(table: row_index.HashTable, key: Tensor) -> Tensor:
    """Where the bucket of each key begins."""
    return table.bucket_offsets.index_select(
        0, row_index.bucket_index(key, table.bucket_offsets.numel() - 1)
    )


def perfect_layout(table: row_index.HashTable) -> Read:
    """The reads of a perfect hash over random words."""
    draw = torch.Generator().manual_seed(SEED)
    n_buckets = table.bucket_offsets.numel() - 1
    seeds = hugepages.on_huge_pages(
        torch.randint(
            1, 1 << 31, (n_buckets // 4,), generator=draw, dtype=torch.int32
        )
    )
    # Key and value in turn, with gaps.
    words = hugepages.on_huge_pages(
        torch.randint(0, 1 << 60, (4 * n_buckets,), generator=draw)
    )

    def read(key: Tensor) -> tuple[Tensor, Tensor]:
        seed = seeds.index_select(0, row_index.bucket_index(key, len(seeds)))
        place = key * row_index.HASH_MULTIPLIER * seed >> 32 & (len(words) - 2)
        same = words.index_select(0, place) == key
        return torch.where(same, words.index_select(0, place + 1), 0), same

    return read


if __name__ == "__main__":
    main()
