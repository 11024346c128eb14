"""AWQ checkpoints (AutoAWQ, GPTQModel's AWQ): one 4-bit scheme and a list of name parts that stay in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import Declaration, Declared
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import substring_rules
from omniplat.scheme import Scheme, TensorQuant

#: Versions whose tensors lie as GEMM's do; the others lay words out for one kernel.
_VERSIONS = ("gemm", "ipex")


@dataclass(frozen=True, slots=True)
class AwqFormat:
    name: str = "awq"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return {"w_bit", "q_group_size"} <= source.values.keys()
        return method in ("awq", "auto_awq", "awq_marlin")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        version_key = "version" if source.has("version") else "checkpoint_format"
        version = (source.string(version_key) or "gemm").lower()
        if version not in _VERSIONS:
            raise UnsupportedOptionError(
                f"{version!r} is stored in the layout of one kernel; supported: {', '.join(_VERSIONS)}",
                file=source.file,
                key=source.path(version_key),
            )
        bits_key = "bits" if source.has("bits") else "w_bit"
        bits = source.integer(bits_key, 4)
        if bits != 4:
            raise UnsupportedOptionError(f"AWQ packs 4 bits, found {bits}", file=source.file, key=source.path(bits_key))
        group = source.integer("group_size" if source.has("group_size") else "q_group_size", 128)
        symmetric = not source.boolean("zero_point", True)
        element = "int4" if symmetric else "uint4"
        quant = (
            TensorQuant(element, "group", group, symmetric=symmetric)
            if group > 0
            else TensorQuant(element, "channel", symmetric=symmetric)
        )
        return Declaration(
            self.name,
            source.file,
            Declared(Scheme(quant), "awq"),
            substring_rules(source, ("modules_to_not_convert",), parts_of),
            # AutoAWQ quantizes the decoder's blocks only and does not list the rest.
            speaks_of_all=False,
            default_key=f"{bits_key}={bits}, group_size={group}",
        )


FORMAT = AwqFormat()
