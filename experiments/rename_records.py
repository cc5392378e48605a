"""Rename the committed records after their programs, and their keys to the present words; numbers are not touched.

python experiments/rename_records.py        # was run once, for the commit that adds this file
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

SUPERSEDED = (  # stages of a change: git has them
    "bench_cartpole-cpu-before",
    "bench_cartpole-h200-before",
    "bench_cartpole-h200-microbatches-before",
    "bench_cartpole-h200-stacked",
    "bench_cartpole-h200-tf32",  # `bench_cartpole-h200` has rows in TF32 of a later commit
    "bench_prover-h200-family-130-packed",
    "bench_prover-h200-family-before",
    "bench_prover-h200-family-packed",
    "bench_prover-h200-s3-before",
    "bench_prover-h200-s3-bytecode",
    "bench_prover-h200-s3-kept",
    "bench_prover-h200-s3-told",
    "bench_prover-h200-s3-traced",
    "bench_prover-h200-s3-turns-kept",
    "bench_prover-h200-s3-turns-traced",
    "bench_prover-h200-s3-warm-before",
    "bench_prover-h200-s3-warm-bytecode",
    "bench_prover-h200-s3-warm-kept",
    "bench_prover-h200-s3-warm-told",
    "bench_prover-h200-s3-warm-traced",
)
NEW_NAMES = {
    "bench_cartpole-h200-earlier": "cartpole-h200-update",
    "bench_prover-h200-padded": "prover-h200-family-padded",
    "bench_prover-h200-s3-turns": "prover-h200-s3-loop-body-graphs",
    "bench_rungs-h200": "strategies-h200",
    "learn_cartpole": "learn_control-cartpole",
    "learn_pendulum": "learn_control-pendulum",
    "mine_results": "mining_results",
}
MODES = {"whole": "whole-iteration", "parts": "loop-body-graphs", "eager-parts": "eager-loop-body-graphs"}
KEYS = {
    "replay": "replay_mode",
    "rung": "strategy",
    "way": "distance",
    "a step": "step_difference",
    "from eager": "difference_from_eager",
    "clipped otherwise": "clip_differences",
    "of": "loss",
    "eagerly": "eager",
    "from no other fact": "circular",
    "judged": "rankings",
}
KEYS_OF = {  # of one object of a record alone, because the words have other meanings elsewhere
    "settings": {"votes": "votes_per_fact", "work": "max_rows", "seconds": "time_limit"},
    "record": {"torch": "torch_version"},
    "failures": {"torch": "torch_version", "error": "error_type"},
}
WORDS = {"--prover.hard-fraction": "--prover.hard-negative-fraction"}


def renamed(value: Any, parent: str = "") -> Any:
    """A record with its keys, cells and options in the present words."""
    if isinstance(value, dict):
        keys = KEYS | KEYS_OF.get(parent, {})
        return {keys.get(key, key): renamed_member(key, member) for key, member in value.items()}
    if isinstance(value, list):
        return [renamed(member, parent) for member in value]
    return WORDS.get(value, value) if isinstance(value, str) else value


def renamed_member(key: str, value: Any) -> Any:
    """A member of an object."""
    if key == "cell":
        words = [MODES.get(word, word) for word in value.split(" ") if not word.endswith("/data")]
        return " ".join(words)
    if key == "row" and isinstance(value, str):
        return value.removesuffix("turns") + "loop-body graphs" if value.endswith(", turns") else value
    return renamed(value, key)


def numbers(value: Any) -> list[Any]:
    """Every value of a record that is not a text, in order."""
    if isinstance(value, dict):
        return [x for member in value.values() for x in numbers(member)]
    if isinstance(value, list):
        return [x for member in value for x in numbers(member)]
    return [] if isinstance(value, str) else [repr(value)]


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Put a changed record in place of a file."""
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=1) + "\n")


def main() -> None:
    for name in SUPERSEDED:
        subprocess.run(["git", "rm", "-q", f"{RESULTS / name}.json"], check=True)
    for file in sorted(RESULTS.glob("*.json")):
        if file.name.startswith("full_step_matrix"):
            continue
        before = json.loads(file.read_text())
        after = renamed(before)
        assert numbers(before) == numbers(after), file
        target = file.with_name(NEW_NAMES.get(file.stem, file.stem).removeprefix("bench_") + ".json")
        if target != file:
            subprocess.run(["git", "mv", str(file), str(target)], check=True)
        if after != before:
            target.write_text(json.dumps(after, indent=1) + "\n")

    # Of an early record only its rows of one minibatch update have no later ones.
    rewrite(
        RESULTS / "cartpole-h200-update.json",
        lambda record: record | {"rows": [row for row in record["rows"] if row["cell"].startswith("update")]},
    )
    # One row of another commit joins its record; it names that commit itself.
    apart = RESULTS / "scoring-h200-ranked.json"
    record = json.loads(apart.read_text())
    (row,) = record["rows"]
    row["commit"] = record["machine"]["commit"]
    rewrite(RESULTS / "scoring-h200.json", lambda record: record | {"rows": [*record["rows"], row]})
    subprocess.run(["git", "rm", "-q", "-f", str(apart)], check=True)


if __name__ == "__main__":
    main()
