"""The executable specification: what every scheme means, in NumPy and float64. Imports no torch."""

from omniplat.oracle.codecs import (
    decode_codes,
    e8m0_from_exponent,
    e8m0_to_float64,
    element_max,
    element_values,
    encode,
    pack_nibbles,
    round_to_element,
    unpack_nibbles,
)
from omniplat.oracle.dequantize import dequantize
from omniplat.oracle.linear import linear
from omniplat.oracle.quantize import quantize_activation, quantize_weight
from omniplat.oracle.scales import e8m0_exponent

__all__ = [
    "decode_codes",
    "dequantize",
    "e8m0_exponent",
    "e8m0_from_exponent",
    "e8m0_to_float64",
    "element_max",
    "element_values",
    "encode",
    "linear",
    "pack_nibbles",
    "quantize_activation",
    "quantize_weight",
    "round_to_element",
    "unpack_nibbles",
]
