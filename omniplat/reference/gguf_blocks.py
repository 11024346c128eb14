"""GGUF layers on the CPU: rows are decoded by GGUF's own library, a tile at a time, inside the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.errors import BackendNotInstalledError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import new_library, register
from omniplat.runtime.tensors import WeightTensors

_LIBRARY = new_library()
#: Values decoded at a time, at most about 4 MiB of float32.
_TILE_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """`kind` is the name of the type in GGUF's library ("Q4_K")."""

    kind: str
    out_features: int
    in_features: int


class GgufLinear(LinearKernel[GgufConfig]):
    """y = x W^T + bias in float32. Keeps the blocks as they are in the file."""

    name: ClassVar[str] = "gguf_linear"
    config_type = GgufConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[GgufConfig]:
        """Raises UnsupportedCombinationError for other weights, BackendNotInstalledError without the library."""
        quant = weight.scheme.weight
        if not quant.element.startswith("gguf_") or weight.scheme.activation is not None:
            raise UnsupportedCombinationError(
                "cpu", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs GGUF blocks and a16"]
            )
        kind = quant.element.removeprefix("gguf_").upper()
        decode(weight.tensors["codes"][:1], kind)
        config = GgufConfig(kind, weight.out_features, weight.in_features)
        return Prepared({"codes": weight.tensors["codes"]}, config)

    def apply(
        self,
        config: GgufConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.reference_gguf_linear(
            x, tensors["codes"], bias, config.kind, config.out_features, out_dtype
        )
        return y


def decode(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [R, bytes of a row] to float32 [R, K]. Raises BackendNotInstalledError without GGUF's library."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as exc:
        raise BackendNotInstalledError(
            "gguf", "the library gguf", 'pip install "omniplat[gguf]"', kind="format"
        ) from exc
    return torch.from_numpy(dequantize(codes.contiguous().numpy(), GGMLQuantizationType[kind]))


def _run(
    x: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    y = rows.new_empty((rows.shape[0], out_features))
    step = max(1, _TILE_VALUES // max(rows.shape[1], 1))
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        torch.mm(rows, decode(codes[start:stop], kind).t(), out=y[:, start:stop])
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype).view(*x.shape[:-1], out_features)


def _fake(
    x: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


register(
    _LIBRARY,
    "reference_gguf_linear(Tensor x, Tensor codes, Tensor? bias, str kind, int out_features, "
    "ScalarType out_dtype) -> Tensor",
    {"CPU": _run},
    _fake,
)
