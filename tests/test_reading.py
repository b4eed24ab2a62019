"""logs/lines.py, runs.py and results.py on the logs that people have: each family, several runs per
file, damage, and our own; and what the library's modules import."""

import itertools
import json
import math
import os
from pathlib import Path

import lines
import pytest
import runs
from conftest import ROOT, RULE, SMALL_MODEL, SMI, byte_data, log_text, read_text, run_trainer
from damage import DAMAGE, Damage, damaged, processor_time
from hypothesis import HealthCheck, given, settings
from results import evaluation_ms, evaluations, headline, score, submitted
from runs import Logs, Run, Sizes, StepTimes
from tables import report

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
HEADER = log_text(script=SOURCE, smi=SMI).split("train_loader:")[0]
BASELINE = """logs/try7.txt
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=./data/tokenizers/fineweb_1024_bpe.model
train_loader:dataset:fineweb10B_sp1024 train_shards:80
val_loader:shards pattern=./data/datasets/fineweb10B_sp1024/fineweb_val_*.bin tokens:62021632
model_params:17059912
world_size:8 grad_accum_steps:1
sdp_backends:cudnn=False flash=True mem_efficient=False math=False
attention_mode:gqa num_heads:8 num_kv_heads:4
tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 \
warmup_steps:20 max_wallclock_seconds:600.000
seed:1337
warmup_step:1/20
step:0/20000 val_loss:6.9357 val_bpb:4.1077 train_time:0ms step_avg:0.02ms
step:1/20000 train_loss:6.9370 train_time:40ms step_avg:40.00ms
step:2/20000 train_loss:15.9120 train_time:80ms step_avg:40.00ms
step:200/20000 train_loss:2.8000 train_time:8000ms step_avg:40.00ms
step:400/20000 train_loss:2.5000 train_time:16400ms step_avg:41.00ms
step:500/20000 val_loss:2.4100 val_bpb:1.4273 train_time:20500ms step_avg:41.00ms
stopping_early: wallclock_cap train_time:20500ms step:500/20000
peak memory allocated: 10210 MiB reserved: 10236 MiB
Serialized model: 67240121 bytes
Code size: 48310 bytes
Total submission size: 67288431 bytes
Serialized model int8+zlib: 15702114 bytes (payload:17201016 raw_torch:17246128 payload_ratio:3.91x)
Total submission size int8+zlib: 15750424 bytes
final_int8_zlib_roundtrip val_loss:2.4200 val_bpb:1.4333 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:2.42003108 val_bpb:1.43328104
"""
MODERN = """Hyperparameters:
  adam_eps: 1e-08
  note: two words
  datasets_dir: ./data/datasets/fineweb10B_sp8192
  quantized_model_path: final_model.int6.ptz
  loops: 1,2
  seed: 42
  ttt_enabled: True
  world_size: 8
train_shards: 80
val_tokens: 40540160
model_params:35901112
warmup_step: 1/20
0/20000 val_loss: 9.0101 val_bpb: 3.4881
1/20000 train_loss: 9.0115 train_time: 0.0m tok/s: 8190220
500/20000 train_loss: 3.3800 train_time: 0.8m tok/s: 7764000
1000/20000 train_loss: 3.2800 train_time: 1.7m tok/s: 7742000
1200/20000 val_loss: 2.8800 val_bpb: 1.1150
stopping_early: wallclock_cap train_time: 122071ms step: 1200/20000
diagnostic pre-quantization post-ema val_loss:2.87100000 val_bpb:1.11146400 eval_time:6480ms
Serialized model: 135100244 bytes
Code size (uncompressed): 120450 bytes
Code size (compressed): 27310 bytes
Serialized model quantized+brotli: 15880402 bytes
Total submission size quantized+brotli: 15907712 bytes
diagnostic quantized val_loss:2.90000000 val_bpb:1.12269120 eval_time:9710ms
ttt_phased: total_docs:50000 prefix_docs:2000 suffix_docs:48000 num_phases:3
ttp: b90/700 bl:2.4011 bb:1.1404 rl:2.3300 rb:1.0600 dl:190-192 gd:1
quantized_ttt_phased val_loss:2.85500000 val_bpb:1.10527000 eval_time:372450ms
total_eval_time:372.5s
"""


