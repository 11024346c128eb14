"""Rounding weights to nearest on the device that they are for: codes and scales are the oracle's byte for byte.

`omniplat.oracle.quantize_weight` is the definition, and what every other device is given by
`omniplat.runtime.online.round_to_nearest`. Scales are derived and values divided by them in float32, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.oracle.scales import nvfp4_global_scale
from omniplat.portable import quantize_blocks
from omniplat.runtime.online import Rounding, round_to_nearest
from omniplat.runtime.tensors import to_array
from omniplat.scheme import Scheme, TensorQuant

#: Elements that are rounded at once: bounds what rounding needs beside the weight, some f32 for each.
_ELEMENTS = 1 << 22
#: Columns of one scale of the upper of two levels, as in `omniplat.oracle`.
_DUAL_COLUMNS = 512
_FORMATS: Mapping[str, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
#: element -> largest magnitude of a code, and what magnitudes are divided by where a rule takes half of the range.
_TOPS: Mapping[str, tuple[float, float]] = {"fp8_e4m3": (448.0, 448.0), "int8": (127.0, 127.5), "int4": (7.0, 7.5)}


def rounding_on(device: torch.device) -> Rounding:
    """How weights for layers on `device` are rounded: there, on NVIDIA's, those that this file knows; else on the CPU.

    Where makes no difference to a byte.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return round_to_nearest

    def rounding(weight: torch.Tensor, scheme: Scheme) -> Iterator[tuple[int, CanonicalWeight]]:
        if why_not(scheme.weight):
            yield from round_to_nearest(weight, scheme)
        else:
            yield from round_on_device(weight.to(device), scheme)

    return rounding


def why_not(quant: TensorQuant) -> str:
    """What keeps a weight from being rounded by `round_on_device`; "" where nothing does."""
    if quant.rounding not in ("", "nearest-even"):
        return "rounding to nearest even"
    if quant.scale_rule == "absmax-reciprocal":
        # subnormal maxima have none in f32, and what zeros times Inf are rounded to is left to the oracle
        return "values divided by their scale"
    if quant.second_scale == "dual":
        return quantize_blocks.why_not(replace(quant, second_scale=""))
    if quant.scale_format in ("e8m0", "e4m3"):
        return quantize_blocks.why_not(quant)
    if quant.element not in _TOPS or not quant.symmetric or quant.scale_format not in _FORMATS or quant.second_scale:
        return f"symmetric codes in one of {', '.join(_TOPS)} with scales in one of {', '.join(_FORMATS)}"
    if quant.granularity not in ("tensor", "channel", "group", "block"):
        return "scales of tensors, rows, groups or blocks"
    if quant.scale_rule not in ("", "absmax", "half-range", "absmax-clamped"):
        return "a float rule for scales"
    return ""


def round_on_device(
    weight: torch.Tensor, scheme: Scheme, elements: int = _ELEMENTS
) -> Iterator[tuple[int, CanonicalWeight]]:
    """`weight`, [N, K] of any floating-point dtype, finite, on any device; `scheme` is one that `why_not` says nothing
    of. Runs of its rows (whole blocks of them) of about so many elements, each with the row at which it begins.
    """
    quant = scheme.weight
    rows, columns = weight.shape
    step = max(elements // columns, 1)
    if quant.granularity == "block":
        step = max(step - step % quant.block[0], quant.block[0])
    most = weight.abs().amax().to(torch.float32).reshape(1, 1)
    for start in range(0, rows, step):
        some = weight[start : start + step].to(torch.float32)
        tensors = (
            _in_blocks(some, quant, most) if quant.scale_format in ("e8m0", "e4m3") else _by_floats(some, quant, most)
        )
        arrays = {role: to_array(tensor.cpu()) for role, tensor in tensors.items()}
        yield start, CanonicalWeight(scheme, len(some), columns, arrays)


def _in_blocks(values: torch.Tensor, quant: TensorQuant, most: torch.Tensor) -> dict[str, torch.Tensor]:
    """The formats whose scales have 8 bits; `most` is the largest magnitude of the whole weight."""
    tensors: dict[str, torch.Tensor] = {}
    above: torch.Tensor | None = None
    if quant.second_scale == "dual":
        tensors["scale2"], values = _dual(values)
        quant = replace(quant, second_scale="")
    elif quant.second_scale == "global":
        above = torch.from_numpy(nvfp4_global_scale(most.cpu().numpy())).to(values.device)
        tensors["global_scale"] = above.expand(len(values), 1)
    codes, scale = quantize_blocks.quantize_blocks(values, quant, None, above)
    if quant.element == "fp8_e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    if quant.scale_format == "e4m3":
        scale = scale.view(torch.float8_e4m3fn)
    return {"codes": codes, "scale": scale, **tensors}


def _dual(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of 512 columns, [N, ceil(K / 512)], and what is left of `values` under them; see `omniplat.oracle`."""
    columns = values.shape[1]
    filled = torch.nn.functional.pad(values, (0, -columns % _DUAL_COLUMNS))
    sixth = torch.tensor(np.float32(1) / np.float32(6), device=values.device)
    scale = filled.view(len(values), -1, _DUAL_COLUMNS).abs().amax(2) * sixth
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    wide = scale.repeat_interleave(_DUAL_COLUMNS, dim=1)[:, :columns]
    return scale, torch.where(wide == 0, 0.0, values / torch.where(wide == 0, 1.0, wide))


def _by_floats(values: torch.Tensor, quant: TensorQuant, most: torch.Tensor) -> dict[str, torch.Tensor]:
    """The formats whose scales are floats of 16 or 32 bits."""
    rows, columns = values.shape
    if quant.granularity == "block":
        high, wide = quant.block
        filled = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
        tiles = filled.view(-(-rows // high), high, -(-columns // wide), wide)
    else:
        tiles = values.view(rows, -1, quant.group_size or columns)
    axes = (1, 3) if quant.granularity == "block" else (2,)
    amax = most.reshape(1, 1, 1) if quant.granularity == "tensor" else tiles.abs().amax(axes, keepdim=True)
    top, half_range = _TOPS[quant.element]
    # torch divides by a number as it multiplies by the reciprocal, on CUDA: divide by tensors
    stored = amax / torch.full_like(amax, half_range if quant.scale_rule == "half-range" else top)
    if quant.scale_rule == "absmax-clamped" and quant.element == "fp8_e4m3":
        stored = stored.clamp(min=1.0 / (top * 512.0))
    stored = stored.to(_FORMATS[quant.scale_format])
    scale = stored.to(torch.float32)
    scaled = torch.where(scale == 0, 0.0, tiles / torch.where(scale == 0, 1.0, scale))
    if quant.granularity == "block":
        scaled = scaled.reshape(filled.shape)[:rows, :columns]
        stored = stored[:, 0, :, 0]
    else:
        scaled = scaled.reshape(rows, columns)
        stored = stored[..., 0]
        if quant.granularity != "group":
            stored = stored.to(torch.float32).reshape(-1, 1).expand(rows, 1)
    return {"codes": _coded(scaled, quant.element), "scale": stored}


def _coded(scaled: torch.Tensor, element: str) -> torch.Tensor:
    """Codes [N, K] of numbers in units of the code, to nearest even; of int4 two in a byte, the even column below."""
    if element == "fp8_e4m3":
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if element == "int8":
        return torch.round(scaled).clamp(-128, 127).to(torch.int8)
    nibbles = torch.round(scaled).clamp(-8, 7).to(torch.int8).view(torch.uint8) & 15
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
