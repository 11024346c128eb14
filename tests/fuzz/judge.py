"""What must hold for every input: a plan or one error of ours, in bounded time, printed without control characters."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

import omniplat
from omniplat.cli.output import print_json, report_error
from omniplat.cli.plan import explain_layer, print_plan
from omniplat.document import Plan
from omniplat.errors import OmniplatError

#: Seconds that one small input may take, whatever it holds, on a machine that does other things too.
SECONDS = 20.0
_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SEVERITIES = {"error", "warning", "note"}


def judge(folder: Path, device: str = "cpu") -> Plan | OmniplatError:
    """Plan `folder` and print the outcome in every form; AssertionError where something does not hold."""
    start = time.monotonic()
    outcome: Plan | OmniplatError
    try:
        outcome = omniplat.plan(folder, device)
    except OmniplatError as error:
        outcome = error
    printed = "".join(_printed(outcome))
    assert time.monotonic() - start < SECONDS
    assert _COMMANDS.search(printed) is None, repr(printed)
    return outcome


def _printed(outcome: Plan | OmniplatError) -> Iterable[str]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        if isinstance(outcome, OmniplatError):
            assert outcome.message.strip()
            report_error(outcome, json_output=False)
            report_error(outcome, json_output=True)
        else:
            document = outcome.to_dict()
            assert Plan.from_json(msgspec.json.encode(document)) == outcome
            assert {item.severity for item in outcome.findings} <= _SEVERITIES
            print_json(document)
            print_plan(outcome, Console(file=out, width=80))
            print_plan(outcome, Console(file=out, width=160), show_all=True)
            if outcome.layers:
                explain_layer(outcome, outcome.layers[0], Console(file=out, width=150))
    yield out.getvalue()
