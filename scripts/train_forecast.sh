#!/usr/bin/env bash
# Trains the bundled model's Forecast as the shipped one was, and measures the recall of every mode. Needs an NVIDIA GPU, and
# what `python -m sparda_jax.pretrain.prepare` wrote to .data/pretrain (DATA names another folder).
# usage: scripts/train_forecast.sh OUT [STEPS]      writes texts, run, forecast.safetensors, recall-*.json under OUT
# PYTHON=/path/to/python in the environment names an interpreter with JAX for CUDA; otherwise it is that of .venv.
set -euo pipefail
if [ $# = 0 ]; then
  printf '%s\n' "usage: scripts/train_forecast.sh OUT [STEPS]" >&2
  exit 2
fi
out=$(realpath -m "$1") steps=${2:-400}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} data=${DATA:-.data/pretrain} model=sparda_jax/assets/sparda-mini

"$python" -m sparda_jax.pretrain forecast-texts "$out/texts" --data "$data" --documents 3200 --length 16384
"$python" -m sparda_jax.train --model $model --data "$out/texts/train.jsonl" --validation "$out/texts/validation.jsonl" \
  --validation-rows 32 --batch-size 8 --micro-batch-size 8 --steps "$steps" --learning-rate 2e-3 --final-learning-rate 2e-5 \
  --warmup-steps 20 --out "$out/run" --export-forecast "$out/forecast.safetensors"
for length in 4096 8192 15872; do
  "$python" -m sparda_jax.pretrain evaluate $model --data "$data" --forecast "$out/forecast.safetensors" --lengths $length \
    --modes dense,sparse,sparda,infinigen,random --prompts 200 --json "$out/recall-$length.json"
done
