"""tools/timeline.py shows what ran when: it reads the traces of torch.profiler, of the CPU and of
CUDA, prints how long each lane was busy, draws a timeline, and rejects any other file in one line.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import cli
import pytest
import timeline
from running import Call

Show = Callable[..., list[str]]
READER, COPY, COMPUTE, WAIT = "#e69f00", "#7a5195", "#0072b2", "#d00000"  # colours of the lanes


@pytest.fixture
def show(call: Call) -> Show:
    """Return a function that calls timeline.py and returns the lines that it prints."""

    def run(*words: object) -> list[str]:
        code, out, err = call(timeline.main, *words)
        assert (code, err) == (0, "")
        return out.splitlines()

    return run


def event(name: str, begin: float, end: float, category: str = "user_annotation", **args) -> dict:
    """Return an event as kineto writes it; begin and end are in seconds."""
    times = {"ts": 4e12 + 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args}


def kernel(begin: float, end: float, stream: int = 7, name: str = "ampere_bf16_gemm") -> dict:
    return event(name, begin, end, "kernel", stream=stream, device=0)


def copy(begin: float, end: float, size: int, way: str = "HtoD (Pinned -> Device)") -> dict:
    return event(f"Memcpy {way}", begin, end, "gpu_memcpy", bytes=size, stream=20)


def write(path: Path, events: list[dict]) -> Path:
    """Write a file like export_chrome_trace(), with other events, which timeline.py must ignore."""
    others = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}},
        {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "tid": 1, "ts": 4e12},
        event("aten::mm", 0, 99, "cpu_op"),
        event("Optimizer.step#Adam.step", 0, 99),
        event("PyTorch Profiler (0)", -99, 99, "Trace"),
    ]
    document = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": others + events}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def cpu_step(number: int, begin: float) -> list[dict]:
    """Return a step of 10 s: it waits for 1 s, computes and reduces for 9 s; a quarter of its read
    is during compute."""
    spans = {f"ProfilerStep#{number}": (0, 10), "input_wait": (0, 1), "disk_read": (0.7, 1.1)}
    spans |= {"forward": (1, 3), "backward": (3, 6), "reduce": (6, 7), "grad_clip": (7, 7.5)}
    spans |= {"optimizer": (7.5, 10)}
    return [event(name, begin + a, begin + b) for name, (a, b) in spans.items()]


@pytest.fixture
def cpu_trace(tmp_path: Path) -> Path:
    events = [row for number in range(1, 7) for row in cpu_step(number, 10 * number)]
    # The profiler writes this mark after the last step of a run.
    events.append(event("ProfilerStep#7", 70, 70.1))
    return write(tmp_path / "cpu.trace.json.gz", events)


def test_each_lane_of_a_cpu_is_printed(cpu_trace: Path, show: Show) -> None:
    """There is no lane for copies: a CPU has none."""
    assert show(cpu_trace) == [
        "cpu: steps 1 to 6 on the CPU take 60000 ms",
        "  reader      busy 4 %, 25 % of it during compute",
        "  compute     busy 80 %",
        "  forward     busy 20 %",
        "  backward    busy 30 %",
        "  optimizer   busy 30 %",
        "  all-reduce  busy 10 %",
        "  input wait  10 % of the time, 6000 ms",
    ]


def test_with_cuda_the_device_counts(tmp_path: Path, show: Show) -> None:
    """Kernels of two streams are in one lane. Copies while the device is idle are input wait. The
    upload of a scalar is no copy. The step ends when the device has done the host's work."""
    rows = [event("ProfilerStep#1", 0, 10), event("forward", 0, 9), event("input_wait", 0, 1)]
    rows += [event("optimizer", 9, 10)]
    rows += [event("input_wait", 5, 6), event("disk_read", 1, 5), event("disk_read", 10.5, 10.51)]
    rows += [event(name, 3, 12, "gpu_user_annotation") for name in ("ProfilerStep#1", "forward")]
    rows += [copy(0.5, 2, 1024), copy(2, 3, 1023), copy(8, 10, 1 << 20)]
    rows += [copy(7, 8, 1 << 20, "DtoH (Device -> Pageable)")]
    rows += [kernel(3, 6), kernel(4, 7, stream=13), kernel(9, 12)]
    rows += [event("Memset (Device)", 7, 8, "gpu_memset", bytes=4096, stream=7)]
    assert show(write(tmp_path / "t.trace.json.gz", rows)) == [
        "t: step 1 on the GPU takes 12000 ms",
        "  reader      busy 33 %, 50 % of it during compute",
        "  copy        busy 29 %",
        "  compute     busy 58 %",
        "  forward     busy 58 %",
        "  input wait  25 % of the time, 3000 ms",
    ]


