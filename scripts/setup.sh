#!/usr/bin/env bash
# Makes .venv with the locked packages; `make` calls it before everything else. Quick when there is nothing to do.
# usage: scripts/setup.sh serve|dev       what the server needs (with the NVIDIA packages that the driver allows) | what the tests need
#        scripts/setup.sh python          only print the interpreter that would be used
#        scripts/setup.sh accelerator     only print base, cuda or cuda12
# PYTHON=/path/to/python in the environment chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
say() { printf '%s\n' "$*" >&2; }

# Prints the real executable of a Python that can make the venv, or fails. It is run, not only looked for: a version manager
# puts names on PATH that fail when called, and Debian ships a Python that lacks ensurepip.
usable() {
  "$1" -I -c '
import sys, sysconfig, venv, ensurepip
assert sys.version_info[:2] >= (3, 12) and sys.implementation.name == "cpython"
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
print(sys.executable)' 2>/dev/null </dev/null
}

find_python() {
  local name found
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && return
    say "PYTHON=$PYTHON is no CPython >= 3.12 with the modules venv and ensurepip; name another one or leave PYTHON out."
    return 1
  fi
  for name in python3.13 python3.12 python3.14 python3 python; do
    usable "$name" && return
  done
  for name in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    if [ -x "$name" ]; then usable "$name" && return; fi
  done
  if command -v uv >/dev/null 2>&1; then
    if found=$(uv python find --no-project '>=3.12' 2>/dev/null) && usable "$found"; then return; fi
    say "No Python >= 3.12 here yet: asking uv for one."
    if uv python install 3.12 >&2 && found=$(uv python find --no-project --managed-python 3.12) && usable "$found"; then return; fi
  fi
  say "No usable Python >= 3.12 found on PATH, in pyenv or through uv: install one together with its venv module (for instance" \
    "'apt install python3.12 python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12') or pass PYTHON=/path/to/python3.12."
  return 1
}

# jax[cuda13] needs driver 580 or newer, jax[cuda12] 525 or newer.
accelerator() {
  local version major
  # One line per GPU. Read whole: cut off by a pipe, nvidia-smi would count as failed.
  version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null </dev/null) || version=
  version=${version%%$'\n'*}
  major=${version%%.*}
  case $major in
    '' | *[!0-9]*) echo base ;;
    *)
      if [ "$major" -ge 580 ]; then echo cuda
      elif [ "$major" -ge 525 ]; then echo cuda12
      else
        say "NVIDIA driver $version is older than 525, the oldest that JAX supports: running on the CPU. Update the driver to use the GPU."
        echo base
      fi ;;
  esac
}

# Makes the venv unless a sound one of the wanted interpreter is there. The mark .incomplete stands in it while packages are
# being installed, so that a venv whose setup was interrupted is made anew and never taken for a good one.
make_venv() {
  local python wanted
  if [ ! -e $venv/.incomplete ] && "$venv/bin/python" -I -c 'import sys, pip; assert sys.version_info[:2] >= (3, 12)' 2>/dev/null; then
    [ -n "${PYTHON:-}" ] || return 0
    wanted=$(find_python)
    [ "$("$wanted" -I -c 'import sys; print(sys.base_prefix)')" != "$($venv/bin/python -I -c 'import sys; print(sys.base_prefix)')" ] || return 0
  fi
  python=$(find_python)
  say "Making $venv with $python ($("$python" -V))"
  rm -rf $venv
  mkdir $venv
  : >$venv/.incomplete
  "$python" -m venv $venv
}

# Installs requirements/NAME.lock unless exactly this lock was installed last time; the copy in the venv is the stamp.
# What follows the name goes to pip.
install() {
  local lock=requirements/$1.lock stamp=$venv/.installed-$1.lock old quiet
  shift
  if [ ! -e $venv/.incomplete ] && cmp -s "$lock" "$stamp"; then return; fi
  say "Installing $lock"
  : >$venv/.incomplete
  # The locks of one commit agree with each other; the stamp of another commit's lock counts no more once this one is installed.
  for old in $venv/.installed-*.lock; do
    cmp -s "$old" "requirements/${old#"$venv/.installed-"}" || rm -f "$old"
  done
  quiet=--quiet
  if [ -t 2 ]; then quiet=--progress-bar=on; fi
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check $quiet --no-deps --require-hashes --requirement "$lock" "$@" >&2; then
    say "Setup failed: $lock could not be installed (pip's message is above). Nothing half done will be used; run the same command again."
    return 1
  fi
  cp "$lock" "$stamp"
  rm $venv/.incomplete
}

# What the tests need to compile for an H200 (tests/h200). In a folder of its own: among the venv's packages it would be a
# GPU plugin, which JAX loads at every start.
install_compiler() {
  [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || return 0
  cmp -s requirements/h200-compiler.lock $venv/.installed-h200-compiler.lock || rm -rf $venv/cuda-compiler
  install h200-compiler --target $venv/cuda-compiler
}

case ${1:-} in
  python) find_python ;;
  accelerator) accelerator ;;
  serve)
    make_venv
    install "$(accelerator)" ;;
  dev)
    make_venv
    install dev
    install_compiler ;;
  *)
    say "usage: scripts/setup.sh serve|dev|python|accelerator"
    exit 2 ;;
esac
