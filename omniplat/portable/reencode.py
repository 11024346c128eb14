"""MX weights rewritten with one scale per row, in torch on any device (`omniplat.reencoding` has the rules)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from omniplat.errors import InvalidCheckpointError
from omniplat.reencoding import Reencoding, rule_for
from omniplat.runtime.finite import e8m0_scale
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant, parse_weight_id

#: Bias of e8m0 bytes.
_BIAS = 127
#: Magnitudes of e2m1 codes, in halves.
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
#: Rows that are rewritten at a time, so that working memory stays small beside the weight.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Groups:
    """Exponents of the groups of some rows, int32 [rows, G], and which of them have a code that is not zero."""

    exponent: torch.Tensor
    occupied: torch.Tensor


def reencode(weight: WeightTensors, target: str, name: str = "") -> WeightTensors:
    """`weight` (mxfp4 or mxfp8; stacked or not) as `target`, "fp8-channel" or "int8-channel": the oracle's bytes.

    fp8 codes are uint8 (bytes of e4m3fn), scales f32 [..., N, 1]; other roles are passed on. Raises
    InvalidCheckpointError, naming the layer `name`, where a scale is NaN or a row spans more binades than the rule
    allows; InvalidSchemeError where no rule leads from one to the other.
    """
    quant = weight.scheme.weight
    rule = rule_for(weight.scheme.weight_id, target)
    codes, scale = weight.tensors["codes"], e8m0_scale(weight.tensors["scale"], name)
    lead = codes.shape[:-1]
    flat_codes, flat_scale = codes.reshape(-1, codes.shape[-1]).view(torch.uint8), scale.reshape(-1, scale.shape[-1])
    dtype = torch.int8 if target.startswith("int8") else torch.uint8
    new_codes = torch.empty((flat_codes.shape[0], weight.in_features), dtype=dtype, device=codes.device)
    new_scale = torch.empty((flat_codes.shape[0], 1), dtype=torch.float32, device=codes.device)
    for start in range(0, flat_codes.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        groups = _groups(flat_codes[rows], flat_scale[rows], quant)
        _require_span(groups, rule, name)
        elements = _elements(flat_codes[rows], quant)
        new_codes[rows], new_scale[rows] = (_as_int8 if dtype == torch.int8 else _as_fp8)(elements, groups, quant, rule)
    tensors: Mapping[str, torch.Tensor] = {
        **weight.tensors,
        "codes": new_codes.reshape(*lead, weight.in_features),
        "scale": new_scale.reshape(*lead, 1),
    }
    return replace(weight, scheme=replace(weight.scheme, weight=parse_weight_id(target)), tensors=tensors)


def row_binades(weight: WeightTensors, name: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """What `reencode` to "fp8-channel" moves into the codes of a weight [N, K], and what is left as its scales.

    How many binades each group lies below the largest of its row, uint8 [N, G], 0 for groups of zeros; and the scales
    of rows, f32 [N, 1]. Raises as `reencode` does.
    """
    quant = weight.scheme.weight
    rule = rule_for(weight.scheme.weight_id, "fp8-channel")
    codes, scale = weight.tensors["codes"].view(torch.uint8), e8m0_scale(weight.tensors["scale"], name)
    parts = []
    for start in range(0, len(codes), _ROWS):
        groups = _groups(codes[start : start + _ROWS], scale[start : start + _ROWS], quant)
        _require_span(groups, rule, name)
        base, below = _from_the_largest(groups)
        parts.append((below.to(torch.uint8), _powers(base - rule.headroom)))
    below, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return below, scales


def _groups(codes: torch.Tensor, scale: torch.Tensor, quant: TensorQuant) -> _Groups:
    magnitude = codes & (0x77 if quant.bits == 4 else 0x7F)
    occupied = magnitude.view(len(codes), scale.shape[1], -1).amax(2) > 0
    return _Groups(scale.to(torch.int32) - _BIAS, occupied)


def _require_span(groups: _Groups, rule: Reencoding, name: str) -> None:
    largest = torch.where(groups.occupied, groups.exponent, -_BIAS).amax(1)
    smallest = torch.where(groups.occupied, groups.exponent, _BIAS + 1).amin(1)
    span = int((largest - smallest).amax())
    if span > rule.max_span:
        raise InvalidCheckpointError(
            f"scales of a row span {span} binades, and {rule.source} moves to {rule.target} up to {rule.max_span}",
            key=name,
        )


def _elements(codes: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    """f32 [rows, K]."""
    if quant.bits == 8:
        dtype = torch.float8_e4m3fn if quant.element == "fp8_e4m3" else torch.float8_e5m2
        return codes.view(dtype).to(torch.float32)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).to(torch.int32)
    table = torch.tensor((*_HALVES, *(-half for half in _HALVES)), dtype=torch.float32, device=codes.device) * 0.5
    table[8] = -0.0
    return table[nibbles]


def _as_fp8(
    elements: torch.Tensor, groups: _Groups, quant: TensorQuant, rule: Reencoding
) -> tuple[torch.Tensor, torch.Tensor]:
    base, below = _from_the_largest(groups)
    values = elements * _powers(rule.headroom - below).repeat_interleave(quant.group_size, dim=1)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), _powers(base - rule.headroom)


def _from_the_largest(groups: _Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent of each row's largest group, int32 [rows, 1], 0 for a row of zeros; and how many binades groups lie
    below it, int32 [rows, G], 0 for those of zeros."""
    largest = torch.where(groups.occupied, groups.exponent, -_BIAS - 1).amax(1, keepdim=True)
    base = torch.where(largest < -_BIAS, 0, largest)
    return base, torch.where(groups.occupied, base - groups.exponent, 0)


def _as_int8(
    elements: torch.Tensor, groups: _Groups, quant: TensorQuant, rule: Reencoding
) -> tuple[torch.Tensor, torch.Tensor]:
    smallest = torch.where(groups.occupied, groups.exponent, _BIAS + 1).amin(1, keepdim=True)
    base = torch.where(smallest > _BIAS, 0, smallest)
    shift = torch.where(groups.occupied, groups.exponent - base, 0)
    values = elements * 2 * _powers(shift).repeat_interleave(quant.group_size, dim=1)
    return values.round().clamp(-127, 127).to(torch.int8), _powers(base - 1)


def _powers(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in f32, exact down to subnormals."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=exponent.device), exponent).to(
        torch.float32
    )
