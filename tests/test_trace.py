"""Proves what instruments report: the breakdown's line, the trace and its text, the input report, verified batches."""

import contextlib
import dataclasses
import gzip
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SMALL_MODEL,
    Corpus,
    Finished,
    byte_data,
    config_of,
    open_pipeline,
    run_trainer,
    train_gpt,
)
from conftest import write_split

pytestmark = pytest.mark.timeout(180)

LINE = re.compile(
    r"timing_breakdown step:(\d+) micro_steps:(\d+) batch_cpu_ms:([\d.]+) batch_h2d_ms:([\d.]+) forward_ms:([\d.]+) "
    r"backward_ms:([\d.]+) grad_clip_ms:([\d.]+) optimizer_ms:([\d.]+) val_ms:([\d.]+) explicit_sync_ms:([\d.]+) "
    r"\(per_optimizer_step; forward/backward/batch averaged over micro_steps; grad_accum_steps=(\d+)\) "
    r"reduce_ms:[\d.]+"
)


# --- TRAINING_TIMING_BREAKDOWN ----------------------------------------------------------------------------------------


def test_the_breakdown_prints_the_published_line_and_what_overlap_can_win(
    corpus: Corpus, tmp_path: Path
) -> None:
    settings = {
        **SMALL_MODEL,
        **corpus.env,
        "ITERATIONS": 25,
        "GRAD_ACCUM_STEPS": 2,
        "VAL_LOSS_EVERY": 12,
        "TRAINING_TIMING_BREAKDOWN": 1,
        "TRAINING_TIMING_EVERY": 12,
        "VAL_TOKENS": 3000,
    }
    timed = run_trainer(tmp_path / "timed", **settings)
    assert timed.code == 0, timed.err[-2000:]
    lines = [line for line in timed.text.splitlines() if line.startswith("timing_breakdown step")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found) and [int(m[1]) for m in found] == [*range(1, 11), 12, 24]
    for match in found:
        step, micro, cpu, h2d, forward, backward, _, optimizer, val, _, accumulation = map(
            float, match.groups()
        )
        assert micro == accumulation == 2 and h2d == 0 and min(forward, backward, optimizer) > 0
        assert cpu > 0, "with overlap off every read is waited for"
        assert (val > 0) == (step == 1), "val_ms is the validation just before the step"
    [summary] = re.findall(
        r"^overlappable: ([\d.]+) ms of ([\d.]+) ms a step \(([\d.]+) %\)", timed.text, re.MULTILINE
    )
    part, whole, share = map(float, summary)
    assert 0 < part < whole and share == pytest.approx(100 * part / whole, abs=0.6)
    mean = float(timed.values("step_avg")[-1].removesuffix("ms"))
    assert whole == pytest.approx(mean, rel=0.3)
    assert "timing_breakdown:enabled" in timed.text
    assert (
        len(
            re.findall(
                r"prefetch:False\(timing_breakdown\) copy_stream:False\(timing_breakdown\)",
                timed.text,
            )
        )
        == 2
    )
    plain = run_trainer(tmp_path / "plain", **{**settings, "TRAINING_TIMING_BREAKDOWN": 0})
    assert "timing_breakdown" not in plain.text and "overlappable" not in plain.text
    for word in ("train_loss", "val_loss", "val_bpb", "data_crc"):
        assert timed.values(word) == plain.values(word) and timed.values(word)


def test_every_phase_is_closed_by_a_synchronisation_and_charged_alone() -> None:
    waits, said = [], []
    runtime = SimpleNamespace(
        synchronize=lambda: waits.append(None) or time.perf_counter(), world_size=1
    )
    log = SimpleNamespace(line=said.append)
    spans = train_gpt.Breakdown(config_of(GRAD_ACCUM_STEPS=2), runtime, log)
    with spans("validate"), spans("forward"):
        time.sleep(0.02)
    for _ in range(2):
        with spans("forward"):
            time.sleep(0.01)
    with spans("disk_read", "train reader"):
        pass
    assert len(waits) == 8, "two a phase; none by a reader thread"
    spans.step_done(1)
    values = dict(re.findall(r"(\w+_ms):([\d.]+)", said[-1]))
    assert 10 <= float(values["forward_ms"]) < 20, "the mean of two, without the validation's own"
    assert 20 <= float(values["val_ms"]) and float(values["backward_ms"]) == 0
    spans.close()
    spans.close()
    assert sum("overlappable" in line for line in said) == 1


