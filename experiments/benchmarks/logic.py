"""How fast the logic is: building and reading the index, confidence, least models, derivations.

    python experiments/bench_logic.py --data DIR --out experiments/results/bench_logic.json [--only lookup]

With --only, the rows of that name are measured again and the others kept; a row says its commit and load where they are
not those of `machine`. Every row runs in a process of its own, on one thread unless --threads says otherwise. Rows:

    build          FB15k-237, and 20 million random facts over 5 million entities and 800 relations (each entity is the
                   subject of four and the object of four): seconds, bytes held, growth of the peak resident size
    lookup         `fact_id` and `facts_for` (object open, 8 slots) at 20 million facts against 20 thousand of the same
                   fan-out: both in one run, by turns, medians and their ratio, for several batch sizes
    confidence     support and body pairs of every rule of a file, with the rules whose counts differ from the file's
    least_model    steps of T_P and the test triples derived; one row ends at its budget
    derivation     reading back the last step of derived test triples
    state          bytes of the successors of a search step as they are held, B x S slots of A goals, and packed: only
                   the slots that are filled, and only the goals that are there
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funcppo import data, tree
from funcppo.logic import fixpoint, kb, resolve
from funcppo.logic.consequences import with_confidence
from funcppo.logic.derivations import find_derivation
from funcppo.logic.kb import KBSizes, KnowledgeBase

SEED = 0
LARGE, SMALL = (20_000_000, 5_000_000), (20_000, 5_000)  # facts, entities
N_RELATIONS = 800
CONFIDENCE = [
    ("wn18rr", "rules_kns_amie_full.tsv"),
    ("wn18rr", "rules_rnnlogic.tsv"),
    ("family", "rules_rnnlogic.tsv"),
    ("fb15k-237", "rules_kns.tsv"),
    ("fb15k-237", "rules_rnnlogic_top.tsv.gz"),
]
MODELS = [  # height 0: the fixpoint
    ("countries_S3", "rules.txt", 0, 10**6),
    ("umls", "rules.txt", 0, 10**6),
    ("family", "rules_rnnlogic.tsv", 1, 10**6),
    ("wn18rr", "rules.txt", 4, 10**7),
    ("fb15k-237", "rules.txt", 1, 10**8),
]


STATES = [("family", "rules.txt", 2), ("wn18rr", "rules.txt", 1), ("fb15k-237", "rules.txt", 1)]  # height


def main() -> None:
    """Run every row in a fresh process and write them; or one row, in this process, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="measure again what begins with this name, and keep the other rows of --out")
    parser.add_argument("--row", help="run this row here: a name and its arguments, separated by blanks")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.row is not None:
        name, *rest = args.row.split()
        found = ROWS[name](args.data, *rest)
        print(json.dumps({"row": args.row} | found | {"process_cpu_seconds": round(time.process_time(), 1)}))
        return
    names = ["build_data", "build_large", "lookup"]
    names += [f"confidence {name} {rules}" for name, rules in CONFIDENCE]
    names += [f"least_model {name} {rules} {height} {budget}" for name, rules, height, budget in MODELS]
    names += ["derivation family rules_rnnlogic.tsv"]
    names += [f"state {name} {rules} {height}" for name, rules, height in STATES]
    out = {"machine": machine(args.threads), "seed": SEED, "rows": []}
    again = {} if args.only is None else {key: out["machine"][key] for key in ("commit", "load")}
    if again:
        out = json.loads(args.out.read_text())
        names = [row for row in names if row.startswith(args.only)]
    for row in names:
        command = [sys.executable, __file__, "--data", args.data, "--threads", str(args.threads), "--row", row]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        out["rows"] = _with(out["rows"], json.loads(done.stdout) | again)
        print(done.stdout, end="", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(out, indent=1) + "\n")


