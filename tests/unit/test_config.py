"""Environment variables: defaults, ranges, and the message when a value is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from keras_ring.config import ALGORITHMS, Config
from keras_ring.errors import ConfigError

FIELDS = {
    "KERAS_RING_STALL_S": ("stall_s", "2.5", 2.5),
    "KERAS_RING_STALL_ERROR_S": ("stall_error_s", "0", 0.0),
    "KERAS_RING_SEGMENT_BYTES": ("segment_bytes", "4096", 4096),
    "KERAS_RING_BUCKET_BYTES": ("bucket_bytes", "0", 0),
    "KERAS_RING_KNOWN_REQUESTS": ("known_requests", "1", 1),
    "KERAS_RING_SLOT_BYTES": ("slot_bytes", "1e6", 1_000_000),
    "KERAS_RING_ALGORITHM": ("algorithm", "ring", "ring"),
    "KERAS_RING_TIMELINE": ("timeline", "/tmp", "/tmp"),
}
NUMBERS = sorted(set(FIELDS) - {"KERAS_RING_ALGORITHM", "KERAS_RING_TIMELINE"})


def test_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()


def test_every_variable_is_tested_here_and_described_with_its_default() -> None:
    described = str(Config.__doc__)
    for field in dataclasses.fields(Config):
        if field.name not in ("is_launched", "launched_size"):
            variable = f"KERAS_RING_{field.name.upper()}"
            assert FIELDS[variable][0] == field.name
            text = " ".join(described.partition(f"{field.name}: `{variable}`")[2].split())
            default = field.default if isinstance(field.default, str) else f"{field.default:.16g}"
            assert f"Defaults to {default}." in text.replace('"', "")


@pytest.mark.parametrize("variable", FIELDS)
def test_variable_sets_its_field(variable: str) -> None:
    field, text, value = FIELDS[variable]

    config = Config.from_environment({variable: f" {text} "})

    assert config == dataclasses.replace(Config(), **{field: value})
    assert type(getattr(config, field)) is type(value)


@pytest.mark.parametrize("variable", FIELDS)
def test_variable_set_to_nothing_means_the_default(variable: str) -> None:
    assert Config.from_environment({variable: ""}) == Config()


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1", "1 2", "1,5", "0x10"])
@pytest.mark.parametrize("variable", NUMBERS)
def test_value_that_is_no_number_in_range_is_refused(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is '{text}'; expected a number, at least"):
        Config.from_environment({variable: text})


@pytest.mark.parametrize("text", ["0.5e1.5", "70000.5", "1e12"])
def test_value_that_is_no_whole_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"KERAS_RING_SLOT_BYTES is '{text}'; expected"):
        Config.from_environment({"KERAS_RING_SLOT_BYTES": text})


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({"KERAS_RING_ALGORITHM": "tree"})

    assert str(caught.value) == f"KERAS_RING_ALGORITHM is 'tree'; expected one of {ALGORITHMS}."


@pytest.mark.parametrize(
    "environment, launched_size",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2),
        ({"MV2_COMM_WORLD_SIZE": "3"}, 3),
        ({"PMIX_RANK": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, None),
    ],
)
def test_launcher_is_recognised(environment: dict[str, str], launched_size: Any) -> None:
    config = Config.from_environment(environment)

    assert config.is_launched
    assert config.launched_size == launched_size


def test_folder_of_timelines_is_made(tmp_path) -> None:
    folder = tmp_path / "a" / "b"

    assert Config.from_environment({"KERAS_RING_TIMELINE": str(folder)}).timeline == str(folder)

    assert folder.is_dir()


def test_folder_that_is_a_file_is_refused(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match=f"KERAS_RING_TIMELINE is '{path}', which is no folder"):
        Config.from_environment({"KERAS_RING_TIMELINE": str(path)})
