"""Packing: from resolved checkpoint modules to runtime layers.

Fused layers are derived from what their parts resolved to, never matched against rules themselves. Parts of
different schemes stay apart (q, k, v; gate, up); experts of different schemes make the layer invalid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from omniplat.canonical import TRANSFORM_ROLES
from omniplat.checkpoint.folder import MAX_SMOOTHING_BYTES
from omniplat.checkpoint.tensors import FLOAT_DTYPES
from omniplat.findings import Finding, finding
from omniplat.formats.resolve import Resolution
from omniplat.formats.resolved import ResolvedModule
from omniplat.layer import LayerSpec
from omniplat.models.builtin import UNKNOWN
from omniplat.models.family import (
    Attention,
    ExpertNames,
    Family,
    Router,
    Scope,
    StackedNames,
    attention_of,
    has_suffix,
    identifiers_of,
    scope_of,
    scoped_attention,
)
from omniplat.models.moe import expert_count, moe_spec, router_of
from omniplat.models.names import EXPERT
from omniplat.moe_block import MoeBlock, block_of
from omniplat.packed import PackedLayer, Part, Split
from omniplat.roworder import AS_IS, RowOrder

_DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class Packed:
    """Runtime layers of one component, in name order. `invalid` maps layer names to what is wrong with them."""

    layers: tuple[PackedLayer, ...]
    family: Family
    heads: HeadCounts
    findings: tuple[Finding, ...]
    invalid: Mapping[str, str]


class HeadCounts:
    """Head counts of each part of a component: towers and talkers have their own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._known: dict[Scope | None, Attention] = {None: attention_of(config)}

    def of(self, name: str) -> Attention:
        """Those of the part that a module lies in; all 0 where its configuration does not tell."""
        scope = scope_of(name)
        if scope not in self._known:
            assert scope is not None
            self._known[scope] = scoped_attention(self._config, scope)
        return self._known[scope]


def family_of(config: Mapping[str, Any], families: Sequence[Family]) -> Family:
    """The first family that knows one of the config's identifiers; `UNKNOWN` otherwise."""
    for identifier in identifiers_of(config):
        for family in families:
            if identifier in family.identifiers:
                return family
    return UNKNOWN


def pack(resolution: Resolution, family: Family) -> Packed:
    """Group a component's modules into layers by the family's table."""
    return _Packer(resolution, family).run()


