"""Wall time of `omniplat plan` as a user sees it, interpreter start included, beside a bare interpreter.

    python benchmarks/plan_time.py [--layers 13] [--experts 64] [--repeats 7]

The default is a mixture-of-experts model of about 10,000 tensors in NVFP4, written as sparse files. Prints the
median of each, and the ratio to starting Python and importing NumPy in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.checkpoints import write_checkpoint


def nvfp4(name: str, n: int, k: int) -> dict[str, Any]:
    return {
        f"{name}.weight": ("U8", (n, k // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (n, k // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def write(folder: Path, layers: int, experts: int) -> int:
    tensors: dict[str, Any] = {"lm_head.weight": ("BF16", (1000, 2048))}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for part, rows in (("q_proj", 4096), ("k_proj", 512), ("v_proj", 512)):
            tensors |= nvfp4(f"{block}.self_attn.{part}", rows, 2048)
        tensors |= nvfp4(f"{block}.self_attn.o_proj", 2048, 4096)
        tensors[f"{block}.mlp.gate.weight"] = ("BF16", (experts, 2048))
        for expert in range(experts):
            base = f"{block}.mlp.experts.{expert}"
            tensors |= nvfp4(f"{base}.gate_proj", 768, 2048) | nvfp4(f"{base}.up_proj", 768, 2048)
            tensors |= nvfp4(f"{base}.down_proj", 2048, 768)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
    config = {"model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    write_checkpoint(folder, {**config, "quantization_config": quantization}, tensors, shards=max(layers // 4, 1))
    return len(tensors)


def wall(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        count = write(folder, arguments.layers, arguments.experts)
        plan = [sys.executable, "-m", "omniplat", "plan", str(folder), "--device", "cpu", "--json"]
        bare = [sys.executable, "-c", "import numpy"]
        wall(plan), wall(bare)
        times = [(wall(plan), wall(bare)) for _ in range(arguments.repeats)]
    planning, starting = median(t[0] for t in times), median(t[1] for t in times)
    print(
        json.dumps(
            {
                "tensors": count,
                "plan_seconds": round(planning, 3),
                "python_and_numpy_seconds": round(starting, 3),
                "ratio": round(planning / starting, 2),
                "python": platform.python_version(),
                "machine": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
