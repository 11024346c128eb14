"""The executable specification: what every scheme means, in NumPy and float64. Imports no torch."""

from omniplat.oracle.dequantize import dequantize

__all__ = ["dequantize"]
