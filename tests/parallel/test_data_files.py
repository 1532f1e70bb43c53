"""What `kr.data.shard` reads of HDF5 files, and what it says of files that are wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from data_samples import (
    BATCH,
    CHUNK,
    NUM_SAMPLES,
    expect_error,
    flat,
    joint,
    samples,
    shared,
    write,
)


@pytest.fixture
def reads(monkeypatch) -> list[tuple[str, int, int]]:
    """What is read of HDF5 files from now on: dataset, first row, one behind the last."""
    made: list[tuple[str, int, int]] = []
    plain = h5py.Dataset.read_direct

    def read_direct(self: Any, dest: Any, source_sel: Any = None, dest_sel: Any = None) -> None:
        made.append((self.name, source_sel.start, source_sel.stop))
        plain(self, dest, source_sel, dest_sel)

    monkeypatch.setattr(h5py.Dataset, "read_direct", read_direct)
    return made


def test_partitioned_reading_touches_the_chunks_of_a_ranks_own_samples_once(tmp_path, reads):
    path = write(shared(tmp_path) / "a.h5", 0, NUM_SAMPLES)
    shard = kr.data.shard(kr.data.HDF5(path), "partition", batch_size=BATCH, remainder="drop")
    assert reads == []
    list(shard)
    begin, end = (r * NUM_SAMPLES // kr.size() for r in (kr.rank(), kr.rank() + 1))
    images = [(first, last) for name, first, last in reads if name == "/images"]
    touched = [first // CHUNK for first, _ in images]
    assert len(set(touched)) == len(touched)
    assert all(first // CHUNK == (last - 1) // CHUNK for first, last in images)
    assert all(begin <= first < last <= end for first, last in images)


def test_random_reading_of_chunks_as_large_as_a_ranks_batch_reads_each_on_one_rank_alone(
    tmp_path, reads
):
    own = BATCH // kr.size()
    path = write(shared(tmp_path) / "a.h5", 0, 48, chunks=(own, 2))
    shard = kr.data.shard(kr.data.HDF5(path), batch_size=BATCH)
    list(shard)
    ranks = kr.allgather_object([first for name, first, _ in reads if name == "/images"])
    assert sorted(flat(ranks)) == list(range(0, 48, own))


@pytest.mark.parametrize("options", [{"chunks": None, "compression": None}, {"chunks": (50, 1)}])
def test_files_without_chunks_or_with_one_are_read(options, tmp_path):
    path = write(shared(tmp_path) / "a.h5", 0, NUM_SAMPLES, **options)
    shard = kr.data.shard(kr.data.HDF5(path), batch_size=BATCH)
    for x, y in shard:
        np.testing.assert_array_equal(x, samples()[0][y.astype(int)])
    assert set(flat(joint(shard))) == set(range(NUM_SAMPLES))


def test_more_files_than_may_be_open_are_read(tmp_path):
    folder = shared(tmp_path)
    paths = [write(folder / f"{i}.h5", i, i + 1, chunks=(1, 2)) for i in range(NUM_SAMPLES)]
    shard = kr.data.shard(kr.data.HDF5(paths), batch_size=BATCH)
    assert set(flat(joint(shard))) == set(range(NUM_SAMPLES))


def test_wrong_files_are_errors_that_name_file_and_dataset(tmp_path):
    folder = shared(tmp_path)
    good = write(folder / "good.h5", 0, 20)
    if kr.rank() == 0:
        content = good.read_bytes()
        (folder / "cut.h5").write_bytes(content[: len(content) // 2])
        (folder / "text.h5").write_text("no HDF5 at all\n" * 100)
        with h5py.File(folder / "uneven.h5", "w") as file:
            file["images"], file["labels"] = np.zeros((8, 2)), np.zeros(7)
        with h5py.File(folder / "other.h5", "w") as file:
            file["images"], file["labels"] = np.zeros((8, 3), "float32"), np.zeros(8, "float32")
        with h5py.File(folder / "few.h5", "w") as file:
            file["images"], file["labels"] = np.zeros((0, 3)), np.zeros(0)
    kr.barrier()
    for match, paths, names in [
        (r"there is no file .*absent\.h5", "absent.h5", {}),
        (r"cut\.h5 is truncated", "cut.h5", {}),
        (r"text\.h5 is not an HDF5 file", "text.h5", {}),
        (
            r"good\.h5 has no dataset 'pixels'; it has \['images', 'labels'\]",
            "good.h5",
            {"x": "pixels"},
        ),
        (r"uneven\.h5 dataset 'labels' has 7 samples and 'images' has 8", "uneven.h5", {}),
        (
            r"'images' has samples of shape \(3,\), float32, in .*other\.h5",
            ["good.h5", "other.h5"],
            {},
        ),
        (r"HDF5 \(few\.h5; dataset 'images'\) has 0 samples", "few.h5", {}),
    ]:
        files = [folder / path for path in ([paths] if isinstance(paths, str) else paths)]
        expect_error(
            match, lambda files=files, names=names: kr.data.shard(kr.data.HDF5(files, **names))
        )
    with pytest.raises(kr.ConfigError, match="no path was given"):
        kr.data.HDF5([])


def test_a_file_that_is_wrong_on_one_rank_is_an_error_on_all(tmp_path):
    if kr.size() == 1:
        pytest.skip("needs another rank")
    path = write(shared(tmp_path) / "a.h5", 0, 20)
    own = path if kr.rank() == 0 else path.with_name("absent.h5")
    with pytest.raises((kr.ConfigError, kr.MismatchError), match=r"there is no file .*absent\.h5"):
        kr.data.shard(kr.data.HDF5(own))


def test_a_chunk_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    path = write(shared(tmp_path) / "a.h5", 0, NUM_SAMPLES)
    shard = kr.data.shard(kr.data.HDF5(path), batch_size=BATCH)
    kr.barrier()
    if kr.rank() == 0:
        with h5py.File(path) as file:
            chunk = file["images"].id.get_chunk_info(2)
        with path.open("r+b") as file:
            file.seek(chunk.byte_offset)
            file.write(b"\xff" * chunk.size)
    kr.barrier()
    try:
        list(shard)
        problem = ""
    except kr.ConfigError as error:
        problem = str(error)
    problems = kr.allgather_object(problem)
    assert any("a.h5 samples 8 to 11 of dataset 'images' cannot be read" in p for p in problems)
