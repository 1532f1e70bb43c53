"""Run the C++ tests of `tf_ops/`: as released, with address and with thread sanitizer.

`make native` builds them; each test that their CMakeLists.txt registers is one case here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

BUILD_FOLDER = Path(__file__).resolve().parents[2] / "build"
BUILDS = ("release", "address", "thread")
TIMEOUT_S = 240
SHOWN_LINES = 100


@dataclass(frozen=True)
class Case:
    """One test of one build; `command` is None when that build is missing."""

    build: str
    name: str
    command: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"{self.build}-{self.name}"


def find_cases() -> list[Case]:
    cases = []
    for build in BUILDS:
        folder = BUILD_FOLDER / f"native-{build}"
        if not (folder / "CTestTestfile.cmake").is_file():
            cases.append(Case(build, "missing", None))
            continue
        ctest = shutil.which("ctest", path=Path(sys.executable).parent) or "ctest"
        listing = subprocess.run(
            [ctest, "--test-dir", folder, "--show-only=json-v1"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        tests = json.loads(listing.stdout)["tests"]
        cases += [Case(build, test["name"], tuple(test.get("command", ()))) for test in tests]
    return cases


def without_address_randomization(command: tuple[str, ...]) -> tuple[str, ...]:
    """Prefix a command, where the kernel allows it.

    The thread sanitizer of older compilers refuses to start where the kernel spreads a process's
    memory too widely.
    """
    prefix = ("setarch", "--addr-no-randomize")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False)
    except OSError:
        return command
    return (*prefix, *command) if allowed.returncode == 0 else command


@pytest.mark.parametrize("case", find_cases(), ids=str)
def test_native(case):
    if not case.command:
        pytest.fail(f"the {case.build} build of the C++ tests is missing; run: make native")
    is_threaded = case.build == "thread"
    command = without_address_randomization(case.command) if is_threaded else case.command
    options = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    result = subprocess.run(
        command,
        env={**os.environ, **options},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    shown = "\n".join(result.stdout.splitlines()[-SHOWN_LINES:])
    assert result.returncode == 0, f"exit {result.returncode}\n{shown}"


def test_every_build_has_the_same_tests():
    names = {build: {case.name for case in find_cases() if case.build == build} for build in BUILDS}
    assert names["release"]
    assert names["address"] == names["thread"]
    assert names["address"] <= names["release"]
