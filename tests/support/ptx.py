"""The few PTX instructions that decode, load and multiply weights, computed with numpy: what a device does with such a
text.

Only what `omniplat.portable.words_ptx`, `omniplat.portable.word_fragments_gluon` and
`omniplat_cuda.kernels.decoded_ptx` write is known; anything else is an error. A register holds what it does in every
thread: an array, whose first dimension counts the threads where a warp works together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint64]
#: Of addresses [...] the four 32-bit numbers that lie there, [..., 4].
Load = Callable[[Register], Register]
_HALVES = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
_LOOKUPS: dict[int, Callable[[Register, Register, Register], Register]] = {
    0xEA: lambda a, b, c: (a & b) | c,
    0xD8: lambda a, b, c: (a & ~c) | (b & c),
}
#: How many of the operands an instruction writes, where it is not one.
_WRITTEN = {"mov.b64": 2, "ld": 4, "mma": 4}


@dataclass(frozen=True, slots=True)
class _Instruction:
    """`read`: names of registers, and numbers."""

    guard: str
    operation: tuple[str, ...]
    written: tuple[str, ...]
    read: tuple[str | Register, ...]


@lru_cache(maxsize=256)
def _instructions(text: str) -> tuple[_Instruction, ...]:
    found = []
    for line in text.split(";"):
        words = re.sub(r"[{}\[\],]", " ", line).split()
        guard = words.pop(0).removeprefix("@") if words and words[0].startswith("@") else ""
        if not words or words[0] == ".reg":
            continue
        name, *operands = words
        count = _WRITTEN.get(name, _WRITTEN.get(name.partition(".")[0], 1))
        read = (np.asarray(int(word, 0), np.uint64) if word[0].isdigit() else word for word in operands[count:])
        found.append(_Instruction(guard, tuple(name.split(".")), tuple(operands[:count]), tuple(read)))
    return tuple(found)


@lru_cache(maxsize=256)
def reads_after_writes(text: str, outputs: int) -> bool:
    """True where an input is read behind an instruction that wrote one of the first `outputs` registers, so that those
    may not be the inputs' own: their constraint is "=&r"."""
    written = False
    for instruction in _instructions(text):
        names = [name for name in instruction.read if isinstance(name, str) and name.startswith("$")]
        if written and any(int(name[1:]) >= outputs for name in names):
            return True
        written = written or any(name.startswith("$") for name in instruction.written)
    return False


def evaluated(
    text: str, outputs: int, inputs: Sequence[Register], load: Load | None = None
) -> list[NDArray[np.uint32]]:
    """Registers `$0` to `$outputs - 1` of the text, for inputs of 32 or 64 bits in the registers after them. `load`:
    the memory, where the text reads some."""
    held: dict[str, Register] = {f"${outputs + i}": register.astype(np.uint64) for i, register in enumerate(inputs)}

    for instruction in _instructions(text):
        sources = [held[name] if isinstance(name, str) else name for name in instruction.read]
        match instruction.operation:
            case ("mov", "b64"):
                made = [sources[0], sources[0] >> np.uint64(32)]
            case ("ld", "global", "nc", *_, "v4", "b32") if load is not None:
                if instruction.guard:
                    _load_where(held, instruction, sources[0], load)
                    continue
                made = list(np.moveaxis(load(sources[0]), -1, 0))
            case ("mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", kind, same, "f32") if kind == same:
                made = _warps_multiplied(kind, sources)
            case operation:
                made = [_computed(operation, sources)]
        if instruction.guard:
            raise NotImplementedError(f"guarded {instruction.operation}")
        for name, register in zip(instruction.written, made, strict=True):
            held[name] = register & np.uint64(0xFFFFFFFF)
    return [np.asarray(held[f"${i}"]).astype(np.uint32) for i in range(outputs)]


def _load_where(held: dict[str, Register], instruction: _Instruction, addresses: Register, load: Load) -> None:
    """Threads whose predicate is false read nothing, and keep what they had."""
    inside = np.broadcast_to(held[instruction.guard] != 0, addresses.shape)
    found = load(addresses[inside])
    for i, name in enumerate(instruction.written):
        register = np.broadcast_to(held[name], addresses.shape).copy()
        register[inside] = found[:, i]
        held[name] = register


