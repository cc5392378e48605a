"""Mined rules of a data set, in memory and in files; those for training are kept by a hash of data and settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from funcppo.checkpoint import write_atomically
from funcppo.config import MineConfig
from funcppo.data import Dataset
from funcppo.data.mined import Counts, with_mined, write_rules
from funcppo.logic import mine
from funcppo.logic.mine import Mined, Progress

VERSION = 3  # of the miner: another one may find other rules


def mine_dataset(
    dataset: Dataset, cfg: MineConfig, device: str = "cpu", progress: Progress = lambda _: None
) -> tuple[Dataset, Counts, Mined]:
    """The data set with the rules that its known facts support, best first, their counts, and what was done."""
    facts = torch.from_numpy(dataset.facts).to(device)
    mined = mine.mine(facts, dataset.n_predicates, dataset.n_constants, cfg, progress)
    rules = mined.rules
    columns = (mine.smoothed(rules), rules.support, rules.body_pairs, rules.circular, rules.pca_pairs)
    counts = Counts(*(column.cpu().numpy() for column in (*columns, rules.head_facts, rules.error, rules.pca_error)))
    return with_mined(dataset, mine.atoms(rules, dataset.n_constants).cpu().numpy(), counts), counts, mined


def save(path: Path, dataset: Dataset, counts: Counts, form: str) -> None:
    """Write the rules of a data set, whole or not at all."""
    text = write_rules(dataset, counts, form)
    write_atomically(path, lambda file: file.write(text.encode()))


def cached(
    dataset: Dataset, cfg: MineConfig, device: str, progress: Progress, folder: Path | None = None
) -> tuple[Path, str]:
    """A file of rules for this data set, mined now unless that was done before, and a line that tells which.

    Args:
      folder: where it is kept; None for the user's cache.
    Errors: ValueError when the data support no rule.
    """
    path = (folder or _cache()) / f"rules-{_fingerprint(dataset, cfg)}.tsv"
    if path.exists():
        return path, f"no rules given: those mined before are taken, {path}"
    path.parent.mkdir(parents=True, exist_ok=True)  # an error here is worth more before mining than after
    found, counts, mined = mine_dataset(dataset, cfg, device, progress)
    if not len(found.rules):
        raise ValueError(
            f"{dataset.name}: no rules given, and none with support {cfg.min_support} and confidence "
            f"{cfg.min_confidence:g} is in the data: want --rules FILE"
        )
    save(path, found, counts, "tsv")
    return path, f"no rules given: {len(found.rules)} mined in {mined.seconds:.0f} s, {path}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funcppo"


def _fingerprint(dataset: Dataset, cfg: MineConfig) -> str:
    """Of what the result depends on: names, known facts, settings, the miner."""
    names = [dataset.entities, dataset.predicates, dataset.arities, dataclasses.asdict(cfg), VERSION]
    digest = hashlib.sha256(json.dumps(names).encode())
    digest.update(np.ascontiguousarray(dataset.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]
