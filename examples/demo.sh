#!/usr/bin/env bash
# Set up what the demo needs, in .venv, and run it. Arguments go to `fp8pass demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "fp8pass demo: first the set-up, then two small language models train side by side"
. .ci/environment.sh demo
echo "starting fp8pass demo: importing torch takes some seconds"
exec .venv/bin/fp8pass demo "$@"
