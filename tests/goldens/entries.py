"""The checkpoints that carry their producer's own values, and what is expected of each."""

from __future__ import annotations

import json
import lzma
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "checkpoints"
EXAMPLES = {"ar016-hy-mxfp8-exp4": ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"}

#: Environment variable that names a folder with more checkpoints of the same kind.
VARIABLE = "OMNIPLAT_CORPUS"
#: Dialects that are read so far, by the prefix of the entry's name.
PREFIXES = ("ar", "lc", "mo", "gq", "hf", "qk")

_DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint: its folder, and (component, module) -> expected weight id."""

    name: str
    checkpoint: Path
    golden: Path
    weights: Mapping[str, str]

    def goldens(self) -> dict[str, np.ndarray]:
        """`<module>.weight`, `.x`, `.y`, `.y_actquant`, all f32."""
        return read_safetensors(lzma.decompress(self.golden.read_bytes()))


def read_safetensors(blob: bytes) -> dict[str, np.ndarray]:
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(blob[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def bundled() -> list[Entry]:
    """The entries that this repository ships."""
    found = []
    for folder in sorted(DATA.iterdir()):
        expected = json.loads((folder / "expected.json").read_text())
        checkpoint = EXAMPLES.get(folder.name, folder / "checkpoint")
        found.append(Entry(folder.name, checkpoint, folder / "golden.safetensors.xz", expected))
    return found


def corpus(prefixes: tuple[str, ...] = PREFIXES) -> list[Entry]:
    """The entries of the folder that `OMNIPLAT_CORPUS` names; none where it is not set."""
    root = os.environ.get(VARIABLE)
    if not root:
        return []
    found = []
    for folder in sorted(Path(root).iterdir()):
        if folder.name.startswith(prefixes) and (folder / "PRODUCER.md").is_file():
            weights = expected_weights((folder / "PRODUCER.md").read_text())
            found.append(Entry(folder.name, folder / "checkpoint", folder / "golden.safetensors.xz", weights))
    return found


#: What the producers' reports call a scheme -> weight id. `g` is the group size where the text has one.
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"MXFP4 g32", "mxfp4"),
    (r"MXFP8 g32", "mxfp8"),
    (r"NVFP4|nvfp4", "nvfp4"),
    (r"MXINT4", "mxint4"),
    (r"bnb (?P<table>nf4|fp4) blocksize=(?P<g>\d+)", "{table}-b{g}"),
    (r"bnb LLM.int8", "int8-bnb"),
    (r"fp8 e4m3 block (?P<bn>\d+)x(?P<bk>\d+)", "fp8-block{bn}x{bk}"),
    (r"hqq (?P<b>\d)bit g(?P<g>\d+)", "uint{b}-g{g}"),
    (r"torchao Float8Tensor", "fp8-channel"),
    (r"torchao Int8Tensor|quanto qint8", "int8-channel"),
    (r"quark (?P<el>u?int4)_wo_(?P<g>\d+)", "{el}-g{g}"),
    (r"quark (?P<el>u?int4)_wo_per_channel", "{el}-channel"),
    (r"quark ptpc_fp8|quanto qfloat8", "fp8-channel"),
    (r"quark mxfp6_(?P<el>e\dm\d)", "mxfp6{el}"),
    (r"quark mxfp4", "mxfp4"),
    (r"quark (?P<el>fp8|int8)", "{el}-tensor"),
    (r"mxfp8 block=32", "mxfp8"),
    (r"mxfp4 block=32", "mxfp4"),
    (r"fp8_pc_pt", "fp8-channel"),
    (r"fp8_pb_wo|FP8_2D", "fp8-block128x128"),
    (r"fp8 block=0", "fp8-tensor"),
    (r"int4_awq block=(?P<g>\d+)|w4a8_awq block=(?P<h>\d+)", "int4-g{g}"),
    (r"int8_sq|int8_wo", "int8-channel"),
    (r"W float4 tensor_group g=16", "nvfp4"),
    (r"W float4 group g=32", "mxfp4"),
    (r"W float8 group g=32", "mxfp8"),
    (r"W float8 block g=None block=\[(?P<bn>\d+), (?P<bk>\d+)\]", "fp8-block{bn}x{bk}"),
    (r"W float8 (?P<gran>channel|tensor)", "fp8-{gran}"),
    (r"W int(?P<b>\d) (?P<gran>channel|tensor) .*sym=(?P<sym>\w+)", "{u}int{b}-{gran}"),
    (r"W int(?P<b>\d) group g=(?P<g>\d+) .*sym=(?P<sym>\w+)", "{u}int{b}-g{g}"),
    (r"pack-quantized int(?P<b>\d) g(?P<g>\d+)", "int{b}-g{g}"),
    (r"GPTQ-packed int(?P<b>\d) g(?P<g>\d+) \(qzeros hold zp\)", "uint{b}-g{g}"),
    (r"GPTQ-packed int(?P<b>\d) g(?P<g>\d+)", "int{b}-g{g}"),
    (r"'bits': (?P<b>\d), 'group_size': (?P<g>\d+), .*'sym': True", "int{b}-g{g}"),
)


def weight_id_of(heading: str) -> str:
    """The weight id that a heading of PRODUCER.md stands for; raises KeyError for an unknown spelling."""
    for pattern, template in _SPELLINGS:
        match = re.search(pattern, heading)
        if match:
            fields = {key: value for key, value in match.groupdict().items() if value is not None}
            fields.setdefault("g", fields.get("h", ""))
            fields["table"] = {"nf4": "nf4", "fp4": "fp4bnb"}.get(fields.get("table", ""), "")
            fields["u"] = "u" if fields.get("sym") == "False" else ""
            return template.format(**fields)
    raise KeyError(heading)


def expected_weights(report: str) -> dict[str, str]:
    """module -> weight id, from the Modules section of a PRODUCER.md."""
    section = report.partition("## Modules")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    current = ""
    for line in section.splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
            current = "bf16" if heading.startswith("not quantized") else weight_id_of(heading)
        elif line.startswith("- ") and current:
            found[line.removeprefix("- ").strip().strip("`")] = current
    return found
