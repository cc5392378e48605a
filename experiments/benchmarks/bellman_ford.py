"""What a Bellman-Ford network over known facts adds to a run that learnt from questions.

    python experiments/benchmarks/bellman_ford.py --run RUN [--control]
    python experiments/benchmarks/bellman_ford.py --measure FOLDER --steps 5

RUN is what `funcppo train` wrote, at its defaults with link embeddings where valid said so. A network
(`funcppo.kg.scores.bellman_ford`) is trained on the same known facts, each asked from both sides and left out of the
graph while it is asked, with all facts of its pair where the run leaves these out. Rows: the run; the run with the
network's log-probability as one more term, by one weight or by a weight for each label; and the network alone, over
the candidates that the rules derive and over all entities.

Valid alone is ranked, filtered by all splits, and test is not. What is chosen or fitted on one half of valid's queries
is judged on the other half, both ways: the step of training whose weights rank best, and by the listwise loss the
weights of the added term and the scale of the run's score. The gain over the run has its standard error, queries
paired. Two models that err differently rank better than one, so `--control` adds link embeddings like the run's, of
another seed, in place of the network. `--measure` trains for some steps and prints what a step takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import torch
from torch.nn.functional import pad

from experiments.benchmarks import added_term
from experiments.benchmarks.added_term import (
    Candidates,
    Outcome,
    QuestionTable,
    Snapshot,
)
from experiments.benchmarks.question_results import say
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS
from experiments.provenance import describe_machine
from funcppo.core import random, tree
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic.question_types import LeftOut
from funcppo.kg.run import bellman_ford_training, embedding_training, run_start
from funcppo.kg.run.run import Run
from funcppo.kg.scores import bellman_ford as network
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.bellman_ford import Graph, NetworkConfig, Params
from funcppo.kg.scores.question_config import BellmanFordConfig


def main() -> None:
    """Train networks beside a run and add their rows to the record, or measure steps."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, metavar="RUN")
    what.add_argument("--measure", metavar="FOLDER")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "bellman_ford.json"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--device", default="cpu")
    add = parser.add_argument_group("network").add_argument
    add("--width", type=int, default=32, help="numbers of a state")
    add("--layers", type=int, default=4, help="facts of the longest path")
    add("--shared-weights", action="store_true", help="for all questions")
    add("--messages", choices=network.DTYPES, default="float32")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=1500)
    add("--seconds", type=float, default=900.0, help="end it sooner")
    add("--snapshots", type=int, default=10, help="steps to choose from")
    add("--batch", type=int, default=32, help="questions of a step")
    add("--at-once", type=int, help="questions in memory; default: batch")
    add("--learning-rate", type=float, default=5e-3)
    add("--dropped", type=float, default=0.2, help="share of other facts")
    args = parser.parse_args()
    args.at_once = args.at_once or args.batch
    if args.measure:
        measure(args)
        return

    start = time.perf_counter()
    run = run_start.open_run(args.run)
    name = Path(run.run_config.dataset).name
    say(start, f"{name}: {args.run} opened")
    listed = added_term.list_derived(run)
    of_run = describe_run(run)
    for seed in range(args.seeds):
        add = add_embeddings if args.control else add_network
        rows = [
            {"set": name, "seed": seed} | of_run | row
            for row in add(args, run, listed, seed, start)
        ]
        for row in rows:
            say(start, f"{row['method']}: {row['valid_mrr']:.4f}")
        record: dict[str, Any] = {"rows": []}
        if args.out.exists():
            record = json.loads(args.out.read_text())
        present = {key_of(row) for row in rows}
        others = [x for x in record["rows"] if key_of(x) not in present]
        write_record(args.out, {"rows": others + rows})


def key_of(row: dict[str, Any]) -> tuple[str, int, str]:
    """What a record has one row of."""
    return row["set"], row["seed"], row["method"]


