"""Fixtures that several test files share. Helpers that are plain functions are in harness.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lastgood.testing import FaultyFiles


@pytest.fixture
def faulty_files() -> Iterator[FaultyFiles]:
    """The file system of every run that is opened in the test; faults are injected while it goes on."""
    with FaultyFiles().installed() as files:
        yield files


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes in one thread: results do not depend on the machine, and a fork inherits no thread pool."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def process_group() -> Iterator[None]:
    """The default process group of torch.distributed, with this process as its only rank."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
