# Two commands do everything: `make demo` and `make test`. Both set up the virtual environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types unit clean

demo: $(VENV)/.installed
	$(BIN)/stam demo --out demo

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev browser
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[figures]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --editable '.[dev,figures,export,gym,hub,logging]'
	touch $@

# The page is tested in Debian's own Chromium; where it cannot be installed those tests are skipped and say so.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null) || true

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
