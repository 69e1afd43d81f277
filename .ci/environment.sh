# tests/run.sh and examples/demo.sh source this file. It makes .venv with fp8pass and the extra named in $1.
# It uses the torch that is installed; if there is none, it installs this version.
TORCH=2.13.0

if [ ! -x .venv/bin/python ]; then
    echo "set-up 1 of 3: a Python environment in .venv"
    "${PYTHON:-python3}" -m venv --system-site-packages .venv
fi
echo "set-up 2 of 3: torch"
has_torch() { "$1" -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])" 2>/dev/null; }
if ! has_torch .venv/bin/python >/dev/null && packages=$(has_torch "${PYTHON:-python3}"); then
    # of an environment that is active: `--system-site-packages` shows those of the Python that this one was made from
    echo "$packages" > "$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/active.pth"
fi
if ! has_torch .venv/bin/python >/dev/null; then
    echo "    torch is not installed: downloading $TORCH, 200 MB for CPUs, about 3 GB if pip's index has it with CUDA"
    .venv/bin/python -m pip install "torch==$TORCH"  # without --quiet, so that pip prints names and sizes of downloads
fi
echo "set-up 3 of 3: fp8pass with its extra [$1]"
# --no-compile: Python compiles a module when it is imported, and few of the installed modules are
.venv/bin/python -m pip install --quiet --no-compile --editable ".[$1]"
