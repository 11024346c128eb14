"""A backend that claims a name that another distribution has."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(name="toy", api_version=1, kinds=("cpu",), capabilities=())
