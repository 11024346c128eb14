"""A backend that names itself otherwise than its entry point."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(name="another-name", api_version=1, kinds=("cpu",), capabilities=())
