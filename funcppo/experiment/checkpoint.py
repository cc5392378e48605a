"""A tree of tensors in one file, written whole or not at all."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from funcppo import tree
from funcppo.atomic_io import write_atomically

T = TypeVar("T")


def save(path: Path, state: Any, meta: dict[str, Any]) -> None:
    """Write the leaves of `state`, by name, and `meta` as JSON; a crash or a full disk leaves the old file.

    Errors: OSError when it cannot be written.
    """
    leaves = {name: leaf.detach().cpu().numpy() for name, leaf in zip(tree.paths(state), tree.leaves(state))}
    text = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    arrays: dict[str, Any] = {_META: text, **leaves}
    write_atomically(path, lambda file: np.savez(file, **arrays))


def restore(path: Path, like: T, fingerprint: str) -> tuple[T, dict[str, Any]]:
    """The saved tree, on the devices of `like`, and its meta.

    Args:
      like: a tree of the same structure, shapes and dtypes.
      fingerprint: what `meta["fingerprint"]` must be: the data set that ids refer to.
    Errors: ValueError naming the file and what does not fit: no checkpoint, another data set, another shape.
    """
    stored, meta = read(path)
    if meta.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{path}: made for another data set (fingerprint {meta.get('fingerprint')}, want {fingerprint})"
        )
    names, leaves = tree.paths(like), tree.leaves(like)
    if set(names) != set(stored):
        odd = sorted(set(names) ^ set(stored))[0]
        raise ValueError(f"{path}: want the tensors of this configuration, {odd} is in one and not in the other")
    tensors = []
    for name, leaf in zip(names, leaves):
        tensor = torch.from_numpy(stored[name])
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            want, got = (f"{x.dtype} {list(x.shape)}" for x in (leaf, tensor))
            raise ValueError(f"{path}: {name}: want {want}, got {got}")
        tensors.append(tensor.to(leaf.device))
    return tree.unflatten(like, tensors), meta


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the meta of a file.

    Errors: ValueError when there is no such file or it is no checkpoint.
    """
    try:
        with np.load(path) as file:
            stored = dict(file)
        return stored, json.loads(stored.pop(_META).tobytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: want a checkpoint, found no file") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: want a checkpoint, this is none or a damaged one ({error})") from None


_META = "__meta__"
