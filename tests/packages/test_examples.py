"""The commands of the examples and of the GitHub Action, run as they stand there, with a server and a client on this machine."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Where `cargo xtask dist` has put the packages.
PACKAGES = Path(os.environ["FERROCE_PACKAGES"])
TIME = 120


def load(path):
    return yaml.safe_load((EXAMPLES / path).read_text())


def shell(script, **variables):
    """Runs a script as runners do; a program that it leaves in the background ends with it."""
    done = subprocess.run(
        ["bash", "-e", "-c", script + "\nwait"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def measured(text):
    """Whether ib_write_bw has printed a bandwidth."""
    return any(line.split()[:2] == ["65536", "5000"] for line in text.splitlines())


def version():
    (package,) = PACKAGES.glob("ferroce-*.whl")
    return package.name.split("-")[1]


def install(folder, **variables):
    """Runs the action's script as a runner does."""
    files = {name: folder / name for name in ("GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_ENV")}
    given = {
        "FERROCE_VERSION": f"v{version()}",
        "FERROCE_URL": PACKAGES.as_uri(),
        "RUNNER_TOOL_CACHE": str(folder / "tools"),
        **{name: str(path) for name, path in files.items()},
        **variables,
    }
    done = subprocess.run(
        ["sh", str(ROOT / "action/install.sh")], env={**os.environ, **given}, capture_output=True, text=True, check=False
    )
    return done, {name: path.read_text() if path.exists() else "" for name, path in files.items()}


def test_the_action_installs_what_the_workflow_runs(tmp_path):
    done, files = install(tmp_path)
    assert done.returncode == 0, done.stderr
    path = f"{files['GITHUB_PATH'].strip()}:{os.environ['PATH']}"
    steps = load("github/rdma.yml")["jobs"]["test"]["steps"]
    assert steps[-2]["uses"].endswith(f"/action@v{version()}")
    assert measured(shell(steps[-1]["run"], PATH=path))


def test_the_action_gives_devices_to_all_programs(tmp_path):
    done, files = install(tmp_path, FERROCE_EVERYWHERE="true")
    assert done.returncode == 0, done.stderr
    variables = dict(line.split("=", 1) for line in files["GITHUB_ENV"].splitlines())
    assert "ferroce0" in shell("ibv_devinfo", **variables)


def test_the_action_refuses_files_that_were_changed(tmp_path):
    changed = tmp_path / "release"
    changed.mkdir()
    for path in PACKAGES.iterdir():
        if path.name.endswith(".tar.gz"):
            (changed / path.name).write_bytes(path.read_bytes() + b"more")
        elif path.name == "SHA256SUMS":
            (changed / path.name).write_bytes(path.read_bytes())
    done, files = install(tmp_path, FERROCE_URL=changed.as_uri())
    assert done.returncode != 0 and not files["GITHUB_PATH"]


@pytest.mark.parametrize("named", ["main", ""])
def test_the_action_says_that_it_wants_a_version(tmp_path, named):
    done, _ = install(tmp_path, FERROCE_VERSION=named)
    assert done.returncode != 0 and "is no version" in done.stderr


def test_gitlab():
    job = load("gitlab/.gitlab-ci.yml")["rdma"]
    assert f"ferroce_{version()}_amd64.deb" in job["before_script"][1]
    assert measured(shell("\n".join(job["script"])))


def test_containers_of_one_bridge(rdma_hosts):
    services = load("compose/compose.yaml")["services"]
    server, client = rdma_hosts
    run = ["ferroce", "run", "--"]
    for service in services.values():
        assert service["command"][:3] == run
    # The name that Docker's resolver knows.
    words = [word.replace("ib_write_bw -F server", f"ib_write_bw -F {server.address}") for word in services["client"]["command"][3:]]
    listening = server.start(*services["server"]["command"][3:], stdout=subprocess.DEVNULL)
    assert measured(client.run(*words, timeout=TIME).stdout)
    assert listening.wait(TIME) == 0


def test_a_pod(tmp_path):
    pod = load("kubernetes/pod.yaml")["spec"]
    (init,) = pod["initContainers"]
    volume, broker = tmp_path / "volume", tmp_path / "broker"
    subprocess.run(["ferroce", *[word.replace("/ferroce", str(volume)) for word in init["args"]]], check=True, timeout=TIME)
    started = {}
    for container in pod["containers"]:
        (variable,) = container["env"]
        assert variable == {"name": "FERROCE_BROKER_DIR", "value": "/broker"}
        started[container["name"]] = subprocess.Popen(
            [word.replace("/ferroce/bin", f"{volume}/bin") for word in container["command"]],
            env={**os.environ, "FERROCE_BROKER_DIR": str(broker)},
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        text, _ = started["client"].communicate(timeout=TIME)
        assert measured(text)
        assert started["server"].wait(TIME) == 0
    finally:
        for process in started.values():
            process.kill()
