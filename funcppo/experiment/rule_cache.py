"""Rules mined for a data set: in memory, in a file, and cached by a hash of the data and the settings.

`mine_dataset` mines now; `get_or_mine_rules` returns the cached rule file of a data set, mining it if there is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.atomic_io import write_atomically
from funcppo.data import Dataset
from funcppo.data.rule_tables import (
    RuleStatistics,
    RuleTableFormat,
    format_rule_table,
    with_encoded_rules,
)
from funcppo.mining import miner
from funcppo.mining.config import MiningConfig
from funcppo.mining.miner import MinedRules, MiningResult, ProgressCallback

# Part of the cache key; increase it when the miner finds other rules.
MINER_VERSION = 3


class MinedDataset(NamedTuple):
    """A data set with the rules mined from it."""

    dataset: Dataset  # its rules are the mined ones, best first
    statistics: RuleStatistics  # a row for each rule
    # the rules as tensors, and how completely they were mined
    result: MiningResult


class RuleFile(NamedTuple):
    """A rule file, and how it came about."""

    path: Path
    message: str


def mine_dataset(
    dataset: Dataset,
    cfg: MiningConfig,
    device: str = "cpu",
    progress: ProgressCallback = lambda _: None,
) -> MinedDataset:
    """Mine the rules that the known facts of a data set support.

    Args:
      device: where to count; the rules are the same on every device.
      progress: called with a line before each stage.

    Returns:
      MinedDataset: the data set with its rules, best first, their counts, and what was done.
    """
    facts = torch.from_numpy(dataset.facts).to(device)
    result = miner.mine_rules(
        facts, dataset.n_predicates, dataset.n_constants, cfg, progress
    )
    statistics = _statistics(result.rules)
    atoms = miner.rule_atoms(result.rules, dataset.n_constants)
    return MinedDataset(
        with_encoded_rules(dataset, _to_numpy(atoms), statistics),
        statistics,
        result,
    )


def _statistics(rules: MinedRules) -> RuleStatistics:
    """The counts of the rules as columns of a rule table."""
    columns = (
        miner.smoothed_confidence(rules),
        rules.support,
        rules.body_pairs,
        rules.circular_support,
        rules.pca_pairs,
        rules.head_facts,
        rules.std_error,
        rules.pca_std_error,
    )
    return RuleStatistics(*(_to_numpy(column) for column in columns))


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def write_rule_file(
    path: Path,
    dataset: Dataset,
    counts: RuleStatistics,
    file_format: RuleTableFormat,
) -> None:
    """Write the rules of a data set atomically.

    Raises:
      OSError: the file cannot be written; a former file of that name stays.
    """
    text = format_rule_table(dataset, counts, file_format)
    write_atomically(path, lambda file: file.write(text.encode()))


def get_or_mine_rules(
    dataset: Dataset,
    cfg: MiningConfig,
    device: str,
    progress: ProgressCallback,
    cache_dir: Path | None = None,
) -> RuleFile:
    """The rule file of a data set: the cached one if there is one, else mined now.

    Args:
      cache_dir: where rule files are kept; None for the user's cache directory.

    Returns:
      path: the file.
      message: a line that says whether the rules were mined now.

    Raises:
      ValueError: the data support no rule.
      OSError: the cache directory cannot be written.
    """
    path = (
        cache_dir or _user_cache_dir()
    ) / f"rules-{_cache_key(dataset, cfg)}.tsv"
    if path.exists():
        return RuleFile(
            path, f"no rules given: using those mined before, {path}"
        )

    # Make the directory first: an error is cheaper before mining than after.
    path.parent.mkdir(parents=True, exist_ok=True)
    mined = mine_dataset(dataset, cfg, device, progress)
    n_rules = len(mined.dataset.rules)
    if not n_rules:
        raise ValueError(
            f"{dataset.name}: no rules given, and the data hold none with support {cfg.min_support} and confidence "
            f"{cfg.min_confidence:g}: expected --rules FILE"
        )
    write_rule_file(path, mined.dataset, mined.statistics, "tsv")
    return RuleFile(
        path,
        f"no rules given: {n_rules} mined in {mined.result.seconds:.0f} s, {path}",
    )


def _user_cache_dir() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "funcppo"
    )


def _cache_key(dataset: Dataset, cfg: MiningConfig) -> str:
    """A hash of all that the mined rules depend on: names, known facts, settings, the miner."""
    settings = dataclasses.asdict(cfg)
    described = [
        dataset.entities,
        dataset.predicates,
        dataset.arities,
        settings,
        MINER_VERSION,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(np.ascontiguousarray(dataset.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]
