"""vLLM's compiled operators, and omniplat's own over them: the one place that knows how vLLM 0.30 registers them.

They are taken from whoever has registered them in this process, and otherwise from the installed vLLM, whose module is
imported at the first call. Either way an operator is used only where its arguments are those of 0.30: earlier versions
of Marlin's take an order of columns, and later ones may change again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType

import torch
from packaging.requirements import Requirement

from omniplat.errors import BackendLoadError, UsageError
from omniplat.host import installed_version
from omniplat.portable.mx_grid import regroup_rows
from omniplat.portable.quantize import quantize_rows
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat.scheme import TensorQuant
from omniplat_cuda.capabilities.common import VLLM
from omniplat_cuda.kernels.marlin_layout import in_pairs

HALF = (torch.bfloat16, torch.float16)

#: The module of vLLM 0.30 whose import registers them, in torch's library `_C`.
_MODULE = "vllm._C_stable_libtorch"
#: operator -> names of its arguments, in order.
ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cutlass_scaled_mm": ("out", "a", "b", "a_scales", "b_scales", "bias"),
        "dynamic_per_token_scaled_fp8_quant": ("result", "input", "scale", "scale_ub"),
        "static_scaled_fp8_quant": ("result", "input", "scale", "group_shape"),
        "dynamic_scaled_int8_quant": ("result", "input", "scale", "azp"),
        "static_scaled_int8_quant": ("result", "input", "scale", "azp"),
        "gptq_marlin_repack": ("b_q_weight", "size_k", "size_n", "num_bits", "is_a_8bit"),
        "marlin_gemm": (
            *("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales", "a_scales", "global_scale"),
            *("b_zeros_or_none", "workspace", "b_type_id", "size_m", "size_n", "size_k", "use_atomic_add"),
            *("use_fp32_reduce", "is_zp_float"),
        ),
    }
)


def operator(name: str) -> torch._ops.OpOverload:
    """vLLM's operator of that name, a key of `ARGUMENTS`. Raises BackendLoadError, with the reason, where it is not
    there, where another vLLM is installed, or where it takes other arguments than those of vLLM 0.30."""
    if problem := _version_problem_here():
        raise BackendLoadError("cuda", problem)
    if not hasattr(torch.ops._C, name):
        try:
            import_module(_MODULE)
        except (ImportError, OSError) as exc:
            found = installed_version("vllm") or "no vLLM"
            raise BackendLoadError("cuda", f"_C::{name} is of {VLLM}; {found} is installed: {exc}") from exc
    packet = getattr(torch.ops._C, name, None)
    if packet is None:
        raise BackendLoadError("cuda", f"vLLM {installed_version('vllm')} registers no _C::{name}; {VLLM} does")
    overload: torch._ops.OpOverload = packet.default
    if problem := _arguments_problem(overload, name):
        raise BackendLoadError("cuda", problem)
    return overload


def version_problem(found: str) -> str:
    """Why an installed version of vLLM ("" for none) may not bring the operators; "" where it may."""
    if not found or Requirement(VLLM).specifier.contains(found, prereleases=True):
        return ""
    return f"vLLM's operators are called as those of {VLLM}, and {found} is installed"


@lru_cache(maxsize=1)
def _version_problem_here() -> str:
    return version_problem(installed_version("vllm"))


@lru_cache(maxsize=64)
def _arguments_problem(overload: torch._ops.OpOverload, name: str) -> str:
    found = tuple(argument.name for argument in overload._schema.arguments)
    if found == ARGUMENTS[name]:
        return ""
    return f"_C::{name} of {VLLM} takes {', '.join(ARGUMENTS[name])}; the one here takes {', '.join(found)}"


def _require_half(dtype: torch.dtype, name: str) -> None:
    if dtype not in HALF:
        raise UsageError(f"{name} computes in {HALF}, and was asked for {dtype}")


# -- 8 bits ---------------------------------------------------------------------------------------------------

#: (element, dynamic) -> vLLM's quantizer with one scale per token where it is dynamic and else one for all, and the one
#: rule for scales that it follows exactly: fp8 per token is divided by a scale that is never tiny, int8 per token
#: multiplied by 127 / amax, fp8 multiplied by the reciprocal of a given scale, int8 divided by one.
_QUANTIZERS: Mapping[tuple[str, bool], tuple[str, str]] = MappingProxyType(
    {
        ("fp8_e4m3", True): ("dynamic_per_token_scaled_fp8_quant", "absmax-clamped"),
        ("fp8_e4m3", False): ("static_scaled_fp8_quant", "absmax-reciprocal"),
        ("int8", True): ("dynamic_scaled_int8_quant", "absmax-reciprocal"),
        ("int8", False): ("static_scaled_int8_quant", "absmax"),
    }
)


def _quantize(
    rows: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` [M, K], M > 0, as e4m3fn or int8, and scales f32: [M, 1] per token, else [1, 1]."""
    if quant.scale_format == "e8m0":
        codes, scale = regroup_rows(rows, quant, pre_scale)
        return codes.view(torch.float8_e4m3fn), scale
    name, rule = _QUANTIZERS[quant.element, quant.dynamic]
    per_token = quant.granularity == "token"
    if quant.scale_rule != rule or per_token != quant.dynamic or quant.scale_format != "f32":
        codes, scale = quantize_rows(rows, quant, pre_scale, input_scale)
        return (codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes), scale
    values = (rows if pre_scale is None else rows.to(torch.float32) * pre_scale).contiguous()
    codes = torch.empty_like(values, dtype=torch.int8 if quant.is_integer else torch.float8_e4m3fn)
    if quant.dynamic:
        scale = torch.empty((len(values), 1), dtype=torch.float32, device=rows.device)
    else:
        assert input_scale is not None
        scale = input_scale
    # What is None: an upper bound for scales, a group's shape, a zero point.
    operator(name)(codes, values, scale, None)
    return codes, scale


