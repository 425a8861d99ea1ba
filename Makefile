# make demo   trains on npm packages and recommends dependencies of new ones
# make test   lint, types and tests
# make evidence      reruns what the pages publish, at most an hour on two quiet cores; GRAMTOWER_DATA has the data sets
# make evidence-gpu  the same for one GPU, at most ten minutes; needs torch, triton, numba and scipy only
# make test-oldest   the tests with the oldest versions that pyproject.toml promises, in .venv-oldest; several GB
# make test-pythons  the tests with every Python that pyproject.toml lists and that is installed here
# make resolves      constraints.txt against the plain package index, whatever pip is configured to use here
# make fuzz MINUTES=30   hostile input: every fuzz test has its share of the time, from a new seed
# make crash KILLS=1000   runs killed at random moments end as uninterrupted ones do
# make mutants       flips signs in the engine's formulas one at a time; a test must fail for each
# make docs          the site in docs/_build/html, with its tutorials executed; some minutes
# make docs-check    the same without executing them: every page, link and public name, in half a minute
# make docs-links    links to other sites; needs a network
# make implicit-tests CHECKOUT=path   implicit's own tests, from a clone of it, on compat.implicit
# make lightfm-tests CHECKOUT=path    LightFM's own tests, from a clone of it, on compat.lightfm
# make dist          source archive and wheel, checked, and tried with each extra in an empty environment
# Each does its own set-up in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
EXTRAS ?= dev# what is installed to work on it; .ci/run has more
DOCS_READY := .venv/.docs-ready
OLDEST := .venv-oldest
PYTHONS ?= 3.11 3.12 3.13 3.14
PLAIN := env -u PIP_FIND_LINKS -u PIP_NO_INDEX -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT \
  PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
MINUTES ?= 30
FUZZ_SEED ?= $(shell date +%s)
KILLS ?= 100
CRASH_SEED ?= 0

# Many tests start processes, each of which would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-oldest test-pythons resolves fuzz crash mutants implicit-tests lightfm-tests dist docs docs-check docs-links \
  lint types types-library types-docs evidence evidence-gpu clean

demo: $(READY)
	$(BIN)/gramtower demo

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The warning is of the interpreter of triton 3.2.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 -W "ignore:Conversion of an array with ndim:DeprecationWarning"

# The Pythons of the classifiers in pyproject.toml, those that are installed here, by pyenv too, each in an environment of
# its own; TESTS="tests/test_engine.py …" runs some tests only.
test-pythons:
	@for version in $(PYTHONS); do \
	  found=python$$version; $$found -c "" 2>/dev/null || found=$$(ls -d ~/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	  if test -z "$$found"; then echo "python$$version is not installed: left out"; continue; fi; \
	  test -x .venv-$$version/bin/python || $$found -m venv .venv-$$version || exit 1; \
	  .venv-$$version/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" \
	    && .venv-$$version/bin/python -m pytest -n 2 $(TESTS) || exit 1; \
	done

# A pip that reads what wheels need without downloading them: torch's would be gigabytes. Without a network it fails.
resolves:
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && $(PYTHON) -m venv "$$new" \
	  && { $(PLAIN) "$$new/bin/python" -m pip install pip==26.3 && $(PLAIN) "$$new/bin/python" -m pip install --dry-run \
	    --no-cache-dir --use-feature=fast-deps -c constraints.txt -e ".[dev,pages,export,docs]"; } >"$$new/log" 2>&1 \
	  && echo "constraints.txt can be installed from the package index" \
	  || { tail -n 30 "$$new/log"; echo "constraints.txt cannot be installed from the package index"; exit 1; } >&2

# Two fuzz tests run at a time.
fuzz: $(READY)
	@echo "FUZZ_SEED=$(FUZZ_SEED)"
	FUZZ_SEED=$(FUZZ_SEED) FUZZ_MINUTES=$$(cat tests/fuzz/test_fuzz_*.py | grep -c '^def test_' | \
	  xargs -I{} $(BIN)/python -c 'print(2 * $(MINUTES) / {})') $(BIN)/python -m pytest -n 2 tests/fuzz/test_fuzz_*.py

# Kills runs at random moments and compares what they end in with uninterrupted ones.
crash: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash.py --kills $(KILLS) --seed $(CRASH_SEED)

mutants: $(READY)
	$(BIN)/python tests/mutants.py

implicit-tests: $(READY)
	$(BIN)/python tests/implicit_suite.py $(CHECKOUT)

lightfm-tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/lightfm_suite.py $(CHECKOUT)

# A warning, such as a link that leads nowhere, is an error.
docs: $(DOCS_READY)
	rm -rf docs/_build/html
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -E -j 2 -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-check: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -q -E -D nb_execution_mode=off -b html docs docs/_build/check

docs-links: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -q -E -D nb_execution_mode=off -b linkcheck docs docs/_build/links

# Some 3 GB are unpacked in a temporary folder, most of it torch.
dist: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/wheel.py dist

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(MAKE) -j 2 types-library types-docs

types-library: $(READY)
	$(BIN)/mypy

types-docs: $(READY)
	$(BIN)/python tests/snippet_types.py

# Results go to benchmarks/results/, then to the tables and figures of the pages. It fails if a step failed, or if a number
# in the text is not that of its result file any more. Data sets that are not there are left out.
evidence: $(READY)
	$(BIN)/python benchmarks/evidence.py --run --write --check

# No set-up: such a machine may have no network. With RESULTS=FOLDER only new results are written, into that folder;
# `python benchmarks/evidence.py --take FOLDER --write --check` adds them elsewhere, and draws the figures.
evidence-gpu:
	$(PYTHON) benchmarks/evidence.py --run --gpu $(if $(RESULTS),--results $(RESULTS))

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(DOCS_READY)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e ".[dev]"
	touch $(OLDEST)/.ready

clean:
	rm -rf .venv .venv-* dist .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
