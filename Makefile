# Two commands: `make train` trains Breakout, `make test` passes the tests; both install what they need into .venv.
# More arguments for the script: make train ARGS="--env-id pong --total-timesteps 20_000_000"
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
ARGS ?=
TORCH := 2.13.0

# Ranks of train-ddp: one per GPU; without one, two.
NPROC ?= $(or $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | wc -l)),2)

# torch_xla's last release needs this torch, in a virtual environment of its own.
VENV_XLA ?= .venv-xla
TORCH_XLA := 2.9.0
TPU := $(wildcard /dev/accel[0-9]* /dev/vfio/[0-9]*)

.PHONY: help setup setup-xla train train-ddp train-xla sweep test test-xla play watch export repeat benchmark benchmark-gpu benchmark-peers report lint clean
.DEFAULT_GOAL := help

help:  # this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## install everything into .venv (the others do it too)

# uv installs where there is one, pip otherwise.
UV := $(shell command -v uv)
PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
INSTALL = $(if $(UV),uv pip install --quiet --python $(1)/bin/python,$(PIP))

# Without an NVIDIA driver the CPU build of torch, where pip is set up to find it; otherwise the index's default (CUDA).
$(VENV)/.installed: requirements.txt install_pufferlib.sh pufferlib.patch adapters.py
	$(call make_venv,$(VENV),14,3)
	@if ! command -v nvidia-smi >/dev/null && $(call PIP,$(VENV)) "torch==$(TORCH)+cpu" 2>/dev/null; \
		then echo "torch $(TORCH), CPU build"; \
		else $(call room,$(VENV),9) && $(call INSTALL,$(VENV)) "torch==$(TORCH)" && echo "torch $(TORCH), the index's default build"; fi
	$(call install_rest,$(VENV))

setup-xla: $(VENV_XLA)/.installed  # make .venv-xla with torch_xla and the torch that it needs (9 GB)

$(VENV_XLA)/.installed: requirements.txt install_pufferlib.sh pufferlib.patch adapters.py
	$(call make_venv,$(VENV_XLA),13,10, by torch_xla $(TORCH_XLA))
	@$(call INSTALL,$(VENV_XLA)) "torch==$(TORCH_XLA)" "torch_xla$(if $(TPU),[tpu])==$(TORCH_XLA)"
	$(call install_rest,$(VENV_XLA))

# Refuses to begin an installation in $(1), unless one is complete there, that the disk has no $(2) GB for.
room = test -e $(1)/.installed || $(PYTHON) -c 'import pathlib, shutil, sys; path = pathlib.Path("$(1)").absolute(); \
	free = shutil.disk_usage(next(filter(pathlib.Path.exists, (path, *path.parents)))).free / 1e9; \
	sys.exit(free < $(2) and f"$(1) needs $(2) GB to be installed, this disk has {free:.1f} left; or remove what is half installed")'