def only(log: Logs) -> Run:
    assert len(log.runs) == 1 and log.problems == [], (log.problems, log.runs)
    return log.runs[0]


def results_of(run: Run) -> list[lines.Result]:
    return [evaluation.result for evaluation in evaluations(run)]


@pytest.mark.parametrize("pattern", lines.PATTERNS, ids=lambda pattern: pattern.name)
def test_each_pattern_reads_its_example(pattern: lines.Pattern) -> None:
    assert tuple(lines.events(pattern.example)) == pattern.events


def test_a_baseline_log(tmp_path: Path) -> None:
    run = only(read_text(tmp_path, HEADER + BASELINE))
    assert (run.seed, run.status, run.last_step, run.error) == (1337, "finished", 500, None)
    assert run.versions == {"python": "3.12.3", "torch": "2.9.1+cu128"}
    assert run.hardware == {"device": "NVIDIA H100 80GB HBM3", "gpus": 8} and run.world_size == 8
    assert (run.dataset, run.train_shards, run.val_tokens) == ("fineweb10B_sp1024", 80, 62021632)
    assert [s.step for s in run.steps] == [1, 2, 200, 400] and run.steps[1].train_loss == 15.9120
    assert [(v.step, v.val_bpb) for v in run.validations] == [(0, 4.1077), (500, 1.4273)]
    stop = (run.stopped_early, run.stop_step, run.train_time_ms, run.peak_mib)
    assert stop == ("wallclock_cap", 500, 20500, 10210)
    assert run.sizes == Sizes(67240121, 48310, None, 15702114, 15750424)
    exact = (2.42003108, 1.43328104, 1401, 8)
    assert headline(run) == lines.Result("roundtrip", "final_int8_zlib_roundtrip", *exact)
    assert score(run, "pre_quant").val_loss == 2.41 and score(run, "ttt") is None
    assert run.config["matrix_lr"] == 0.04 and run.config["num_kv_heads"] == 4
    assert run.config["tied_embed_lr"] == 0.05 and "head_lr" not in run.config
    untied = only(read_text(tmp_path, BASELINE.replace("embeddings:True", "embeddings:False")))
    assert (untied.config["embed_lr"], untied.config["head_lr"]) == (0.05, 0.0)
    # Of the means between the lines.
    assert run.step_times() == StepTimes(*map(pytest.approx, (41.0, 40.0, 42.0, 42.0)))


@pytest.mark.parametrize(
    "beginning",
    [
        f'"""A trainer.\n{RULE}\nseed:5\n{RULE}\n"""\n',
        '"A trainer."\nVERSION = 1\n',
        f'import os\n\ndef rule():\n    return """\n{RULE}\n"""\n' + "x = 1\n" * 200,
        "# A trainer.\nVERSION = 1\n",
    ],
)
@pytest.mark.parametrize("front", ["", f"Source code:\n{RULE}\n"])
def test_the_script_is_found_whole(tmp_path: Path, front: str, beginning: str) -> None:
    source = beginning + SOURCE
    run = only(read_text(tmp_path, front + HEADER.replace(SOURCE, source) + BASELINE))
    assert run.source == source.encode()
    assert (run.source_bytes, len(run.source_sha256)) == (len(source.encode()), 64)
    assert (run.seed, run.error, len(run.steps), len(results_of(run))) == (1337, None, 4, 1)


