"""Recognising how a module is stored from dtypes, shapes and tensor names alone.

Metadata comes in only as a hint for what headers cannot show: whether GPTQ zero points carry an offset, that
an int8 tensor holds 4-bit values, how many bits a packed word holds when nothing else tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omniplat.checkpoint.tensors import FLOAT_DTYPES, TensorInfo
from omniplat.formats.declared import Declared
from omniplat.formats.storage import Storage
from omniplat.scheme import UNQUANTIZED, TensorQuant, parse_weight_id

#: Leaf names that only quantized modules have. One of them beside a 16-bit weight is unexpected.
QUANT_LEAVES = frozenset(
    {
        *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
        *("input_scale", "input_zero_point", "input_global_scale", "scale_weight", "scale_input"),
    }
)

_SCALE_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16", "F8_E4M3": "e4m3", "U8": "e8m0", "F8_E8M0": "e8m0"}
_FLOAT8 = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}
_E8M0 = ("U8", "F8_E8M0")

Leaves = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the headers show of one module.

    `weight`      quantization of the weight; None when the tensors fit no known storage.
    `leaves`      canonical role -> leaf name of the tensor that fills it.
    `missing`     leaf names that the storage needs and that are not there.
    `unexplained` quantization leaves that no role explains.
    `problem`     a shape that fits nothing, in words; `group_problem` when a group does not divide K.
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

    @property
    def complete(self) -> bool:
        return self.weight is not None and not self.missing and not self.problem and not self.group_problem

    @property
    def quantized(self) -> bool:
        return self.weight is None or self.weight.element != "bf16"


@dataclass(slots=True)
class _Draft:
    """A `Stored` under construction: recognisers fill it, `finish` freezes it."""

    leaves: Leaves
    hint: Declared | None
    roles: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def take(self, role: str, *names: str, required: bool = False) -> TensorInfo | None:
        """The first of `names` that exists becomes `role`; a required role that has none is missing."""
        for name in names:
            if name in self.leaves:
                self.roles[role] = name
                return self.leaves[name]
        if required and not (self.hint and role in self.hint.missing_ok):
            self.missing.append(names[0])
        return None

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
        self.take("bias", "bias")
        self.take("pre_scale", "pre_quant_scale")
        activation = self.hint.scheme.activation if self.hint is not None else None
        if weight is not None and weight.element != "bf16":
            self._take_input_scales(activation)
        used = set(self.roles.values())
        unexplained = tuple(name for name in self.leaves if name in QUANT_LEAVES and name not in used)
        group_problem = ""
        if weight is not None and weight.granularity == "group" and weight.group_size and k % weight.group_size:
            group_problem = f"K = {k} is not a multiple of the group size {weight.group_size}"
        ordered = "group_index" in self.roles and (packing == "int32_k" or bool(self.hint and self.hint.act_order))
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
        )

    def _take_input_scales(self, activation: TensorQuant | None) -> None:
        if activation is not None and activation.second_scale == "global":
            self.take("input_global_scale", "input_global_scale", "input_scale", required=True)
            return
        static = activation is not None and not activation.dynamic
        self.take("input_scale", "input_scale", "scale_input", required=static)
        asymmetric = activation is not None and not activation.symmetric
        self.take("input_zero_point", "input_zero_point", required=static and asymmetric)
        self.take("input_global_scale", "input_global_scale")


def recognise(leaves: Leaves, hint: Declared | None = None) -> Stored | None:
    """How a module with these leaves is stored; None when it has no matrix that could be a layer."""
    draft = _Draft(leaves, hint)
    if "qweight" in leaves:
        return _integer_rows(draft, leaves["qweight"])
    if "weight_packed" in leaves:
        packed = leaves["weight_packed"]
        return _packed_words(draft, packed) if packed.dtype == "I32" else _packed_nibbles(draft, packed)
    weight = leaves.get("weight")
    if weight is None:
        return None
    draft.roles["codes"] = "weight"
    if weight.dtype in FLOAT_DTYPES:
        return _unquantized(draft, weight)
    if len(weight.shape) != 2:
        return _unknown(draft, weight, f"weight is {weight.dtype} of shape {list(weight.shape)}")
    if weight.dtype in _FLOAT8:
        return _float8(draft, weight)
    if weight.dtype == "I8":
        return _int8(draft, weight)
    if weight.dtype == "U8":
        return _packed_bytes(draft, weight)
    return _unknown(draft, weight, f"a weight of dtype {weight.dtype} fits no known storage")


def _unknown(draft: _Draft, weight: TensorInfo, problem: str) -> Stored:
    shape = weight.shape + (0, 0)
    return draft.finish(None, "plain", weight.dtype, shape[0], shape[1], problem=problem)


def _unquantized(draft: _Draft, weight: TensorInfo) -> Stored | None:
    if len(weight.shape) != 2:
        return None
    return draft.finish(UNQUANTIZED.weight, "plain", weight.dtype, weight.shape[0], weight.shape[1])


def _scale_quant(element: str, scale: TensorInfo, n: int, k: int, hinted: TensorQuant | None) -> TensorQuant | None:
    """Granularity of an unpacked [N, K] weight from its scale's shape; None when the shape fits nothing."""
    shape = scale.shape
    form = _SCALE_FORMATS.get(scale.dtype, "")
    if not form:
        return None
    if form == "e8m0" and shape == (n, -(-k // 32)):
        return TensorQuant(element, "group", 32, scale_format="e8m0")
    if len(shape) == 4 and shape[1] == 1 and shape[3] == 1:
        shape = (shape[0], shape[2])
    if hinted is not None and hinted.granularity == "block" and len(shape) == 2:
        bn, bk = hinted.block
        if shape == (-(-n // bn), -(-k // bk)):
            return TensorQuant(element, "block", block=(bn, bk), scale_format=form)
    if hinted is not None and hinted.granularity == "group" and shape == (n, -(-k // hinted.group_size)):
        return TensorQuant(element, "group", hinted.group_size, scale_format=form)
    if form == "e8m0" and shape != (-(-n // 128), -(-k // 128)):
        return None
    if shape in ((), (1,), (1, 1)):
        return TensorQuant(element, "tensor", scale_format=form)
    if shape in ((n,), (n, 1)):
        return TensorQuant(element, "channel", scale_format=form)
    if len(shape) == 2 and shape == (-(-n // 128), -(-k // 128)):
        return TensorQuant(element, "block", block=(128, 128), scale_format=form)
    if len(shape) == 2 and shape[0] == n and shape[1] and k % shape[1] == 0:
        return TensorQuant(element, "group", k // shape[1], scale_format=form)
    return None


def _float8(draft: _Draft, weight: TensorInfo) -> Stored:
    n, k = weight.shape
    scale = draft.take("scale", "weight_scale", "weight_scale_inv", "scale_weight", required=True)
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "plain", weight.dtype, n, k)
    quant = _scale_quant(_FLOAT8[weight.dtype], scale, n, k, hinted)
    problem = "" if quant else _misfit(scale, n, k)
    return draft.finish(quant, "plain", weight.dtype, n, k, problem=problem)


def _misfit(scale: TensorInfo, n: int, k: int) -> str:
    return f"{scale.name.rpartition('.')[2]} {scale.dtype} {list(scale.shape)} fits no granularity of [{n}, {k}]"


def _int8(draft: _Draft, weight: TensorInfo) -> Stored:
    n, k = weight.shape
    scale = draft.take("scale", "weight_scale", required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "plain", "I8", n, k)
    quant = _scale_quant("int8", scale, n, k, hinted)
    if quant is None:
        return draft.finish(None, "plain", "I8", n, k, problem=_misfit(scale, n, k))
    bits = hinted.bits if hinted is not None and hinted.is_integer else 8
    element = f"{'uint' if zero is not None else 'int'}{bits}"
    if hinted is not None and hinted.is_integer and not hinted.symmetric and zero is None:
        draft.missing.append("weight_zero_point")
    return draft.finish(replace(quant, element=element, symmetric=zero is None), "plain", "I8", n, k)


def _packed_words(draft: _Draft, packed: TensorInfo) -> Stored:
    """compressed-tensors pack-quantized: int32 words along K."""
    draft.roles["codes"] = "weight_packed"
    scale = draft.take("scale", "weight_scale", required=True)
    draft.take("weight_shape", "weight_shape", required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    gidx = draft.take("group_index", "weight_g_idx")
    hinted = draft.hinted
    n, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    bits = hinted.bits if hinted is not None and hinted.is_integer else 0
    k = gidx.shape[0] if gidx is not None and gidx.shape else 0
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    if not k and bits:
        k, bits = _words_along_k(words, groups, bits, hinted)
    if not bits:
        bits = words * 32 // k if k else 4
        k = k or words * 8
    symmetric = zero is None
    if hinted is not None and hinted.is_integer and not hinted.symmetric and zero is None:
        draft.missing.append("weight_zero_point")
        symmetric = False
    quant = _grouped(f"{'int' if symmetric else 'uint'}{bits}", k, groups, scale, hinted, symmetric)
    problem = ""
    if scale is not None and (len(scale.shape) != 2 or scale.shape[0] != n):
        problem = _misfit(scale, n, k)
    elif bits * k > words * 32:
        problem = f"weight_packed {list(packed.shape)} is too narrow for {k} values of {bits} bits"
    return draft.finish(quant, "int32_k", "I32", n, k, problem=problem)


def _words_along_k(words: int, groups: int, bits: int, hinted: TensorQuant | None) -> tuple[int, int]:
    """(K, bits) of int32 words: the declared bits unless they contradict the number of groups of the declared size."""
    k = words * (32 // bits)
    if hinted is None or hinted.granularity != "group" or groups <= 1:
        return k, bits
    if -(-k // hinted.group_size) == groups:
        # The last word may be padding: the groups tell where K ends.
        return min(k, groups * hinted.group_size), bits
    whole = groups * hinted.group_size
    if (words * 32) % whole == 0 and 2 <= words * 32 // whole <= 8:
        return whole, words * 32 // whole
    return k, bits


def _grouped(
    element: str, k: int, groups: int, scale: TensorInfo | None, hinted: TensorQuant | None, symmetric: bool
) -> TensorQuant:
    form = _SCALE_FORMATS.get(scale.dtype, "f32") if scale is not None else "f32"
    if hinted is not None and hinted.granularity == "group":
        size = hinted.group_size
        if groups == -(-k // size):
            return TensorQuant(element, "group", size, scale_format=form, symmetric=symmetric)
    if groups <= 1:
        return TensorQuant(element, "channel", scale_format=form, symmetric=symmetric)
    return TensorQuant(element, "group", max(k // groups, 1), scale_format=form, symmetric=symmetric)


def _packed_nibbles(draft: _Draft, packed: TensorInfo) -> Stored:
    """`weight_packed` in bytes: MXFP4 or NVFP4 under compressed-tensors' names, MXINT4 when declared."""
    draft.roles["codes"] = "weight_packed"
    if len(packed.shape) != 2 or packed.dtype not in ("U8", "I8"):
        return _unknown(draft, packed, f"weight_packed is {packed.dtype} {list(packed.shape)}")
    n, k = packed.shape[0], packed.shape[1] * 2
    scale = draft.take("scale", "weight_scale", required=True)
    return _four_bit(draft, packed, n, k, scale, ("weight_global_scale",), divisor=True)


def _four_bit(
    draft: _Draft, codes: TensorInfo, n: int, k: int, scale: TensorInfo | None, names: tuple[str, ...], *, divisor: bool
) -> Stored:
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "nibbles_k", codes.dtype, n, k)
    if scale.dtype == "F8_E4M3" and scale.shape == (n, -(-k // 16)):
        draft.take("global_scale", *names, required=True)
        return draft.finish(parse_weight_id("nvfp4"), "nibbles_k", codes.dtype, n, k, divisor=divisor)
    if scale.dtype in _E8M0 and scale.shape == (n, -(-k // 32)):
        name = "mxint4" if hinted == parse_weight_id("mxint4") else "mxfp4"
        return draft.finish(parse_weight_id(name), "nibbles_k", codes.dtype, n, k)
    return draft.finish(None, "nibbles_k", codes.dtype, n, k, problem=_misfit(scale, n, k))


def _packed_bytes(draft: _Draft, weight: TensorInfo) -> Stored:
    """A plain `weight` of bytes: NVFP4 and MXFP4 packed along K, or modelopt's int4 packed along N."""
    rows, columns = weight.shape
    scale = draft.take("scale", "weight_scale", required=True)
    if scale is not None and scale.dtype in FLOAT_DTYPES and len(scale.shape) == 2 and scale.shape[0] == 2 * rows:
        n, k = 2 * rows, columns
        quant = _grouped("int4", k, scale.shape[1], scale, draft.hinted, True)
        if "weight_scale_2" in draft.leaves:
            # W4A8: the second factor belongs to the FP8 requantization of some engines, not to the weight.
            draft.roles["requantization_scale"] = "weight_scale_2"
        problem = "" if k % scale.shape[1] == 0 else _misfit(scale, n, k)
        return draft.finish(quant, "nibbles_n", "U8", n, k, problem=problem)
    return _four_bit(draft, weight, rows, columns * 2, scale, ("weight_scale_2", "weight_global_scale"), divisor=False)


def _integer_rows(draft: _Draft, qweight: TensorInfo) -> Stored:
    """GPTQ and AWQ: `qweight`, `qzeros`, `scales`, with scales [G, N]."""
    draft.roles["codes"] = "qweight"
    zeros = draft.take("zero_point", "qzeros", required=True)
    scales = draft.take("scale", "scales", required=True)
    gidx = draft.take("group_index", "g_idx")
    hint, hinted = draft.hint, draft.hinted
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        return _unknown(draft, qweight, f"qweight is {qweight.dtype} {list(qweight.shape)}")
    if scales is None or len(scales.shape) != 2:
        if scales is None:
            return draft.finish(hinted, "gptq", "I32", 0, 0)
        return _unknown(draft, qweight, f"scales has shape {list(scales.shape)}, expected [groups, N]")
    groups, n = scales.shape
    symmetric = hinted is not None and hinted.symmetric
    element = "int" if symmetric else "uint"
    if qweight.shape[1] * 8 == n and (hint is None or hint.packing in ("", "awq")):
        k = qweight.shape[0]
        quant = _grouped(f"{element}4", k, groups, scales, hinted, symmetric)
        return draft.finish(quant, "awq", "I32", n, k)
    if qweight.shape[1] != n:
        return _unknown(draft, qweight, f"qweight {list(qweight.shape)} does not fit scales {list(scales.shape)}")
    if zeros is not None and len(zeros.shape) == 2 and n and zeros.shape[1] * 32 % n == 0:
        bits = zeros.shape[1] * 32 // n
    else:
        bits = hinted.bits if hinted is not None and hinted.is_integer else 4
    k = gidx.shape[0] if gidx is not None and len(gidx.shape) == 1 else qweight.shape[0] * 32 // max(bits, 1)
    problem = "" if 2 <= bits <= 8 else f"qzeros {list(zeros.shape) if zeros else '?'} does not fit scales"
    quant = _grouped(f"{element}{min(max(bits, 2), 8)}", k, groups, scales, hinted, symmetric)
    if not problem and qweight.shape[0] * 32 != k * bits:
        problem = f"qweight {list(qweight.shape)} does not hold {k} values of {bits} bits"
    if not problem and hint is None:
        problem = "integer codes without metadata: neither the zero point's offset nor its symmetry is known"
    offset = hint.zero_offset if hint is not None else 0
    return draft.finish(quant, "gptq", "I32", n, k, problem=problem, zero_offset=offset)