# A virtual environment that takes $(3) GB to install, for Python 3.10 up to 3.$(2).
define make_venv
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON); on Debian or Ubuntu: sudo apt-get install python3 python3-venv python3-dev"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $(2)))' || \
		{ echo "$$($(PYTHON) --version) found, 3.10 to 3.$(2) needed$(4); name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(call room,$(1),$(3))
	@command -v gcc >/dev/null || { echo "no C compiler; on Debian or Ubuntu: sudo apt-get install gcc libc6-dev"; exit 1; }
	@test -x $(1)/bin/python || $(if $(UV),uv venv --quiet --seed --python "$$(command -v $(PYTHON))",$(PYTHON) -m venv) $(1) || \
		{ rm -f $(1)/bin/python; echo "could not make $(1); on Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@echo "installing requirements into $(1)"
	@$(INSTALL) "pip==26.3" "setuptools==80.9.0" wheel  # the pip of Python 3.10 (23.0) did not come to an end with the requirements
endef

define install_rest
	@$(INSTALL) --no-build-isolation -r requirements.txt
	@bash install_pufferlib.sh $(1)/bin/python
	@touch $(1)/.installed
endef

# A GPU gets sizes of its own, unless ARGS has a configuration, another environment or sizes.
OTHERS := --config% --resume% --env-id% --device% --num-envs% --num-steps% --minibatch-size%
GPU_SIZES = $(if $(shell command -v nvidia-smi),$(if $(filter $(OTHERS),$(ARGS)),,--config configs/cuda.yaml))
train: setup  ## train Breakout; others: make train ARGS="--env-id pong"
	$(PY) ppo_lstm_puffer.py $(GPU_SIZES) $(ARGS)

train-ddp: setup  ## the same on every GPU, or in two processes: NPROC=4
	$(PY) -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=$(NPROC) --max-restarts=3 ppo_lstm_puffer_ddp.py $(ARGS)

train-xla: setup-xla  ## the same on this host's TPU, or on XLA's CPU device
	$(VENV_XLA)/bin/python ppo_lstm_puffer_xla.py --device $(if $(TPU),tpu,cpu) $(ARGS)

sweep: setup  ## search hyperparameters: ARGS="--env-id pong --num-trials 60"
	$(PY) protein_sweep.py $(ARGS)

play: setup  ## play with the newest run: ARGS="latest --gif game.gif"
	$(PY) tools/play.py $(ARGS)

watch: setup  ## the dashboard of the newest run, from another terminal
	$(PY) tools/watch.py $(ARGS)

export: setup  ## the newest run's policy as ONNX: ARGS="latest --out policy.onnx"
	$(PY) tools/export.py $(or $(ARGS),latest --out policy.onnx)

repeat: setup  ## a run again: same to the bit? RUN=runs/RUN
	$(PY) tools/repeat.py $(or $(RUN),latest) $(ARGS)

test: setup  ## the tests (four to ten minutes on two cores)
	$(PY) -m pytest $(ARGS)
	@echo "the tests of ppo_lstm_puffer_xla.py are run by: make test-xla"

test-xla: setup-xla  # run the tests of the XLA script, on XLA's CPU device (under 10 minutes on two cores)
	$(VENV_XLA)/bin/python -m pytest tests/xla $(ARGS)

# A plan of benchmark/plans, measured from nothing; the plan's head says what it takes. Interrupted, the command without --fresh goes on.
PLAN ?= cpu
OUT = $(or $(if $(filter cpu,$(PLAN)),auto),$(if $(filter quick,$(PLAN)),runs/benchmark-quick),benchmark/reports/$(PLAN))
benchmark: setup $(if $(filter quick,$(PLAN)),,benchmark-peers)  ## measure a report from nothing: PLAN=quick, memory, ... (cpu)
	$(PY) benchmark/run.py benchmark/plans/$(PLAN).yaml --out $(OUT) --fresh $(ARGS); code=$$?; \
		$(PY) benchmark/report.py $(OUT); exit $$code

benchmark-gpu: setup  # on a machine with a GPU: its tests, speed, Breakout, a trace (some twenty minutes)
	PY=$(PY) bash benchmark/gpu.sh $(ARGS)

PEERS := pufferl sb3

benchmark-peers: $(PEERS:%=.peers/%/.installed)  # make a venv in .peers/ for each program that is compared (about five minutes)

.peers/%/.installed: benchmark/peers/%.txt benchmark/peers/install.sh install_pufferlib.sh
	@PYTHON=$(PYTHON) TORCH=$(TORCH) bash benchmark/peers/install.sh $*

report: setup  ## redraw benchmark/reports from their stored cells
	$(PY) benchmark/report.py $(patsubst %/cells.jsonl,%,$(wildcard benchmark/reports/*/cells.jsonl))
	$(PY) benchmark/sweep.py

lint: setup  # ruff: format check and lint
	$(PY) -m ruff format --check . && $(PY) -m ruff check .

clean:  # remove .venv, .venv-xla and caches (not runs/)
	rm -rf $(VENV) $(VENV_XLA) .pytest_cache .ruff_cache
