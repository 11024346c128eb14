"""Known failures: a TOML file that names checks which are expected to fail, why, and where that is followed.

    [[failure]]
    id = "numerics/noise:gemm_a8w8-int8-channel/int8-token-bf16-m7-40x96"
    reason = "scales are rounded to bf16"
    link = "https://example.org/issues/12"

An id may end in `*`. An entry that matches no check, or whose check passes, fails the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniplat.errors import UsageError

_KEYS = {"id", "reason", "link"}


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One entry of the file."""

    id: str
    reason: str
    link: str

    @property
    def text(self) -> str:
        """What a report says of a check that fails as expected."""
        return f"{self.reason} ({self.link})"

    def matches(self, check: str) -> bool:
        return check.startswith(self.id[:-1]) if self.id.endswith("*") else check == self.id


def read_known_failures(path: Path) -> tuple[KnownFailure, ...]:
    """The entries of a file. Raises UsageError for anything that is not as above: a typo must not hide a failure."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # brought by pytest
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"known failures {path}: {exc}") from exc
    entries = document.pop("failure", [])
    if document or not isinstance(entries, list):
        raise UsageError(f"known failures {path}: only [[failure]] tables are read, found {', '.join(document)}")
    found = tuple(_entry(path, index, entry) for index, entry in enumerate(entries))
    ids = [entry.id for entry in found]
    for twice in {text for text in ids if ids.count(text) > 1}:
        raise UsageError(f"known failures {path}: {twice!r} is listed twice")
    return found


def _entry(path: Path, index: int, entry: Any) -> KnownFailure:
    where = f"known failures {path}: failure[{index}]"
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise UsageError(f"{where} needs exactly id, reason and link")
    if not all(isinstance(value, str) and value.strip() for value in entry.values()):
        raise UsageError(f"{where}: id, reason and link must be texts that are not empty")
    if entry["id"].strip("*") == "" or "*" in entry["id"][:-1]:
        raise UsageError(f"{where}: {entry['id']!r}: a * may only end an id that names something")
    return KnownFailure(entry["id"], entry["reason"], entry["link"])
