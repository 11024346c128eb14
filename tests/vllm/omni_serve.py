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
}


@dataclass(frozen=True)
class Request:
    """A pipeline to run; `quantization` is what `Omni` is given. `method` is that of a checkpoint in 16 bit."""

    key: str
    path: str
    quantization: str | Mapping[str, Any] | None = None
    method: str | Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """`image` are the pixels of what came out. `methods` are names of classes by module of the transformer, `errors`
    relative L2 distances of the outputs of quantized modules to the oracle's. Or `error` is a traceback."""

    key: str
    image: Sequence[int] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
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
    from vllm_omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    log = _Log()
    logger = logging.getLogger("vllm.omniplat")
    logger.addHandler(log)
    omni = None
    try:
        options = {} if request.quantization is None else {"quantization": request.quantization}
        omni = Omni(model=request.path, enforce_eager=True, **options)
        sampling = OmniDiffusionSamplingParams(height=32, width=32, num_inference_steps=2, seed=0, true_cfg_scale=1.0)
        image = np.array(omni.generate({"prompt": "a cat"}, sampling)[0].images[0])
        model = _transformer(seen)
        linears = {
            name: type(m.quant_method).__name__ for name, m in model.named_modules() if hasattr(m, "quant_method")
        }
        return Answer(request.key, image.ravel().tolist(), linears, dict(_errors(request, model)), "", log.lines)
    except BaseException:
        return Answer(request.key, error=traceback.format_exc(), log=log.lines)
    finally:
        logger.removeHandler(log)
        if omni is not None:
            omni.close()
        del omni
        gc.collect()


def _transformer(seen: list[Any]) -> Any:
    """The transformer that is new in this process: the engine runs in it, and keeps it to itself."""
    (found,) = (
        item
        for item in gc.get_objects()
        if type(item).__name__ == "QwenImageTransformer2DModel"
        and hasattr(item, "quant_config")
        and not any(item is other for other in seen)
    )
    seen.append(found)
    return found


def _errors(request: Request, model: Any) -> Iterator[tuple[str, float]]:
    """Every quantized module against the oracle, from what is on disk."""
    import numpy as np
    import torch

    from omniplat import oracle
    from omniplat.api import make_planned
    from omniplat.checkpoint.reader import ShardReader
    from omniplat.online import parse_method
    from omniplat.scheme import Scheme
    from tests.goldens.check import _canonical

    planned = make_planned(request.path, "cpu", component="transformer")
    modules = {module.name: module for item in planned.layers for module in item.packed.modules}
    reader = ShardReader(planned.resolutions[0].component.root)
    method = parse_method(request.method) if request.method is not None else None
    generator = torch.Generator().manual_seed(0)
    for name, module in model.named_modules():
        if not type(getattr(module, "quant_method", None)).__name__.startswith("Omniplat"):
            continue
        head, _, leaf = name.rpartition(".")
        x = torch.randn(5, module.input_size, generator=generator).to(torch.bfloat16)
        with torch.inference_mode():
            found = module.quant_method.apply(module, x).double().numpy()
        parts = []
        for part in PARTS.get(leaf, (leaf,)):
            stored = modules[f"{head}.{part}"]
            weight = _canonical(stored, reader)
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
