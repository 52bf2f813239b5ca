#!/usr/bin/env bash
# Two servers over a tiny model behind vllm-router, as docs/scaling-out.md has them: who answers what, and what happens when
# one of them leaves. Two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$(scripts/outside.sh vllm-router vllm-router==0.1.17)
exec .venv/bin/python -m tests.serve.two_replicas "$bin/vllm-router"
