"""Who runs a diffusion checkpoint, vllm-omni or omniplat: what `vllm_claim` tells of language models."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from vllm_omni.quantization import build_quant_config

from omniplat.errors import UsageError
from omniplat.integrations.dispatch import ALL, METHOD, OFF
from omniplat.integrations.vllm_claim import Verdict, problem_of
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_native import Native
from omniplat.integrations.vllm_omni_gap import native_gap, quantized_components
from omniplat.integrations.vllm_omni_modelopt import AskingConfig
from omniplat.integrations.vllm_plan import plan_for_engine
from omniplat.models import omni
from omniplat.models.advice import is_diffusion
from omniplat.models.family import identifiers_of


def judge_diffusion(checkpoint: str, mode: str) -> Verdict:
    """As `vllm_claim.judge`, of a checkpoint of vllm-omni in one of the modes of `dispatch`.

    Raises OmniplatError where the checkpoint cannot be read, UsageError where nothing of it is quantized and where it
    is no diffusion model.
    """
    planned = plan_for_engine(checkpoint)
    components = quantized_components(planned)
    if not components:
        raise UsageError(f"nothing of {checkpoint} is quantized: vllm-omni takes it for unquantized")
    if not any(_is_known(item.component.config) for item in planned.resolutions):
        raise UsageError(f"vllm-omni knows no diffusion model in {checkpoint}")
    if mode == OFF:
        return Verdict(False, asked=False)
    problem = next(filter(None, (problem_of(planned, name) for name in components)), "")
    by_name = {item.component.name: item.component.config for item in planned.resolutions}
    found = [_stock(by_name[name].get("quantization_config")) for name in components]
    if not problem and not all(item.hooked for item in found):
        problem = "vllm-omni does not ask omniplat about it: its builders are not registered there"
    methods = ", ".join(dict.fromkeys(item.native.method for item in found if item.native.method))
    if mode == ALL and not problem:
        return Verdict(True, methods, asked=False)
    for name, item in zip(components, found, strict=True):
        native_problem = item.native.problem
        if item.native.config is not None:
            native_problem = native_gap(planned, (name,), item.native.config)
        if native_problem:
            return Verdict(True, methods, native_problem, problem)
    return Verdict(False, methods, "", problem)


def _is_known(config: Mapping[str, Any]) -> bool:
    """True for the models of vllm-omni: transformers of images and video, alone or inside a language model."""
    known = {name for family in omni.FAMILIES for name in family.identifiers}
    return is_diffusion(config) or not known.isdisjoint(identifiers_of(config))


@dataclass(frozen=True, slots=True)
class _Stock:
    """vllm-omni's own config for some metadata; `hooked` where omniplat is asked about it too."""

    native: Native
    hooked: bool


def _stock(metadata: Mapping[str, Any] | None) -> _Stock:
    """Of a component without metadata in its `config.json`, vllm-omni has to be told a method."""
    method = str((metadata or {}).get("quant_method", ""))
    try:
        made = build_quant_config(METHOD if metadata is None else deepcopy(dict(metadata)))
    except Exception as error:  # whatever it is, it is how vllm-omni fails for this checkpoint
        return _Stock(Native(method, None, f"{type(error).__name__}: {error}"), hooked=False)
    if isinstance(made, AskingConfig):
        return _Stock(Native(method, made.stock_config()), hooked=True)
    if isinstance(made, OmniplatConfig):
        return _Stock(Native(method, made.native, made.native_problem), hooked=True)
    return _Stock(Native(method, made), hooked=False)
