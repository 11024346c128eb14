"""How a weight of e2m1 codes lies in memory for the kernel that decodes it to e4m3 in registers.

Rows are cut into blocks of 128 columns: four groups, each with one shift, the number of binades that it lies below its
row's largest group. A thread of the tensor core's left operand holds columns 4q to 4q + 3 and 16 + 4q to 16 + 4q + 3
of a group (q < 4): these eight codes are a word of 32 bits, and the four words of the same q in a block lie side by
side. Within a word nibble i (from the low end) holds the magnitude of code i, and its highest bit a sign:

    nibble      7    6    5    4    3    2    1    0
    magnitude   7    6    5    4    3    2    1    0
    sign        3    7    2    6    1    5    0    4

so that one half of the nibbles selects four bytes (`omniplat_cuda.kernels.decoded_ptx`), while the signs of the codes
0 to 3 are where bytes have theirs, and those of the codes 4 to 7 four bits below.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from omniplat.portable.word_weights import code_values
from omniplat.reencoding import rule_for

GROUP = 32
#: Columns of a block, and bytes of its codes.
BLOCK = 128
_RULE = rule_for("mxfp4", "fp8-channel")
#: The largest span of a row, in binades.
MAX_BELOW = _RULE.max_span


def to_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K / 2], two a byte, the first in the low nibble, to words: bytes uint8 [N, blocks * 64].

    K is a multiple of 32; what the last block lacks is filled with code 0.
    """
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    nibbles = F.pad(nibbles, (0, -nibbles.shape[1] % BLOCK))
    # [N, block, group, half, q, i] -> [N, block, q, group, 8 codes of a word]
    words = nibbles.view(len(codes), -1, 4, 2, 4, 4).permute(0, 1, 4, 2, 3, 5).flatten(4)
    magnitude, sign = words & 7, words & 8
    low = magnitude[..., 0::2] | sign[..., 4:]
    high = magnitude[..., 1::2] | sign[..., :4]
    return (low | high << 4).flatten(1)


def to_shifts(below: torch.Tensor) -> torch.Tensor:
    """Binades uint8 [N, G] to int32 [blocks, N]: the four groups of a block in bytes, as eighths of e4m3's exponent."""
    eighths = F.pad(below * 8, (0, -below.shape[1] % 4))
    return eighths.contiguous().view(torch.int32).t().contiguous()


def to_e4m3(words: torch.Tensor, shifts: torch.Tensor, columns: int) -> torch.Tensor:
    """What the kernel multiplies: bytes of e4m3fn [N, columns]."""
    rows = len(words)
    low, high = (words & 15).view(rows, -1, 4, 4, 4), (words >> 4).view(rows, -1, 4, 4, 4)
    magnitude = torch.stack((low & 7, high & 7), dim=5).flatten(4)
    sign = torch.cat((high & 8, low & 8), dim=4)
    # [N, block, q, group, half, i] -> [N, block, group, half, q, i]
    codes = (magnitude | sign).view(rows, -1, 4, 4, 2, 4).permute(0, 1, 3, 4, 2, 5)
    below = shifts.t().contiguous().view(torch.uint8).view(rows, -1, 4) >> 3
    chosen = below[:, :, :, None].to(torch.int64) * 16 + codes.flatten(3).to(torch.int64)
    return table(words.device)[chosen].flatten(1)[:, :columns].contiguous()


@lru_cache(maxsize=16)
def table(device: torch.device) -> torch.Tensor:
    """Bytes of e4m3fn, uint8 [15 * 16]: of each code under each shift."""
    values = code_values("fp4_e2m1").to(torch.float64)
    scale = torch.exp2(_RULE.headroom - torch.arange(MAX_BELOW + 1, dtype=torch.float64))
    return (scale[:, None] * values).to(torch.float8_e4m3fn).view(torch.uint8).flatten().to(device)
