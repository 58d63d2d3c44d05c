# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# In a terminal pip shows its progress.
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo -q)

.PHONY: demo test test-deploy test-flower test-torch check format docs notebooks bench clean

demo: $(READY)
	$(BIN)/fedxl demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not deploy"

# Real processes that are killed, starved, lied to and attacked, four federations at a time: they mostly wait.
test-deploy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m deploy

# The app for Flower with another version of it, which is installed beside the usual one.
FLWR ?= 1.42.0
test-flower: $(READY)
	$(PIP) --no-deps --upgrade --target .venv/flwr-$(FLWR) flwr==$(FLWR)
	PYTHONPATH=$(CURDIR)/.venv/flwr-$(FLWR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not deploy" tests/deploy/test_flower.py

# The tests with another version of torch, installed beside the usual one; pyproject.toml names the tested range.
# TORCH_INDEX may name an index with CPU builds.
TORCH ?= 2.6.0
TORCH_INDEX ?=
TORCH_PATH := $(CURDIR)/.venv/torch-$(TORCH)
test-torch: $(READY)
	test -d $(TORCH_PATH)/torch || $(PIP) --no-deps \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --target $(TORCH_PATH) torch==$(TORCH)
	PYTHONPATH=$(TORCH_PATH) $(BIN)/python -c 'import torch; assert torch.__version__.split("+")[0] == "$(TORCH)", torch'
	PYTHONPATH=$(TORCH_PATH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not deploy"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in site/. Strict (not with --quiet, which hides warnings from it): a broken link, an unknown name or a page that mkdocs.yml does not list fails the build.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.venv/docs: $(READY)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
		$(PIP) -e ".[docs]"
	@touch $@

# Executes the notebooks of examples/ in place, about a minute. The tests run their cells without Jupyter.
notebooks: .venv/notebooks
	OMP_NUM_THREADS=1 $(BIN)/python docs/notebooks.py

.venv/notebooks: $(READY)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
		$(PIP) -e ".[notebooks]"
	@touch $@

bench: $(READY)
	$(BIN)/python benchmarks/executors.py
	$(BIN)/python benchmarks/population.py

# The stamp is written last, so that an interrupted set-up is done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("fedxl needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "setting up .venv takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
		$(PIP) -e ".[dev]"
	@touch $(READY)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache site
