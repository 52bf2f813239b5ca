#!/usr/bin/env bash
# EleutherAI's lm-eval, unmodified, against a server of the bundled model: RULER's single needle by generation (its own task)
# and as a choice by likelihoods (needle_choice.yaml), 20 prompts each.
# usage: scripts/lm_eval/run.sh [URL] [options of `lm_eval run`]
set -euo pipefail
cd "$(dirname "$0")/../.."

url=${1:-http://127.0.0.1:8000}
shift $(($# > 0 ? 1 : 0))
tokenizer=$PWD/sparda_jax/assets/sparda-mini
bin=$(scripts/outside.sh lm-eval "lm_eval[api,ruler]==0.4.13" transformers==5.24.0)
# The tasks need no data from elsewhere, and OpenAI's client wants a key to send.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 OPENAI_API_KEY=${SPARDA_API_KEY:-none}

evaluate() {
  "$bin/lm_eval" run --model local-completions --limit 20 "${@:2}" \
    --model_args "model=sparda-mini,base_url=$url/v1/completions,tokenizer=$tokenizer,max_length=4352,num_concurrent=2,$1"
}
evaluate tokenized_requests=False --tasks niah_single_1 --metadata "{\"tokenizer\": \"$tokenizer\", \"max_seq_lengths\": [4096]}" "$@"
evaluate tokenized_requests=True --tasks needle_choice --include_path scripts/lm_eval "$@"
