"""What an engine's own loader cannot deliver to a quantized layer, from names and shapes alone.

An engine hands tensors over one by one, under names of its own making. Some names it cannot keep, some it drops
or changes, and some tensors it cuts in ways that cannot be undone. Each rule here is held against the real loader
by `tests/vllm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.models import diffusion
from omniplat.models.family import Family, has_suffix
from omniplat.models.names import is_embedding
from omniplat.packed import PackedLayer, Part
from omniplat.roworder import AS_IS

#: Engines that `--engine` knows: vLLM with vllm-omni.
ENGINES = ("vllm",)

#: Families whose loader in the engine puts the rows of tensors that are fused on disk into canonical order.
REORDERED = frozenset({"hunyuan-image-3"})

#: Families whose loader in the engine does not ask the quantization config how tensors are called: a name with a dot,
#: which no parameter can have, stays as it is. Of vllm-omni's diffusion models Qwen-Image's asks.
_FIXED_NAMES = REORDERED | {family.name for family in diffusion.FAMILIES} - {"qwen-image"}
#: Names that vLLM takes for scales of the attention and moves to another module.
_ATTENTION_SCALE = re.compile(r"\.(kv_scale|[qkv]_scale|[qkv]_zero_point)$|\.self_attn\.(q|[kv]_cache)\.scale$")
#: Tensors of one value that the reordering loaders pass on whole.
_SCALARS = (".input_scale", ".weight_scale", ".weight_scale_2")
#: Tensors of a fused QKV module that the reordering loaders put in order; they pass on the others as they are.
_REORDERED_ROLES = (".weight", ".weight_scale")
#: Modules that vllm-omni's models build without a quantization method, by family: they take 16-bit weights only.
_BUILT_PLAIN = {
    "qwen-image": (
        *("img_in", "txt_in", "img_mod.1", "norm_out.linear", "proj_out"),
        *("timestep_embedder.linear_1", "timestep_embedder.linear_2"),
    ),
    "wan": ("time_proj", "proj_out"),
}
#: The same of vLLM's models, whatever the family.
_PLAIN_GATES = ("shared_expert_gate",)
#: Stacks that vLLM's layer of experts recognises by name.
_STACKS = ("gate_up_proj", "w13")

Tensors = Mapping[str, tuple[TensorInfo, ...]]


def tensors_below(modules: Iterable[str], tensors: Iterable[TensorInfo]) -> Tensors:
    """Module -> all tensors that hang below it, those that no role explains among them."""
    found: dict[str, list[TensorInfo]] = {name: [] for name in modules}
    for info in tensors:
        head = info.name
        while head:
            head = head.rpartition(".")[0]
            if head in found:
                found[head].append(info)
                break
    return {name: tuple(infos) for name, infos in found.items()}


def undeliverable(engine: str, family: Family, layer: PackedLayer, tensors: Tensors) -> dict[str, list[str]]:
    """Reason -> modules of a quantized layer that `engine` cannot load; empty when it can load all of them.

    `tensors` comes from `tensors_below`. Raises ValueError for an engine that is none of `ENGINES`.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is none of {', '.join(ENGINES)}")
    problems: dict[str, list[str]] = {}
    for part, is_expert, is_fused in _parts(layer):
        infos = {info.name: info for info in (*part.module.tensors.values(), *tensors.get(part.module.name, ()))}
        for reason in _module_problems(family, layer, part, infos, is_expert=is_expert, is_fused=is_fused):
            names = problems.setdefault(reason, [])
            if part.module.name not in names:
                names.append(part.module.name)
    return problems


def _parts(layer: PackedLayer) -> Iterator[tuple[Part, bool, bool]]:
    """(part, whether it belongs to experts, whether it holds gate and up in one)."""
    yield from ((part, False, len(layer.spec.parts) > len(layer.parts)) for part in layer.parts)
    yield from ((part, True, len(group) == 1) for group in layer.w13 for part in group)
    yield from ((part, True, False) for group in layer.w2 for part in group)


def _module_problems(
    family: Family, layer: PackedLayer, part: Part, infos: Mapping[str, TensorInfo], *, is_expert: bool, is_fused: bool
) -> Iterator[str]:
    name = part.module.name
    leaf = name.rpartition(".")[2]
    if part.module.scheme.weight.element.startswith("gguf_"):
        yield "the tensors of a GGUF file have names of their own"
    if not is_expert and (leaf == "lm_head" or is_embedding(name)):
        yield "its vocabulary layers are no linear layers: it takes a 16-bit weight for them"
    if has_suffix(name, _BUILT_PLAIN.get(family.name, ())):
        yield f"vllm-omni builds {leaf} without a quantization method: it takes a 16-bit weight for it"
    if has_suffix(name, _PLAIN_GATES):
        yield f"its models build {leaf} without a quantization method: they take a 16-bit weight for it"
    ordered = part.row_order != AS_IS
    if ordered and family.name not in REORDERED:
        yield f"its loader is not known to keep the rows of {leaf}, which lie in an order of their own"
    if layer.stacked and is_expert and part not in layer.w2[0] and leaf not in _STACKS:
        yield f"it drops stacks of experts called {leaf}"
    roles = {info.name for info in part.module.tensors.values()}
    for info in infos.values():
        stored = info.name.removeprefix(name)
        if "." in stored.removeprefix(".") and family.name in _FIXED_NAMES:
            yield f"{stored.removeprefix('.')} has a dot in its name, which no parameter of a module can have"
        elif _ATTENTION_SCALE.search(info.name):
            if info.name not in roles:
                continue  # it is one: of the cache, which is the engine's own
            yield f"it takes {stored.removeprefix('.')} for a scale of the attention"
        elif layer.stacked:
            if stored.startswith(".") or len(info.shape) != 3:
                yield f"of stacked experts it delivers 3-D tensors only, not {leaf}{stored} {list(info.shape)}"
        elif ordered and family.name in REORDERED:
            yield from _reordered(part, info, stored, is_expert=is_expert)
        elif is_expert and is_fused and (not info.shape or info.shape[0] % 2):
            yield f"it halves every tensor of fused experts, and {stored.removeprefix('.')} has {list(info.shape)}"


def _reordered(part: Part, info: TensorInfo, stored: str, *, is_expert: bool) -> Iterator[str]:
    """A module whose rows the engine's loader puts in order: what that does to one of its tensors."""
    shape, what = list(info.shape), stored.removeprefix(".")
    if stored == ".bias" and not is_expert:
        yield "it does not put the rows of bias in order"
    elif part.row_order.kind == "halves_swapped":
        if (stored not in _SCALARS or _count(info) != 1) and (not shape or shape[0] % 2):
            yield f"it halves every tensor of {part.module.name.rpartition('.')[2]}, and {what} has {shape}"
    elif stored in _REORDERED_ROLES and _count(info) != 1 and (len(shape) != 2 or shape[0] != part.module.out_features):
        yield f"it puts the rows of {what} in order, which has {shape} and not {part.module.out_features} rows"


def _count(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    return count
