"""Small training runs that several files read."""

import numpy as np
import pytest
import torch

from tests.cli.runner import TINY, TRAINED, Programs, funcppo, settings

RULES = """p(X, Y) :- q(X, Y).
p(X, Y) :- q(X, Z), r(Z, Y).
q(X, Y) :- r(Y, X).
q(X, Y) :- p(X, Z), p(Z, Y).
r(X, Y) :- s(X, Y), q(X, X).
"""
OF_LEARNER = {
    "questions": "listwise.n_epochs=1 prover.max_height=1 questions.embedding=True"
    " embedding.rank=2 embedding.n_epochs=1 questions.bellman_ford=True"
    " bellman_ford.n_steps=2 bellman_ford.width=4",
    "proofs": "score=success prover.max_height=2 prover.object_identity=False",
}


@pytest.fixture
def programs(monkeypatch, capsys):
    return Programs(monkeypatch, capsys)


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes PyTorch find a number of GPUs, whatever the machine has."""

    def set_gpus(n):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)

    return set_gpus


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run of four updates on Countries S1."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        args = ("train", "countries_s1", "--out", out, *TRAINED)
        assert funcppo(monkeypatch, *args) == 0
    return out


@pytest.fixture(scope="session")
def graph(tmp_path_factory):
    """A folder of random triples with rules, whose scores are far from each other."""
    folder = tmp_path_factory.mktemp("graph")
    rows = np.unique(
        np.random.default_rng(0).integers([14, 4, 14], size=(170, 3)), axis=0
    )
    rows = rows[np.random.default_rng(1).permutation(len(rows))].tolist()
    lines = [f"e{h}\t{'pqrs'[r]}\te{t}\n" for h, r, t in rows]
    (folder / "train.txt").write_text("".join(lines[30:]))
    (folder / "valid.txt").write_text("".join(lines[20:30]))
    (folder / "test.txt").write_text("".join(lines[:20]))
    (folder / "rules.txt").write_text(RULES)
    return folder


@pytest.fixture(scope="session")
def runs(graph, tmp_path_factory):
    """Runs on the graph, by what they learn from."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for learner, more in OF_LEARNER.items():
            words = ["--out", folder / learner, "--learner", learner]
            words += ["--steps", "128", "--strategy", "eager"]
            words += settings(f"{TINY} n_validations=1 {more}")
            assert funcppo(monkeypatch, "train", graph, *words) == 0, learner
    return folder
