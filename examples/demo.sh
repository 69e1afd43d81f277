#!/usr/bin/env bash
# Set up what the demo needs, in .venv, and run it. Arguments go to `fp8pass demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/environment.sh demo
exec .venv/bin/fp8pass demo "$@"
