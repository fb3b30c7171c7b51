# Works with the make 3.81 that macOS ships. Everything it makes lies inside this clone.

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
# pip's cache would lie outside the clone.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-cache-dir
LIBRARY := pmesh/native/libpmesh.$(if $(filter Darwin,$(shell uname)),dylib,so)

.PHONY: help demo test test-all check mypy pyright format docs venv clean

help:
	@echo "make demo    three agents and three trainers on this machine train a model together"
	@echo "make test    the tests that a change needs; some minutes"
	@echo "make test-all  all tests and the floors of their coverage, as CI"
	@echo "make check   format, lint, types, architecture, sizes, docs"
	@echo "make format  put the code into the shape that 'make check' asks for"
	@echo "make docs    the documentation as HTML, into docs/_build/html"
	@echo "make venv    only install, into .venv"
	@echo "make clean   remove all that the above have made, .venv too"

demo: .venv/.for-demo $(LIBRARY)
	@$(BIN)/pmesh demo

# Doctests count as tests; client/trees/torch.py can't be imported where torch, which is optional, is not.
PYTEST := $(BIN)/pytest -n logical --dist loadscope --max-worker-restart 0 --doctest-modules --doctest-ignore-import-errors
TESTED := pmesh simulation tests

test: .venv/.for-work $(LIBRARY)
	$(PYTEST) -m "not slow" $(TESTED)

test-all: .venv/.for-work $(LIBRARY)
	@rm -f .coverage .coverage.*   # of processes that an earlier run has killed
	$(PYTEST) --cov --cov-report= $(TESTED)
	@$(BIN)/python tools/check_coverage.py

check: .venv/.for-work $(LIBRARY)
	$(BIN)/clang-format --dry-run --Werror native/*.[ch] native/tests/*.[ch]
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-cache
	@$(BIN)/python tools/check_sizes.py
	@$(MAKE) --no-print-directory --jobs 2 mypy pyright docs   # each takes long, on one core

mypy: .venv/.for-work
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin pmesh   # what Python lacks on a Mac

pyright: .venv/.for-work
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/.for-work
	$(BIN)/clang-format -i native/*.[ch] native/tests/*.[ch]
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: .venv/.for-work
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

venv: .venv/.for-work

# A stamp for each of the two readers: who tries the demo need not wait for linters.
.venv/.for-demo: .venv/.pip pyproject.toml hatch_build.py
	$(PIP) install --quiet --editable .
	@touch $@

.venv/.for-work: .venv/.pip pyproject.toml hatch_build.py
	$(PIP) install --quiet --editable '.[mlx]' --group test --group check --group docs
	@touch $@

# The installations above have compiled it, too; this does so after a change of its sources.
$(LIBRARY): $(wildcard native/*.[ch]) native/build.py | $(BIN)/python
	$(BIN)/python native/build.py

.venv/.pip: $(BIN)/python
	$(PIP) install --quiet --upgrade 'pip>=25.1'   # the first that knows --group
	@touch $@

# No prerequisites: made again only if the link dangles, say after an upgrade of the system's Python.
$(BIN)/python:
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(tools/find_python) || exit 1; \
	echo "Installing into .venv with $$python; this is done once."; \
	"$$python" -m venv --clear .venv

clean:
	rm -rf $(LIBRARY) .venv .hypothesis .coverage .coverage.* docs/_build
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find pmesh tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
