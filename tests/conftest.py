"""What all tests share: no example of a property has a deadline, since a loaded machine would miss it."""

from __future__ import annotations

from importlib.util import find_spec

# The environment of the tests inside vLLM has no hypothesis, and needs none.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")
