"""What a recogniser produces, and the draft that it fills while it looks at a module's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.declared import Declared
from omniplat.formats.recognise.fits import role_problem
from omniplat.formats.stated import STATED_SHAPES, decoded_shapes
from omniplat.formats.storage import Storage
from omniplat.scheme import TensorQuant

SCALE_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16", "F8_E4M3": "e4m3", "U8": "e8m0", "F8_E8M0": "e8m0"}
#: dtypes in which e8m0 scales are stored; the bytes are the same.
E8M0_DTYPES = ("U8", "F8_E8M0")

#: Leaf names that only quantized modules have. One of them beside a 16-bit weight is unexpected.
QUANT_LEAVES = frozenset(
    {
        *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
        *("input_scale", "input_zero_point", "input_global_scale", "scale_weight", "scale_input"),
        *("weight_offset", "weight_scale_second", "weight_offset_second", "weight_dual_scale", "scale_bias"),
        *("deq_scale", "quant_bias", "input_offset", "mul_scale", "pre_quant_scale", "wscales", "wcscales", "wtscale"),
        *("smooth_factor", "smooth", "proj_down", "proj_up", "lora_down", "lora_up", "left_trans", "right_trans"),
        *("input_scale_2", "weight.absmax", "weight.nested_absmax", "SCB", "W_q", "_blocks", "_scales"),
        *("_weight_qdata", "_weight_scale", "weight._data", "weight._scale", "weight:qdata", "weight:_data"),
    }
)
#: Names beside a quantized weight that belong to quantization, whichever tool gave them.
_TELLING = re.compile(r"\w*(scale|zero_point|zeros|offset|rotation|lora|smooth|amax)\w*")
#: Those of them that are about the attention around the weight, its cache or its output.
_NOT_THE_WEIGHTS = re.compile(r"(k|v|q|kv|prob|prob_output|output|kv_cache|[kvq]_cache)_(scale|offset|zero_point|amax)")
#: Names of what is added to a layer's output, or applied to its input, beside the product with its weight.
_ALTERING = re.compile(r"\w*(rotation|lora|smooth|proj_down|proj_up)\w*")
#: Those that scale codes: where they are, codes must be.
CODE_SCALES = frozenset(
    {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales", "qzeros", "weight.absmax"}
)

Leaves = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the headers show of one module.

    `weight`      quantization of the weight; None when the tensors fit no known storage.
    `leaves`      canonical role -> leaf name of the tensor that fills it.
    `missing`     leaf names that the storage needs and that are not there.
    `unexplained` quantization leaves that no role explains.
    `problem`     a shape that fits nothing, in words; `group_problem` when a group does not divide K.
    `unsupported` what the tensors have that nothing here can compute with, in words.
    """

    weight: TensorQuant | None
    storage: Storage
    out_features: int
    in_features: int
    leaves: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    problem: str = ""
    group_problem: str = ""
    experts: int = 0
    pre_scale: bool = False
    transform: tuple[int, int] = (0, 0)
    unsupported: str = ""

    @property
    def complete(self) -> bool:
        return self.weight is not None and not self.missing and not self.problem and not self.group_problem

    @property
    def quantized(self) -> bool:
        return self.weight is None or self.weight.element != "bf16"


#: FlatQuant's tensors by role: an input row as a matrix is multiplied from both sides, and its scale clipped.
TRANSFORM_LEAVES = {"left_transform": "left_trans", "right_transform": "right_trans", "clip_ratio": "clip_ratio"}
#: Why a weight beside them is not run.
NOT_TRANSFORMED = (
    "left_trans, right_trans, clip_ratio: inputs are transformed for int4 weights and inputs of int4 per token only; "
    "fp4 ones are clipped by clip_ratio where they are made, and not by the device's operator, so that what is meant "
    "is open"
)


