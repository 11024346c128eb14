"""Notes: modules collected by what is wrong with them, so that a finding names all modules that share its cause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from omniplat.findings import Finding, finding


@dataclass(frozen=True, slots=True, order=True)
class _Cause:
    """What makes two notes one finding. `detail` fills the message, see `_message`."""

    code: str
    severity: str
    file: str
    rule: str
    detail: str
    fix: str


class Notes:
    """Collects notes of one component while its modules are resolved one by one."""

    def __init__(self) -> None:
        self._modules: dict[_Cause, set[str]] = {}

    def add(
        self,
        module: str,
        code: str,
        *,
        severity: str = "",
        file: str = "",
        rule: str = "",
        detail: str = "",
        fix: str = "",
    ) -> None:
        cause = _Cause(code, severity, file, rule, detail, fix)
        self._modules.setdefault(cause, set()).add(module)

    def findings(self, component: str) -> list[Finding]:
        """One finding per cause, in a stable order."""
        return [
            finding(
                cause.code,
                _message(cause, names),
                severity=cause.severity,
                component=component,
                file=cause.file,
                rule=cause.rule,
                modules=names,
                fix=cause.fix,
            )
            for cause, names in sorted(self._modules.items())
        ]


def _message(cause: _Cause, names: Collection[str]) -> str:
    if cause.code == "rule-overreach":
        return f"{cause.rule} also matches {len(names)} module(s) that it does not name; their tensors decided"
    if cause.code == "rule-readings-differ":
        return (
            f"{cause.rule} means different things to the tool that wrote it and to the engines that read it; "
            f"the tensors of {len(names)} module(s) decided"
        )
    if cause.code == "missing-tensor":
        first = cause.detail.partition(",")[0]
        return f"{min(names)}.{first} is in no shard (needed: {cause.detail})"
    if cause.code == "unexpected-tensor":
        return f"no role explains {cause.detail} of {min(names)}"
    return cause.detail