# --- TRACE_STEPS ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Events:
    """A trace file: its tracks, its spans as (name, track, begin, end) in ms, its marks, its counters."""

    tracks: set[str]
    spans: list[tuple[str, str, float, float]]
    marks: list[tuple[str, float]]
    counters: list[dict]

    @classmethod
    def load(cls, path: Path) -> "Events":
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        tracks = {
            e["tid"]: e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        return cls(
            set(tracks.values()),
            [
                (e["name"], tracks[e["tid"]], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
                for e in events
                if e["ph"] == "X"
            ],
            [(e["name"], e["ts"] / 1e3) for e in events if e["ph"] == "i"],
            [e for e in events if e["ph"] == "C"],
        )

    def named(self, name: str) -> list[tuple[float, float]]:
        return [(begin, end) for label, _, begin, end in self.spans if label == name]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """40 steps of 2 micro-steps through two shards with 8 steps' tokens; 12 traced; validations at 0, 8, 16 ..."""
    folder = tmp_path_factory.mktemp("traced")
    data = byte_data(folder / "data", val_tokens=4000)
    write_split(folder / "data", "train", np.arange(8 * 2056) % 250, [5 * 2056])
    return run_trainer(
        folder,
        **{
            **SMALL_MODEL,
            **data,
            "ITERATIONS": 40,
            "GRAD_ACCUM_STEPS": 2,
            "VAL_LOSS_EVERY": 8,
            "TRACE_STEPS": 12,
            "VAL_BATCH_SIZE": 64,
            "WARMUP_STEPS": 2,
            "VAL_TOKENS": 3000,
        },
    )


def test_the_trace_holds_its_steps_and_one_validation_cut_short(traced: Finished) -> None:
    assert traced.code == 0, traced.err[-2000:]
    [path] = (traced.folder / "logs").glob("*.trace.json.gz")
    trace = Events.load(path)
    assert trace.tracks == {"main thread", "train reader", "val reader"}
    assert (
        len(trace.named("optimizer")) == len(trace.named("reduce")) == 12
        and len(trace.named("backward")) == 24
    )
    [validation] = trace.named("validate")
    assert validation[0] > max(end for _, end in trace.named("optimizer")), (
        "the first validation after the steps"
    )
    inside = [f for f in trace.named("forward") if f[0] > validation[0]]
    assert len(trace.named("forward")) == 24 + len(inside) and len(inside) == 50 < 3000 // 32, (
        "cut to 50 batches"
    )
    marks = dict(trace.marks)
    assert marks.keys() == {"warm_up_end", "shard_boundary", "epoch"}
    assert marks["warm_up_end"] < min(begin for _, _, begin, _ in trace.spans)
    assert {row["name"] for row in trace.counters} == {"train queues", "val queues"}
    assert {row["args"]["host"] for row in trace.counters} <= {0, 1, 2}
    assert f"trace: logs/{path.name}" in traced.text
    for _, track, begin, end in trace.spans:
        others = [s for s in trace.spans if s[1] == track and s[2] < begin < s[3] < end]
        assert not others, "spans of a track nest, or viewers draw them wrong"


def test_a_trace_is_bounded_and_waits_for_nothing_after_its_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "TRACE_EVENTS", 1000)
    log = train_gpt.RunLog("t", True)
    waits = []
    runtime = SimpleNamespace(
        synchronize=lambda: waits.append(None) or time.perf_counter(), cuda=False, rank=0
    )
    trace = train_gpt.Trace(config_of(TRACE_STEPS=3, RUN_ID="t"), runtime, log)
    pipeline = SimpleNamespace(
        name="train", handed=1, taken=1, ready=SimpleNamespace(qsize=lambda: 0)
    )
    for step in range(6):
        for _ in range(300):
            with trace("forward"):
                pass
        trace.handed(pipeline)
        trace.step_done(step + 1)
    assert len(trace.events) <= 1000 and len(waits) == 1
    trace.steps = 0
    assert trace("forward") is trace.nothing, "off: the shared null context"
    trace.close()
    trace.close()
    assert len(Events.load(Path("logs/t.trace.json.gz")).spans) <= 1000 and len(waits) == 2
    row = max(len(json.dumps(row)) for row in trace.rows())
    assert 150_000 * row < 20e6, "the file stays below 20 MB even before compression"


