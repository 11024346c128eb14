"""Wall time and peak memory of planning large checkpoints: a command of its own each, interpreter start included.

    python benchmarks/plan_large.py [--only hunyuan|trillion] [--repeats 3]

`hunyuan`: the shape of HunyuanImage-3, 32 layers of 64 experts in MXFP4, about 8,900 tensors, an AutoRound config.
`trillion`: a mixture of 61 x 384 experts in block-wise FP8, about 141,000 tensors in 60 shards.
Files are sparse: what is measured is reading headers, resolving rules, packing and choosing kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.checkpoints import bf16, mxfp4, mxfp8, write_checkpoint


def hunyuan(folder: Path) -> int:
    """Experts in MXFP4, attention and the shared expert in MXFP8, routers in BF16."""
    tensors: dict[str, Any] = {"lm_head.weight": bf16(4096, 4096), "model.wte.weight": bf16(4096, 4096)}
    for layer in range(32):
        block = f"model.layers.{layer}"
        tensors |= mxfp8(f"{block}.self_attn.qkv_proj", 6144, 4096) | mxfp8(f"{block}.self_attn.o_proj", 4096, 4096)
        tensors |= mxfp8(f"{block}.mlp.shared_mlp.gate_and_up_proj", 6144, 4096)
        tensors |= mxfp8(f"{block}.mlp.shared_mlp.down_proj", 4096, 3072)
        tensors[f"{block}.mlp.gate.wg.weight"] = ("F32", (64, 4096))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{norm}.weight"] = bf16(4096)
        for name in ("query_layernorm", "key_layernorm"):
            tensors[f"{block}.self_attn.{name}.weight"] = bf16(128)
        for expert in range(64):
            tensors |= mxfp4(f"{block}.mlp.experts.{expert}.gate_and_up_proj", 6144, 4096)
            tensors |= mxfp4(f"{block}.mlp.experts.{expert}.down_proj", 4096, 3072)
    quantization = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 8, "group_size": 32,
        "data_type": "mx_fp", "act_bits": 8, "act_data_type": "mx_fp", "act_group_size": 32,
        "extra_config": {r".*\.mlp\.experts\..*": {"bits": 4, "data_type": "mx_fp", "group_size": 32, "act_bits": 4},
                         "lm_head": {"bits": 16}},
    }  # fmt: skip
    config = {"model_type": "hunyuan_image_3_moe", "num_attention_heads": 32, "num_key_value_heads": 8,
              "attention_head_dim": 128, "hidden_size": 4096}  # fmt: skip
    write_checkpoint(folder, {**config, "quantization_config": quantization}, tensors, shards=32)
    return len(tensors)


def trillion(folder: Path) -> int:
    """Kimi's and DeepSeek's shape: one dense layer, 60 of 384 experts, latent attention, blocks of 128 x 128."""

    def block(name: str, n: int, k: int) -> dict[str, Any]:
        return {
            f"{name}.weight": ("F8_E4M3", (n, k)),
            f"{name}.weight_scale_inv": ("F32", (-(-n // 128), -(-k // 128))),
        }

    tensors: dict[str, Any] = {"lm_head.weight": bf16(163840, 7168), "model.embed_tokens.weight": bf16(163840, 7168)}
    for layer in range(61):
        base = f"model.layers.{layer}"
        for part, n, k in (("q_a_proj", 1536, 7168), ("q_b_proj", 12288, 1536), ("kv_a_proj_with_mqa", 576, 7168),
                           ("kv_b_proj", 16384, 512), ("o_proj", 7168, 8192)):  # fmt: skip
            tensors |= block(f"{base}.self_attn.{part}", n, k)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}.{norm}.weight"] = bf16(7168)
        parts = [f"{base}.mlp"]
        if layer:
            tensors[f"{base}.mlp.gate.weight"] = bf16(384, 7168)
            parts = [f"{base}.mlp.shared_experts", *(f"{base}.mlp.experts.{expert}" for expert in range(384))]
        for part in parts:
            tensors |= block(f"{part}.gate_proj", 2048, 7168) | block(f"{part}.up_proj", 2048, 7168)
            tensors |= block(f"{part}.down_proj", 7168, 2048)
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    config = {"model_type": "deepseek_v3", "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 7168}
    write_checkpoint(folder, {**config, "quantization_config": quantization}, tensors, shards=60)
    return len(tensors)


CASES: dict[str, Callable[[Path], int]] = {"hunyuan": hunyuan, "trillion": trillion}


def measured(command: list[str]) -> tuple[float, float, int]:
    """(wall seconds, seconds of all its threads on a core, peak bytes) of a command."""
    start = time.perf_counter()
    child = os.posix_spawn(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) > 1:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for name, write in CASES.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            count = write(folder)
            plan = [sys.executable, "-m", "omniplat", "plan", str(folder), "--device", "cuda:sm90"]
            measured(plan)
            runs = [measured(plan) for _ in range(arguments.repeats)]
        document = {
            "case": name,
            "tensors": count,
            "seconds": round(median(run[0] for run in runs), 2),
            "cpu_seconds": round(median(run[1] for run in runs), 2),
            "peak_mb": round(max(run[2] for run in runs) / 1e6),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
