"""The codes of one checkpoint module, from how a dialect packs them to the canonical layout. Used by `unpack`.

Who writes which packing is said in `storage.py`. What the code relies on beyond that:

* Little-endian int32 words that are filled from the lowest bit are a bit stream over bytes. For 4 bits it is in the
  canonical nibble order already, for 8 bits it is one code a byte; with 3, 5, 6 and 7 bits values cross words
  (compressed-tensors, and GPTQ's 32 values of 3 bits in 3 words, are the same stream).
* Offset binary and two's complement differ in the top bit of a code only.
* auto-round packs MXINT4 as sign and magnitude (bit 3 is the sign), unlike every other 4-bit integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from omniplat.canonical import Array
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.storage import TRANSPOSED, Storage
from omniplat.scheme import Scheme, TensorQuant

FP8_DTYPES = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
WIDE_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
#: Where each column of a block of eight lies inside AWQ's word, in nibbles.
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class StoredModule:
    """What every step of unpacking needs to know. `n`, `k` are out and in features; `name` names it in errors."""

    arrays: Mapping[str, Array]
    storage: Storage
    scheme: Scheme
    n: int
    k: int
    file: str
    name: str

    @property
    def quant(self) -> TensorQuant:
        return self.scheme.weight

    @property
    def groups(self) -> int:
        """Scales along K of a row."""
        return self.k // self.quant.group_size if self.quant.granularity == "group" else 1

    @property
    def is_transposed(self) -> bool:
        """GPTQ, AWQ and Quark store [G, N]."""
        return self.storage.packing in TRANSPOSED

    def error(self, problem: str) -> InvalidCheckpointError:
        return InvalidCheckpointError(problem, file=self.file, key=self.name)

    def shape_error(self, role: str, needed: object, found: tuple[int, ...]) -> InvalidCheckpointError:
        return self.error(
            f"{role} has shape {list(found)}, needed {needed} for {self.scheme.weight_id} "
            f"of {self.n} rows and {self.k} columns, packed as {self.storage.packing}"
        )

    def get(self, role: str) -> Array:
        array = self.arrays.get(role)
        if array is None:
            raise self.error(f"tensor for {role} is missing, which {self.scheme.id} needs")
        return array


def canonical_codes(m: StoredModule) -> tuple[Array, tuple[int, ...]]:
    """Canonical codes and the leading dimensions, () or (E,)."""
    codes = m.get("codes")
    packing = m.storage.packing
    if packing == "plain":
        lead = _lead(m, codes, (m.n, m.k))
        return _plain_codes(m, codes), lead
    bits = m.quant.bits
    if bits == 4 and m.k % 2:
        raise m.error(f"{m.k} columns of 4-bit codes do not fill bytes")
    if packing == "nibbles_k":
        if codes.ndim >= 3 and codes.shape[-2:] != (m.n, m.k // 2):
            # gpt-oss keeps the groups apart: [..., G, 16]
            codes = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
        lead = _lead(m, codes, (m.n, m.k // 2), np.uint8)
        return (_SIGN_MAGNITUDE[codes] if _is_mxint(m.quant) else codes), lead
    if packing == "nibbles_k_shifted":
        _lead(m, codes, (m.n, m.k // 2), np.uint8, batched=False)
        return codes ^ np.uint8(0x88), ()
    if packing == "stream_k":
        _lead(m, codes, (m.n, m.k * bits // 8), np.uint8, batched=False)
        return unpack_bytes(codes, bits, m.k), ()
    if packing == "nibbles_n":
        _lead(m, codes, (m.n // 2, m.k), np.uint8, batched=False)
        packed = np.empty((m.n, m.k // 2), dtype=np.uint8)
        packed[0::2] = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
        packed[1::2] = (codes[:, 0::2] >> 4) | (codes[:, 1::2] & 0xF0)
        return packed, ()
    if packing == "awq_k":
        _lead(m, codes, (m.n, packed_words(m.k, bits)), np.int32, batched=False)
        unsigned = _stream_codes(in_plain_order(codes), bits, m.k)
    elif packing == "int32_k":
        words = packed_words(m.k, bits)
        _lead(m, codes, (m.n, words), np.int32, batched=False)
        unsigned = _stream_codes(codes, bits, m.k)
    elif packing == "gptq":
        _lead(m, codes, (packed_words(m.k, bits), m.n), np.int32, batched=False)
        unsigned = _stream_codes(codes.T, bits, m.k)
    else:
        _lead(m, codes, (m.k, m.n // 8), np.int32, batched=False)
        if bits != 4 or m.n % 8:
            raise m.error(f"{packing} packs 4-bit codes of a multiple of 8 rows, not {bits}-bit codes of {m.n} rows")
        nibbles = unpack_columns(codes, packing)
        unsigned = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return unsigned if m.storage.twos_complement else _from_offset(unsigned, m.quant.element, bits), ()


def _plain_codes(m: StoredModule, codes: Array) -> Array:
    element, dtype = m.quant.element, codes.dtype
    if element == "bf16":
        if dtype not in WIDE_FLOATS:
            raise m.error(f"an unquantized weight is stored as {dtype}, needed bfloat16, float16 or float32")
        return codes
    if element in FP8_DTYPES:
        fp8 = FP8_DTYPES[element]
        return codes if dtype == fp8 else _exact_cast(m, codes, fp8)
    if element in ("int8", "int8_bnb") and dtype == np.int8:
        return codes
    if m.quant.is_integer:
        bits = m.quant.bits
        signed_container = dtype == np.int8
        if not signed_container and dtype != np.uint8:
            raise m.error(f"{element} codes are stored as {dtype}, needed int8 or uint8")
        if m.quant.element.startswith("uint"):
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed_container else (0, 2**bits - 1)
        else:
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            if not signed_container:
                raise m.error(f"{element} codes are stored as uint8, needed int8")
        if bits < 8 and codes.size and (int(codes.min()) < low or int(codes.max()) > high):
            raise m.error(f"codes run from {codes.min()} to {codes.max()}, outside {element} ({low} to {high})")
        stored = codes.view(np.uint8)
        if element.startswith("uint") and signed_container:
            # compressed-tensors keeps asymmetric codes in a signed container: the zero point shifts with them
            stored = (stored ^ np.uint8(2 ** (bits - 1))) & np.uint8(2**bits - 1)
        return _pack_codes(m, stored) if bits == 4 else stored
    if element == "fp4_e2m1" and dtype != np.uint8:
        # vllm-omni's dual-level files hold the *numbers* 0, 0.5 .. 6 in an fp8 or bf16 container
        fp8 = _exact_cast(m, codes, FP8_DTYPES["fp8_e4m3"]) if dtype != FP8_DTYPES["fp8_e4m3"] else codes
        fp4 = _FP4_OF_E4M3[fp8.view(np.uint8)]
        if codes.size and int(fp4.max()) > 15:
            raise m.error("the container of fp4 values holds numbers that are not fp4")
        return _pack_codes(m, fp4)
    if dtype != np.uint8:
        raise m.error(f"{element} codes are stored as {dtype}, needed uint8")
    if codes.size and int(codes.max()) >= 2**m.quant.bits:
        raise m.error(f"codes go up to {codes.max()}, more than {m.quant.bits} bits")
    return _pack_codes(m, codes) if m.quant.bits == 4 else codes


def _pack_codes(m: StoredModule, codes: Array) -> Array:
    if m.k % 2:
        raise m.error(f"{m.k} columns of 4-bit codes do not fill bytes")
    packed: Array = (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)
    return packed


def _exact_cast(m: StoredModule, codes: Array, dtype: np.dtype[np.generic]) -> Array:
    """fp8 numbers that a file holds in a wider float, back to fp8; an error where one is not fp8."""
    if codes.dtype not in WIDE_FLOATS:
        raise m.error(f"{m.quant.element} codes are stored as {codes.dtype}, needed {dtype}")
    narrow = codes.astype(dtype)
    if not np.array_equal(narrow.astype(codes.dtype), codes):
        raise m.error(f"the {codes.dtype} container of {m.quant.element} codes holds other numbers")
    return narrow


def _is_mxint(quant: TensorQuant) -> bool:
    return quant.element == "int4" and quant.scale_format == "e8m0"


def _read_only(table: Array) -> Array:
    table.setflags(write=False)
    return table


def _sign_magnitude_table() -> Array:
    nibble = np.arange(16)
    twos = np.where(nibble < 8, nibble, -(nibble & 7)) & 15
    byte = np.arange(256)
    return _read_only((twos[byte & 15] | (twos[byte >> 4] << 4)).astype(np.uint8))


def _fp4_table() -> Array:
    """Byte of an e4m3 number -> fp4 code of the same number, 255 where there is none."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=ml_dtypes.float8_e4m3fn).view(np.uint8)
    table = np.full(256, 255, dtype=np.uint8)
    table[magnitudes] = np.arange(8)
    table[magnitudes | 0x80] = np.arange(8, 16)
    return _read_only(table)


