# Penstock: `make serve` and `make test` work on a bare Debian machine with Python 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.penstock-setup
MODEL  ?= builtin
JOBS   ?= 2

.PHONY: setup serve test fuzz check bench protos docs client

setup: $(STAMP)

# The stamp is made anew when what it depends on changes; the CPU kernels are compiled ahead.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed (PYTHON=...)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "python3-venv is missing; installing it"; apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); }
	@command -v g++ >/dev/null || { echo "installing g++ (for the CPU kernels)"; apt-get update -qq && apt-get install -y -qq g++ || echo "no g++: the plain torch kernels are used, slower"; }
	@echo "installing Penstock and what it needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=24" "setuptools>=77" wheel
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" --no-build-isolation
	@$(BIN)/python -m penstock.kernels.cpu.native
	@touch $@

serve: setup
	@$(BIN)/penstock serve $(MODEL)

test: setup
	@command -v redis-server >/dev/null || { echo "installing redis-server (for the tests)"; apt-get update -qq && apt-get install -y -qq redis-server; }
	@command -v chromium >/dev/null || { echo "installing chromium (for the tests of the web console)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium || echo "no chromium: the tests of the web console are skipped"; }
	@command -v systemd-analyze >/dev/null || { echo "installing systemd (for the test of the unit)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd; }
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Property tests with new random examples: `make test` draws the same ones each time.
fuzz: setup
	@$(BIN)/python -m pytest -n $(JOBS) -m hypothesis --hypothesis-profile=fuzz

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy -p penstock
	@$(BIN)/mypy tests
	@$(BIN)/mypy benchmarks tools
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.find_asserts

bench: setup
	@$(BIN)/python -m benchmarks.engine.offline

client: setup
	@$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist clients/python

protos: setup
	@$(BIN)/python protos/generate.py

docs: setup
	@$(BIN)/python -m tools.generate_reference
	@$(BIN)/python -m tools.render_results
