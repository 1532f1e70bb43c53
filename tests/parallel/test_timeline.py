"""The timeline: what it holds, that it can be read at any moment, and when it cannot be written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import keras_ring as kr

SEEN_WITHIN_S = 10.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A world of its own that writes timelines."""
    shared = kr.broadcast_object(str(tmp_path / "traces"))
    kr.shutdown()
    monkeypatch.setenv("KERAS_RING_TIMELINE", shared)
    kr.init()
    yield Path(shared)
    kr.shutdown()
    monkeypatch.delenv("KERAS_RING_TIMELINE")
    kr.init()


def events_of(path: Path) -> list[dict]:
    """Read a file as Perfetto does: the array need not be closed."""
    text = path.read_text().rstrip().removesuffix(",")
    return json.loads(text + "]")


def test_each_rank_writes_what_it_waited_for_and_transferred(folder: Path) -> None:
    @tf.function
    def in_graph(x):
        return [kr.allreduce(x, name=f'many{i}#layer "{i}"\\kernel') for i in range(5)]

    before_us = time.time() * 1e6 - 1000  # two clocks are read
    in_graph(tf.ones(1000))
    kr.barrier(name="met")
    after_us = time.time() * 1e6 + 1000
    if kr.size() == 1:
        pytest.skip("one rank transfers nothing")

    [path] = folder.glob(f"rank{kr.rank()}_generation*.json")  # earlier tests were the first
    end = time.monotonic() + SEEN_WITHIN_S
    while '"barrier' not in path.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    events = events_of(path)  # of a rank that has not stopped, as of one that was killed

    [process] = [e for e in events if e["name"] == "process_name"]
    assert process["args"]["name"].startswith(f"rank {kr.rank()} (host ")
    transfers = [e for e in events if e.get("cat") == "transfer"]
    moved = [e for e in transfers if e["name"].startswith("allreduce")]
    assert sum(e["args"]["requests"] for e in moved) == 5
    assert sum(e["args"]["bytes"] for e in moved) == 5 * 4000
    assert all(e["pid"] == kr.rank() and e["dur"] >= 0 for e in transfers)
    begins = {e["id"]: e for e in events if e["ph"] == "b"}
    ends = {e["id"]: e for e in events if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert sorted(e["name"] for e in begins.values()) == sorted(
        ["barrier 'met'", *(f"allreduce 'layer \"{i}\"\\kernel'" for i in range(5))]
    )
    times = [e["ts"] for e in transfers] + [e["ts"] for e in begins.values()]
    assert before_us < min(times) < max(times) < after_us
    assert all(ends[i]["ts"] >= begins[i]["ts"] for i in begins)


def test_a_transfer_says_how_long_its_stages_took(folder: Path) -> None:
    if kr.size() == 1:
        pytest.skip("one rank transfers nothing")
    for step in range(3):
        kr.allreduce(tf.ones(4_000_000), name=f"large{step}")
    kr.stop_timeline()

    [path] = folder.glob(f"rank{kr.rank()}_generation*.json")
    runs = [e for e in events_of(path) if e["ph"] == "X"]
    transfers = [e for e in runs if e["name"].startswith("allreduce 'large")]
    assert len(transfers) == 3
    for event in transfers:
        stages = {k: v for k, v in event["args"].items() if k.endswith("_us")}
        assert stages.keys() == {f"{s}_us" for s in ("wait", "pack", "reduce", "unpack", "rest")}
        assert all(stages[f"{s}_us"] > 0 for s in ("pack", "reduce", "unpack"))
        # They do not overlap, and nothing is left out.
        assert sum(stages.values()) == pytest.approx(event["dur"], rel=0.01, abs=1)


def test_a_process_set_has_a_file_of_its_own(folder: Path) -> None:
    process_set = kr.add_process_set(range(kr.size()))
    kr.barrier(process_set=process_set)
    kr.remove_process_set(process_set)  # its file is written to the end

    [path] = folder.glob(f"rank{kr.rank()}_set*.json")

    names = {e["name"] for e in events_of(path)}
    assert {"process_name", "thread_name"} <= names
    assert kr.size() == 1 or "barrier 'barrier'" in names


def test_one_rank_may_begin_and_end_at_any_time(tmp_path: Path) -> None:
    kr.barrier(name="before")
    if kr.rank() == 0:
        kr.start_timeline(tmp_path / "new")
    kr.barrier(name="within")
    if kr.rank() == 0:
        kr.stop_timeline()
    kr.barrier(name="after")

    paths = list(tmp_path.rglob("*.json"))
    assert len(paths) == (kr.rank() == 0)
    if paths and kr.size() > 1:
        names = {e["name"] for e in events_of(paths[0]) if e.get("cat") == "wait"}
        assert names == {"barrier 'within'"}


def test_folder_that_cannot_be_written_is_an_error_of_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kr.shutdown()
    rank, next_world = _rank(), _worlds_so_far(tmp_path) + 1
    (tmp_path / f"rank{rank}_generation{next_world}.json").mkdir()
    monkeypatch.setenv("KERAS_RING_TIMELINE", str(tmp_path))
    with pytest.raises(
        kr.ConfigError, match=r"the timeline .*rank\d_generation\d+\.json cannot be written"
    ):
        kr.init()
    monkeypatch.delenv("KERAS_RING_TIMELINE")
    kr.init()


def _worlds_so_far(folder: Path) -> int:
    """Return how many worlds this process has had, as the name of a timeline tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_RING_TIMELINE", str(folder))
        kr.init()
        kr.shutdown()
    [path] = folder.glob("rank*.json")
    return int(path.stem.partition("_generation")[2])


def _rank() -> int:
    kr.init()
    rank = kr.rank()
    kr.shutdown()
    return rank
