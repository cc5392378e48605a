"""The comparison with PyClause, over a stand-in written from its documentation. PyClause itself is not run here."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from experiments.checks import pyclause_ranking

STAND_IN = Path(__file__).with_name("pyclause_stand_in")
RULES = """\
20\t10\t0.5\tr(X,Y) <= s(Y,X)
30\t3\t0.1\tr(X,Y) <= s(X,A), t(A,Y)
40\t12\t0.3\ts(X,Y) <= r(A,X), r(A,Y)
50\t9\t0.18\tt(X,Y) <= r(X,A), s(B,A), t(B,Y)
60\t6\t0.1\tt(X,e1) <= 
9\t9\t1\tt(X,Y) <= s(X,Y)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of random triples."""
    generator = random.Random(0)
    entities = [f"e{i}" for i in range(20)]
    triples = {
        (generator.choice(entities), relation, generator.choice(entities))
        for relation in "rst"
        for _ in range(50)
    }
    lines = ["\t".join(triple) + "\n" for triple in sorted(triples)]
    generator.shuffle(lines)
    parts = {"test": lines[:20], "valid": lines[20:40], "train": lines[40:]}
    for name, part in parts.items():
        (tmp_path / f"{name}.txt").write_text("".join(part))
    return tmp_path


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rules: str = RULES
) -> tuple[int, dict]:
    """Exit status and row of a comparison."""
    rule_file, out = folder / "anyburl.txt", folder / "record.json"
    rule_file.write_text(rules)
    words = [str(folder), "--rules", str(rule_file), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["pyclause_ranking.py", *words])
    status = pyclause_ranking.main()
    files = json.loads(out.read_text())["files"] if out.exists() else {}
    return status, next(iter(files.values()), {})


def test_a_rule_file_ranks_the_same(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    status, row = run_main(monkeypatch, folder)
    assert status == 0
    assert row["rules"] == 5  # without the zero rule
    assert row["counts"]["different"] == 0
    assert row["max_plus"]["apart"] > 10
    assert row["max_plus"]["contradicted"] == 0
    for score in row["scores"].values():
        assert score["candidates"] > 100
        assert score["different_scores"] == score["only_in_pyclause"] == 0
        assert score["different_ranks"] == 0
        assert score["funcppo"] == score["pyclause"]
        assert 0 < score["mrr_in_its_order"] < 1


def test_rules_that_funcppo_mines_rank_the_same(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    out = folder / "record.json"
    words = [str(folder), "--split", "valid", "--unseen", "0"]
    words += ["--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["pyclause_ranking.py", *words])
    assert pyclause_ranking.main() == 0
    (row,) = json.loads(out.read_text())["files"].values()
    assert row["rules"] > 0
    assert row["counts"]["different"] == 0
    assert row["counts"]["file_differs_from_both"] == 0


def test_other_confidences_are_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    make_job = pyclause_ranking.make_job

    def with_one_more(*arguments: object) -> dict:
        job = make_job(*arguments)  # type: ignore[arg-type]
        return job | {"unseen": job["unseen"] + 1}

    monkeypatch.setattr(pyclause_ranking, "make_job", with_one_more)
    status, row = run_main(monkeypatch, folder)
    assert status == 1
    assert row["scores"]["noisy-or"]["different_scores"] > 0


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("True", "only_in_pyclause"),  # no object identity
        ("entity not in (*walk, 'e3')", "different_scores"),
    ],
)
def test_candidates_that_only_one_predicts_are_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, condition: str, found: str
) -> None:
    other = folder / "other"
    other.mkdir()
    code = (STAND_IN / "c_clause.py").read_text()
    assert "if entity not in walk:" in code
    code = code.replace("if entity not in walk:", f"if {condition}:")
    (other / "c_clause.py").write_text(code)
    (other / "clause.py").write_text((STAND_IN / "clause.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(other))
    status, row = run_main(monkeypatch, folder)
    assert status == 1
    assert row["counts"]["different_without_constants"] > 0
    assert row["scores"]["max-confidence"][found] > 0


def test_another_order_of_what_the_best_rule_predicts_is_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    other = folder / "other"
    other.mkdir()
    code = (STAND_IN / "c_clause.py").read_text()
    assert "key = values if self.is_max" in code
    code = code.replace("key = values if", "key = values[:1] if")
    (other / "c_clause.py").write_text(code)
    (other / "clause.py").write_text((STAND_IN / "clause.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(other))
    status, row = run_main(monkeypatch, folder)
    assert status == 1
    assert row["max_plus"]["contradicted"] > 0
    assert row["scores"]["max-confidence"]["different_scores"] == 0


def test_what_pyclause_refuses_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    with pytest.raises(SystemExit, match="expected a head r\\(X,Y\\)"):
        run_main(monkeypatch, folder, "5\t5\t1\tr(X,e1) <= s(X,A)\n")


def test_without_pyclause_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "c_clause.py").write_text("raise ImportError('no PyClause')")
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    status, _ = run_main(monkeypatch, folder)
    assert status == pyclause_ranking.EXIT_WITHOUT_PYCLAUSE == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "no PyClause" in lines[0]
