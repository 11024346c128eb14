"""`omniplat convert`: write a checkpoint in another format."""

from __future__ import annotations

import sys
from pathlib import Path

from omniplat.api import make_planned, require_files, require_loadable, require_torch
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.cli.output import answering_no, human_bytes, print_json
from omniplat.errors import UsageError

SCHEMA = "omniplat.convert/1"
TARGETS = ("bf16", "f32")


def convert_command(source: str, destination: Path, to: str, *, json_output: bool) -> int:
    """Body of the command. Nothing is written unless all of it can be."""
    if to not in TARGETS:
        raise UsageError(f"cannot convert to {to!r}; known: {', '.join(TARGETS)}")
    require_files(source)
    checkpoint = open_checkpoint(source)
    # What is dequantized does not depend on a device; the cpu's plan has the resolved modules.
    planned = make_planned(checkpoint, "cpu")
    with answering_no(json_output=json_output):
        require_loadable(planned.plan)
    require_torch()
    from omniplat.tools.convert import convert

    shown = sys.stderr.isatty() and not json_output

    def progress(done: int, total: int) -> None:
        if shown:
            print(f"\r{human_bytes(done)} of {human_bytes(total)}", end="", file=sys.stderr)

    with answering_no(json_output=json_output):
        result = convert(checkpoint, planned.resolutions, destination, to, progress=progress)
    if shown:
        print(file=sys.stderr)
    if json_output:
        print_json(
            {
                "schema": SCHEMA,
                "source": source,
                "destination": str(result.destination),
                "to": result.dtype,
                "modules": result.modules,
                "shards": result.shards,
                "bytes_read": result.bytes_read,
                "bytes_written": result.bytes_written,
            }
        )
    else:
        print(
            f"{result.destination}: {result.modules} modules dequantized to {result.dtype}, {result.shards} shard(s), "
            f"{human_bytes(result.bytes_read)} read, {human_bytes(result.bytes_written)} written"
        )
    return 0
