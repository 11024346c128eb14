"""Methods that quantize a model where it stands: what they are called, what they take, which layers they leave alone.

A method is a name (`"mxfp8"`) or an object with its options: `{"method": "fp8", "weight_block_size": [128, 128]}`.
Components are routed by an object of such: `{"transformer": {"method": "fp8"}, "vae": None, "default": "int8"}`.
Everything here is data about names and schemes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from omniplat.errors import UsageError
from omniplat.formats.base import at_run_time, expand_fused
from omniplat.formats.matching import AtOrBelow, Matcher, ModuleIndex, Pattern
from omniplat.scheme import TensorQuant, parse_activation_id, parse_weight_id

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Option:
    """An option's default, and what it may be: a type, or the values of a closed set."""

    default: object
    kind: type = str
    values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One row of the table: what the method's defaults store and execute, and its options beside `COMMON`."""

    weight: str
    activation: str
    options: Mapping[str, Option] = field(default_factory=dict)


#: What every method takes.
COMMON: Mapping[str, Option] = {"ignored_layers": Option((), list), "keep_sensitive": Option(True, bool)}

METHODS: Mapping[str, MethodInfo] = {
    "fp8": MethodInfo(
        "fp8-tensor",
        "fp8-tensor",
        {
            "activation_scheme": Option("dynamic", str, ("dynamic", "static")),
            "granularity": Option("tensor", str, ("tensor", "channel")),
            "weight_block_size": Option(None, list),
            "input_scales": Option(None, dict),
        },
    ),
    "int8": MethodInfo("int8-channel", "int8-token", {"activation_scheme": Option("dynamic", str, ("dynamic",))}),
    "mxfp8": MethodInfo("mxfp8", "mxfp8"),
    "mxfp4": MethodInfo("mxfp4", "mxfp4"),
    "mxfp4_dualscale": MethodInfo("mxfp4-dual", "mxfp4-dual", {"num_bf16_fallback_layers": Option(5, int)}),
    "nvfp4": MethodInfo("nvfp4", "nvfp4"),
    "int4": MethodInfo("int4-g128", "a16", {"group_size": Option(128, int)}),
    "bitsandbytes": MethodInfo(
        "nf4-b64",
        "a16",
        {"quant_type": Option("nf4", str, ("nf4", "fp4")), "compress_statistics": Option(True, bool)},
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method with its options. `leading_blocks` transformer blocks at the start stay as they are; `input_scales`
    are static scales of inputs by module name, of all or of some; `keep_sensitive` leaves out what
    `omniplat.models.advice` names; `compress_statistics` quantizes bitsandbytes' scales too."""

    name: str
    weight: TensorQuant
    activation: TensorQuant | None
    ignored_layers: tuple[str, ...] = ()
    leading_blocks: int = 0
    keep_sensitive: bool = True
    input_scales: Mapping[str, float] = field(default_factory=dict)
    compress_statistics: bool = False

    @property
    def is_static(self) -> bool:
        return self.activation is not None and not self.activation.dynamic


@dataclass(frozen=True, slots=True)
class Routing:
    """Which method a module gets: that of the longest named prefix, bounded by dots; else the default."""

    components: Mapping[str, Method | None]
    default: Method | None = None

    def component_of(self, name: str) -> str | None:
        """The named prefix that a module lies at or below; None where it lies below none."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            prefix = ".".join(parts[:end])
            if prefix in self.components:
                return prefix
        return None

    def of(self, name: str) -> Method | None:
        component = self.component_of(name)
        return self.default if component is None else self.components[component]


def parse_method(spec: str | Mapping[str, Any], *, calibrated: bool = False) -> Method:
    """A method by name, or by name and options. Raises UsageError naming what is known.

    `calibrated`: static scales of inputs need not be given, somebody will find them.
    """
    given = {"method": spec} if isinstance(spec, str) else dict(spec)
    names = [given.pop(key) for key in ("method", "quant_method") if key in given]
    name = str(names[0]).lower().replace("-", "_") if names else ""
    info = METHODS.get(name)
    if info is None:
        raise UsageError(f"no method {name or given!r}; known: {', '.join(METHODS)}")
    options = {**COMMON, **info.options}
    if unknown := sorted(set(given) - set(options)):
        raise UsageError(f"{name} has no option {', '.join(unknown)}; known: {', '.join(options)}")
    values = {key: _value(name, key, given.get(key, option.default), option) for key, option in options.items()}
    weight, activation = _scheme(name, info, values, calibrated=calibrated)
    return Method(
        name,
        parse_weight_id(weight),
        at_run_time(parse_activation_id(activation), "floor"),
        tuple(values["ignored_layers"]),
        values.get("num_bf16_fallback_layers", 0),
        values["keep_sensitive"],
        values.get("input_scales") or {},
        values.get("compress_statistics", False),
    )


def parse_routing(spec: str | Mapping[str, Any] | None, *, calibrated: bool = False) -> Routing:
    """A method for everything, or an object that maps components and `default` to methods or None."""
    if spec is None:
        return Routing({})
    if isinstance(spec, str) or "method" in spec or "quant_method" in spec:
        return Routing({}, parse_method(spec, calibrated=calibrated))
    parsed = {
        key: None if value in (None, "none") else parse_method(value, calibrated=calibrated)
        for key, value in spec.items()
    }
    default = parsed.pop(DEFAULT, None)
    return Routing(parsed, default)


def ignored_by(
    pattern: str, names: Iterable[str], parts_of: Mapping[str, tuple[str, ...]] | None = None
) -> frozenset[str]:
    """The modules that an entry of `ignored_layers` names: a module, what is below it, or what a pattern fits.

    `*` stands for any text, and the pattern has to fit a whole name or what contains it up to a dot; `re:` is matched
    from the start of a name. `parts_of` maps engines' fused names to the modules behind them. Raises UsageError for a
    broken expression.
    """
    index = ModuleIndex(names)
    try:
        matchers: list[Matcher] = []
        if pattern.startswith("re:"):
            matchers.append(Pattern(re.compile(pattern.removeprefix("re:"))))
        elif "*" in pattern:
            whole = translate(pattern.replace("[", "[[]").replace("?", "[?]"))
            above = translate(pattern.replace("[", "[[]").replace("?", "[?]") + ".*")
            matchers += [Pattern(re.compile(text)) for text in (whole, above)]
        else:
            matchers += [AtOrBelow(text) for text in expand_fused(pattern, parts_of or {})]
        return frozenset(name for matcher in matchers for name in matcher.hits(index))
    except re.error as exc:
        raise UsageError(f"ignored_layers: {pattern!r} is no regular expression: {exc}") from exc


#: A transformer block in a module's path, the outermost: the list that it is in, and its number there.
_BLOCK = re.compile(r"(.*?(?:^|\.)(?:\w*blocks|layers?|h))\.(\d+)(?:\.|$)")


def block_of(name: str) -> tuple[str, int] | None:
    """The transformer block that a module belongs to, as its list's name and its number; None for no block."""
    match = _BLOCK.match(name)
    return (match[1], int(match[2])) if match else None


def no_leading_blocks(method: Method, where: str) -> UsageError:
    """The error for a model whose transformer blocks are not recognised. Also where their number is the default: that
    they stay is what the method promises, and everything would be quantized without a word."""
    return UsageError(
        f"{method.name} leaves the first {method.leading_blocks} transformer blocks in 16 bit, and none are recognised "
        f"{where}: num_bf16_fallback_layers=0 quantizes all, and ignored_layers names what stays"
    )


def _value(method: str, key: str, value: object, option: Option) -> Any:
    if value is None or value == option.default:
        return option.default
    if option.kind is list and isinstance(value, (list, tuple)):
        value = list(value)
    if not isinstance(value, option.kind) or (option.kind is int and isinstance(value, bool)):
        raise UsageError(f"{method}: {key} must be of type {option.kind.__name__}, found {value!r}")
    if option.values and value not in option.values:
        raise UsageError(f"{method}: {key} is one of {', '.join(map(str, option.values))}, found {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        raise UsageError(f"{method}: {key} is negative: {value}")
    return value


def _scheme(name: str, info: MethodInfo, values: Mapping[str, Any], *, calibrated: bool) -> tuple[str, str]:
    """Ids of what the options ask for."""
    if name == "int4":
        if values["group_size"] < 1:
            raise UsageError("int4: group_size must be positive")
        return f"int4-g{values['group_size']}", info.activation
    if name == "bitsandbytes":
        return ("nf4-b64" if values["quant_type"] == "nf4" else "fp4bnb-b64"), info.activation
    if name != "fp8":
        return info.weight, info.activation
    static = values["activation_scheme"] == "static"
    if static and not (values["input_scales"] or calibrated):
        raise UsageError("fp8: a static activation_scheme needs input_scales, {module: scale}, or calibration inputs")
    if values["input_scales"] and not static:
        raise UsageError("fp8: input_scales are for activation_scheme='static'")
    block = values["weight_block_size"]
    if block is not None:
        if static or values["granularity"] != "tensor":
            raise UsageError("fp8: weight_block_size goes with neither granularity nor static activations")
        if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
            raise UsageError(f"fp8: weight_block_size must be two positive numbers, found {block}")
        return f"fp8-block{block[0]}x{block[1]}", f"fp8-g{block[1]}"
    if values["granularity"] == "channel":
        return "fp8-channel", "fp8-tensor-static" if static else "fp8-token"
    return "fp8-tensor", "fp8-tensor-static" if static else "fp8-tensor"
