#!/usr/bin/env bash
# Set up .venv for the tests, and run them: all tests by default, but for those marked `gate` if CI is not set; those of
# passes with `fast`; all tests and their variants with `all`. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/environment.sh dev
case "${1:-}" in
  fast) shift; set -- -m passes "$@" ;;
  all) shift; set -- --variants "$@" ;;
esac
unset PYTHONDONTWRITEBYTECODE  # many processes import the same files, and use the bytecode
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # ignore plugins that happen to be installed
export TORCHINDUCTOR_VEC_ISA_OK=1  # skip Inductor's test of vector instructions, which takes long in each process
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1  # one thread for each worker: pytest has one worker per core
exec .venv/bin/python -m pytest -p xdist -q -n auto --no-loadscope-reorder "$@"
