"""The README's table of mined rules is the one that its script makes of its records."""

import json
from pathlib import Path

from experiments import mine_results

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_readme_is_made_from_the_record():
    stored = json.loads(
        (ROOT / "experiments/results/mine_results.json").read_text()
    )
    assert (
        stored["sets"]
        and mine_results.table(stored) in (ROOT / "README.md").read_text()
    )
