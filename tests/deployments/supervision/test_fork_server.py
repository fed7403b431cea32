"""Processes that the fork server makes are as Ray's own command would have made them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from penstock.deployments.supervision import fork_launcher, fork_server
from penstock.deployments.supervision.fork_requests import is_forkable
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.processes import is_running
from penstock.deployments.supervision.ray_workarounds import one_event_loop

STARTED_S = 60.0
OF_WORKERS = {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}
SETUP = "print('set up', flush=True); import sys, os; os.execv(sys.executable, [sys.executable, "
SETUP += "*(each for each in sys.argv[1:] if not each.startswith(('--language', '--serialized')))])"
PROPERTIES = """
import json, os, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "parent": os.getppid(), "has_serve": "ray.serve" in sys.modules,
    "has_torch": "torch" in sys.modules,
    "has_all": "penstock.deployments.gate.server" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")), "cwd": os.getcwd(), "env": dict(os.environ),
    "cores": sorted(os.sched_getaffinity(0)), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "leads": os.getpgrp() == os.getpid(), "path": sys.path[0], "name": __name__,
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "child": str(signal.getsignal(signal.SIGCHLD)),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64)
                   if os.path.exists(f"/proc/self/fd/{fd}")),
}), flush=True)
"""


class Launches:
    """Starts processes as a raylet does; the raylet is this process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.setup = folder / "setup_worker.py"
        self.setup.write_text(SETUP)
        self.forks = ForkServer()
        self.forks.serve(os.getpid(), OF_WORKERS)

    def environment(self, **more: str) -> dict[str, str]:
        """As the raylet sets it."""
        same = {**os.environ, **fork_server.OF_A_RAYLET, "RAY_RAYLET_PID": str(os.getpid())}
        return {**same, "RAY_JOB_ID": "01000000", **more}

    def run(self, script: str, *arguments: str, **options: Any) -> str:
        """What the process of this script writes, once it has ended."""
        worker, output = self.folder / "worker.py", self.folder / "output"
        worker.write_text(script + "\nprint('end', flush=True)")
        ray = [sys.executable, str(self.setup), str(worker), *arguments, "--language=PYTHON"]
        options = {"env": self.environment(), **options}
        with output.open("w") as file:
            subprocess.run(self.forks.command(ray), stdout=file, timeout=STARTED_S, **options)
        deadline_s = time.monotonic() + STARTED_S
        while not (text := output.read_text()).endswith("end\n"):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.02)
        return text.removesuffix("end\n")

    def properties(self, *arguments: str, **options: Any) -> dict[str, Any]:
        return json.loads(self.run(PROPERTIES, *arguments, **options).splitlines()[-1])


def context(**fields: Any) -> str:
    """The argument with the environment that Ray's agent has described."""
    same: dict[str, Any] = {"command_prefix": [], "py_executable": sys.executable, "java_jars": []}
    same["override_worker_entrypoint"] = None
    return f"{fork_launcher.ENVIRONMENT}{json.dumps({**same, **fields})}"


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    made = Launches(tmp_path_factory.mktemp("forks"))
    yield made
    made.forks.close()


def test_a_process_is_forked_and_has_what_the_raylet_gave_its_launcher(launches, tmp_path):
    core = min(os.sched_getaffinity(0))
    launcher = ["sh", "-c", f'ulimit -Sn 512; exec nice -n 3 taskset -c {core} "$@"', "-"]
    worker = str(launches.folder / "worker.py")
    command = launches.forks.command
    launches.forks.command = lambda ray: [*launcher, *command(ray)]
    try:
        had = launches.properties(
            "--a=b c", cwd=tmp_path, process_group=0, env=launches.environment(ODD="\udcff")
        )
    finally:
        launches.forks.command = command
    assert had["parent"] == launches.forks.pid and had["has_serve"] and had["threads"] == 1
    assert not had["has_torch"]
    assert had["argv"] == [worker, "--a=b c"]
    assert (had["name"], had["path"]) == ("__main__", str(launches.folder))
    assert (had["cwd"], had["cores"]) == (str(tmp_path), [core])
    assert had["nice"] == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert had["open_files"] == 512
    assert had["leads"] and had["sockets"] == 0
    assert had["child"] == str(signal.SIG_DFL)
    assert had["oom"] == Path("/proc/self/oom_score_adj").read_text().strip()
    assert had["env"].pop("LC_CTYPE", "C.UTF-8") == "C.UTF-8"  # of Python's own start
    wanted = launches.environment(ODD="\udcff", PWD=str(tmp_path))
    assert {**had["env"], "PWD": str(tmp_path), "_": ""} == {**wanted, "_": ""}