def _computed(operation: tuple[str, ...], sources: list[Register]) -> Register:
    match operation:
        case ("mov", "b32"):
            return sources[0]
        case ("and", "b32"):
            return sources[0] & sources[1]
        case ("or", "b32"):
            return sources[0] | sources[1]
        case ("xor", "b32"):
            return sources[0] ^ sources[1]
        case ("shl", "b32"):
            return sources[0] << sources[1]
        case ("shr", "u32"):
            return sources[0] >> sources[1]
        case ("setp", "ne", "s32"):
            return np.asarray(sources[0] != sources[1], np.uint64)
        case ("setp", "eq", "u32"):
            return np.asarray(sources[0] == sources[1], np.uint64)
        case ("selp", "b32"):
            return np.where(sources[2] == 1, sources[0], sources[1])
        case ("lop3", "b32"):
            return _LOOKUPS[int(sources[3])](*sources[:3])
        case ("mad", "lo", "u32"):
            return sources[0] * sources[1] + sources[2]
        case ("prmt", "b32"):
            return _permuted(*sources)
        case ("fma", "rn", kind):
            return _multiplied(kind, sources)
    raise NotImplementedError(".".join(operation))


def _permuted(a: Register, b: Register, selector: Register) -> Register:
    """Byte i of the result is the one of `a` (0 to 3) and `b` (4 to 7) that nibble i selects, or its sign's."""
    both = a | (b << np.uint64(32))
    eight = both[..., None].view(np.uint8)
    nibbles = ((selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint64)) & np.uint64(15)).astype(np.int64)
    if selector.ndim:
        eight = np.broadcast_to(eight, (*np.broadcast_shapes(both.shape, selector.shape), 8))
        picked = np.take_along_axis(eight, nibbles & 7, -1)
    else:
        picked = eight[..., nibbles & 7]
    signs = np.where(picked >= 128, np.uint8(255), np.uint8(0))
    found = np.where(nibbles >= 8, signs, picked)
    return np.ascontiguousarray(found).view(np.uint32)[..., 0].astype(np.uint64)


def _halves(kind: str, register: Register) -> NDArray[np.float64]:
    """The two 16-bit floats of a register, the lower one first: [..., 2]."""
    return register.astype(np.uint32)[..., None].view(_HALVES[kind]).astype(np.float64)


def _multiplied(kind: str, sources: list[Register]) -> Register:
    a, b, c = (_halves(kind, source) for source in sources)
    return (a * b + c).astype(_HALVES[kind]).view(np.uint32)[..., 0].astype(np.uint64)


def _warps_multiplied(kind: str, sources: list[Register]) -> list[Register]:
    """D = A B + C of each warp, [16, 8] = [16, 16] [16, 8] + [16, 8], as PTX's manual lays the matrices of
    `mma.m16n8k16` out: thread 4g + t has

    * of A in four registers columns 2t, 2t + 1 of rows g and g + 8, then columns 2t + 8, 2t + 9 of both,
    * of B in two registers rows 2t, 2t + 1 of column g, then rows 2t + 8, 2t + 9,
    * of C and of D in four registers columns 2t and 2t + 1 of row g, then of row g + 8.

    A device adds up in an order of its own; here a sum is rounded once.
    """
    shape = np.broadcast_shapes(*(source.shape for source in sources))
    whole = np.stack([np.broadcast_to(source, shape) for source in sources])
    # what one warp multiplies after the other comes last
    warps = shape[0] // 32
    halves = _halves(kind, whole[:6]).reshape(6, warps, 8, 4, -1, 2)
    a = halves[:4].reshape(2, 2, *halves.shape[1:])
    # (later columns, lower rows, warp, g, t, which, pair)
    a = a.transpose(2, 5, 1, 3, 0, 4, 6).reshape(warps, -1, 16, 16)
    # (later rows, warp, g, t, which, pair)
    b = halves[4:].transpose(1, 4, 0, 3, 5, 2).reshape(warps, -1, 16, 8)
    # (warp, which, lower rows, g, t, pair)
    products = (a @ b).reshape(warps, -1, 2, 8, 4, 2).transpose(2, 5, 0, 3, 4, 1).reshape(4, *shape)
    sums = products + whole[6:].astype(np.uint32).view(np.float32)
    return list(sums.astype(np.float32).view(np.uint32).astype(np.uint64))
