# The kernels' interpreter suite sets TRITON_INTERPRET, which Triton reads once at import, so it
# runs in processes of its own; offline compilation must not see the variable.
VENV ?= .venv
PY = $(VENV)/bin/python
# Two processes of one thread each: tiny models gain nothing from a second thread.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist loadfile
export HF_HUB_OFFLINE = 1

.PHONY: demo install test test-all lint clean

demo: $(VENV)/.base
	$(VENV)/bin/bwsft demo

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -e .
	touch $@

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

lint: install
	$(PY) -m ruff check .

test: lint
	$(PYTEST) --ignore=tests/kernels/triton
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/triton

# Exports are also opened with releases of transformers 4, which pip puts into pytest's cache once.
test-all: lint
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,lm-eval,trackers]'
	$(PYTEST) -m '' --ignore=tests/kernels/triton
	TRITON_INTERPRET=1 $(PYTEST) -m '' tests/kernels/triton

clean:
	rm -rf build dist *.egg-info kernels/build kernels/.wheel kernels/torch-ext/*.egg-info .pytest_cache .ruff_cache .hypothesis