@dataclass(slots=True)
class Draft:
    """A `Stored` under construction: recognisers fill it, `finish` freezes it.

    `values` holds the bytes of the small tensors that describe others (bitsandbytes' and HQQ's states), by leaf.
    """

    leaves: Leaves
    hint: Declared | None
    values: Mapping[str, bytes] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def take(self, role: str, *names: str, required: bool = False) -> TensorInfo | None:
        """The first of `names` that exists becomes `role`; a required role that has none is missing."""
        for name in names:
            if name in self.leaves:
                self.roles[role] = name
                return self.leaves[name]
        if required and not (self.hint and role in self.hint.missing_ok | self.hint.derived):
            self.missing.append(names[0])
        return None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes [N, K] that the weight may have by what is said of it outside its tensors."""
        return decoded_shapes(self.values.get(STATED_SHAPES, b""))

    @property
    def is_transformed(self) -> bool:
        """Metadata says that inputs are transformed, or something that transforms them lies beside the weight."""
        said = self.hint is not None and self.hint.transformed
        return said or not self.leaves.keys().isdisjoint(TRANSFORM_LEAVES.values())

    @property
    def hinted(self) -> TensorQuant | None:
        return self.hint.scheme.weight if self.hint is not None and self.hint.quantizes else None

    def finish(
        self,
        weight: TensorQuant | None,
        packing: str,
        container: str,
        n: int,
        k: int,
        *,
        problem: str = "",
        divisor: bool = False,
        zero_offset: int = 0,
    ) -> Stored:
        self.take("bias", "bias", "_bias")
        self.take("pre_scale", "pre_quant_scale", "mul_scale", "_weight_act_pre_scale", "weight:act_pre_scale")
        self.take("marker", "comfy_quant")
        activation = self.hint.scheme.activation if self.hint is not None else None
        is_quantized = weight is not None and weight.element != "bf16"
        if is_quantized:
            self._take_input_scales(activation)
        used = set(self.roles.values())
        unused = (name for name in self.leaves if name not in used)
        unexplained = tuple(name for name in unused if _is_of_quantization(name, is_quantized))
        if not problem and weight is not None and is_quantized and n and k:
            beside = {role: self.leaves[leaf] for role, leaf in self.roles.items() if not leaf.startswith("_")}
            static = activation is not None and (not activation.dynamic or activation.second_scale == "global")
            problem = role_problem(beside, weight, packing, n, k, static=static)
        group_problem = ""
        if weight is not None and weight.granularity == "group" and weight.group_size and k % weight.group_size:
            group_problem = f"K = {k} is not a multiple of the group size {weight.group_size}"
        unsupported = ""
        if weight is not None and weight.element in ("int4", "uint4") and k % 2:
            unsupported = f"K = {k} is odd: 4-bit codes are kept two to a byte"
        altering = [name for name in unexplained if _ALTERING.fullmatch(name) is not None]
        if is_quantized and altering:
            unsupported = f"{', '.join(altering)}: what they do to the layer's input or output is not computed here"
        ordered = "group_index" in self.roles and (packing == "int32_k" or bool(self.hint and self.hint.act_order))
        if is_quantized and self.is_transformed and not TRANSFORM_LEAVES.keys() & self.roles.keys():
            unsupported = NOT_TRANSFORMED
        storage = Storage(packing, container, zero_offset, divisor, act_order=ordered)
        return Stored(
            weight,
            storage,
            n,
            k,
            dict(self.roles),
            tuple(self.missing),
            unexplained,
            problem,
            group_problem,
            pre_scale="pre_scale" in self.roles,
            unsupported=unsupported,
        )

    def _take_input_scales(self, activation: TensorQuant | None) -> None:
        if activation is not None and activation.second_scale == "global":
            self.take("input_global_scale", "input_global_scale", "input_scale", "input_scale_2", required=True)
            return
        static = activation is not None and not activation.dynamic
        if static or activation is None:  # of a dynamic activation it would explain nothing
            self.take("input_scale", "input_scale", "scale_input", required=static)
        asymmetric = activation is not None and not activation.symmetric
        self.take("input_zero_point", "input_zero_point", "input_offset", required=static and asymmetric)
        self.take("input_global_scale", "input_global_scale")


def _is_of_quantization(leaf: str, is_quantized: bool) -> bool:
    """True for tensors that some role must explain."""
    if leaf in QUANT_LEAVES:
        return True
    return is_quantized and _TELLING.fullmatch(leaf) is not None and _NOT_THE_WEIGHTS.fullmatch(leaf) is None


def unknown(draft: Draft, weight: TensorInfo, problem: str) -> Stored:
    """Tensors that fit no storage; `problem` says what was seen."""
    shape = (*weight.shape, 0, 0)
    return draft.finish(None, "plain", weight.dtype, shape[0], shape[1], problem=problem)


def misfit(scale: TensorInfo, n: int, k: int) -> str:
    """Words for a scale whose shape fits no granularity of an [n, k] weight."""
    return f"{scale.name.rpartition('.')[2]} {scale.dtype} {list(scale.shape)} fits no granularity of [{n}, {k}]"


def grouped(
    element: str, k: int, groups: int, scale: TensorInfo | None, hinted: TensorQuant | None, symmetric: bool
) -> TensorQuant:
    """Group or channel quantization of integer codes whose scale has `groups` columns (or rows, transposed)."""
    form = SCALE_FORMATS.get(scale.dtype, "f32") if scale is not None else "f32"
    if hinted is not None and hinted.granularity == "group":
        size = hinted.group_size
        if groups == -(-k // size):
            return TensorQuant(element, "group", size, scale_format=form, symmetric=symmetric)
    if groups <= 1:
        return TensorQuant(element, "channel", scale_format=form, symmetric=symmetric)
    return TensorQuant(element, "group", max(k // groups, 1), scale_format=form, symmetric=symmetric)
