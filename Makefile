# Everything lives in .venv, made with PYTHON (3.11 to 3.13): make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
RUN ?= runs/default
TORCH := torch==2.13.0
SMOLLM2 ?= .cache/smollm2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One stamp for each interpreter, so that another PYTHON makes the environment anew.
INSTALLED := $(VENV)/installed-$(notdir $(PYTHON))
TESTED := $(VENV)/test-installed-$(notdir $(PYTHON))
LIBTPU := $(VENV)/libtpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test real-model lint types tpu-check bench report clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(INSTALLED) ## Train the bundled model with PODS; ARGS="--run.name first" adds options
	TRANSFORMERS_VERBOSITY=error $(BIN)/python -m pods_jax.train $(ARGS)

test: $(TESTED) ## Run the tests; ARGS="tests/models -k logits" chooses
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

real-model: $(TESTED) ## Fetch SmolLM2-135M-Instruct (93 MB), and compare it with transformers; skipped where it cannot be had
	@[ -d $(SMOLLM2) ] || ! $(PIP) install gguf || $(BIN)/python tests/real_model/fetch_smollm2.py $(SMOLLM2)
	XLA_FLAGS= SMOLLM2=$(SMOLLM2) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m real_model tests/real_model $(ARGS)

lint: $(TESTED) ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TESTED) ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

tpu-check: $(INSTALLED) ## Compile one step for a TPU slice with the real TPU compiler; no TPU needed
	@if [ -d $(LIBTPU) ] || $(PIP) install --no-deps --target $(LIBTPU) "$$($(BIN)/python -c "$$LIBTPU_OF_JAX")"; then \
	  PYTHONPATH=$(LIBTPU) $(BIN)/python -m pods_jax.bench.tpu_check $(ARGS); \
	else \
	  rm -rf $(LIBTPU); echo "tpu-check: SKIPPED, libtpu cannot be installed on this machine"; \
	fi

bench: $(INSTALLED) ## Measure the rollout and the whole step
	$(BIN)/python -m pods_jax.bench rollout
	$(BIN)/python -m pods_jax.bench step

report: $(INSTALLED) ## Write the page of a run anew; RUN=runs/default
	$(BIN)/python -m pods_jax.report $(RUN)

clean: ## Remove the environment and all caches; runs stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find pods_jax tests -name __pycache__ -prune -exec rm -rf {} +

# The libtpu that the installed jax is made for. It stays out of the environment's packages: with it there, jax on a machine
# without a TPU would look for one at every start.
define LIBTPU_OF_JAX
from importlib.metadata import requires
print(next(line.partition(";")[0] for line in requires("jax") if line.startswith("libtpu")))
endef
export LIBTPU_OF_JAX

define CHECK_PYTHON
import sys
version = sys.version_info[:2]
sys.exit(0 if (3, 11) <= version <= (3, 13) else "pods_jax needs Python 3.11, 3.12 or 3.13; PYTHON=%s is %d.%d" % ("$(PYTHON)", *version))
endef
export CHECK_PYTHON

# Debian ships venv without ensurepip: then pip is brought in by the pip outside.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "PYTHON=$(PYTHON) is not there; choose one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@$(PYTHON) -c "import venv" || { echo "$(PYTHON) has no venv module; on Debian: apt install python3-venv" >&2; exit 1; }
	@rm -f $(VENV)/*installed-*
	@[ "$$($(BIN)/python -V 2>/dev/null)" = "$$($(PYTHON) -V)" ] \
	  || $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; } \
	  || { echo "cannot make $(VENV): on Debian, apt install python3-venv" >&2; exit 1; }
	@echo "installing pods_jax into $(VENV) ..."
	@$(PIP) install --editable .
	@touch $@

# torch serves tests alone, as the reference for logits, and only as a CPU build: the others bring gigabytes of CUDA. PEFT, which
# reads our adapters, would ask for another torch, so it comes without what it depends on.
$(TESTED): $(INSTALLED)
	@echo "installing what the tests need ..."
	@$(PIP) install --editable ".[test]"
	@if $(PIP) install --dry-run --no-deps --only-binary :all: --report - "$(TORCH)" 2>/dev/null | grep -qE '(\+|%2B)cpu-'; then \
	  $(PIP) install --only-binary :all: "$(TORCH)" psutil && $(PIP) install --no-deps peft accelerate; \
	else \
	  echo "no CPU build of $(TORCH) here: the tests that compare with it are skipped"; \
	fi
	@touch $@
