#!/usr/bin/env bash
# Proves and times the GPU engine on the first GPU that it sees, in eight minutes, without a network; prints one table,
# and leaves it as JSON in $OUT. tests/gpu/wheels.sh has fetched what the machine lacks.
#   tests/gpu/run.sh [--only PART...] [--dry-run]
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
cd -- "$root"
python=${SIGNALBOX_PYTHON:-python3}
packages=$(mktemp -d)
trap 'rm -rf -- "$packages"' EXIT
if [ -d tests/gpu/wheels ]; then
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-warn-script-location \
    --find-links tests/gpu/wheels --target "$packages" -r tests/gpu/wheels/requirements.txt
fi
export PYTHONPATH=$packages:$root OUT=${OUT:-$root}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$packages/triton} TRITON_DEFAULT_FP_FUSION=1
timeout 480 "$python" -m tests.gpu.check "$@"
