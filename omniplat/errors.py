"""Every exception that omniplat raises, and the text of every message.

Each error has typed fields, `to_dict()` for JSON output and one readable message. Nothing else in the
package formats an error message, so the wording of two places can never drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class OmniplatError(Exception):
    """Base of all errors of this package. `fields` holds what `to_dict` reports beside type and message."""

    def __init__(self, message: str, fields: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, object] = dict(fields or {})

    def to_dict(self) -> dict[str, object]:
        return {"error": type(self).__name__, "message": self.message, **self.fields}


class UnsupportedCombinationError(OmniplatError, NotImplementedError):
    """No kernel of the chosen backend accepts a layer. Raised before any weight is read.

    `reasons` are lines "backend/kernel  needs X, found Y", one per kernel that was asked.
    """

    def __init__(
        self,
        device: str,
        op: str,
        scheme: str,
        layers: Sequence[str],
        reasons: Sequence[str],
        suggestions: Sequence[str] = (),
    ) -> None:
        weight, _, activation = scheme.partition("/")
        act = "unquantized activations" if activation in ("", "a16") else f"{activation} activations"
        lines = [f"{device} cannot run {op} with {weight} weights, {act}"]
        lines += [f"  layer  {name}" for name in layers[:3]]
        if len(layers) > 3:
            lines.append(f"         and {len(layers) - 3} more")
        lines += [f"  {reason}" for reason in reasons]
        if suggestions:
            lines.append("  try: " + "; ".join(suggestions))
        super().__init__(
            "\n".join(lines),
            {
                "device": device,
                "op": op,
                "scheme": scheme,
                "layers": list(layers),
                "reasons": list(reasons),
                "suggestions": list(suggestions),
            },
        )
        self.reasons = tuple(reasons)
        self.layers = tuple(layers)


class InvalidCheckpointError(OmniplatError, ValueError):
    """A file of the checkpoint cannot be read, or its tensors contradict its metadata.

    `file` is relative to the checkpoint, `key` names the JSON key, tensor or module where one is known.
    """

    def __init__(self, problem: str, *, file: str = "", key: str = "") -> None:
        where = ": ".join(part for part in (file, key) if part)
        super().__init__(f"{where}: {problem}" if where else problem, {"file": file, "key": key, "problem": problem})
        self.file = file
        self.key = key
        self.problem = problem


class UnsupportedOptionError(InvalidCheckpointError):
    """The metadata asks for something that is understood but that no reader here can honour."""


class IncompleteMetadataError(UnsupportedOptionError):
    """The metadata leaves out what its method cannot do without, and what another file beside it may hold."""


class UnknownFormatError(OmniplatError, ValueError):
    """The metadata names a quantization method that no installed format module knows; the message lists them."""


class InvalidSchemeError(OmniplatError, ValueError):
    """A scheme id cannot be parsed, or the fields of a scheme contradict each other."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"scheme {text!r}: {problem}", {"scheme": text, "problem": problem})


class InvalidDeviceError(OmniplatError, ValueError):
    """A device string names a kind or an architecture that does not exist."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"device {text!r}: {problem}", {"device": text, "problem": problem})


class UsageError(OmniplatError, ValueError):
    """An argument of a command or function is wrong or contradicts another."""


class BackendNotInstalledError(OmniplatError, ImportError):
    """A plugin, or the vendor library it wraps, is not installed. `install` is the exact pip line.

    `kind` is what the plugin is: a backend, a format or a model table.
    """

    def __init__(self, name: str, missing: str, install: str, *, kind: str = "backend") -> None:
        super().__init__(
            f"{kind} {name!r} needs {missing}, which is not installed; run: {install}",
            {kind: name, "missing": missing, "install": install},
        )
        self.install = install


class BackendLoadError(OmniplatError):
    """A backend or its vendor library is installed but fails to load; `__cause__` has the original error."""

    def __init__(self, name: str, problem: str, *, distribution: str = "", kind: str = "backend") -> None:
        origin = f" (from {distribution})" if distribution else ""
        super().__init__(
            f"{kind} {name!r}{origin} failed to load: {problem}",
            {kind: name, "distribution": distribution, "problem": problem},
        )


class BackendUnavailableError(OmniplatError):
    """A backend is installed but cannot run here: no such device, or its kernels are only planned on."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"backend {name!r} cannot run here: {problem}", {"backend": name, "problem": problem})


class BackendConflictError(OmniplatError):
    """Two distributions register the same name in an entry-point group."""

    def __init__(self, name: str, group: str, distributions: Sequence[str]) -> None:
        super().__init__(
            f"{group}: {name!r} is registered by {' and '.join(distributions)}; uninstall one of them",
            {"name": name, "group": group, "distributions": list(distributions)},
        )


class LayerMemoryError(OmniplatError, MemoryError):
    """Memory does not suffice for a layer that is being loaded.

    `nbytes` is what its weight takes as stored; what a kernel makes of it may take more. `free` is what the device has
    left, None where that is not known.
    """

    def __init__(self, layer: str, device: str, nbytes: int, free: int | None = None) -> None:
        left = "" if free is None else f"; {_mebibytes(free)} are free there"
        super().__init__(
            f"out of memory on {device} while loading {layer}, {_mebibytes(nbytes)} as stored{left}",
            {"layer": layer, "device": device, "bytes": nbytes, "free": free},
        )


def _mebibytes(count: int) -> str:
    return f"{count} bytes" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


class BackendApiError(OmniplatError):
    """A backend was written for an interface version that this omniplat does not speak."""

    def __init__(self, name: str, found: int, supported: Sequence[int]) -> None:
        super().__init__(
            f"backend {name!r} speaks interface version {found}; "
            f"this omniplat speaks {', '.join(str(v) for v in supported)}",
            {"backend": name, "found": found, "supported": list(supported)},
        )
