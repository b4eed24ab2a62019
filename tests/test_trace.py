"""logs/trace.py shows what ran when: it reads torch.profiler's traces, on the CPU and with CUDA,
draws lanes as text and as a picture in which times are where they were, says what input cost, and
answers any other file with one line."""

import gzip
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, run_trainer

SCRIPT = ROOT / "logs" / "trace.py"
READER, WAIT, FORWARD, OPTIMIZER = "#e69f00", "#d00000", "#8ecae6", "#009e73"  # in the picture


def trace_py(*arguments: object, prelude="pass", encoding="utf-8") -> subprocess.CompletedProcess:
    """The script as a user runs it; `prelude` runs before it, in the same interpreter."""
    room = f"sys.path[0] = {str(SCRIPT.parent)!r}"
    start = f"import runpy, sys; {room}; {prelude}; sys.argv = sys.argv[1:]"
    start += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", start, *map(str, (SCRIPT, *arguments))]
    alone = {"PYTHONIOENCODING": encoding, "PATH": "", "HOME": "/nonexistent"}
    return subprocess.run(command, env=alone, encoding="utf-8", capture_output=True, timeout=60)


def shown(*arguments: object, **options: str) -> list[str]:
    """The lines that it prints."""
    done = trace_py(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def bars(lines: list[str]) -> list[str]:
    return [line.split("|")[1] for line in lines[2:]]


def event(name: str, begin: float, end: float, category: str = "user_annotation", **args) -> dict:
    """As kineto writes it; begin and end in seconds of this test."""
    times = {"ts": 4e12 + 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args}


def kernel(begin: float, end: float, stream: int = 7) -> dict:
    return event("ampere_bf16_gemm", begin, end, "kernel", stream=stream, device=0)


def copy(begin: float, end: float, size: int, way: str = "HtoD (Pinned -> Device)") -> dict:
    return event(f"Memcpy {way}", begin, end, "gpu_memcpy", bytes=size, stream=20)


def write(path: Path, events: list[dict]) -> Path:
    """A file as export_chrome_trace() leaves it, with what trace.py has to pass over."""
    others = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}},
        {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "tid": 1, "ts": 4e12},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e12},
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
    """Six steps; in the fifth the read comes 2 s later, and lies under compute as a whole."""
    events = [row for number in range(1, 7) for row in cpu_step(number, 10 * number)]
    late = [row for row in events if row["name"] == "disk_read"][4]
    late["ts"] += 2e6
    return write(tmp_path / "cpu.trace.json.gz", events)


def test_lanes_of_a_cpu_show_times_where_they_are(cpu_trace: Path) -> None:
    title, marks, *lanes = lines = shown(cpu_trace, "--steps", "4:5", "--width", 20)
    assert title == "cpu.trace.json.gz: steps 4 to 5, 20000 ms; a column is 1000.00 ms"
    assert marks == f"{'':12}↓4{'':8}↓5"
    assert bars(lines) == [
        "▂▁          ▂▁      ",
        20 * " ",
        " █████████ █████████",
        "█         █         ",
    ]
    assert [re.sub(r".*\| ", "", lane) for lane in lanes] == [
        "busy 4.00 %, 62 % of it under compute",
        "none: no CUDA",
        "busy 90.00 %",
        "10.00 %, 2000.00 ms",
    ]
    assert "steps 1 to 6, 60000 ms" in shown(cpu_trace)[0], "all steps, where none are chosen"
    assert shown(cpu_trace, "--width", 10)[1] == f"{'':12}↓↓ ↓ ↓↓ ↓6", "numbers where there is room"
    plain = shown(cpu_trace, "--steps", "4:5", "--width", 20, encoding="ascii")
    assert bars(plain)[0] == ":.          :.      " and plain[1].split() == ["v4", "v5"]


