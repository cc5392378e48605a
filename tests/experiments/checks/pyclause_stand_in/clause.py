"""Stands in for PyClause's package of options in tests."""

from __future__ import annotations

from typing import Any


class Options:
    """Options by section, which `set` names as section.option."""

    def __init__(self) -> None:
        """Begin without any."""
        self._sections: dict[str, dict[str, str]] = {}

    def set(self, name: str, value: Any) -> None:
        """Set an option."""
        section, option = name.split(".")
        self._sections.setdefault(section, {})[option] = str(value)

    def get(self, section: str) -> dict[str, str]:
        """The options of a section."""
        return self._sections.get(section, {})
