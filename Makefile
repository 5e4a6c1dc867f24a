# Three commands do everything: `make demo`, `make test` and `make docs`. They set up the virtual environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types unit docs clean

demo: $(VENV)/.installed
	$(BIN)/stam demo --out demo

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# As many processes as cores, each with one thread: more would wait for each other.
unit: $(VENV)/.dev browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The site is written to site/; nothing is fetched while it is built.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[figures]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --editable '.[dev,docs,figures,export,gym,hub,logging,urls]'
	touch $@

# The page is tested in Debian's own Chromium; where it cannot be installed those tests are skipped and say so.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null) || true

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