def test_with_cuda_the_device_counts(tmp_path: Path) -> None:
    """Kernels of two streams are one lane, late copies are input wait, scalars are no copies."""
    rows = [event("ProfilerStep#1", 0, 10), event("forward", 0, 9), event("input_wait", 0, 1)]
    rows += [event("input_wait", 5, 6), event("disk_read", 1, 5), event("disk_read", 10.5, 10.51)]
    rows += [event(name, 3, 12, "gpu_user_annotation") for name in ("ProfilerStep#1", "forward")]
    rows += [copy(0.5, 2, 1024), copy(2, 3, 1023), copy(8, 10, 1 << 20)]
    rows += [copy(7, 8, 1 << 20, "DtoH (Device -> Pageable)")]
    rows += [kernel(3, 6), kernel(4, 7, stream=13), kernel(9, 12)]
    rows += [event("Memset (Device)", 7, 8, "gpu_memset", bytes=4096, stream=7)]
    lines = shown(write(tmp_path / "t.gz", rows), "--width", 12)
    title, marks, reader, copies, compute, wait = lines
    assert "step 1, 12000 ms" in title, "until the device has done what the host gave it"
    assert marks == f"{'':12}↓1"
    assert bars(lines) == [" ████     ▁ ", "▄█      ██  ", "   ████  ███", "██      █   "]
    assert reader.endswith("busy 33.42 %, 50 % of it under compute")
    assert copies.endswith("busy 29.17 %") and compute.endswith("busy 58.33 %")
    assert wait.endswith("25.00 %, 3000.00 ms")


@pytest.mark.slow
def test_the_trainers_trace_is_read(tmp_path: Path) -> None:
    settings = {**SMALL_MODEL, **byte_data(tmp_path / "data"), "ITERATIONS": 6, "TRACE_STEPS": 3}
    run = run_trainer(tmp_path, **settings, VAL_LOSS_EVERY=0, VAL_TOKENS=3000)
    assert run.code == 0, run.err[-2000:]
    [path] = (tmp_path / "logs").glob("*.trace.json.gz")
    _, marks, reader, _, compute, wait = shown(path)
    assert marks.count("↓") == 3 and "under compute" in reader and "0.00 ms" not in wait
    shares = [re.search(r"([\d.]+) %", lane)[1] for lane in (reader, compute, wait)]
    read, computed, waited = map(float, shares)
    assert 0 < read < computed < 100.02 - waited  # of rounded shares


