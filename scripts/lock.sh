#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/*.lock, with hashes and for every Python and platform at once.
# usage: scripts/lock.sh PYTHON [--upgrade]      (PYTHON has uv installed)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

compile() { # NAME and the options that are its own
  local name=$1
  shift
  # Neither index nor file locations are written: a lock is valid for whatever index its reader uses.
  "$python" -m uv pip compile pyproject.toml --universal --python-version 3.12 --generate-hashes --no-config \
    --no-emit-index-url --no-emit-find-links --no-header --no-annotate --quiet \
    --constraint requirements/constraints.txt --output-file "requirements/$name.lock" "$@"
}

# dev holds every package of base, so it goes first and the others follow its versions.
compile dev --extra dev "$@"
compile base --constraint requirements/dev.lock
compile cuda --extra cuda --constraint requirements/dev.lock
compile cuda12 --extra cuda12 --constraint requirements/dev.lock

# Of cuda, what compiling for a GPU takes: JAX's plugin and NVIDIA's assembler with its libraries.
awk '/^[a-z0-9]/ { wanted = /^(jax-cuda13-plugin|jax-cuda13-pjrt|nvidia-cuda-(nvcc|crt|runtime)|nvidia-nvvm)==/ } wanted' \
  requirements/cuda.lock >requirements/h200-compiler.lock
