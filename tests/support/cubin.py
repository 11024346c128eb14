"""What assembled code takes of a device, as the tools say that come with Triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple


class Resources(NamedTuple):
    """Of a thread: registers at the start, and bytes of memory for what is not in registers."""

    registers: int
    stack: int


def resources(compiled: Any, folder: Path) -> Resources:
    """Of a compiled kernel of Triton's; `folder` is for its code."""
    import triton

    code = folder / f"{compiled.name}.cubin"
    code.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return Resources(*map(int, found.groups()))
