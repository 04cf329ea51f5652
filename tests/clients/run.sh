#!/bin/sh
# Serve an embedded model, and try the client packages on it: run.sh PYTHON_OF_OUTRIDER PYTHON_OF_CLIENTS
set -eu
port=8457
"$1" -m outrider serve --target @nano --port "$port" &
server=$!
trap 'kill "$server"' EXIT
until "$1" -c "import httpx; httpx.get('http://127.0.0.1:$port/health').raise_for_status()" 2>/dev/null; do sleep 1; done
LITELLM_LOCAL_MODEL_COST_MAP=True "$2" tests/clients/check.py "http://127.0.0.1:$port" \
    "$("$1" -c 'from outrider.models.loader.embedded import embedded; print(embedded("nano"))')"
