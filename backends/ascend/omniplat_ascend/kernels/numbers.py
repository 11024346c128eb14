"""Dtypes in the numbering that torch_npu's integer arguments take."""

from __future__ import annotations

FLOAT8_E4M3 = 292
FLOAT8_E8M0 = 293
FLOAT4_E2M1 = 296
#: torch's own numbers: qint8, quint4x2.
QINT8 = 12
QUINT4X2 = 16
#: The storage format that some products want their weight in.
FRACTAL_NZ = 29
#: Formats of tensors that lie as torch lays them out: NCHW, ND, NCL.
PLAIN_FORMATS = (0, 2, 47)
