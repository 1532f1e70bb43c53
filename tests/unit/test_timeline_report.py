"""What is made of the ranks' timelines: one trace, one clock, and a report that is right."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from keras_ring.launch.cli import main
from keras_ring.launch.timeline import clock, files, measures, page

NUM_STEPS = 20
STEP_US = 10_000.0
TRANSFER_US = 500.0
LATE_US = 2_000.0
START_US = 1.7e15
SHARES = {"wait": 0.1, "pack": 0.2, "reduce": 0.3, "unpack": 0.25, "rest": 0.15}


class Writer:
    """Writes a rank's timeline as the engine does."""

    def __init__(self, folder: Path, rank: int, host: str, clock_us: float = 0.0) -> None:
        self.path = folder / f"rank{rank}.json"
        self.rank, self.clock_us, self.num_waits = rank, clock_us, 0
        name = f"rank {rank} (host {host}, pid {100 + rank})"
        self.lines = ["[", self.line(ph="M", name="process_name", args={"name": name})]

    def line(self, **event: object) -> str:
        return json.dumps({**event, "pid": self.rank, "tid": 1}) + ","

    def request(self, name: str, called_us: float, ready_us: float) -> None:
        self.num_waits += 1
        for phase, at in (("b", called_us), ("e", ready_us)):
            event = {"ph": phase, "cat": "wait", "name": name, "id": self.num_waits}
            self.lines.append(self.line(**event, ts=START_US + at + self.clock_us))

    def transfer(self, name: str, start_us: float, duration_us: float, num_bytes: int) -> None:
        at = START_US + start_us + self.clock_us
        stages = {f"{s}_us": duration_us * share for s, share in SHARES.items()}
        args = {"bytes": num_bytes, "requests": 1, **stages}
        event = {"ph": "X", "cat": "transfer", "name": name, "ts": at, "dur": duration_us}
        self.lines.append(self.line(**event, args=args))

    def close(self) -> None:
        self.path.write_text("\n".join(self.lines) + "\n")


def write_job(
    folder: Path,
    hosts: list[str],
    late: int | None = None,
    clocks_us: dict[str, float] | None = None,
) -> None:
    """Write the timelines of steps with two gradients each; rank `late` calls them later."""
    noise = random.Random(3)
    clocks_us = clocks_us or {}
    ranks = [Writer(folder, i, host, clocks_us.get(host, 0.0)) for i, host in enumerate(hosts)]
    for step in range(NUM_STEPS):
        for i, name in enumerate(("allreduce 'last/kernel'", "allreduce 'first/kernel'")):
            begin = step * STEP_US + 3000.0 * i
            called = [begin + LATE_US * (r.rank == late) for r in ranks]
            ready = max(called)
            for rank, at in zip(ranks, called, strict=True):
                rank.request(name, at, ready)
                start = ready + noise.uniform(0.0, 50.0)
                rank.transfer(name, start, TRANSFER_US, 1000 * (i + 1))
    for rank in ranks:
        rank.close()


def read_and_measure(folder: Path) -> measures.Measures:
    timelines = files.largest_group(files.read_folder(folder))
    return measures.measure(timelines, clock.offsets(timelines))


def test_the_measures_are_those_of_the_job(tmp_path):
    write_job(tmp_path, ["h1"] * 3, late=1)
    measured = read_and_measure(tmp_path)
    assert measured.ranks == [0, 1, 2]
    assert measured.step_name == "allreduce 'first/kernel'"
    assert len(measured.step_ms) == NUM_STEPS - 1
    assert measures.typical_step_ms(measured) == pytest.approx(STEP_US / 1e3, rel=0.01)
    waited_s = 2 * NUM_STEPS * LATE_US / 1e6
    assert measured.waited_s[0] == pytest.approx([0, waited_s, 0])
    assert measured.waited_s[1] == [0, 0, 0]
    assert measured.caused_s == pytest.approx([0, waited_s, 0])
    assert measured.transfer_s == pytest.approx([2 * NUM_STEPS * TRANSFER_US / 1e6] * 3)
    for stages_s in measured.stages_s:
        expected = [measured.transfer_s[0] * share for share in SHARES.values()]
        assert stages_s == pytest.approx(expected)
    assert measured.num_bytes == [NUM_STEPS * 3000] * 3
    # The first transfer of a step lies before the second call, the second after the last.
    assert measured.overlap == [pytest.approx(0.5, abs=0.01)] * 3


def test_seconds_in_which_several_collectives_wait_count_once(tmp_path):
    a, b = Writer(tmp_path, 0, "h"), Writer(tmp_path, 1, "h")
    for name, at in (("allreduce 'x'", 0.0), ("allreduce 'y'", 400_000.0)):
        a.request(name, at, 1_000_000.0)
        b.request(name, 1_000_000.0, 1_000_000.0)
    a.close()
    b.close()
    assert read_and_measure(tmp_path).waited_s[0] == [0.0, pytest.approx(1.0)]


