#!/usr/bin/env bash
# Asks the real server, over a tiny model, whatever its OpenAPI schema allows and forbids: no answer may be a 5xx. Five minutes.
# Then it prints how many requests were answered with which status.
# usage: scripts/schemathesis.sh [options of `schemathesis run`], such as --seed 1 or --max-examples 100
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$(scripts/outside.sh schemathesis schemathesis==4.32.5)
# shellcheck disable=SC2016 # the address is known inside
exec .venv/bin/python -m tests.serve.with_server 1 bash -c '
  status=0
  "$0" run "$SERVER_URLS/openapi.json" --checks not_a_server_error --phases coverage,fuzzing \
    --max-examples 30 --request-timeout 120 --max-time 300 "$@" || status=$?
  .venv/bin/python -c "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())" "$SERVER_URLS/metrics" |
    grep ^sparda_requests_total
  exit $status
' "$bin/schemathesis" "$@"
