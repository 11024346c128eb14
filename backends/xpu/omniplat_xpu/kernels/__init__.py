"""Kernel classes of the xpu backend. They import torch; `spec.py` names them as text."""
