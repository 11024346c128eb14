"""Where finished layers go when they are not to stay on the device: host memory, or files that are mapped."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from omniplat.errors import UsageError

_HOST = "cpu"


class Offload:
    """ "cpu", or a folder: one file for each layer, which is mapped, so that its pages are read when it runs.

    accelerate's `cpu_offload(model, execution_device=...)` brings such layers to an accelerator when they run.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        """Raises UsageError for a folder that cannot be made or has something in it."""
        self._folder = None if where == _HOST else Path(where)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            used = any(self._folder.iterdir())
        except OSError as exc:
            raise UsageError(f"offload: {exc}") from exc
        if used:
            raise UsageError(f"offload: {self._folder} is not empty")

    def move(self, name: str, layer: nn.Module) -> None:
        """Move a layer's buffers there. `name` is that of the layer."""
        if self._folder is None:
            layer.to(_HOST)
            return
        held = {key: buffer.detach().to(_HOST).contiguous() for key, buffer in layer.named_buffers()}
        path = self._folder / f"{name}.safetensors"
        save_file(held, path)
        with safe_open(path, framework="pt") as file:
            for key in held:
                layer._buffers[key] = file.get_tensor(key)
