"""What `kr.data.shard` gives each rank: every sample once, and as many batches as the others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

NUM_SAMPLES = 50
CHUNK = 4
# The least that 1, 2, 3 and 4 ranks can share.
BATCH = 12
KINDS = ["arrays", "tf.data", "tf.data of batches", "PyDataset", "HDF5"]


class Pairs(keras.utils.PyDataset):
    """Batches of up to 4 samples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asked_for: list[int] = []

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // 4)

    def __getitem__(self, index: int) -> Any:
        self.asked_for.append(index)
        return samples()[0][index * 4 : index * 4 + 4], samples()[1][index * 4 : index * 4 + 4]


def samples(number: int = NUM_SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Sample i is known by its target i."""
    numbers = np.arange(number, dtype="float32")
    return np.stack([numbers / number, np.sin(numbers)], axis=1), numbers


def flat(parts: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def shared(tmp_path: Path) -> Path:
    return Path(kr.broadcast_object(str(tmp_path)))


def write(path: Path, begin: int, end: int, **options: Any) -> Path:
    if kr.rank() == 0:
        x, y = samples()
        with h5py.File(path, "w") as file:
            options = {"chunks": (CHUNK, 2), "compression": "gzip", **options}
            file.create_dataset("images", data=x[begin:end], **options)
            file.create_dataset("labels", data=y[begin:end])
    kr.barrier()
    return path


def data_of(kind: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The data, all of it, and what shard is called with."""
    if kind == "PyDataset":
        return Pairs(), {}
    if kind == "HDF5":
        folder = shared(tmp_path)
        paths = [write(folder / "a.h5", 0, 22), write(folder / "b.h5", 22, NUM_SAMPLES)]
        return kr.data.HDF5(paths), {"batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices(samples())
    if kind == "tf.data of batches":
        return dataset.batch(4), {}
    return samples() if kind == "arrays" else dataset, {"batch_size": BATCH}


def targets(shard: Any) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    return [np.asarray(y).astype(int).tolist() for _, y in shard]


def of_all_ranks(shard: Any) -> list[list[list[int]]]:
    return kr.allgather_object(targets(shard))


def joint(shard: Any) -> list[list[int]]:
    """The sets of samples that are used at the same time."""
    return [sorted(flat(step)) for step in zip(*of_all_ranks(shard), strict=True)]


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_read_once_and_every_rank_has_as_many_batches(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, reading, seed=3, **options)
    unit = 4 if "batch_size" not in options else 1
    orders = []
    for epoch in range(2):
        assert shard.epoch == epoch
        ranks = of_all_ranks(shard)
        assert len({len(batches) for batches in ranks}) == 1
        assert len(ranks[0]) == len(shard)
        every = flat(flat(ranks))
        assert set(every) == set(range(NUM_SAMPLES))
        assert len(every) - NUM_SAMPLES <= (kr.size() - 1) * unit
        orders.append(every)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_over_is_dropped_if_asked_for(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, reading, remainder="drop", **options)
    ranks = of_all_ranks(shard)
    every = flat(flat(ranks))
    assert len(set(every)) == len(every)
    sizes = {tuple(map(len, batches)) for batches in ranks}
    if "batch_size" in options:
        assert sizes == {(BATCH // kr.size(),) * len(shard)}
    assert len({len(size) for size in sizes}) == 1


@pytest.mark.parametrize("kind", ["arrays", "tf.data", "HDF5"])
def test_the_order_of_a_seed_is_the_same_for_any_number_of_ranks(kind, tmp_path):
    """Compared with what is written here, as a test runs on one number of ranks."""
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, seed=5, **options)
    shard.epoch = 2
    first, second = joint(shard)[:2]
    file = Path(__file__).with_name("data_orders.json")
    assert [first, second] == json.loads(file.read_text())[kind]


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_epoch_reads_what_the_epoch_of_unbroken_training_reads(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    unbroken = kr.data.shard(data, reading, **options)
    epochs = [targets(unbroken) for _ in range(3)]
    resumed = kr.data.shard(data, reading, **options)
    resumed.epoch = 2
    assert targets(resumed) == epochs[2]
    assert resumed.epoch == 3
    with pytest.raises(kr.ConfigError, match="epoch was set to -1"):
        resumed.epoch = -1


def test_the_orders_do_not_depend_on_the_ranks_own_random_state():
    """`keras.utils.set_random_seed(kr.rank())` is what scripts of many ranks do."""
    keras.utils.set_random_seed(kr.rank())
    shard = kr.data.shard(tf.data.Dataset.range(24), batch_size=BATCH)
    assert sorted(flat(flat(kr.allgather_object([b.numpy().tolist() for b in shard])))) == (
        list(range(24))
    )


def test_no_seed_leaves_samples_as_they_are_stored(tmp_path):
    for kind in KINDS:
        data, options = data_of(kind, tmp_path)
        assert flat(joint(kr.data.shard(data, seed=None, **options)))[:BATCH] == (
            list(range(BATCH))
        )


def test_arrays_keep_their_nest():
    x, y = samples()
    shard = kr.data.shard({"a": x, "b": (y, [y])}, batch_size=BATCH)
    batch = next(iter(shard))
    assert batch["a"].shape == (BATCH // kr.size(), 2)
    np.testing.assert_array_equal(batch["b"][0], batch["b"][1][0])


def test_a_rank_asks_a_pydataset_for_its_own_batches_only():
    data = Pairs(workers=3)
    shard = kr.data.shard(data, "partition")
    list(shard)
    parts = kr.allgather_object(sorted(set(data.asked_for)))
    assert flat(parts) == list(range(len(data)))


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


def test_random_reading_of_small_chunks_reads_most_of_them_on_one_rank_alone(tmp_path, reads):
    path = write(shared(tmp_path) / "a.h5", 0, 48, chunks=(3, 2))
    shard = kr.data.shard(kr.data.HDF5(path), batch_size=BATCH)
    list(shard)
    ranks = kr.allgather_object([first for name, first, _ in reads if name == "/images"])
    # As many rows a rank as a chunk has, or a multiple: none is read twice.
    assert sorted(flat(ranks)) == list(range(0, 48, 3))


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


def compiled(scope: bool) -> Any:
    keras.utils.set_random_seed(1)

    def make() -> Any:
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer: Any = keras.optimizers.SGD(0.05)
        if not scope:
            optimizer = kr.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse")
        return model

    if not scope:
        return make()
    with kr.RingStrategy().scope():
        return make()


def alone(batches: list[list[int]]) -> Any:
    """The weights of one process that trains on joint batches."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = samples()
    for batch in batches:
        model.train_on_batch(x[batch], y[batch] / NUM_SAMPLES)
    return model


class Scaled(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x, y = samples()
        return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4] / NUM_SAMPLES


def scaled(kind: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """48 samples whose targets are less than 1."""
    x, y = (part[:48] for part in samples())
    y = y / NUM_SAMPLES
    if kind == "PyDataset":
        return Scaled(), {}
    if kind == "HDF5":
        path = shared(tmp_path) / "scaled.h5"
        if kr.rank() == 0:
            with h5py.File(path, "w") as file:
                file.create_dataset("images", data=x, chunks=(5, 2))
                file["labels"] = y
        kr.barrier()
        return kr.data.HDF5(path), {"batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return ((x, y) if kind == "arrays" else dataset), {"batch_size": BATCH}


@pytest.mark.parametrize("scope", [False, True], ids=["optimizer", "strategy"])
@pytest.mark.parametrize("kind", ["arrays", "tf.data", "PyDataset", "HDF5"])
def test_fit_trains_as_one_process_on_the_joint_batches(kind, scope, tmp_path):
    data, options = scaled(kind, tmp_path)
    shard = kr.data.shard(data, **options)
    batches = []
    for _ in range(2):
        ranks = kr.allgather_object(
            [np.rint(np.asarray(y) * NUM_SAMPLES).astype(int).tolist() for _, y in shard]
        )
        batches += [flat(step) for step in zip(*ranks, strict=True)]
    shard = kr.data.shard(data, **options)
    model = compiled(scope)
    history = model.fit(shard, epochs=2, verbose=0).history
    assert len(history["loss"]) == 2
    assert shard.epoch == 2
    for mine, expected in zip(model.get_weights(), alone(batches).get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(model.evaluate(shard, verbose=0))


@pytest.mark.parametrize("scope", [False, True], ids=["optimizer", "strategy"])
@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_training_that_goes_on_ends_as_unbroken_training_does(kind, scope, tmp_path):
    """Also with an epoch of one batch, which Keras reads once more to build the model."""
    data, _ = scaled(kind, tmp_path)
    unbroken = compiled(scope)
    unbroken.fit(kr.data.shard(data, batch_size=48), epochs=3, verbose=0)
    model = compiled(scope)
    shard = kr.data.shard(data, batch_size=48)
    model.fit(shard, epochs=1, verbose=0)
    again = kr.data.shard(data, batch_size=48)
    again.epoch = 1
    model.fit(again, initial_epoch=1, epochs=3, verbose=0)
    assert again.epoch == 3
    for mine, expected in zip(model.get_weights(), unbroken.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_fit_takes_class_weights_validation_data_and_uneven_last_batches():
    x, y = samples(46)
    model = compiled(scope=True)
    shard = kr.data.shard((x, (y % 2).astype("int64")), batch_size=BATCH)
    history = model.fit(
        shard,
        validation_data=kr.data.shard((x, y), seed=None, batch_size=BATCH),
        class_weight={0: 1.0, 1: 2.0},
        epochs=2,
        verbose=0,
    ).history
    assert set(history) == {"loss", "val_loss"}


def expect_error(match: str, call: Callable[[], Any]) -> None:
    """All ranks get the error, and may go on."""
    with pytest.raises(kr.ConfigError, match=match):
        call()
    kr.barrier()


def test_wrong_arguments_are_errors_that_say_what_is_expected():
    data = samples()
    for match, options in [
        ("reading='all'; expected one of 'random', 'partition'", {"reading": "all"}),
        ("remainder='keep'; expected one of 'pad', 'drop'", {"remainder": "keep"}),
        ("seed=-1; expected a whole number from 0 on", {"seed": -1}),
        ("seed=0.5; expected a whole number from 0 on", {"seed": 0.5}),
        ("batch_size=0; expected a whole number of rows", {"batch_size": 0}),
        ("not one batch of 120 is left", {"batch_size": 120, "remainder": "drop"}),
    ]:
        expect_error(match, lambda options=options: kr.data.shard(data, **options))
    if kr.size() > 1:
        wrong = BATCH + 1
        expect_error(
            f"batch_size={wrong} .* expected a multiple of {kr.size()}",
            lambda: kr.data.shard(data, batch_size=wrong),
        )
    expect_error(
        "batch_size=4 was given with a PyDataset", lambda: kr.data.shard(Pairs(), batch_size=4)
    )
    expect_error("is a shard already", lambda: kr.data.shard(kr.data.shard(data)))
    expect_error("is infinite", lambda: kr.data.shard(tf.data.Dataset.range(3).repeat()))
    processes = Pairs(workers=2, use_multiprocessing=True)
    expect_error("has use_multiprocessing=True", lambda: kr.data.shard(processes))


def test_wrong_arrays_are_errors_that_name_them():
    expect_error(
        r"data\[1\] has 9 samples and data\[0\] has 8",
        lambda: kr.data.shard((np.zeros((8, 2)), np.zeros(9))),
    )
    expect_error(r"data\['b'\] is a single int", lambda: kr.data.shard({"a": np.zeros(2), "b": 3}))
    expect_error("the data has no array at all", lambda: kr.data.shard([]))


def test_fewer_samples_than_ranks_is_an_error():
    few = np.zeros(kr.size() - 1)
    expect_error(
        f"the data has {kr.size() - 1} samples for {kr.size()} ranks", lambda: kr.data.shard(few)
    )


def test_different_data_or_arguments_are_an_error_on_all_ranks():
    if kr.size() == 1:
        pytest.skip("one rank can be given no other data than the others")
    x, y = samples(48)
    per_rank = 48 // kr.size()
    part = slice(kr.rank() * per_rank, (kr.rank() + 1) * per_rank)
    expect_error(
        "ranks differ where each shards data.*Give every rank the whole data",
        lambda: kr.data.shard((x[part], y[part])),
    )
    expect_error("'seed': 0.*'seed': 1", lambda: kr.data.shard((x, y), seed=min(kr.rank(), 1)))


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
