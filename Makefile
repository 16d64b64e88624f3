# Three commands, each from nothing (Python 3.11 or newer, make and git):
#
#   make demo    a report page in demo/
#   make docs    the documentation in site/, to be read without a network
#   make test    ruff, pyright and pytest
#
# All build .venv on the first call and again when pyproject.toml changes. PYTHON=… picks another interpreter.

.DELETE_ON_ERROR:
.PHONY: demo docs test lint format clean

BIN := .venv/bin
# A version manager's shim may exist and yet fail, so each candidate is run, not merely looked up.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	$$candidate -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$candidate && break; \
	done)
# uv installs in a fraction of pip's time, and compiles as pip does: many tests start processes of their own, which would
# read ten thousand files of source each. It does not read pip's configuration, so where it fails pip tries in its own way.
define install
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet uv || true
	@$(BIN)/python -m uv pip install --compile-bytecode --python $(BIN)/python --editable '$(1)' || $(BIN)/python -m pip install --editable '$(1)'
endef
# A worker that has nothing left takes half of what another one has: files stay together, and none waits at the end.
PYTEST_ARGS ?= --numprocesses auto --maxprocesses 4 --dist worksteal

demo: .venv/.installed
	@$(BIN)/wellcond demo

docs: .venv/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote site/index.html"

test: lint
	@$(BIN)/python -m pytest --quiet $(PYTEST_ARGS)

lint: .venv/.installed-test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

format: .venv/.installed-test
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist build demo site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv found (Debian: apt-get install python3-venv); or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv

.venv/.installed: pyproject.toml | $(BIN)/python
	$(call install,.)
	@touch $@

.venv/.installed-docs: pyproject.toml | $(BIN)/python
	$(call install,.[docs])
	@touch .venv/.installed $@

.venv/.installed-test: pyproject.toml | $(BIN)/python
	$(call install,.[test])
	@touch .venv/.installed .venv/.installed-docs $@