def test_a_rank_that_waits_for_others_is_not_computing(tmp_path: Path, show: Show) -> None:
    """NCCL's kernel runs until the last rank has joined, even if that rank waits for its input."""
    rows = [event("ProfilerStep#1", 0, 10), event("input_wait", 0, 0.1), event("optimizer", 9, 10)]
    rows += [kernel(1, 3), kernel(3, 8, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")]
    rows += [kernel(8, 10), event("optimizer", 8, 10, "gpu_user_annotation")]
    assert show(write(tmp_path / "t.trace.json.gz", rows))[1:] == [
        "  compute     busy 40 %",
        "  optimizer   busy 20 %",
        "  all-reduce  busy 50 %",
        "  input wait  1 % of the time, 100 ms",
    ]


def bars_of_colour(svg: str, colour: str) -> list[tuple[float, float]]:
    """Return (begin, end) of the bars of a colour, in points."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*style="fill: (#\w+)', svg)
    points = [re.findall(r"[ML] ([\d.]+)", path) for path, fill in paths if fill == colour]
    return [(float(row[0]), float(row[2])) for row in points]


def test_two_traces_are_drawn_on_one_time_axis(cpu_trace: Path, tmp_path: Path, show: Show) -> None:
    """Both timelines have one scale. A short read is visible; a wait of microseconds is not."""
    rows = [event("ProfilerStep#1", 0, 15), event("forward", 0.01, 5), event("forward", 5.01, 15)]
    rows += [event("input_wait", 0, 0.01), event("input_wait", 5, 5.01), event("disk_read", 3, 6)]
    rows += [event("disk_read", 8, 8.00001), kernel(16, 16.5), event("optimizer", 14, 15)]
    rows += [copy(1, 2, 1 << 20), copy(11, 12, 1 << 20)]
    fast, path = write(tmp_path / "fast.trace.json.gz", rows), tmp_path / "pair.svg"
    lines = show(cpu_trace, fast, "--picture", path)
    assert len(lines) == 9 + 4 + 1
    # The step of `fast` is 16.5 s, of which it waits for 2.02 s: two copies, two empty moments.
    assert lines[-1] == (
        "fast against cpu: a step takes 16500 ms instead of 10000 ms: +1020 ms of input wait and "
        "+5480 ms of all else (compute, other ranks, a busy machine)"
    )
    svg = path.read_text(encoding="utf-8")
    texts = re.findall(r"<!-- (.*) -->", svg)
    assert lines[-1] in " ".join(texts), "the difference is in the picture, too"
    assert "cpu: 3 steps take 30 s" in texts and "fast: 1 step takes 16 s" in texts
    assert texts.count("reader") == 2 and texts.count("copy") == 1, "a CPU has no copies"
    assert texts.count("compute") == 2 and "forward" not in texts, "the parts would repeat compute"
    reads, waits = (
        bars_of_colour(svg, READER),
        [bar for bar in bars_of_colour(svg, WAIT) if bar[1] - bar[0] > 0.2],
    )
    assert len(reads) == 5 and len(waits) == 3 + 2, "two copies while the device is idle"
    second = waits[0][1] - waits[0][0]
    assert reads[0][0] - waits[0][0] == pytest.approx(0.7 * second, abs=0.1)
    assert waits[1][0] - waits[0][0] == pytest.approx(10 * second, abs=0.1)
    assert reads[3][1] - reads[3][0] == pytest.approx(3 * second, rel=0.01), "one scale"
    assert reads[3][0] - waits[0][0] == pytest.approx(3 * second, rel=0.01), "both begin at 0"
    assert f"fill: {READER}; stroke: {READER}; stroke-width: 0.8" in svg, "a short read is visible"
    assert f"stroke: {WAIT}" not in svg, "a short wait looks short"


def test_an_unpacked_trace_is_read(cpu_trace: Path, tmp_path: Path, show: Show) -> None:
    """Also one that is a bare list of events, which browsers accept, too."""
    document = json.loads(gzip.decompress(cpu_trace.read_bytes()))
    expected = show(cpu_trace)[1:]
    for content in (document, document["traceEvents"]):
        (tmp_path / "plain.json").write_text(json.dumps(content))
        assert show(tmp_path / "plain.json")[1:] == expected


STEP, PHASE, OTHER = (event(n, 0, 1) for n in ("ProfilerStep#1", "forward", "aten::mm"))
DAMAGED = [b"", b"[" * 100_000, gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9]]
NO_TRACES = [(content, "damaged or no trace") for content in DAMAGED]
NO_TRACES += [({"traceEvents": [PHASE, 7, None]}, "no steps or no phases")]
NO_TRACES += [({"traceEvents": [STEP, OTHER | {"cat": "cpu_op"}]}, "no phases")]


@pytest.mark.parametrize(("content", "why"), NO_TRACES)
def test_a_file_that_is_no_trace_is_an_error_of_one_line(
    tmp_path: Path, content: object, why: str
) -> None:
    path = tmp_path / "x"
    text = content if isinstance(content, bytes) else gzip.compress(json.dumps(content).encode())
    path.write_bytes(text)
    with pytest.raises(cli.ToolError, match=why) as error:
        timeline.main([str(path)])
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_titles_come_from_the_command_or_from_the_log_beside_the_trace(
    cpu_trace: Path, tmp_path: Path, show: Show
) -> None:
    log = [{"event": "config", "train_prefetch": False}]
    log.append({"event": "step", "step": 1, "train_loss": 6.0})
    cpu_trace.with_name("cpu.jsonl").write_text("\n".join(map(json.dumps, log)))
    assert show(cpu_trace)[0].startswith("cpu, without overlap (TRAIN_PREFETCH=0): steps 1 to 6 ")
    lines = show(cpu_trace, cpu_trace, "--title", "slow disk", "--title", "fast disk")
    titles = [line for line in lines if not line.startswith("  ")]
    difference = titles.pop()
    assert [title.split(":")[0] for title in titles] == ["slow disk", "fast disk"]
    assert difference.startswith("fast disk against slow disk: a step takes 10000 ms instead of ")
