# Two commands are all that a fresh machine needs: `make serve` and `make test`. They make .venv on their first run.

PYTHON ?= python3
VENV ?= .venv
# Flags of the server: make serve ARGS="--port 9000"
ARGS ?=
# Devices to lay the model over: make serve TP=4
TP ?= 1
# Engines behind one address: make serve-replicas REPLICAS=2
REPLICAS ?= 2
# A process a core runs the tests: BLAS threads would only fight over the cores with XLA's.
TEST_ENV = OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=cpu
RUN = $(VENV)/bin/python -m

.PHONY: serve serve-replicas test test-long aot oracle lint types clean

serve: $(VENV)/.serve
	$(RUN) akv_jax.serve --tp $(TP) $(ARGS)

# On Ray: docs/replicas.md.
serve-replicas: $(VENV)/.ray
	$(RUN) akv_jax.serve --replicas $(REPLICAS) --tp $(TP) $(ARGS)

test: $(VENV)/.test
	$(TEST_ENV) $(RUN) pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

# The same properties over thousands of examples, and what takes minutes, real replicas on Ray too: an hour or two.
test-long: $(VENV)/.test $(VENV)/.ray
	$(TEST_ENV) $(RUN) pytest --numprocesses auto --maxprocesses 4 --dist loadgroup -m "long or not long"

# Compile kernels and whole steps for eight A100-80GB, with no GPU (docs/aot.md). The CUDA plugin would disturb what runs
# on the CPU, so it gets an environment of its own.
AOT_VENV ?= .aot-venv
aot: $(VENV)/.serve $(AOT_VENV)/.aot
	$(AOT_VENV)/bin/python -m benchmarks.aot $(ARGS)

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

$(VENV)/.ray: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable '.[ray]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(RUN) pip install --quiet --editable '.[test,lint]'
	@touch $@

# The two wheels alone, of the version that jax has: nothing that they could run on is needed. What else there is comes
# from $(VENV). A failure to get them is no error: tried again once pyproject.toml changes, or after `make clean`.
$(AOT_VENV)/.aot: pyproject.toml | $(VENV)/.serve
	rm -rf $(AOT_VENV)
	$(PYTHON) -m venv $(AOT_VENV)
	@$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(AOT_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	version=$$($(VENV)/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	  $(AOT_VENV)/bin/python -m pip install --quiet --no-deps jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version \
	  && { command -v ptxas > /dev/null || $(AOT_VENV)/bin/python -m pip install --quiet --no-deps nvidia-cuda-nvcc-cu12; } || true
	@touch $@

clean:
	rm -rf $(VENV) $(AOT_VENV) build *.egg-info