class _Packer:
    """Collects the layers and findings of one component."""

    def __init__(self, resolution: Resolution, family: Family) -> None:
        self._source = resolution.component
        self._component = resolution.component.name
        self._modules = {module.name: module for module in resolution.modules}
        self._family = family
        self._heads = HeadCounts(resolution.component.config)
        self._dtype = _compute_dtype(resolution.component.config)
        self._findings: list[Finding] = []
        self._invalid: dict[str, str] = {}
        self._mixed: dict[str, list[str]] = defaultdict(list)

    def run(self) -> Packed:
        rest = dict(self._modules)
        layers = self._experts(rest)
        layers += self._stacks(rest)
        layers += self._fused(rest)
        layers += [self._linear(module.name, (module,)) for module in rest.values()]
        if not self._family.name and any(module.status != "unquantized" for module in self._modules.values()):
            self._findings.append(
                finding(
                    "unknown-family",
                    "no packing table for this model: every module is planned unfused",
                    component=self._component,
                )
            )
        for message, names in sorted(self._mixed.items()):
            self._findings.append(
                finding("mixed-fused-shards", message, component=self._component, modules=sorted(names))
            )
        layers.sort(key=lambda layer: layer.spec.name)
        return Packed(tuple(layers), self._family, self._heads, tuple(self._findings), self._invalid)

    # -- linear layers ------------------------------------------------------------------------------

    def _linear(self, name: str, modules: Sequence[ResolvedModule]) -> PackedLayer:
        first = modules[0]
        spec = LayerSpec(
            name,
            "linear",
            sum(module.out_features for module in modules),
            first.in_features,
            first.scheme,
            dtype=_DTYPES.get(first.stored_dtype, self._dtype),
            bias=_has_bias(modules),
            parts=tuple(module.out_features for module in modules),
            component=self._component,
            extras=_extras(modules),
        )
        parts = tuple(Part(module, self._row_order(module.name)) for module in modules)
        if len(modules) == 1:
            spec = replace(spec, parts=self._disk_parts(first))
        return PackedLayer(spec, parts, fused=len(modules) > 1, split=self._split(modules, spec.parts))

    def _split(self, modules: Sequence[ResolvedModule], rows: Sequence[int]) -> Split:
        """How ranks share a layer whose parts have so many `rows`."""
        style = self._family.style_of(modules[0].name)
        if not any(has_suffix(module.name, self._family.heads) for module in modules):
            return Split(style)
        heads = self._heads.of(modules[0].name)
        if not heads.known:
            return Split(style)
        if len(modules) == len(rows):
            leaves = [module.name.rpartition(".")[2].removeprefix("add_").removeprefix("to_") for module in modules]
            kv = tuple(leaf[:1] in ("k", "v") for leaf in leaves)
        else:
            kv = tuple(index > 0 for index in range(len(rows)))
        return Split(style, heads.heads, heads.kv_heads, kv)

    def _fused(self, rest: dict[str, ResolvedModule]) -> list[PackedLayer]:
        layers: list[PackedLayer] = []
        for fused in self._family.fused:
            tails = tuple("." + part for part in fused.parts)
            heads = {name.removesuffix(tail) for tail in tails for name in rest if name.endswith(tail)}
            for head in sorted(heads):
                names = [head + tail for tail in tails if head + tail in rest]
                if len(names) < 2 or EXPERT.fullmatch(names[0]):
                    continue
                modules = [rest[name] for name in names]
                reason = _why_not_fused(modules) or self._static_scales_differ(modules)
                if reason:
                    if reason not in _QUIET:
                        self._mixed[f"{fused.name}: {reason}; planned as separate layers"] += names
                    continue
                for name in names:
                    del rest[name]
                layers.append(self._linear(f"{head}.{fused.name}", modules))
        return layers

    def _static_scales_differ(self, modules: Sequence[ResolvedModule]) -> str:
        """Parts that see their input through different static scales are never merged by taking the larger one."""
        for role in ("input_scale", "input_zero_point", "input_global_scale"):
            values = {self._source.read_small(m.tensors[role]) for m in modules if role in m.tensors}
            if len(values) > 1:
                return f"the static {role} of the parts differs"
        smoothing = [m.tensors[role] for m in modules for role in ("pre_scale", "smooth_factor") if role in m.tensors]
        if any("low_rank_down" in m.tensors for m in modules):
            return _SMOOTHED
        if len({self._source.read_small(info, MAX_SMOOTHING_BYTES) for info in smoothing}) > 1:
            return _SMOOTHED
        for role in TRANSFORM_ROLES:
            matrices = [m.tensors[role] for m in modules if role in m.tensors]
            if len({self._source.read_small(info, MAX_SMOOTHING_BYTES) for info in matrices}) > 1:
                return f"the {role} of the parts differs"
        return ""

    def _row_order(self, name: str) -> RowOrder:
        for suffix, kind in self._family.disk_orders.items():
            if has_suffix(name, (suffix,)):
                if kind == "qkv_per_kv_head":
                    heads = self._heads.of(name)
                    if not heads.known:
                        return AS_IS
                    return RowOrder(kind, heads.kv_heads, heads.heads // heads.kv_heads, heads.head_dim)
                return RowOrder(kind)
        return AS_IS

    def _disk_parts(self, module: ResolvedModule) -> tuple[int, ...]:
        """Rows of the parts of a tensor that is fused on disk: q, k, v by the head counts, gate and up by halves."""
        rows, heads = module.out_features, self._heads.of(module.name)
        held = next(
            (held for suffix, held in self._family.disk_parts.items() if has_suffix(module.name, (suffix,))), ""
        )
        if held == "qkv" and heads.known:
            kv = heads.kv_heads * heads.head_dim
            if rows == heads.heads * heads.head_dim + 2 * kv:
                return (rows - 2 * kv, kv, kv)
        if held == "halves" and rows % 2 == 0:
            return (rows // 2, rows // 2)
        return (rows,)

    # -- experts ------------------------------------------------------------------------------------

    def _experts(self, rest: dict[str, ResolvedModule]) -> list[PackedLayer]:
        by_container: dict[str, dict[int, dict[str, ResolvedModule]]] = defaultdict(lambda: defaultdict(dict))
        for name, module in self._modules.items():
            match = EXPERT.fullmatch(name)
            if match:
                by_container[match["container"]][int(match["index"])][match["leaf"]] = module
        layers: list[PackedLayer] = []
        named = {container: self._expert_names(experts) for container, experts in by_container.items()}
        is_gated = any(_has_gate(by_container[container], names) for container, names in named.items() if names)
        for container, experts in by_container.items():
            names = named[container]
            if names is None or not is_gated:
                # A model none of whose experts has a gate computes something else: its experts are linear layers.
                continue
            for leaves in experts.values():
                for module in leaves.values():
                    del rest[module.name]
            layers.append(self._moe(container, experts, names))
        return layers

    def _expert_names(self, experts: Mapping[int, Mapping[str, ResolvedModule]]) -> ExpertNames | None:
        """The naming whose leaves all of the container's modules have."""
        found = {leaf for leaves in experts.values() for leaf in leaves}
        for names in self._family.experts or UNKNOWN.experts:
            if found <= {names.gate, names.up, names.down, names.fused}:
                return names
        return None

    def _moe(self, name: str, experts: Mapping[int, Mapping[str, ResolvedModule]], names: ExpertNames) -> PackedLayer:
        w13: list[tuple[Part, ...]] = []
        w2: list[tuple[Part, ...]] = []
        missing: list[str] = []
        block = self._block(name)
        for index in _expected(experts, self._routed(name, block)):
            leaves = experts.get(index, {})
            up_parts = (names.fused,) if names.fused in leaves else (names.gate, names.up)
            absent = [leaf for leaf in (*up_parts, names.down) if leaf not in leaves]
            missing += [f"{name}.{index}.{leaf}" for leaf in absent]
            w13.append(tuple(self._part(leaves[leaf]) for leaf in up_parts if leaf in leaves))
            w2.append(tuple(self._part(leaves[leaf]) for leaf in (names.down,) if leaf in leaves))
        modules = [part.module for group in (*w13, *w2) for part in group]
        self._check_experts(name, w13, w2, missing)
        first = w13[0][0].module if w13 and w13[0] else modules[0]
        down = w2[0][0].module if w2 and w2[0] else modules[-1]
        rows = sum(part.module.out_features for part in w13[0]) if w13 else 0
        if not missing:
            self._check_chain(name, rows, first.in_features, down.out_features, down.in_features, modules)
        spec = self._moe_spec(block, name, first, down, rows, first.in_features, down.out_features, len(w13))
        spec = replace(spec, bias=_has_bias(modules), extras=_extras(modules))
        return PackedLayer(spec, w13=tuple(w13), w2=tuple(w2), block=block)

    def _routed(self, name: str, block: MoeBlock) -> int:
        """How many experts the router chooses from, where the configuration says the same; else 0.

        A router may know experts that have no weights, and a configuration may be that of another size.
        """
        router = self._modules.get(block.router)
        count = expert_count(self._source.config, name)
        return count if router is not None and router.out_features == count else 0

    def _block(self, name: str) -> MoeBlock:
        router = router_of(self._family, self._source.config, name) or Router()
        names = self._family.experts or UNKNOWN.experts
        return block_of(name, self._modules, self._source.tensors, router, names)

    def _moe_spec(
        self,
        block: MoeBlock,
        name: str,
        first: ResolvedModule,
        down: ResolvedModule,
        rows: int,
        columns: int,
        out: int,
        experts: int,
    ) -> LayerSpec:
        """A layer of `experts` whose gate-and-up weight is [rows, columns] and whose down weight gives `out`."""
        return LayerSpec(
            name,
            "moe",
            out,
            columns,
            first.scheme,
            dtype=_DTYPES.get(first.stored_dtype, self._dtype),
            parts=(rows // 2, rows // 2),
            moe=moe_spec(
                self._source.config,
                name,
                router_of(self._family, self._source.config, name),
                experts,
                rows // 2,
                down.scheme if down.scheme != first.scheme else None,
                correction_bias=block.correction_bias is not None,
            ),
            component=self._component,
        )

    def _stacks(self, rest: dict[str, ResolvedModule]) -> list[PackedLayer]:
        """Experts whose tensors are 3-D stacks, below a module that is called experts."""
        by_container: dict[str, dict[str, ResolvedModule]] = defaultdict(dict)
        for name, module in rest.items():
            container, _, leaf = name.rpartition(".")
            if module.experts and container:
                by_container[container][leaf] = module
        layers: list[PackedLayer] = []
        for container, leaves in by_container.items():
            names = self._stacked_names(leaves)
            if names is None:
                continue
            for module in leaves.values():
                del rest[module.name]
            layers.append(self._stack(container, leaves, names))
        return layers

    def _stacked_names(self, leaves: Mapping[str, ResolvedModule]) -> StackedNames | None:
        for names in self._family.stacked or UNKNOWN.stacked:
            if leaves.keys() <= {names.fused, names.gate, names.up, names.down}:
                return names
        return None

    def _stack(self, name: str, leaves: Mapping[str, ResolvedModule], names: StackedNames) -> PackedLayer:
        apart = not leaves.keys().isdisjoint((names.gate, names.up))
        up_names = (names.gate, names.up) if apart and names.fused not in leaves else (names.fused,)
        missing = [f"{name}.{leaf}" for leaf in (*up_names, names.down) if leaf not in leaves]
        ups = [leaves[leaf] for leaf in up_names if leaf in leaves]
        down = leaves.get(names.down) or ups[0]
        w13 = (tuple(self._part(module) for module in ups),)
        w2 = (tuple(self._part(module) for module in (down,)),)
        self._check_experts(name, w13, w2, missing)
        counts = {module.experts for module in (*ups, down)}
        if len(counts) > 1:
            held = ", ".join(f"{module.name} {module.experts}" for module in (*ups, down))
            self._refuse(name, "mixed-fused-shards", f"{name}: numbers of experts differ: {held}", leaves.values())
        first = ups[0] if ups else down
        rows, columns, out = sum(module.out_features for module in ups), first.in_features, down.out_features
        transposed = self._is_transposed(first, down, fused=len(ups) == 1, names=names)
        if transposed:
            rows, columns, out = sum(module.in_features for module in ups), first.out_features, down.in_features
        if not missing:
            self._check_chain(name, rows, columns, out, down.out_features if transposed else down.in_features,
                              (*ups, down))  # fmt: skip
        block = self._block(name)
        spec = self._moe_spec(block, name, first, down, rows, columns, out, down.experts)
        spec = replace(spec, bias=_has_bias((*ups, down)), extras=_extras((*ups, down)))
        return PackedLayer(spec, w13=w13, w2=w2, stacked=True, transposed=transposed, block=block)

    def _is_transposed(self, up: ResolvedModule, down: ResolvedModule, *, fused: bool, names: StackedNames) -> bool:
        """True for [E, columns, rows]. Quantized stacks never are; else the shapes tell, and the family where not."""
        if up.status != "unquantized" or down.status != "unquantized":
            return False
        height = 2 if fused else 1
        straight = up.out_features == height * down.in_features and up.in_features == down.out_features
        turned = up.in_features == height * down.out_features and up.out_features == down.in_features
        return turned if straight != turned else names.layout == "kn"

    def _part(self, module: ResolvedModule) -> Part:
        return Part(module, self._row_order(module.name))

    def _check_experts(
        self, name: str, w13: Sequence[tuple[Part, ...]], w2: Sequence[tuple[Part, ...]], missing: Sequence[str]
    ) -> None:
        if missing:
            self._refuse(name, "missing-tensor", f"{name}: {missing[0]} and others are absent"
                         if len(missing) > 1 else f"{missing[0]} is absent", missing)  # fmt: skip
            return
        for groups in (w13, w2):
            modules = [part.module for group in groups for part in group]
            if any(module.status == "invalid" for module in modules):
                self._invalid.setdefault(name, "a module of an expert is invalid")
                continue
            kinds = _kinds(modules)
            if len(kinds) > 1:
                rare = min(kinds.values(), key=len)
                counts = ", ".join(f"{len(names)} {kind}" for kind, names in sorted(kinds.items()))
                self._refuse(name, "mixed-fused-shards", f"{name}: experts differ: {counts}", rare)

    def _check_chain(
        self, name: str, rows: int, columns: int, out: int, inner: int, modules: Sequence[ResolvedModule]
    ) -> None:
        """An expert's down weight [out, inner] takes what its gate and up weights, [rows, columns] together, give."""
        if name not in self._invalid and (rows, columns) != (2 * inner, out):
            message = (
                f"{name}: gate and up of an expert are [{rows}, {columns}] and down is [{out}, {inner}], which is no "
                f"gated MLP: needed [{2 * inner}, {out}] and [{out}, {inner}]"
            )
            self._refuse(name, "tensors-contradict-config", message, modules)

    def _refuse(self, name: str, code: str, message: str, modules: Iterable[str | ResolvedModule]) -> None:
        self._invalid[name] = message
        names = sorted(module if isinstance(module, str) else module.name for module in modules)
        self._findings.append(finding(code, message, severity="error", component=self._component, modules=names))


def _has_gate(experts: Mapping[int, Mapping[str, ResolvedModule]], names: ExpertNames) -> bool:
    return any(not leaves.keys().isdisjoint((names.gate, names.fused)) for leaves in experts.values())


#: Absent experts that a layer lists: a name may state any number.
MAX_ABSENT_EXPERTS = 64


def _expected(present: Collection[int], count: int) -> list[int]:
    """The numbers of `count` experts, or up to the highest, of those that are absent no more than the first few."""
    absent = (index for index in range(max(*present, count)) if index not in present)
    return sorted({*present, *islice(absent, MAX_ABSENT_EXPERTS)})


_INVALID = "a part is invalid"
_SMOOTHED = "every part has a smoothing vector or a low-rank pair of its own"
_ORDERED = "every part has a group order of its own"
#: Reasons that are no mixture: the invalid part has its own finding, an own order is the dialect's normal case.
_QUIET = (_INVALID, _ORDERED, _SMOOTHED)


def _has_bias(modules: Iterable[ResolvedModule]) -> bool:
    return any(not {"bias", "quant_bias"}.isdisjoint(module.tensors) for module in modules)


def _extras(modules: Sequence[ResolvedModule]) -> tuple[str, ...]:
    """What kernels have to take beside the scheme, as far as headers tell: zero points of floats may be fractions."""
    zeros = (
        module.tensors[role]
        for module in modules
        for role in ("zero_point", "scale_and_zero")
        if role in module.tensors and not module.scheme.weight.symmetric
    )
    found = {
        "group_index": any(module.storage.act_order for module in modules),
        "fractional zero points": any(info.dtype in FLOAT_DTYPES for info in zeros),
    }
    return tuple(extra for extra, there in found.items() if there)


def _kinds(modules: Iterable[ResolvedModule]) -> dict[str, list[str]]:
    """Names by scheme and shape of K: what experts of one layer must share."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        kinds[f"{module.scheme.id} [{module.out_features}, {module.in_features}]"].append(module.name)
    return kinds


def _why_not_fused(modules: Sequence[ResolvedModule]) -> str:
    """Empty when the modules can be one layer."""
    if any(module.status in ("invalid", "unsupported") for module in modules):
        return _INVALID
    schemes = {module.scheme for module in modules}
    if len(schemes) > 1:
        by_leaf = ", ".join(f"{m.name.rpartition('.')[2]} {m.scheme.id}" for m in modules)
        return f"parts have different schemes ({by_leaf})"
    if len({module.in_features for module in modules}) > 1:
        return "parts have different K"
    if len({module.stored_dtype for module in modules}) > 1:
        return "parts are stored in different dtypes"
    if any(module.storage.act_order for module in modules):
        return _ORDERED
    return ""


def _compute_dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float16": "f16", "float32": "f32"}.get(str(name), "bf16")
