# make demo   install, prepare, train a small language model with PPO, report      make test   install, run the tests
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
PY := $(VENV)/bin/python
LOCK := requirements/cpu.lock
TORCH_CPU := https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed-$(shell sha256sum $(LOCK) | cut -c1-16)
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup demo test test-all lint type bench fidelity torture lock clean

setup: $(STAMP)
	@$(PY) -I -c "import ppo_lightning, sys; sys.exit(not ppo_lightning.__file__.startswith('$(CURDIR)/'))" 2>/dev/null \
		|| $(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .

$(STAMP):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
		|| { echo "ppo_lightning needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 2; }
	@echo "installing $(LOCK) into $(VENV) (about four minutes)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)"; \
		rm -rf $(VENV); exit 2; }
	@$(PY) -m pip install --quiet --no-deps --requirement $(LOCK)
	@$(PY) -c "import torch" 2>/dev/null || { echo "the package index served a torch that lacks its CUDA libraries; taking the CPU build from $(TORCH_CPU)"; \
		$(PY) -m pip install --quiet --no-deps --force-reinstall --index-url $(TORCH_CPU) $$(grep '^torch==' $(LOCK)) || true; }
	@$(PY) -c "import torch" || { echo "torch does not import, and no CPU build of it could be had from $(TORCH_CPU);" \
		"let pip see PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and run make again"; rm -rf $(VENV); exit 1; }
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*; touch $@

demo: setup
	@$(VENV)/bin/ppo-lightning prepare --recipe tiny_ppo
	@echo "held-out accuracy before PPO, greedy answers:"
	@$(VENV)/bin/ppo-lightning evaluate --recipe tiny_ppo --eval-temperature 0 --output-dir outputs/tiny_ppo_before
	@$(VENV)/bin/ppo-lightning fit --recipe tiny_ppo
	@echo "held-out accuracy after PPO, greedy answers:"
	@$(VENV)/bin/ppo-lightning evaluate --recipe tiny_ppo --eval-temperature 0
	@echo "Most of the gain: the model now works in steps (outputs/tiny_ppo/samples.jsonl shows answers of every rollout)."

test: setup
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-all: setup
	$(PY) -m pytest -n $(WORKERS) --dist loadfile

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: setup
	$(PY) tests/typecheck.py

fidelity: setup
	$(PY) -m tests.fidelity

ROUNDS ?= 200
torture: setup
	$(PY) -m tests.torture --rounds $(ROUNDS)

bench: setup
	$(PY) -m benchmarks

lock: setup
	$(PY) -m pip freeze --all --exclude-editable | sed 's/+cpu//' | grep -v "^pip==" | sort -f > $(LOCK)

clean:
	rm -rf outputs data models build *.egg-info
