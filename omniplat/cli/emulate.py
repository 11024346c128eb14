"""`omniplat --emulate D COMMAND`: the emulation lasts as long as the command, and every output names it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import typer

from omniplat.device import Device, parse_device
from omniplat.errors import UsageError

if TYPE_CHECKING:
    from omniplat.emulation import Emulation

#: Commands that run or plan on a device.
_COMMANDS = ("plan", "run", "conformance")


def start_emulation(context: typer.Context, device: str) -> None:
    """Emulate `device` for the command of `context`; raises UsageError for a command that runs on none."""
    command = context.invoked_subcommand
    if command not in _COMMANDS:
        raise UsageError(f"--emulate is for {', '.join(_COMMANDS)}, not for {command}")
    from omniplat.api import require_torch

    require_torch()
    from omniplat.emulation import emulate

    context.obj = context.with_resource(emulate(device))
    print(f"emulated: {context.obj.device} on the CPU", file=sys.stderr)
    context.call_on_close(lambda: _print_violations(cast("Emulation", context.obj)))


def emulated_device(context: typer.Context) -> str | None:
    """The emulated device as `kind:arch`, None where nothing is emulated."""
    emulation = cast("Emulation | None", context.obj)
    return f"{emulation.device.kind}:{emulation.device.arch}" if emulation is not None else None


def target_device(context: typer.Context, asked: str | None) -> str | Device | None:
    """The emulated device in place of what `--device` names; raises UsageError where it names another one."""
    emulation = cast("Emulation | None", context.obj)
    if emulation is None:
        return asked
    if asked is not None and parse_device(asked).kind != emulation.device.kind:
        raise UsageError(f"{emulation.device} is emulated, and --device asks for {asked}")
    if asked is not None and ":" in asked and parse_device(asked).arch != emulation.arch:
        raise UsageError(f"{emulation.device} is emulated, and --device asks for {asked}")
    return emulation.device


def _print_violations(emulation: Emulation) -> None:
    for violation in emulation.violations:
        print(f"emulated: silently wrong on a device: {violation}", file=sys.stderr)