def test_a_log_with_settings_in_a_block_and_times_in_minutes(tmp_path: Path) -> None:
    run = only(read_text(tmp_path, MODERN))
    data = (run.seed, run.dataset, run.train_shards, run.val_tokens, run.model_params)
    assert data == (42, "fineweb10B_sp8192", 80, 40540160, 35901112)
    assert run.config["adam_eps"] == 1e-8 and run.config["ttt_enabled"] is True
    assert (run.config["loops"], run.config["note"]) == ("1,2", "two words")
    assert [(s.step, s.train_loss) for s in run.steps] == [(1, 9.0115), (500, 3.38), (1000, 3.28)]
    assert run.steps[1].train_time_ms is None, "0.8m is 6 seconds coarse"
    assert (run.stop_step, run.train_time_ms) == (1200, 122071)
    validations = [(v.step, v.val_bpb, v.train_time_ms) for v in run.validations]
    assert validations == [(0, 3.4881, None), (1200, 1.115, 122071)]
    results = [(result.kind, result.val_bpb) for result in results_of(run)]
    assert results == [("pre_quant", 1.111464), ("diagnostic", 1.1226912), ("ttt", 1.10527)]
    assert headline(run).kind == "ttt" and evaluation_ms(run) == run.eval_total_ms == 372500
    assert (run.source_bytes, run.source_sha256) == (None, None)
    assert (run.sizes.code, run.sizes.packed_code, run.sizes.total) == (120450, 27310, 15907712)


PREFIXES = ["1775318899.204 ", "[2026-04-04 12:13:14] ", "2026-04-04T12:13:14.123456Z "]
PREFIXES += ["2026-04-04 12:13:14,123 - INFO - ", "[12:13:14] ", "12:13:14 | ", "[rank0]: "]
PREFIXES += ["rank0: ", "[   12.34s] ", "[modal] ", "\x1b[32m[INFO]\x1b[0m "]


@pytest.mark.parametrize("log", [BASELINE, MODERN], ids=["baseline", "modern"])
def test_what_stands_around_lines_changes_nothing(tmp_path: Path, log: str) -> None:
    plain = only(read_text(tmp_path, log))
    for prefix in PREFIXES:
        prefixed = "".join(prefix + line for line in log.splitlines(keepends=True))
        assert only(read_text(tmp_path, prefixed)) == plain, prefix
    assert only(read_text(tmp_path, log.replace("\n", "\r\n"))) == plain
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le"):  # as PowerShell's > writes it
        assert only(read_text(tmp_path, log.encode(encoding))) == plain


# Training lines of step 588 with loss 2.1, after 588.071 s.
SPELLINGS = """
step:588/2000 train_loss: 2.1 train_time: 588071ms step_avg: 83.10ms
step: 588/2000 train_loss=2.1000 train_time=588.071s
step 588/2000 train_loss:2.1 lr_mul:1.0 train_time:588071ms tok/s:123456
step:588/2000 [CE+SWA] train_loss:2.1000 train_time:588071ms
step:588/2000 loss:2.1000 t:588071ms avg:83.10ms
step:588/2000 train_loss:2.1000 train_time:588,071ms
Step 588 | Train Loss: 2.1000 | train_time: 588071ms
step 588 | batch 64 | loss 2.1
"""


@pytest.mark.parametrize("line", SPELLINGS.strip().splitlines())
def test_spellings_of_a_training_line(tmp_path: Path, line: str) -> None:
    step = only(read_text(tmp_path, line + "\n")).steps[0]
    time_ms = None if "batch" in line else pytest.approx(588071)
    assert (step.step, step.train_loss, step.train_time_ms) == (588, 2.1, time_ms)


