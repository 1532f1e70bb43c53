"""The life of keras_ring in a process: init, shutdown, and who this rank is."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_ring import native
from keras_ring.config import Config, make_folder
from keras_ring.errors import ConfigError

# The mpirun that started the job and the MPI library in it must be one; otherwise each process is
# alone in a world of its own, and would train by itself without a word.
_STRANGE_LAUNCHER = (
    "init: the launcher says that it started {launched} processes, but MPI ({library}) sees "
    "{size}. The mpirun comes from another MPI than mpi4py uses. Use the mpirun that belongs to "
    "it, or rebuild mpi4py and keras_ring for the other one (keras-ring build)."
)


class _Runtime:
    """What this process knows about itself; one per process."""

    def __init__(self) -> None:
        self.place: native.Place | None = None
        self.pid = 0
        self.owns_mpi = False  # whether we, and not mpi4py, initialised MPI
        self.has_lost_peer = False
        self.is_registered = False
        self.hooks: list[Callable[[], None]] = []
        self.shutdown_hooks: list[Callable[[], None]] = []
        self.comm: Any = None  # the caller's
        self.config = Config()
        self.initial_process_sets: list[Any] = []


_runtime = _Runtime()


def init(comm: Any = None, process_sets: Iterable[Any] = ()) -> None:
    """Join the other ranks.

    Under `mpirun` the world is all processes that it started; a process started alone is a world
    of one, in which every collective returns its input. Calling it again does nothing.

    Args:
        comm: An `mpi4py.MPI` communicator, which is duplicated, so that its other users are not
            disturbed. Process sets are made from it, so it must stay as long as such are added.
            Defaults to all processes of the job.
        process_sets: What to call `add_process_set` with. Defaults to none.

    Raises:
        ConfigError: A configuration value is wrong, or the launcher and the MPI do not fit.
        NativeLibraryError: The compiled libraries do not fit this environment.
        StallError: Some ranks did not call it.

    Collective: every rank of `comm` calls it.
    Thread: main thread only.

    Example:
        >>> import keras_ring as kr
        >>> kr.init()
        >>> kr.size()
        1
    """
    if is_initialized():
        return
    config = Config.from_environment()
    world = None
    if comm is not None or config.is_launched:
        mpi = _import_mpi(config.stall_s)
        native.check_mpi(mpi)
        if comm is not None and (not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL):
            raise ConfigError(
                f"init: comm is {comm!r}; expected an mpi4py.MPI.Intracomm. Ranks that are to stay "
                "outside do not call init."
            )
        world = mpi.COMM_WORLD if comm is None else comm
        if comm is None and config.launched_size not in (None, world.size):
            raise ConfigError(
                _STRANGE_LAUNCHER.format(
                    launched=config.launched_size,
                    size=world.size,
                    library=mpi.Get_library_version().split(",")[0],
                )
            )
    ranks = range(1 if world is None else world.size)
    communicator = None if world is None else world.py2f()
    _runtime.place = native.start(native.WORLD, communicator, ranks, config)
    _runtime.comm = world
    _runtime.config = config
    _runtime.initial_process_sets = list(process_sets)
    _runtime.pid = os.getpid()
    _runtime.has_lost_peer = False
    if not _runtime.is_registered:
        _runtime.is_registered = True
        atexit.register(_leave_at_exit)
    for hook in _runtime.hooks:
        hook()


def shutdown() -> None:
    """Leave the world; `init` may be called again afterwards.

    Waits, asleep, until all ranks have called it or ended. Collectives that still wait end with an
    error. Without an `init` before, it does nothing.

    Collective: every rank calls it, or ends.
    Thread: main thread only.
    """
    if not is_initialized():
        return
    for hook in _runtime.shutdown_hooks:
        hook()
    _runtime.place = None
    _runtime.has_lost_peer = not native.stop(native.WORLD)


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since."""
    return _runtime.place is not None and _runtime.pid == os.getpid()


def rank() -> int:
    """Return this process's number, from 0 to `size() - 1`."""
    return int(_place().rank)


def size() -> int:
    """Return the number of processes."""
    return int(_place().size)


def local_rank() -> int:
    """Return this process's number among those of its host."""
    return int(_place().local_rank)


def local_size() -> int:
    """Return the number of processes on this host."""
    return int(_place().local_size)


def node_rank() -> int:
    """Return the number of this host, from 0 to `num_nodes() - 1`."""
    return int(_place().node_rank)


def num_nodes() -> int:
    """Return the number of hosts."""
    return int(_place().num_nodes)