def of_workers(launches: Launches) -> psutil.Process:
    """The process of which workers are forked."""
    process = psutil.Process(launches.properties(context(env_vars=OF_WORKERS))["parent"])
    assert process.ppid() == launches.forks.pid
    return process


def test_a_worker_is_forked_from_a_process_that_has_its_variables_and_torch(launches, tmp_path):
    had = launches.properties(context(env_vars=OF_WORKERS), cwd=tmp_path, process_group=0)
    assert had["parent"] == of_workers(launches).pid and had["has_torch"] and had["threads"] == 1
    assert OF_WORKERS.items() <= had["env"].items() and had["env"].keys() >= {"RAY_RAYLET_PID"}
    assert "OPENBLAS_NUM_THREADS" not in had["env"]
    assert had["cwd"] == str(tmp_path) and had["leads"] and had["sockets"] == 0


def test_a_worker_is_no_fork_of_the_first_process_with_the_same_variables(tmp_path, monkeypatch):
    for name, value in OF_WORKERS.items():
        monkeypatch.setenv(name, value)
    launches = Launches(tmp_path)
    try:
        assert launches.properties()["parent"] == launches.forks.pid
        assert of_workers(launches)
    finally:
        launches.forks.close()


def test_openmp_has_the_threads_of_the_workers_variables(launches):
    script = """
import threading, torch
counts = [torch.get_num_threads()]
def count():
    torch.ones(1 << 20).sum()
    counts.append(torch.get_num_threads())
thread = threading.Thread(target=count)
thread.start(); thread.join()
print(*counts)
"""
    assert launches.run(script, context(env_vars=OF_WORKERS)).split() == ["2", "2"]


def test_workers_draw_different_random_numbers(launches):
    script = """
import random, numpy, torch, ray._raylet as rays
print(rays.UniqueID.from_random().hex(), random.random(),
      numpy.random.default_rng().integers(1 << 60), torch.Generator().seed())
"""
    worker = context(env_vars=OF_WORKERS)
    first, second = (launches.run(script, worker).split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_signals_are_blocked_as_in_the_launcher(launches):
    assert launches.properties()["blocked"] == []
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])
    try:
        assert launches.properties()["blocked"] == [signal.SIGINT, signal.SIGUSR1]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGUSR1])


def test_processes_draw_different_random_numbers(launches):
    script = """
import os, random, uuid, ssl, numpy, tempfile, ray._raylet as rays
print(rays.UniqueID.from_random().hex(), rays.WorkerID.from_random().hex(), uuid.uuid4(),
      random.random(), ssl.RAND_bytes(8).hex(), numpy.random.default_rng().integers(1 << 60),
      os.urandom(8).hex(), tempfile.mktemp())
"""
    first, second = (launches.run(script).split() for _ in range(2))
    assert len(first) == len(second) == 8
    assert all(one != other for one, other in zip(first, second, strict=True))


HEAPS = """
import ctypes, threading, tempfile
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
ready = threading.Barrier(9)
def allocate():
    ready.wait()
    libc.malloc(ctypes.c_size_t(100))
    ready.wait()
    ready.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for each in threads: each.start()
ready.wait(); ready.wait()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream); libc.fclose(stream)
    print(file.read().decode().count("<heap nr="))
ready.wait()
"""


def test_the_allocator_has_the_settings_of_the_environment(launches):
    one = context(env_vars={"MALLOC_ARENA_MAX": "1", **one_event_loop()})
    assert int(launches.run(HEAPS, one)) == 1
    assert int(launches.run(HEAPS)) > 1
    had = launches.properties(one)
    assert had["parent"] == launches.forks.pid
    assert had["env"]["MALLOC_ARENA_MAX"] == "1" and one_event_loop().items() <= had["env"].items()


