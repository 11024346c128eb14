"""Which weights the portable kernels take, as data: imports neither torch nor triton.

Weight-only kernels decode codes of 4 and 8 bits, with scales per row or in groups and blocks of a multiple of 16
columns. Kernels that multiply codes by codes take those of 8 bits.
"""

from __future__ import annotations

_GROUPS = ("channel", "g16", "g32", "g64", "g96", "g128", "g256", "g512", "g1024")
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

#: Weight ids of linear layers.
DECODED_WEIGHTS: tuple[str, ...] = (
    *(f"{element}-{tail}" for element in ("int4", "uint4", "int8", "uint8") for tail in _GROUPS),
    *("int8-tensor", "fp8-tensor", "fp8-channel", "fp8-g32", "fp8-g64", "fp8-g128"),
    *("fp8-block128x128", "fp8-block64x64", "fp8-block32x32"),
    # what blocks of 128 rows become where a part of a fused layer starts inside one
    *("fp8-block64x128", "fp8-block32x128", "fp8-block16x128"),
    *(f"{element}-b{size}" for element in ("nf4", "fp4bnb") for size in _BLOCKS),
    *("mxfp8", "mxfp4", "mxfp4-dual", "nvfp4"),
)

#: Bytes kept per stored byte where scales are held in bf16 instead of a byte each: of 16 codes of 4 bits, of 32 of 8;
#: or in f32 instead of a byte for 32 codes of 4 bits and an f32 for 512.
DECODED_RESIDENT = (("nvfp4", 10 / 9), ("mxfp8", 34 / 33), ("mxfp4-dual", 20 / 17.25))

#: Weight ids of experts: the same, but for groups longer than any checkpoint of experts has.
DECODED_EXPERTS: tuple[str, ...] = tuple(
    name
    for name in DECODED_WEIGHTS
    if not name.endswith(("g256", "g512", "g1024", *(f"b{size}" for size in _BLOCKS[4:])))
)

#: Of products of fp8 codes: blocks of 128 columns, whose sums are scaled.
FP8_BLOCKS: tuple[str, ...] = ("fp8-block128x128", "fp8-block64x128", "fp8-block32x128", "fp8-block16x128")
#: Of products of codes whose sums are scaled by whole rows.
FP8_ROWS: tuple[str, ...] = ("fp8-tensor", "fp8-channel")
INT8_ROWS: tuple[str, ...] = ("int8-tensor", "int8-channel")

#: Weight ids whose residual is among those, beside a low-rank pair in 16 bits; and bytes kept per stored byte, at most:
#: the pair grows by nothing.
LOW_RANK_WEIGHTS: tuple[str, ...] = ("svdq-nvfp4", "svdq-int4-g64")
LOW_RANK_RESIDENT = (("svdq-nvfp4", dict(DECODED_RESIDENT)["nvfp4"]),)
