#!/usr/bin/env bash
# Trains the bundled model's Forecast, and measures the recall of every mode. Needs an NVIDIA GPU, and what
# `python -m sparda_jax.pretrain.prepare` wrote to .data/pretrain (DATA names another folder).
# Two stages: the published objective on rows of 16K, then the one over blocks on rows of 8K (docs/performance.md).
# usage: scripts/train_forecast.sh OUT [STEPS [BLOCK_STEPS]]      writes texts, runs, forecast.safetensors, recall-*.json under OUT
# PYTHON=/path/to/python in the environment names an interpreter with JAX for CUDA; otherwise it is that of .venv.
set -euo pipefail
if [ $# = 0 ]; then
  printf '%s\n' "usage: scripts/train_forecast.sh OUT [STEPS [BLOCK_STEPS]]" >&2
  exit 2
fi
out=$(realpath -m "$1") steps=${2:-320} block_steps=${3:-230}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} data=${DATA:-.data/pretrain} model=sparda_jax/assets/sparda-mini

train() { # RUN SEED DOCUMENTS LENGTH ROWS OPTIONS: one stage, on texts of its own
  local run=$1 seed=$2 documents=$3 length=$4 rows=$5
  shift 5
  "$python" -m sparda_jax.pretrain forecast-texts "$out/texts-$run" --data "$data" --documents "$documents" --length "$length" --seed "$seed"
  "$python" -m sparda_jax.train --model $model --data "$out/texts-$run/train.jsonl" --validation "$out/texts-$run/validation.jsonl" \
    --validation-rows 32 --seq-len "$length" --batch-size "$rows" --micro-batch-size "$rows" --out "$out/$run" "$@"
}
train published 0 2600 16384 8 --steps "$steps" --learning-rate 1e-3 --final-learning-rate 1e-5 --warmup-steps 20 \
  --export-forecast "$out/published.safetensors"
train blocks 1 4800 8192 16 --objective blocks --init-forecast "$out/published.safetensors" --steps "$block_steps" --learning-rate 5e-4 \
  --final-learning-rate 5e-6 --warmup-steps 10 --export-forecast "$out/forecast.safetensors"
for length in 4096 8192 15872; do
  "$python" -m sparda_jax.pretrain evaluate $model --data "$data" --forecast "$out/forecast.safetensors" --lengths $length \
    --modes dense,sparse,sparda,infinigen,random --prompts 200 --json "$out/recall-$length.json"
done
