"""Linear kernels over AITER's 8-bit products: int8, fp8, fp8 in blocks, and MX weights rewritten as fp8.

On gfx94x stored e4m3fn becomes e4m3fnuz when a layer is prepared: the same bits, twice the scale, no negative zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable import mx_grid
from omniplat.portable.quantize import why_not
from omniplat.portable.reencode import reencode
from omniplat.runtime.finite import fp8_codes, multipliers
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.quant_text import encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant, parse_activation_id
from omniplat_rocm.kernels import ops as _ops  # noqa: F401 -- registers the operators
from omniplat_rocm.kernels import vendor


@dataclass(frozen=True, slots=True)
class EightBitConfig:
    """`activation` is the input's TensorQuant as JSON; `fnuz` the fp8 that codes are in."""

    activation: str
    fnuz: bool
    out_features: int
    in_features: int


class GemmA8W8(LinearKernel[EightBitConfig]):
    """fp8 by fp8, scales per row and per token. Buffers: `codes` [N, K], `scale` f32 [1, N], `pre_scale` f32 [K],
    `input_scale` f32 [1, 1]."""

    name: ClassVar[str] = "gemm_a8w8_fp8"
    config_type = EightBitConfig
    #: AITER's function.
    product: ClassVar[str] = "gemm_a8w8"

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[EightBitConfig]:
        """Raises UnsupportedCombinationError for what is not declared; InvalidCheckpointError for NaN, and for scales
        that span too many binades to be rewritten."""
        activation = self._executed(weight, spec)
        static = not activation.dynamic
        vendor.require(weight, spec, self.name, "pre_scale", *(("input_scale",) if static else ()))
        vendor.layer_dtype(spec)
        fnuz = self._is_fp8() and vendor.is_fnuz()
        codes, scale = self._weight(weight, spec)
        if fnuz:
            codes, scale = vendor.to_fnuz(codes, scale)
        tensors = {"codes": self._laid_out(codes), "scale": scale.contiguous()}
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        if static:
            if "input_scale" not in weight.tensors:
                raise InvalidCheckpointError(f"{weight.scheme.activation_id} needs input_scale", key=spec.name)
            tensors["input_scale"] = weight.tensors["input_scale"].to(torch.float32).reshape(1, 1)
        config = EightBitConfig(encode_quant(activation), fnuz, weight.out_features, weight.in_features)
        return Prepared(tensors, config)

    def apply(
        self,
        config: EightBitConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.rocm_gemm_a8w8(
            x,
            tensors["codes"],
            tensors["scale"],
            tensors.get("pre_scale"),
            tensors.get("input_scale"),
            bias,
            config.activation,
            self.product,
            config.fnuz,
            out_dtype,
        )
        return y

    def _is_fp8(self) -> bool:
        return True

    def _executed(self, weight: WeightTensors, spec: LayerSpec) -> TensorQuant:
        """How the input is quantized. Raises UnsupportedCombinationError where that cannot be."""
        executes = vendor.capability(self.name).executes
        executed = weight.scheme.activation
        if executes not in ("", weight.scheme.activation_id):
            executed = parse_activation_id(executes)
        reason = self._why_not(executed, weight.in_features)
        if reason or executed is None:
            raise UnsupportedCombinationError(
                "rocm", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        return executed

    def _why_not(self, quant: TensorQuant | None, columns: int) -> str:
        return why_not(quant)

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N, K], bytes of e4m3fn where they are fp8, and scales f32 as the product reads them."""
        return fp8_codes(weight.tensors["codes"], spec.name), weight.tensors["scale"].to(torch.float32).reshape(1, -1)

    def _laid_out(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


class GemmA8W8Shuffled(GemmA8W8):
    """As `GemmA8W8` with `codes` in tiles of 16 x 16; the bias is added outside."""

    name: ClassVar[str] = "gemm_a8w8_fp8_shuffled"
    product: ClassVar[str] = "gemm_a8w8_bpreshuffle"

    def _laid_out(self, codes: torch.Tensor) -> torch.Tensor:
        shuffled: torch.Tensor = vendor.aiter("ops.shuffle", "shuffle_weight")(codes, layout=(16, 16))
        return shuffled


class GemmA8W8Int8(GemmA8W8):
    """int8 by int8, exact in int32."""

    name: ClassVar[str] = "gemm_a8w8_int8"

    def _is_fp8(self) -> bool:
        return False

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        codes = weight.tensors["codes"].contiguous().view(torch.int8)
        return codes, weight.tensors["scale"].to(torch.float32).reshape(1, -1)


class GemmA8W8Blockscale(GemmA8W8):
    """fp8 with scales of blocks of 128 x 128, by inputs with a scale per 128 values; the bias is added outside."""

    name: ClassVar[str] = "gemm_a8w8_blockscale"
    product: ClassVar[str] = "gemm_a8w8_blockscale"

    def _why_not(self, quant: TensorQuant | None, columns: int) -> str:
        if quant is None or quant.granularity != "group" or not quant.dynamic:
            return "activations with one scale per group"
        return why_not(replace(quant, granularity="token", group_size=0))

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return fp8_codes(weight.tensors["codes"], spec.name), multipliers(weight, spec.name)


class ReencodedMxfp8(GemmA8W8):
    """MXFP8 weights with one power of two per row, by fp8 with a scale per token (`omniplat.reencoding`)."""

    name: ClassVar[str] = "reencoded_mxfp8"

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._weight(reencode(weight, vendor.capability(self.name).via, spec.name), spec)


class ReencodedMxfp4(ReencodedMxfp8):
    """MXFP4 by MXFP4 on fp8 units: inputs are rounded to their MX grid and held as fp8 with a scale per token, exactly
    where a token's groups span at most 14 binades."""

    name: ClassVar[str] = "reencoded_mxfp4"

    def _why_not(self, quant: TensorQuant | None, columns: int) -> str:
        return mx_grid.why_not(quant, columns)
