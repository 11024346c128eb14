"""How Triton kernels decode weights held in words: codes in registers, and the scales and zero points beside them.

NVIDIA's devices decode all parts of two words at once with instructions of their own (ASM,
`omniplat.portable.words_ptx`); elsewhere, and under the interpreter, Triton's operations give the same numbers. Imports
triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import is_nvidia
from omniplat.portable.word_weights import WordForm
from omniplat.portable.words import parts_of
from omniplat.portable.words_ptx import Decoder, base_of, decoder


@lru_cache(maxsize=64)
def computes_in_pairs(device: torch.device) -> bool:
    """True where PTX computes on pairs of 16-bit floats, bf16 among them: NVIDIA from sm80 on."""
    return is_nvidia(device, (8, 0))


def kind_of_zero(zero: torch.Tensor | None) -> str:
    """How zero points are subtracted: "" where there are none, "integer" from codes, "fraction" from their products."""
    if zero is None:
        return ""
    return "fraction" if zero.is_floating_point() else "integer"


def constants_of(
    form: WordForm, bf16: bool, zero: str, fold: bool, device: torch.device, *, held: bool = False
) -> dict[str, object]:
    """What kernels that call `decoded_parts` are compiled for: the form, and the device's own instructions, an empty
    text where Triton's operations serve. `zero` as by `kind_of_zero`; `fold`: scales go into the weight. `held`: the
    kernel keeps constants in registers that instructions take from there (HELD)."""
    found = None
    # scales that are held are numbers of bf16, which multiply no f16
    if computes_in_pairs(device) and (bf16 or not fold):
        scale = form.scale if fold else ""
        found = decoder(form.element, form.bits, bf16, zero == "integer", scale, held=held)
    own = found or Decoder("", "", "")
    return {
        "ASM": own.text,
        "OPERANDS": own.constraints,
        "EXTRA": own.extra,
        "ELEMENT": form.element,
        "PARTS": parts_of(form.bits),
        "DEPTH": form.depth,
        "SCALE": form.scale,
        "RAISED": form.raised,
        "GROUP": form.group,
        "ROWS": form.rows,
        "ZERO": zero,
        "BASE": base_of(form.element, bf16),
        **({"HELD": own.held} if held else {}),
    }


@triton.jit
def value_of(words, table, PART: tl.constexpr, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    """f32: what part PART of each word stands for, without a zero point and a scale. See `omniplat.portable.words`."""
    wide = words.to(tl.int32)
    if ELEMENT == "fp4_e2m1":
        if PART < 3:  # noqa: SIM108  (one of the two has no part to shift by)
            bits = (wide << (3 * PART)) & 0x81C0
        else:
            bits = ((wide << 1) & 0x8000) | ((wide >> 5) & 0x0100) | ((wide >> 4) & 0x00C0)
        value = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif ELEMENT == "fp8_e4m3":
        bits = wide & 0x87F0 if PART == 0 else ((wide << 4) & 0x80F0) | ((wide >> 4) & 0x0700)
        value = (bits << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif ELEMENT == "nf4" or ELEMENT == "fp4_bnb":
        value = tl.load(table + ((wide >> (4 * PART)) & 15))
    elif ELEMENT == "int4":
        value = (((wide >> (4 * PART)) & 15) - 8).to(tl.float32)
    elif ELEMENT == "uint4":
        value = ((wide >> (4 * PART)) & 15).to(tl.float32)
    elif ELEMENT == "int8":
        value = (((wide >> (8 * PART)) & 255) - 128).to(tl.float32)
    else:
        value = ((wide >> (8 * PART)) & 255).to(tl.float32)
    return value


@triton.jit
def multiplier(stored, PART: tl.constexpr, SCALE: tl.constexpr, RAISED: tl.constexpr):  # type: ignore[no-untyped-def]
    """f32: the scales of part PART of what is stored, which are one for each part or all of a block's, packed."""
    if SCALE == "packed_bf16":
        bits = ((stored >> (16 * PART)) & 0xFFFF).to(tl.int32) << 16
        # in two steps, of 2^-63 or 2^-60: a power of twice that might be flushed
        tl.static_assert(RAISED == 126 or RAISED == 120)
        step: tl.constexpr = 1.0842021724855044e-19 if RAISED == 126 else 8.673617379884035e-19
        return bits.to(tl.float32, bitcast=True) * step * step
    if SCALE == "e8m0" or SCALE == "packed_e8m0":
        byte = stored.to(tl.int32)
        if SCALE == "packed_e8m0":
            byte = (byte >> (8 * PART)) & 255
        byte -= RAISED
        return tl.where(byte <= 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        byte = stored.to(tl.int32)
        bits = ((byte & 128) << 24) | ((byte & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return stored.to(tl.float32)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    held, table, zeros, scales, PART: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RAISED: tl.constexpr,
    ZERO: tl.constexpr, FOLD: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """`decoded_parts`, of one part, by Triton's operations."""
    value = value_of(held, table, PART, ELEMENT)
    if ZERO == "integer":
        value -= tl.expand_dims(zeros[PART].to(tl.float32), -1)
    if FOLD:
        value *= multiplier(scales, PART, SCALE, RAISED)
    return value.to(tl.bfloat16 if BF16 else tl.float16)


@triton.jit
def _less(zero, held, BASE: tl.constexpr, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is added to the numbers that carry integers, for every word."""
    less = (-(tl.expand_dims(zero.to(tl.float32), -1) + BASE)).to(tl.bfloat16 if BF16 else tl.float16)
    return tl.broadcast_to(less, held.shape)


@triton.jit
def _in_pairs(  # type: ignore[no-untyped-def]
    held, zeros, scales, ASM: tl.constexpr, OPERANDS: tl.constexpr, EXTRA: tl.constexpr, PARTS: tl.constexpr,
    BASE: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """`decoded_parts` by instructions of the device's own."""
    if EXTRA == "factor":
        given = [held, tl.broadcast_to(scales, held.shape)]
    elif EXTRA == "less" and PARTS == 2:
        given = [held, _less(zeros[0], held, BASE, BF16), _less(zeros[1], held, BASE, BF16)]
    elif EXTRA == "less":
        l0, l1 = _less(zeros[0], held, BASE, BF16), _less(zeros[1], held, BASE, BF16)
        given = [held, l0, l1, _less(zeros[2], held, BASE, BF16), _less(zeros[3], held, BASE, BF16)]
    else:
        given = [held]
    # the types stand here one by one: Triton takes no tuple of them that was made elsewhere
    if PARTS == 2 and BF16:
        made = tl.inline_asm_elementwise(ASM, OPERANDS, given, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    elif PARTS == 2:
        made = tl.inline_asm_elementwise(ASM, OPERANDS, given, (tl.float16, tl.float16), is_pure=True, pack=2)
    elif BF16:
        made = tl.inline_asm_elementwise(
            ASM, OPERANDS, given, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        made = tl.inline_asm_elementwise(
            ASM, OPERANDS, given, (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )
    return made


@triton.jit
def decoded_parts(  # type: ignore[no-untyped-def]
    held,
    table,
    zeros,
    scales,
    ASM: tl.constexpr,
    OPERANDS: tl.constexpr,
    EXTRA: tl.constexpr,
    ELEMENT: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    RAISED: tl.constexpr,
    ZERO: tl.constexpr,
    BASE: tl.constexpr,
    FOLD: tl.constexpr,
    BF16: tl.constexpr,
):
    """All parts of words [..., DEPTH], in 16-bit floats of the same shape: less the zero point where that is an
    integer, times the scale where FOLD says so. `zeros` are those of a block's parts, [...] each; `scales` theirs as by
    `packed_of`."""
    if ASM != "":
        made = _in_pairs(held, zeros, scales, ASM, OPERANDS, EXTRA, PARTS, BASE, BF16)
    else:
        w0 = _part(held, table, zeros, scales, 0, ELEMENT, SCALE, RAISED, ZERO, FOLD, BF16)
        w1 = _part(held, table, zeros, scales, 1, ELEMENT, SCALE, RAISED, ZERO, FOLD, BF16)
        w2, w3 = w0, w1
        if PARTS == 4:
            w2 = _part(held, table, zeros, scales, 2, ELEMENT, SCALE, RAISED, ZERO, FOLD, BF16)
            w3 = _part(held, table, zeros, scales, 3, ELEMENT, SCALE, RAISED, ZERO, FOLD, BF16)
        made = w0, w1, w2, w3
    # one return: Triton compiles what stands behind another
    return made


@triton.jit
def packed_of(at, block, stride, inside, DEPTH: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The packed scales of a block's parts: [..., 1], or [..., DEPTH] where the halves of parts have their own."""
    if GROUP >= DEPTH:
        found = tl.expand_dims(tl.load(at + block * stride, mask=inside, other=0), -1)
    else:
        first = tl.load(at + 2 * block * stride, mask=inside, other=0)
        second = tl.load(at + (2 * block + 1) * stride, mask=inside, other=0)
        found = tl.where(tl.arange(0, DEPTH) < GROUP, tl.expand_dims(first, -1), tl.expand_dims(second, -1))
    return found


@triton.jit
def of_block(at, first, inside, K: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the parts of the block from column `first` on have, as a tuple of the shape of `at`, which points to group
    0 of a row; parts of one group share one load."""
    # a tensor beside `inside`: the interpreter takes no mask that a scalar took part in
    column = first + tl.zeros(inside.shape, dtype=tl.int32)
    p0 = tl.load(at + first // GROUP, mask=inside & (column < K), other=0)
    p1 = p0
    p2 = p0
    p3 = p0
    if GROUP % (PARTS * DEPTH) != 0:
        second = first + DEPTH
        if GROUP != 2 * DEPTH:
            p1 = tl.load(at + second // GROUP, mask=inside & (column + DEPTH < K), other=0)
        if PARTS == 4:
            third = second + DEPTH
            p2 = tl.load(at + third // GROUP, mask=inside & (column + 2 * DEPTH < K), other=0)
            p3 = p2
            if GROUP != 2 * DEPTH:
                fourth = third + DEPTH
                p3 = tl.load(at + fourth // GROUP, mask=inside & (column + 3 * DEPTH < K), other=0)
    return p0, p1, p2, p3
