# The kernels' interpreter suite sets TRITON_INTERPRET, which Triton reads once at import, so it
# runs in a process of its own; offline compilation must not see the variable.
VENV ?= .venv
PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest
export OMP_NUM_THREADS ?= 2
export PYTHONSAFEPATH = 1
export HF_HUB_OFFLINE = 1

.PHONY: install test test-all lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

lint: install
	$(PY) -m ruff check .

test: lint
	$(PYTEST) --ignore-glob='tests/test_triton_*'
	TRITON_INTERPRET=1 $(PYTEST) tests/test_triton_*.py

test-all: lint
	$(PYTEST) -m '' --ignore-glob='tests/test_triton_*'
	TRITON_INTERPRET=1 $(PYTEST) -m '' tests/test_triton_*.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
