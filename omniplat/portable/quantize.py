"""Quantizing activations to 8 bits with one scale per token or tensor: codes and scales, kept apart.

Codes and scales are the oracle's byte for byte (`omniplat.oracle.quantize_activation`): both forms derive scales and
divide by them in float32 with IEEE division. `quantize_rows` takes Triton's form on a device that Triton serves, and
the plain one elsewhere.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from omniplat.portable.declared import TRITON, meets
from omniplat.scheme import TensorQuant

#: Columns that one program of the Triton form holds in registers.
MAX_COLUMNS = 32768
#: element -> largest magnitude of a code
_TOP = (("fp8_e4m3", 448.0), ("int8", 127.0))
_FORMATS = (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16))


def why_not(quant: TensorQuant | None) -> str:
    """What keeps an activation from being quantized here; "" where nothing does."""
    if quant is None:
        return "activations of 8 bits"
    if quant.element not in dict(_TOP) or quant.second_scale or not quant.symmetric:
        return "symmetric activations in fp8 e4m3 or int8"
    if quant.granularity not in ("token", "tensor") or (quant.granularity == "token" and not quant.dynamic):
        return "activations with one scale per token, or per tensor"
    if quant.scale_format not in dict(_FORMATS):
        return f"activation scales in one of {', '.join(dict(_FORMATS))}"
    if quant.scale_rule not in ("", "absmax", "half-range", "absmax-clamped", "absmax-reciprocal"):
        return "a float rule for activation scales"
    if quant.rounding not in ("", "nearest-even"):
        return "activations rounded to nearest even"
    return ""


def divisor(quant: TensorQuant) -> float:
    """What an absolute maximum is divided by to give the scale."""
    return 127.5 if quant.scale_rule == "half-range" and quant.is_integer else dict(_TOP)[quant.element]


def least_scale(quant: TensorQuant) -> float:
    """Scales below this are raised to it."""
    return 1.0 / (448.0 * 512.0) if quant.scale_rule == "absmax-clamped" and not quant.is_integer else 0.0


def quantize_rows(
    x: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    releases: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], M > 0, in bf16, f16 or f32, to codes [M, K] and multipliers f32: [M, 1] per token, else [1, 1].

    Codes are uint8 (bytes of e4m3fn) or int8. `pre_scale` [K] is applied first; `input_scale`, one number, is the
    scale where `quant` is static. `quant` is one for which `why_not` says nothing. A token with NaN or Inf gets a scale
    of NaN or Inf. `releases`: the kernel that follows may start before this one has ended, and waits for it by itself.
    """
    given = input_scale.to(torch.float32).reshape(1, 1) if not quant.dynamic and input_scale is not None else None
    if _takes_triton(x, quant):
        from omniplat.portable import quantize_triton

        return quantize_triton.quantize_rows(x, quant, pre_scale, given, releases=releases)
    return quantize_rows_torch(x, quant, pre_scale, given)


def _takes_triton(x: torch.Tensor, quant: TensorQuant) -> bool:
    per_row = quant.granularity == "token" or (not quant.dynamic and quant.scale_rule != "absmax-reciprocal")
    return per_row and quant.scale_format == "f32" and x.is_cuda and x.shape[1] <= MAX_COLUMNS and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True where Triton is installed, in a release whose compiler takes the kernels here: older ones are as none."""
    if find_spec("triton") is None:
        return False
    import triton

    # what is left of a package that was removed is a namespace without a version
    return meets(getattr(triton, "__version__", "0"), TRITON)


def quantize_rows_torch(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` in plain torch; `given` f32 [1, 1] is the static scale."""
    values = x.contiguous().to(torch.float32)
    if pre_scale is not None:
        values = values * pre_scale
    top = dict(_TOP)[quant.element]
    inverse: torch.Tensor | None = None
    if given is not None:
        scale = given
    else:
        magnitude = values.abs()
        amax = magnitude.amax(1, keepdim=True) if quant.granularity == "token" else magnitude.amax().reshape(1, 1)
        # On CUDA torch divides by a number as it multiplies by the reciprocal, which rounds twice: divide by tensors.
        scale = amax / torch.full_like(amax, divisor(quant))
        least = least_scale(quant)
        if least:
            scale = scale.clamp(min=least)
        scale = scale.to(dict(_FORMATS)[quant.scale_format]).to(torch.float32)
        if quant.scale_rule == "absmax-reciprocal":
            inverse = torch.full_like(amax, top) / torch.where(amax == 0, 1.0, amax)
    is_zero = scale == 0
    safe = torch.where(is_zero, 1.0, scale)
    if quant.scale_rule == "absmax-reciprocal":
        scaled = values * (torch.ones_like(safe) / safe if inverse is None else inverse)
    else:
        scaled = values / safe
    scaled = torch.where(is_zero, 0.0, scaled)
    if quant.is_integer:
        return torch.round(scaled).clamp_(-128, 127).to(torch.int8), scale
    return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8), scale