def _with(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with one more, or with it in place of that of its name."""
    if all(row["row"] != new["row"] for row in rows):
        return [*rows, new]
    return [new if row["row"] == new["row"] else row for row in rows]


def build_data(folder: Path) -> dict[str, Any]:
    """FB15k-237: the best of five builds."""
    found = data.load(folder / "fb15k-237")
    seconds = [timed(lambda: world_of(found))[0] for _ in range(5)]
    return {"facts": len(found.facts), "seconds": min(seconds), "bytes": kb.n_bytes(world_of(found)[0])}


def build_large(folder: Path) -> dict[str, Any]:
    """20 million facts: the build and what it adds to the largest resident size."""
    facts = random_facts(*LARGE)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    seconds, (world, _) = timed(lambda: build(facts, LARGE[1]))
    return {
        "facts": len(facts),
        "seconds": seconds,
        "bytes": kb.n_bytes(world),
        "peak_growth_bytes": peak_bytes() - before,
        "peak_bytes": peak_bytes(),  # of the whole process, its facts and PyTorch included
    }


def lookup(folder: Path) -> dict[str, Any]:
    """Lookups of random known facts, in microseconds a batch."""
    worlds = [(facts := random_facts(*size), size[1], *build(facts, size[1])) for size in (SMALL, LARGE)]
    draw = np.random.default_rng(SEED + 1)
    rows = []
    for batch in (32, 128, 1024, 16384):
        spent: dict[tuple[str, int], list[float]] = {}
        for _ in range(100):
            for i, (facts, n_entities, world, sizes) in enumerate(worlds):
                atoms = torch.from_numpy(facts[draw.integers(0, len(facts), batch)]).long()
                goals = torch.cat([atoms[:, :2], torch.full((batch, 1), n_entities + 1)], dim=1)
                run = {
                    "fact_id": lambda: kb.fact_id(world, sizes, atoms),  # noqa: B023
                    "facts_for": lambda: kb.lookup_facts(world, sizes, goals, 8),  # noqa: B023
                }
                for name, call in run.items():
                    spent.setdefault((name, i), []).append(1e6 * timed(call)[0])
        for name in ("fact_id", "facts_for"):
            small, large = (statistics.median(spent[name, i]) for i in (0, 1))
            row = {"lookup": name, "batch": batch, "small_us": small, "large_us": large, "ratio": large / small}
            rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    return {"rows": rows}


def confidence(folder: Path, name: str, rules: str) -> dict[str, Any]:
    """Counting support and body pairs; `differ` counts rules that the file counts otherwise."""
    found = data.load(folder / name, folder / name / rules)
    raw = (folder / name / rules).read_bytes()
    lines = (gzip.decompress(raw) if rules.endswith(".gz") else raw).decode().splitlines()
    columns = np.array([line.split("\t")[1:3] for line in lines if not line.startswith("#")], dtype=float)
    world, sizes = world_of(found)
    seconds, world = timed(lambda: with_confidence(world, sizes))
    counted = torch.stack([world.support, world.body_pairs], dim=1).numpy()
    return {
        "rules": len(found.rules),
        "seconds": seconds,
        "pairs": int(counted[:, 1].sum(dtype=float)),
        "differ": int((counted != columns).any(1).sum()),
        "peak_bytes": peak_bytes(),
    }


def least_model(folder: Path, name: str, rules: str, height: str, budget: str) -> dict[str, Any]:
    """T_P up to a height (0: the fixpoint), and how many test triples it derives."""
    found = data.load(folder / name, folder / name / rules)
    world, sizes = world_of(found)
    model = fixpoint.least_model(world, sizes, max_height=int(height) or None, max_atoms=int(budget))
    derived = int((fixpoint.atom_height(model, torch.from_numpy(found.test)) >= 0).sum())
    return {
        "seconds": round(model.seconds, 3),
        "counts": model.n_atoms_after_step,
        "stopped": model.stop_reason,
        "test_derived": derived,
        "test": len(found.test),
        "peak_bytes": peak_bytes(),
    }


def derivation_row(folder: Path, name: str, rules: str) -> dict[str, Any]:
    """The last step of 300 derived test triples, one at a time."""
    found = data.load(folder / name, folder / name / rules)
    world, sizes = world_of(found)
    model = fixpoint.least_model(world, sizes, max_height=1, max_atoms=10**7)
    derived = [row for row in found.test if fixpoint.atom_height(model, torch.from_numpy(row)) > 0]
    chosen = np.random.default_rng(SEED).permutation(len(derived))[:300]
    seconds = [timed(lambda: find_derivation(world, sizes, model, tuple(derived[i].tolist())))[0] for i in chosen]  # noqa: B023
    return {"atoms": len(model.atoms), "median_ms": round(1e3 * statistics.median(seconds), 2), "n": len(chosen)}


def state(folder: Path, name: str, rules: str, height: str) -> dict[str, Any]:
    """Searches of 512 train facts, a random successor at each of three steps: bytes a successor, and time a step."""
    found = data.load(folder / name, folder / name / rules)
    world, sizes = world_of(found)
    cfg = resolve.make_resolve_config(world, sizes, int(height))
    draw = np.random.default_rng(SEED)
    with_rule = found.train[np.isin(found.train[:, 0], found.rules[:, 0, 0])]
    root = torch.from_numpy(with_rule[draw.choice(len(with_rule), 512)])
    nothing = torch.zeros((512, cfg.max_goals, sizes.atom_width), dtype=torch.int32)
    goals = resolve.Goals(torch.cat([root[:, None], nothing[:, 1:]], 1), nothing[..., 0])
    n_filled = n_goals = held = 0
    seconds = []
    for _ in range(3):
        resolve.resolve(cfg, world, goals, root)
        spent, after = timed(lambda: resolve.resolve(cfg, world, goals, root))  # noqa: B023
        assert not after.overflow.any()
        seconds.append(spent)
        held += sum(x.numel() * x.element_size() for x in tree.leaves(after))
        n_filled += int(after.mask.sum())
        n_goals += int((after.goals.atoms[..., 0] > 0).sum())
        alive = after.mask.any(1)
        chosen = torch.where(alive[:, None], after.mask.float(), 1.0).multinomial(1).squeeze(1)
        row = torch.arange(512)
        goals = resolve.Goals(
            torch.where(alive[:, None, None], after.goals.atoms[row, chosen], 0), after.goals.height[row, chosen]
        )
    one_goal, ids, offset = 4 * (sizes.atom_width + 1), 8, 4  # atom and height; rule and fact; where a list starts
    return {
        "S": cfg.max_successors,
        "A": cfg.max_goals,
        "successors": n_filled,
        "share_of_slots_filled": round(n_filled / (3 * 512 * cfg.max_successors), 4),
        "bytes_a_successor": round(held / n_filled, 1),
        "bytes_a_successor_filled_slots_only": round(one_goal * cfg.max_goals + ids + 3 * 512 * offset / n_filled, 1),
        "bytes_a_successor_goals_packed": round(one_goal * n_goals / n_filled + ids + offset, 1),
        "microseconds_a_row": [round(1e6 * x / 512, 2) for x in seconds],
    }


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "build_data": build_data,
    "build_large": build_large,
    "lookup": lookup,
    "confidence": confidence,
    "least_model": least_model,
    "derivation": derivation_row,
    "state": state,
}


def random_facts(n_facts: int, n_entities: int) -> np.ndarray:
    """Every entity as often a subject as any other, and as often an object."""
    draw = np.random.default_rng(SEED)
    entity = np.repeat(np.arange(1, n_entities + 1, dtype=np.int32), n_facts // n_entities)
    relation = draw.integers(1, N_RELATIONS + 1, n_facts, dtype=np.int32)
    return np.stack([relation, draw.permutation(entity), draw.permutation(entity)], axis=1)


def build(facts: np.ndarray, n_entities: int) -> tuple[KnowledgeBase, KBSizes]:
    """The knowledge base of random facts, without rules."""
    return kb.build(facts, np.zeros((0, 1, 3), np.int32), n_constants=n_entities, n_predicates=N_RELATIONS)


def world_of(found: data.Dataset) -> tuple[KnowledgeBase, KBSizes]:
    """The knowledge base of a data set."""
    return kb.build(found.facts, found.rules, n_constants=found.n_constants, n_predicates=found.n_predicates)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return round(time.perf_counter() - start, 7), result


def peak_bytes() -> int:
    """The largest resident size so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def machine(threads: int) -> dict[str, Any]:
    """Where the numbers come from."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": f"{cpu[0] if cpu else platform.machine()}, {os.cpu_count()} cores, {threads} thread(s) used",
        "load": os.getloadavg()[0],  # of other work at the start
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("FUNCPPO_COMMIT") or git,
    }


if __name__ == "__main__":
    main()
