# The commands of .ci/run in the environment that is active; CONTRIBUTING.md says what each is for.
PYTHON ?= python

.PHONY: check lint types test slow quick generated docs pictures ci

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

quick:
	$(PYTHON) -m pytest -m quick

generated:
	$(PYTHON) -m ipucnn.planning.graphs.shipped
	$(PYTHON) docs/generate.py

ci:
	.ci/run

docs:
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs build/site
	@echo "open build/site/index.html"

# Trains a small U-Net first where RUN does not exist; needs Chromium.
pictures: RUN ?= runs/unet-membranes
pictures:
	test -d $(RUN) || $(PYTHON) -m ipucnn train unet --seed 1 --run-dir $(RUN)
	$(PYTHON) docs/pictures.py $(RUN)
