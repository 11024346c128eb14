"""How weight-only kernels hold codes: words of 16 bits, each with codes of columns that lie far apart.

A row is cut into blocks of `parts * depth` columns, where `parts` is 16 over the bits of a code: 4 or 2. Word c of
a block (c < depth) holds the codes of columns c, depth + c, 2 * depth + c, ... Part j of a block's words, all decoded
alike, is then a tile of `depth` consecutive columns. The last block is filled up with code 0.

Where a word holds the bits of a code is a table: floats lie where few operations make 16-bit floats of them. Codes that
are no numbers are held in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Columns of one part: the group of MX schemes. NVFP4's is half of it.
DEPTH = 32

#: Elements whose codes are no numbers, and the code that each number held stands for: those of h and h + 8 have one
#: sign, zero having any, and exponents that are both even or both odd. See `_table` of `omniplat.portable.words_ptx`.
TABLES = {
    "nf4": (0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14),
    "fp4_bnb": (0, 5, 1, 4, 8, 13, 9, 12, 2, 6, 3, 7, 10, 14, 11, 15),
}

#: Bits of a code, as a mask, and how far to the left of their place in the code they lie in the word.
Moves = tuple[tuple[int, int], ...]

#: element -> moves of each part. A mask of bits 15 and 6 to 8 (after a shift) leaves an e2m1's sign and magnitude where
#: bf16 has them, one of bits 15 and 4 to 10 an e4m3's: for all parts but the last, which takes the bits that are left.
_FLOATS: dict[str, tuple[Moves, ...]] = {
    "fp4_e2m1": (
        ((0x8, 12), (0x7, 6)),
        ((0x8, 9), (0x7, 3)),
        ((0x8, 6), (0x7, 0)),
        ((0x8, 11), (0x4, 11), (0x3, 10)),
    ),
    "fp8_e4m3": (
        ((0x80, 8), (0x7F, 4)),
        ((0x80, 4), (0x70, 8), (0x0F, 0)),
    ),
}


def parts_of(bits: int) -> int:
    """Codes in a word, for codes of 4 or 8 bits."""
    return 16 // bits


def moves_of(element: str, bits: int) -> tuple[Moves, ...]:
    """Where each part's code lies in a word: side by side from the low bits upwards, but for floats."""
    return _FLOATS.get(element) or tuple(((2**bits - 1, bits * part),) for part in range(parts_of(bits)))


def to_words(codes: torch.Tensor, element: str, bits: int, depth: int) -> torch.Tensor:
    """Codes uint8 [N, K], one a byte (of 4 or 8 bits), to words int16 [N, blocks * depth]."""
    parts = parts_of(bits)
    if element in TABLES:
        order = torch.tensor(TABLES[element], device=codes.device)
        codes = order.argsort().to(torch.uint8)[codes.to(torch.int64)]
    padded = F.pad(codes, (0, -codes.shape[1] % (parts * depth)))
    blocks = padded.view(len(codes), -1, parts, depth).to(torch.int32)
    words = torch.zeros_like(blocks[:, :, 0])
    for part, moves in enumerate(moves_of(element, bits)):
        for mask, left in moves:
            words |= (blocks[:, :, part] & mask) << left
    # the upper half of the 16-bit numbers are the negative ones
    return torch.where(words.ge(1 << 15), words.sub(1 << 16), words).to(torch.int16).flatten(1)


def from_words(words: torch.Tensor, element: str, bits: int, depth: int, columns: int) -> torch.Tensor:
    """The inverse of `to_words`: uint8 [N, columns], one code a byte."""
    blocks = words.view(len(words), -1, depth).to(torch.int32)
    codes = torch.zeros((*blocks.shape[:2], parts_of(bits), depth), dtype=torch.int32, device=words.device)
    for part, moves in enumerate(moves_of(element, bits)):
        for mask, left in moves:
            codes[:, :, part] |= (blocks >> left) & mask
    codes = codes.flatten(1)[:, :columns]
    if element in TABLES:
        codes = torch.tensor(TABLES[element], device=words.device)[codes.to(torch.int64)]
    return codes.to(torch.uint8)
