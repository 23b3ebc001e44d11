# The whole workshop in a few words; `make help` lists them. Each target installs what it needs.
VENV ?= .venv
BIN := $(VENV)/bin
# Many tests wait for processes, so two at a time fill two cores; a worker with a vLLM takes 2 GiB.
WORKERS ?= 2
SEED ?= $(shell date +%s)
.DEFAULT_GOAL := help
.PHONY: help install programs demo replay load fuzz images up down test test-fast faults check format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create the virtual environment
$(VENV)/.installed: requirements.lock requirements-dev.lock pyproject.toml scripts/install
	@scripts/install $(VENV)
	@touch $@

programs: ## Chromium, promtool and a Docker engine for the tests, where they may be installed
	@scripts/programs

demo: install ## serve the miniature, ask it one question; Ctrl-C ends it
	@$(BIN)/kimi-k3 demo

replay: install ## a recorded start of 96 layers on 8 ranks, with the sidecar; ARGS="--speed 20" and more
	@$(BIN)/python -m tests.replay --sidecar $(ARGS)

load: install ## the sidecar under load for a minute, on one core; prints rows for RESULTS.md
	@$(BIN)/python -m benchmarks.load $(ARGS)

fuzz: install ## the sidecar's API against its own description, five minutes
	@scripts/fuzz $(BIN) $(ARGS)

images: ## build all images; the ROCm one pulls a large base
	KIMI_K3_HARDWARE=cpu docker compose --profile cpu build
	KIMI_K3_HARDWARE=mi325x KIMI_K3_MODEL_DIR=/ KIMI_K3_API_KEY_FILE=/dev/null KIMI_K3_RENDER_GID=0 KIMI_K3_VIDEO_GID=0 \
	  docker compose --profile mi325x build engine

up: ## in containers: vLLM on the CPU with the miniature, sidecar, Prometheus; ready when it returns
	KIMI_K3_HARDWARE=cpu docker compose --profile cpu up --build --detach --wait

down: ## end what `make up` started, and remove its volumes
	KIMI_K3_HARDWARE=cpu docker compose --profile cpu down --volumes

test: install programs ## all tests, with a real vLLM on the CPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-fast: install programs ## the tests that start no vLLM
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not engine"

faults: install ## kill everything in every phase: 200 times a fake engine, 20 times a real one; SEED repeats a run
	$(BIN)/python -m tests.supervisor.faults --seed $(SEED)
	$(BIN)/python -m tests.serving.faults --seed $(SEED)

check: install ## ruff, mypy strict, the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## resolve the locks anew
	scripts/lock

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
