"""The programs on a GPU print what they print on a CPU."""

import json

import pytest

from tests.cli.runner import SMALL, funcppo, read_records
from tests.learning import on_gpu

pytestmark = on_gpu
FAMILY = "family_tree:40:0"


@pytest.fixture(
    scope="module", params=["1", "2"], ids=["oracle facts", "policy facts"]
)
def trained(request, tmp_path_factory):
    """A run on the CPU, to height 1 or 2."""
    out = tmp_path_factory.mktemp("run") / "out"
    height = f"prover.max_height={request.param}"
    words = ("--out", out, "--steps", "64", "--set", height, *SMALL)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert funcppo(monkeypatch, "train", FAMILY, *words) == 0
    return out


@pytest.mark.parametrize(
    "how", ["", "--score success", "--negatives 20", "--score max-confidence"]
)
def test_ranks_are_the_cpus_or_counted(programs, trained, tmp_path, how):
    ranks = []
    for device in ("cpu", "cuda"):
        details = tmp_path / device
        options = f"--set proofs=off --max-queries 8 --device {device} {how}"
        words = ("--details", details, *options.split())
        assert programs("evaluate", trained, *words) == 0
        ranks.append(read_records(details))
    clear = [
        (a, b)
        for a, b in zip(*ranks, strict=True)
        if not (a["near_boundary"] or b["near_boundary"])
    ]
    assert clear and all(a == b for a, b in clear)


def test_a_run_of_a_gpu_is_evaluated_on_both_devices(programs, tmp_path):
    out = tmp_path / "run"
    options = "--strategy eager --device cuda --steps 64"
    words = ("--out", out, *SMALL, *options.split())
    assert programs("train", FAMILY, *words) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["device"] == "cuda"
    words = ("--details", tmp_path / "proofs", "--device", "cuda")
    assert programs("evaluate", out, *words) == 0
    assert programs("evaluate", out) == 0
