#!/usr/bin/env bash
# Makes the bundled model's Forecast from its base: trains one on the frozen base, then both together, then the Forecast
# alone, and measures the recall of every mode (docs/performance.md, "Training a Forecast"). Needs an NVIDIA GPU, and what
# `python -m sparda_jax.pretrain.prepare` wrote to .data/pretrain (DATA names another folder).
# usage: scripts/train_forecast.sh BASE OUT [SCALE]      BASE: what `pretrain refine` wrote. SCALE: 1, or less for a trial.
# Writes OUT/model, a checkpoint with its Forecast, and OUT/recall-*.json; texts and runs lie beside them.
# PYTHON=/path/to/python in the environment names an interpreter with JAX for CUDA; otherwise it is that of .venv.
set -euo pipefail
if [ $# -lt 2 ]; then
  printf '%s\n' "usage: scripts/train_forecast.sh BASE OUT [SCALE]" >&2
  exit 2
fi
base=$(realpath "$1") out=$(realpath -m "$2") scale=${3:-1}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} data=${DATA:-.data/pretrain}
if [ -e "$out/model" ]; then
  printf '%s\n' "$out/model exists; give another OUT" >&2
  exit 2
fi

steps() { "$python" -c 'import sys; print(max(2, round(int(sys.argv[1]) * float(sys.argv[2]))))' "$1" "$scale"; }

train() { # RUN MODEL SEED DOCUMENTS LENGTH ROWS STEPS OPTIONS: one run, on texts of its own
  local run=$1 model=$2 seed=$3 documents=$4 length=$5 rows=$6 count=$7
  shift 7
  "$python" -m sparda_jax.pretrain forecast-texts "$out/texts-$run" --data "$data" --documents "$(steps "$documents")" --length "$length" --seed "$seed" --overwrite
  "$python" -m sparda_jax.train --model "$model" --data "$out/texts-$run/train.jsonl" --validation "$out/texts-$run/validation.jsonl" \
    --validation-rows 32 --seq-len "$length" --batch-size "$rows" --micro-batch-size "$rows" --steps "$(steps "$count")" \
    --out "$out/$run" --export-forecast "$out/$run.safetensors" "$@"
}
train published "$base" 0 2600 16384 8 320 --learning-rate 1e-3 --final-learning-rate 1e-5 --warmup-steps 20
train blocks "$base" 1 4800 8192 16 230 --objective blocks --init-forecast "$out/published.safetensors" --learning-rate 5e-4 \
  --final-learning-rate 5e-6 --warmup-steps 10
"$python" -m sparda_jax.pretrain foresee "$base" "$out/foreseen" --data "$data" --forecast "$out/blocks.safetensors" --scale "$scale"
"$python" -m sparda_jax.pretrain foresee "$out/foreseen" "$out/model" --data "$data" --settle --seed 4 --scale "$scale"
train forecast "$out/model" 1 2400 8192 16 110 --objective blocks --init-forecast "$out/model" --learning-rate 3e-4 --final-learning-rate 5e-6 --warmup-steps 10
cp "$out/forecast.safetensors" "$out/forecast.json" "$out/model/"
for length in 4096 8192 15872; do
  "$python" -m sparda_jax.pretrain evaluate "$out/model" --data "$data" --lengths $length \
    --modes dense,sparse,sparda,infinigen,random --prompts 200 --seed 11 --json "$out/recall-$length.json"
done