def add_network(
    args: argparse.Namespace,
    run: Run,
    listed: Candidates,
    seed: int,
    start: float,
) -> list[dict[str, Any]]:
    """The rows of a network of one seed."""
    task, left_out = run.task, left_out_of(run)
    cfg = make_config(
        args, task.sizes.n_constants, evidence.n_labels(task.sizes)
    )
    facts = evidence.binary_facts(task.kb)
    graph = network.build_graph(cfg, facts, left_out)
    graph = tree.map(lambda x: x.to(args.device), graph)
    key = added_term.valid_questions(run)
    asked = key.to(args.device)
    base = cfg.n_entities + 1
    snapshots: list[Snapshot] = []
    training: dict[str, Any] = {}
    for params, training in train(args, cfg, graph, seed, start):
        log_p = network.answer_log_p(
            cfg, params, graph, asked // base, asked % base, args.at_once
        )
        table = QuestionTable(key, log_p)
        all_ranks = added_term.rank_all(run, table)
        snapshots.append(
            Snapshot(training["steps"], table.look_up(listed), all_ranks)
        )
        mrr = float(all_ranks.mean())
        say(start, f"among all entities of valid: MRR {mrr:.4f}")

    outcomes = added_term.compare(
        listed, snapshots, cfg.n_labels, seed, "network"
    )
    options = {
        "batch": args.batch,
        "learning_rate": args.learning_rate,
        "dropped": args.dropped,
    }
    common = {
        "network": dataclasses.asdict(cfg),
        "training": training | options,
        "machine": describe_machine(args.device),
    }
    return [common | describe(x, outcomes[0]) for x in outcomes]


