"""Storage: how a checkpoint packs one weight, as data. Recognised from headers, undone by `unpack`."""

from __future__ import annotations

from dataclasses import dataclass

#: Names of the packings that `unpack` undoes.
#:   plain        one code per element, [N, K] (8-bit codes, or a 16/32-bit unquantized weight)
#:   nibbles_k    uint8 [N, K/2], even K index in the low nibble (MXFP4, NVFP4)
#:   nibbles_n    uint8 [N/2, K], row 2i in the low nibble, two's complement (modelopt int4)
#:   int32_k      int32 [N, ceil(K*bits/32)], first value in the lowest bits, offset 2^(bits-1) when symmetric
#:                (compressed-tensors pack-quantized); zero points int32 packed along N
#:   gptq         int32 [K*bits/32, N] and [G, N*bits/32], first value in the lowest bits; scales [G, N]
#:   awq          int32 [K, N/8] and [G, N/8], nibble order 0 4 1 5 2 6 3 7; scales [G, N]
#:   awq_k        int32 [N, K/8] and [N/8], in AWQ's nibble order (Quark's int4 with one scale per row or tensor)
#:   int32_n      as awq with the nibbles in order (Quark's pack_method "order")
#:   stream_k     uint8 [N, K*bits/8], first value in the lowest bits (Quark's MXFP6: four codes in three bytes)
#:   nibbles_flat bytes of any shape and container, row by row, first value in the *high* nibble (bitsandbytes);
#:                scales flat as well
#:   hqq          [rows / p, columns]: a row is a group, or a column is (`groups_along_rows`); words hold codes of p
#:                ranges of rows, the first in the top bits
#:   quanto       [rows / p, group]: a row is a group; bytes hold codes of p ranges of rows, the first in the low bits;
#:                w = code * scale - shift, or (code - shift) * scale where the shift is an integer
#:   tinygemm     int32 [N/8, K/(16 t), 32, t/2], as a warp loads B of a product of 16 x 8 x 16; K and N padded; scale
#:                and zero as [G, N, 2]; w = (code - 8) * scale + zero
#:   nibbles_k_high  as nibbles_k with the even K index in the high nibble (ComfyUI)
#:   svdquant_rows, svdquant_tiles  SVDQuant's tensors in rows (vllm-omni), or as a warp loads them (nunchaku)
#:   gguf         blocks of a GGUF type, [N, bytes of a row], kept as they are
#:   nibbles_k_shifted  as nibbles_k with two's complement codes; scales and zeros [G, N], w = code * scale + zero
PACKINGS = (
    *("plain", "nibbles_k", "nibbles_n", "int32_k", "gptq", "awq", "awq_k"),
    *("int32_n", "stream_k", "nibbles_flat", "hqq", "nibbles_k_shifted"),
    *("nibbles_k_high", "svdquant_rows", "svdquant_tiles", "gguf", "quanto", "tinygemm"),
)

#: Packings of [K, N] and [G, N], or of [G, N] alone.
TRANSPOSED = ("gptq", "awq", "int32_n", "nibbles_k_shifted")

#: Tensors that unpacking reads beside the canonical roles.
STORED_ROLES = (
    *("weight_shape", "nested_scale", "nested_codebook", "requantization_scale"),
    *("deq_scale", "quant_bias", "scale_second", "zero_point_second", "scale_bias"),
    *("smooth_factor", "smooth_factor_orig", "channel_scale", "tensor_scale", "marker", "scale_and_zero"),
)


@dataclass(frozen=True, slots=True)
class Storage:
    """`packing` is one of `PACKINGS`; the rest are the conventions in which dialects differ.

    `zero_offset`        added to a stored zero point to get the real one (1 for GPTQ v1).
    `global_is_divisor`  compressed-tensors writes NVFP4 global scales as divisors, modelopt as multipliers.
    `container`          safetensors dtype of the tensor that holds the codes ("U8", "I32", "F8_E4M3").
    `act_order`          the module's `group_index` is its own order of columns, not the trivial one.
    `twos_complement`    signed codes in packed words are two's complement instead of offset by 2^(bits-1) (Quark).
    `nested_block`       scales that share a scale of their own, 0 where scales are plain numbers (bitsandbytes).
    `scale_offset`       added to every scale that is stored as codes.
    `flat_block`         values that share a scale in the flattened weight, where blocks run on from row to row and the
                         scheme's groups are the longest runs that lie in one block (bitsandbytes); else 0.
    `bits`               bits of a stored code where the element's own do not tell (HQQ).
    `groups_along_rows`  HQQ's axis 0: weights that lie a fixed distance apart share a scale, whatever their row.
    `scale_layout`       "rows": as the packing says; "tiles": the 128 x 4 tiles of NVIDIA's block-scaled products,
                         rows and columns padded; "columns": transposed, [G, N].
    `codes_in_columns`   the codes are transposed, [K, N], packed along K (modelopt's stacks of experts).
    """

    packing: str
    container: str
    zero_offset: int = 0
    global_is_divisor: bool = False
    act_order: bool = False
    twos_complement: bool = False
    nested_block: int = 0
    scale_offset: float = 0.0
    flat_block: int = 0
    bits: int = 0
    groups_along_rows: bool = False
    scale_layout: str = "rows"
    codes_in_columns: bool = False
