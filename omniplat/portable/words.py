"""How weight-only kernels hold codes: words of 16 bits, each with codes of columns that lie far apart.

A row is cut into blocks of `parts * DEPTH` columns, where `parts` is 16 over the bits of a code: 4 or 2. Word c of
a block (c < DEPTH) holds the codes of columns c, DEPTH + c, 2 * DEPTH + c, ... from its low bits upwards. Part j of a
block's words, all shifted alike, is then a tile of DEPTH consecutive columns, and those share a scale in every scheme
whose groups are multiples of DEPTH. The last block is filled up with code 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Columns of one part: the group of MX schemes. NVFP4's is half of it.
DEPTH = 32


def parts_of(bits: int) -> int:
    """Codes in a word, for codes of 4 or 8 bits."""
    return 16 // bits


def to_words(codes: torch.Tensor, bits: int, depth: int) -> torch.Tensor:
    """Codes uint8 [N, K], one a byte (of 4 or 8 bits), to words int16 [N, blocks * depth]."""
    parts = parts_of(bits)
    padded = F.pad(codes, (0, -codes.shape[1] % (parts * depth)))
    blocks = padded.view(len(codes), -1, parts, depth).to(torch.int32)
    words: torch.Tensor = blocks[:, :, 0]
    for part in range(1, parts):
        words = torch.bitwise_or(words, blocks[:, :, part] << (bits * part))
    # the upper half of the 16-bit numbers are the negative ones
    return torch.where(words.ge(1 << 15), words.sub(1 << 16), words).to(torch.int16).flatten(1)


def from_words(words: torch.Tensor, bits: int, depth: int, columns: int) -> torch.Tensor:
    """The inverse of `to_words`: uint8 [N, columns], one code a byte."""
    blocks = words.view(len(words), -1, 1, depth).to(torch.int32)
    shifts = torch.arange(parts_of(bits), device=words.device, dtype=torch.int32).view(1, 1, -1, 1) * bits
    codes = torch.bitwise_and(blocks >> shifts, 2**bits - 1)
    return codes.flatten(1)[:, :columns].to(torch.uint8)
