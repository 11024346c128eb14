"""What every command prints the same way: errors, and JSON documents."""

from __future__ import annotations

import json
import re
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


#: What a terminal acts on or hides: control characters, direction marks, invisible ones, line and paragraph separators.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with what would command a terminal, or not be seen on it, written as an escape."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape(text: str) -> str:
    """`text` as rich's console prints it: visible, and no markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(visible(text))


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout, indented; what would command a terminal is escaped as JSON does it."""
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
    except UnicodeEncodeError:  # the name of a file that is no UTF-8
        text = json.dumps(document, indent=1)
    lines = (_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))
    print("\n".join(lines))


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
        # Only this error has lines of its own; in the others a line break came from a name.
        lines = error.message.split("\n") if isinstance(error, UnsupportedCombinationError) else [error.message]
        print("error: " + "\n".join(map(visible, lines)), file=sys.stderr)


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
