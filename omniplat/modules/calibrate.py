"""Static scales of activations, found by calling the model with inputs of the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from omniplat.errors import UsageError
from omniplat.modules.places import Place

#: The largest number of fp8 e4m3: what the largest magnitude is mapped to (llm-compressor's and vLLM's rule).
_LARGEST = 448.0


def calibrated_scales(model: object, places: Mapping[str, Place], calibration: Iterable[object]) -> dict[str, float]:
    """For each layer in `places` the largest magnitude of its input over all calls of `model`, divided by 448.

    An item of `calibration` is a mapping of keyword arguments, a tuple or list of arguments, or the one argument.
    Raises UsageError where the model cannot be called, an input is not finite, or a layer saw nothing but zeros.
    """
    if not callable(model):
        raise UsageError(f"calibration calls the model, and {type(model).__name__} cannot be called")
    largest = dict.fromkeys(places, 0.0)
    handles = [place.module.register_forward_pre_hook(_observer(name, largest)) for name, place in places.items()]
    try:
        with torch.no_grad():
            for item in calibration:
                if isinstance(item, Mapping):
                    model(**item)
                elif isinstance(item, (tuple, list)):
                    model(*item)
                else:
                    model(item)
    finally:
        for handle in handles:
            handle.remove()
    for name, magnitude in largest.items():
        if not math.isfinite(magnitude):
            raise UsageError(f"calibration: an input of {name} is not finite")
        if magnitude == 0:
            raise UsageError(f"calibration: {name} saw nothing but zeros, or was never called; give it an input_scale")
    return {name: magnitude / _LARGEST for name, magnitude in largest.items()}


def _observer(name: str, largest: dict[str, float]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def observe(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        values: torch.Tensor = arguments[0]
        if values.numel():
            found = float(values.detach().abs().max())
            # max keeps a NaN that comes first; one that comes later has to be taken
            largest[name] = found if math.isnan(found) else max(largest[name], found)

    return observe
