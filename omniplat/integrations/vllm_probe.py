"""Whether vLLM runs a checkpoint by itself, as it is stored: its own layers are built, without memory, and asked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import distributed
from torch.nn import Module
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from omniplat.errors import UsageError
from omniplat.integrations.vllm_defects import defect_of
from omniplat.integrations.vllm_plan import engine_device
from omniplat.models.family import Family
from omniplat.models.names import is_embedding
from omniplat.planner import PlannedLayer


@dataclass(frozen=True, slots=True)
class ModelSurface:
    """What quantization methods ask a model's configuration for, while there is no model yet."""

    hf_config: Any = None
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    quantization_config: Any = None
    enforce_eager: bool = True
    is_moe: bool = False

    @property
    def hf_text_config(self) -> Any:
        return getattr(self.hf_config, "text_config", self.hf_config)


def gap(
    layers: Iterable[PlannedLayer], family: Family, native: QuantizationConfig, surface: ModelSurface | None = None
) -> str:
    """Why vLLM does not run these layers by itself as they are stored; "" where it does.

    One layer of every kind is asked, a kind being what is stored and the module's name without its number. vLLM
    raises for what it has no kernel for. What it would leave unquantized though quantized weights are stored, or the
    other way round, is a gap too, and so is what it is known to do wrong. Raises UsageError where vLLM's layers cannot
    be built in this process.
    """
    kind = engine_device()
    parts_of = family.parts_on(kind)
    native.packed_modules_mapping = {name: list(parts) for name, parts in parts_of.items() if len(parts) > 1}
    kinds: dict[tuple[str, ...], PlannedLayer] = {}
    for item in layers:
        if not _is_vocabulary(item):
            kinds.setdefault((item.layer.op, item.layer.stored, item.layer.name.rpartition(".")[2]), item)
    with _building(surface or ModelSurface()):
        for item in kinds.values():
            try:
                layer = _build(item, native)
            except Exception as error:  # whatever it is, it is how vLLM fails for this layer
                return f"{item.layer.name}: {type(error).__name__}: {str(error).strip()}"
            is_plain = isinstance(layer.quant_method, (UnquantizedLinearMethod, UnquantizedFusedMoEMethod))
            if is_plain != item.packed.spec.scheme.is_unquantized:
                made = "leaves unquantized" if is_plain else "takes for quantized"
                return f"{item.layer.name}: vLLM {made} what is {item.packed.spec.scheme.id}"
    return defect_of(kinds.values(), kind, vllm.__version__)


def _is_vocabulary(item: PlannedLayer) -> bool:
    """Embeddings and heads, which vLLM builds as no linear layers."""
    return item.layer.name.rpartition(".")[2] == "lm_head" or is_embedding(item.layer.name)


def _build(item: PlannedLayer, native: QuantizationConfig) -> Module:
    spec = item.packed.spec
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "quant_config": native, "prefix": spec.name}
    if spec.moe is None:
        linear: Module = ColumnParallelLinear(
            spec.in_features, spec.out_features, bias=spec.bias, disable_tp=True, **options
        )
        return linear
    runner = FusedMoEFactory(
        num_experts=spec.moe.experts,
        top_k=max(spec.moe.top_k, 1),
        hidden_size=spec.in_features,
        intermediate_size=spec.moe.intermediate,
        tp_size=1,
        dp_size=1,
        pcp_size=1,
        **options,
    )
    experts: Module = runner.routed_experts
    return experts


@contextmanager
def _building(surface: ModelSurface) -> Iterator[None]:
    """vLLM's layers without memory, under a configuration of their own: their names stay out of the engine's."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        config = VllmConfig(device_config=DeviceConfig(current_platform.device_type))
        with set_current_vllm_config(config), _process_groups(), torch.device("meta"):
            config.model_config = surface
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _process_groups() -> Iterator[None]:
    """vLLM's process groups, which its parameters ask: those that are there, or groups of one for as long as needed."""
    if model_parallel_is_initialized():
        yield
        return
    if distributed.is_initialized():
        raise UsageError("torch.distributed is initialized and vLLM's groups are not: vLLM's layers cannot be built")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        init_distributed_environment(1, 0, "", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
