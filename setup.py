"""What a build takes from git: the version of the latest tag, and links that lead to the repository from elsewhere."""

import os
import re
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FALLBACK = "0.3.0.dev0"


def git(*words: str) -> str:
    """Return what git prints; empty outside a checkout, or where it fails."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return ""
    return "" if found.returncode else found.stdout.strip()


def version() -> str:
    """Return 1.2.3 at the tag v1.2.3, and 1.2.3.post4+gabc some commits after it; that of a source archive."""
    archive = ROOT / "PKG-INFO"
    if archive.is_file():
        return re.search(r"^Version: (.*)$", archive.read_text(), re.M)[1]
    found = git("describe", "--tags", "--match", "v[0-9]*")
    if not found:
        return FALLBACK
    tag, *since = found.removeprefix("v").split("-")
    return f"{tag}.post{'+'.join(since)}" if since else tag


def repository() -> str:
    """Return the address of the repository, of the forge's own variables or of the remote; empty if not known."""
    server, name = map(os.getenv, ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    if server and name:
        return f"{server}/{name}"
    found = git("remote", "get-url", "origin").removesuffix(".git")
    return found if found.startswith("https://") else ""


def readme(url: str) -> str:
    """Return README.md with links into a repository, at the commit that is built, in place of relative ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not url:
        return text
    commit = git("rev-parse", "HEAD") or "HEAD"
    relative = r"(!?)(\[[^]]*\])\((?!https?:|#)([^)]+)\)"

    def link(found: re.Match[str]) -> str:
        mark, name, path = found.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}{name}({url}/{kind}/{commit}/{path})"

    return re.sub(relative, link, text)


URL = repository()
PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
pages = {name: f"{URL}/blob/HEAD/{path}" for name, path in PAGES.items()}
setup(
    version=version(),
    long_description=readme(URL),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": URL,
        "Issues": f"{URL}/issues",
        **pages,
    }
    if URL
    else {},
)
