"""Hosts with RDMA devices for tests, without RDMA hardware, kernel module or privilege.

``ferroce run -- PROGRAM`` gives a program for libibverbs and librdmacm devices in software (RoCEv2). This package has the program, its
libraries, and :func:`this_host` and :func:`two_hosts`, which are pytest's fixtures ``rdma_host`` and ``rdma_hosts`` too.
"""

from .hosts import Host, Unavailable, program, this_host, two_hosts

__all__ = ["Host", "Unavailable", "program", "this_host", "two_hosts"]
