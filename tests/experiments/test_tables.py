"""Every number of a block comes from a committed record, and a stale block is noticed."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from experiments import paths, tables

PRINTED = ("readme-ppo", "readme-train")


def test_digits_are_significant_and_never_scientific():
    values = {
        2.2449: "2.24",
        8.6: "8.6",
        1484.2: "1,484",
        0.000347: "0.000347",
        278.27: "278",
        0.0: "0",
        42.04: "42",
    }
    assert {value: tables.digits(value) for value in values} == values
    assert tables.digits(0.9973, 2) == "1"


def larger(value, key=""):
    """A record with every measured number larger: those with a fraction, some counts, and a reason."""
    if isinstance(value, dict):
        return {name: larger(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return [larger(member, key) for member in value]
    if isinstance(value, float):
        return 1.4 * value
    if key == "loop" and isinstance(value, str):  # why something failed
        return f"{value}: other"
    return (
        3 * value
        if key in ("equal", "rules", "n_tried", "n_passed")
        and isinstance(value, int)
        else value
    )


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_block_is_the_text_of_its_record(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    record = {"ppo": "a\n\nb\n", "train": "a\n\nb\n"}
    (tmp_path / "readme_outputs.json").write_text(json.dumps(record))
    assert tables.BLOCKS[name]() == "    a\n\n    b\n"


@pytest.mark.parametrize(
    "name", [name for name in tables.BLOCKS if name not in PRINTED]
)
def test_a_block_changes_with_its_records(name, tmp_path, monkeypatch):
    """Every record that a block names is one that it reads."""
    shutil.copytree(paths.RESULTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    block = tables.BLOCKS[name]
    before = block()
    sources = re.findall(r"`([\w-]+)` \(|results/([\w-]+)\.json`", before)
    assert sources
    for source in (a or b for a, b in sources):
        file = tmp_path / f"{source}.json"
        text = file.read_text()
        file.write_text(json.dumps(larger(json.loads(text))))
        assert block() != before, source
        file.write_text(text)
    assert block() == before


def test_no_block_of_a_document_is_stale():
    for file in tables.documents():
        text = file.read_text()
        assert tables.rewrite(text) == text, (
            f"{file}: run python experiments/tables.py"
        )


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a README and a page of documentation."""
    (tmp_path / "docs" / "more").mkdir(parents=True)
    page = "before\n<!-- results:performance-startup -->\n<!-- /results:performance-startup -->\nafter\n"
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "docs" / "more" / "page.md").write_text(page)
    for name, file in (
        ("README", "README.md"),
        ("INVESTIGATION", "none.md"),
        ("NOTES", "none.md"),
        ("MATRIX_TABLES", "none.md"),
        ("DOCS", "docs"),
    ):
        monkeypatch.setattr(paths, name, tmp_path / file)
    return tmp_path


def test_a_stale_block_fails_the_check_and_is_rewritten(project, capsys):
    assert tables.main(["--check"]) == 1
    assert "README.md: stale: performance-startup" in capsys.readouterr().err
    assert tables.main([]) == 0
    for file in ("README.md", "docs/more/page.md"):
        text = (project / file).read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert tables.performance_startup() in text
    assert tables.main(["--check"]) == 0
    changed = text.replace("empty caches", "no caches")
    assert changed != text
    (project / "README.md").write_text(changed)
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "<!-- results:none -->\n<!-- /results:none -->\n",
            "results:none: expected one of",
        ),
        (
            "<!-- results:tuned -->\n",
            "results:tuned: expected an opening and a closing marker",
        ),
        (
            "<!-- /results:tuned -->\n<!-- results:tuned -->\n",
            "results:tuned: expected an opening and a closing",
        ),
    ],
)
def test_a_wrong_marker_is_an_error_of_one_line(project, capsys, text, error):
    (project / "README.md").write_text(text)
    assert tables.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line and "README.md" in line
    assert (project / "README.md").read_text() == text


def test_one_block_is_printed(capsys):
    assert tables.main(["--print", "performance-startup"]) == 0
    assert capsys.readouterr().out == tables.performance_startup()


# what documents claim


def test_every_record_names_its_commit_and_versions():
    for file in paths.RESULTS.glob("*.json"):
        if file.stem == "published":  # by others
            continue
        text = file.read_text()
        assert '"commit"' in text and (
            '"torch"' in text or '"numpy"' in text
        ), file.name
