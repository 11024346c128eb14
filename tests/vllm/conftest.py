"""These tests run in the environment that `environment.sh` builds; elsewhere there is nothing to collect."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
