"""What measures a run changes nothing in it. TRAINING_TIMING_BREAKDOWN times each phase alone, in
the published line, with all overlap off. TRACE_STEPS writes what ran when in exactly so many steps,
with overlap on. Every run ends with what its input has cost: a line, and a sentence that says what
to do. Rates in step lines are of the time since the last line."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, SMALL_MODEL, Recorder, byte_data, config_of, runtime_of, train_gpt
from faults.live import Live

pytestmark = pytest.mark.timeout(300)
BREAKDOWN = re.compile(
    r"timing_breakdown step:(?P<step>\d+) micro_steps:(?P<micro_steps>\d+) "
    r"batch_cpu_ms:(?P<read>\d+\.\d\d) batch_h2d_ms:(?P<upload>\d+\.\d\d) "
    r"forward_ms:(?P<forward>\d+\.\d\d) backward_ms:(?P<backward>\d+\.\d\d) "
    r"grad_clip_ms:(?P<clip>\d+\.\d\d) optimizer_ms:(?P<optimizer>\d+\.\d\d) "
    r"val_ms:(?P<val>\d+\.\d\d) explicit_sync_ms:(?P<sync>\d+\.\d\d) "
    r"\(per_optimizer_step; forward/backward/batch averaged over micro_steps; "
    r"grad_accum_steps=(?P<accumulation>\d+)\)( reduce_ms:(?P<reduce>\d+\.\d\d))?"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings of 16 steps of two micro-steps, validated before, in the middle and at the end."""
    settings = byte_data(tmp_path_factory.mktemp("instruments") / "data", train_tokens=40_000)
    settings |= {"ITERATIONS": 16, "VAL_LOSS_EVERY": 8, "TRAIN_LOG_EVERY": 4, "RUN_ID": "r"}
    return {**SMALL_MODEL, **settings, "GRAD_ACCUM_STEPS": 2}


