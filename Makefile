# The commands of .ci/run in the environment that is active; CONTRIBUTING.md says what each is for.
PYTHON ?= python

.PHONY: check lint types test slow generated ci

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

generated:
	$(PYTHON) -m ipucnn.planning.graphs.shipped
	$(PYTHON) -m ipucnn.config.reference --write
	$(PYTHON) -m ipucnn.benchmarking.schemas

ci:
	.ci/run
