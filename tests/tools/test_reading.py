"""tools/lines.py and runs.py on the logs that people have: the events of our own runs, each family
of text logs, and files that are no logs."""

import json
import os
from pathlib import Path

import lines
import pytest
import runs
from configuration import conditions
from made_logs import RULE, SMI, bpb_of, event_lines, log_text, read_text
from results import evaluation_ms, evaluations, headline, score
from runs import Logs, Run, Sizes

SOURCE = '''"""A trainer. Its log looks like this:
step:7/100 train_loss:1.0000 train_time:7ms step_avg:1.00ms
final_int8_zlib_roundtrip_exact val_loss:0.10000000 val_bpb:0.20000000
"""
import os
from pathlib import Path

# seed:99
def main():
    log0(f"step:{step}/{iterations} val_loss:{loss:.4f} val_bpb:{bpb:.4f}")
    log0(f"Total submission size: {size} bytes")
    raise ValueError("never")

main()
'''
BASELINE = log_text(seed=1337)  # its last step is 13,790
HEADER = log_text(script=SOURCE, smi=SMI).split("train_loader:")[0]
MODERN = """Hyperparameters:
  adam_eps: 1e-08
  datasets_dir: ./data/datasets/fineweb10B_sp8192
  seed: 42
  ttt_enabled: True
  world_size: 8
train_shards: 80
val_tokens: 40540160
model_params:35901112
0/20000 val_loss: 9.0101 val_bpb: 3.4881
1/20000 train_loss: 9.0115 train_time: 0.0m tok/s: 8190220
500/20000 train_loss: 3.3800 train_time: 0.8m tok/s: 7764000
1200/20000 val_loss: 2.8800 val_bpb: 1.1150
stopping_early: wallclock_cap train_time: 122071ms step: 1200/20000
diagnostic pre-quantization post-ema val_loss:2.87100000 val_bpb:1.11146400 eval_time:6480ms
Serialized model: 135100244 bytes
Code size (uncompressed): 120450 bytes
Code size (compressed): 27310 bytes
Serialized model quantized+brotli: 15880402 bytes
Total submission size quantized+brotli: 15907712 bytes
diagnostic quantized val_loss:2.90000000 val_bpb:1.12269120 eval_time:9710ms
ttp: b90/700 bl:2.4011 bb:1.1404 rl:2.3300 rb:1.0600 dl:190-192 gd:1
quantized_ttt_phased val_loss:2.85500000 val_bpb:1.10527000 eval_time:372450ms
total_eval_time:372.5s
"""


def only(log: Logs) -> Run:
    assert len(log.runs) == 1 and log.problems == [], (log.problems, log.runs)
    return log.runs[0]


@pytest.mark.parametrize("pattern", lines.PATTERNS, ids=lambda pattern: pattern.example[:30])
def test_each_pattern_reads_its_example(pattern: lines.Pattern) -> None:
    assert tuple(lines.events(pattern.example)) == pattern.events


def test_a_baseline_log(tmp_path: Path) -> None:
    run = only(read_text(tmp_path, HEADER + BASELINE))
    assert (run.seed, run.status, run.last_step, run.error) == (1337, "finished", 13_790, None)
    assert run.versions == {"python": "3.12.3", "torch": "2.9.1+cu128"}
    assert run.hardware == {"device": "NVIDIA H100 80GB HBM3", "gpus": 8} and run.world_size == 8
    assert (run.dataset, run.train_shards, run.val_tokens) == ("fineweb10B_sp1024", 80, 62021632)
    assert (
        [s.step for s in run.steps]
        == [1, 10, 1000, 10_000, 13_790]
        == [validation.step for validation in run.validations]
    )
    assert run.steps[1].train_loss == 2.8 and run.validations[-1].val_loss == 1.89
    assert (run.train_time_ms, run.step_ms) == (599_865, 43.5)
    assert run.sizes == Sizes(0, None, 15_700_000, 15_700_000)
    exact = (1.9, round(bpb_of(1.9), 8), 2100, 8)
    assert headline(run) == lines.Result("roundtrip", "final_int8_zlib_roundtrip", *exact)
    assert score(run, "roundtrip") == headline(run) and score(run, "ttt") is None
    assert run.config["matrix_lr"] == 0.04 and run.config["tie_embeddings"] is True


