"""Copies by Hopper's engine in Gluon, under one name for every release of Triton. Imports triton."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed them, and 3.9 kept the old names for telling so when they are called
if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
