#!/usr/bin/env bash
# Prints the folder with the programs of a tool that is no dependency of the project. It has an environment of its own in
# .venv, made on first use.
# usage: scripts/outside.sh NAME PACKAGE==VERSION...
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
shift
folder=.venv/outside/$name
if [ "$(cat "$folder/.installed" 2>/dev/null)" != "$*" ]; then
  rm -rf "$folder"
  .venv/bin/python -m uv venv --quiet --python .venv/bin/python "$folder" >&2
  .venv/bin/python -m uv pip install --quiet --python "$folder/bin/python" "$@" >&2
  echo "$*" >"$folder/.installed"
fi
echo "$PWD/$folder/bin"
