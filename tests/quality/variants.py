"""The online methods, with what of their options decides a scheme."""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"method": "fp8"},
    "fp8, per channel": {"method": "fp8", "granularity": "channel"},
    "fp8, blocks of 128 x 128": {"method": "fp8", "weight_block_size": [128, 128]},
    "int8": {"method": "int8"},
    "mxfp8": {"method": "mxfp8"},
    "mxfp4": {"method": "mxfp4"},
    "mxfp4_dualscale": {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 0},
    "nvfp4": {"method": "nvfp4"},
    "int4": {"method": "int4"},
    "bitsandbytes, nf4": {"method": "bitsandbytes"},
    "bitsandbytes, fp4": {"method": "bitsandbytes", "quant_type": "fp4", "compress_statistics": False},
}