@pytest.fixture(scope="module")
def plain(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    return Live(tmp_path_factory.mktemp("plain"), **data).finish()


def digits(run: Live) -> list[tuple]:
    words = ("step", "train_loss", "val_loss", "val_bpb", "data_crc")
    said = run.events("validation") + run.events("step") + run.events("score")
    return [tuple(event.get(word) for word in words) for event in said]


# Phases, each timed alone


@pytest.fixture(scope="module")
def breakdown(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    settings = {"TRAINING_TIMING_BREAKDOWN": 1, "TRAINING_TIMING_EVERY": 6, "GRAD_CLIP_NORM": 1e9}
    return Live(tmp_path_factory.mktemp("breakdown"), **data | settings).finish()


def test_the_breakdown_has_the_published_lines(breakdown: Live, plain: Live) -> None:
    lines = [line for line in breakdown.log.splitlines() if line.startswith("timing_breakdown")]
    found = [BREAKDOWN.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [int(line["step"]) for line in found] == [*range(1, 11), 12]
    assert {(line["micro_steps"], line["accumulation"]) for line in found} == {("2", "2")}
    for line in found:
        times = [float(line[name]) for name in ("read", "forward", "backward", "clip", "optimizer")]
        assert min(times) > 0
    validated = [int(line["step"]) for line in found if float(line["val"]) > 0]
    assert validated == [1, 9], "a validation is just before its step"
    before = [event["val_stage_time_ms"] for event in breakdown.events("validation")]
    assert float(found[0]["val"]) == pytest.approx(before[0], rel=0.5)
    assert "timing_breakdown" not in plain.log


def test_phases_are_averaged_over_micro_steps_and_add_up(breakdown: Live) -> None:
    """To the time of the first ten steps, but for what is in no phase; they never overlap."""
    total = 0.0
    for line in BREAKDOWN.finditer(breakdown.log):
        if int(line["step"]) <= 10:
            times = {name: float(value or 0) for name, value in line.groupdict().items()}
            total += 2 * sum(times[name] for name in ("read", "upload", "forward", "backward"))
            total += sum(times[name] for name in ("clip", "optimizer", "reduce"))
    trained = next(event for event in breakdown.events("step") if event["step"] == 10)
    assert 0.4 * trained["train_time_ms"] < total <= trained["train_time_ms"] + 1


def test_the_breakdown_turns_all_overlap_off_and_changes_no_digit(
    breakdown: Live, plain: Live
) -> None:
    for line in ("train_io:", "val_io:overlap:False "):
        off = f"{line}prefetch:False(timing_breakdown) copy_stream:False(timing_breakdown) "
        assert f"\n{off}prefetch_queue:0" in breakdown.log
    assert digits(breakdown) == digits(plain)


def test_a_phase_costs_nothing_unless_it_is_asked_for() -> None:
    config = config_of()
    phases = train_gpt.Phases(config, runtime_of(config), None)
    with phases("forward"):
        pass
    assert not phases.ms
    timed = config_of(TRAINING_TIMING_BREAKDOWN=1)
    phases = train_gpt.Phases(timed, runtime_of(timed), None)
    for _ in range(2):
        with phases("forward"):
            sum(range(1000))
    assert 0 < phases.ms["forward"] < 1000


# What ran when


def trace_of(run: Live) -> list[dict]:
    with gzip.open(run.folder / "logs" / "r.trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def traced_steps(run: Live) -> list[str]:
    names = {event["name"] for event in trace_of(run) if event.get("cat") == "user_annotation"}
    return sorted(name for name in names if name.startswith("ProfilerStep"))


def test_a_trace_is_of_exactly_so_many_steps_and_changes_no_digit(
    data: dict, plain: Live, tmp_path: Path
) -> None:
    run = Live(tmp_path, **data | {"TRACE_STEPS": 3}).finish()
    assert len(traced_steps(run)) == 3
    assert "trace: logs/r.trace.json.gz\n" in run.log
    assert digits(run) == digits(plain)
    names = [event["name"] for event in trace_of(run)]
    assert names.count("forward") >= 3 * 2 and names.count("optimizer") == 3
    threads = {
        name: {event["tid"] for event in trace_of(run) if event["name"] == name}
        for name in ("forward", "disk_read")
    }
    assert threads["forward"].isdisjoint(threads["disk_read"]), "reading is on its own thread"
    script = [sys.executable, str(ROOT / "logs" / "trace.py"), "logs/r.trace.json.gz"]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^reader .*busy [\d.]+ %", shown.stdout, re.MULTILINE)


def test_a_run_that_ends_before_its_last_traced_step_leaves_a_trace(
    data: dict, tmp_path: Path
) -> None:
    settings = {"ITERATIONS": 2, "TRACE_STEPS": 5, "VAL_LOSS_EVERY": 0}
    run = Live(tmp_path, **data | settings).finish()
    assert "trace: logs/r.trace.json.gz\n" in run.log
    assert len(traced_steps(run)) in (2, 3)  # the third has begun


def test_a_trace_that_cannot_be_written_is_a_warning(data: dict, tmp_path: Path) -> None:
    (tmp_path / "logs" / "r.trace.json.gz").mkdir(parents=True)
    run = Live(tmp_path, **data | {"ITERATIONS": 2, "TRACE_STEPS": 1}).finish()
    assert "warning: no trace: " in run.log


# What input has cost

SLOW = {"kind": "slow", "place": "read", "seconds": 1.0}  # one read; the others take no time
REPORT = re.compile(
    r"^input_wait total:(?P<total>\S+)ms share:(?P<share>\S+)% p99:(?P<p99>\S+)ms "
    r"max:(?P<max>\S+)ms slowest:(?P<slowest>\d+) read_bytes:(?P<read_bytes>\d+) .*\n"
    r"input cost (?P<said>\d+\.\d\d) % of training: (?P<advice>.+)$",
    re.MULTILINE,
)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"TRAIN_PREFETCH": 0}, "nothing overlaps: set TRAIN_PREFETCH=1"),
        (
            {"TRAIN_PREFETCH_QUEUE": 1},
            "raise TRAIN_PREFETCH_QUEUE, free the CPU, or move DATA_PATH to a faster disk",
        ),
    ],
)
def test_a_wait_for_input_is_reported_with_its_step_and_a_remedy(
    data: dict, tmp_path: Path, settings: dict, advice: str
) -> None:
    """The second micro-batch of step 7 takes a second to read."""
    settings |= {"TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 0}
    run = Live(tmp_path, 0, SLOW | {"call": 14}, **data | settings).finish()
    report = REPORT.search(run.log)
    assert (report["advice"], report["slowest"]) == (advice, "7")
    worst, total, share = (float(report[name]) for name in ("max", "total", "share"))
    assert 700 < worst <= total and float(report["p99"]) <= worst
    [event] = run.events("input")
    assert share == pytest.approx(100 * total / event["timing_train_loop_ms"], abs=0.1)
    assert float(report["said"]) == pytest.approx(share, abs=0.01)
    steps = {event["step"]: event for event in run.events("step")}
    waits = {step: event["input_wait_percent"] for step, event in steps.items()}
    assert max(waits, key=waits.get) == 7 and waits[7] > 50
    assert steps[7]["tok_s"] < min(steps[6]["tok_s"], steps[8]["tok_s"])


@pytest.mark.parametrize(("slowest", "percent"), [(0.0, 5.0), (40.0, 40.0)])
def test_what_input_cost_is_that_of_the_slowest_rank_since_the_start_or_resume(
    data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowest: float, percent: float
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(**data)
    run = train_gpt.Trainer(config, runtime_of(config), Recorder())
    run.clock.total_ms = 1000.0  # of these, 900 before RESUME
    run.exchange.messages = [message._replace(wait_ms=slowest) for message in run.exchange.messages]
    waits = SimpleNamespace(waits_ms=[5.0, 0.0], bytes_read=0)
    train_gpt.log_input(run, waits, 900.0)
    assert run.log.events[-1]["share_percent"] == percent


def test_input_that_costs_nothing_needs_nothing(plain: Live) -> None:
    """Less than half a percent is nothing."""
    [event], report = plain.events("input"), REPORT.search(plain.log)
    nothing = report["advice"] == "overlap settings do not matter here"
    assert nothing == (event["share_percent"] < 0.5)


def test_what_was_read_is_counted(data: dict, tmp_path: Path) -> None:
    run = Live(tmp_path, **data | {"TRAIN_PREFETCH": 0, "VAL_LOSS_EVERY": 0}).finish()
    steps_tokens = 16 * (2048 + 8)
    assert int(REPORT.search(run.log)["read_bytes"]) == 2 * steps_tokens
    assert f" epochs:{steps_tokens / 40_000:.3f}\n" in run.log


def test_reports_come_behind_the_training_loops_time(plain: Live, data: dict) -> None:
    lines = plain.log.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("timing_train_loop_ms:"))
    words = [re.match(r"\w+", line)[0] for line in lines[first : first + 4]]
    assert words == ["timing_train_loop_ms", "input_wait", "input", "peak"]
    trained, validated = map(int, re.findall(r"_ms:(\d+)ms", lines[first]))
    assert trained == pytest.approx(plain.events("validation")[-1]["train_time_ms"], abs=1)
    total = sum(event["val_stage_time_ms"] for event in plain.events("validation"))
    assert validated == pytest.approx(total, abs=2)


def test_times_and_steps_agree(plain: Live) -> None:
    steps = plain.events("step")
    assert [event["step"] for event in steps] == [*range(1, 11), 12, 16]
    for event in steps:
        assert event["step_avg_ms"] * event["step"] == pytest.approx(event["train_time_ms"], abs=1)
        left_ms = (16 - event["step"]) * event["step_avg_ms"]
        assert event["eta_s"] == pytest.approx(left_ms / 1e3, abs=0.6)
