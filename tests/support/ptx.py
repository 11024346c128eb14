"""The few PTX instructions that decode weights, computed with numpy: what a device does with such a text.

Only what `omniplat.portable.words_ptx` and `omniplat_cuda.kernels.decoded_ptx` write is known; anything else is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint64]
_HALVES = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
_LOOKUPS: dict[int, Callable[[Register, Register, Register], Register]] = {
    0xEA: lambda a, b, c: (a & b) | c,
    0xD8: lambda a, b, c: (a & ~c) | (b & c),
}


def evaluated(text: str, outputs: int, inputs: Sequence[Register]) -> list[NDArray[np.uint32]]:
    """Registers `$0` to `$outputs - 1` of the text, for inputs of 32 or 64 bits in the registers after them."""
    held: dict[str, Register] = {f"${outputs + i}": register.astype(np.uint64) for i, register in enumerate(inputs)}

    def value(name: str) -> Register:
        return np.asarray(int(name, 0), np.uint64) if re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", name) else held[name]

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        words = line.replace("{", "").replace("}", "").replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        operation, *operands = words
        if operation == "mov.b64":
            low, high, source = operands
            held[low], held[high] = value(source) & 0xFFFFFFFF, value(source) >> np.uint64(32)
            continue
        to, *sources = operands
        held[to] = _computed(operation, [value(source) for source in sources]) & np.uint64(0xFFFFFFFF)
    return [np.asarray(held[f"${i}"]).astype(np.uint32) for i in range(outputs)]


def _computed(operation: str, sources: list[Register]) -> Register:
    match operation.split("."):
        case ["mov", "b32"]:
            return sources[0]
        case ["and", "b32"]:
            return sources[0] & sources[1]
        case ["or", "b32"]:
            return sources[0] | sources[1]
        case ["xor", "b32"]:
            return sources[0] ^ sources[1]
        case ["shl", "b32"]:
            return sources[0] << sources[1]
        case ["shr", "u32"]:
            return sources[0] >> sources[1]
        case ["lop3", "b32"]:
            return _LOOKUPS[int(sources[3])](*sources[:3])
        case ["mad", "lo", "u32"]:
            return sources[0] * sources[1] + sources[2]
        case ["setp", "eq", "u32"]:
            return np.asarray(sources[0] == sources[1], np.uint64)
        case ["selp", "b32"]:
            return np.where(sources[2] == 1, sources[0], sources[1])
        case ["prmt", "b32"]:
            return _permuted(*sources)
        case ["fma", "rn", kind]:
            return _multiplied(kind, sources)
    raise NotImplementedError(operation)


def _permuted(a: Register, b: Register, selector: Register) -> Register:
    """Byte i of the result is the one of `a` (0 to 3) and `b` (4 to 7) that nibble i selects, or its sign's."""
    both = a | (b << np.uint64(32))
    found = np.zeros(np.broadcast_shapes(np.shape(both), np.shape(selector)), np.uint64)
    for i in range(4):
        nibble = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        found = found | (np.where(nibble >= 8, signs, byte) << np.uint64(8 * i))
    return found


def _multiplied(kind: str, sources: list[Register]) -> Register:
    dtype = _HALVES[kind]
    halves = []
    for shift in (0, 16):
        a, b, c = (
            ((source >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.uint16).view(dtype).astype(np.float64)
            for source in sources
        )
        halves.append((a * b + c).astype(dtype).view(np.uint16).astype(np.uint64))
    return halves[0] | (halves[1] << np.uint64(16))
