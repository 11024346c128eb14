"""What every command prints the same way: errors, and JSON documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from omniplat.errors import InvalidCheckpointError, OmniplatError, UnknownFormatError, UnsupportedCombinationError

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a log or a pipe, which has no width of its own.
_LOG_WIDTH = 150


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout, indented."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


def make_console() -> Console:
    """A console on stdout, wide when nobody's window limits it."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def report_error(error: OmniplatError, *, json_output: bool) -> None:
    """The error as JSON on stdout, or as one readable message on stderr."""
    if json_output:
        print_json({"schema": "omniplat.error/1", **error.to_dict()})
    else:
        print(f"error: {error.message}", file=sys.stderr)


@contextmanager
def answering_no(*, json_output: bool) -> Iterator[None]:
    """Around what happens once the input has been read: a checkpoint or combination that is refused then is an
    answer, exit code 1, and no wrong usage."""
    try:
        yield
    except (InvalidCheckpointError, UnknownFormatError, UnsupportedCombinationError) as error:
        report_error(error, json_output=json_output)
        raise SystemExit(1) from None


def human_bytes(count: float) -> str:
    """`count` bytes in the largest unit that keeps three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
