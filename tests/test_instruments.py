"""Tests of TRAINING_TIMING_BREAKDOWN, TRACE_STEPS and the input report.

They report the right figures, and they do not change the results of a run.
"""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.live import Live
from running import ROOT, make_config, make_log, make_runtime, open_data, train_gpt

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
def data(data: dict) -> dict[str, object]:
    """Return settings of 16 steps of two micro-steps, with a validation every 8 steps."""
    more = {"ITERATIONS": 16, "VAL_LOSS_EVERY": 8, "TRAIN_LOG_EVERY": 4, "GRAD_ACCUM_STEPS": 2}
    return data | more | {"CHECKPOINT_EVERY": 0, "VAL_BATCH_SIZE": 4096}


@pytest.fixture(scope="module")
def plain(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    return Live(tmp_path_factory.mktemp("plain"), **data).finish()


@pytest.fixture(scope="module")
def breakdown(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    settings = {"TRAINING_TIMING_BREAKDOWN": 1, "TRAINING_TIMING_EVERY": 6, "GRAD_CLIP_NORM": 1e9}
    settings["WARMUP_STEPS"] = 20
    return Live(tmp_path_factory.mktemp("breakdown"), **data | settings).finish()


def test_the_breakdown_has_the_published_lines(breakdown: Live, plain: Live) -> None:
    lines = [line for line in breakdown.text.splitlines() if line.startswith("timing_breakdown")]
    found = [BREAKDOWN.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [int(line["step"]) for line in found] == [*range(1, 11), 12]
    assert {(line["micro_steps"], line["accumulation"]) for line in found} == {("2", "2")}
    for line in found:
        times = [float(line[name]) for name in ("read", "forward", "backward", "clip", "optimizer")]
        assert min(times) > 0
    validated = [int(line["step"]) for line in found if float(line["val"]) > 0]
    assert validated == [1, 9], "val_ms is the validation just before the step"
    before = [event["val_stage_time_ms"] for event in breakdown.events("validation")]
    shares = [float(found[i]["val"]) / ms for i, ms in zip((0, 8), before, strict=False)]
    assert max(shares) < 1.01, "val_ms is a part of val_stage_time_ms"
    assert max(shares) > 0.5, "val_ms is most of it, at least once on a busy machine"
    assert "timing_breakdown" not in plain.text


def test_phases_are_averaged_over_micro_steps_and_add_up(breakdown: Live) -> None:
    """Their sum is at most the time of the first ten steps, so phases do not overlap.

    The sum is not much less either, and the warm-up steps are not included.
    """
    total = 0.0
    for line in BREAKDOWN.finditer(breakdown.text):
        if int(line["step"]) <= 10:
            times = {name: float(value or 0) for name, value in line.groupdict().items()}
            total += 2 * sum(times[name] for name in ("read", "upload", "forward", "backward"))
            total += sum(times[name] for name in ("clip", "optimizer", "reduce"))
    trained = next(event for event in breakdown.events("step") if event["step"] == 10)
    assert 0.4 * trained["train_time_ms"] < total <= trained["train_time_ms"] + 1


def test_the_breakdown_turns_overlap_off_and_changes_no_digit(breakdown: Live, plain: Live) -> None:
    off = "prefetch:False copy_stream:False prefetch_queue:0 gpu_prefetch:0"
    assert f"\ntrain_io:{off}\nval_io:overlap:False {off} " in breakdown.text
    assert breakdown.measurements() == plain.measurements()


def read_trace(run: Live) -> list[dict]:
    """Return the events of the trace that a run wrote."""
    with gzip.open(run.folder / "logs" / "r.trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def test_a_trace_has_the_steps_and_changes_no_digit(
    data: dict, plain: Live, tmp_path: Path
) -> None:
    run = Live(tmp_path, **data | {"TRACE_STEPS": 3}).finish()
    marks = {e["name"] for e in read_trace(run) if e.get("cat") == "user_annotation"}
    assert sum(name.startswith("ProfilerStep") for name in marks) == 3
    assert "trace: logs/r.trace.json.gz\n" in run.text
    assert run.measurements() == plain.measurements()
    names = [event["name"] for event in read_trace(run)]
    assert names.count("forward") >= 3 * 2 and names.count("optimizer") == 3
    threads = [
        {e["tid"] for e in read_trace(run) if e["name"] == n} for n in ("forward", "disk_read")
    ]
    assert threads[0].isdisjoint(threads[1]), "reading is on its own thread"
    script = [sys.executable, str(ROOT / "tools" / "timeline.py"), "logs/r.trace.json.gz"]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    title, reader, compute, *_ = shown.stdout.splitlines()
    assert "steps 1 to 3" in title and "during compute" in reader
    read, computed = (float(re.search(r"busy ([\d.]+) %", lane)[1]) for lane in (reader, compute))
    assert read > 0 and 0 < computed < 100.01


@pytest.mark.parametrize("settings", [{"TRAIN_PREFETCH": 0}, {"TRAIN_PREFETCH_QUEUE": 1}])
def test_a_wait_for_input_is_reported(data: dict, tmp_path: Path, settings: dict) -> None:
    """The second micro-batch of step 7 takes a second to read."""
    settings |= {"TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 0}
    line = "        tokens = slot.host.numpy()[:length]\n"
    slow = "        time.sleep(rows.start == 13 * 32 and self.plan.first_row == 0)\n"
    run = Live(tmp_path, 0, {line: slow + line}, **data | settings).finish()
    words = r"(?m)^input_wait total:(\S+)ms share:(\S+)% read_bytes:\d+ "
    total, share = map(float, re.search(words, run.text).groups())
    assert total > 700
    [event] = run.events("input")
    assert share == pytest.approx(100 * total / event["timing_train_loop_ms"], abs=0.1)
    steps = {event["step"]: event for event in run.events("step")}
    waits = {step: event["input_wait_percent"] for step, event in steps.items()}
    assert max(waits, key=waits.get) == 7 and waits[7] > 50
    assert steps[7]["tok_s"] < min(steps[6]["tok_s"], steps[8]["tok_s"])


@pytest.mark.parametrize(("slowest", "percent"), [(0.0, 5.0), (40.0, 40.0)])
def test_input_cost_is_that_of_the_slowest_rank_since_the_start_or_resume(
    data: dict, slowest: float, percent: float
) -> None:
    config = make_config(**data)
    run = train_gpt.Trainer(config, make_runtime(config), make_log(), open_data(config))
    run.clock.total_ms = 1000.0  # 900 of them before RESUME
    run.runtime.gather = lambda value: [value, slowest]
    waits = SimpleNamespace(total_wait_ms=5.0, bytes_read=0)
    train_gpt.log_end(run, waits, 900.0)
    assert run.log.events[-1]["share_percent"] == percent


def test_times_and_steps_agree(plain: Live) -> None:
    steps = plain.events("step")
    assert [event["step"] for event in steps] == [*range(1, 11), 12, 16]
    for event in steps:
        assert event["step_avg_ms"] * event["step"] == pytest.approx(event["train_time_ms"], abs=1)
        left_ms = (16 - event["step"]) * event["step_avg_ms"]
        assert event["eta_s"] == pytest.approx(left_ms / 1e3, abs=0.6)
