"""What the benchmarks of the cpu backend share: timing several things in turn, and the machine they ran on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from omniplat.reference.linear import has_bf16_units, int_mm_is_exact


def times_in_turn(runs: Sequence[Callable[[], object]], calls: int, rounds: int) -> list[list[float]]:
    """Seconds per call of each of `runs`, round by round, after one call of each that is not counted."""
    with torch.inference_mode():
        for run in runs:
            run()
        return [[_seconds(run, calls) for run in runs] for _ in range(rounds)]


def machine(threads: int) -> dict[str, object]:
    """What the figures depend on beside the code."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "exact_int8_products": int_mm_is_exact(),
        "bf16_units": has_bf16_units(),
        "threads": threads,
    }


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls
