"""Schemes of every element that the cpu backend runs, in vLLM's layers: the numbers of omniplat's own, bit for bit.

Most have no dialect that vLLM's loader could be given a real checkpoint of, so the files are the conformance suite's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear

from omniplat.capability import Capability
from omniplat.conformance.canonical_file import plan_canonical, write_canonical
from omniplat.conformance.model import Sizes, dense_modules, model_config
from omniplat.conformance.subject import find_subject
from omniplat.integrations.vllm import OmniplatLinearMethod
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.scheme import Scheme
from tests.vllm.checks import Check, inputs, linears, run_planned_experts, standalone
from tests.vllm.engine import Attention, Mlp, engine, load

#: Sizes that two ranks can share in whole groups and blocks of every scheme below.
SIZES = Sizes(hidden=512, inner=1024, heads=8, kv_heads=4, head_dim=128)
LINEAR = (
    *("mxfp8/mxfp8", "mxfp8/a16", "mxfp4/mxfp4", "mxfp4-dual/mxfp4-dual", "mxfp6e2m3/a16", "mxfp6e3m2/a16"),
    *("mxint8/a16", "mxint4/a16", "nvfp4/nvfp4", "nvfp4-g32/a16", "nf4-b64/a16", "fp4bnb-b64/a16"),
    *("fp8-tensor/fp8-tensor", "fp8-channel/fp8-token", "fp8e5m2-channel/a16", "fp8-g128/a16"),
    *("int8-channel/int8-token", "int8-g64/a16", "int4-g128/a16", "uint4-g64/a16", "uint8-g32/a16"),
    *("int2-g64/a16", "int3-g64/a16", "int5-channel/a16", "int6-g64/a16", "int7-channel/a16", "uint3-g64/a16"),
    *("fp8-block128x128/fp8-g128", "int8-bnb/int8-bnb", "svdq-int4-g64/svdq-int4"),
)
EXPERTS = (
    *("mxfp8/mxfp8", "mxfp4/mxfp4", "nvfp4/nvfp4", "fp8-channel/fp8-token", "int8-channel/int8-token"),
    *("int4-g128/a16", "uint4-g64/a16", "nf4-b64/a16", "mxfp6e2m3/a16", "fp8-block128x128/fp8-g128"),
)


class Layer(nn.Module):
    """One decoder layer, of vLLM's fused modules, under the names that checkpoints give it."""

    def __init__(self, quant: OmniplatConfig) -> None:
        super().__init__()
        config = {**model_config(SIZES, "bfloat16"), "intermediate_size": SIZES.inner}
        layer = nn.Module()
        layer.self_attn = Attention(config, quant, "model.layers.0.self_attn", fused=True)
        layer.mlp = Mlp(config, quant, "model.layers.0.mlp", down=True)
        self.quant_config = quant
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])


def every_linear(scheme_id: str, rank: int, world: int, scratch: Path) -> None:
    scheme = Scheme.parse(scheme_id)
    written = write_canonical(scratch / f"{scheme_id.replace('/', '-')}-{world}-{rank}", scheme, SIZES)
    spec = LayerSpec("layer", "linear", SIZES.hidden, SIZES.hidden, scheme)
    planned = plan_canonical(written, find_subject("cpu"), _capability(spec))
    with engine(world), torch.no_grad():
        model = Layer(OmniplatConfig(planned))
        load(model, written.folder)
        found = list(linears(model))
        assert len(found) == 4
        for module in found:
            assert isinstance(module.quant_method, OmniplatLinearMethod), module.prefix
            alone = standalone(planned, module, rank, world)
            for x in inputs(alone[0].spec.in_features, rank):
                y, _ = module(x)
                expected = torch.cat([part(x) for part in alone], dim=-1)
                if isinstance(module, RowParallelLinear) and world > 1:
                    expected = tensor_model_parallel_all_reduce(expected)
                assert y.float().abs().max() > 0
                assert torch.equal(y, expected), module.prefix


def every_expert(scheme_id: str, rank: int, world: int, scratch: Path) -> None:
    scheme = Scheme.parse(scheme_id)
    sizes = replace(SIZES, experts=4)
    dense = dict.fromkeys(dense_modules(sizes), Scheme.parse("bf16/a16"))
    folder = scratch / f"experts-{scheme_id.replace('/', '-')}-{world}-{rank}"
    written = write_canonical(folder, scheme, sizes, exceptions=dense)
    spec = LayerSpec("layer", "moe", sizes.hidden, sizes.hidden, scheme, moe=MoeSpec(sizes.experts, sizes.inner))
    planned = plan_canonical(written, find_subject("cpu"), _capability(spec))
    config = {
        **model_config(sizes, "bfloat16"),
        "num_local_experts": sizes.experts,
        "moe_intermediate_size": sizes.inner,
    }
    run_planned_experts(planned, written.folder, config, False, rank, world)


def _capability(spec: LayerSpec) -> Capability:
    subject = find_subject("cpu")
    return next(item for item in subject.spec.capabilities if not subject.decide(item, spec))


CHECKS: dict[str, Check] = {
    **{f"linear {scheme}": partial(every_linear, scheme) for scheme in LINEAR},
    **{f"experts {scheme}": partial(every_expert, scheme) for scheme in EXPERTS},
}
