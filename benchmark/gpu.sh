#!/usr/bin/env bash
# Everything about a GPU, in some twenty minutes (estimated: it has not run whole): its tests, benchmark/plans/gpu.yaml, and a trace of three iterations for Perfetto.
#   bash benchmark/gpu.sh [GROUP ...]     # of the plan, only these groups
# `make benchmark-gpu` runs it. On a machine without a network and without .venv: PY=python3, with what requirements.txt and
# install_pufferlib.sh install on the PYTHONPATH. OUT is where the report goes, PLAN another plan, ARGS the profiled run's arguments.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
PLAN=${PLAN:-benchmark/plans/gpu.yaml}
ARGS=${ARGS:---config configs/cuda.yaml}
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-')
OUT=${OUT:-benchmark/reports/gpu-${name:-none}}
mkdir -p "$OUT"

$PY -m pytest -o addopts= -q -rs tests/test_cuda.py 2>&1 | tee "$OUT/tests.txt" | tail -n 20
$PY benchmark/run.py "$PLAN" --out "$OUT" --fresh ${1:+--only "$@"}
code=$?
runs=$(mktemp -d)
$PY ppo_lstm_puffer.py $ARGS --profile --time-limit 10 --output-dir "$runs" >/dev/null &&
    gzip -c "$runs"/*/*.pt.trace.json >"$OUT/trace.json.gz"
rm -rf "$runs"
if $PY -c "import matplotlib" 2>/dev/null; then $PY benchmark/report.py "$OUT" || code=1; fi
exit "$code"
