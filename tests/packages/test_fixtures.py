"""The fixtures of the wheel `ferroce`, used as a project would that tests its own verbs program."""

import time

PORT = 18600


def retry(call):
    """Repeats a call that fails until its server listens."""
    for _ in range(60):
        done = call()
        if done.returncode == 0:
            return done
        time.sleep(0.5)
    raise AssertionError(done.stdout + done.stderr)


def pingpong(server, client, port):
    listening = server.start("ibv_rc_pingpong", "-g", "0", "-n", "50", "-p", str(port))
    done = retry(
        lambda: client.run("ibv_rc_pingpong", "-g", "0", "-n", "50", "-p", str(port), server.address, check=False)
    )
    assert "50 iters" in done.stdout
    assert listening.wait(timeout=60) == 0


def test_one_host(rdma_host):
    pingpong(rdma_host, rdma_host, PORT)


def test_two_hosts(rdma_hosts):
    one, two = rdma_hosts
    assert one.address != two.address
    pingpong(one, two, PORT)
    pingpong(two, one, PORT)


def test_hosts_have_networks_of_their_own(rdma_hosts):
    one, two = rdma_hosts
    devices = one.run("ibv_devinfo", "-v").stdout
    assert one.address in devices and two.address not in devices


def test_a_program_that_fails_says_so(rdma_host):
    done = rdma_host.run("ibv_rc_pingpong", "-d", "nothing", check=False)
    assert done.returncode != 0