_SIGN_MAGNITUDE = _sign_magnitude_table()
_FP4_OF_E4M3 = _fp4_table()


def packed_words(count: int, bits: int) -> int:
    """int32 words that hold `count` densely packed values."""
    return -(-count * bits // 32)


def unpack_stream(words: Array, bits: int, count: int) -> Array:
    """int32 [R, W] to one unsigned code a byte, uint8 [R, count]: value i has bits [i*bits, (i+1)*bits) of its row."""
    return unpack_bytes(np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8), bits, count)


def unpack_bytes(stream: Array, bits: int, count: int) -> Array:
    """The same from uint8 [R, B]."""
    if bits == 8:
        return stream[:, :count]
    rows, size = stream.shape
    # eight values fill `bits` bytes exactly
    units = -(-size // bits)
    if units * bits != size:
        stream = np.pad(stream, ((0, 0), (0, units * bits - size)))
    stream = stream.reshape(rows, units, bits)
    codes = np.empty((rows, units, 8), dtype=np.uint8)
    mask = np.uint8(2**bits - 1)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        value = stream[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            value = value | (stream[:, :, byte + 1] << np.uint8(8 - shift))
        codes[:, :, i] = value & mask
    return codes.reshape(rows, units * 8)[:, :count]


def _stream_codes(words: Array, bits: int, count: int) -> Array:
    """Unsigned codes in the canonical layout: for 4 bits the stream's own bytes are it."""
    if bits == 4:
        return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)[:, : count // 2]
    return unpack_stream(words, bits, count)


def unpack_columns(words: Array, packing: str) -> Array:
    """int32 [R, N/8] in AWQ's or plain order to unsigned codes, transposed: uint8 [N, R]."""
    unsigned = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((unsigned.shape[0], 8, unsigned.shape[1]), dtype=np.uint8)
    for column, nibble in enumerate(_AWQ_NIBBLE if packing == "awq" else range(8)):
        codes[:, column] = (unsigned >> np.uint32(4 * nibble)) & np.uint32(15)
    return codes.reshape(unsigned.shape[0] * 8, unsigned.shape[1])


def in_plain_order(words: Array) -> Array:
    """int32 words of eight nibbles in AWQ's order, to words with the first in the lowest bits."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    plain = np.zeros_like(unsigned)
    for column, nibble in enumerate(_AWQ_NIBBLE):
        plain |= ((unsigned >> np.uint32(4 * nibble)) & np.uint32(15)) << np.uint32(4 * column)
    return plain.view(np.int32)


def _from_offset(unsigned: Array, element: str, bits: int) -> Array:
    """Codes stored as value + 2^(bits-1) to two's complement where the element is signed."""
    if element.startswith("uint"):
        return unsigned
    offset = np.uint8(0x88 if bits == 4 else 2 ** (bits - 1))
    # in five bits and the like the borrow has to reach the top of the byte
    signed: Array = unsigned ^ offset if bits in (4, 8) else unsigned - offset
    return signed.view(np.int8) if bits == 8 else signed


def _lead(
    m: StoredModule, codes: Array, shape: tuple[int, int], dtype: type[np.generic] | None = None, batched: bool = True
) -> tuple[int, ...]:
    """Checks codes' shape and dtype; gives the dimensions before [N, K]."""
    if dtype is not None and codes.dtype != dtype:
        raise m.error(f"codes are stored as {codes.dtype}, needed {np.dtype(dtype)} for packing {m.storage.packing}")
    if codes.shape[-2:] != shape or codes.ndim < 2 or codes.ndim > (3 if batched else 2):
        raise m.shape_error("codes", list(shape), codes.shape)
    return codes.shape[:-2]
