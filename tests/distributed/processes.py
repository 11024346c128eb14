"""Processes of one group: started together, and none of them left waiting for one that failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, arguments: Sequence[str], folder: Path, size: int = 2, seconds: float = 300) -> list[str]:
    """What each of `size` processes prints: `python -m MODULE ARGUMENTS... RANK SIZE FILE`, FILE for their rendezvous.

    Fails with the output of the ones that failed, as soon as one does, or of those that are not through in `seconds`.
    """
    outputs = [folder / f"rank-{rank}.txt" for rank in range(size)]
    errors = [folder / f"rank-{rank}.err" for rank in range(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = []
    for rank in range(size):
        command = [sys.executable, "-m", module, *arguments, str(rank), str(size), str(folder / "rendezvous")]
        with outputs[rank].open("wb") as out, errors[rank].open("wb") as err:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err))
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [f"rank {rank}: {codes[rank]}\n{errors[rank].read_text()[-4000:]}" for rank in range(size) if codes[rank]]
    assert not failed, "\n".join(failed)
    late = [f"rank {rank}\n{errors[rank].read_text()[-4000:]}" for rank in range(size) if codes[rank] is None]
    assert not late, f"not through in {seconds} s: " + "\n".join(late)
    return [path.read_text() for path in outputs]
