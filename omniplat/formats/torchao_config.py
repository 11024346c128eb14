"""torchao's configuration objects, as JSON or by the names that older releases used, and the schemes that they give."""

from __future__ import annotations

from dataclasses import replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import Declared
from omniplat.formats.metadata import Fields
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

#: Names of `quant_type` before configurations were objects.
_OLD_NAMES = {
    "int4_weight_only": "Int4WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "int8_dynamic_activation_int4_weight": "Int8DynamicActivationInt4WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
}
_INT8_TOKEN_ASYMMETRIC = "int8-token-asym"


def declared_by_name(name: str, arguments: Fields, source: Fields) -> Declared:
    """What an old `quant_type` with its `quant_type_kwargs` declares; raises UnsupportedOptionError for another."""
    config = _OLD_NAMES.get(name.lower())
    if config is None:
        raise UnsupportedOptionError(
            f"{name!r} is none of {', '.join(_OLD_NAMES)}", file=source.file, key=source.path("quant_type")
        )
    return _declared(config, arguments)


def declared_by(config: Fields) -> Declared:
    """What `{"_type": ..., "_data": {...}}` declares; raises UnsupportedOptionError for an unknown type or option."""
    data = config.child("_data") or Fields(config.file, config.path("_data"), {})
    return _declared(config.string("_type"), data)


def _declared(kind: str, data: Fields) -> Declared:
    if kind == "Int8WeightOnlyConfig":
        return Declared(Scheme(_integer(8, _optional_group(data))))
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return Declared(Scheme(_integer(8, 0), _activation("int8-token")))
    if kind == "Int8StaticActivationInt8WeightConfig":
        return Declared(Scheme(_integer(8, 0), _activation("int8-tensor-static")))
    if kind == "Int4WeightOnlyConfig":
        return Declared(Scheme(_unsigned4(data.integer("group_size", 128))))
    if kind == "Float8DynamicActivationInt4WeightConfig":
        return Declared(Scheme(_unsigned4(data.integer("group_size", 128)), _activation("fp8-token")))
    if kind == "Int8DynamicActivationInt4WeightConfig":
        return Declared(
            Scheme(_integer(4, data.integer("group_size", 32)), _activation(_mapped(data, "act_mapping_type")))
        )
    if kind == "IntxWeightOnlyConfig":
        return Declared(Scheme(_intx(data, "granularity", "mapping_type")))
    if kind == "Int8DynamicActivationIntxWeightConfig":
        weight = _intx(data, "weight_granularity", "weight_mapping_type")
        return Declared(Scheme(weight, _activation(_mapped(data, "act_mapping_type"))))
    if kind == "UIntXWeightOnlyConfig":
        return Declared(Scheme(TensorQuant(_dtype(data, "dtype", "uint4"), "group", data.integer("group_size", 64),
                                           symmetric=False)))  # fmt: skip
    if kind == "Float8WeightOnlyConfig":
        return Declared(Scheme(TensorQuant(_float(data), "channel")), open_granularity=True)
    if kind in ("Float8DynamicActivationFloat8WeightConfig", "Float8StaticActivationFloat8WeightConfig"):
        return _float8(data, dynamic=kind.startswith("Float8Dynamic"))
    if kind in ("MXDynamicActivationMXWeightConfig", "MXFPInferenceConfig"):
        return _microscaled(data)
    if kind in ("NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4InferenceConfig"):
        # The input's global scale is derived at run time where calibration left none.
        derived = frozenset({"input_global_scale"})
        return Declared(Scheme(parse_weight_id("nvfp4"), _activation("nvfp4")), derived=derived)
    if kind == "NVFP4WeightOnlyConfig":
        return Declared(Scheme(parse_weight_id("nvfp4")))
    raise UnsupportedOptionError(f"{kind!r} has no scheme here", file=data.file, key=data.key)


def _activation(text: str) -> TensorQuant | None:
    """An activation with torchao's rules: symmetric integers divide by half the range of codes, 127.5 for int8."""
    quant = at_run_time(parse_activation_id(text), "floor")
    if quant is not None and quant.is_integer and quant.symmetric and quant.dynamic:
        return replace(quant, scale_rule="half-range")
    return quant


def _mapped(data: Fields, name: str) -> str:
    """int8 per token; torchao's default is asymmetric."""
    return "int8-token" if _enumerator(data, name, "ASYMMETRIC") == "SYMMETRIC" else _INT8_TOKEN_ASYMMETRIC


def _enumerator(data: Fields, name: str, default: str) -> str:
    """An enumerator: its name, or an object that holds it under `_data`."""
    return _wrapped(data, name, default, "a name").rpartition(".")[2].upper()