@pytest.mark.parametrize(
    "beginning",
    [
        '"A trainer."\nVERSION = 1\n',
        "# A trainer.\nVERSION = 1\n",
    ],
)
@pytest.mark.parametrize("front", ["", f"Source code:\n{RULE}\n"])
def test_the_script_is_found_whole(tmp_path: Path, front: str, beginning: str) -> None:
    source = beginning + SOURCE
    run = only(read_text(tmp_path, front + HEADER.replace(SOURCE, source) + BASELINE))
    assert run.source == source.encode()
    assert (run.source_bytes, len(run.source_sha256)) == (len(source.encode()), 64)
    assert (run.seed, len(run.steps), len(evaluations(run))) == (1337, 5, 1)


def test_a_log_with_settings_in_a_block_and_times_in_minutes(tmp_path: Path) -> None:
    run = only(read_text(tmp_path, MODERN))
    data = (run.seed, run.world_size, run.train_shards, run.val_tokens, run.model_params)
    assert data == (42, 8, 80, 40540160, 35901112)
    assert conditions(run)["datasets_dir"] == "fineweb10B_sp8192"
    assert run.config["adam_eps"] == 1e-8 and run.config["ttt_enabled"] is True
    assert [(s.step, s.train_loss) for s in run.steps] == [(1, 9.0115), (500, 3.38)]
    assert run.steps[1].train_time_ms is None, "0.8m is 6 seconds coarse"
    assert (run.last_step, run.train_time_ms) == (1200, 122071)
    assert [(v.step, v.val_bpb) for v in run.validations] == [(0, 3.4881), (1200, 1.115)]
    results = [(result.kind, result.val_bpb) for result in evaluations(run)]
    assert results == [("pre_quant", 1.111464), ("diagnostic", 1.1226912), ("ttt", 1.10527)]
    assert headline(run).kind == "ttt" and evaluation_ms(run) == run.eval_total_ms == 372500
    assert (run.source_bytes, run.source_sha256) == (None, None)
    assert (run.sizes.code, run.sizes.packed_code, run.sizes.total) == (120450, 27310, 15907712)