def test_the_slowest_rank_is_named_and_only_if_there_is_one(tmp_path):
    write_job(tmp_path, ["h1", "h1", "h2"], late=2)
    assert any(
        "Rank 2 on host h2 is the slowest" in s for s in page.sentences(read_and_measure(tmp_path))
    )
    write_job(tmp_path, ["h1", "h1", "h2"])
    assert any("No rank is much slower" in s for s in page.sentences(read_and_measure(tmp_path)))


@pytest.mark.parametrize("skew_us", [-3e6, -700.0, 40.0, 12_345.0])
def test_clocks_of_hosts_come_together_within_the_error_that_is_said(tmp_path, skew_us):
    write_job(tmp_path, ["h1", "h2", "h2"], late=1, clocks_us={"h2": skew_us})
    timelines = files.read_folder(tmp_path)
    found = clock.offsets(timelines)
    assert found["h1"] == clock.Offset(0.0, 0.0)
    error_us = found["h2"].error_us
    assert error_us is not None
    assert 0 < error_us <= TRANSFER_US
    assert abs(found["h2"].us + skew_us) <= error_us
    measured = measures.measure(timelines, found)
    assert measured.waited_s[0][1] == pytest.approx(2 * NUM_STEPS * LATE_US / 1e6, rel=0.3)


def test_a_clock_without_common_transfers_stays_as_it_is_and_that_is_said(tmp_path, capsys):
    for rank, name in ((0, "allreduce 'a'"), (1, "allreduce 'b'")):
        writer = Writer(tmp_path, rank, f"h{rank}")
        writer.transfer(name, 0.0, 10.0, 4)
        writer.close()
    assert clock.offsets(files.read_folder(tmp_path))["h1"] == clock.Offset(0.0, None)
    assert main(["timeline", "merge", str(tmp_path)]) == 0
    assert "host h1: its clock is taken as it is" in capsys.readouterr().out


def test_the_merged_trace_has_every_event_on_one_clock(tmp_path, capsys):
    write_job(tmp_path, ["h1", "h2"], clocks_us={"h2": 5e6})
    assert main(["timeline", "merge", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"host h2: its clock is corrected by -50\d{5} µs, ± \d+ µs", output), output
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    assert len(events) == 2 * (1 + NUM_STEPS * 2 * 3)
    starts = {
        pid: [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (0, 1)
    }
    for one, other in zip(starts[0], starts[1], strict=True):
        assert abs(one - other) < TRANSFER_US
    # A second time, with the merged trace in the folder.
    assert main(["timeline", "merge", str(tmp_path)]) == 0


def test_a_file_that_a_crash_has_cut_off_is_read_up_to_there(tmp_path):
    write_job(tmp_path, ["h1", "h1"])
    path = tmp_path / "rank1.json"
    text = path.read_text().rstrip()
    path.write_text(text[: len(text) - 30])
    whole, cut = files.read_folder(tmp_path)
    assert len(cut.transfers) == len(whole.transfers) - 1
    assert len(read_and_measure(tmp_path).step_ms) == NUM_STEPS - 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        (None, "", "no timeline"),
        ("other.json", "[\n", "no timeline"),
        ("rank0.json", '{"a": 1}\n', "does not begin with"),
        ("rank0.json", '[\n{"ph"\n{"ph":"M","name":"x"},\n', "line 2: not an event"),
    ],
)
def test_what_is_no_timeline_is_an_error_that_names_it(tmp_path, capsys, name, content, message):
    if name is not None:
        (tmp_path / name).write_text(content)
    for command in (["timeline", "merge"], ["report"]):
        assert main([*command, str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert str(tmp_path) in error


class Checker(HTMLParser):
    """Checks that elements are closed, and keeps what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [v or "" for k, v in attrs if k in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    write_job(tmp_path, ["h<1>"] * 4, late=3)
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert not checker.loaded
    assert checker.tags.count("polyline") == 1
    assert checker.tags.count("rect") >= 4 * 3 + 4 + 16 + 4 * 5
    assert "script" not in checker.tags
    assert "h&lt;1&gt;" in text
    assert "h<1>" not in text
    assert "Rank 3 on host h&lt;1&gt; is the slowest" in text


def test_a_page_of_one_rank_and_of_nothing_can_be_made(tmp_path):
    write_job(tmp_path, ["h1"])
    assert main(["report", str(tmp_path)]) == 0
    Writer(tmp_path, 0, "h1").close()
    assert main(["report", str(tmp_path)]) == 0
