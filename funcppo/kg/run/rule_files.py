"""Rules mined for a data set: in memory, in a file, and cached by a hash of data and settings.

`mine_dataset` mines now; `get_or_mine_rules` returns the cached rule file of a data set, mining it if there is none.
What is mined is a function of the set of known facts, by name: neither the order of the lines of a file nor names that
only held-out triples have change it.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.files import write_file
from funcppo.kg.graph.dataset import (
    Dataset,
    facts_digest,
    order_facts,
    training_part,
)
from funcppo.kg.graph.rules import (
    RuleStatistics,
    RuleTableFormat,
    format_rule_table,
    with_encoded_rules,
)
from funcppo.kg.mining import MiningConfig, counts, default_config, miner
from funcppo.kg.mining.counts import (
    MinedRules,
    ProgressCallback,
    ignore_progress,
)
from funcppo.kg.mining.miner import MiningResult
from funcppo.runtime import cache, memory

# Part of the cache key; increase it when the miner finds other rules.
MINER_VERSION = 9


class MinedDataset(NamedTuple):
    """Data set with the rules mined from it."""

    dataset: Dataset  # its rules are the mined ones, best first
    statistics: RuleStatistics  # a row for each rule
    # how completely they were mined; its rules number the names in use in the order of names
    result: MiningResult


class RuleFile(NamedTuple):
    """Rule file, and whether and how it was mined."""

    path: Path
    message: str
    notes: tuple[str, ...]  # what mining sampled or left out


def mine_dataset(
    dataset: Dataset,
    cfg: MiningConfig,
    device: str = "cpu",
    progress: ProgressCallback = ignore_progress,
) -> MinedDataset:
    """Mine the rules that the facts of train support; return the data set with these rules.

    Args:
      device: where to count; the rules are the same on every device.
      progress: called with what is done, and how much of it.

    Returns:
      MinedDataset: the data set with its rules, best first, their counts, and what was done.
    """
    mined_from = training_part(dataset)
    ordered = order_facts(mined_from)
    n_entities = len(ordered.entities) - 1
    result = miner.mine_rules(
        torch.from_numpy(ordered.facts).to(device),
        len(ordered.predicates) - 1,
        n_entities,
        cfg,
        progress,
    )
    statistics = _statistics(result.rules)

    # Back to the ids of the data set, in which variables follow on all its constants.
    atoms = _to_numpy(counts.rule_atoms(result.rules, n_entities))
    variables = dataset.n_constants + np.arange(1, counts.MAX_RULE_ATOMS + 1)
    terms = np.concatenate([ordered.entities, variables])
    predicates = ordered.predicates[atoms[:, :, :1]]
    atoms = np.concatenate([predicates, terms[atoms[:, :, 1:]]], axis=2)
    with_rules = with_encoded_rules(dataset, atoms, statistics)
    if mined_from is not dataset:
        # Confidences are of all known facts.
        with_rules = dataclasses.replace(with_rules, rule_counts=None)
    return MinedDataset(
        with_rules,
        statistics,
        result,
    )


def check_memory(
    dataset: Dataset,
    limit: int,
    device: str,
    max_length: int,
) -> None:
    """Check that a data set can be mined within a memory limit.

    Args:
      limit: bytes of this process, or of the GPU.
      max_length: of the bodies of rules, in atoms.

    Raises:
      ValueError: it takes more.
    """
    needed_bytes = memory.used_bytes(device) + miner.needed_bytes(
        len(dataset.facts), dataset.n_predicates, max_length
    )
    if needed_bytes > limit:
        raise ValueError(
            f"--memory {limit}: expected at least {needed_bytes} bytes, to mine {len(dataset.facts)} facts"
        )


def mining_config(dataset: Dataset, **options: Any) -> MiningConfig:
    """Return the mining settings of a data set: the given options, and its defaults for the rest.

    Args:
      options: fields of `MiningConfig`.

    Raises:
      ValueError: an option is out of range.
    """
    arguments = dataset.facts[:, 1:]
    n_entities = len(np.unique(arguments[arguments > 0]))
    return dataclasses.replace(
        default_config(len(dataset.facts), n_entities), **options
    )


def _statistics(rules: MinedRules) -> RuleStatistics:
    """Return the counts of the rules as columns of a rule table."""
    columns = (
        counts.smoothed_confidence(rules),
        rules.support,
        rules.body_pairs,
        rules.circular_support,
        rules.pca_pairs,
        rules.head_facts,
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
    """Write the rules of a data set with their counts to a file, atomically.

    Raises:
      OSError: the file cannot be written; a former file of that name stays.
    """
    text = format_rule_table(dataset, counts, file_format)
    write_file(path, text)


def get_or_mine_rules(
    dataset: Dataset,
    cfg: MiningConfig,
    device: str,
    progress: ProgressCallback,
    cache_dir: Path | None = None,
    seconds: float = math.inf,
) -> RuleFile:
    """Return the rule file of a data set: the cached file if there is one, else rules mined now.

    Args:
      seconds: time limit of a machine that is too slow for the work that the settings plan.
      progress: called with what is done, and how much of it.
      cache_dir: where rule files are kept; None for the user's cache directory, or a temporary one where that cannot
        be written.

    Returns:
      path: the file.
      message: a line that says whether the rules were mined now.
      notes: what was sampled or left out, a line each.

    Raises:
      ValueError: the data support no rule, or others may write the cache directory.
      OSError: the given directory cannot be written.
      KeyboardInterrupt: mining was interrupted.
    """
    dataset = training_part(dataset)
    path = _cache_path(dataset, cfg, cache_dir)
    unkept = ""  # why the rules are not for the next run
    # Made first: an error is cheaper before mining than after.
    try:
        cache.make_private(path.parent)
    except OSError as error:
        if cache_dir is not None:
            raise
        unkept = str(error)
    if not unkept and path.exists():
        message = f"no rules given: using those mined before, {path}"
        return RuleFile(path, message, _read_notes(path))

    cfg = dataclasses.replace(
        cfg, max_rows=cfg.row_limit, seconds=min(cfg.seconds, seconds)
    )
    mined = mine_dataset(dataset, cfg, device, progress)
    if mined.result.interrupt is not None:
        raise mined.result.interrupt
    if not len(mined.dataset.rules):
        message = no_rules_message(dataset.name, cfg)
        if mined.result.is_late:
            message = (
                f"{dataset.name}: no rules given, and none found in the {mined.result.seconds:.0f} s that there were "
                "for mining: expected --rules FILE, or more --seconds"
            )
        raise ValueError(message)
    return _keep_rules(mined, path, unkept)


def _keep_rules(mined: MinedDataset, path: Path, unkept: str) -> RuleFile:
    """Write mined rules to the path, or to a temporary file if something keeps them from the next run."""
    notes = mined.result.notes
    if mined.result.is_late:
        unkept = "the time ended before the work"
    if unkept:
        folder = tempfile.mkdtemp(prefix="funcppo-rules-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder) / path.name
        notes += (f"mined rules are not kept for the next run: {unkept}",)
    # The notes first, so that a rule file is never without them.
    write_file(_notes_path(path), json.dumps(notes))
    write_rule_file(path, mined.dataset, mined.statistics, "tsv")
    return RuleFile(
        path,
        f"no rules given: {len(mined.dataset.rules)} mined in {mined.result.seconds:.0f} s"
        + (f", {path}" if not unkept else ""),
        notes,
    )


def no_rules_message(name: str, cfg: MiningConfig) -> str:
    """Return the error message for a data set whose facts support no rule."""
    return (
        f"{name}: no rules given, and the data hold none with support {cfg.min_support} and confidence "
        f"{cfg.min_confidence:g}: expected --rules FILE, which `funcppo mine` "
        "finds more of with --min-support 2"
    )


def _read_notes(path: Path) -> tuple[str, ...]:
    """Read the notes of a rule file in the cache."""
    try:
        return tuple(json.loads(_notes_path(path).read_bytes()))
    except (OSError, ValueError):
        return (f"{path}: what mining left out of these rules is not known",)


def _notes_path(path: Path) -> Path:
    return path.with_suffix(".notes.json")


def _cache_path(
    dataset: Dataset, cfg: MiningConfig, cache_dir: Path | None
) -> Path:
    """Return the path of mined rules, named by all that they depend on: names, known facts, settings, the miner."""
    described = [
        facts_digest(dataset),
        dataclasses.asdict(cfg),
        MINER_VERSION,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"rules-{digest.hexdigest()[:16]}.tsv"
    return (cache_dir or Path(cache_home) / "funcppo") / name
