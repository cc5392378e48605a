"""Rules mined for a data set: in memory, in a file, cached by a hash of data and settings, and counted again.

`mine_dataset` mines now; `get_or_mine_rules` returns the cached rule file of a data set, mining it if there is none.
What is mined is a function of the set of known facts, by name: neither the order of the lines of a file nor names that
only held-out triples have change it.

AnyBURL and PyClause count and apply rules under object identity: different variables of a rule bind different
constants, none of which the rule names. The miner counts walks, whose entities may repeat. `count_mined_rules` counts
mined rules again under object identity, whatever their length, for files that are read by those tools.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.files import write_atomically
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
from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
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
    max_length: int | None = None,
) -> None:
    """Check that a data set can be mined within a memory limit.

    Args:
      limit: bytes of this process, or of the GPU.
      max_length: of the bodies of rules, in atoms; None for that of the defaults.

    Raises:
      ValueError: it takes more.
    """
    if max_length is None:
        max_length = mining_config(dataset).max_length
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
    write_atomically(path, lambda file: file.write(text.encode()))


def get_or_mine_rules(
    dataset: Dataset,
    cfg: MiningConfig,
    device: str,
    progress: ProgressCallback,
    announce: Callable[[str], object],
    cache_dir: Path | None = None,
) -> RuleFile:
    """Return the rule file of a data set: the cached file if there is one, else rules mined now.

    Args:
      progress: called with what is done, and how much of it.
      announce: called with the file of the rules that an interrupted search has found.
      cache_dir: where rule files are kept; None for the user's cache directory.

    Returns:
      path: the file.
      message: a line that says whether the rules were mined now.
      notes: what was sampled or left out, a line each.

    Raises:
      ValueError: the data support no rule, or others may write the cache directory.
      OSError: the cache directory cannot be written.
      KeyboardInterrupt: mining was interrupted; the rules found by then are in a file whose path `announce` receives.
    """
    dataset = training_part(dataset)
    path = _cache_path(dataset, cfg, cache_dir)
    # Made first: an error is cheaper before mining than after.
    cache.make_private(path.parent)
    if path.exists():
        message = f"no rules given: using those mined before, {path}"
        return RuleFile(path, message, _read_notes(path))

    mined = mine_dataset(dataset, cfg, device, progress)
    n_rules = len(mined.dataset.rules)
    if mined.result.interrupt is not None:
        if n_rules:
            path = path.with_suffix(".partial.tsv")
            write_rule_file(path, mined.dataset, mined.statistics, "tsv")
            announce(f"interrupted: the {n_rules} rules found by then: {path}")
        raise mined.result.interrupt
    if not n_rules:
        raise ValueError(no_rules_message(dataset.name, cfg))
    _write_with_notes(path, mined)
    return RuleFile(
        path,
        f"no rules given: {n_rules} mined in {mined.result.seconds:.0f} s, {path}",
        mined.result.notes,
    )


def no_rules_message(name: str, cfg: MiningConfig) -> str:
    """Return the error message for a data set whose facts support no rule."""
    return (
        f"{name}: no rules given, and the data hold none with support {cfg.min_support} and confidence "
        f"{cfg.min_confidence:g}: expected --rules FILE, which `funcppo mine` "
        "finds more of with --min-support 2"
    )


def cache_rules(
    dataset: Dataset, cfg: MiningConfig, mined: MinedDataset
) -> Path:
    """Write mined rules to the user's cache, where `get_or_mine_rules` looks for them; return the path.

    Args:
      dataset: what was mined.
      cfg: the settings.

    Raises:
      OSError: the cache directory cannot be written.
      ValueError: others may write it.
    """
    path = _cache_path(dataset, cfg, None)
    cache.make_private(path.parent)
    _write_with_notes(path, mined)
    return path


def _write_with_notes(path: Path, mined: MinedDataset) -> None:
    """Write the notes of a cached rule file, then the file, so that a rule file is never without its notes."""
    text = json.dumps(mined.result.notes)
    write_atomically(_notes_path(path), lambda file: file.write(text.encode()))
    write_rule_file(path, mined.dataset, mined.statistics, "tsv")


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
    name = f"rules-{_cache_key(dataset, cfg)}.tsv"
    return (cache_dir or _user_cache_dir()) / name


def _user_cache_dir() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "funcppo"
    )


def _cache_key(dataset: Dataset, cfg: MiningConfig) -> str:
    """Return a hash of all that the mined rules depend on: names, known facts, settings, the miner."""
    described = [
        facts_digest(dataset),
        dataclasses.asdict(cfg),
        MINER_VERSION,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    return digest.hexdigest()[:16]


def count_mined_rules(
    mined: MinedDataset,
    budget: RowBudget,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[MinedDataset, list[str]]:
    """Count the predictions and the support of mined rules again under object identity.

    Rules of few predictions come first. Those that the budget does not suffice for keep their counts without object
    identity; those that are right nowhere under it are left out.

    Args:
      budget: bounds the rows and the time of the joins.
      report: called after each rule, with the number of counted rules and of all.

    Returns:
      The rules that are kept, with an interrupt of the count if there was one; and a note on those that were left out,
      and on those that were not counted.
    """
    dataset, statistics, result = mined
    order = np.argsort(statistics.body_pairs, kind="stable")
    # Each prediction takes some 100 bytes while its rule is counted.
    order = order[statistics.body_pairs[order] <= 7_000_000].tolist()
    support = statistics.support.copy()
    predictions = statistics.body_pairs.copy()
    n_all, n_counted, interrupt = len(support), 0, None
    try:
        facts, sizes = kb.from_dataset(dataset)
        for applied in fixpoint.iter_consequences(
            facts, sizes, rule_ids=order, object_identity=True, budget=budget
        ):
            rule = order[n_counted]
            support[rule] = int((applied.fact >= 0).sum())
            predictions[rule] = len(applied.atoms)
            n_counted += 1
            report(n_counted, n_all)
    except RowBudgetExceeded:
        pass  # the notes say what is not counted
    except KeyboardInterrupt as error:
        interrupt = error

    kept = support > 0
    notes = _identity_notes(
        int((~kept).sum()), n_all - n_counted, interrupt is not None
    )
    counted = statistics._replace(support=support, body_pairs=predictions)
    is_kept = torch.from_numpy(kept).to(result.rules.support.device)
    rules = counts.select_rows(result.rules, is_kept)
    dataset = replace(
        dataset,
        rules=dataset.rules[kept],
        rule_weights=counted.weight[kept],
        rule_counts=None,
    )
    return MinedDataset(
        dataset,
        RuleStatistics(*(column[kept] for column in counted)),
        replace(result, rules=rules, interrupt=interrupt),
    ), notes


def _identity_notes(
    n_left_out: int, n_uncounted: int, is_interrupted: bool
) -> list[str]:
    """Return notes on the numbers of rules that were left out and that were not counted."""
    notes: list[str] = []
    if n_left_out:
        notes.append(
            f"{n_left_out:,} rules are right nowhere under object identity and were left out"
        )
    if n_uncounted:
        limit = "the limits of time, rows or memory"
        limit = "an interrupt" if is_interrupted else limit
        notes.append(
            f"{n_uncounted:,} rules have counts without object identity: {limit} kept them from being counted with it"
        )
    return notes
