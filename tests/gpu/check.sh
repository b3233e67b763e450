#!/usr/bin/env bash
# What needs a GPU, under 5 minutes: flash attention against sdpa in bf16, offloaded and static caches, CUDA-graph
# decode, and latency ratios. Says so, and succeeds, where there is none.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped: no CUDA device here"
    exit 0
fi
"$python" -m pytest -q -p no:cacheprovider tests/gpu
"$python" tests/bench.py --device cuda --rounds 9
