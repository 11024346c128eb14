"""Serves checkpoints one after another by `vllm.LLM`, in a process of its own: `python serve.py REQUESTS ANSWERS`.

REQUESTS is a list of `Request`s as JSON; ANSWERS gets a list of `Answer`s. Models with experts come first: vLLM makes
the process groups that they need with the first model only.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT = (1, 5, 9, 33, 70)
LENGTH = 6
UNINSTALLED = "uninstalled"


@dataclass(frozen=True)
class Request:
    """A checkpoint to serve, with the value of OMNIPLAT_DISPATCH and options of `vllm.LLM`. `adapter` is a folder with
    a LoRA adapter that is applied; with `reload`, weights are loaded anew first."""

    key: str
    path: str
    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    reload: bool = False


@dataclass(frozen=True)
class Answer:
    """`tokens` follow `PROMPT`; `logprobs` are those of all tokens, one row for each of them. `methods` are the names
    of classes by module, `caches` the type of the cache and the scales of K, V and Q by attention. Where it failed,
    `error` is a traceback and the rest is empty."""

    key: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[Sequence[float]] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    quantization: str = ""
    error: str = ""
    log: Sequence[str] = ()


def serve_all(requests: Sequence[Request], mode: str, folder: Path) -> dict[str, Answer]:
    """Answers by key, from another process that starts with OMNIPLAT_DISPATCH as `mode` says. With `uninstalled` there
    are no entry points of omniplat in it."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps([asdict(request) for request in requests]))
    environment = {
        **os.environ,
        "OMNIPLAT_DISPATCH": mode,
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank wants a memory node of its own
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `apply_model` sends functions to the workers of several ranks
        "TORCH_COMPILE_DISABLE": "1",  # the sampler would be compiled: 14 s
        "HF_HUB_OFFLINE": "1",
    }
    if mode == UNINSTALLED:
        # The environment holds the engines alone; what is laid beside it comes by this variable.
        environment = {
            key: value for key, value in environment.items() if key not in ("PYTHONPATH", "OMNIPLAT_DISPATCH")
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


def _serve(request: Request) -> Answer:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    log = _Log()
    logging.getLogger("vllm.omniplat").addHandler(log)
    if request.mode != UNINSTALLED:
        os.environ["OMNIPLAT_DISPATCH"] = request.mode
    options = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20, **request.options}
    try:
        llm = LLM(model=request.path, enforce_eager=True, seed=0, disable_log_stats=True, max_logprobs=-1, **options)
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=-1)
        if request.reload:
            llm.collective_rpc("reload_weights")
        adapter = LoRARequest("adapter", 1, request.adapter) if request.adapter else None
        prompt = {"prompt_token_ids": list(PROMPT)}
        made = llm.generate(prompt, sampling, use_tqdm=False, lora_request=adapter)[0].outputs[0]
        rows = [[entry[token].logprob for token in sorted(entry)] for entry in made.logprobs]
        methods, caches = llm.apply_model(_methods)[0], llm.apply_model(_caches)[0]
        return Answer(
            request.key,
            list(made.token_ids),
            rows,
            methods,
            caches,
            quantization=str(llm.model_config.quantization),
            log=log.lines,
        )
    except BaseException:
        return Answer(request.key, error=traceback.format_exc(), log=log.lines)
    finally:
        logging.getLogger("vllm.omniplat").removeHandler(log)


def _methods(model: Any) -> dict[str, str]:
    named = ((name, getattr(module, "quant_method", None)) for name, module in model.named_modules())
    return {name: type(method).__name__ for name, method in named if method is not None}


def _caches(model: Any) -> dict[str, tuple[str, float, float, float]]:
    return {
        name: (str(module.kv_cache_dtype), float(module._k_scale), float(module._v_scale), float(module._q_scale))
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale")
    }


def _is_moe(request: Request) -> bool:
    config = json.loads((Path(request.path) / "config.json").read_text())
    return "moe" in config.get("model_type", "")


def main() -> None:
    requests = [Request(**item) for item in json.loads(Path(sys.argv[1]).read_text())]
    requests.sort(key=lambda request: not _is_moe(request))
    answers: list[Answer] = []
    for request in requests:
        answers.append(_serve(request))
    Path(sys.argv[2]).write_text(json.dumps([asdict(answer) for answer in answers]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
