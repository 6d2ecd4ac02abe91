# Every target works on a machine with only Python >= 3.11, git, make and a package registry.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two test processes on two cores: more threads than that make small operations many times slower.
TESTENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg
LIMIT := $(shell command -v timeout >/dev/null 2>&1 && echo timeout 1200)

.PHONY: help demo test docs bench clean sync lab
help:                    ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python >= 3.11 is needed, %s is %d.%d: try make PYTHON=python3.11" % (sys.executable, v[0], v[1]))'
	@echo "Installing into .venv (once; a few minutes: torch is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev,peers,docs]'
	@touch $@

demo: $(INSTALLED)       ## train a PEIRA encoder on real digits, audit it with KREPES, write figures/quickstart/
	@$(BIN)/peira-run quickstart figures/quickstart/run.ipynb -p smoke False

test: $(INSTALLED)       ## fast tests: notebooks clean and exported, notebooks run, pytest, executed snippets
	$(BIN)/python .ci/nbs.py check
	$(TESTENV) $(LIMIT) $(BIN)/nbdev_test --path nbs --n_workers 2
	$(TESTENV) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

docs: $(INSTALLED)       ## build the site into _build/html (opens from disk), warnings are errors
	$(BIN)/python docs/vendor.py
	$(TESTENV) $(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . _build/html
	@echo "site: _build/html/index.html"

bench: $(INSTALLED)      ## benchmarks beside peers, results in .benchmarks/
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest benchmarks -o python_files='bench_*.py' --benchmark-autosave --benchmark-columns=min,median,rounds --benchmark-group-by=group

sync: $(INSTALLED)       ## notebooks <-> text/ (edit the text side), then export
	$(BIN)/python .ci/nbs.py sync
	$(BIN)/python .ci/nbs.py clean
	$(BIN)/python .ci/nbs.py export

lab: $(INSTALLED)        ## JupyterLab on the notebooks
	$(BIN)/jupyter lab nbs

clean:                   ## remove what make made: .venv, the site, checkpoints of runs; not text/, runs/ or figures
	rm -rf .venv _build docs/_static/mathjax peira_krepes.egg-info figures/*/work figures/*-smoke
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
