#!/usr/bin/env bash
# Set up what the tests need, in .venv, and run them: everything; `fast` for the inner loop; `all` for everything and
# its variants. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/environment.sh dev
case "${1:-}" in
  fast) shift; set -- -m passes "$@" ;;
  all) shift; set -- --variants "$@" ;;
esac
unset PYTHONDONTWRITEBYTECODE  # many processes import the same files
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # plugins that happen to be installed are no part of this
export TORCHINDUCTOR_VEC_ISA_OK=1  # what the processor says of its vectors is believed: to try takes each process long
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1  # there are as many workers as processors
exec .venv/bin/python -m pytest -p xdist -q -n auto --no-loadscope-reorder "$@"
