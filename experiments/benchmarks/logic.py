"""How fast the logic is: building and reading the index, confidence, least models, derivations.

    python experiments/benchmarks/logic.py --out experiments/results/logic.json [--only lookup]

With --only, the rows whose name begins so are measured again and the others kept; such a row says its own commit and
load. Every row runs in a process of its own, on one thread unless --threads says otherwise. Rows:

    build_data     building the index of FB15k-237
    build_large    the same of 20 million random facts over 5 million entities and 800 relations (each entity is the
                   subject of four and the object of four): seconds, bytes held, growth of the peak resident size
    lookup         `fact_id` and `lookup_facts` (object open, 8 slots) at 20 million facts against 20 thousand of the
                   same fan-out: both in one run, by turns, medians and their ratio, for several batch sizes
    confidence     support and body pairs of every rule of a file, and how many rules differ from the file's counts
    least_model    steps of T_P and the test triples derived; one row ends at its limit on atoms
    derivation     reading back the last step of derived test triples
    state          bytes of the successors of a search step as they are held, B x S slots of A goals, and if they were
                   packed: only the slots that are filled, and only the goals that are there
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import DATA
from experiments.provenance import describe_machine
from funcppo.core import tree
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import fixpoint, kb, resolve
from funcppo.kg.logic.consequences import count_rules
from funcppo.kg.logic.derivations import find_derivation
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase

P = ParamSpec("P")
T = TypeVar("T")

SEED = 0
LARGE, SMALL = (20_000_000, 5_000_000), (20_000, 5_000)  # facts, entities
N_RELATIONS = 800
LOOKUP_BATCHES = (32, 128, 1024, 16384)
LOOKUP_REPEATS = 100
MAX_FACTS_PER_LOOKUP = 8
N_DERIVATIONS = 300
N_SEARCHES, N_SEARCH_STEPS = 512, 3

CONFIDENCE = (
    ("wn18rr", "rules_kns_amie_full.tsv"),
    ("wn18rr", "rules_rnnlogic.tsv"),
    ("family", "rules_rnnlogic.tsv"),
    ("fb15k-237", "rules_kns.tsv"),
    ("fb15k-237", "rules_rnnlogic_top.tsv.gz"),
)
LEAST_MODELS = (  # data, rules, height (0: the fixpoint), most atoms
    ("countries_S3", "rules.txt", 0, 10**6),
    ("umls", "rules.txt", 0, 10**6),
    ("family", "rules_rnnlogic.tsv", 1, 10**6),
    ("wn18rr", "rules.txt", 4, 10**7),
    ("fb15k-237", "rules.txt", 1, 10**8),
)
STATES = (
    ("family", "rules.txt", 2),
    ("wn18rr", "rules.txt", 1),
    ("fb15k-237", "rules.txt", 1),
)  # data, rules, height


class RandomKB(NamedTuple):
    """A knowledge base of random facts."""

    facts: np.ndarray  # [N 3]
    n_entities: int
    kb: KnowledgeBase
    sizes: KBSizes


def main() -> None:
    """Run every row in a fresh process and write them; or one row, in this process, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only",
        help="measure again what begins with this name, and keep the other rows of --out",
    )
    parser.add_argument(
        "--row",
        help="run this row here: a name and its arguments, separated by blanks",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.row is not None:
        name, *arguments = args.row.split()
        row = ROWS[name](args.data, *arguments)
        print(
            json.dumps(
                {"row": args.row}
                | row
                | {"process_cpu_seconds": round(time.process_time(), 1)}
            )
        )
        return

    record: dict[str, Any] = {
        "machine": describe_machine(),
        "seed": SEED,
        "rows": [],
    }
    own_origin = {}
    if args.only is not None and args.out is not None and args.out.exists():
        own_origin = {key: record["machine"][key] for key in ("commit", "load")}
        record = json.loads(args.out.read_text())
    for row in row_names():
        if args.only is None or row.startswith(args.only):
            measured = run_row(row, args.data, args.threads) | own_origin
            record["rows"] = replace_row(record["rows"], measured)
            print(json.dumps(measured), flush=True)
            if args.out is not None:
                write_record(args.out, record)


def row_names() -> list[str]:
    """Every row: a name and its arguments."""
    names = ["build_data", "build_large", "lookup"]
    names += [f"confidence {name} {rules}" for name, rules in CONFIDENCE]
    names += [
        f"least_model {name} {rules} {height} {max_atoms}"
        for name, rules, height, max_atoms in LEAST_MODELS
    ]
    names += ["derivation family rules_rnnlogic.tsv"]
    names += [
        f"state {name} {rules} {height}" for name, rules, height in STATES
    ]
    return names


def run_row(row: str, data_folder: Path, n_threads: int) -> Row:
    """One row, measured in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--data",
        str(data_folder),
        "--threads",
        str(n_threads),
        "--row",
        row,
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def replace_row(rows: list[Row], new: Row) -> list[Row]:
    """The rows with a new one in place of that of its name, or at the end."""
    if all(row["row"] != new["row"] for row in rows):
        return [*rows, new]
    return [new if row["row"] == new["row"] else row for row in rows]


def build_data(folder: Path) -> Row:
    """FB15k-237: the best of five builds."""
    dataset = loaders.load(folder / "fb15k-237")
    seconds = [timed(build_kb, dataset)[0] for _ in range(5)]
    return {
        "facts": len(dataset.facts),
        "seconds": min(seconds),
        "bytes": kb.n_bytes(build_kb(dataset)[0]),
    }


def build_large(folder: Path) -> Row:
    """20 million facts: the build, and what it adds to the largest resident size."""
    facts = random_facts(*LARGE)
    before = (
        int(Path("/proc/self/statm").read_text().split()[1])
        * resource.getpagesize()
    )
    seconds, large = timed(build_random_kb, facts, LARGE[1])
    return {
        "facts": len(facts),
        "seconds": seconds,
        "bytes": kb.n_bytes(large.kb),
        "peak_growth_bytes": peak_bytes() - before,
        "peak_bytes": peak_bytes(),  # of the whole process, its facts and PyTorch included
    }


def lookup(folder: Path) -> Row:
    """Lookups of random known facts, in microseconds a batch."""
    knowledge_bases = [
        build_random_kb(random_facts(*size), size[1]) for size in (SMALL, LARGE)
    ]
    draw = np.random.default_rng(SEED + 1)
    rows = []
    for batch in LOOKUP_BATCHES:
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(LOOKUP_REPEATS):
            for i, tables in enumerate(knowledge_bases):
                for name, seconds in time_lookups(tables, batch, draw).items():
                    times.setdefault((name, i), []).append(1e6 * seconds)
        for name in ("fact_id", "facts_for"):
            rows.append(
                {"lookup": name, "batch": batch}
                | compare_sizes(times[name, 0], times[name, 1])
            )
    return {"rows": rows}


def time_lookups(
    tables: RandomKB, batch: int, draw: np.random.Generator
) -> dict[str, float]:
    """Seconds of one lookup of each kind, for random facts."""
    atoms = torch.from_numpy(
        tables.facts[draw.integers(0, len(tables.facts), batch)]
    ).long()
    variable = torch.full((batch, 1), tables.n_entities + 1)
    goals = torch.cat([atoms[:, :2], variable], dim=1)
    return {
        "fact_id": timed(kb.fact_id, tables.kb, tables.sizes, atoms)[0],
        "facts_for": timed(
            kb.lookup_facts,
            tables.kb,
            tables.sizes,
            goals,
            MAX_FACTS_PER_LOOKUP,
        )[0],
    }


def compare_sizes(
    small_us: list[float], large_us: list[float]
) -> dict[str, float]:
    """Medians among 20 thousand and 20 million facts, and their ratio."""
    small, large = statistics.median(small_us), statistics.median(large_us)
    return {
        "small_us": round(small, 2),
        "large_us": round(large, 2),
        "ratio": round(large / small, 2),
    }


def confidence(folder: Path, name: str, rules: str) -> Row:
    """Counting support and body pairs; `differ` counts rules that the file counts otherwise."""
    dataset = loaders.load(folder / name, folder / name / rules)
    raw = (folder / name / rules).read_bytes()
    lines = (
        (gzip.decompress(raw) if rules.endswith(".gz") else raw)
        .decode()
        .splitlines()
    )
    listed = np.array(
        [line.split("\t")[1:3] for line in lines if not line.startswith("#")],
        dtype=float,
    )
    knowledge_base, sizes = build_kb(dataset)
    seconds, counts = timed(count_rules, knowledge_base, sizes)
    counted = torch.stack([counts.support, counts.body_pairs], dim=1).numpy()
    return {
        "rules": len(dataset.rules),
        "seconds": seconds,
        "pairs": int(counted[:, 1].sum(dtype=float)),
        "differ": int((counted != listed).any(1).sum()),
        "peak_bytes": peak_bytes(),
    }


def least_model(
    folder: Path, name: str, rules: str, height: str, max_atoms: str
) -> Row:
    """T_P up to a height (0: the fixpoint), and how many test triples it derives."""
    dataset = loaders.load(folder / name, folder / name / rules)
    knowledge_base, sizes = build_kb(dataset)
    model = fixpoint.least_model(
        knowledge_base,
        sizes,
        max_height=int(height) or None,
        max_atoms=int(max_atoms),
    )
    derived = int(
        (fixpoint.atom_height(model, torch.from_numpy(dataset.test)) >= 0).sum()
    )
    return {
        "seconds": round(model.seconds, 3),
        "counts": model.n_atoms_after_step,
        "stopped": model.stop_reason,
        "test_derived": derived,
        "test": len(dataset.test),
        "peak_bytes": peak_bytes(),
    }


def derivation(folder: Path, name: str, rules: str) -> Row:
    """The last step of derived test triples, one at a time."""
    dataset = loaders.load(folder / name, folder / name / rules)
    knowledge_base, sizes = build_kb(dataset)
    model = fixpoint.least_model(
        knowledge_base, sizes, max_height=1, max_atoms=10**7
    )
    derived = [
        row
        for row in dataset.test
        if fixpoint.atom_height(model, torch.from_numpy(row)) > 0
    ]
    seconds = []
    order = np.random.default_rng(SEED).permutation(len(derived))
    for i in order[:N_DERIVATIONS]:
        atom = tuple(derived[i].tolist())
        seconds.append(
            timed(find_derivation, knowledge_base, sizes, model, atom)[0]
        )
    return {
        "atoms": len(model.atoms),
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "n": len(seconds),
    }


def state(folder: Path, name: str, rules: str, height: str) -> Row:
    """Searches of train facts, a random successor at each of three steps: bytes a successor, and time a step."""
    dataset = loaders.load(folder / name, folder / name / rules)
    knowledge_base, sizes = build_kb(dataset)
    cfg = resolve.make_resolve_config(knowledge_base, sizes, int(height))
    root, goals = draw_searches(dataset, cfg, sizes, N_SEARCHES)

    n_successors = n_goals = bytes_held = 0
    seconds = []
    for _ in range(N_SEARCH_STEPS):
        resolve.resolve(cfg, knowledge_base, goals, root)  # warms up
        step_seconds, after = timed(
            resolve.resolve, cfg, knowledge_base, goals, root
        )
        assert not after.overflow.any()
        seconds.append(step_seconds)
        bytes_held += sum(
            x.numel() * x.element_size() for x in tree.leaves(after)
        )
        n_successors += int(after.mask.sum())
        n_goals += int((after.goals.atoms[..., 0] > 0).sum())
        goals = random_successor(after)

    bytes_of_goal = 4 * (sizes.atom_width + 1)  # atom and height
    bytes_of_ids, bytes_of_offset = 8, 4  # rule and fact; where a list starts
    filled_only = bytes_of_goal * cfg.max_goals + bytes_of_ids
    filled_only += N_SEARCH_STEPS * N_SEARCHES * bytes_of_offset / n_successors
    goals_packed = (
        bytes_of_goal * n_goals / n_successors + bytes_of_ids + bytes_of_offset
    )
    return {
        "S": cfg.max_successors,
        "A": cfg.max_goals,
        "successors": n_successors,
        "share_of_slots_filled": round(
            n_successors / (N_SEARCH_STEPS * N_SEARCHES * cfg.max_successors), 4
        ),
        "bytes_a_successor": round(bytes_held / n_successors, 1),
        "bytes_a_successor_filled_slots_only": round(filled_only, 1),
        "bytes_a_successor_goals_packed": round(goals_packed, 1),
        "microseconds_a_row": [round(1e6 * x / N_SEARCHES, 2) for x in seconds],
    }


def draw_searches(
    dataset: Dataset,
    cfg: resolve.ResolveConfig,
    sizes: KBSizes,
    n_searches: int,
) -> tuple[Tensor, resolve.Goals]:
    """Searches of train facts of which some rule could derive one, at their start: the queries, and the goals."""
    with_rule = dataset.train[
        np.isin(dataset.train[:, 0], dataset.rules[:, 0, 0])
    ]
    root = torch.from_numpy(
        with_rule[
            np.random.default_rng(SEED).choice(len(with_rule), n_searches)
        ]
    )
    padding = torch.zeros(
        (n_searches, cfg.max_goals, sizes.atom_width), dtype=torch.int32
    )
    return root, resolve.Goals(
        torch.cat([root[:, None], padding[:, 1:]], 1), padding[..., 0]
    )


def random_successor(successors: resolve.Successors) -> resolve.Goals:
    """The goals of a random successor of each row; no goals where it has none."""
    alive = successors.mask.any(1)
    weights = torch.where(alive[:, None], successors.mask.float(), 1.0)
    slot = weights.multinomial(1).squeeze(1)
    row = torch.arange(len(slot))
    atoms = torch.where(
        alive[:, None, None], successors.goals.atoms[row, slot], 0
    )
    return resolve.Goals(atoms, successors.goals.height[row, slot])


ROWS: dict[str, Callable[..., Row]] = {
    "build_data": build_data,
    "build_large": build_large,
    "lookup": lookup,
    "confidence": confidence,
    "least_model": least_model,
    "derivation": derivation,
    "state": state,
}


def random_facts(n_facts: int, n_entities: int) -> np.ndarray:
    """Facts in which every entity is a subject, and an object, as often as any other."""
    draw = np.random.default_rng(SEED)
    entity = np.repeat(
        np.arange(1, n_entities + 1, dtype=np.int32), n_facts // n_entities
    )
    relation = draw.integers(1, N_RELATIONS + 1, n_facts, dtype=np.int32)
    return np.stack(
        [relation, draw.permutation(entity), draw.permutation(entity)], axis=1
    )


def build_random_kb(facts: np.ndarray, n_entities: int) -> RandomKB:
    """The knowledge base of random facts, without rules."""
    no_rules = np.zeros((0, 1, 3), np.int32)
    knowledge_base, sizes = kb.build(
        facts, no_rules, n_constants=n_entities, n_predicates=N_RELATIONS
    )
    return RandomKB(facts, n_entities, knowledge_base, sizes)


def build_kb(dataset: Dataset) -> tuple[KnowledgeBase, KBSizes]:
    """The knowledge base of a data set."""
    return kb.build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )


def timed(
    fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[float, T]:
    """Wall-clock seconds of a call, and its result."""
    start = time.perf_counter()
    result = fn(*args, **kwargs)
    return round(time.perf_counter() - start, 7), result


def peak_bytes() -> int:
    """The largest resident size so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