@pytest.mark.parametrize(
    "described",
    [
        {"env_vars": {"OMP_NUM_THREADS": "3"}},  # a library may have read it
        {"env_vars": {**OF_WORKERS, "MKL_NUM_THREADS": "1"}},
        {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1"}},
        {"env_vars": {}, "command_prefix": ["cd", "/"]},
        {"env_vars": {}, "py_executable": "/usr/bin/python3"},
        {"env_vars": {}, "override_worker_entrypoint": "other.py"},
    ],
)
def test_other_environments_are_made_as_ray_makes_them(launches, described):
    output = launches.run(PROPERTIES, context(**described))
    said, properties = output.splitlines()
    assert said == "set up"
    assert json.loads(properties)["parent"] == os.getpid()


@pytest.mark.parametrize("name", ["RAY_RAYLET_PID", "RAY_AUTH_TOKEN", "RAY_new_setting"])
def test_a_process_for_which_ray_has_other_settings_is_not_forked(launches, name):
    had = launches.properties(env=launches.environment(**{name: "7"}))
    assert had["parent"] == os.getpid() and not had["has_serve"]
    assert had["argv"] == [str(launches.folder / "worker.py")] and had["env"][name] == "7"


def test_flags_of_python_are_kept(launches):
    worker = launches.folder / "worker.py"
    worker.write_text("import sys; print(sys.flags.no_user_site, sys.argv, flush=True)")
    ray = [sys.executable, str(launches.setup), "-s", str(worker), "--a", "--language=PYTHON"]
    ran = subprocess.run(
        launches.forks.command(ray), stdout=subprocess.PIPE, text=True, timeout=STARTED_S
    )
    assert ran.stdout.split() == ["1", f"['{worker}',", "'--a']"]


def addresses(launches: Launches) -> list[str]:
    return launches.forks.command(["python"])[4].split(",")


ALMOST = b'{"env": {}, "variables": [], "argv": []}'
NO_REQUESTS = (b"", b"{", b"[]", b"[3]", b"3", b'{"env": {}}', ALMOST)


def test_requests_that_are_none_do_the_server_no_harm(launches):
    first, second = ("\0" + each for each in addresses(launches))
    for address, sent in product((first, second), NO_REQUESTS):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(STARTED_S)
            assert client.recv(1) == b""
    assert launches.properties()["parent"] == launches.forks.pid
    assert of_workers(launches)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_process(launches):
    address, _ = addresses(launches)
    request = {"env": launches.environment(), "variables": [], "argv": ["/nonexistent"]}
    script = f"""
import json, os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.connect("\\0" + {address!r})
try:
    socket.send_fds(client, [b"\\n"], [0, 1, 2])
    client.sendall(json.dumps({request!r}).encode())
    client.shutdown(socket.SHUT_WR)
    print(client.recv(1))
except OSError:  # the server has closed the connection already
    print(b"")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "b''", done.stderr


def test_ray_starts_programs_itself_once_the_server_has_ended(tmp_path):
    launches = Launches(tmp_path)
    assert launches.properties()["parent"] == launches.forks.pid
    os.kill(launches.forks.pid, signal.SIGKILL)
    launches.forks.close()
    assert launches.properties()["parent"] == os.getpid()
    assert launches.run(PROPERTIES, context(env_vars={"A": "b"})).startswith("set up")


def test_a_server_that_does_not_answer_in_time_makes_no_second_process(launches, monkeypatch):
    launches.properties()  # its imports are done
    pids = launches.folder / "pids"
    script = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a'))"
    monkeypatch.setattr(fork_server, "WAIT_S", 1.0)
    os.kill(launches.forks.pid, signal.SIGSTOP)
    try:
        launches.run(script)
    finally:
        os.kill(launches.forks.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert launches.properties()["parent"] == launches.forks.pid  # it has seen both requests
    assert len(pids.read_text().split()) == 1


def test_the_server_ends_with_its_driver_and_what_it_has_made_goes_on(tmp_path):
    script = f"""
import time
from pathlib import Path
from tests.deployments.supervision.test_fork_server import Launches, OF_WORKERS, context
from tests.deployments.supervision.test_fork_server import of_workers
launches = Launches(Path({str(tmp_path)!r}))
made = launches.run('''
import os, subprocess, sys
print(os.getpid(), flush=True)
print("end", flush=True)
import time
time.sleep(600)
''')
print(launches.forks.pid, of_workers(launches).pid, made.split()[0], flush=True)
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    server, with_torch, made = (int(pid) for pid in driver.stdout.readline().split())
    try:
        assert is_running(server) and is_running(with_torch) and is_running(made)
        driver.kill()
        driver.wait()
        _await(lambda: not is_running(server) and not is_running(with_torch))
        assert is_running(made)
    finally:
        os.kill(made, signal.SIGKILL)


def test_a_process_that_has_ended_leaves_no_zombie(launches):
    launches.properties()
    with_torch = of_workers(launches)
    _await(lambda: psutil.Process(launches.forks.pid).children() == [with_torch])
    _await(lambda: not with_torch.children())


def _await(holds: Any) -> None:
    deadline_s = time.monotonic() + STARTED_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_without_variables_of_workers_no_process_imports_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OF_WORKERS", {})
    launches = Launches(tmp_path)
    try:
        assert launches.properties()["parent"] == launches.forks.pid
        assert launches.run(PROPERTIES, context(env_vars={"A": "b"})).startswith("set up")
        _await(lambda: not psutil.Process(launches.forks.pid).children())
    finally:
        launches.forks.close()


def test_the_first_process_does_not_wait_for_what_only_others_use(tmp_path):
    """Nor do those that are asked for while the rest is imported."""
    launches = Launches(tmp_path)
    try:
        had = launches.properties()
        assert had["parent"] == launches.forks.pid and had["has_serve"] and not had["has_all"]

        def has_all() -> bool:
            had = launches.properties()
            assert had["parent"] == launches.forks.pid and had["threads"] == 1
            return had["has_all"]

        _await(has_all)
    finally:
        launches.forks.close()


def test_workers_are_programs_once_the_process_with_torch_has_ended(tmp_path):
    launches = Launches(tmp_path)
    try:
        worker = context(env_vars=OF_WORKERS)
        of_workers(launches).kill()
        said, properties = launches.run(PROPERTIES, worker).splitlines()
        assert (said, json.loads(properties)["parent"]) == ("set up", os.getpid())
        assert launches.properties()["parent"] == launches.forks.pid
    finally:
        launches.forks.close()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "a thread"),
        ("import ray; ray.UniqueID.from_random()", "Ray's generator"),
    ],
)
@pytest.mark.parametrize("when", ["AFTER_THE_RAYLET", "AFTER_THE_FIRST"])
def test_a_server_whose_forks_would_not_be_as_programs_makes_none(tmp_path, module, reason, when):
    (tmp_path / "imported.py").write_text(module)
    script = "from penstock.deployments.supervision import fork_server as server; "
    script += "server.BEFORE_THE_RAYLET = server.AFTER_THE_RAYLET = server.AFTER_THE_FIRST = (); "
    script += f"server.{when} = ('imported',); server.main()"
    with contextlib.ExitStack() as opened:
        listener, other, client = (
            opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
        )
        listener.bind(f"\0{tmp_path}")
        listener.listen()
        client.connect(f"\0{tmp_path}")
        client.shutdown(socket.SHUT_WR)  # a request that is none
        files = listener.fileno(), other.fileno()
        server = opened.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", script, *map(str, files)],
                env={**os.environ, **fork_server.ONE_THREAD, "PYTHONPATH": str(tmp_path)},
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=files,
            )
        )
        assert server.stdin is not None and server.stderr is not None
        server.stdin.write("[1, {}]\n")
        server.stdin.flush()  # and it stays open: with its end the server ends
        assert server.wait(STARTED_S) == 1 and reason in server.stderr.read()


