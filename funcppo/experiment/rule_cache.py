"""Mined rules of a data set, in memory and in files; those for training are kept by a hash of data and settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from funcppo.atomic_io import write_atomically
from funcppo.data import Dataset
from funcppo.data.rule_tables import RuleStatistics, RuleTableFormat, format_rule_table, with_encoded_rules
from funcppo.mining import miner
from funcppo.mining.config import MiningConfig
from funcppo.mining.miner import MiningResult, ProgressCallback

MINER_VERSION = 3  # of the miner: another one may find other rules


def mine_dataset(
    dataset: Dataset, cfg: MiningConfig, device: str = "cpu", progress: ProgressCallback = lambda _: None
) -> tuple[Dataset, RuleStatistics, MiningResult]:
    """The data set with the rules that its known facts support, best first, their counts, and what was done."""
    facts = torch.from_numpy(dataset.facts).to(device)
    mined = miner.mine_rules(facts, dataset.n_predicates, dataset.n_constants, cfg, progress)
    rules = mined.rules
    columns = (
        miner.smoothed_confidence(rules),
        rules.support,
        rules.body_pairs,
        rules.circular_support,
        rules.pca_pairs,
    )
    counts = RuleStatistics(
        *(column.cpu().numpy() for column in (*columns, rules.head_facts, rules.std_error, rules.pca_std_error))
    )
    return (
        with_encoded_rules(dataset, miner.rule_atoms(rules, dataset.n_constants).cpu().numpy(), counts),
        counts,
        mined,
    )


def write_rule_file(path: Path, dataset: Dataset, counts: RuleStatistics, file_format: RuleTableFormat) -> None:
    """Write the rules of a data set, whole or not at all."""
    text = format_rule_table(dataset, counts, file_format)
    write_atomically(path, lambda file: file.write(text.encode()))


def get_or_mine_rules(
    dataset: Dataset, cfg: MiningConfig, device: str, progress: ProgressCallback, cache_dir: Path | None = None
) -> tuple[Path, str]:
    """A file of rules for this data set, mined now unless that was done before, and a line that tells which.

    Args:
      folder: where it is kept; None for the user's cache.
    Errors: ValueError when the data support no rule.
    """
    path = (cache_dir or _cache()) / f"rules-{_fingerprint(dataset, cfg)}.tsv"
    if path.exists():
        return path, f"no rules given: those mined before are taken, {path}"
    path.parent.mkdir(parents=True, exist_ok=True)  # an error here is worth more before mining than after
    found, counts, mined = mine_dataset(dataset, cfg, device, progress)
    if not len(found.rules):
        raise ValueError(
            f"{dataset.name}: no rules given, and none with support {cfg.min_support} and confidence "
            f"{cfg.min_confidence:g} is in the data: want --rules FILE"
        )
    write_rule_file(path, found, counts, "tsv")
    return path, f"no rules given: {len(found.rules)} mined in {mined.seconds:.0f} s, {path}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funcppo"


def _fingerprint(dataset: Dataset, cfg: MiningConfig) -> str:
    """Of what the result depends on: names, known facts, settings, the miner."""
    names = [dataset.entities, dataset.predicates, dataset.arities, dataclasses.asdict(cfg), MINER_VERSION]
    digest = hashlib.sha256(json.dumps(names).encode())
    digest.update(np.ascontiguousarray(dataset.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]
