#!/usr/bin/env bash
# Set up what the tests need, in .venv, and run them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/environment.sh dev
exec .venv/bin/python -m pytest -q -n auto "$@"
