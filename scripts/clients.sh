#!/usr/bin/env bash
# Installs the client tools that `./signalbox test --clients` runs against a server, each in an environment of its own below
# $SIGNALBOX_CLIENTS (default: ~/.cache/signalbox-clients), at the versions that stand here:
#   scripts/clients.sh openai litellm langchain lm-eval guidellm aiperf schemathesis smg
# `all` means all of them; what is installed already is left alone. Needs python3 with venv, and a network.
set -euo pipefail
home=${SIGNALBOX_CLIENTS:-$HOME/.cache/signalbox-clients}
known=(openai litellm langchain lm-eval guidellm aiperf schemathesis smg)

needs_of() {
  case $1 in
    openai) echo openai==3.57.0 pydantic==2.14.4 ;;
    litellm) echo litellm==1.110.2 ;;
    langchain) echo langchain-openai==1.7.4 ;;
    # torch first and by its version alone, so that no other build comes in its place.
    lm-eval) echo torch==2.13.0 'lm-eval[api,hf]==0.4.13' ;;
    guidellm) echo torch==2.13.0 guidellm==0.8.1 ;;
    aiperf) echo aiperf==0.13.0 ;;
    schemathesis) echo schemathesis==4.32.5 ;;
    smg) echo smg==1.13.0 ;;
    *)
      echo "clients.sh: there is no client $1; choose of ${known[*]}" >&2
      exit 2
      ;;
  esac
}

installed() { [ "$(cat -- "$home/$1/.needs" 2>/dev/null)" = "$(needs_of "$1")" ]; }

install() {
  local needs need
  needs=$(needs_of "$1")
  echo "clients.sh: installing $needs" >&2
  rm -rf -- "${home:?}/$1"
  "${PYTHON:-python3}" -m venv "$home/$1"
  for need in $needs; do
    "$home/$1/bin/python" -m pip install --quiet --disable-pip-version-check "$need" >&2
  done
  echo "$needs" >"$home/$1/.needs"
}

mkdir -p "$home"
names=("$@")
[ "${1:-all}" != all ] || names=("${known[@]}")
for name in "${names[@]}"; do
  needs_of "$name" >/dev/null
  if installed "$name"; then continue; fi
  (
    flock 9 # one at a time: tests of several processes may ask for the same
    installed "$name" || install "$name"
  ) 9>"$home/.lock"
done
