"""Builds `penstock-client`: copies the client and the contract, then setuptools does the rest.

The copies are the package `penstock_client`. Its name is its own, so that it can be installed with
`penstock` or without it, and neither touches the other's files. Only imports differ, and the pool
of protobuf descriptors: a private one, since protobuf refuses two versions of a contract in one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SOURCES = HERE / "build" / "sources"
PACKAGE = SOURCES / "penstock_client"
CONTRACTS = ("penstock/v1/inference.proto", "inference/open_inference.proto")
_DEFAULT_POOL = "_descriptor_pool.Default()"
_PRIVATE_POOL = "_descriptor_pool.DescriptorPool()"
_RENAMED = (
    (re.compile(r"\bpenstock\.deployments\.client\b"), "penstock_client"),
    (re.compile(r"\bpenstock\.protos\b"), "penstock_client.protos"),
)


def copy_sources() -> None:
    """Make build/sources anew from the repository. Raises RuntimeError outside of one."""
    client, protos = REPOSITORY / "deployments" / "client", REPOSITORY / "protos"
    if not client.is_dir():
        raise RuntimeError(
            f"{HERE} is not inside a checkout of Penstock; build penstock-client from one"
        )
    shutil.rmtree(HERE / "build", ignore_errors=True)
    for path in sorted(client.glob("*.py")):
        _copy(path, PACKAGE / path.name)
    for path in sorted((protos / "penstock" / "v1").glob("*.py*")):
        _copy(path, PACKAGE / "protos" / "penstock" / "v1" / path.name)
    for name in CONTRACTS:
        _copy(protos / name, PACKAGE / "protos" / name)
    for folder in ("protos", "protos/penstock"):
        (PACKAGE / folder / "__init__.py").touch()
    (PACKAGE / "py.typed").touch()
    _copy(REPOSITORY / "LICENSE", HERE / "build" / "LICENSE")


def _copy(source: Path, target: Path) -> None:
    """Copy a file of text; in Python, with the imports that hold in the package."""
    if source.is_dir():
        return
    text = source.read_text()
    if source.suffix in (".py", ".pyi"):
        for pattern, name in _RENAMED:
            text = pattern.sub(name, text)
    if source.name.endswith("_pb2.py"):
        if text.count(_DEFAULT_POOL) != 1:
            raise RuntimeError(f"{source}: this protoc writes another form of {_DEFAULT_POOL}")
        text = text.replace(_DEFAULT_POOL, _PRIVATE_POOL)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    copy_sources()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    copy_sources()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return []


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    raise RuntimeError(
        "penstock-client has no source distribution, for its sources are the repository's: "
        "build a wheel"
    )
