"""Checkpoints: a tree of tensors in one file, written whole or not at all.

A file is a NumPy archive of one array for each leaf, named by its path of fields, and of meta data as JSON. `save`
writes it; `restore` reads it back into a tree of the same structure, `read` without knowing the structure.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo import json_io, tree
from funcppo.atomic_io import write_atomically
from funcppo.experiment import formats
from funcppo.json_io import Json

Tree = TypeVar("Tree")
Meta = Json

_META_ARRAY = "__meta__"  # name of the array that holds the meta data


class DamagedCheckpointError(ValueError):
    """There is no checkpoint at a path, or it cannot be read whole."""


class Checkpoint(NamedTuple):
    """The contents of a file."""

    # by path of fields, such as train_state.params.term_embedding
    arrays: dict[str, np.ndarray]
    meta: Meta  # what `save` was given, and the format version


def save(
    path: Path, state: object, meta: Meta, previous: str | None = None
) -> None:
    """Write a tree of tensors and its meta data. A crash or a full disk leaves the old file as it was.

    Args:
      path: the file to write.
      state: a tree of tensors, on any device.
      meta: values of JSON; the format version is added.
      previous: the name that the file to be replaced is kept under; None keeps it not.

    Raises:
      OSError: the file cannot be written.
    """
    versioned_meta = {formats.FORMAT_KEY: formats.FORMAT} | meta
    text = json.dumps(versioned_meta).encode()
    arrays: dict[str, Any] = {_META_ARRAY: np.frombuffer(text, dtype=np.uint8)}
    for name, leaf in zip(tree.paths(state), tree.leaves(state)):
        arrays[name] = leaf.detach().cpu().numpy()

    def write(file: Any) -> None:
        np.savez(file, **arrays)

    write_atomically(path, write, previous)


def restore(
    path: Path, like: Tree, fingerprint: str, optional: str = ""
) -> tuple[Tree, Meta]:
    """Read a tree that `save` wrote.

    Args:
      path: the file to read.
      like: a tree of the same structure, shapes and dtypes; the result is on its devices.
      fingerprint: the data set that ids refer to, which must be that of the file (`meta["fingerprint"]`).
      optional: a part of the tree that is taken from `like` where the file has nothing of it.

    Returns:
      The tree, and the meta data.

    Raises:
      ValueError: there is no checkpoint, or it is of another data set, structure or shape; the message names the file
        and the first difference.
    """
    arrays, meta = read(path)
    if optional and not any(n.startswith(f"{optional}.") for n in arrays):
        arrays |= {
            name: leaf.numpy(force=True)
            for name, leaf in zip(tree.paths(like), tree.leaves(like))
            if name.startswith(f"{optional}.")
        }
    stored_fingerprint = meta.get("fingerprint")
    if stored_fingerprint != fingerprint:
        raise ValueError(
            f"{path}: made for another data set: expected fingerprint {fingerprint}, got {stored_fingerprint}"
        )
    names = tree.paths(like)
    difference = sorted(set(names) ^ set(arrays))
    if difference:
        name = difference[0]
        owner = "the file" if name in arrays else "this configuration"
        raise ValueError(
            f"{path}: expected the tensors of this configuration, got {name} in {owner} only"
        )

    tensors = []
    for name, leaf in zip(names, tree.leaves(like)):
        array = arrays[name]
        if _describe_array(array) != _describe(leaf):
            raise ValueError(
                f"{path}: {name}: expected {_describe(leaf)}, got {_describe_array(array)}"
            )
        tensor = torch.from_numpy(array)
        tensors.append(tensor.to(leaf.device))
    return tree.unflatten(like, tensors), meta


def read(path: Path) -> Checkpoint:
    """Read the arrays and the meta data of a checkpoint, of this format version or an older one.

    Raises:
      DamagedCheckpointError: there is no such file, or it is not a checkpoint.
      ValueError: a newer version of funcppo wrote it.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        meta = json_io.parse_object(
            "meta data", arrays.pop(_META_ARRAY).tobytes()
        )
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path}: expected a checkpoint, got no file"
        ) from None
    # The errors of damaged archives have no type in common: of zip, zlib, NumPy's headers, memory, keys.
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path}: expected a checkpoint, got none or a damaged one ({error})"
        ) from None

    version = formats.check_format(path, meta.get(formats.FORMAT_KEY, 1))
    if version == 1:
        arrays = formats.upgrade_arrays(arrays)
    return Checkpoint(arrays, meta)


def find_readable(path: Path, previous: str) -> tuple[Path, list[str]]:
    """Return a checkpoint, or the one before it where the latest is missing or damaged.

    Args:
      previous: name of the one before it.

    Returns:
      The path of the checkpoint, and a note if it is the one before.

    Raises:
      DamagedCheckpointError: neither can be read; the message is that of the latest.
    """
    try:
        read(path)
        return path, []
    except DamagedCheckpointError as error:
        earlier = path.resolve().with_name(previous)
        try:
            read(earlier)
        except DamagedCheckpointError:
            raise error from None
        return earlier, [f"{error}; {previous} is used in its place"]


def _describe(tensor: Tensor) -> str:
    """Dtype and shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


def _describe_array(array: object) -> str:
    """Dtype and shape of what an archive holds; a damaged one may hold bytes in place of an array."""
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    return f"{array.dtype} {list(array.shape)}"
