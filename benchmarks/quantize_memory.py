"""Peak memory of quantizing a model of 64 layers while its weights arrive: a process of its own for each method.

    python benchmarks/quantize_memory.py [--methods mxfp8 ...] [--layers 64] [--width 1024]
                                         [--how arriving standing offload]

Every layer is an `nn.Linear` of `width` x `width` in bf16. `arriving`: the model is on `meta`, a generator makes one
weight after the other. `standing`: the model holds its weights and keeps them for `restore`. `offload`: as arriving,
finished layers go to mapped files. `peak`: the largest resident set (VmHWM) less that before, when everything was
imported and had run once. `held`: the same of anonymous memory at the end, without pages of files. Linux only.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOW = ("arriving", "standing", "offload")
METHODS = ("fp8", "int8", "mxfp8", "mxfp4", "nvfp4", "int4")
_MIB = 1 << 20


def measure(method: str, layers: int, width: int, how: str) -> dict[str, int]:
    """In this process, in bytes: `peak` and `held` above what was there before; `final`, of the quantized layers;
    `layer`, of one weight in bf16."""
    import torch
    from torch import nn

    import omniplat

    def built(count: int, size: int, device: str) -> nn.Sequential:
        with torch.device(device):
            return nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(count)))

    def weights(count: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for index in range(count):
            yield f"{index}.weight", torch.randn(size, size, generator=generator, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        offload = f"{folder}/first" if how == "offload" else None
        omniplat.quantize_model(built(2, 256, "meta"), method, "cpu", weights=weights(2, 256), offload=offload)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, held = _resident("VmRSS"), _resident("RssAnon")
        model = built(layers, width, "cpu" if how == "standing" else "meta")
        given = None if how == "standing" else weights(layers, width)
        offload = f"{folder}/second" if how == "offload" else None
        omniplat.quantize_model(model, method, "cpu", weights=given, offload=offload)
        peak, held = _resident("VmHWM") - before, _resident("RssAnon") - held
        final = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return {"peak": peak, "held": held, "final": final, "layer": 2 * width * width}


def _resident(field: str) -> int:
    """Bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_apart(method: str, layers: int, width: int, how: str) -> dict[str, int]:
    """`measure` in a process of its own."""
    options = ["--methods", method, "--layers", str(layers), "--width", str(width), "--how", how]
    done = subprocess.run([sys.executable, __file__, "--inside", *options], capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--how", choices=HOW, nargs="+", default=HOW[:1])
    parser.add_argument("--inside", action="store_true", help="measure in this process, print JSON")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.methods[0], options.layers, options.width, options.how[0])))
        return
    print(
        f"{options.layers} layers of {options.width} x {options.width} in bf16, Python {platform.python_version()}; MiB"
    )
    print(f"{'method':10s} {'how':10s} {'bf16':>8s} {'final':>8s} {'layer':>8s} {'peak':>8s} {'held':>8s}")
    for method in options.methods:
        for how in options.how:
            found = measure_apart(method, options.layers, options.width, how)
            sizes = [options.layers * found["layer"], found["final"], found["layer"], found["peak"], found["held"]]
            print(f"{method:10s} {how:10s} " + " ".join(f"{size / _MIB:8.1f}" for size in sizes))


if __name__ == "__main__":
    main()
