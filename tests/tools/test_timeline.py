"""tools/timeline.py shows what ran when: it reads torch.profiler's traces, on the CPU and with
CUDA, says what input cost, draws times where they were, and answers any other file with one line.
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

Shown = Callable[..., list[str]]
READER, COPY, COMPUTE, WAIT = "#e69f00", "#7a5195", "#0072b2", "#d00000"  # in the picture


@pytest.fixture
def shown(call: Call) -> Shown:
    """The lines that it prints."""

    def run(*words: object) -> list[str]:
        code, out, err = call(timeline.main, *words)
        assert (code, err) == (0, "")
        return out.splitlines()

    return run


def event(name: str, begin: float, end: float, category: str = "user_annotation", **args) -> dict:
    """As kineto writes it; begin and end in seconds of this test."""
    times = {"ts": 4e12 + 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args}


def kernel(begin: float, end: float, stream: int = 7, name: str = "ampere_bf16_gemm") -> dict:
    return event(name, begin, end, "kernel", stream=stream, device=0)


def copy(begin: float, end: float, size: int, way: str = "HtoD (Pinned -> Device)") -> dict:
    return event(f"Memcpy {way}", begin, end, "gpu_memcpy", bytes=size, stream=20)


def write(path: Path, events: list[dict]) -> Path:
    """A file as export_chrome_trace() leaves it, with what timeline.py has to pass over."""
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
    """A step of 10 s: 1 s of waiting, 9 s of compute, a read of which a quarter lies under it."""
    spans = {f"ProfilerStep#{number}": (0, 10), "input_wait": (0, 1), "disk_read": (0.7, 1.1)}
    spans |= {"forward": (1, 3), "backward": (3, 6), "reduce": (6, 7), "grad_clip": (7, 7.5)}
    spans |= {"optimizer": (7.5, 10)}
    return [event(name, begin + a, begin + b) for name, (a, b) in spans.items()]


@pytest.fixture
def cpu_trace(tmp_path: Path) -> Path:
    events = [row for number in range(1, 7) for row in cpu_step(number, 10 * number)]
    events.append(event("ProfilerStep#7", 70, 70.1))  # after the last step of a run
    return write(tmp_path / "cpu.trace.json.gz", events)


def test_each_lane_of_a_cpu_is_said(cpu_trace: Path, shown: Shown) -> None:
    """Without a lane for copies, which a CPU does not have."""
    assert shown(cpu_trace) == [
        "cpu, steps 1 to 6 on the CPU: 60000 ms",
        "  reader      busy 4.00 %, 25 % of it under compute",
        "  compute     busy 80.00 %",
        "  forward     busy 20.00 %",
        "  backward    busy 30.00 %",
        "  optimizer   busy 30.00 %",
        "  all-reduce  busy 10.00 %",
        "  input wait  10.00 %, 6000.00 ms",
    ]


def test_with_cuda_the_device_counts(tmp_path: Path, shown: Shown) -> None:
    """Kernels of two streams are one lane, late copies are input wait, scalars are not copies. The
    step ends when the device has done what the host gave it."""
    rows = [event("ProfilerStep#1", 0, 10), event("forward", 0, 9), event("input_wait", 0, 1)]
    rows += [event("optimizer", 9, 10)]
    rows += [event("input_wait", 5, 6), event("disk_read", 1, 5), event("disk_read", 10.5, 10.51)]
    rows += [event(name, 3, 12, "gpu_user_annotation") for name in ("ProfilerStep#1", "forward")]
    rows += [copy(0.5, 2, 1024), copy(2, 3, 1023), copy(8, 10, 1 << 20)]
    rows += [copy(7, 8, 1 << 20, "DtoH (Device -> Pageable)")]
    rows += [kernel(3, 6), kernel(4, 7, stream=13), kernel(9, 12)]
    rows += [event("Memset (Device)", 7, 8, "gpu_memset", bytes=4096, stream=7)]
    assert shown(write(tmp_path / "t.trace.json.gz", rows)) == [
        "t, step 1 on the GPU: 12000 ms",
        "  reader      busy 33.42 %, 50 % of it under compute",
        "  copy        busy 29.17 %",
        "  compute     busy 58.33 %",
        "  forward     busy 58.33 %",
        "  input wait  25.00 %, 3000.00 ms",
    ]


def test_a_rank_that_waits_for_others_is_not_computing(tmp_path: Path, shown: Shown) -> None:
    """NCCL's kernel runs until the last rank has come: also where that one waits for its input."""
    rows = [event("ProfilerStep#1", 0, 10), event("input_wait", 0, 0.1), event("optimizer", 9, 10)]
    rows += [kernel(1, 3), kernel(3, 8, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")]
    rows += [kernel(8, 10), event("optimizer", 8, 10, "gpu_user_annotation")]
    assert shown(write(tmp_path / "t.trace.json.gz", rows))[1:] == [
        "  compute     busy 40.00 %",
        "  optimizer   busy 20.00 %",
        "  all-reduce  busy 50.00 %",
        "  input wait  1.00 %, 100.00 ms",
    ]


def drawn(svg: str, colour: str) -> list[tuple[float, float]]:
    """(begin, end) of the bars in that colour, in points."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*style="fill: (#\w+)', svg)
    points = [re.findall(r"[ML] ([\d.]+)", path) for path, fill in paths if fill == colour]
    return [(float(row[0]), float(row[2])) for row in points]


def test_two_traces_are_drawn_on_one_time_axis(
    cpu_trace: Path, tmp_path: Path, shown: Shown
) -> None:
    """Times are where they were; a short read is seen, a wait too short to matter is not."""
    rows = [event("ProfilerStep#1", 0, 15), event("forward", 0.01, 5), event("forward", 5.01, 15)]
    rows += [event("input_wait", 0, 0.01), event("input_wait", 5, 5.01), event("disk_read", 3, 6)]
    rows += [event("disk_read", 8, 8.00001), kernel(16, 16.5), event("optimizer", 14, 15)]
    rows += [copy(1, 2, 1 << 20), copy(11, 12, 1 << 20)]
    fast, path = write(tmp_path / "fast.trace.json.gz", rows), tmp_path / "pair.svg"
    assert len(shown(cpu_trace, fast, "--picture", path)) == 9 + 4
    svg = path.read_text(encoding="utf-8")
    texts = re.findall(r"<!-- (.*) -->", svg)
    assert "cpu, steps 2 to 4 on the CPU" in texts and "fast, step 1 on the GPU" in texts
    assert texts.count("reader") == 2 and texts.count("copy") == 1, "only where there is one"
    reads, waits = drawn(svg, READER), [bar for bar in drawn(svg, WAIT) if bar[1] - bar[0] > 0.2]
    assert len(reads) == 5 and len(waits) == 3 + 2, "the copies that were waited for"
    second = waits[0][1] - waits[0][0]
    assert reads[0][0] - waits[0][0] == pytest.approx(0.7 * second, abs=0.1)
    assert waits[1][0] - waits[0][0] == pytest.approx(10 * second, abs=0.1)
    assert reads[3][1] - reads[3][0] == pytest.approx(3 * second, rel=0.01), "one scale"
    assert reads[3][0] - waits[0][0] == pytest.approx(3 * second, rel=0.01), "one beginning"
    assert f"fill: {READER}; stroke: {READER}; stroke-width: 0.8" in svg, "also of a short read"
    assert f"stroke: {WAIT}" not in svg, "a wait too short to matter is not seen"


STEP, PHASE, OTHER = (event(n, 0, 1) for n in ("ProfilerStep#1", "forward", "aten::mm"))
DAMAGED = [b"", b"[" * 100_000, gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9]]
NO_TRACES = [(content, "damaged or no trace") for content in DAMAGED]
NO_TRACES += [({"traceEvents": [PHASE, 7, None]}, "no steps or no phases")]
NO_TRACES += [({"traceEvents": [STEP, OTHER | {"cat": "cpu_op"}]}, "no phases")]


@pytest.mark.parametrize(("content", "why"), NO_TRACES)
def test_what_is_not_a_trace_is_said_in_one_line(tmp_path: Path, content: object, why: str) -> None:
    path = tmp_path / "x"
    text = content if isinstance(content, bytes) else gzip.compress(json.dumps(content).encode())
    path.write_bytes(text)
    with pytest.raises(cli.ToolError, match=why) as said:
        timeline.main([str(path)])
    assert str(said.value).startswith(f"{path}: ") and "\n" not in str(said.value)