def test_with_cuda_spans_are_drawn_by_the_devices_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device of this test begins everything 7 ms after the host and takes 30 ms for it."""
    device_ms = [100.0]

    class Event:
        def __init__(self, **_: bool) -> None:
            self.at = float("nan")

        def record(self, stream: object = None) -> None:
            device_ms[0] += 30.0
            self.at = device_ms[0]

        def elapsed_time(self, later: "Event") -> float:
            return later.at - self.at

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda: SimpleNamespace(record_event=lambda event: event.record() or event),
    )
    runtime = SimpleNamespace(synchronize=time.perf_counter, cuda=True, rank=0)
    trace = train_gpt.Trace(config_of(TRACE_STEPS=1), runtime, train_gpt.RunLog("t", True))
    for name, track in (
        ("input_wait", train_gpt.HOST),
        ("h2d", train_gpt.COPY),
        ("forward", train_gpt.DEVICE),
    ):
        with trace(name, track):
            pass
    with trace("disk_read", "train reader"):
        pass
    trace.close()
    events = Events.load(Path("logs/t.trace.json.gz"))
    drawn = {name: (track, begin, end) for name, track, begin, end in events.spans}
    assert drawn["h2d"] == ("copy stream", 30.0, 60.0) and drawn["forward"] == (
        "compute stream",
        90.0,
        120.0,
    )
    assert drawn["input_wait"][0] == "main thread" and drawn["disk_read"][0] == "train reader"
    assert all(
        0 <= drawn[name][1] <= drawn[name][2] < 1000 for name in ("input_wait", "disk_read")
    ), "the host's clock"


def test_a_full_disk_costs_the_trace_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    log = train_gpt.RunLog("t", True)
    trace = train_gpt.Trace(config_of(TRACE_STEPS=1), train_gpt.Runtime(), log)

    def refuse(path: Path, data: bytes) -> None:
        raise train_gpt.RunError(
            f"{path}: cannot write {len(data)} bytes: No space left on device: free the disk"
        )

    monkeypatch.setattr(train_gpt, "write_atomic", refuse)
    trace.close()
    assert "warning: no trace" in log.path.read_text() and "No space left" in log.path.read_text()


def test_a_read_inside_a_forward_pass_is_drawn_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is held at batch 3 and released from within a forward pass, which waits for it: no luck involved."""
    monkeypatch.chdir(tmp_path)
    config = config_of(
        **{
            **SMALL_MODEL,
            **byte_data(tmp_path / "data"),
            "TRACE_STEPS": 9,
            "TRAIN_PREFETCH_QUEUE": 1,
        }
    )
    held, done, real = threading.Event(), threading.Event(), train_gpt.Pipeline._read
    reads = []

    def read(self: train_gpt.Pipeline, *arguments: object) -> None:
        reads.append(None)
        if len(reads) == 4:
            assert held.wait(60)
        real(self, *arguments)
        if len(reads) == 4:
            done.set()

    monkeypatch.setattr(train_gpt.Pipeline, "_read", read)
    trace = train_gpt.Trace(config, train_gpt.Runtime(), train_gpt.RunLog("t", True))
    with contextlib.closing(open_pipeline(config, spans=trace, stall_seconds=60)) as batches:
        for number in range(3):
            next(batches)
            with trace("forward"):
                if number == 2:
                    held.set()
                    assert done.wait(60)
                    time.sleep(0.02)  # the reader closes its span after the read
    trace.close()
    events = Events.load(Path("logs/t.trace.json.gz"))
    (begin, end), fourth = events.named("forward")[2], events.named("disk_read")[3]
    assert fourth[0] < end and begin < fourth[1] < end
    assert len(events.named("disk_read")) >= 4 and {"main thread", "train reader"} <= events.tracks


# --- logs/trace.py ----------------------------------------------------------------------------------------------------


def timeline(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "logs" / "trace.py"), *map(str, arguments)],
        text=True,
        capture_output=True,
        timeout=60,
        env={"PYTHONIOENCODING": "utf-8", "PATH": ""},
    )


def test_five_lines_show_reader_copy_and_compute(traced: Finished) -> None:
    [path] = (traced.folder / "logs").glob("*.trace.json.gz")
    shown = timeline(path, "--width", 50)
    assert shown.returncode == 0 and shown.stderr == ""
    title, reader, copy, compute, waits = shown.stdout.splitlines()
    assert title.startswith(f"{path.name}: 12 steps")
    assert all(len(re.search(r"\|(.*)\|", line)[1]) == 50 for line in (reader, copy, compute))
    assert "none: no CUDA" in copy and "▁" in reader and "█" in compute
    assert "shard_boundary at" in waits and waits.startswith("input_wait ")


