"""Kernel classes of the rocm backend. They import torch, and AITER once they run; `spec.py` names them as text."""
