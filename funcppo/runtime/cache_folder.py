"""Where compiled code is kept on disk, and whether there is any yet. Imports neither PyTorch nor a compiler."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

PACKAGE_DIR = Path(__file__).parents[1]


def find_folder() -> Path | None:
    """Inductor's cache directory; None if it cannot be told."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        # this user has no name; Windows asks for a module that it lacks then
        with suppress(KeyError, OSError, ImportError):
            user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
            folder = f"{tempfile.gettempdir()}/torchinductor_{user}"
    return None if folder is None else Path(folder)


def may_hold_code() -> bool:
    """Return whether these sources have compiled anything into the cache yet, with any version of PyTorch."""
    folder = find_folder()
    pattern = code_dir("*")
    return folder is not None and next(folder.glob(pattern), None) is not None


def code_dir(torch_version: str) -> str:
    """The folder, in Inductor's cache directory, of what these sources and a version of PyTorch compiled."""
    return f"{PACKAGE_DIR.name}/{torch_version}-{SOURCE_DIGEST[:16]}"


def _hash_sources() -> str:
    sources = [path.read_bytes() for path in sorted(PACKAGE_DIR.rglob("*.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()


SOURCE_DIGEST = _hash_sources()
