# Two commands are all that a fresh machine needs: `make serve` and `make test`. They make .venv on their first run.

PYTHON ?= python3
VENV ?= .venv
# Flags of the server: make serve ARGS="--port 9000"
ARGS ?=
# Devices to lay the model over: make serve TP=4
TP ?= 1
# A process a core runs the tests: BLAS threads would only fight over the cores with XLA's.
TEST_ENV = OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=cpu
RUN = $(VENV)/bin/python -m

.PHONY: serve test test-long oracle lint types clean

serve: $(VENV)/.serve
	$(RUN) akv_jax.serve --tp $(TP) $(ARGS)

test: $(VENV)/.test
	$(TEST_ENV) $(RUN) pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

# The same properties over thousands of examples, and what takes minutes: an hour or two.
test-long: $(VENV)/.test
	$(TEST_ENV) $(RUN) pytest --numprocesses auto --maxprocesses 4 --dist loadgroup -m "long or not long"

# torch and transformers, for the tests that compare with them (they skip where these are absent).
oracle: $(VENV)/.test
	$(RUN) pip install --quiet --editable '.[test,oracle]'

lint: $(VENV)/.lint
	$(RUN) ruff check . && $(RUN) ruff format --check .

types: $(VENV)/.lint
	$(RUN) pyright

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is not. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable .
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable '.[test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
