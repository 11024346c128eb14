"""A backend that has a probe that fails."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="bad-probe", api_version=1, kinds=("cpu",), capabilities=(), probe="omniplat_bad_probe.spec:probe"
)


def probe() -> None:
    raise OSError("the device does not answer")
