"""The rows of the logic benchmark that need no large graph, and the profile of `resolve`."""

import json
import sys

import pytest
import torch

from experiments.benchmarks import logic, profile_resolve
from funcppo.kg.logic import resolve
from funcppo.runtime.capture import CaptureError
from tests.runtime.test_capture import on_gpu

FACTS = "a\tp\tb\nb\tp\tc\nc\tp\td\na\tq\tc\n"
RULE = "q(X,Y) :- p(X,Z), p(Z,Y)"


def test_counts_of_rules_are_compared_with_those_of_their_file(tmp_path):
    """Of the two pairs that the body derives one is a fact."""
    folder = tmp_path / "chain"
    folder.mkdir()
    (folder / "train.txt").write_text(FACTS)
    for support, n_different in ((1, 0), (2, 1)):
        line = f"1\t{support}\t2\t0.5\t{RULE}\n"
        (folder / "rules.tsv").write_text(line)
        row = logic.confidence(tmp_path, "chain", "rules.tsv")
        assert (row["rules"], row["pairs"]) == (1, 2)
        assert row["differ"] == n_different


def profile(monkeypatch, file, *options):
    words = ["--graphs", "family_tree:20:1", "--batch", "32", "--repeats", "2"]
    words += ["--out", str(file), *options]
    monkeypatch.setattr(sys, "argv", ["profile_resolve.py", *words])
    profile_resolve.main()
    return json.loads(file.read_text())["rows"]


def test_the_profile_of_resolve_has_all_its_phases(tmp_path, monkeypatch):
    before = [getattr(resolve, name) for name in profile_resolve.PHASES]
    options = ("--device", "cpu", "--eager")
    (row,) = profile(monkeypatch, tmp_path / "out.json", *options)
    assert row["mode"] == "eager" and row["microseconds"] > 0
    assert row["phases"].keys() == {*profile_resolve.PHASES}
    assert min(row["phases"].values()) > 0
    # which operators cost most depends on the machine
    names = {event["name"] for event in row["costliest"]}
    assert any(name.startswith("aten::") for name in names)
    assert row["n_kernels"] == 0
    assert before == [getattr(resolve, name) for name in profile_resolve.PHASES]


def test_other_successors_end_the_profile(tmp_path, monkeypatch):
    def compile_wrong(work):
        found = work.call()
        return lambda: found._replace(overflow=~found.overflow)

    monkeypatch.setattr(profile_resolve, "compile_call", compile_wrong)
    with pytest.raises(RuntimeError, match="expected the eager successors"):
        profile(monkeypatch, tmp_path / "out.json", "--device", "cpu")


def test_a_profile_of_a_replay_is_of_a_cuda_graph_or_none():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CaptureError):
        profile_resolve.replay_call(lambda: None, "cpu")


@on_gpu
def test_the_profile_of_resolve_counts_the_kernels_of_a_graph(
    tmp_path, monkeypatch
):
    """A replay hides the operators, and no kernel; it adds the copy of its state."""
    options = ("--device", "cuda", "--eager")
    eager, graph = profile(monkeypatch, tmp_path / "out.json", *options)
    assert (eager["mode"], graph["mode"]) == ("eager", "graph")
    assert graph["n_kernels"] == pytest.approx(eager["n_kernels"], rel=0.2)
    assert eager["kernel_microseconds"] > 0 < graph["kernel_microseconds"]
    assert sum(eager["phases"].values()) > 0
