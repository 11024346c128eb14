"""ResolvedModule: one checkpoint module after rules and headers have been reconciled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.storage import Storage
from omniplat.scheme import Scheme


@dataclass(frozen=True, slots=True)
class DecidedBy:
    """The rule that gave a module its scheme: the file, the rule's text, and under whose reading it applied."""

    file: str
    rule: str
    reading: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedModule:
    """One checkpoint module.

    `name`      the weight tensor's name without its role suffix.
    `declared`  what the metadata says, None where it says nothing.
    `scheme`    what will be loaded: stored weight, declared activation.
    `tensors`   canonical role (`codes`, `scale`, ...; also `weight_shape`) -> tensor in the checkpoint.
    `experts`   leading dimension of a stacked 3-D weight, 0 for a plain 2-D one.
    `recognised`  False where the tensors fit no scheme; `scheme` is then what is declared.
    `status`    "ok" | "unquantized" | "invalid" | "unsupported" (understood, but `problems` say why nothing runs it).
    """

    name: str
    component: str
    declared: Scheme | None
    scheme: Scheme
    storage: Storage
    out_features: int
    in_features: int
    tensors: Mapping[str, TensorInfo]
    decided_by: DecidedBy
    status: str = "ok"
    experts: int = 0
    stored_dtype: str = ""
    problems: tuple[str, ...] = field(default=())
    recognised: bool = True

    @property
    def stored_id(self) -> str:
        """The weight id that the tensors show; "unknown" where they show none."""
        return self.scheme.weight_id if self.recognised else "unknown"

    @property
    def stored_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())
