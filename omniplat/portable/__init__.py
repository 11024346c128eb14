"""Kernels in Triton that the backends of several vendors share, each beside a form in plain torch."""
