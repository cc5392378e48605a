"""Why a lookup of many atoms at once costs more among 20 million facts, what was tried, and what huge pages bring.

    python experiments/bench_lookup.py --out experiments/results/bench_lookup.json

Microseconds a batch, 20 thousand facts against 20 million of the same fan-out, by turns in one process, medians; in one
process with the large tables in huge pages, as the library has them, in another without. Rows:

    key        the keys of the atoms, before any table is read: what no layout can save
    buckets    `fact_id`'s read: the start of a bucket, then a window of its fullest bucket's width as one row
    words      the same places read word by word, keys and values side by side
    columns    the same, keys and values in tables of their own
    perfect    the reads of a perfect hash, a lower bound of any: a seed out of a table of a quarter as many words, then
               one key and its value anywhere; the words it finds are random, so it answers nothing
    facts_for  the whole of it, object open, 8 slots

The four reads include the time of `key`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from experiments.benchmarks.logic import LARGE, SEED, SMALL, build, machine, random_facts, timed
from torch import Tensor

from funcppo.logic import hugepages, kb, row_index

BATCHES, REPEATS = (1024, 16384), 100
Answer = tuple[Tensor, Tensor]


def main() -> None:
    """Measure in this process with --here, else in two fresh ones, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", choices=("huge", "small"), help="measure in this process, with pages of this size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.here is not None:
        if args.here == "small":
            hugepages.MIN_HUGE_PAGE_BYTES = 1 << 62
        print(json.dumps(measure()))
        return
    out = {"machine": machine(1), "seed": SEED, "rows": []}
    for size in ("huge", "small"):
        done = subprocess.run([sys.executable, __file__, "--here", size], stdout=subprocess.PIPE, check=True)
        out["rows"] += [{"pages": size} | row for row in json.loads(done.stdout)]
    text = json.dumps(out, indent=1) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text)


def measure() -> list[dict[str, str | int | float]]:
    """The rows of this process."""
    worlds = [(facts := random_facts(*size), *build(facts, size[1])) for size in (SMALL, LARGE)]
    ways = [
        {"buckets": _buckets(w), "words": _words(w), "columns": _columns(w), "perfect": _perfect(w)}
        for _, w, _ in worlds
    ]
    draw, rows = np.random.default_rng(SEED + 1), []
    for batch in BATCHES:
        spent: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            for i, (facts, world, sizes) in enumerate(worlds):
                for name, read in ways[i].items():
                    row = torch.from_numpy(draw.integers(0, len(facts), batch))
                    atoms = world.facts[row].long()
                    seconds, (key, _) = timed(lambda: kb.encode_atoms(world.key_prefixes, sizes, atoms))  # noqa: B023
                    spent.setdefault(("key", i), []).append(1e6 * seconds)
                    less, (value, found) = timed(lambda: read(key))  # noqa: B023
                    spent.setdefault((name, i), []).append(1e6 * (seconds + less))
                    if name != "perfect":
                        assert bool(found.all()) and torch.equal(value, row)
                row = torch.from_numpy(draw.integers(0, len(facts), batch))
                open_ones = torch.full((batch, 1), sizes.n_constants + 1)
                goals = torch.cat([world.facts[row, :2].long(), open_ones], dim=1)
                seconds, _ = timed(lambda: kb.lookup_facts(world, sizes, goals, 8))  # noqa: B023
                spent.setdefault(("facts_for", i), []).append(1e6 * seconds)
        for name in ("key", *ways[0], "facts_for"):
            small, large = (statistics.median(spent[name, i]) for i in (0, 1))
            row = {"batch": batch, "reads": name, "small_us": small, "large_us": large, "ratio": large / small}
            rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def _buckets(world: kb.KnowledgeBase) -> Callable[[Tensor], Answer]:
    return lambda key: row_index.hash_lookup(world.fact_index, key)


def _words(world: kb.KnowledgeBase) -> Callable[[Tensor], Answer]:
    table = world.fact_index
    last = table.entries.numel() // 2 - table.bucket_slots.numel()

    def read(key: Tensor) -> Answer:
        place = 2 * (_start(table, key).clamp_max(last)[:, None] + table.bucket_slots)
        same = table.entries.index_select(0, place.view(-1)).view(place.shape) == key[:, None]
        value = table.entries.index_select(0, torch.where(same, place, 0).sum(1) + 1)
        return value, same.any(1)

    return read


def _columns(world: kb.KnowledgeBase) -> Callable[[Tensor], Answer]:
    table = world.fact_index
    names, values = (hugepages.on_huge_pages(column) for column in table.entries.view(-1, 2).T.contiguous().unbind())
    last = len(names) - table.bucket_slots.numel()

    def read(key: Tensor) -> Answer:
        place = _start(table, key).clamp_max(last)[:, None] + table.bucket_slots
        same = names.index_select(0, place.view(-1)).view(place.shape) == key[:, None]
        return values.index_select(0, torch.where(same, place, 0).sum(1)), same.any(1)

    return read


def _start(table: row_index.HashTable, key: Tensor) -> Tensor:
    return table.bucket_offsets.index_select(0, row_index.bucket_index(key, table.bucket_offsets.numel() - 1))


def _perfect(world: kb.KnowledgeBase) -> Callable[[Tensor], Answer]:
    draw = torch.Generator().manual_seed(SEED)
    buckets = world.fact_index.bucket_offsets.numel() - 1
    seeds = hugepages.on_huge_pages(torch.randint(1, 1 << 31, (buckets // 4,), generator=draw, dtype=torch.int32))
    places = hugepages.on_huge_pages(
        torch.randint(0, 1 << 60, (4 * buckets,), generator=draw)
    )  # key and value in turn, and gaps

    def read(key: Tensor) -> Answer:
        seed = seeds.index_select(0, row_index.bucket_index(key, len(seeds)))
        at = key * row_index.HASH_MULTIPLIER * seed >> 32 & (len(places) - 2)
        same = places.index_select(0, at) == key
        return torch.where(same, places.index_select(0, at + 1), 0), same

    return read


if __name__ == "__main__":
    main()