def start_timeline(folder: str | os.PathLike[str]) -> None:
    """Write what this rank waits for and transfers into a file, from now on.

    `KERAS_RING_TIMELINE` does it from the start. The file, `rank0.json` for rank 0, is a trace of
    Chrome's, which Perfetto opens; it may be read while it is written. One of the same name is
    overwritten. Of process sets that are there each has a file of its own.

    Args:
        folder: Where; made where it is missing. The same on all ranks of a host, if you like.

    Raises:
        ConfigError: The folder or the file cannot be made, or `init` was not called.

    Thread: any. Other ranks need not call it.

    Example:
        >>> import tempfile
        >>> kr.start_timeline(tempfile.mkdtemp())
        >>> kr.stop_timeline()
    """
    _place()
    native.start_timeline(make_folder(os.fspath(folder), "start_timeline: folder"))


def stop_timeline() -> None:
    """End what `start_timeline` or `KERAS_RING_TIMELINE` began, and write the rest.

    Example:
        >>> kr.stop_timeline()
    """
    _place()
    native.stop_timeline()


def on_init(hook: Callable[[], None]) -> Callable[[], None]:
    """Run `hook` at the end of every `init`, and now if that has been called.

    For the modules that adapt Keras to the world they are in.
    """
    _runtime.hooks.append(hook)
    if is_initialized():
        hook()
    return hook


def on_shutdown(hook: Callable[[], None]) -> Callable[[], None]:
    """Run `hook` at the beginning of every `shutdown`."""
    _runtime.shutdown_hooks.append(hook)
    return hook


def start_process_set(number: int, ranks: Sequence[int]) -> None:
    """Start the engine of a process set.

    Args:
        number: What this process knows it by.
        ranks: In the world, ascending, with this one among them; all of them call this at once.

    Raises:
        ConfigError: The communicator that was given to `init` has been freed.
        KerasRingError: By cause.
    """
    if _runtime.comm is None:
        native.start(number, None, ranks, _runtime.config)
        return
    from mpi4py import MPI

    if _runtime.comm == MPI.COMM_NULL:
        raise ConfigError(
            "add_process_set: the communicator given to keras_ring.init() has been freed; keep it."
        )
    group = _runtime.comm.group.Incl(list(ranks))
    part = _runtime.comm.Create_group(group)
    group.Free()
    native.start(number, part.py2f(), ranks, _runtime.config)
    part.Free()


def take_initial_process_sets() -> list[Any]:
    """Return what was given to `init` and has not been taken."""
    given, _runtime.initial_process_sets = _runtime.initial_process_sets, []
    return given


def _place() -> native.Place:
    if _runtime.place is None:
        raise ConfigError("keras_ring is not initialised; call keras_ring.init() first.")
    return _runtime.place


def _import_mpi(stall_s: float) -> Any:
    """Import mpi4py and see to it that MPI is initialised.

    MPI waits for all processes without a limit; after `stall_s` seconds that is at least said. If
    the script has imported it before, MPI is initialised and mpi4py will finalise it.
    """
    is_first = "mpi4py.MPI" not in sys.modules
    import mpi4py

    before = (mpi4py.rc.initialize, mpi4py.rc.finalize)
    if is_first:
        # Ours to finalise: after a failure MPI_Finalize would wait for ranks that are gone.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    if not MPI.Is_initialized():
        report = threading.Timer(stall_s, _report_wait_in_init, [stall_s])
        report.daemon = True
        report.start()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        report.cancel()
        _runtime.owns_mpi = True
    return MPI


def _report_wait_in_init(stall_s: float) -> None:
    line = (
        f"[keras_ring] pid {os.getpid()}: init has waited {stall_s:.3g} s in MPI_Init for the "
        "other processes of the job. Some have not called keras_ring.init(), or cannot be "
        "reached; look at their output.\n"
    )
    os.write(2, line.encode())


def _leave_at_exit() -> None:
    """Leave when the script ends, so that the other ranks learn whether it ended well."""
    if _runtime.pid != os.getpid():
        return  # a forked helper: the world is its parent's
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    has_failed = error is not None and not isinstance(error, SystemExit)
    if has_failed and is_initialized():
        _runtime.place = None
        native.abandon(f"its script raised {type(error).__name__}: {error}"[:1000])
    else:
        shutdown()
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if has_failed and MPI.COMM_WORLD.size > 1:
        native.skip_mpi_finalize_at_exit()
    elif _runtime.owns_mpi and not _runtime.has_lost_peer and not MPI.Is_finalized():
        MPI.Finalize()