OWN = {"RAY_A": "1", "HOME": "/", "RAY_JOB_ID": "ffffffff", **one_event_loop()}


@pytest.mark.parametrize(
    ("environment", "variables", "expected"),
    [
        (OWN, (), True),
        ({"RAY_A": "1"}, (), True),  # a worker shares Serve's loop as well
        ({**OWN, "RAY_A": "2"}, (), False),
        ({"HOME": "/"}, (), False),
        ({**OWN, "RAY_B": "1"}, (), False),
        ({**OWN, "RAY_JOB_ID": "02000000"}, (), True),
        ({**OWN, "HOME": "/root", "B": "2"}, (), True),  # of no library
        ({**OWN, "B": "2"}, ("B",), False),
        ({**OWN, "MALLOC_ARENA_MAX": "1"}, ("MALLOC_ARENA_MAX",), True),
        ({**OWN, **one_event_loop()}, tuple(one_event_loop()), True),
        ({**OWN, **dict.fromkeys(one_event_loop(), "1")}, tuple(one_event_loop()), False),
    ],
)
def test_which_environments_a_fork_can_have(
    monkeypatch, environment: Mapping[str, str], variables: tuple[str, ...], expected: bool
):
    monkeypatch.setattr(os, "environ", OWN)
    assert is_forkable(environment, variables) is expected


def test_ray_starts_worker_processes_as_the_launcher_expects():
    from inspect import getsource

    source = getsource(services.start_raylet)
    assert 'f"--python_worker_command={subprocess.list2cmdline(start_worker_command)}"' in source
    binary = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    for part in (fork_launcher.ENVIRONMENT, fork_launcher.LANGUAGE, "setup_worker.py"):
        assert part.encode() in binary
