"""Every environment variable that keras_ring reads, in one place.

C++ reads none: `init` hands the values over.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_ring.errors import ConfigError

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")

# In the order of core/algorithm.h.
ALGORITHMS = ("auto", "ring")


@dataclass(frozen=True)
class Config:
    """The configuration of one generation.

    Attributes:
        stall_s: `KERAS_RING_STALL_S`. Seconds after which a collective that some ranks have not
            called is reported on every rank. Defaults to 60.
        stall_error_s: `KERAS_RING_STALL_ERROR_S`. Seconds after which it becomes a `StallError`
            on the ranks that wait; also how long `init` and `shutdown` wait for the other ranks.
            0: for ever. Defaults to 600.
        segment_bytes: `KERAS_RING_SEGMENT_BYTES`. Bytes of one message between ranks. Defaults to
            262144.
        bucket_bytes: `KERAS_RING_BUCKET_BYTES`. Small tensors are fused into one transfer up to
            this many bytes. Defaults to 67108864.
        known_requests: `KERAS_RING_KNOWN_REQUESTS`. Names of tensors that the ranks know by
            number. Defaults to 4096.
        slot_bytes: `KERAS_RING_SLOT_BYTES`. Bytes of a slot in the memory that the ranks of a host
            share. Within one host each rank has four; between hosts eight, four times as large or
            larger, with many ranks: 1 MiB a rank on one host, 8 to 48 MiB between hosts. With
            messages and buffers a rank stays below 64 MiB. Defaults to 262144.
        algorithm: `KERAS_RING_ALGORITHM`. "ring" makes allreduce one ring over all ranks, "auto"
            uses shared memory within a host and rings between hosts. Defaults to "auto".
        timeline: `KERAS_RING_TIMELINE`. A folder, made where it is missing, into which each rank
            writes what it waited for and transferred, and when: `rank0.json` and so on, in the
            format of Chrome's traces, which Perfetto opens. Empty: none. Defaults to "".
        is_launched: Whether an MPI launcher started this process.
        launched_size: Number of processes that the launcher says it started, if it says so.
    """

    stall_s: float = 60.0
    stall_error_s: float = 600.0
    segment_bytes: int = 256 * 1024
    bucket_bytes: int = 64 * 1024 * 1024
    known_requests: int = 4096
    slot_bytes: int = 256 * 1024
    algorithm: str = "auto"
    timeline: str = ""
    is_launched: bool = False
    launched_size: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Config":
        """Read the configuration.

        Args:
            environment: Defaults to `os.environ`.

        Raises:
            ConfigError: A value is not a number in its range.
        """
        env = os.environ if environment is None else environment
        size = next((env[name] for name in _SIZE_VARIABLES if name in env), None)
        return cls(
            stall_s=_number(env, "KERAS_RING_STALL_S", cls.stall_s, least=0.01),
            stall_error_s=_number(env, "KERAS_RING_STALL_ERROR_S", cls.stall_error_s, least=0.0),
            segment_bytes=_integer(env, "KERAS_RING_SEGMENT_BYTES", cls.segment_bytes, least=64),
            bucket_bytes=_integer(env, "KERAS_RING_BUCKET_BYTES", cls.bucket_bytes, least=0),
            known_requests=_integer(env, "KERAS_RING_KNOWN_REQUESTS", cls.known_requests, least=1),
            slot_bytes=_integer(env, "KERAS_RING_SLOT_BYTES", cls.slot_bytes, least=4096),
            algorithm=_choice(env, "KERAS_RING_ALGORITHM", ALGORITHMS),
            timeline=_folder(env, "KERAS_RING_TIMELINE"),
            is_launched=size is not None or any(name in env for name in _RANK_VARIABLES),
            launched_size=int(size) if size is not None and size.isdecimal() else None,
        )


def _number(env: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise ConfigError(f"{name} is {text!r}; expected a number, at least {least:g}.")
    return value


def _integer(env: Mapping[str, str], name: str, default: int, least: int) -> int:
    value = _number(env, name, default, least)
    if value != int(value) or value > 2**31 - 1:
        raise ConfigError(f"{name} is {env[name]!r}; expected a whole number below 2^31.")
    return int(value)


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = env.get(name, "").strip() or choices[0]
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {choices}.")
    return value


def _folder(env: Mapping[str, str], name: str) -> str:
    return make_folder(env.get(name, "").strip(), name)


def make_folder(path: str, what: str) -> str:
    """Make a folder where there is none.

    Args:
        path: Empty: nothing is made.
        what: What it was given as, for messages.

    Returns:
        `path`.

    Raises:
        ConfigError: It cannot be made.
    """
    if path:
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{what} is {path!r}, which is no folder: {error}.") from None
    return path
