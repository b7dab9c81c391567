#!/usr/bin/env bash
# Makes the virtual environment of one benchmark peer, .peers/NAME; `make benchmark-peers` makes all of them.
# Versions are pinned in NAME.txt beside this script. PufferLib is built once, as released, with its trainer's extension,
# which only pufferl needs; the others take the same wheel from .peers/wheels. PYTHON and TORCH come from the Makefile.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:?usage: install.sh NAME}
torch=${TORCH:-2.13.0}
venv=.peers/$name
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

echo "installing the benchmark peer $name into $venv"
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip install setuptools==80.9.0 wheel==0.45.1
# The CPU build of torch where there is no NVIDIA driver, as in the Makefile.
if command -v nvidia-smi >/dev/null || ! pip install "torch==$torch+cpu" 2>/dev/null; then pip install "torch==$torch"; fi
pip install --no-build-isolation -r "benchmark/peers/$name.txt"
NO_TRAIN=0 PATCH=0 bash install_pufferlib.sh "$venv/bin/python" .peers/wheels
touch "$venv/.installed"
