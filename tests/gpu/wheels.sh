#!/usr/bin/env bash
# What the GPU machine lacks, as wheels for its Python, into tests/gpu/wheels (not kept in git): it has torch, Triton,
# transformers and NumPy of its own and cannot download anything. Run where there is a network, before run.sh travels.
#   tests/gpu/wheels.sh [PYTHON VERSION, 3.12]
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
wheels=$root/tests/gpu/wheels
python=${SIGNALBOX_PYTHON:-$root/.venv/bin/python}
packages='aiohappyeyeballs|aiohttp|aiosignal|annotated-doc|annotated-types|attrs|frozenlist|gguf|googleapis-common-protos'
packages+='|grpcio|grpcio-health-checking|grpcio-reflection|grpcio-status|llguidance|markdown-it-py|mdurl|msgpack'
packages+='|multidict|orjson|prometheus-client|propcache|protobuf|pydantic|pydantic-core|pygments|pyzmq|rich|setproctitle'
packages+='|shellingham|smg-grpc-proto|structlog|typer|typing-inspection|uvloop|yarl'
mkdir -p "$wheels"
grep -E "^($packages)==" "$root/requirements.lock" >"$wheels/requirements.txt"
platforms=(--platform manylinux2014_x86_64)
for minor in $(seq 17 35); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
  --python-version "${1:-3.12}" --implementation cp "${platforms[@]}" \
  -d "$wheels" -r "$wheels/requirements.txt"
du -sh "$wheels"
