"""Checkpoints: a tree of tensors in one file, written whole or not at all.

A file is a NumPy archive of one array for each leaf, named by its path of fields, and of meta data as JSON. NumPy has
no bfloat16: such a leaf is stored as its bits, and the meta data name it. `save` writes the archive; `restore` reads it
back into a tree of the same structure, `read` without knowing the structure.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files, tree
from funcppo.core.files import Json, write_atomically

Tree = TypeVar("Tree")
Meta = Json

_META_ARRAY = "__meta__"  # name of the array that holds the meta data
_BFLOAT16_KEY = "bfloat16"  # of the meta data: names of leaves stored as bits


class DamagedCheckpointError(ValueError):
    """Error for a path with no checkpoint, or with one that cannot be read whole."""


def save(
    path: Path | str, state: object, meta: Meta, previous: str | None = None
) -> None:
    """Write a tree of tensors and its metadata to a file; a crash or a full disk leaves the old file as it was.

    Args:
      path: the file to write.
      state: a tree of tensors, on any device.
      meta: values of JSON; the format version is added.
      previous: the name that the file to be replaced is kept under; None keeps it not.

    Raises:
      OSError: the file cannot be written.
      ValueError: two leaves have one name, or NumPy has no dtype for one.
    """
    arrays: dict[str, np.ndarray] = {}
    bfloat16_names: list[str] = []
    for name, leaf in zip(tree.paths(state), tree.leaves(state)):
        if name in arrays or name == _META_ARRAY:
            raise ValueError(
                f"state: expected a name of its own for each tensor, got {name} twice"
            )
        if leaf.dtype == torch.bfloat16:
            bfloat16_names.append(name)
        arrays[name] = _to_array(name, leaf)

    versioned_meta = {files.FORMAT_KEY: files.FORMAT} | meta
    if bfloat16_names:
        versioned_meta[_BFLOAT16_KEY] = bfloat16_names
    text = json.dumps(versioned_meta).encode()
    arrays[_META_ARRAY] = np.frombuffer(text, dtype=np.uint8)

    def write(file: Any) -> None:
        # Not by `np.savez`, whose own arguments are no names for arrays.
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(
                    f"{name}.npy", "w", force_zip64=True
                ) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    write_atomically(Path(path), write, previous)


def _to_array(name: str, leaf: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host; bfloat16 becomes int16 with the same bits."""
    leaf = leaf.detach().cpu()
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.view(torch.int16)
    try:
        return leaf.numpy()
    except TypeError as error:
        raise ValueError(
            f"{name}: expected a dtype of NumPy or bfloat16, got {leaf.dtype}"
        ) from error


def restore(
    path: Path | str,
    like: Tree,
    fingerprint: str | None = None,
) -> tuple[Tree, Meta]:
    """Load a tree that `save` wrote; return it with its metadata.

    Args:
      path: the file to read.
      like: a tree of the same structure, shapes and dtypes; the result is on its devices.
      fingerprint: the data set that ids refer to, which must be that of the file (`meta["fingerprint"]`). None: there
        are no such ids, and nothing is compared.

    Returns:
      The tree, and the meta data.

    Raises:
      ValueError: there is no checkpoint, or it is of another data set, structure or shape; the message names the file
        and the first difference.
    """
    path = Path(path)
    arrays, meta = read(path)
    names = tree.paths(like)
    stored_fingerprint = meta.get("fingerprint")
    if fingerprint is not None and stored_fingerprint != fingerprint:
        raise ValueError(
            f"{path}: made for another data set: expected fingerprint {fingerprint}, got {stored_fingerprint}"
        )
    difference = sorted(set(names) ^ set(arrays))
    if difference:
        name = difference[0]
        owner = "the file" if name in arrays else "this configuration"
        raise ValueError(
            f"{path}: expected the tensors of this configuration, got {name} in {owner} only"
        )

    bfloat16_names = cast("list[object]", meta.get(_BFLOAT16_KEY, []))
    tensors = []
    for name, leaf in zip(names, tree.leaves(like)):
        is_bfloat16 = name in bfloat16_names
        tensors.append(_to_tensor(path, name, arrays[name], is_bfloat16, leaf))
    return tree.unflatten(like, tensors), meta


def _to_tensor(
    path: Path, name: str, array: np.ndarray, is_bfloat16: bool, like: Tensor
) -> Tensor:
    """Return an array of a checkpoint as a tensor on the device of `like`; the inverse of `_to_array`.

    Raises:
      ValueError: shape or dtype are not those of `like`.
    """
    stored = _describe_array(array)
    if is_bfloat16:
        stored = stored.replace("int16", "bfloat16")
    if stored != _describe(like):
        raise ValueError(
            f"{path}: {name}: expected {_describe(like)}, got {stored}"
        )
    tensor = torch.from_numpy(array)
    if is_bfloat16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.to(like.device)


def read(path: Path) -> tuple[dict[str, np.ndarray], Meta]:
    """Read a checkpoint; return {path of a field, such as params.term_embedding: its array}, and the metadata.

    Raises:
      DamagedCheckpointError: there is no such file, or it is not a checkpoint.
      ValueError: another version of funcppo wrote it.
    """
    try:
        # NumPy would take a file that is no archive for a pickle, and advise how to load that.
        if path.is_file() and not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("not an archive of arrays")
        with np.load(path) as file:
            arrays = dict(file)
        meta = files.parse_object(
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

    files.check_format(path, meta.get(files.FORMAT_KEY))
    return arrays, meta


def find_readable(path: Path, previous: str) -> tuple[Path, list[str]]:
    """Return the path of the checkpoint, or of the previous one if the latest is missing or damaged, and notes on it.

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
    """Format the dtype and the shape of a tensor, for an error."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


def _describe_array(array: object) -> str:
    """Format the dtype and the shape of an array of a checkpoint; for anything else, which means damage, its type."""
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    return f"{array.dtype} {list(array.shape)}"
