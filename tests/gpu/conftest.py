"""The option --stand-in: run the tests of this folder on the CPU, with cuda_stand_in.py."""

import cuda_stand_in
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # pytest knows this option only if a path in this folder is given on its command line.
    parser.addoption(
        "--stand-in",
        action="store_true",
        help="run the GPU tests on the CPU, with a stand-in for CUDA (tests/gpu/cuda_stand_in.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # This comes before the tests are imported, which then see one GPU.
    if config.getoption("--stand-in", default=False):
        cuda_stand_in.install()
