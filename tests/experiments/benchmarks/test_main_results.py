"""Options are chosen by the valid split, and what a record holds is not run again."""

from experiments import tables
from experiments.benchmarks import main_results
from experiments.benchmarks.main_results import Trial


def test_every_set_stands_in_a_table():
    assert {
        **tables.PROVIDED_RULES,
        **tables.MINED_RULES,
    }.keys() == main_results.SETS.keys()
    assert tables.SUMMARY.keys() <= main_results.SETS.keys()


def test_options_are_words_of_the_command_line():
    assert main_results.command_line(prover__max_height="1", steps="5") == [
        "--prover.max-height",
        "1",
        "--steps",
        "5",
    ]


def test_products_take_one_of_each_axis():
    assert main_results.products([["a"], ["b"]], [["x"], []]) == [
        ["a", "x"],
        ["a"],
        ["b", "x"],
        ["b"],
    ]


def test_options_are_chosen_by_valid_and_the_first_of_equals():
    rows = [
        {"set": "umls", "options": options, "best_valid": 0.5}
        for options in main_results.SETS["umls"].tried
    ]
    rows[3]["best_valid"] = rows[5]["best_valid"] = 0.6
    other = [
        {
            "set": "family",
            "options": main_results.SETS["family"].tried[0],
            "best_valid": 0.9,
        }
    ]
    assert (
        main_results.best_options(other + rows, "umls")
        == main_results.SETS["umls"].tried[3]
    )
    assert main_results.best_options([], "countries_S1") == []


def test_the_best_trial_is_the_run_at_seed_0():
    stored, (first, second, third, *_) = (
        {"tried": [], "runs": []},
        main_results.SETS["umls"].tried,
    )
    for options, valid in ((second, 0.5), (first, 0.6), (third, 0.4)):
        row = {
            "set": "umls",
            "seed": 0,
            "learning_rate_0": False,
            "options": options,
            "results": {"best_valid_metric": valid},
        }
        main_results.add_trial(stored, row)
    assert [row["options"] for row in stored["runs"]] == [first] and len(
        stored["tried"]
    ) == 3


def test_the_committed_record_is_complete():
    """All options were tried and all seeds run, in today's words: nothing would run again."""
    record = tables.load_record("main_results")
    assert main_results.missing_trials(record, list(main_results.SETS)) == []
    assert main_results.missing_runs(record, list(main_results.SETS), 3) == []


def test_what_a_record_lacks_is_run():
    record = {
        "tried": [],
        "runs": [{"set": "umls", "seed": 0, "learning_rate_0": False}],
    }
    assert len(main_results.missing_trials(record, ["umls", "wn18rr"])) == len(
        main_results.SETS["umls"].tried
    )
    runs = main_results.missing_runs(record, ["umls"], 2)
    options = main_results.SETS["umls"].tried[0]
    assert runs == [
        Trial("umls", options, 0, True),
        Trial("umls", options, 1, False),
    ]