SECOND = BASELINE.replace("seed:1337", "seed:42")
LINES = "".join(f"step:{n}/9 train_loss:2.0{n} train_time:{n}00ms\n" for n in (1, 2, 3))
LATER = "seed:1337\nquantized_ttt val_loss:2.3 val_bpb:1.1 eval_time:9ms\n"
AT_1000, AT_LAST = BASELINE.index("step:10000/"), BASELINE.index("step:13790/")
BACK = BASELINE[:AT_LAST] + BASELINE[AT_1000:].replace("step:10000/", "step:900/")
SCORE = round(bpb_of(1.9), 8)
# What a file holds; the seed of its last run, its steps, its result. A script begins a run; so do
# steps that start again. A run to which steps go back was resumed.
FILES = {
    "three": (HEADER + BASELINE + BASELINE + HEADER + SECOND, f"42 1,10,1000,10000,13790 {SCORE}"),
    "steps": (LINES + LINES.replace("2.0", "3.0"), "None 1,2,3 None"),
    "evaluated": (HEADER + BASELINE + HEADER + LATER, "1337 1,10,1000,10000,13790 1.1"),
    "back": (BACK, f"1337 1,10,900,13790 {SCORE} resumed at 900"),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_last_run_of_a_file_is_read(tmp_path: Path, kind: str) -> None:
    """And said, if there are several."""
    text, expected = FILES[kind]
    log = read_text(tmp_path, text)
    [run] = log.runs
    result, steps = headline(run), ",".join(str(step.step) for step in run.steps)
    resumed = "".join(f" resumed at {step}" for step in run.resumed_at)
    assert f"{run.seed} {steps} {result and result.val_bpb}{resumed}" == expected
    several = [f"it has {run.number} runs: the last one is read"] if run.number > 1 else []
    assert log.problems == several and run.number == {"three": 3, "steps": 2}.get(kind, 1)


OWN = """logs/r.txt
train_loader:dataset:mine train_shards:3
val_loader:shards pattern=x tokens:1984 partial_val:1
model_params:1000
world_size:1 grad_accum_steps:8
seed:7
step:1/4 train_loss:9.0 train_time:10ms step_avg:10.00ms
final_int8_zlib_roundtrip_exact val_loss:2.00000000 val_bpb:1.20000000
"""


def test_our_runs_are_read_from_their_events(tmp_path: Path) -> None:
    """Exactly. The text adds what events do not say; one of another run is named."""
    (tmp_path / "r.jsonl").write_text(event_lines(seed=7))
    run = only(read_text(tmp_path, HEADER + OWN, "r.txt"))
    result = headline(run)
    assert (result.val_loss, result.val_bpb, result.digits) == (2.00000000001, 1.2, None)
    assert [(s.step, s.train_loss, s.train_time_ms) for s in run.steps] == [
        (1, 5.5, 40),
        (4, 4.5, 160),
    ]
    assert [(v.step, v.val_bpb) for v in run.validations] == [(0, 3.0), (4, 1.3)]
    assert (run.status, run.error, run.seed, run.world_size) == ("finished", None, 7, 1)
    assert run.sizes == Sizes(900, None, 3000, 3900)
    other = read_text(tmp_path, HEADER + OWN.replace("bpb:1.20", "bpb:1.30"), "r.txt")
    assert "r.jsonl is not of the same run as the text: its score 1.2" in other.problems[0]
    assert (run.train_time_ms, run.val_total_ms, run.input_wait_ms) == (160, 70, 4)
    assert run.made_of["fineweb_val_000000.bin"] == "5000 tokens, 0000beef"
    assert run.config["matrix_lr"] == 0.04 and run.config["train_prefetch"] is True
    said = (run.source, run.dataset, run.train_shards, run.model_params, run.grad_accum_steps)
    assert said == (SOURCE.encode(), "mine", 3, 1000, 8)
    (tmp_path / "r.txt").unlink()
    assert runs.read_logs([tmp_path]).runs[0].steps == run.steps, "without its text"


def test_a_run_that_was_resumed_is_one_run(tmp_path: Path) -> None:
    """Both starts append to the same two files. What came after the checkpoint is dropped."""
    first = event_lines(seed=7, status="interrupted", score=None)
    again = [{"event": "run"}, {"event": "config", "seed": 7, "matrix_lr": 0.02}]
    again += [{"event": "checkpoint", "step": 2, "resumed_from": "x.pt"}]
    again += [{"event": "step", "step": 3, "train_loss": 4.0, "train_time_ms": 120}]
    text = first + "".join(json.dumps(event) + "\n" for event in again)
    (tmp_path / "r.jsonl").write_text(text)
    run = only(read_text(tmp_path, OWN + OWN, "r.txt"))
    assert [step.step for step in run.steps] == [1, 3] and [v.step for v in run.validations] == [0]
    assert (run.status, run.resumed_at) == ("unfinished", [3])
    assert run.config["matrix_lr"] == 0.02 and headline(run) is None
    end = json.dumps({"event": "end", "status": "failed", "error": "step 4"})
    (tmp_path / "r.jsonl").write_text(f"{text}{end}\n{{cut")
    log = read_text(tmp_path, OWN + OWN, "r.txt")
    assert (log.runs[0].status, log.runs[0].error) == ("failed", "step 4")
    assert log.problems == ["r.jsonl: 1 damaged line left out"]


def test_events_of_another_form_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(event_lines(seed=7).replace("5.5", '"x"'))
    log = read_text(tmp_path, OWN, "r.txt")
    assert headline(log.runs[0]).digits == 8 and "an event of another form" in log.problems[0]


def test_a_log_that_ends_anywhere_gives_what_is_complete(tmp_path: Path) -> None:
    """A number at the end may have lost digits."""
    cut = BASELINE[: AT_LAST + 31]
    log = read_text(tmp_path, cut)
    assert log.runs[0].last_step == 10_000 and log.runs[0].status == "unfinished"
    assert log.problems == ["the last line is cut off"]
    last = BASELINE.rstrip()
    assert headline(only(read_text(tmp_path, last))).digits == 8, "a missing line end is not damage"
    log = read_text(tmp_path, last[:-6])
    assert headline(log.runs[0]).val_bpb == round(bpb_of(1.9), 4), "two digits are another result"


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\x1f\x8b\x08\x00rest")
    (tmp_path / "b.log").write_text("nothing of the kind\n" * 9)
    (tmp_path / "c.log").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text(BASELINE)
    names = ["a.log", "b.log", "c.log", "pipe", "none.log", "empty", "README.md"]
    logs = runs.read_logs([tmp_path / name for name in names])
    problems = [problem.removeprefix(f"{tmp_path}/") for problem in logs.problems]
    assert problems == [
        *(f"{name}.log: no training log: no step and no result is in it" for name in "abc"),
        "pipe: cannot be read: not a file",
        "none.log: cannot be read: No such file or directory",
        "empty: a folder without .txt or .log files: name the logs",
        "README.md: no log by its name: name the .txt or .log file of a run",
    ]
    assert logs.runs == [] and all("\n" not in problem for problem in logs.problems)