def add_embeddings(
    args: argparse.Namespace,
    run: Run,
    listed: Candidates,
    seed: int,
    start: float,
) -> list[dict[str, Any]]:
    """The rows of link embeddings that the run does not have, without a row of the run."""
    left_out, task = left_out_of(run), run.task
    # One fold is never seen by its model, and the other model is used, which sees all facts.
    cfg = dataclasses.replace(run.run_config.embedding, n_folds=1)
    other_seed = run.run_config.seed + 1 + seed
    clock = time.perf_counter()
    models = embedding_training.train(
        task, cfg, left_out, other_seed, args.device
    )
    seconds = time.perf_counter() - clock
    models = tree.map(lambda x: x.cpu(), models)
    say(start, f"link embeddings trained in {seconds:.0f} s")

    key = added_term.valid_questions(run)
    n_entities = task.sizes.n_constants
    answer = torch.arange(1, n_entities + 1)
    last = torch.full_like(answer, link_embedding.n_models(models) - 1)
    scores = [
        link_embedding.prior(
            models,
            last,
            (one // (n_entities + 1)).expand_as(answer),
            (one % (n_entities + 1)).expand_as(answer),
            answer,
        )
        for one in key
    ]
    log_p = torch.stack(scores).log_softmax(1)
    table = QuestionTable(key, pad(log_p, (1, 0), value=-torch.inf))
    snapshot = Snapshot(
        cfg.n_epochs, table.look_up(listed), added_term.rank_all(run, table)
    )
    n_labels = evidence.n_labels(task.sizes)
    outcomes = added_term.compare(
        listed, [snapshot], n_labels, seed, "other link embeddings"
    )
    common = {
        "embedding": dataclasses.asdict(cfg) | {"seed": other_seed},
        "training": {"epochs": cfg.n_epochs, "seconds": round(seconds, 1)},
        "machine": describe_machine(args.device),
    }
    return [common | describe(x, outcomes[0]) for x in outcomes[1:]]


def left_out_of(run: Run) -> LeftOut:
    """What a training question of a run leaves out."""
    left_out = run.run_config.questions.left_out
    assert left_out != "auto", "a run says what it leaves out"
    return left_out


def describe_run(run: Run) -> dict[str, Any]:
    """What a row says of the run."""
    assert run.questions is not None, "the run learnt from questions"
    rules = run.run_config.rules
    digest = hashlib.sha256(Path(rules).read_bytes()) if rules else None
    return {
        "run_seed": run.run_config.seed,
        "n_rules": len(run.task.dataset.rules),
        "rules_sha256": digest.hexdigest()[:16] if digest else "",
        "left_out": left_out_of(run),
        "weighs_embedding": run.questions.policy.aggregation.uses_embedding,
    }


def describe(outcome: Outcome, run: Outcome) -> dict[str, Any]:
    """The numbers of a row."""
    gain = outcome.ranks - run.ranks
    return {
        "method": outcome.method,
        "valid_mrr": float(outcome.ranks.mean()),
        "valid_gain": float(gain.mean()),
        "valid_gain_error": float(gain.std()) / len(gain) ** 0.5,
        "n_valid": len(gain),
        "steps": [chosen.step for chosen in outcome.chosen],
        "weights": [chosen.weight for chosen in outcome.chosen],
    }


# -- the network


def make_config(
    args: argparse.Namespace, n_entities: int, n_labels: int
) -> NetworkConfig:
    """The sizes that the options ask for."""
    return NetworkConfig(
        n_entities=n_entities,
        n_labels=n_labels,
        width=args.width,
        n_layers=args.layers,
        asks=not args.shared_weights,
        messages=args.messages,
    )


def train(
    args: argparse.Namespace,
    cfg: NetworkConfig,
    graph: Graph,
    seed: int,
    start: float,
) -> Iterator[tuple[Params, dict[str, Any]]]:
    """Yield the weights at `--snapshots` steps, the last one included, with what was done until then."""
    init_key, key = random.split(random.key(seed, args.device)).unbind(-2)
    state = network.init_training(network.init(cfg, init_key))
    n_edges = len(graph.edge_target)
    size = min(args.batch, n_edges)
    every = -(-args.steps // args.snapshots)
    settings = BellmanFordConfig(
        n_steps=args.steps,
        batch_size=args.batch,
        learning_rate=args.learning_rate,
        dropped=args.dropped,
    )
    step_fn = bellman_ford_training.make_step(args.device)
    steps = bellman_ford_training.iter_steps(
        step_fn, cfg, graph, settings, state, key, args.at_once
    )
    seconds, losses = 0.0, []
    clock = time.perf_counter()
    for step, state in enumerate(steps, 1):
        losses.append(float(state.loss))
        seconds += time.perf_counter() - clock
        is_over = step == args.steps or seconds > args.seconds
        if step % every and not is_over:
            clock = time.perf_counter()
            continue

        recent = sum(losses[-every:]) / len(losses[-every:])
        say(start, f"step {step} of {args.steps}: loss {recent:.4f}")
        yield (
            tree.map(torch.clone, state.params),
            {
                "steps": step,
                "epochs": round(step * size / n_edges, 2),
                "loss": recent,
                "seconds": round(seconds, 1),
            },
        )
        if is_over:
            return
        clock = time.perf_counter()


def measure(args: argparse.Namespace) -> None:
    """Print what steps take on a data set, and a count of the memory that they need."""
    dataset = load(args.measure)
    n_labels = 2 * dataset.n_predicates + 2
    cfg = make_config(args, dataset.n_constants, n_labels)
    facts = torch.from_numpy(dataset.train).long()
    graph = network.build_graph(cfg, facts, "fact")
    graph = tree.map(lambda x: x.to(args.device), graph)
    start = time.perf_counter()
    used = time.process_time()
    *_, (_, training) = train(args, cfg, graph, 0, start)
    used = time.process_time() - used

    n_steps, n_sources = training["steps"], len(graph.source)
    per_question = network.bytes_per_question(cfg, graph)
    say(
        start,
        f"{dataset.name}: {n_sources:,} sources of {len(graph.edge_target):,} edges; {n_steps} steps of "
        f"{args.batch} questions, {training['seconds'] / n_steps:.2f} s each, "
        f"{used / n_steps:.2f} s of processor time",
    )
    if args.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        peak = torch.cuda.max_memory_allocated()
    say(
        start,
        f"kept for the gradient: {per_question / 1e6:.0f} MB a question; peak memory {peak / 1e9:.2f} GB",
    )


if __name__ == "__main__":
    main()
