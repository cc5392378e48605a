"""The README's table of results is the one that its script makes of its records."""

import json
from pathlib import Path

from experiments import main_results

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_readme_is_made_from_the_record():
    runs = json.loads(
        (ROOT / "experiments/results/main_results.json").read_text()
    )["runs"]
    assert main_results.table(runs) in (ROOT / "README.md").read_text()


def test_a_spread_is_the_mean_and_the_sample_deviation():
    assert main_results.spread([1.0, 2.0, 3.0]) == "2.0000 ± 1.0000"
    assert (
        main_results.spread([0.5, 0.5]) == "0.5000"
        and main_results.spread([]) == ""
    )


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
        main_results.chosen(other + rows, "umls")
        == main_results.SETS["umls"].tried[3]
    )
    assert main_results.chosen([], "countries_S1") == []


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
        main_results.keep_better(stored, row)
    assert [row["options"] for row in stored["runs"]] == [first] and len(
        stored["tried"]
    ) == 3
