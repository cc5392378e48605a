"""Checkpoints: a tree of tensors in one file, written whole or not at all.

A file is a NumPy archive of one array for each leaf, named by its path of fields, and of meta data as JSON. NumPy has
no bfloat16: such a leaf is stored as its bits. `save` writes the archive; `restore` reads it
back into a tree of the same structure, `read` without knowing the structure.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files, tree
from funcppo.core.files import Json, write_atomically
from funcppo.core.types import check_tensor

Tree = TypeVar("Tree")
Meta = Json

_META_ARRAY = "__meta__"  # name of the array that holds the meta data


class DamagedCheckpointError(ValueError):
    """Error for a path with no checkpoint, or with one that cannot be read whole."""


def previous_path(path: Path) -> Path:
    """Return where the checkpoint before the latest stands."""
    return path.with_name(f"previous-{path.name}")


def save(path: Path | str, state: object, meta: Meta) -> None:
    """Write a tree of tensors and its metadata to a file; a crash or a full disk leaves the old file as it was.

    The file that is replaced is kept at its `previous_path`.

    Args:
      path: the file to write.
      state: a tree of tensors, on any device.
      meta: values of JSON; the format version is added.

    Raises:
      OSError: the file cannot be written.
    """
    arrays = dict(zip(tree.paths(state), map(_to_array, tree.leaves(state))))
    text = json.dumps({files.FORMAT_KEY: files.FORMAT} | meta).encode()
    arrays[_META_ARRAY] = np.frombuffer(text, dtype=np.uint8)
    path = Path(path)
    write_atomically(
        path,
        lambda file: np.savez(file, **cast(Any, arrays)),
        previous_path(path).name,
    )


def _to_array(leaf: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host; bfloat16 becomes int16 with the same bits."""
    leaf = leaf.detach().cpu()
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.view(torch.int16)
    return leaf.numpy()


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

    tensors = [
        _to_tensor(f"{path}: {name}", arrays[name], leaf)
        for name, leaf in zip(names, tree.leaves(like))
    ]
    return tree.unflatten(like, tensors), meta


def _to_tensor(place: str, array: np.ndarray, like: Tensor) -> Tensor:
    """Return an array of a checkpoint as a tensor on the device of `like`; the inverse of `_to_array`.

    Raises:
      ValueError: shape or dtype are not those of `like`.
    """
    tensor = torch.from_numpy(array)
    if tensor.dtype == torch.int16 and like.dtype == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    check_tensor(tensor, like.shape, like.dtype, place, ValueError)
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


def find_readable(path: Path) -> tuple[Path, list[str]]:
    """Return the path of the checkpoint, or of the previous one if the latest is missing or damaged, and notes on it.

    Returns:
      The path of the checkpoint, and a note if it is the one before.

    Raises:
      DamagedCheckpointError: neither can be read; the message is that of the latest.
    """
    try:
        read(path)
        return path, []
    except DamagedCheckpointError as error:
        earlier = previous_path(path.resolve())
        try:
            read(earlier)
        except DamagedCheckpointError:
            raise error from None
        return earlier, [f"{error}; {earlier.name} is used in its place"]


# Texts of what a result depends on


def text_of(value: Any, seen: tuple[object, ...] = ()) -> str:
    """Format what a result depends on as text that is equal in every process and shows every change.

    A tensor is formatted by a digest of its numbers. A function is formatted by its name and, outside of this package,
    its code, what it is bound to, and the functions and constants of its module that it names.

    Args:
      seen: functions that contain the value, which may contain themselves.
    """
    if isinstance(value, Tensor):
        data = value.detach().cpu().flatten().view(torch.uint8).numpy()
        digest = hashlib.sha256(data.tobytes()).hexdigest()[:16]
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} {digest}"
    if isinstance(value, FunctionType):
        return _function_text(value, seen)

    kind = type(value).__name__
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    if isinstance(value, Mapping):
        value = list(cast(Any, value).items())
    if isinstance(value, tuple | list):
        texts = [text_of(x, seen) for x in cast("Iterable[object]", value)]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    if is_dataclass(value) and not isinstance(value, type):
        parts = [
            f"{field.name}={text_of(getattr(value, field.name), seen)}"
            for field in fields(value)
        ]
        return f"{kind}({', '.join(parts)})"
    if callable(value) or isinstance(value, ModuleType):
        name = getattr(value, "__qualname__", None)
        return str(name or getattr(value, "__name__", kind))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _function_text(fn: FunctionType, seen: tuple[object, ...]) -> str:
    """Format a function by its name, its code and what it reads beside its arguments."""
    if fn.__module__.startswith("funcppo.") or fn in seen:
        return fn.__qualname__
    bound: list[object] = [*(fn.__defaults__ or ()), fn.__kwdefaults__ or ()]
    names = list(fn.__code__.co_names)
    code = _code_text(fn.__code__, names)
    for cell in fn.__closure__ or ():
        bound.append(cell.cell_contents)
    for name in names:
        value = fn.__globals__.get(name)
        is_own = getattr(value, "__module__", None) == fn.__module__
        if isinstance(value, bool | int | float | str | tuple | Tensor) or (
            is_own and isinstance(value, FunctionType)
        ):
            bound.append(value)
    digest = zlib.crc32(code.encode())
    return f"{fn.__qualname__} {digest:08x} {text_of(bound, (*seen, fn))}"


def _code_text(code: CodeType, names: list[str]) -> str:
    """Format code without places in its file; append the names that the functions inside it read to `names`."""
    parts = [code.co_code.hex(), repr(code.co_names)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.extend(constant.co_names)
            parts.append(_code_text(constant, names))
        elif isinstance(constant, frozenset):  # in no fixed order
            parts.append(repr(sorted(map(repr, cast(Any, constant)))))
        else:
            parts.append(repr(constant))
    return " ".join(parts)
