"""Ground floor: trees, random numbers, types, settings, files; and the version, which the build takes from git tags."""

from importlib import metadata

try:
    VERSION = metadata.version("funcppo")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    VERSION = "0.3.0.dev0"
"""The version that the package states."""
