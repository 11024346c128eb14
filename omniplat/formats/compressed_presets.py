"""Preset schemes of compressed-tensors: a group of that name may list its targets and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.metadata import Fields

_GROUPED = {"strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float"}
_INT_TOKEN = {bits: {"num_bits": bits, "type": "int", "strategy": "token", "dynamic": True} for bits in (4, 8)}
_INT_GROUP = {bits: {"num_bits": bits, "type": "int", **_GROUPED} for bits in range(2, 8)}
_FP8_TOKEN = {**_FP8, "strategy": "token", "dynamic": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_MXFP6 = {**_MXFP4, "num_bits": 6}
_MXFP8 = {**_MXFP4, "num_bits": 8}

Arguments = Mapping[str, Any]
#: name -> (arguments of the weights, of the inputs).
PRESETS: Mapping[str, tuple[Arguments | None, Arguments | None]] = {
    "UNQUANTIZED": (None, None),
    "W8A16": (_INT8, None),
    **{f"W{bits}A16": (group, None) for bits, group in _INT_GROUP.items()},
    **{f"W{bits}A8": (group, _INT_TOKEN[8]) for bits, group in _INT_GROUP.items()},
    **{f"W{bits}A4": (_INT_GROUP[bits], _INT_TOKEN[4]) for bits in (2, 3, 4)},
    "W4A16_ASYM": ({**_INT_GROUP[4], "symmetric": False}, None),
    "W8A8": (_INT8, _INT_TOKEN[8]),
    "INT8": (_INT8, _INT_TOKEN[8]),
    "W4AFP8": (_INT_GROUP[4], _FP8_TOKEN),
    "FP8": ({**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor"}),
    "FP8_DYNAMIC": ({**_FP8, "strategy": "channel"}, _FP8_TOKEN),
    "FP8_BLOCK": ({**_FP8, "strategy": "block", "block_structure": [128, 128]}, {**_FP8, **_GROUPED, "dynamic": True}),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, {**_NVFP4, "dynamic": "local"}),
    "MXFP4A16": (_MXFP4, None),
    "MXFP4": (_MXFP4, {**_MXFP4, "dynamic": True}),
    "MXFP4XFP8": (_MXFP4, {**_FP8, **_GROUPED, "dynamic": True}),
    "MXFP6A16": (_MXFP6, None),
    "MXFP6A8": (_MXFP6, {**_MXFP8, "dynamic": True}),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, {**_MXFP8, "dynamic": True}),
}
#: Presets that had a scale for each channel in one release and for each group in another.
OPEN = frozenset({"W8A16"})


def is_open(group: str, source: Fields) -> bool:
    """True where the name of `group` does not say what shares a scale: the tensors do."""
    groups = source.values.get("config_groups")
    return isinstance(groups, dict) and isinstance(groups.get(group), list) and group.upper() in OPEN


def spelled_out(source: Fields) -> Fields:
    """`source` with each preset's arguments in place of its name."""
    groups = source.values.get("config_groups")
    if not isinstance(groups, dict) or not any(isinstance(value, list) for value in groups.values()):
        return source
    full = {name: _group(name, value, source) if isinstance(value, list) else value for name, value in groups.items()}
    return replace(source, values={**source.values, "config_groups": full})


def _group(name: str, targets: list[Any], source: Fields) -> dict[str, Any]:
    if name.upper() not in PRESETS:
        raise UnsupportedOptionError(
            f"{name!r:.80} is no preset scheme: a group that only lists targets is one of {', '.join(sorted(PRESETS))}",
            file=source.file,
            key=source.path(f"config_groups.{name}"),
        )
    weights, inputs = PRESETS[name.upper()]
    return {"targets": targets, "weights": weights, "input_activations": inputs}
