#!/usr/bin/env bash
# Runs the kernels' GPU tests under NVIDIA's compute-sanitizer: memcheck (accesses out of bounds, misaligned, after free) and
# racecheck (unsynchronised accesses to shared memory). Needs an NVIDIA GPU and the CUDA toolkit.
# usage: scripts/sanitize.sh [arguments for pytest, in place of tests/kernels]
# PYTHON=/path/to/python in the environment names an interpreter with JAX for CUDA and pytest; otherwise it is that of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitizer=$(command -v compute-sanitizer || true)
cuda=${CUDA_HOME:-/usr/local/cuda}
if [ -z "$sanitizer" ] && [ -x "$cuda/bin/compute-sanitizer" ]; then sanitizer=$cuda/bin/compute-sanitizer; fi
if [ -z "$sanitizer" ]; then
  printf '%s\n' "compute-sanitizer is not here: install the CUDA toolkit (it comes with it), and have it on PATH or under CUDA_HOME." >&2
  exit 1
fi

# JAX's own allocator takes most of the memory in one piece, within which no access is out of bounds; with this one each
# buffer is an allocation of its own.
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
# Without graphs each kernel is a launch of its own, which a report can name. Checked kernels are many times slower, and
# autotuning would run every candidate of XLA's.
export XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"

check() { # TOOL, its own options, --, arguments for pytest
  local tool=$1 options=()
  shift
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  printf '%s\n' "compute-sanitizer $tool" >&2
  "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 99 --print-limit 20 \
    "${PYTHON:-.venv/bin/python}" -m pytest --gpu -p no:cacheprovider "$@"
}

if [ $# = 0 ]; then set -- tests/kernels; fi
# XLA asks the driver for things that may fail; only what kernels do is of interest.
check memcheck --report-api-errors no -- "$@"
check racecheck -- "$@"
