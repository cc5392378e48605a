"""The version of the package: of the latest git tag, else what a source archive states, else a fallback."""

import re
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FALLBACK = "0.3.0.dev0"


def version() -> str:
    """Return 1.2.3 at the tag v1.2.3, and 1.2.3.post4+gabc some commits after it."""
    archive = ROOT / "PKG-INFO"
    if archive.is_file():
        return re.search(r"^Version: (.*)$", archive.read_text(), re.M)[1]
    command = ["git", "describe", "--tags", "--match", "v[0-9]*"]
    try:
        if not (ROOT / ".git").exists():
            return FALLBACK
        found = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return FALLBACK
    tag, *since = found.stdout.strip().removeprefix("v").split("-")
    return f"{tag}.post{'+'.join(since)}" if since else tag


setup(version=version())