def test_the_timeline_draws_times_where_they_are(tmp_path: Path) -> None:
    def span(name: str, tid: int, begin: float, end: float) -> dict:
        return {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": tid,
            "ts": 1e6 * begin,
            "dur": 1e6 * (end - begin),
        }

    tracks = ["train reader", "main thread", "copy stream", "compute stream"]
    rows = [
        span("disk_read", 0, 100, 101),
        span("disk_read", 0, 105, 105.5),
        span("h2d", 2, 102, 103),
        span("forward", 1, 100, 100.1),
        span("forward", 3, 104, 108),
        span("optimizer", 3, 108, 110),
        span("input_wait", 1, 101, 104),
        *(
            {"name": "thread_name", "ph": "M", "tid": i, "args": {"name": n}}
            for i, n in enumerate(tracks)
        ),
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    shown = timeline(tmp_path / "t.json", "--width", 10)
    title, reader, copy, compute, waits = shown.stdout.splitlines()
    assert "1 steps, 10000 ms" in title and "busy 15.00 %, 33 % of it under compute" in reader
    assert (
        re.search(r"\|(.*)\|", reader)[1] == "█▁   ▄    "
        and re.search(r"\|(.*)\|", copy)[1] == "  █▁      "
    )
    assert re.search(r"\|(.*)\|", compute)[1] == "    ██████" and "busy 60.0 %" in compute
    assert "3000.00 ms (30.00 %)" in waits


def test_stretches_without_a_trace_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": 1e6 * begin, "dur": 1e6}
        for name, begin in (("forward", 0), ("optimizer", 1), ("forward", 1000))
    ]
    rows.append({"name": "thread_name", "ph": "M", "tid": 0, "args": {"name": "main thread"}})
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": rows}))
    title, _, _, compute, _ = timeline(tmp_path / "t.json", "--width", 3).stdout.splitlines()
    assert "1 steps, 3000 ms, 1 untraced gaps left out" in title and "|███|" in compute


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x1f\x8b broken", b'{"traceEvents": [{"ph": "X"}]}', b"[1]"]
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    for path in (tmp_path / "x", tmp_path / "missing"):
        said = timeline(path)
        assert said.returncode == 1 and said.stdout == "" and said.stderr.count("\n") == 1, (
            said.stderr
        )
        assert str(path) in said.stderr


# --- The input report -------------------------------------------------------------------------------------------------


def input_event(run: Finished) -> dict:
    [path] = (run.folder / "logs").glob("*.jsonl")
    lines = map(json.loads, path.read_text().splitlines())
    return next(line for line in lines if line["event"] == "input")


def test_the_report_adds_up(traced: Finished) -> None:
    event = input_event(traced)
    host, moved = event["host_wait"], event["bytes"]
    assert event["device_wait"] == host, "on the CPU the host's wait is the input wait"
    assert host["total_ms"] >= host["max_ms"] >= host["p99_ms"] >= host["median_ms"] >= 0
    assert host["percent"] == pytest.approx(100 * host["total_ms"] / event["train_time_ms"])
    assert 1 <= host["worst_step"] <= 40
    step_bytes = 2 * (2048 + 8)
    assert (
        40 * step_bytes <= moved["read"] <= 44 * step_bytes
        and moved["copied"] == 0
        and moved["read_gb_s"] > 0
    )
    assert event["tokens_seen"] == 40 * 2056 and event["epochs"] > 1
    order = [line.split(":")[0].split(" ")[0] for line in traced.text.splitlines()]
    after = order[order.index("timing_train_loop_ms") :]
    assert after[:5] == ["timing_train_loop_ms", "host_wait", "device_wait", "input_bytes", "input"]
    assert after.index("trace") < after.index("Serialized")
    assert event["verdict"] in traced.text


@pytest.mark.parametrize("slow_step", [3, 7])
def test_the_worst_step_and_its_shard_boundary_are_named(slow_step: int) -> None:
    """Ten steps of two micro-steps; batch 2 * 6 = 12 (step 7) was the first of another shard."""
    run, batches = (
        SimpleNamespace(accumulation=2, start=(0, 0.0, 0.0)),
        SimpleNamespace(crossings=[12], handed=20),
    )
    times = [0.5] * 20
    times[2 * slow_step - 1] = 40.0
    found = train_gpt.waits(run, batches, [*times, 99.0], 1000.0)  # the last was not handed out
    assert found["worst_step"] == slow_step and found["max_ms"] == 40.5
    assert found["at_shard_boundary"] == (slow_step == 7)
    assert (
        found["total_ms"] == 49.5
        and found["percent"] == pytest.approx(4.95)
        and found["median_ms"] == 1.0
    )


