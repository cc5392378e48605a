"""The programs on a GPU print what they print on a CPU."""

import json
import re

import pytest

from tests.cli.runner import SMALL, funcppo
from tests.runtime.test_capture import on_gpu

pytestmark = on_gpu
FAMILY = "family_tree:40:0"


@pytest.fixture(
    scope="module", params=["1", "2"], ids=["oracle facts", "policy facts"]
)
def trained(request, tmp_path_factory):
    """A run on the CPU, to height 1 or 2."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert funcppo(monkeypatch, "train", FAMILY, "--out", out, "--steps", "64", "--set",
                       f"prover.max_height={request.param}", *SMALL) == 0  # fmt: skip
    return out


@pytest.mark.parametrize(
    "how",
    [
        (),
        ("--score", "success"),
        ("--score", "greedy"),
        ("--negatives", "20"),
        ("--score", "max-confidence"),
    ],
    ids=" ".join,
)
def test_ranks_are_those_of_the_cpu_but_for_counted_scores(
    monkeypatch, trained, tmp_path, how
):
    ranks = {}
    for device in ("cpu", "cuda"):
        details = tmp_path / device
        args = (
            "evaluate",
            trained,
            "--details",
            details,
            "--set",
            "proofs=off",
            "--max-queries",
            "8",
            "--device",
            device,
            *how,
        )
        assert funcppo(monkeypatch, *args) == 0
        ranks[device] = [
            json.loads(line) for line in details.read_text().splitlines()
        ]
    cpu, gpu = ranks["cpu"], ranks["cuda"]
    clear = [
        (a, b)
        for a, b in zip(cpu, gpu, strict=True)
        if not (a["near_boundary"] or b["near_boundary"])
    ]
    assert clear and all(a == b for a, b in clear)


def test_a_run_of_a_gpu_is_evaluated_on_both_devices(
    monkeypatch, capsys, tmp_path
):
    out = tmp_path / "run"
    args = (
        "--strategy",
        "eager",
        "--set",
        "prover.hard_negative_fraction=0.5",
        *SMALL,
    )
    assert (
        funcppo(
            monkeypatch,
            "train",
            FAMILY,
            "--out",
            out,
            "--device",
            "cuda",
            "--steps",
            "64",
            *args,
        )
        == 0
    )
    results = json.loads((out / "results.json").read_text())
    assert (
        results["device"] == "cuda"
        and results["false_negative_rate"] is not None
    )
    assert (
        funcppo(
            monkeypatch,
            "evaluate",
            out,
            "--details",
            tmp_path / "proofs",
            "--device",
            "cuda",
        )
        == 0
    )
    assert funcppo(monkeypatch, "evaluate", out) == 0
    assert "a proof" in capsys.readouterr().out


def test_mining_on_a_gpu_writes_the_same_file(monkeypatch, tmp_path):
    files = [tmp_path / device for device in ("cpu", "cuda")]
    for file in files:
        assert (
            funcppo(
                monkeypatch,
                "mine",
                FAMILY,
                "--out",
                file,
                "--device",
                file.name,
                "--constants",
            )
            == 0
        )
    cpu, gpu = (file.read_text() for file in files)
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", cpu) == number.sub("#", gpu)
    assert [float(x) for x in number.findall(cpu)] == pytest.approx(
        [float(x) for x in number.findall(gpu)]
    )
