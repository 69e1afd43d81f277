#!/usr/bin/env bash
# Set up .venv for the demo, and run it. Arguments go to `fp8pass demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "fp8pass demo: after the set-up, two small language models train side by side"
. .ci/environment.sh demo
echo "starting fp8pass demo: importing torch takes a few seconds"
exec .venv/bin/fp8pass demo "$@"
