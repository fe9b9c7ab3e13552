# make demo: environment, quickstart pipeline, reward curve.  make test: environment, the suite.  make lint: style and types.
# On a machine with a GPU: make demo CONSTRAINTS= (the constraints pin the CPU build of torch).
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints-cpu.txt
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-integration env-vllm env-sglang lint bench schemas clean

demo: $(VENV)/.installed
	$(BIN)/grpoctl run pipelines/quickstart.yaml

# One worker a core; a file's tests stay together, since they share models and prepared runs.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $${TEST_WORKERS:-auto}

# Environments of their own, because each engine pins torch and transformers; the tests start servers from them.
ENVS ?= .venv-engines
env-vllm: $(ENVS)/vllm/.installed
env-sglang: $(ENVS)/sglang/.installed
$(ENVS)/%/.installed: tests/integration/make_envs.sh
	tests/integration/make_envs.sh $* $(ENVS)/$*
	touch $@

test-integration: $(VENV)/.installed-integration env-vllm env-sglang
	GRPOCTL_VLLM_PYTHON=$${GRPOCTL_VLLM_PYTHON:-$(abspath $(ENVS))/vllm/bin/python} \
	GRPOCTL_SGLANG_PYTHON=$${GRPOCTL_SGLANG_PYTHON:-$(abspath $(ENVS))/sglang/bin/python} \
	$(BIN)/python -m pytest -m integration

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/pipeline.py

schemas: $(VENV)/.installed
	$(BIN)/python -m grpoctl.cli.publish_schemas

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[torch]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[torch,math,s3,server,dev]"
	$(PIP) --no-deps trl==1.16.0 verl==0.9.1  # their reward functions run through the adapters; no-deps keeps our torch
	command -v bwrap >/dev/null || { apt-get update -qq && apt-get install -y -qq bubblewrap; }  # sandbox of the code reward
	touch $@

$(VENV)/.installed-integration: $(VENV)/.installed-dev
	DS_BUILD_OPS=0 $(PIP) --editable ".[deepspeed,megatron]" gguf
	touch $@

clean:
	rm -rf $(VENV) runs
