"""What the PTX that decodes words computes, for every word there is: without a device, by `tests.support.ptx`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omniplat.portable.word_weights import code_values
from omniplat.portable.words import TABLES, from_words, parts_of
from omniplat.portable.words_ptx import base_of, decoder, place_of_zero
from tests.support.ptx import evaluated, reads_after_writes

BITS = {"fp4_e2m1": 4, "fp8_e4m3": 8, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "nf4": 4, "fp4_bnb": 4}
HALF = {True: ml_dtypes.bfloat16, False: np.float16}
WORDS = np.arange(1 << 16, dtype=np.uint64)
OTHERS = np.random.default_rng(0).permutation(WORDS)


def decoded(element: str, bf16: bool, zero: bool, scale: str, *extra: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[word, parts]: what is made of every word in the lower half of a register, with another in the upper."""
    made = decoder(element, BITS[element], bf16, zero, scale)
    assert made is not None
    constraints = made.constraints.split(",")
    assert len(constraints) == parts_of(BITS[element]) + 1 + len(extra)
    # parts may lie in registers of inputs that are still to be read, unless "&" forbids it
    assert not reads_after_writes(made.text, parts_of(BITS[element])) or all("&" in c for c in constraints if "=" in c)
    parts = evaluated(made.text, parts_of(BITS[element]), [WORDS | (OTHERS << np.uint64(16)), *extra])
    lower, upper = (
        np.stack([((part >> shift) & 0xFFFF).astype(np.uint16).view(HALF[bf16]) for part in parts], 1)
        for shift in (0, 16)
    )
    # both halves are decoded alike
    if not extra:
        np.testing.assert_array_equal(upper.view(np.uint16), lower.view(np.uint16)[OTHERS.astype(np.int64)])
    return lower.astype(np.float64)


@pytest.mark.parametrize("element", sorted(TABLES))
def test_numbers_of_tables_come_from_registers(element: str) -> None:
    """As they do where they are constants; a kernel makes them of the table's zero, which has no bits."""
    alone, given = (decoder(element, 4, True, False, "", held=held) for held in (False, True))
    assert alone is not None
    assert given is not None
    assert len(given.held) == given.constraints.count(",r") - 1 == 4
    extra = [np.full_like(WORDS, number & 0xFFFFFFFF) for number in given.held]
    for found, wanted in zip(evaluated(given.text, 4, [WORDS, *extra]), evaluated(alone.text, 4, [WORDS]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    held_table = code_values(element)[list(TABLES[element])]
    assert held_table[place_of_zero(element)].view(torch.int32) == 0


def values(element: str) -> NDArray[np.float64]:
    """[word, parts]: what the words stand for."""
    words = torch.arange(1 << 16).to(torch.int16).view(-1, 1)
    codes = from_words(words, element, BITS[element], 1, parts_of(BITS[element]))
    return code_values(element)[codes.to(torch.int64)].to(torch.float64).numpy()


def wanted(element: str, bf16: bool) -> NDArray[np.float64]:
    found = values(element)
    return found.astype(np.float32).astype(HALF[bf16]).astype(np.float64)


@pytest.mark.parametrize(
    ("element", "bf16"),
    [(element, bf16) for element in BITS for bf16 in (True, False) if decoder(element, BITS[element], bf16, False, "")],
)
def test_every_word_is_decoded(element: str, bf16: bool) -> None:
    number = wanted(element, bf16)
    finite = np.isfinite(number)
    np.testing.assert_array_equal(decoded(element, bf16, False, "")[finite], number[finite])


@pytest.mark.parametrize(
    ("element", "bf16"),
    [("int4", True), ("uint4", True), ("uint4", False), ("uint8", False), ("uint8", True), ("int8", True)],
)
def test_zero_points_are_subtracted(element: str, bf16: bool) -> None:
    zeros = np.array([1, 127 if element == "int8" else 255] if BITS[element] == 8 else [1, 4, 7, 15])
    less = [
        np.uint64(np.asarray(-(zero + base_of(element, bf16)), HALF[bf16]).view(np.uint16)) * np.uint64(0x10001)
        for zero in zeros
    ]
    found = decoded(element, bf16, True, "", *(np.full_like(WORDS, pair) for pair in less))
    np.testing.assert_array_equal(found, values(element) - zeros)


@pytest.mark.parametrize(
    ("element", "scale"), [("fp4_e2m1", "packed_e8m0"), ("fp4_e2m1", "packed_bf16"), ("fp8_e4m3", "packed_bf16")]
)
def test_scales_are_multiplied(element: str, scale: str) -> None:
    """Scales of the two words differ: those of the upper half belong to the other word."""
    parts = parts_of(BITS[element])
    raised = {"fp4_e2m1": 126, "fp8_e4m3": 120}[element]
    exponents = np.array([[0, -3, -7, 1], [-1, -2, 0, -20]])[:, :parts]
    stored = exponents + 127 + raised
    width = 8 if scale == "packed_e8m0" else 16
    numbers = stored if width == 8 else stored << 7
    packed = [np.uint64(sum(int(number) << (width * part) for part, number in enumerate(row))) for row in numbers]
    found = decoded(element, True, False, scale, *(np.full_like(WORDS, number) for number in packed))
    number = values(element) * np.exp2(exponents[0])
    finite = np.isfinite(number)
    np.testing.assert_array_equal(found[finite], number[finite])


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_fragments_are_multiplied(kind: str, dtype: type) -> None:
    """Two warps that multiply three matrices each; element i of a fragment is where PTX's manual says that it is."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 9, (2, 3, *shape)).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    registers = np.zeros((10, 64, 3), np.uint32)
    for warp, which, lane in np.ndindex(2, 3, 32):
        group, thread = lane // 4, lane % 4
        rows = [group if i < 2 or 4 <= i < 6 else group + 8 for i in range(8)]
        columns = [2 * thread + (i & 1) + (0 if i < 4 else 8) for i in range(8)]
        depths = [2 * thread + (i & 1) + (0 if i < 2 else 8) for i in range(4)]
        held = registers[:, 32 * warp + lane, which]
        held[:4] = a[warp, which, rows, columns].astype(dtype).view(np.uint32)
        held[4:6] = b[warp, which, depths, group].astype(dtype).view(np.uint32)
        held[6:] = [c[warp, which, group + i // 2 * 8, 2 * thread + i % 2].view(np.uint32) for i in range(4)]
    text = "mma.sync.aligned.m16n8k16.row.col.f32." + kind + "." + kind + ".f32 "
    text += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    found = np.stack(evaluated(text, 4, list(registers))).view(np.float32)
    wanted = a @ b + c
    for warp, which, lane, i in np.ndindex(2, 3, 32, 4):
        number = wanted[warp, which, lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2]
        assert found[i, 32 * warp + lane, which] == number
