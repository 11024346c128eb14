"""When omniplat takes a checkpoint from the engine that it runs inside. Imports no engine.

`OMNIPLAT_DISPATCH` is `gaps` (the default: what the engine rejects, or would load other than it is stored), `all`
(whatever omniplat runs on this device) or `off`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from omniplat.errors import UsageError

VARIABLE = "OMNIPLAT_DISPATCH"
GAPS, ALL, OFF = "gaps", "all", "off"
MODES = (GAPS, ALL, OFF)

#: Set to 1, vllm-omni's diffusion stages run on CPUs where no accelerator is.
CPU_VARIABLE = "OMNIPLAT_VLLM_OMNI_CPU"

#: The name of omniplat's quantization method in engines.
METHOD = "omniplat"
#: The logger of everything that is said inside an engine: below the engine's own, so that it has its handlers.
LOGGER = "vllm.omniplat"


def dispatch_mode(environ: Mapping[str, str] | None = None) -> str:
    """One of `MODES`. Raises UsageError for any other value of the variable."""
    value = (os.environ if environ is None else environ).get(VARIABLE) or GAPS
    if value not in MODES:
        raise UsageError(f"{VARIABLE}={value!r} is none of {', '.join(MODES)}")
    return value