# What a log calls a result, by what it is.
NAMES = {
    "progress": "chunk [7|progress|batch_bpb|batch_loss|running_bpb|cumulative|3/9|95.1%|step|iter|"
    "epoch",
    "diagnostic": "delta|val_gain|diff|gap|improvement|change|reduction|penalty|std|target|sota|"
    "best|mean|average|leader|record|threshold|expected|sanity|subset|probe|debug|control|diagnostics|"
    "baseline_bpb|baseline val_bpb|over baseline|vs. the baseline|than the baseline|calib_loss|"
    "calibration_bpb|train_bpb|pre_ttt|before slot|without-adapt|no_ttt|# a|// a|-- a|"
    "diagnostic quantized|diagnostics of ema",
    "pre_quant": "pre_gptq|pre-export|full precision|fp32|bf16|float_16|post_ema|ema|post-swa|lawa|"
    "raw model|my swa_bpb|my raw_val_bpb|pre-quantization post-ema|unquantized|pre_quant int8|"
    "mypostema|my ema_bpb|my lawa_bpb",
    "ttt": "legal_ttt|test-time training|quantized_ttt|ttt sliding",
    "sliding": "sliding_window|stride 64|final_sw|sw_eval|int6 sliding",
    "roundtrip": "roundtrip|round_trip ema|ema quantized|post_quant_ema|swa int7|zlib|zstd|lzma|"
    "brotli|decoded|artifact",
    "other": "final_temped|meanfield|averaged|diffusion|mychunk 7|swallow",
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_name_of_a_result_says_what_it_is(kind: str) -> None:
    for name in NAMES[kind].split("|"):
        for written in (name, name.upper()):
            assert lines.result_kind(written) == kind, written


# Behind a baseline's log, whose artifact scored 1.43328104: the line, its kind, its bits per byte
# (none: it is no result), and whether it is what is submitted.
RESULTS = """
quantized val_loss:2.3 val_bpb:1.4 eval_time:9710ms                     | roundtrip  | yes
final_sliding_window_eval stride:64 val_loss:2.3 val_bpb:1.4 eval_time:9ms | sliding | yes
final_int8_zlib_roundtrip sliding val_loss:2.3 sliding val_bpb:1.4      | sliding    | yes
Sliding window BPB (stride=64): 1.4                                     | sliding    | yes
final_int8_zlib_roundtrip val_loss:2.3 val_bpb:1.4 eval_mode:online_ttt | ttt        | yes
post_ttt val_bpb:1.4 pre_ttt val_bpb:1.41                               | ttt        | yes
pre_ttt_bpb=1.41 post_ttt_bpb=1.4                                       | ttt        | yes
ttt/val_bpb 1.400                                                       | ttt        | yes
sliding val_bpb:1.41 and bpb:1.4                                        | sliding    | yes
RESULT: val_bpb=1.4 | artifact=15.9MB                                   | other      | yes
{"val_loss": 2.3, "val_bpb": 1.4, "kind": "last"}                       | other      | yes
BPB: 1.43328104 -> 1.4                                                  | other      | yes
raw model val_bpb: 1.4                                                  | pre_quant  | no
jepa_diagnostics cos_sim:0.99 probe_bpb:1.4                             | diagnostic | no
delta_bpb: -0.0031                                                      | none       | no
ttt_chunk [1871/1893] bpb=1.4 time=405.1s next_bpb=1.4                  | none       | no
  [500/969088] bpb=1.4                                                  | none       | no
the cap is bpb 1.4                                                      | none       | no
"""


@pytest.mark.parametrize("row", RESULTS.strip().splitlines())
def test_the_last_result_of_the_artifact_is_submitted(tmp_path: Path, row: str) -> None:
    line, kind, submitted = (part.strip() for part in row.rsplit("|", 2))
    run = only(read_text(tmp_path, f"{BASELINE}{line}\n"))
    kinds = [s.kind for s in results_of(run) if s.val_bpb not in (1.41, 1.43328104)]
    assert kinds == ([] if kind == "none" else [kind])
    assert headline(run).val_bpb == (1.4 if submitted == "yes" else 1.43328104)


# Lines of a log, and the size that they say.
SIZES = """
Serialized model int6+zstd-22: 15480112 bytes (payload:1)              | artifact 15480112
Total submission size mixed_int5_int6+brotli: 15948801 bytes           | total 15948801
INT7+zlib model: 15377000 bytes | Total submission: 15431007 bytes     | total 15431007
artifact_bytes:   15920833                                             | total 15920833
Raw model: 99 bytes                                                    | model 99
budget:15991000/16000000 (15.99/16.00MB) FITS                          | total 15991000
artifact:15.92MB a:6 code:70000; budget:15990000/16000000              | artifact 15920000
Serialized model: 99; Total submission size: 99; Total submission size: 88 | total 88
Serialized model: 99; Total submission size: 120                       | total None
"""


@pytest.mark.parametrize("row", SIZES.strip().splitlines())
def test_spellings_of_sizes(tmp_path: Path, row: str) -> None:
    text, expected = row.rsplit("|", 1)
    log = only(read_text(tmp_path, f"seed:1\n{text.strip()}\n".replace("; ", "\n")))
    field, value = expected.split()
    assert str(getattr(log.sizes, field)) == value


SECOND = BASELINE.replace("seed:1337", "seed:42").replace("step:500", "step:510")
THREE = HEADER + BASELINE + HEADER + SECOND + BASELINE.replace("8000ms", "8001ms")
LINES = "".join(f"step:{n}/9 train_loss:2.0{n} train_time:{n}00ms\n" for n in (1, 2, 3))
LATER = "seed:1337\nquantized_ttt val_loss:2.3 val_bpb:1.4 eval_time:9ms\n"
AT_400, AT_500 = BASELINE.index("step:400/"), BASELINE.index("step:500/")
BACK = BASELINE[:AT_500] + BASELINE[AT_400:].replace("step:400/", "step:300/", 1)
FIRST = "1337 1,2,200,400 2: 1.43328104"
# What a file holds; of each run: seed, steps, lines with a result, the result, is the script there?
# A script begins a run; so do steps that start again, and a header behind results. Lines that are
# there twice count once. A run to which steps go back was resumed.
FILES = {
    "three": (THREE, [f"{FIRST} script", "42 1,2,200,400 2: 1.43328104 script", FIRST]),
    "steps": (LINES + LINES.replace("2.0", "3.0"), ["None 1,2,3 0: None"] * 2),
    "console": (BASELINE + HEADER + BASELINE, [f"{FIRST} script"]),
    "twice": ("".join(2 * line for line in BASELINE.splitlines(True)), [FIRST]),
    "evaluated": (HEADER + BASELINE + HEADER + LATER, ["1337 1,2,200,400 3: 1.4 script"]),
    "back": (BACK, ["1337 1,2,200,300 2: 1.43328104 resumed at 300"]),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_runs_of_a_file(tmp_path: Path, kind: str) -> None:
    text, expected = FILES[kind]
    log = read_text(tmp_path, text)
    texts = []
    for run in log.runs:
        result, steps = headline(run), ",".join(str(step.step) for step in run.steps)
        marks = " script" * (run.source == SOURCE.encode())
        marks += "".join(f" resumed at {step}" for step in run.resumed_at)
        texts.append(f"{run.seed} {steps} {len(run.results)}: {result and result.val_bpb}{marks}")
    assert texts == expected and log.problems == []


def test_a_run_that_was_resumed_is_one_run(tmp_path: Path) -> None:
    """The trainer prints its header again, and its events; a run that had ended was extended."""
    again = HEADER + BASELINE[: BASELINE.index("warmup_step:1/")] + "resumed: step:400 from x.pt\n"
    again += BASELINE[BASELINE.index("step:500/") :].replace("1.43328104", "1.40000000")
    config = {"event": "config", "seed": 1337, "data_path": "data/x", "iterations": 400}
    events = [config, {"event": "end", "status": "interrupted"}, config | {"iterations": 900}]
    events += [{"event": "end", "status": "finished"}]
    lines_of_events = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "train.jsonl").write_text(lines_of_events)
    run = only(read_text(tmp_path, HEADER + BASELINE + again))
    assert [s.step for s in run.steps] == [1, 2, 200, 400] and run.resumed_at == [401]
    assert [v.step for v in run.validations] == [0, 500] and run.status == "finished"
    assert run.config["iterations"] == 900 and headline(run).val_bpb == 1.4
    assert [result.val_bpb for result in run.results] == [1.4333, 1.43328104, 1.4333, 1.4]
    (tmp_path / "train.jsonl").write_text(lines_of_events + '{"event": "end", "sta')
    log = read_text(tmp_path, HEADER + BASELINE + again)
    assert log.problems == ["train.jsonl breaks off in the middle of a line"]


def test_a_log_that_ends_anywhere_gives_what_is_complete(tmp_path: Path) -> None:
    cut = BASELINE[: BASELINE.index("16400ms") + 3]
    log = read_text(tmp_path, cut)
    assert log.runs[0].last_step == 200 and log.runs[0].status == "unfinished"
    assert log.problems == [f"line {len(cut.splitlines())}: the last line is cut off"]
    last = BASELINE.rstrip()
    assert headline(only(read_text(tmp_path, last))).digits == 8, "a missing line end is no damage"
    head = headline(read_text(tmp_path, last[:-3]).runs[0])
    assert head.val_bpb == 1.4333, "1.43328 would be another result"
    assert only(read_text(tmp_path, "5/9 train_loss: 3.38 tok/s: 77")).steps[0].train_loss == 3.38
    log = read_text(tmp_path, HEADER[: HEADER.index("main()\n\n=")])
    assert log.runs == [] and "the log ends inside the script's text" in log.problems[0]


def test_the_end_of_a_failed_run_is_said(tmp_path: Path) -> None:
    cut = BASELINE[: BASELINE.index("step:400/")]
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
    for last in ("torch.OutOfMemoryError: CUDA out of memory.", "ZException", "SystemExit: 1"):
        run = only(read_text(tmp_path, f"{cut}{trace}    from y import z\n{last}\n"))
        assert (run.status, run.error) == ("failed", last)


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\x1f\x8b\x08\x00rest")
    (tmp_path / "b.log").write_text("nothing of the kind\n" * 9)
    (tmp_path / "c.log").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text(BASELINE)
    names = ["a.log", "b.log", "c.log", "pipe", "none.log", "empty", "empty#2", "README.md"]
    logs = runs.read_logs([tmp_path / name for name in names])
    problems = [problem.removeprefix(f"{tmp_path}/") for problem in logs.problems]
    assert problems == [
        *(f"{name}.log: no training log: no line of one was found" for name in "abc"),
        "pipe: cannot be read: not a file",
        "none.log: cannot be read: No such file or directory",
        "empty: a folder without .txt or .log files: name the logs",
        "empty#2: a folder has no runs of its own: name a log in it",
        "README.md: no log by its name: name the .txt or .log file of a run",
    ]
    assert logs.runs == [] and all("\n" not in problem for problem in logs.problems)


def test_unreadable_values_are_named_with_their_line(tmp_path: Path) -> None:
    text = BASELINE.replace("train_loss:2.8000", "train_loss:2.8x")
    text = text.replace("world_size:8", "world_size:many")
    log = read_text(tmp_path, text + "final_int8_zlib_roundtrip val_loss:2.0 val_bpb:?\n")
    assert [problem.split(":")[0] for problem in log.problems] == ["line 6", "line 16", "line 28"]
    many = read_text(tmp_path, "".join(f"step:{n}/99 train_loss:?\n" for n in range(50)) + BASELINE)
    assert len(many.problems) == 21 and many.problems[-1] == "30 more lines like these"
    diverged = only(read_text(tmp_path, BASELINE.replace("train_loss:2.5000", "train_loss:nan")))
    assert math.isnan(diverged.steps[-1].train_loss)


def test_settings_come_from_the_events_beside_a_text(tmp_path: Path) -> None:
    """Damaged events cost what they say; those of another seed's run are none of this one."""
    config = {"event": "config", "time": 1.5, "seed": 1337, "muon_momentum": 0.9, "odd": [1]}
    end = {"event": "end", "status": "interrupted", "exit_code": 130, "error": "by you"}
    lines = [json.dumps(config), '{"event": "hardware", "tor', '{"event": "end"}x', json.dumps(end)]
    text, events = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text(BASELINE)
    events.write_text("\n".join(lines))
    run = only(runs.read_log(text))
    assert run.config["muon_momentum"] == 0.9 and run.config["matrix_lr"] == 0.04
    assert not {"odd", "event", "time"} & set(run.config)
    assert (run.status, run.error, run.versions) == ("interrupted", "by you", {})
    logs = runs.read_logs([tmp_path, events])
    assert len(logs.runs) == 1 and logs.problems == []
    assert logs.runs[0] == run, "named or not"
    events.write_text(lines[0].replace("1337", "7"))
    run = only(runs.read_log(text))
    assert "muon_momentum" not in run.config and run.status == "finished"


def test_a_folder_of_ablate_is_its_runs(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "report.txt").write_text(BASELINE)
    for name in ("x_seed1", "x_seed2"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)
        (tmp_path / "runs" / name / "output.txt").write_text(BASELINE)
    (tmp_path / "runs" / "x_seed2" / "logs" / "x_seed2.txt").write_text(BASELINE)
    for folder in (tmp_path, tmp_path / "runs"):
        folder_runs = runs.read_logs([folder]).runs
        assert [Path(run.path).name for run in folder_runs] == ["output.txt", "x_seed2.txt"]


@pytest.mark.slow
def test_our_own_log_is_read(tmp_path: Path) -> None:
    changed = {"ITERATIONS": 12, "VAL_LOSS_EVERY": 6, "VAL_TOKENS": 2000, "SEED": 5}
    own = run_trainer(tmp_path, **SMALL_MODEL | byte_data(tmp_path / "data") | changed)
    assert own.code == 0, own.err
    logs = runs.read_logs([own.folder / "logs"])
    assert len(logs.runs) == 1 and logs.problems == []
    run = logs.runs[0]
    assert run.source == (ROOT / "train_gpt.py").read_bytes() and run.train_shards == 1
    assert (run.seed, run.last_step, run.status, run.partial_val) == (5, 12, "finished", True)
    assert run.config["embed_lr"] == 0.6 and run.config["train_prefetch"] is True
    assert run.val_tokens == 1984 and run.peak_mib is not None and run.hardware["cpus"] > 0
    sizes = run.sizes
    assert sizes.total == sizes.artifact + sizes.code and sizes.code == run.source_bytes
    assert [v.step for v in run.validations] == [0, 6, 12]
    assert len(results_of(run)) == 1 and headline(run).digits == 8 and headline(run).eval_ms > 0
    assert all(len(step.data_crc) == 8 for step in run.steps)
    assert run.input_wait_percent < 100 and run.epochs > 0 and run.versions["torch"]


@pytest.mark.parametrize("text", [HEADER + BASELINE, MODERN], ids=["baseline", "modern"])
def test_damage_never_raises(tmp_path: Path, text: str) -> None:
    """Neither in reading nor in any table."""

    @given(DAMAGE)
    @settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
    def survives(damage: Damage) -> None:
        log = read_text(tmp_path, damaged(text, damage))
        assert log.runs or log.problems
        for run in log.runs:
            assert all(b.step > a.step for a, b in itertools.pairwise(run.steps))
            assert all(s.kind in lines.KINDS for s in results_of(run))
            run.step_times()
        assert all("\n" not in problem for problem in log.problems)
        assert report(log)

    survives()


ONE = "step:1/9 train_loss:2.0 train_time:5ms\n"
GO_BACK = "step:{}/9 train_loss:2.0\nstep:{}/9 train_loss:2.0\n"
RESUMED = "val_bpb:enabled\nresumed: step:{}\nstep:{}/9 train_loss:2.0\n"
LONG = {
    "scripts without an end": lambda n: "import os\ndef f\n" * n,
    "scripts with a log behind": lambda n: "import os\ndef f\nseed:1\n" * n,
    "rules": lambda n: ("=" * 30 + "\nimport os\n") * n + "def f\n",
    "results": lambda n: ONE + "".join(f"final_{i} val_bpb:{1 + i / 1e7:.7f}\n" for i in range(n)),
    "steps that go back": lambda n: "".join(GO_BACK.format(n + i + 2, n + i - 1) for i in range(n)),
    "resumed": lambda n: "".join(RESUMED.format(i, i + 1) for i in range(n)),
    "f-strings": lambda n: ONE + 'log(f"step:{step}/{n} val_loss:{x:.4f} val_bpb:{y:.4f}")\n' * n,
    "problems": lambda n: "step:1/2 train_loss:?\n" * n,
    "long lines": lambda n: f"step:1/2 {'a' * n * 50}\na:{' ' * n * 50}b c\n{'bpb:1.1 ' * n * 9}\n",
}


@pytest.mark.parametrize("kind", LONG)
def test_twice_the_log_takes_twice_the_time(tmp_path: Path, kind: str) -> None:
    """Four times as long would be quadratic."""

    def read(path: Path) -> None:
        submitted(runs.read_log(path).runs[:1], {"val_bpb": 0.5})

    times = []
    for count in (1000, 2000):
        (tmp_path / "long.log").write_text(LONG[kind](count))
        times.append(processor_time(read, tmp_path / "long.log"))
    assert times[1] < 3 * times[0] + 0.05
