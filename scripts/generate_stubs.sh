#!/usr/bin/env bash
# Writes proto/signalbox_pb2*.py from proto/signalbox.proto, into the folder given or, without one, into the repository;
# the messages also for the client, which is a distribution of its own.
# Needs the pinned grpcio-tools of the dev dependencies: PYTHON=.venv/bin/python scripts/generate_stubs.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
out=${1:-.}
# The include root is the repository, so that the stubs import each other as proto.signalbox_pb2.
"${PYTHON:-python3}" -m grpc_tools.protoc --proto_path=. \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/signalbox.proto
client=$out/services/client/signalbox_client
mkdir -p "$client"
cp "$out/proto/signalbox_pb2.py" "$out/proto/signalbox_pb2.pyi" "$client"