@pytest.mark.parametrize(
    "case,words",
    [
        ((0.03, 0.1, True, 60, 2000), "overlap settings do not matter here"),
        ((0.03, 7.5, True, 60, 2000), "overlap hides 7.50 %"),
        ((3.0, 0.0, False, 60, 2000), "set TRAIN_PREFETCH=1"),
        (
            (30.0, 5.0, True, 61, 48),
            "reads are the limit: 61 MB/s needed, 48 MB/s delivered: move DATA_PATH",
        ),
        ((3.0, 5.0, True, 61, 2000), "raise TRAIN_PREFETCH_QUEUE"),
        ((3.0, 5.0, True, 61, 2000, "a shard"), "shards were still being made"),
    ],
)
def test_the_verdict_is_one_sentence_to_act_on(case: tuple, words: str) -> None:
    said = train_gpt.verdict(*case)
    assert words in said and "\n" not in said and (f"{case[0]:.2f} %" in said or "limit" in said)


# --- Shard boundaries and slow storage --------------------------------------------------------------------------------


@contextlib.contextmanager
def held_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, queue: int) -> Iterator[tuple]:
    """A pipeline over two shards whose reader reads a batch only when `gate` has been released once for it."""
    settings = {**SMALL_MODEL, **byte_data(tmp_path / "data"), "TRAIN_PREFETCH_QUEUE": queue}
    config = config_of(**settings)
    write_split(tmp_path / "data", "train", np.arange(12 * 2056) % 256, [5 * 2056])
    gate, real = threading.Semaphore(0), train_gpt.Pipeline._fill

    def fill(self: train_gpt.Pipeline, *arguments: object) -> None:
        assert gate.acquire(timeout=60)
        real(self, *arguments)

    monkeypatch.setattr(train_gpt.Pipeline, "_fill", fill)
    with contextlib.closing(open_pipeline(config)) as batches:
        yield batches, gate
        gate.release(100)


def until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_stall_at_a_boundary_is_hidden_by_the_batches_that_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stands still at the first batch of the next shard; what it has read before is handed out meanwhile."""
    with held_reader(monkeypatch, tmp_path, queue=3) as (batches, gate):
        gate.release(6)
        for number in range(6):
            if number >= 3:
                until(
                    lambda: batches.ready.qsize() == 6 - number
                )  # batches 3, 4, 5 are ready, and no other will be
            next(batches)
        waited = batches.host_waits_ms[3:6]
        assert batches.crossings == [5] and max(waited) < 1000, (
            "handed out while the reader stood still"
        )


def test_a_stall_longer_than_the_queue_is_reported_as_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_reader(monkeypatch, tmp_path, queue=1) as (batches, gate):
        gate.release(1)
        next(batches)
        threading.Timer(0.4, gate.release).start()
        next(batches)
        assert batches.host_waits_ms[1] >= 350 and batches.stage.wait_ms >= 350
        assert batches.host_waits_ms[0] < batches.host_waits_ms[1]


def test_the_next_shard_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked for batches beyond the queue, and so for the next shard, before the queue gets there."""
    asked = []
    monkeypatch.setattr(
        train_gpt.os,
        "posix_fadvise",
        lambda fd, offset, length, advice: asked.append(
            (Path(f"/proc/self/fd/{fd}").resolve().name, offset, length)
        ),
        raising=False,
    )
    monkeypatch.setattr(train_gpt.os, "POSIX_FADV_WILLNEED", 3, raising=False)
    with held_reader(monkeypatch, tmp_path, queue=2) as (batches, gate):
        gate.release(2)
        until(lambda: len(asked) == 2)
        assert asked == [
            ("fineweb_train_000000.bin", 1024 + 2 * 2056 * k, 2 * 2056) for k in (3, 4)
        ]
        gate.release(1)
        next(batches)
        until(lambda: len(asked) == 3)
        assert asked[2] == ("fineweb_train_000001.bin", 1024, 2 * 2056)


