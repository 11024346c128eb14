"""Runs diffusion pipelines by `vllm_omni.Omni` on CPU in a process of its own: `python omni_serve.py REQUESTS ANSWERS`.

REQUESTS is a list of `Request`s as JSON; ANSWERS gets a list of `Answer`s.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

#: Modules of Qwen-Image that hold several of a checkpoint's, or have another name there.
PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_out": ("to_out.0",),
    "net_0.proj": ("net.0.proj",),
    "net_2": ("net.2",),
}
#: Parts of a pipeline whose modules are looked at; those of the first have no prefix in an answer.
TRANSFORMERS = ("transformer", "transformer_2")


@dataclass(frozen=True)
class Request:
    """A pipeline to run; `quantization` and `options` are what `Omni` is given. `method` is that of a checkpoint in 16
    bit."""

    key: str
    path: str
    quantization: str | Mapping[str, Any] | None = None
    method: str | Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """`image` are the pixels of what came out. `methods` are names of classes by module of the transformer, `errors`
    relative L2 distances of the outputs of quantized modules to the oracle's; `held` are bytes that omniplat's layers
    hold afterwards. Or `error` is a traceback."""

    key: str
    image: Sequence[int] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    log: Sequence[str] = ()


def run_all(requests: Sequence[Request], mode: str, folder: Path) -> dict[str, Answer]:
    """Answers by key, from another process that starts with OMNIPLAT_DISPATCH as `mode` says."""
    asked, answered = folder / f"requests-{mode}.json", folder / f"answers-{mode}.json"
    asked.write_text(json.dumps([asdict(request) for request in requests]))
    environment = {
        **os.environ,
        "OMNIPLAT_DISPATCH": mode,
        "OMNIPLAT_VLLM_OMNI_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(Path(__file__)), str(asked), str(answered)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert answered.is_file(), done.stdout[-4000:] + done.stderr[-4000:]
    return {item["key"]: Answer(**item) for item in json.loads(answered.read_text())}


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(request: Request, seen: list[Any]) -> Answer:
    import numpy as np
    from PIL.Image import Image
    from vllm_omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    log = _Log()
    logger = logging.getLogger("vllm.omniplat")
    logger.addHandler(log)
    omni = None
    try:
        options = dict(request.options)
        if request.quantization is not None:
            options["quantization"] = request.quantization
        omni = Omni(model=request.path, enforce_eager=True, **options)
        sampling = OmniDiffusionSamplingParams(
            height=32, width=32, num_frames=5, num_inference_steps=2, seed=0, true_cfg_scale=1.0, guidance_scale=1.0
        )
        made = omni.generate({"prompt": "a cat"}, sampling)[0].images[0]
        pixels = (np.asarray(made, np.float64).ravel() * (1 if isinstance(made, Image) else 255)).round().astype(int)
        modules = _modules(seen)
        named = ((name, getattr(module, "quant_method", None)) for name, module in modules.items())
        methods = {name: type(method).__name__ for name, method in named if method is not None}
        held = {name: modules[name].omniplat.nbytes for name in methods if hasattr(modules[name], "omniplat")}
        # A layer without its memory cannot be asked.
        present = {name: module for name, module in modules.items() if held.get(name)}
        errors = dict(_errors(request, present))
        return Answer(request.key, pixels.tolist(), methods, errors, held, log=log.lines)
    except BaseException:
        return Answer(request.key, error=traceback.format_exc(), log=log.lines)
    finally:
        logger.removeHandler(log)
        if omni is not None:
            omni.close()
        del omni
        gc.collect()


def _modules(seen: list[Any]) -> dict[str, Any]:
    """Modules of the transformers of the pipeline that is new in this process: the engine runs in it, and keeps it to
    itself."""
    from torch.nn import Module

    (pipeline,) = (
        item
        for item in gc.get_objects()
        if isinstance(item, Module)
        and "transformer" in item.__dict__.get("_modules", {})
        and not any(item is other for other in seen)
    )
    seen.append(pipeline)
    found = {}
    for part in TRANSFORMERS:
        if part in pipeline._modules:
            prefix = "" if part == TRANSFORMERS[0] else f"{part}."
            found |= {prefix + name: module for name, module in getattr(pipeline, part).named_modules()}
    return found


def _errors(request: Request, found_modules: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every quantized module against the oracle, from what is on disk."""
    import numpy as np
    import torch

    from omniplat import oracle
    from omniplat.api import make_planned
    from omniplat.checkpoint.reader import ShardReader
    from omniplat.online import parse_method
    from omniplat.scheme import Scheme
    from tests.goldens.check import _canonical

    planned = make_planned(request.path, "cpu")
    readers = {item.component.name: ShardReader(item.component.root) for item in planned.resolutions}
    stored = {
        ("" if item.layer.component == TRANSFORMERS[0] else f"{item.layer.component}.") + module.name: (item, module)
        for item in planned.layers
        for module in item.packed.modules
    }
    method = parse_method(request.method) if request.method is not None else None
    generator = torch.Generator().manual_seed(0)
    for name, module in found_modules.items():
        if not type(getattr(module, "quant_method", None)).__name__.startswith("Omniplat"):
            continue
        leaf = next((leaf for leaf in PARTS if name.endswith(f".{leaf}")), name.rpartition(".")[2])
        head = name.removesuffix(leaf)
        x = torch.randn(5, module.input_size, generator=generator).to(torch.bfloat16)
        with torch.inference_mode():
            found = module.quant_method.apply(module, x).double().numpy()
        parts = []
        for part in PARTS.get(leaf, (leaf,)):
            item, of_part = stored[head + part]
            weight = _canonical(of_part, readers[item.layer.component])
            if method is not None:
                weight = oracle.quantize_weight(weight.tensors["codes"].astype(np.float32), method.weight)
                weight = replace(weight, scheme=Scheme(method.weight, method.activation))
            bare = replace(weight, tensors={role: array for role, array in weight.tensors.items() if role != "bias"})
            parts.append(oracle.linear(x.float().numpy(), bare))
        wanted = np.concatenate(parts, axis=-1)
        yield name, float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> None:
    requests = [Request(**item) for item in json.loads(Path(sys.argv[1]).read_text())]
    seen: list[Any] = []
    answers = [_run(request, seen) for request in requests]
    Path(sys.argv[2]).write_text(json.dumps([asdict(answer) for answer in answers]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
