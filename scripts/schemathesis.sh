#!/usr/bin/env bash
# Asks the real server, over a tiny model, whatever its OpenAPI schema allows and forbids: no answer may be a 5xx. Five minutes.
# usage: scripts/schemathesis.sh [options of `schemathesis run`], such as --seed 1 or --max-examples 100
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$(scripts/outside.sh schemathesis schemathesis==4.32.5)
# shellcheck disable=SC2016 # the address is known inside
exec .venv/bin/python -m tests.serve.with_server 1 bash -c '
  exec "$0" run "$SERVER_URLS/openapi.json" --checks not_a_server_error --max-examples 30 --max-time 300 "$@"
' "$bin/schemathesis" "$@"
