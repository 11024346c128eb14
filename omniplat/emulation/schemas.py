"""What an operator of a vendor looks like, as data: the text that torch prints of the genuine registration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One operator of a vendor's library; of a Python library one function, whose `namespace` is its module.

    `text`      the schema without its namespace: "npu_swiglu(Tensor input, int dim=-1) -> Tensor"; of a function its
                signature without annotations: "shuffle_weight(x, layout=(16, 16), use_int4=False)".
    `versions`  of the library that register it like this, as a specifier; "" for every one.
    `archs`     that the vendor implements it for; empty means every one.
    """

    namespace: str
    text: str
    versions: str = ""
    archs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name with its overload: "npu_grouped_matmul.List"."""
        return self.text.partition("(")[0]

    @property
    def qualified(self) -> str:
        return f"{self.namespace}::{self.name}"

    def exists_in(self, version: str) -> bool:
        """True where that version of the library registers this schema."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def of_version(schemas: Iterable[OpSchema], version: str) -> tuple[OpSchema, ...]:
    """The schemas that one version of the library registers."""
    return tuple(schema for schema in schemas if schema.exists_in(version))