def _scaled_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` [N, K], int8 or bytes of e4m3fn; `scale` f32 [1, N] or [1, 1]; `activation` a TensorQuant as JSON."""
    _require_half(out_dtype, "cutlass_scaled_mm")
    features = codes.shape[0]
    y = x.new_empty((*x.shape[:-1], features), dtype=out_dtype)
    if y.numel() == 0:
        return y
    quantized, row_scale = _quantize(x.reshape(-1, x.shape[-1]), decode_quant(activation), pre_scale, input_scale)
    # A bias is added before the one rounding, in the output's dtype.
    added = bias.to(out_dtype) if bias is not None else None
    weight = codes.view(quantized.dtype).t()
    operator("cutlass_scaled_mm")(y.view(-1, features), quantized, weight, row_scale, scale, added)
    return y


# -- weights alone --------------------------------------------------------------------------------------------


def type_id(
    exponent: int, mantissa: int, *, signed: bool = False, bias: int = 0, finite: bool = False, nan: int = 1
) -> int:
    """vLLM's number for a format of weights: the fields of its ScalarType, from the lowest bit on.

    `bias` is what is subtracted from codes; `nan` is 0 for formats without NaN, 2 for those with one at either end.
    """
    return exponent | mantissa << 8 | int(signed) << 16 | bias << 17 | int(finite) << 49 | nan << 50


#: Marlin's name of a format -> vLLM's number for it.
TYPE_IDS: Mapping[str, int] = MappingProxyType(
    {
        "uint4": type_id(0, 4),
        "uint4b8": type_id(0, 4, bias=8),
        "uint8b128": type_id(0, 8, bias=128),
        "float8_e4m3fn": type_id(4, 3, signed=True, finite=True, nan=2),
        "float4_e2m1f": type_id(2, 1, signed=True, finite=True, nan=0),
    }
)

#: Bytes of the locks through which blocks wait for each other, one int32 for each multiprocessor; no device has more.
LOCKS = 4 * 512


def repacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`words` int32 [K * bits / 32, N], codes along K from the lowest bits on, in Marlin's tiles."""
    out: torch.Tensor = operator("gptq_marlin_repack")(words, words.shape[0] * 32 // bits, words.shape[1], bits, False)
    return out


def _marlin_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    workspace: torch.Tensor,
    weight_type: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`words` in tiles; `scale` [G, N] in their order, in the output's dtype or 8 bits (then bytes); `zero` int32
    [G, N/8]; `global_scale` f32 [1]; `row_scale` f32 [N] of the output; `workspace` zeros, and zeros afterwards."""
    _require_half(out_dtype, "marlin_gemm")
    features = scale.shape[1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], features), dtype=out_dtype)
    if pre_scale is not None:
        rows = rows.to(torch.float32) * pre_scale
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn if global_scale is not None else torch.float8_e8m0fnu)
    y: torch.Tensor = operator("marlin_gemm")(
        rows.to(out_dtype).contiguous(),
        None,
        words,
        in_pairs(bias.to(out_dtype)) if bias is not None and row_scale is None else None,
        scale,
        None,
        global_scale,
        zero,
        workspace.view(torch.int32),
        TYPE_IDS[weight_type],
        rows.shape[0],
        features,
        rows.shape[1],
        False,
        True,
        False,
    )
    if row_scale is not None:
        y = y.to(torch.float32).mul_(row_scale)
        y = (y if bias is None else y.add_(bias)).to(out_dtype)
    return y.view(*x.shape[:-1], features)


def _marlin_fake(x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, *arguments: object) -> torch.Tensor:
    return linear_fake(x, scale.t(), *arguments)


_LIBRARY = new_library()
register(
    _LIBRARY,
    "cuda_vllm_scaled_linear(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? input_scale, "
    "Tensor? bias, str activation, ScalarType out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": _scaled_linear},
    linear_fake,
)
register(
    _LIBRARY,
    "cuda_vllm_marlin_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? global_scale, "
    "Tensor? row_scale, Tensor? pre_scale, Tensor? bias, Tensor(a!) workspace, str weight_type, ScalarType out_dtype) "
    "-> Tensor",
    {"CompositeExplicitAutograd": _marlin_linear},
    _marlin_fake,
)
