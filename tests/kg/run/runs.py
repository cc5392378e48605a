"""Small graphs, small runs on them, and their training."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from funcppo import checkpoint, logs
from funcppo.config import PPOConfig
from funcppo.core.settings import METRICS_FILE, write_config
from funcppo.kg.config import (
    CHECKPOINT_FILE,
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    ProverTaskConfig,
    RunConfig,
)
from funcppo.kg.graph import loaders
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.run import train
from funcppo.kg.run.choices import start_run
from funcppo.kg.run.run import save_checkpoint, write_graph
from funcppo.runtime.monitor import Monitor

# A run that learns from proofs.
CONFIG = RunConfig(
    dataset="countries_s1",
    device="cpu",
    steps=64,
    strategy="eager",
    learner="proofs",
    score="best-proof",
    n_validations=2,
    n_validation_queries=3,
    prover=ProverTaskConfig(max_height=1, embed_dim=4, hidden_dim=4),
    ppo=PPOConfig(
        n_envs=4, n_steps=4, n_epochs=1, n_minibatches=2, learning_rate=0.01
    ),
)
N_UPDATES = 4  # 64 steps of 4 environments in rollouts of 4
# One that learns from questions.
QUESTIONS = RunConfig(
    dataset="",
    device="cpu",
    n_validation_queries=40,
    prover=ProverTaskConfig(smoothing=5.0, object_identity=True),
    listwise=ListwiseConfig(n_epochs=3, batch_size=32, learning_rate=0.1),
    embedding=EmbeddingConfig(rank=4, n_folds=2, n_epochs=8, batch_size=32),
    bellman_ford=BellmanFordConfig(width=4, n_layers=2, n_steps=5),
)


def new_run(config, **arguments):
    """A new run on the data set that its settings name."""
    dataset = loaders.load(config.dataset, config.rules, cfg=config.data)
    return start_run(config, dataset, **arguments)


def store(run, folder):
    """Write what opens a run: its settings, its graph and its state."""
    write_config(run.run_config, folder)
    write_graph(run.task, folder)
    save_checkpoint(run, folder)


def trained(run, folder, stop_at=None):
    """The run after its last update, and the metrics of each; stopped after an update or in its validation."""
    write_graph(run.task, folder)
    captured, _ = train.prepare_train_step(run)
    rows = []
    for after, metrics in train.train(
        run,
        folder,
        captured,
        lambda: int(captured.state.update) == stop_at,
        Monitor(),
    ):
        run = after
        rows.append(metrics)
    return run, rows


def assert_equal_runs(folder, other):
    """The same checkpoint, and the same metrics but for times."""
    arrays, whole = (
        checkpoint.read(path / CHECKPOINT_FILE)[0] for path in (folder, other)
    )
    assert set(arrays) == set(whole)
    for name in whole:
        assert np.array_equal(arrays[name], whole[name]), name
    rows, whole_rows = (
        logs.read(path / METRICS_FILE) for path in (folder, other)
    )
    for name in ("update", "loss", "valid_metric", "best_valid_metric"):
        assert [row.get(name) for row in rows] == [
            row.get(name) for row in whole_rows
        ]


def on_graph(config, graph, folder):
    """The config of a run on a graph, which is written to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        lines = (
            f"{graph.entities[h - 1]}\t{graph.predicates[p - 1]}\t{graph.entities[t - 1]}\n"
            for p, h, t in getattr(graph, name).tolist()
        )
        (folder / f"{name}.txt").write_text("".join(lines))
    rules = (f"{format_rule(graph, rule)}\n" for rule in graph.rules)
    (folder / "rules.txt").write_text("".join(rules))
    return replace(config, dataset=str(folder))


def random_graph(seed=0, n_valid=12):
    """Two relations over nine entities, a rule of each kind, and a valid split."""
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(9) for j in range(9)]
    order = rng.permutation(len(pairs))
    r = [pairs[i] for i in order[:34]]
    s = [pairs[i] for i in rng.permutation(len(pairs))[:20]]

    def triples(rows, relation):
        return [(f"e{i}", relation, f"e{j}") for i, j in rows]

    return loaders.from_triples(
        triples(r[n_valid:], "r") + triples(s, "s"),
        triples(r[:n_valid], "r"),
        rules="""
        r(X, Y) :- s(X, Y)
        r(X, Y) :- s(X, Z), r(Z, Y)
        r(X, Y) :- r(Y, X)
        r(X, Y) :- s(Z, X), s(Z, Y)
        """,
    )


def seating(n_tables=24, n_guests=4):
    """Guests sit at tables; one sits beside those of the table that they are not married to.

    The rule derives spouses and others alike; only the link by a marriage tells them apart.
    """
    sits, beside, married = [], [], []
    for table in range(n_tables):
        guests = [f"g{table}_{i}" for i in range(n_guests)]
        sits += [(guest, "sitsAt", f"t{table}") for guest in guests]
        married += [
            (a, "marriedTo", b) for a, b in zip(guests[::2], guests[1::2])
        ]
        beside += [
            (a, "beside", b)
            for i, a in enumerate(guests)
            for j, b in enumerate(guests)
            if i // 2 != j // 2
        ]
    return loaders.from_triples(
        sits + married + [f for i, f in enumerate(beside) if i % 4],
        beside[::4],
        rules="beside(X, Y) :- sitsAt(X, T), sitsAt(Y, T)",
    )


def chain(n=24):
    """Chains of four: valid asks for the end of each, which the rules derive in three steps."""
    names = [[f"{letter}{i}" for letter in "abcd"] for i in range(n)]
    steps = [(x, "next", y) for row in names for x, y in pairwise(row)]
    last = [(row[3], "in", f"end{i % 3}") for i, row in enumerate(names)]
    known = [(row[0], "in", f"end{i % 3}") for i, row in enumerate(names)]
    # Some steps are known, which tell the confidence of the rule.
    last += [(row[2], *of[1:]) for row, of in zip(names[12:], last[12:])]
    return loaders.from_triples(
        steps + last + known[8:],
        known[:8],
        rules="in(X, Y) :- next(X, Z), in(Z, Y)",
    )


def colours(is_colour=True, n=40):
    """Who likes whom: those of larger numbers that differ by a multiple of four, or as many at random.

    The rule derives everybody; who likes whom no fact tells.
    """
    drawn = torch.randint(
        n, (360, 2), generator=torch.Generator().manual_seed(0)
    )
    pairs = sorted({(i, j) for i, j in drawn.tolist() if i < j})
    if is_colour:
        pairs = [
            (i, j)
            for i in range(n)
            for j in range(i + 1, n)
            if (i - j) % 4 == 0
        ]
    triples = [(f"x{i}", "likes", f"x{j}") for i, j in pairs]
    return loaders.from_triples(
        [fact for i, fact in enumerate(triples) if i % 8],
        triples[::8],
        rules="likes(X, Y) :- likes(X, Z), likes(W, Y)",
    )


def elders(n=40):
    """Chains of three persons. The rule derives all who have a parent as everybody's grandchildren.

    Which one is the answer only a path of two facts tells.
    """
    parents = [
        (f"x{i}{a}", "parent", f"x{i}{b}")
        for i in range(n)
        for a, b in ("ab", "bc")
    ]
    facts = [(f"x{i}a", "grandparent", f"x{i}c") for i in range(n)]
    return loaders.from_triples(
        parents + [fact for i, fact in enumerate(facts) if i % 4],
        facts[::4],
        rules="grandparent(X, Y) :- parent(X, Z), parent(W, Y)",
    )
