"""A backend that was written for another interface."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(name="wrong-api", api_version=99, kinds=("cpu",), capabilities=())
