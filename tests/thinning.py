"""Long tables of like cases: `make test` takes every n-th, `make test-all` all of them."""

import pytest


def thinned(cases, every=3):
    """Cases for pytest.mark.parametrize, of which all but each `every`-th, from the first on, are
    marked slow; a case of several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)),
                     marks=[pytest.mark.slow] if number % every else [])
        for number, case in enumerate(cases)
    ]  # fmt: skip
