"""Format versions of the files that a run writes, and the translation of older ones.

    1  no version in the file; the names before fields, options and metrics were renamed
    2  "format": 2 in config.json, in the meta data of checkpoint.npz and on the first line of metrics.jsonl

`check_format` refuses a newer version than this one. The `upgrade_` functions translate the names of version 1. This
module imports no PyTorch, so that the command line can read a config without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

FORMAT = 2  # the version that is written
FORMAT_KEY = "format"

Value = TypeVar("Value")
Json = dict[str, Any]  # an object of a JSON file

_RUN_FIELDS = {
    "validations": "n_validations",
    "valid_queries": "n_validation_queries",
    "patience": "max_nonfinite_updates",
}
_PROVER_FIELDS = {
    "facts": "fact_selection",
    "negatives": "negatives_per_positive",
    "hard_fraction": "hard_negative_fraction",
    "n_blocks": "n_residual_blocks",
    "budget": "max_atoms",
}
_FACT_SELECTIONS = {"chosen": "policy", "found": "oracle"}
_SCHEDULE_FIELDS = {"warmup": "warmup_updates", "end": "end_factor"}
_ADAM_FIELDS = {"decoupled": "decoupled_weight_decay"}

_METRICS = {
    "episodes": "n_episodes",
    "return": "episode_return",
    "length": "episode_length",
    "skipped": "n_nonfinite_minibatches",
    "left_out": "dropped_fraction",
    "best_valid": "best_valid_metric",
    "found": "cache_hits",
    "recordings": "cudagraph_recordings",
    "rerecordings": "cudagraph_rerecordings",
    "skips": "cudagraph_skips",
    "skip_reasons": "cudagraph_skip_reasons",
}

# Names of arrays are paths of fields. Every tree of the network's params has the fields of _PARAMS.
_PARAM_TREES = (
    "state.params.",
    "state.opt_state.mu.",
    "state.opt_state.nu.",
    "best.",
)
_PARAMS = {
    "term": "term_embedding",
    "predicate": "predicate_embedding",
    "role": "position_embedding",
    "height": "height_embedding",
    "rule": "rule_embedding",
    "hopeless": "dead_end_embedding",
    "successor": "successor_layer",
    "state": "state_layer",
    "hidden": "hidden_layer",
    "blocks": "residual_blocks",
    "score": "score_projection",
    "end": "end_head",
    "value": "value_head",
}
_ARRAYS = {
    "state.env_state.label": "train_state.env_state.is_positive",
    "state.episode.total": "train_state.episode_stats.total_reward",
    "state.episode.length": "train_state.episode_stats.length",
    "best_valid": "best_valid_metric",
}
_ROOTS = {"state": "train_state", "best": "best_params"}


def check_format(path: Path, version: object) -> int:
    """The version, if this program can read it.

    Args:
      path: the file, named in the error.
      version: the value under "format" in the file; 1 if there is none.

    Raises:
      ValueError: the file was written by a newer version of funcppo, or the value is not a version.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"{path}: expected a format version from 1 to {FORMAT}, got {version!r}"
        )
    if version > FORMAT:
        raise ValueError(
            f"{path}: expected a format version up to {FORMAT}, got {version}: written by a newer version of funcppo"
        )
    return version


def upgrade_config(raw: Json) -> Json:
    """The contents of a config.json of version 1 under the names of version 2.

    Raises:
      KeyError: a group of settings is missing.
      AttributeError: a group of settings is not an object.
    """
    prover = _rename(raw["prover"], _PROVER_FIELDS)
    if "fact_selection" in prover:
        selection = prover["fact_selection"]
        prover["fact_selection"] = _FACT_SELECTIONS.get(selection, selection)

    ppo = dict(raw["ppo"])
    ppo["adam"] = _rename(ppo["adam"], _ADAM_FIELDS)
    for name, value in ppo.items():
        if name.endswith("_schedule"):
            ppo[name] = _rename(value, _SCHEDULE_FIELDS)

    return _rename(raw, _RUN_FIELDS) | {"prover": prover, "ppo": ppo}


def upgrade_arrays(arrays: Mapping[str, Value]) -> dict[str, Value]:
    """The arrays of a checkpoint of version 1 under the names of version 2."""
    return {upgrade_array_name(name): array for name, array in arrays.items()}


def upgrade_array_name(name: str) -> str:
    """The name in version 2 of an array of a checkpoint of version 1."""
    if name in _ARRAYS:
        return _ARRAYS[name]
    for tree in _PARAM_TREES:
        if name.startswith(tree):
            field, dot, rest = name.removeprefix(tree).partition(".")
            name = tree + _PARAMS.get(field, field) + dot + rest
    root, dot, rest = name.partition(".")
    return _ROOTS.get(root, root) + dot + rest


def upgrade_metrics(row: Json) -> Json:
    """A row of metrics.jsonl of version 1 under the names of version 2."""
    return _rename(row, _METRICS)


def _rename(record: Json, names: Mapping[str, str]) -> Json:
    """The record with some keys replaced, in the same order."""
    return {names.get(key, key): value for key, value in record.items()}
