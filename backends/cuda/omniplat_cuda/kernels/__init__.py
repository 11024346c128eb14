"""Kernel classes of the cuda backend. They import torch; the capability tables name them as text."""
