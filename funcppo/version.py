"""The version of funcppo: that of the installed package, which its build takes from git tags (setup.py)."""

from importlib import metadata

try:
    VERSION = metadata.version("funcppo")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    VERSION = "0.3.0.dev0"
"""The version that the package states."""
