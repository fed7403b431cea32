"""A Dockerfile executed without a container runtime: RUN and COPY in roots made by debootstrap.

Begin with `Build`. Covers what our Dockerfile uses, and no more of its language.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tools.result_files import ROOT

DOCKERFILE = ROOT / "deployments" / "manifests" / "docker" / "Dockerfile"
SUITE = "bookworm"  # of the Dockerfile's BASE
# How this machine reaches the package indices; nothing of it is recorded.
PASSED = ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_DEFAULT_TIMEOUT")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class Step:
    """An executed instruction, and how long it took."""

    stage: str
    instruction: str
    seconds: float


@dataclass
class Stage:
    """A stage of the build: its root, and what instructions have set so far."""

    name: str
    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.strip().split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest)) for name, *rest in parts]


def is_sent(path: str, patterns: list[str]) -> bool:
    """Whether the ignore file lets `path` (relative to the context) in; the last match wins."""
    sent = True
    parts = path.split("/")
    heads = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for line in patterns:
        pattern = line.removeprefix("!").removeprefix("**/")
        if any(fnmatch(each, pattern) for each in (parts if "**/" in line else heads)):
            sent = line.startswith("!")
    return sent


class Build:
    """All stages, in folders below `work`."""

    def __init__(self, work: Path, mirror: str, torch_wheel: Path | None):
        """`torch_wheel`: in place of torch's own index; None: that index."""
        self._work, self._mirror, self._torch_wheel = work, mirror, torch_wheel
        ignore = DOCKERFILE.with_name(f"{DOCKERFILE.name}.dockerignore").read_text().splitlines()
        self._ignore = [line for line in ignore if line and not line.startswith("#")]
        self.stages: dict[str, Stage] = {}
        self.steps: list[Step] = []

    def run(self) -> Stage:
        """Execute the Dockerfile; the last stage. Raises CalledProcessError."""
        stage = None
        for name, value in instructions(DOCKERFILE.read_text()):
            if name == "FROM":
                stage = self._begin(value)
            elif stage is not None:  # before the first one stands the base's name: SUITE
                began_s = time.monotonic()
                self._execute(stage, name, value)
                seconds = round(time.monotonic() - began_s, 1)
                if name in ("RUN", "COPY"):
                    self.steps.append(Step(stage.name, f"{name} {value}", seconds))
                    print(f"{stage.name}: {name} {value[:70]} ({seconds} s)", flush=True)
        assert stage is not None, "no FROM"
        return stage

    def _begin(self, value: str) -> Stage:
        name = value.split(" AS ")[1] if " AS " in value else "final"
        base, began_s = self._work / "base", time.monotonic()
        if not base.exists():
            command = ["debootstrap", "--variant=minbase", SUITE, str(base), self._mirror]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = round(time.monotonic() - began_s, 1)
            self.steps.append(Step("base", f"debootstrap --variant=minbase {SUITE}", seconds))
        root = self._work / name
        subprocess.run(["cp", "-a", str(base), str(root)], check=True)
        stage = self.stages[name] = Stage(name, root)
        return stage

    def _execute(self, stage: Stage, name: str, value: str) -> None:
        match name:
            case "RUN":
                subprocess.run(chrooted(stage, value, passed(stage.root)), check=True)
            case "COPY":
                self._copy(stage, shlex.split(value))
            case "ARG" | "ENV":
                stage.variables |= _pairs(value)
                if "TORCH_INDEX" in stage.variables and self._torch_wheel is not None:
                    stage.variables["TORCH_INDEX"] = _index_of(self._torch_wheel, stage.root)
            case "WORKDIR":
                stage.workdir = value
                (stage.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = value
            case "CMD":
                stage.command = json.loads(value)

    def _copy(self, stage: Stage, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        for name in names:
            to = stage.root / os.path.join(stage.workdir, target).lstrip("/")
            into = to / Path(name).name if target.endswith("/") else to
            if source is ROOT:
                self._copy_sent(name, into)
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", str(source / name.lstrip("/")), str(into)], check=True)

    def _copy_sent(self, name: str, to: Path) -> None:
        """A file or folder of the context, without what the ignore file keeps out."""

        def kept_out(folder: str, names: list[str]) -> list[str]:
            inside = Path(folder).relative_to(ROOT)
            return [each for each in names if not is_sent(str(inside / each), self._ignore)]

        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to, symlinks=True, ignore=kept_out, dirs_exist_ok=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)


def _index_of(wheel: Path, root: Path) -> str:
    """The URL of a package index within `root` that has this one wheel of torch."""
    folder = root / "torch-index" / "torch"
    if not folder.exists():
        folder.mkdir(parents=True)
        shutil.copyfile(wheel, folder / wheel.name)
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return "file:///torch-index"


def _pairs(value: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in shlex.split(value) if "=" in each)


def passed(root: Path) -> dict[str, str]:
    """Variables by which pip and apt find their indices here; files that they name are copied."""
    found = {name: os.environ[name] for name in (*PASSED, *PROXIES) if name in os.environ}
    for path in ("/etc/resolv.conf", "/etc/hosts", *found.values()):
        if os.path.isfile(path):
            to = root / path.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    return found


def chrooted(stage: Stage, command: str, more: Mapping[str, str], user: str = "0:0") -> list[str]:
    """The command line that runs `command` in the stage's root, with mounts that end with it."""
    defaults = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    variables = {
        **defaults,
        "HOME": "/tmp" if user != "0:0" else "/root",
        **more,
        **stage.variables,
    }
    root = shlex.quote(str(stage.root))
    inside = f"cd {shlex.quote(stage.workdir)} && {command}"
    assignments = shlex.join(f"{name}={value}" for name, value in variables.items())
    script = (
        f"mount -t proc proc {root}/proc && mkdir -p {root}/dev/shm && "
        f"mount -t tmpfs tmpfs {root}/dev/shm && exec chroot --userspec={user} {root} "
        f"env -i {assignments} /bin/sh -c {shlex.quote(inside)}"
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
