"""Lines of --details: those that `evaluate` writes agree with the recount, and each field that is changed is found."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from funcppo.core import record_log
from funcppo.kg.ranking import (
    agreement,
    details_lines,
    evaluator,
    ranking,
    result_log,
)
from tests.kg.ranking.test_agreement import compare_ranks, subject_of

SETTINGS = {
    "split": "test",
    "score": "noisy-or@3",
    "height": 1,
    "smoothing": 5.0,
    "object_identity": False,
    "negatives": None,
}


def recording_subject(score="noisy-or@3"):
    """A subject whose evaluator records everything."""
    subject = subject_of(score=score, max_height=1, smoothing=5.0, n_known=3)
    everything = dataclasses.replace(subject.evaluator, all_scores=True)
    return dataclasses.replace(subject, evaluator=everything)


@pytest.fixture(scope="module")
def subject():
    return recording_subject()


def records_of(subject):
    """The records of all queries, which are ranked together."""
    split = subject.evaluator.task.dataset.test
    window = evaluator.rank_window(
        subject.evaluator, split, np.arange(len(split))
    )
    return [json.loads(json.dumps(x)) for records in window for x in records]


@pytest.fixture(scope="module")
def records(subject):
    return records_of(subject)


def write(folder, records, **settings):
    """A details file."""
    path = folder / "details.jsonl"
    log = result_log.open_log(path, SETTINGS | settings, 2, resume=False)
    record_log.append(log, records)
    record_log.close(log)
    return path


def compare_lines(folder, subject, records):
    """The comparison of the lines of all queries."""
    details = details_lines.read_details(write(folder, records))
    split = subject.evaluator.task.dataset.test
    rows = range(len(split))
    ranked = agreement.rank_sample(subject.evaluator, split, rows)
    lines = details_lines.sample_lines(details, rows)
    return compare_ranks(subject, ranked, lines=lines)["details"]


@pytest.mark.parametrize(
    "score",
    [
        "noisy-or@3-other-facts",
        "noisy-or-other-facts",
        "noisy-or@2",
        "max-confidence",
        "exists@1",
    ],
)
def test_what_evaluate_writes_agrees(tmp_path, score):
    subject = recording_subject(score)
    records = records_of(subject)
    assert ("other_facts" in records[0]) == ("other-facts" in score)
    compared = compare_lines(tmp_path, subject, records)
    assert compared.disagreements == compared.notes == ()
    assert compared.n_compared == compared.n_total == len(records) == 18


def shift(name, by):
    def change(record):
        record[name] += by

    return change


def put(name, value):
    def change(record):
        record[name] = value

    return change


def shift_other(record):
    record["other_quantised_scores"][0] += 1


def shift_rank(record):
    record["rank"]["realistic"] += 0.5


@pytest.mark.parametrize(
    "change, text",
    [
        (shift("quantised_score", 1), "quantised_score"),
        (put("quantised_score", None), "quantised_score None, recounted"),
        (put("quantised_score", "high"), "quantised_score high, recounted"),
        (put("quantised_score", float("nan")), "quantised_score nan"),
        (shift("log_score", 1e-3), "log_score"),
        (shift_other, "other_quantised_scores[0]"),
        (put("other_quantised_scores", [1]), "other_quantised_scores 1"),
        (put("other_quantised_scores", 3), "other_quantised_scores no list"),
        (shift("n_better", 1), "n_better"),
        (shift("n_candidates", 1), "n_candidates"),
        (shift("n_scored", 1), "n_scored"),
        (put("answer_provable", False), "answer_provable False"),
        (put("status", "refuted"), "status refuted, recounted derivable"),
        (put("atom", "r(e0, e0)"), "atom r(e0, e0), recounted"),
        (shift_rank, "realistic"),
        (put("rank", 1), "optimistic None"),
        (shift("reciprocal_rank", 0.1), "reciprocal_rank"),
    ],
)
def test_a_changed_field_is_found(tmp_path, subject, records, change, text):
    changed = copy.deepcopy(records)
    i = next(i for i, x in enumerate(records) if x["status"] == "proved")
    change(changed[i])
    # as somebody might edit the file, which `result_log` would not write
    path = write(tmp_path, records)
    path.write_text("".join(json.dumps(r) + "\n" for r in changed))
    details = details_lines.read_details(path)
    split = subject.evaluator.task.dataset.test
    rows = range(len(split))
    ranked = agreement.rank_sample(subject.evaluator, split, rows)
    compared = compare_ranks(
        subject, ranked, lines=details_lines.sample_lines(details, rows)
    )
    (line,) = compared["details"].disagreements
    assert line.startswith(f"line {i + 1}, {records[i]['atom']}, ")
    assert text in line
    assert not compared["ranks"].n_disagreeing


def change_others(name, value):
    def change(others):
        return {**others, name: value(others[name])}

    return change


@pytest.mark.parametrize(
    "change, text",
    [
        (change_others("n_facts", lambda n: n + 1), "other_facts: n_facts"),
        (
            change_others("share_of_facts", lambda x: x + 1e-6),
            "other_facts: share_of_facts",
        ),
        (
            change_others("share_of_derived", lambda x: x + 1e-6),
            "other_facts: share_of_derived",
        ),
        (
            change_others("log_odds", lambda x: x + 1e-3),
            "other_facts: log_odds",
        ),
        (change_others("log_odds", lambda _: "much"), "other_facts: log_odds"),
        (change_others("side", lambda _: "top"), "other_facts: side top"),
        (change_others("relation", lambda _: "x"), "other_facts: relation x"),
        (lambda _: None, "other_facts None, expected an object"),
        (lambda _: 3, "other_facts 3, expected an object"),
    ],
)
def test_changed_other_facts_are_found(tmp_path, change, text):
    subject = recording_subject("noisy-or@3-other-facts")
    records = records_of(subject)
    i = next(i for i, record in enumerate(records) if record["other_facts"])
    changed = copy.deepcopy(records)
    changed[i]["other_facts"] = change(records[i]["other_facts"])
    compared = compare_lines(tmp_path, subject, changed)
    (line,) = compared.disagreements
    assert line.startswith(f"line {i + 1}, {records[i]['atom']}, ")
    assert text in line


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"split": "train"}, "split: expected test or valid, got 'train'"),
        ({"score": 3}, "score: expected a name, got 3"),
        ({"height": 0}, "height: expected 1 or more, got 0"),
        ({"smoothing": -1}, "smoothing: expected null, or 0 or more, got -1"),
        ({"object_identity": 1}, "object_identity: expected true or false"),
        ({"negatives": 5}, "negatives: expected null, all entities as"),
    ],
)
def test_bad_settings_are_one_line(tmp_path, records, settings, message):
    path = write(tmp_path, records, **settings)
    with pytest.raises(ValueError, match=message) as error:
        details_lines.read_details(path)
    assert str(error.value).startswith(f"{path}.settings.json: ")


def test_a_file_of_other_data_or_queries_is_one_line(tmp_path, records):
    path = write(tmp_path, records, fingerprint="one")
    details = details_lines.read_details(path)
    settings = details.settings | {"params_digest": None}
    details_lines.check_settings(details, settings, "D")
    with pytest.raises(
        ValueError, match="fingerprint: expected two, that of D, got one"
    ):
        details_lines.check_settings(
            details, settings | {"fingerprint": "two"}, "D"
        )
    details_lines.check_queries(details, 9, (1, 2))
    with pytest.raises(ValueError, match=r"jsonl:17: query_row: expected less"):
        details_lines.check_queries(details, 8, (1, 2))
    with pytest.raises(ValueError, match=r"jsonl:2: side: expected one that"):
        details_lines.check_queries(details, 9, (1,))


def test_a_line_that_is_there_twice_and_an_empty_file_are_one_line(
    tmp_path, records
):
    with pytest.raises(ValueError, match="jsonl:3: expected one line for each"):
        details_lines.read_details(write(tmp_path, [*records[:2], records[0]]))
    with pytest.raises(ValueError, match="expected a line for each query and"):
        details_lines.read_details(write(tmp_path, []))


def test_a_line_that_is_not_there_is_reported(tmp_path, records):
    details = details_lines.read_details(write(tmp_path, records[:-1]))
    found = agreement.compare_line_numbers(details, 9, (1, 2))
    assert (found.n_compared, found.n_disagreeing) == (18, 1)
    assert found.disagreements == ("query_row 8, tail: no line",)
    sample = details._replace(settings={**details.settings, "queries": 3})
    found = details_lines.missing_lines(sample, 9, (1, 2))
    assert len(found) == (8 in ranking.random_rows(9, 3))
