"""`funcppo mine`: rules from data."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from funcppo.cli import check_output_path, write_json
from funcppo.cli import console as terminal
from funcppo.mining.config import MiningConfig

if TYPE_CHECKING:
    from funcppo.data import Dataset
    from funcppo.data.rule_tables import RuleStatistics
    from funcppo.mining.miner import MiningResult

MAX_PRINTED_RULES = 5  # rules printed
_DEFAULT = MiningConfig()


@dataclass(frozen=True, kw_only=True)
class Mine:
    """Find the rules that the known facts of a data set support, and write them with their counts.

    Closed paths h(X,Y) :- b1(X,Z), b2(Z,Y), each atom either way round; with --constants also h(X,c) :- b(X,Z) and
    h(X,c) :- b(X,d). A rule is kept when it is the most confident one that derives some fact from others. The same
    seed gives the same file, unless --seconds ends the search early, which is then said.

    Exit status: 0 written, also where no rule was found; 2 bad input.
    """

    dataset: Annotated[Positional[str], arg(metavar="DATASET")]
    """Embedded name, folder, or .pl program; valid and test are not looked at."""
    out: Annotated[Path, arg(metavar="FILE|-")]
    """Rule file to write, or - for standard output."""
    format: Literal["tsv", "AnyBURL", "AMIE"] = "tsv"
    """Of the file: this project's table, AnyBURL (read by PyClause too) or AMIE; this project reads all three."""
    max_length: int = _DEFAULT.max_length
    """Atoms of a body, 1 to 3."""
    min_support: int = _DEFAULT.min_support
    """Facts that a rule derives from other facts."""
    min_confidence: float = _DEFAULT.min_confidence
    """Least leave-one-out confidence."""
    constants: Annotated[bool, FlagCreatePairsOff] = False
    """Also rules with constants."""
    votes_per_fact: int = _DEFAULT.votes_per_fact
    """Keep a rule when it is among this many best ones of some fact that it derives."""
    time_limit: Annotated[float | None, arg(metavar="N")] = None
    """Stop looking after this time, then finish the counts of what was found and write it."""
    max_rows: int = _DEFAULT.max_rows
    """Rows that a stage may make, about 40 bytes each; what does not fit is estimated from a sample and marked."""
    seed: int = 0
    """Of the samples."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to count."""
    json: Annotated[str | None, arg(metavar="FILE|-")] = None
    """Write what was done as JSON to this file, or to standard output in place of the table for `-`."""

    def run(self) -> int:
        """Mine, write, show; the exit status."""
        start = time.perf_counter()
        cfg = MiningConfig(
            max_length=self.max_length,
            min_support=self.min_support,
            min_confidence=self.min_confidence,
            constants=self.constants,
            votes_per_fact=self.votes_per_fact,
            max_rows=self.max_rows,
            time_limit=self.time_limit,
            seed=self.seed,
        )
        to_stdout = str(self.out) == "-"
        if not to_stdout:
            check_output_path("--out", self.out)
        if self.json is not None and Path(self.json).resolve() == self.out.resolve():
            raise ValueError(f"--json {self.json}: want another file than that of --out")
        found, counts, mined = self._mined(cfg)
        from funcppo.data.rule_tables import compatibility_notes, format_rule_table
        from funcppo.experiment import rule_cache

        if to_stdout:
            sys.stdout.write(format_rule_table(found, counts, self.format))
        else:
            rule_cache.write_rule_file(self.out, found, counts, self.format)
        notes = (*mined.notes, *compatibility_notes(found, self.format))
        result = _result(self, found, mined, time.perf_counter() - start) | {"notes": list(notes)}
        console = terminal.make_console(to_stdout or self.json == "-")
        terminal.print_notes(console, (*found.notes, *notes))
        if not len(found.rules):
            console.print(
                f"{found.name}: {len(found.facts)} facts give no rule with support {cfg.min_support} and "
                f"confidence {cfg.min_confidence:g}; "
                f"{self.out} holds none"
            )
        else:
            _show(console, found, counts, result)
        write_json(self.json, result)
        return 0

    def _mined(self, cfg: MiningConfig) -> tuple[Dataset, RuleStatistics, MiningResult]:
        import torch
        from rich.console import Console

        from funcppo.data import load
        from funcppo.experiment import rule_cache

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device here")
        dataset = load(self.dataset, facts_only=True)
        with Console(stderr=True).status("reading") as status:
            return rule_cache.mine_dataset(dataset, cfg, self.device, status.update)


def _result(asked: Mine, found: Dataset, mined: MiningResult, seconds: float) -> dict[str, Any]:
    walk, ends = mined.rules.labels, mined.rules.end_constants
    lengths = Counter((walk[:, 1:] >= 0).sum(1)[ends[:, 0] == 0].tolist())
    return {
        "dataset": found.name,
        "n_facts": len(found.facts),
        "n_rules": len(found.rules),
        "n_paths": {str(length): n for length, n in sorted(lengths.items())},
        "n_constant": int((ends[:, 0] > 0).sum()),
        "n_candidates": mined.n_candidates,
        "n_estimated": int(((mined.rules.std_error > 0) | (mined.rules.pca_std_error > 0)).sum()),
        "seconds": round(mined.seconds, 3),
        "seconds_in_all": round(seconds, 3),
        "format": asked.format,
        "out": str(asked.out),
    }


def _show(console: Any, found: Dataset, counts: RuleStatistics, result: dict[str, Any]) -> None:
    """How many of what kind, and the first few."""
    from funcppo.data import format_rule

    kinds = [f"{n} of length {length}" for length, n in result["n_paths"].items()]
    kinds += [f"{result['n_constant']} with constants"] if result["n_constant"] else []
    console.print(
        f"{result['dataset']}: {result['n_rules']} rules ({', '.join(kinds)}) of {result['n_candidates']} candidates "
        f"in {result['seconds']:.1f} s: {result['out']}"
    )
    for i in range(min(MAX_PRINTED_RULES, len(found.rules))):
        share = counts.support[i] / max(counts.body_pairs[i], 1)
        rule = format_rule(found, found.rules[i])
        console.print(f"{counts.support[i]:8.0f} of {counts.body_pairs[i]:8.0f}  {share:.3f}  {rule}", markup=False)
