"""vllm-omni's own serialized formats: mxfp8, mxfp4, mxfp4_dualscale and int8, one method for all linear layers.

`ignored_layers` is written in the engine's names, which differ from the checkpoint's where layers are fused
(`to_qkv`) or renamed (`ffn.net_0.proj`, `to_out`). The engine compares whole names; its documentation calls the
entries patterns. Without the serialized flag the same methods ask the engine to quantize a 16-bit checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import AnyOf, AtOrBelow, Exact, Matcher, Segments
from omniplat.formats.metadata import Fields
from omniplat.formats.recognise.families import NUMBERS
from omniplat.scheme import Scheme, parse_activation_id, parse_weight_id

#: Method -> (weight id, activation id, the flag that says the checkpoint is quantized).
_METHODS: dict[str, tuple[str, str, str]] = {
    "mxfp8": ("mxfp8", "mxfp8", "is_checkpoint_mxfp8_serialized"),
    "mxfp4": ("mxfp4", "mxfp4", "is_checkpoint_mxfp4_serialized"),
    "mxfp4_dualscale": ("mxfp4-dual", "mxfp4-dual", "is_checkpoint_serialized"),
    "int8": ("int8-channel", "int8-token", "is_checkpoint_int8_serialized"),
}
#: Keys that only vllm-omni's mxfp4 has; the method's name alone is also gpt-oss's.
_MXFP4_KEYS = frozenset(
    {
        *("is_checkpoint_mxfp4_serialized", "ignored_layers", "w4a8_fallback_steps", "w4a8_fallback_layers"),
        *("require_smooth_scale", "mxfp4_scale_alg"),
    }
)
#: Last segments of the engine's names -> segments in the checkpoint: what its diffusion models fuse and rename.
_PARTS: dict[str, tuple[str, ...]] = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_out": ("to_out.0",),
}
_RENAMED = (("net_0", "net.0"), ("net_1", "net.1"), ("net_2", "net.2"))


@dataclass(frozen=True, slots=True)
class OmniNativeFormat:
    name: str = "vllm-omni"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if not isinstance(method, str):
            return False
        method = method.lower().replace("-", "_")
        return method in _METHODS and (method != "mxfp4" or not _MXFP4_KEYS.isdisjoint(source.values))

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        method = source.string("quant_method").lower().replace("-", "_")
        weight, activation, flag = _METHODS[method]
        if source.string("activation_scheme", "dynamic") != "dynamic":
            raise UnsupportedOptionError(
                f"{source.string('activation_scheme')!r} is not 'dynamic', the only scheme of {method}",
                file=source.file,
                key=source.path("activation_scheme"),
            )
        is_serialized = source.boolean(flag, False)
        declared = Declared(
            Scheme(parse_weight_id(weight), at_run_time(parse_activation_id(activation), "floor")),
            NUMBERS if weight.startswith("mx") else "",
        )
        rules = [
            _rule(name, entry, parts_of)
            for name in ("ignored_layers", "modules_to_not_convert")
            for entry in source.strings(name)
        ]
        return Declaration(
            self.name,
            source.file,
            declared,
            tuple(rules),
            speaks_of_all=is_serialized,
            default_key=f"quant_method={method}",
        )


def _rule(kind: str, entry: str, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    names = checkpoint_names(entry, parts_of)
    literal: Matcher = AnyOf(tuple(matcher for name in names for matcher in (AtOrBelow(name), Segments(name))))
    consumer: Matcher = AnyOf(tuple(Exact(name) for name in names))
    return Rule(f"{kind}[{entry!r}]", "ignore", entry, literal, literal, consumer, NOT_QUANTIZED, -1)


def checkpoint_names(entry: str, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """`entry` itself and what it is called in the checkpoint if it is one of the engine's names."""
    plain = entry.removesuffix(".weight")
    for theirs, ours in _RENAMED:
        plain = ".".join(ours if part == theirs else part for part in plain.split("."))
    names = dict.fromkeys((entry, plain))
    for fused, parts in {**_PARTS, **parts_of}.items():
        if plain == fused or plain.endswith("." + fused):
            head = plain.removesuffix(fused)
            names.update(dict.fromkeys(head + part for part in parts))
    return tuple(names)


FORMAT = OmniNativeFormat()
