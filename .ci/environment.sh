# Sourced by tests/run.sh and examples/demo.sh: makes .venv with fp8pass and the extra named in $1.
# A torch that is installed already is used as it is; where there is none, this version is installed.
TORCH=2.13.0

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv --system-site-packages .venv
.venv/bin/python -c "import torch" 2>/dev/null || .venv/bin/python -m pip install --quiet "torch==$TORCH"
.venv/bin/python -m pip install --quiet --editable ".[$1]"