def test_reads_below_the_need_are_reported_with_both_rates(corpus: Corpus, tmp_path: Path) -> None:
    """A reader held to 20 KB/s by a delay in every read: the verdict states at most that, and more was needed."""
    script = tmp_path / "train_gpt.py"
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    slowed, count = re.subn(
        r"(\t+)(.*file\.readinto\(out\).*\n)", r"\1\2\1time.sleep(n / 20e3)\n", source
    )
    assert count == 1
    script.write_text(slowed)
    run = run_trainer(
        tmp_path,
        script=script,
        **{**SMALL_MODEL, **corpus.env, "ITERATIONS": 15, "VAL_LOSS_EVERY": 0, "VAL_TOKENS": 500},
    )
    assert run.code == 0, run.err[-2000:]
    needed, delivered = map(
        float,
        re.search(
            r"^input: reads are the limit: ([\d.]+) MB/s needed, ([\d.]+) MB/s delivered",
            run.text,
            re.MULTILINE,
        ).groups(),
    )
    assert 0.01 < delivered <= 0.02 < needed
    assert input_event(run)["host_wait"]["percent"] > 5


# --- DATA_VERIFY ------------------------------------------------------------------------------------------------------


def test_the_sum_is_the_same_in_numpy_and_torch_and_sees_any_change() -> None:
    generator = np.random.default_rng(5)
    x, y = generator.integers(0, 65_536, (2, 16, 64))
    expected = int(train_gpt.batch_sum(x, y))
    assert train_gpt.batch_sum(torch.from_numpy(x), torch.from_numpy(y)).item() == expected
    for change in range(50):
        for which in (0, 1):
            other = [x.copy(), y.copy()]
            row, column = generator.integers(0, 16), generator.integers(0, 64)
            other[which][row, column] = (
                other[which][row, column] + 1 + generator.integers(0, 65_535)
            ) % 65_536
            assert train_gpt.batch_sum(*other) != expected
    assert train_gpt.batch_sum(x[::-1], y[::-1]) != expected, "the order of rows counts"
    huge = np.full((1, 2**16), 2**62)
    assert train_gpt.batch_sum(
        torch.from_numpy(huge), torch.from_numpy(huge)
    ).item() == train_gpt.batch_sum(huge, huge)


@pytest.mark.parametrize("ranks", [0, 2])
def test_verified_runs_are_the_same_runs(corpus: Corpus, tmp_path: Path, ranks: int) -> None:
    settings = {
        **SMALL_MODEL,
        **corpus.env,
        "ITERATIONS": 12,
        "VAL_TOKENS": 3000,
        "VAL_LOSS_EVERY": 6,
    }
    verified = run_trainer(tmp_path / "on", ranks=ranks, DATA_VERIFY=1, **settings)
    plain = run_trainer(tmp_path / "off", ranks=ranks, **settings)
    assert verified.code == plain.code == 0, verified.err[-2000:]
    for word in ("train_loss", "val_loss", "val_bpb", "data_crc"):
        assert verified.values(word) == plain.values(word) and plain.values(word)
    [checked] = re.findall(r"^data_verify: (\d+) batches", verified.text, re.MULTILINE)
    assert int(checked) > 12 and "data_verify" not in plain.text


@pytest.mark.parametrize("ranks", [0, 2])
def test_an_overwritten_batch_ends_the_run_and_is_named(
    corpus: Corpus, tmp_path: Path, ranks: int
) -> None:
    """Step 5's batch is overwritten after it was handed out, as a ring without its events would do."""
    script = tmp_path / "train_gpt.py"
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    call = 'with spans("backward"): loss.backward()\n'
    assert source.count(call) == 1
    spoil = "\t\t\tif step == 4 and run.rt.rank == run.rt.world_size - 1: x[1, 2] += 1\n"
    script.write_text(source.replace(call, call + spoil))
    settings = {
        **SMALL_MODEL,
        **corpus.env,
        "ITERATIONS": 12,
        "VAL_TOKENS": 3000,
        "VAL_LOSS_EVERY": 0,
    }
    assert run_trainer(tmp_path, ranks=ranks, script=script, **settings).code == 0, (
        "without DATA_VERIFY nobody knows"
    )
    spoilt = run_trainer(tmp_path, ranks=ranks, script=script, DATA_VERIFY=1, **settings)
    assert spoilt.code != 0
    assert re.search(
        rf"rank {max(0, ranks - 1)}: the train reader, 5, slot \d: the batch was overwritten",
        spoilt.err,
    )
