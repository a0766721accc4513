# Commands of this project; `make help` lists them.
# Another interpreter: make quickstart PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow lint proto clean

help:  ## List these commands.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

quickstart: $(VENV)/installed  ## Install, then train on household games (a few minutes).
	$(RUN) experiments/train.py --config=configs/quickstart.py

test: $(VENV)/installed-test  ## Run the fast tests.
	$(RUN) -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/installed-test  ## Run the slow tests.
	$(RUN) -m pytest -m "slow and not engine and not vllm and not gpu and not tpu"

lint: $(VENV)/installed-test  ## Check style, format and types.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

proto: $(VENV)/installed-test  ## Generate the code of sampler.proto.
	$(RUN) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
	  --grpc_python_out=. spopp_jax/sampler/sampler.proto

clean:  ## Remove the environment and caches; runs/ stays.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Files inside $(VENV) note what was done, so that nothing is done twice.
$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON). Install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed and $(PYTHON) is older; name another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make an environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/installed: setup.py | $(VENV)/created
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/installed-test: setup.py | $(VENV)/created
	$(PIP) install --quiet --editable '.[test]'
	@touch $@ $(VENV)/installed
