"""Options and fixed conditions for the whole test run: CPU unless --gpu is given, reproducible property tests."""

import importlib.util
import os

# The workers of pytest-xdist inherit it. They share the cores, and BLAS threads wait for each other by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jaxtyping
import pytest
from hypothesis import settings

# In tests the annotated shapes and dtypes of the operations are checked on every call. This must precede their import.
# Only a GPU machine that the project was not set up on may be without beartype: the dev packages hold it.
if importlib.util.find_spec("beartype") is not None:
    jaxtyping.install_import_hook("sparda_jax.pallas_kernels", "beartype.beartype")

settings.register_profile("sparda", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("sparda")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --gpu and --browser: run the tests that need one, and only those."""
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, and only those, on the GPU")
    parser.addoption("--browser", action="store_true", help="run the tests marked browser, and only those, in Chromium")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps ordinary tests on the CPU also where a GPU is: each parallel worker would reserve most of its memory."""
    if not config.getoption("--gpu"):
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise pytest.UsageError("--gpu was given, but JAX sees no GPU here: run make test-gpu, which installs CUDA")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need something which was not asked for, or all others where it was."""
    wanted = {name for name in ("gpu", "browser") if config.getoption(f"--{name}")}
    left_out = [item for item in items if {mark.name for mark in item.iter_markers()} & {"gpu", "browser"} != wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