def drawn(svg: str, colour: str) -> list[tuple[float, float]]:
    """(begin, end) of the bars in that colour, in pixels of a page 768 pixels wide."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*style="fill: (#\w+)"', svg)
    points = [re.findall(r"[ML] ([\d.]+)", path) for path, fill in paths if fill == colour]
    return [tuple(768 / 576 * float(x) for x in (row[0], row[2])) for row in points]


def test_the_picture_says_and_shows_it(cpu_trace: Path) -> None:
    picture = cpu_trace.with_name("picture.svg")
    shown(cpu_trace, "--picture", picture)
    svg = picture.read_text(encoding="utf-8")
    texts = re.findall(r"<!-- (.*) -->", svg)
    said = "reader busy 4.00 %, 25 % of it under compute; input wait 10.00 %, 3000.00 ms"
    legend = ["forward", "backward", "reduce, clip", "optimizer"]
    assert said in texts and "What ran when, steps 2 to 4 on the CPU" in texts
    assert {"reader", "copy", "compute", "input wait", "milliseconds", "step"} < set(texts)
    assert texts[-4:] == legend and "none: no CUDA" in texts
    reads, waits, optimizers = (drawn(svg, colour) for colour in (READER, WAIT, OPTIMIZER))
    assert len(reads) == len(waits) == len(optimizers) == 3
    second = waits[1][1] - waits[1][0]
    for (forward, _), (wait, end), read in zip(drawn(svg, FORWARD), waits, reads, strict=True):
        assert end == pytest.approx(forward, abs=0.1) == wait + second
        assert read[0] - wait == pytest.approx(0.7 * second, abs=0.1)
    lines = re.findall(r'd="M (\S+) \S+ \nL \1 \S+ \n"[^>]*stroke: #606060', svg)
    labels = re.findall(r"<!-- ([1-9]) -->\s*<g transform=.translate.(\S+)", svg)
    assert labels == list(zip("234", lines, strict=True))
    assert [float(x) * 768 / 576 for x in lines] == pytest.approx([w for w, _ in waits], abs=0.1)
    assert optimizers[0][1] - waits[0][0] == pytest.approx(10 * second, abs=0.1)
    chosen = shown(cpu_trace, "--picture", picture.with_suffix(".png"), "--steps", 5)
    assert "step 5, 10000 ms" in chosen[0] and chosen[1].split() == ["↓5"]
    assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_two_traces_are_drawn_on_one_time_axis(cpu_trace: Path, tmp_path: Path) -> None:
    """Each with its title; a wait too short to matter is no bar."""
    rows = [event("ProfilerStep#1", 0, 15), event("forward", 0.01, 5), event("forward", 5.01, 15)]
    rows += [event("input_wait", 0, 0.01), event("input_wait", 5, 5.01), event("disk_read", 3, 6)]
    rows += [event("disk_read", 8, 9)]
    fast, picture = write(tmp_path / "fast.trace.json.gz", rows), tmp_path / "pair.svg"
    options = ("--picture", picture, "--steps", "1:2", "--title", "Overlap off")
    lines = shown(cpu_trace, fast, *options)
    assert lines[0].startswith("cpu.trace.json.gz") and lines[7].startswith("fast.trace.json.gz")
    svg = picture.read_text(encoding="utf-8")
    texts = re.findall(r"<!-- (.*) -->", svg)
    assert texts.index("Overlap off") < texts.index("fast, step 1 on the CPU")
    assert texts.count("milliseconds") == 1 and texts.count("optimizer") == 1
    reads, waits = drawn(svg, READER), drawn(svg, WAIT)
    assert len(reads) == 4 and len(waits) == 2, "0.01 of 20 s is no bar"
    second = waits[0][1] - waits[0][0]
    assert reads[2][1] - reads[2][0] == pytest.approx(3 * second, rel=0.01), "one scale"
    assert reads[2][0] - waits[0][0] == pytest.approx(3 * second, rel=0.01), "one beginning"


def test_a_short_read_is_seen_and_many_kernels_are_a_small_file(tmp_path: Path) -> None:
    rows = [event("ProfilerStep#1", 0, 60), event("forward", 0, 60), event("input_wait", 0, 1)]
    rows += [event("disk_read", 30, 30.00001), event("disk_read", 59.99999, 60)]
    rows += [kernel(i / 1e3, i / 1e3 + 5e-4) for i in range(60_000) if i % 300 < 50]
    trace, picture = write(tmp_path / "t.gz", rows), tmp_path / "p.svg"
    shown(trace, "--picture", picture)
    once = picture.read_bytes()
    first, last = drawn(once.decode(), READER)
    assert min(first[1] - first[0], last[1] - last[0]) > 2 and len(once) < 150_000
    shown(trace, "--picture", picture)
    assert picture.read_bytes() == once and b"dc:date" not in once, "one trace, one file"


STEP, PHASE = event("ProfilerStep#1", 0, 1), event("forward", 0, 1)
NO_TIMES = [{"ts": value} for value in ("1", None, math.nan, math.inf, 10**400)] + [{"dur": -1}]
DAMAGED = [b"", b"step:1/20 train_loss:6.9", b"[" * 100_000, b'{"a": 1}']
DAMAGED += [gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9]]
DAMAGED += [{"traceEvents": [STEP, PHASE | times]} for times in NO_TIMES]
NO_TRACES = [(content, "damaged or no trace") for content in DAMAGED] + [
    (None, "No such file or directory"),
    ({"traceEvents": [PHASE, 7, None]}, "no ProfilerStep marks"),
    ({"traceEvents": [STEP, event("aten::mm", 0, 1, "cpu_op")]}, "no phases"),
]


@pytest.mark.parametrize(("content", "why"), NO_TRACES)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: object, why: str) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    done = trace_py(path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {path}: ") and why in done.stderr


def test_a_wish_that_cannot_be_met_is_said_in_one_line(cpu_trace: Path, tmp_path: Path) -> None:
    picture, nowhere = tmp_path / "p.svg", tmp_path / "no folder" / "p.svg"
    no_matplotlib = "sys.modules['matplotlib'] = None"
    for arguments, prelude, why in (
        (("--steps", "7:9"), "pass", "the trace has steps 1 to 6, and none of these"),
        (("--picture", picture), no_matplotlib, f"{sys.executable} -m pip install matplotlib"),
        (("--picture", nowhere), "pass", f"cannot be written to {nowhere.parent}/: No such file"),
    ):
        done = trace_py(cpu_trace, *arguments, prelude=prelude)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert why in done.stderr
    wrong = "--steps 2-4", "--width -5", "--title x", "--picture p.pdf"
    for arguments in (*((cpu_trace, *words.split()) for words in wrong), ()):
        done = trace_py(*arguments)
        assert done.returncode == 2 and re.fullmatch(r"error: .*\n", done.stderr)


def test_too_much_to_unpack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("trace_script", SCRIPT)
    script = sys.modules["trace_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = write(tmp_path / "t.gz", [STEP, PHASE, event("aten::mm", 0, 1, "cpu_op", a=" " * 4000)])
    assert script.MAX_BYTES <= 1e9 and script.read_trace(path).name == "step 1"
    monkeypatch.setattr(script, "MAX_BYTES", 4000)
    with pytest.raises(script.ToolError, match="over 4,000 bytes when unpacked"):
        script.read_trace(path)
