"""Fixtures for pytest: ``rdma_host`` and ``rdma_hosts``."""

import pytest

from .hosts import Unavailable, this_host, two_hosts


@pytest.fixture
def rdma_host():
    """This machine, with one device of address 127.0.0.1. Programs that the test has started end with it."""
    with this_host() as host:
        yield host


@pytest.fixture
def rdma_hosts():
    """Two hosts, network namespaces with one interface each, that reach each other."""
    try:
        context = two_hosts()
        hosts = context.__enter__()
    except Unavailable as error:
        # Not skipped: a test that never ran would look as if it had passed.
        pytest.fail(str(error), pytrace=False)
    try:
        yield hosts
    finally:
        context.__exit__(None, None, None)
