"""HQQ checkpoints: one integer scheme with fractional zero points, and leaf names that stay in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import AnyOf, Suffix
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import substring_rules
from omniplat.scheme import Scheme, TensorQuant

_BITS = (1, 2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class HqqFormat:
    name: str = "hqq"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return any(isinstance(value, dict) and "weight_quant_params" in value for value in source.values.values())
        return bool(method == "hqq")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        """`quant_config` is one configuration, or one for each kind of layer (`self_attn.q_proj`) without a default."""
        settings = source.child("quant_config") or source
        rules = list(substring_rules(source, ("skip_modules", "modules_to_not_convert"), parts_of))
        if "weight_quant_params" in settings.values or "nbits" in settings.values:
            default = _declared(settings)
            return Declaration(
                self.name, source.file, default, tuple(rules), default_key="quant_config", notes=_notes(settings)
            )
        for name, fields in settings.objects():
            rules.append(_layer_rule(name, _declared(fields)))
        return Declaration(self.name, source.file, NOT_QUANTIZED, tuple(rules), default_key="quant_config")


def _notes(settings: Fields) -> tuple[str, ...]:
    """hqq ignores that scales or zero points shall be quantized, and no release of it writes such a file."""
    ignored = [name for name in ("scale_quant_params", "zero_quant_params") if settings.has(name)]
    return tuple(f"{settings.path(name)} has no effect: hqq writes plain scales and zero points" for name in ignored)


def _layer_rule(name: str, declared: Declared) -> Rule:
    suffix = AnyOf((Suffix(name),))
    return Rule(f"quant_config[{name!r}]", "quant_config", name, suffix, suffix, suffix, declared)


def _declared(settings: Fields) -> Declared:
    params = settings.child("weight_quant_params") or settings
    bits = params.values.get("nbits")
    if isinstance(bits, float) and bits.is_integer():
        bits = int(bits)
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise params.wrong("nbits", "an integer")
    if bits not in _BITS:
        raise UnsupportedOptionError(f"{bits} bits are not known", file=params.file, key=params.path("nbits"))
    axis = params.integer("axis", 1)
    if axis not in (0, 1):
        raise UnsupportedOptionError(f"there is no axis {axis}", file=params.file, key=params.path("axis"))
    element = f"uint{max(bits, 2)}"
    if axis == 0:
        # weights of different rows share a scale: nothing less than one for each weight says so in the order of rows
        return Declared(Scheme(TensorQuant(element, "block", block=(1, 1), symmetric=False)))
    group = params.integer("group_size", 0)
    if group <= 0:
        return Declared(Scheme(TensorQuant(element, "channel", symmetric=False)))
    return Declared(Scheme(TensorQuant(element, "group", group, symmetric=False)))


FORMAT = HqqFormat()
