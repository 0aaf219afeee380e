"""The tests of this folder run Triton's kernels in its interpreter, in a process of their own."""

import os

import pytest


def pytest_runtest_setup():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 in a process of its own, see the Makefile")
