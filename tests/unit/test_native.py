"""Libraries that are missing or do not fit: one sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from keras_ring import native
from keras_ring.errors import NativeLibraryError


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Let the libraries be looked for in an empty folder."""
    monkeypatch.setattr(native, "LIBRARY_FOLDER", tmp_path)
    native._core.cache_clear()
    native.ops.cache_clear()
    yield tmp_path
    native._core.cache_clear()
    native.ops.cache_clear()


def test_missing_library_names_the_command_that_builds_it(empty_folder) -> None:
    with pytest.raises(
        NativeLibraryError, match=r"libkeras_ring_core\.so is missing\. Build it with: keras-ring"
    ):
        native.stop(native.WORLD)


def test_library_that_cannot_be_loaded_names_the_command_that_mends_it(empty_folder) -> None:
    (empty_folder / native.CORE).write_text("no library")
    with pytest.raises(NativeLibraryError, match=r"cannot be loaded: .* keras-ring build"):
        native.stop(native.WORLD)


def test_another_mpi_in_mpi4py_is_refused_with_both_names() -> None:
    other = types.SimpleNamespace(Get_library_version=lambda: "MPICH Version: 4.2.3\nmore")
    with pytest.raises(
        NativeLibraryError,
        match=r"was built for Open MPI \S+ and runs with Open MPI \S+, but mpi4py uses "
        r"MPICH Version: 4\.2\.3\. .*keras-ring build",
    ):
        native.check_mpi(other)


def test_ops_without_the_functions_of_tensorflow_say_which_are_missing() -> None:
    """A process that never imports TensorFlow stands for one whose TensorFlow is too old."""
    program = (
        "import ctypes, sys; ops = ctypes.CDLL(sys.argv[1]); "
        "ops.keras_ring_ops_problem.restype = ctypes.c_char_p; "
        "print(ops.keras_ring_ops_problem().decode())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(native.LIBRARY_FOLDER / native.OPS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.startswith("the TensorFlow in this process lacks TF_NewStatus, ")


@pytest.mark.parametrize("name", ["Allreduce", "Allgather", "Broadcast", "Barrier"])
def test_ops_run_on_a_gpu_machine_with_their_tensors_in_host_memory(name) -> None:
    from tensorflow.python.framework import kernels

    native.ops()
    registered = kernels.get_registered_kernels_for_op(f"KerasRing{name}").kernel
    host_memory = {kernel.device_type: sorted(kernel.host_memory_arg) for kernel in registered}
    assert host_memory == {"CPU": [], "GPU": [] if name == "Barrier" else ["x", "y"]}
