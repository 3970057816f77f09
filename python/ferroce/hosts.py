"""Hosts that run programs under ``ferroce run``."""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, Sequence, Tuple

# For documentation (RFC 5737): in namespaces of their own nothing else has them.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
INTERFACE = "eth0"
# Seconds that a program gets to end after SIGTERM.
GRACE = 5.0


class Unavailable(Exception):
    """Raised where two hosts can't be made, with the reason."""


def program() -> str:
    """Returns the path of the program ``ferroce`` of this environment.

    Raises:
        FileNotFoundError: if it isn't there.
    """
    folders = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    for folder in folders:
        path = Path(folder) / "ferroce"
        if path.is_file():
            return str(path)
    found = shutil.which("ferroce")
    if found is None:
        raise FileNotFoundError(f"ferroce is neither in {folders[0]} nor in PATH")
    return found


class Host:
    """A host with one RDMA device.

    Attributes:
        address: IPv4 address of the device, which is its GID 0.
    """

    def __init__(self, address: str, enter: Sequence[str] = (), broker: str = "") -> None:
        self.address = address
        self._enter = list(enter)
        self._environment = {"FERROCE_BROKER_DIR": broker, "FERROCE_BROKER_LINGER": "1"} if broker else {}
        self._programs: List["subprocess.Popen[Any]"] = []

    def command(self, *arguments: str) -> List[str]:
        """Returns the command line that runs a program on this host, for another function than :meth:`run` and :meth:`start`."""
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        return [*self._enter, *(["env", *variables] if variables else []), program(), "run", "--addr", self.address, "--", *arguments]

    def run(self, *arguments: str, check: bool = True, timeout: float = 60, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Runs a program to its end, with its output as text. Options are those of :func:`subprocess.run`.

        Raises:
            subprocess.CalledProcessError: if it fails, unless ``check`` is false.
            subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.run(self.command(*arguments), check=check, timeout=timeout, **given)

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[Any]":
        """Starts a program, which is ended with the host. Options are those of :class:`subprocess.Popen`."""
        started = subprocess.Popen(self.command(*arguments), **options)
        self._programs.append(started)
        return started

    def close(self) -> None:
        """Ends what :meth:`start` has started."""
        for started in self._programs:
            if started.poll() is None:
                started.terminate()
        for started in self._programs:
            try:
                started.wait(GRACE)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
        self._programs.clear()


@contextlib.contextmanager
def this_host(address: str = "127.0.0.1") -> Iterator[Host]:
    """This machine as a host, with a device of one of its addresses."""
    host = Host(address)
    try:
        yield host
    finally:
        host.close()


class _Namespace:
    """A network namespace, held by a process that ends with ours."""

    def __init__(self, outer: Sequence[str]) -> None:
        user = [] if outer or os.geteuid() == 0 else ["--user", "--map-root-user"]
        script = "ip link set lo up && echo up && exec cat"
        self._holder = subprocess.Popen(
            [*outer, "unshare", *user, "--net", "--", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout and self._holder.stderr
        if self._holder.stdout.readline() != "up\n":
            self.close()
            raise Unavailable(f"no network namespace: {self._holder.stderr.read().strip()}")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def enter(self) -> List[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, "--net", "--"]

    def close(self) -> None:
        assert self._holder.stdin and self._holder.stdout
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()


@contextlib.contextmanager
def two_hosts(mtu: int = 1500) -> Iterator[Tuple[Host, Host]]:
    """Two hosts, network namespaces that are connected by one link of this MTU.

    It needs the tools ``unshare`` and ``nsenter`` of util-linux and ``ip`` of iproute2, and root or a kernel that allows users
    namespaces of their own.

    Raises:
        Unavailable: if namespaces can't be made here.
    """
    for tool, package in ("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2"):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            raise Unavailable(f"two hosts need the program {tool} (package {package})")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        first = _Namespace([])
        stack.callback(first.close)
        # The second one belongs to the same user namespace.
        second = _Namespace([] if os.geteuid() == 0 else first.enter())
        stack.callback(second.close)
        _connect(first, second, mtu)
        hosts = []
        for number, namespace in enumerate((first, second)):
            host = Host(ADDRESSES[number], namespace.enter(), os.path.join(folder, str(number)))
            stack.callback(host.close)
            hosts.append(host)
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A short path: sockets are in it."""
    path = tempfile.mkdtemp(prefix="ferroce-")
    try:
        yield path
    finally:
        # A broker may be about to remove its own files.
        shutil.rmtree(path, ignore_errors=True)


def _connect(first: _Namespace, second: _Namespace, mtu: int) -> None:
    link = f"ip link add name {INTERFACE} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} netns {second.pid}"
    up = "ip addr add {}/24 dev {} && ip link set {} up"
    for namespace, script in (
        (first, link),
        (first, up.format(ADDRESSES[0], INTERFACE, INTERFACE)),
        (second, up.format(ADDRESSES[1], INTERFACE, INTERFACE)),
    ):
        done = subprocess.run([*namespace.enter(), "sh", "-c", script], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"no link between two network namespaces: {script}: {done.stderr.strip()}")
