"""omniplat: quantized checkpoints on any accelerator.

Importing this package imports neither torch nor NumPy; each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omniplat._version import __version__

if TYPE_CHECKING:
    from omniplat import errors as errors
    from omniplat.api import load as load
    from omniplat.api import plan as plan
    from omniplat.detect import detect_devices as devices
    from omniplat.document import Plan as Plan
    from omniplat.info import backend_reports as backends
    from omniplat.modules.load import load_into as load_into
    from omniplat.modules.quantize import quantize_model as quantize_model
    from omniplat.modules.quantize import restore as restore
    from omniplat.scheme import Scheme as Scheme

#: public name -> "module" or "module:attribute".
_EXPORTS = {
    "Plan": "omniplat.document:Plan",
    "Scheme": "omniplat.scheme:Scheme",
    "backends": "omniplat.info:backend_reports",
    "devices": "omniplat.detect:detect_devices",
    "errors": "omniplat.errors",
    "load": "omniplat.api:load",
    "load_into": "omniplat.modules.load:load_into",
    "plan": "omniplat.api:plan",
    "quantize_model": "omniplat.modules.quantize:quantize_model",
    "restore": "omniplat.modules.quantize:restore",
}

__all__ = [
    "Plan",
    "Scheme",
    "__version__",
    "backends",
    "devices",
    "errors",
    "load",
    "load_into",
    "plan",
    "quantize_model",
    "restore",
]


def __getattr__(name: str) -> Any:
    target = _EXPORTS.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted(__all__)
