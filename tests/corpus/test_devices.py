"""What a plan says of every checkpoint and device is what loading does: on devices whose operators are emulated."""

from __future__ import annotations

import pytest

from omniplat.api import load, plan
from omniplat.emulation.core import emulate
from omniplat.errors import UnsupportedCombinationError
from tests.goldens.entries import Entry, corpus

pytestmark = pytest.mark.corpus

DEVICES = ("npu:a2", "npu:a5", "rocm:gfx942", "rocm:gfx950", "xpu:bmg")


@pytest.mark.parametrize("prefer", ["memory", "speed"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", corpus(), ids=lambda entry: entry.name)
def test_what_is_planned_is_loaded(entry: Entry, device: str, prefer: str) -> None:
    with emulate(device) as emulation:
        planned = plan(entry.checkpoint, emulation.device, prefer=prefer)
        refused = [layer.name for layer in planned.layers if layer.status not in ("ok", "unquantized")]
        if refused:
            with pytest.raises(UnsupportedCombinationError):
                load(entry.checkpoint, device=emulation.device, prefer=prefer)
            return
        assert load(entry.checkpoint, device=emulation.device, prefer=prefer)
        assert not emulation.violations
