# Sourced by tests/run.sh and examples/demo.sh: makes .venv with fp8pass and the extra named in $1.
# A torch that is installed already is used as it is; where there is none, this version is installed.
TORCH=2.13.0

if [ ! -x .venv/bin/python ]; then
    echo "set-up 1 of 3: a Python environment in .venv"
    "${PYTHON:-python3}" -m venv --system-site-packages .venv
fi
echo "set-up 2 of 3: torch"
if ! .venv/bin/python -c "import torch" 2>/dev/null; then
    echo "    none is installed: downloading $TORCH, 200 MB for CPUs, about 3 GB where pip's index has it with CUDA"
    .venv/bin/python -m pip install "torch==$TORCH"  # not quiet: pip says what it downloads, and how large that is
fi
echo "set-up 3 of 3: fp8pass with its extra [$1]"
.venv/bin/python -m pip install --quiet --no-compile --editable ".[$1]"  # Python compiles what is imported: little of it