def _integer(bits: int, group: int, *, symmetric: bool = True) -> TensorQuant:
    element = f"{'int' if symmetric else 'uint'}{bits}"
    if group > 0:
        return TensorQuant(element, "group", group, symmetric=symmetric)
    return TensorQuant(element, "channel", symmetric=symmetric)


def _unsigned4(group: int) -> TensorQuant:
    return _integer(4, group, symmetric=False)


def _optional_group(data: Fields) -> int:
    """`group_size`, or the size of a `granularity` of groups; 0 for one scale a row."""
    if data.has("group_size"):
        return data.integer("group_size", 0)
    return _granularity(data, "granularity")[1]


def _granularity(data: Fields, name: str) -> tuple[str, int]:
    """(torchao's class, group size or 0) of a granularity object; ("", 0) where there is none.

    A pair is (activation, weight): the weight's counts.
    """
    value = data.values.get(name)
    if isinstance(value, list) and value:
        value = value[-1]
    if value is None:
        return "", 0
    if isinstance(value, str):
        return value.rpartition(".")[2], 0
    if not isinstance(value, dict):
        raise data.wrong(name, "a granularity")
    fields = Fields(data.file, data.path(name), value)
    inner = fields.child("_data")
    return fields.string("_type"), inner.integer("group_size", 0) if inner is not None else 0


def _dtype(data: Fields, name: str, default: str) -> str:
    """The bare name of a torch dtype, a string or an object that holds one."""
    return _wrapped(data, name, default, "a dtype").removeprefix("torch.")


def _wrapped(data: Fields, name: str, default: str, what: str) -> str:
    """A string, or the one that an object holds under `_data`; raises InvalidCheckpointError saying `what` it is."""
    value = data.values.get(name)
    if isinstance(value, dict):
        value = value.get("_data")
    if value is None:
        return default
    if not isinstance(value, str):
        raise data.wrong(name, what)
    return value


def _intx(data: Fields, granularity: str, mapping: str) -> TensorQuant:
    dtype = _dtype(data, "weight_dtype", "int8")
    bits = dtype.removeprefix("int")
    if not dtype.startswith("int") or not bits.isdigit() or not 2 <= int(bits) <= 8:
        raise UnsupportedOptionError(f"{dtype!r} has no scheme here", file=data.file, key=data.path("weight_dtype"))
    symmetric = _enumerator(data, mapping, "SYMMETRIC") != "ASYMMETRIC"
    kind, group = _granularity(data, granularity)
    return _integer(int(bits), group or (0 if kind == "PerAxis" else 32), symmetric=symmetric)


def _float(data: Fields) -> str:
    dtype = _dtype(data, "weight_dtype", "float8_e4m3fn")
    elements = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
    if dtype not in elements:
        raise UnsupportedOptionError(f"{dtype!r} has no scheme here", file=data.file, key=data.path("weight_dtype"))
    return elements[dtype]


def _float8(data: Fields, *, dynamic: bool) -> Declared:
    kind, _ = _granularity(data, "granularity")
    element = _float(data)
    if kind == "PerBlock":
        return Declared(Scheme(TensorQuant(element, "block", block=(128, 128)), _activation("fp8-g128")))
    weight = TensorQuant(element, "channel" if kind == "PerRow" else "tensor")
    if not dynamic:
        return Declared(Scheme(weight, _activation("fp8-tensor-static")))
    return Declared(Scheme(weight, _activation("fp8-token" if kind == "PerRow" else "fp8-tensor")))


def _microscaled(data: Fields) -> Declared:
    names = {"float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8e5m2", "float4_e2m1fn_x2": "mxfp4"}
    weight, activation = (
        _dtype(data, "weight_dtype", "float8_e4m3fn"),
        _dtype(data, "activation_dtype", "float8_e4m3fn"),
    )
    for name, dtype in (("weight_dtype", weight), ("activation_dtype", activation)):
        if dtype not in names:
            raise UnsupportedOptionError(f"{dtype!r} has no scheme here", file=data.file, key=data.path(name))
    mode = _enumerator(data, "scaling_mode", "RCEIL").lower()
    if mode not in ("floor", "even", "ceil", "rceil"):
        raise UnsupportedOptionError(f"{mode!r} is no rule for scales", file=data.file, key=data.path("scaling_mode"))
    quant = parse_activation_id(names[activation])
    assert quant is not None
    return Declared(Scheme(parse_weight_id(names[weight]), replace(quant, scale_rule=mode, rounding="nearest-even")))
