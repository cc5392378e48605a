"""Every number of a block comes from a committed record, and a stale block is noticed."""

import json

import pytest

from experiments import paths, tables

PRINTED = ("readme-ppo", "readme-train")


def test_digits_are_significant_and_never_scientific():
    values = [2.2449, 8.6, 1484.2, 0.000347, 278.27, 0.0, 42.04]
    texts = "2.24 8.6 1,484 0.000347 278 0 42"
    assert [tables.digits(value) for value in values] == texts.split()
    assert tables.digits(0.9973, 2) == "1"


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_block_is_the_text_of_its_record(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    record = {"ppo": "a\n\nb\n", "train": "a\n\nb\n"}
    (tmp_path / "readme_outputs.json").write_text(json.dumps(record))
    assert tables.BLOCKS[name]() == "    a\n\n    b\n"


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
    for name in ("INVESTIGATION", "NOTES", "MATRIX_TABLES"):
        monkeypatch.setattr(paths, name, tmp_path / "none.md")
    monkeypatch.setattr(paths, "README", tmp_path / "README.md")
    monkeypatch.setattr(paths, "DOCS", tmp_path / "docs")
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


# what documents claim


def test_every_record_names_its_commit_and_versions():
    for file in paths.RESULTS.glob("*.json"):
        if file.stem == "published":  # by others
            continue
        text = file.read_text()
        assert '"commit"' in text, file.name
        assert '"torch"' in text or '"numpy"' in text, file.name
