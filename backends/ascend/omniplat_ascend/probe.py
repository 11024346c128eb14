"""Looks for Ascend NPUs and for what drives them, without importing torch or torch_npu."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from omniplat.backend import BackendProbe
from omniplat.device import Device
from omniplat.errors import BackendUnavailableError
from omniplat.host import ROOT, installed_versions, run_tool, visible
from omniplat_ascend.spec import SPEC

MASK = "ASCEND_RT_VISIBLE_DEVICES"
#: Where the CANN toolkit lies when ASCEND_HOME_PATH does not say.
CANN_FOLDERS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/latest")

#: Start of the chip's name as npu-smi prints it -> architecture; the first that fits counts.
CHIPS = (("910B", "a2"), ("910_93", "a3"), ("910_95", "a5"), ("950", "a5"), ("310P", "310p"))


def probe() -> BackendProbe:
    nodes = len([node for node in (ROOT / "dev").glob("davinci[0-9]*") if node.name[7:].isdecimal()])
    answer = run_tool(("npu-smi", "info")) if nodes else ""
    return examine(
        nodes, answer, os.environ.get(MASK), find_cann(ROOT, os.environ), installed_versions(SPEC.distributions)
    )


def examine(nodes: int, answer: str, mask: str | None, cann: str, versions: dict[str, str]) -> BackendProbe:
    """What `probe` reports for device nodes, npu-smi's answer, the mask, CANN's folder and installed versions."""
    installed = bool(versions["torch-npu"])
    if not nodes:
        return BackendProbe(False, "no Ascend device is here", versions=versions, installed=installed)
    names = chip_names(answer)
    if not names:
        raise BackendUnavailableError(SPEC.name, f"{nodes} Ascend device(s) are here, but npu-smi lists none")
    present = {name: text for name, text in versions.items() if text}
    shown = visible(tuple(names), mask)
    known = tuple(Device("npu", arch_of(name), name, 0, False, present) for name in shown if arch_of(name))
    if not shown:
        reason = f"{MASK}={mask} hides every device"
    elif not known:
        reason = f"Ascend {shown[0]} has an architecture that is not supported"
    elif not installed:
        reason = "torch-npu is not installed"
    elif not cann:
        reason = "the CANN toolkit is not found (source its set_env.sh)"
    else:
        reason = ""
    return BackendProbe(not reason, reason, tuple(f"npu:{device.arch}" for device in known), versions, installed, known)


def find_cann(root: Path, environ: Mapping[str, str]) -> str:
    """The folder of the CANN toolkit, "" when there is none."""
    named = environ.get("ASCEND_HOME_PATH", "")
    if named:
        return named if Path(named).is_dir() else ""
    return next((str(root / folder) for folder in CANN_FOLDERS if (root / folder).is_dir()), "")


def chip_names(answer: str) -> list[str]:
    """Chip names from the table of `npu-smi info`: the first line of each device's row, "| 0     910B3  | OK ..."."""
    return re.findall(r"^\|\s*\d+\s+(?:Ascend)?(\d{3}\w*)\s*\|\s*[A-Z][A-Za-z]+\s*\|", answer, re.MULTILINE)


def arch_of(name: str) -> str:
    """Architecture of a chip's name; "910" alone is how npu-smi prints the A3's; "" for others."""
    if name == "910":
        return "a3"
    return next((arch for start, arch in CHIPS if name.startswith(start)), "")
