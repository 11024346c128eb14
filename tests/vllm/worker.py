"""One rank of two: runs every check and writes what came of it. `python worker.py RANK PORT FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.engine import start
from tests.vllm.test_layers import ANYWHERE, WITH_TWO


def main() -> None:
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    # What vLLM's launcher sets: the name of the shared memory through which ranks on one CPU talk.
    os.environ["VLLM_DIST_IDENT"] = str(port)
    os.environ["OMNIPLAT_VLLM_OMNI_CPU"] = "1"
    start(rank, 2, port)
    results = {}
    for name, check in (ANYWHERE | WITH_TWO).items():
        try:
            check(rank, 2, folder)
            results[name] = ""
        except BaseException:  # reported by the test of this name
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
