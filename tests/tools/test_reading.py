"""tools/runs.py reads the events of our own runs, text logs of others, and rejects files that
are no logs."""

import json
import os
from pathlib import Path

import pytest
import runs
from made_logs import SMI, bpb_of, event_lines, log_text, read_text
from running import ROOT
from runs import Logs, Result, Run

SOURCE = '''"""A trainer. Its log looks like this:
step:7/100 train_loss:1.0000 train_time:7ms step_avg:1.00ms
final_int8_zlib_roundtrip_exact val_loss:0.10000000 val_bpb:0.20000000
"""
import os

# seed:99
def main():
    log0(f"step:{step}/{iterations} val_loss:{loss:.4f} val_bpb:{bpb:.4f}")

main()
'''
BASELINE = log_text(seed=1337)  # its last step is 13,790
HEADER = log_text(script=SOURCE, smi=SMI).split("train_loader:")[0]
SCORE = round(bpb_of(1.9), 8)
EXAMPLES = (ROOT / "tests/tools/corpus/lines.txt").read_text("utf-8").splitlines()[1:]


def only_run(log: Logs) -> Run:
    assert len(log.runs) == 1 and log.problems == [], (log.problems, log.runs)
    return log.runs[0]


@pytest.mark.parametrize("row", EXAMPLES)
def test_a_line_becomes_an_event(row: str) -> None:
    text, expected = row.rsplit("  |", 1)
    found = runs.parse_line(text.rstrip()) or {"event": ""}
    words = [f"{name}={value}" for name, value in found.items() if value is not None]
    assert " ".join([found["event"], *words[1:]]) == expected.strip()


def test_a_log_of_the_challenges_script(tmp_path: Path) -> None:
    """The script at its beginning is recognized: its lines are not read as lines of the log."""
    run = only_run(read_text(tmp_path, HEADER + BASELINE))
    assert (run.seed, run.status, run.last_step, run.error) == (1337, "finished", 13_790, None)
    machine = {"python": "3.12.3", "torch": "2.9.1+cu128", "device": "NVIDIA H100 80GB HBM3"}
    assert run.machine == machine
    data = (run.world_size, run.dataset, run.train_shards, run.val_tokens, run.micro_steps)
    assert data == (8, "fineweb10B_sp1024", 80, 62021632, 1)
    steps = [1, 10, 1000, 10_000, 13_790]
    assert [s.step for s in run.steps] == steps == [v.step for v in run.validations]
    assert run.steps[1].train_loss == 2.8 and run.validations[-1].val_loss == 1.89
    assert (run.train_time_ms, run.step_ms, run.eval_ms) == (599_865, 43.5, 2100)
    assert (run.code_bytes, run.model_bytes, run.total_bytes) == (0, 15_700_000, 15_700_000)
    name = "final_int8_zlib_roundtrip_exact"
    assert run.result == Result("roundtrip", name, 1.9, SCORE, None, 8)
    assert run.config["matrix_lr"] == 0.04 and run.config["tie_embeddings"] is True
    assert run.source == SOURCE.encode() and len(run.scripts) == 1


def test_the_result_of_public_logs(tmp_path: Path) -> None:
    """For the logs of the challenge's merged records whose submitted score is known. For five of
    them, the authors submitted another result than the last one on the decoded artifact."""
    wrong = set()
    rows = (ROOT / "tests/tools/corpus/results.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows):
        [run] = read_text(tmp_path, row["text"] + "\n").runs
        decimals = len(repr(row["submitted"]).partition(".")[2])
        if abs(run.result.val_bpb - row["submitted"]) > max(1e-4, 0.51 * 10.0**-decimals):
            wrong.add((row["record"][:10], row["log"]))
    first = [("2026-04-04", "train_seed42.log"), ("2026-04-23", "train_seed0.log")]
    last = [("2026-04-29", f"train_seed{seed}_rerun_gptq8s.log") for seed in (1234, 42)]
    assert len(rows) == 68
    assert wrong == {*first, ("2026-04-23", "train_seed1234.log"), *last}


TRAINED = "step:9/9 train_loss:2.0 train_time:99ms\n"
# The result lines of a log | the result that counts.
RULE_OF_RESULTS = """
final_a val_loss:2 val_bpb:1.2; final_b val_loss:2 val_bpb:1.1               | 1.1
final_a val_loss:2 val_bpb:1.1; final_b val_loss:2 val_bpb:1.9               | 1.9
final_a val_loss:2 val_bpb:1.1; final_b val_loss:nan val_bpb:nan             | nan
final_a val_loss:2 val_bpb:1.2; diagnostic quantized val_loss:2 val_bpb:1.1  | 1.2
pre-quantization post-ema val_loss:2 val_bpb:1.1                             | None
final_a val_loss:2 val_bpb:1.2; step:10/9 train_loss:2                       | None
the cap is bpb 1.4; delta_bpb: -0.0031; val_bpb:1.1                          | None
"""


@pytest.mark.parametrize("row", RULE_OF_RESULTS.strip().splitlines())
def test_the_last_result_on_the_artifact_counts(tmp_path: Path, row: str) -> None:
    """Even if an earlier one is better; but not if a training step follows."""
    text, value = row.rsplit("|", 1)
    [run] = read_text(tmp_path, TRAINED + text.strip().replace("; ", "\n") + "\n").runs
    assert str(run.result and run.result.val_bpb) == value.strip()
    assert run.status == ("finished" if run.result else "unfinished")


SECOND = BASELINE.replace("seed:1337", "seed:42")
LINES = "".join(f"step:{n}/9 train_loss:2.0{n} train_time:{n}00ms\n" for n in (1, 2, 3))
LATER = "seed:1337\nquantized_ttt val_loss:2.3 val_bpb:1.1 eval_time:9ms\n"
AT_1000, AT_LAST = BASELINE.index("step:10000/"), BASELINE.index("step:13790/")
BACK = BASELINE[:AT_LAST] + BASELINE[AT_1000:].replace("step:10000/", "step:900/")
OTHER = HEADER.replace("# seed:99", "# edited") + "resumed: step:900 resumed_from:x\n"
EDITED = HEADER + BASELINE[:AT_LAST] + OTHER + BASELINE[AT_LAST:]
# {name: (content of a file, its last run: seed, steps, result, number of scripts, resumed at)}
FILES = {
    "three": (HEADER + BASELINE + BASELINE + OTHER + SECOND, f"42 1,10,1000,10000,13790 {SCORE} 1"),
    "steps": (LINES + LINES.replace("2.0", "3.0"), "None 1,2,3 None 0"),
    "evaluated": (HEADER + BASELINE + HEADER + LATER, "1337 1,10,1000,10000,13790 1.1 1"),
    "back": (BACK, f"1337 1,10,900,13790 {SCORE} 0 900"),
    "edited": (EDITED, f"1337 1,10,13790 {SCORE} 2 901"),
    "without steps": ("seed:1\n" + LATER, "1337  1.1 0"),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_last_run_of_a_file_is_read(tmp_path: Path, kind: str) -> None:
    """If steps start again at 1, another run begins; if they go back less, the run was resumed."""
    text, expected = FILES[kind]
    log = read_text(tmp_path, text)
    [run], several = log.runs, "3 runs are in this file; only the last one is read; write each run "
    assert log.problems == [several + "to a file of its own"] * (kind == "three")
    steps, result = ",".join(str(step.step) for step in run.steps), run.result
    words = [run.seed, steps, result and result.val_bpb, len(run.scripts), *run.resumed_at]
    assert " ".join(map(str, words)) == expected
    assert (run.status == "no steps") == (steps == "")


RUN_A, RUN_B = HEADER + log_text(seed=1, nats=1.9, artifact=11), log_text(seed=2, nats=1.5)
DIED = RUN_A + RUN_B.split("step:1/")[0] + "torch.OutOfMemoryError: CUDA out of memory\n"


def test_sizes_and_scores_of_two_runs_in_one_file_are_never_mixed(tmp_path: Path) -> None:
    """As tee -a writes them: the second run is whole, was killed at a step, or never came to its
    first step. Only in the last case the first run is the last one of the file."""
    whole = read_text(tmp_path, RUN_A + RUN_B)
    killed = read_text(tmp_path, RUN_A + RUN_B.split("step:1000/")[0])
    died = read_text(tmp_path, DIED)
    found = [(r.seed, r.model_bytes, r.last_step, r.result and r.result.val_bpb, r.status)
             for log in (whole, killed, died) for r in log.runs]  # fmt: skip
    assert found == [
        (2, 15_700_000, 13_790, round(bpb_of(1.5), 8), "finished"),
        (2, None, 10, None, "unfinished"),
        (1, 11, 13_790, SCORE, "finished"),
    ]
    assert len(whole.runs[0].scripts) == 0, "the script is that of the first run"
    several = "2 runs are in this file; only the last one is read; write each run to a file of its "
    assert whole.problems == killed.problems == [several + "own"]
    assert died.problems == ["a later start in this file ended before its first step, and is left "
                             "out"]  # fmt: skip


@pytest.mark.parametrize("prefix", ["[default0]:", "1776144154.79{n} ", "2026-04-01T12:00:0{n}Z "])
def test_a_prefix_of_every_line_is_removed(tmp_path: Path, prefix: str) -> None:
    plain = only_run(read_text(tmp_path, HEADER + BASELINE))
    text = [
        prefix.format(n=n % 10) + line for n, line in enumerate((HEADER + BASELINE).split("\n"))
    ]
    assert only_run(read_text(tmp_path, "\n".join(text))) == plain


def test_other_encodings_are_read(tmp_path: Path) -> None:
    """PowerShell writes UTF-16. A terminal's colours are ignored."""
    for data in (
        b"\xef\xbb\xbf" + BASELINE.encode(),
        BASELINE.replace("\n", "\r\n").encode(),
        BASELINE.replace("\n", "\r\n").encode("utf-16"),
        BASELINE.replace("step:", "\x1b[1;32mstep:").replace("final", "\x1b[0mfinal").encode(),
    ):
        assert only_run(read_text(tmp_path, data)).result.val_bpb == SCORE


OWN = """settings: MATRIX_LR=0.02
seed:7
step:1/4 train_loss:9.0 train_time:10ms step_avg:10.00ms data_crc:00aa0001
final_int8_zlib_roundtrip_exact val_loss:2.00000000 val_bpb:1.30000000
"""


def test_our_runs_are_read_from_their_events_alone(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(event_lines(seed=7))
    run = only_run(read_text(tmp_path, HEADER + OWN, "r.txt"))
    assert run.path == str(tmp_path / "r.jsonl") and run.source is None
    assert run.result == Result("roundtrip", "score", 2.00000000001, 1.2, 30)
    steps = [(s.step, s.train_loss, s.train_time_ms) for s in run.steps]
    assert steps == [(1, 5.5, 40), (4, 4.5, 160)]
    assert [(v.step, v.val_bpb) for v in run.validations] == [(0, 3.0), (4, 1.3)]
    assert (run.status, run.error, run.seed, run.scripts) == ("finished", None, 7, ["ab" * 32])
    assert (run.code_bytes, run.model_bytes, run.total_bytes) == (900, 3000, 3900)
    assert (run.train_time_ms, run.val_total_ms, run.input_wait_ms) == (160, 70, 4)
    assert run.fingerprint["fineweb_val_000000.bin"] == "5000 tokens, 0000beef"
    known = run.conditions
    expected = {"model_params": 1000, "dataset": "mine", "train_shards": 3, "val_tokens": 1984}
    assert known.items() >= (expected | {"world_size": 2, "micro_steps": 4}).items()
    assert "grad_accum_steps" not in known, "micro_steps says it already"
    assert run.config["matrix_lr"] == 0.04 and run.config["train_prefetch"] is True
    assert runs.read_logs([tmp_path, tmp_path / "r.jsonl"]).runs == [run], "each run is read once"
    (tmp_path / "r.jsonl").unlink()
    text = only_run(read_text(tmp_path, HEADER + OWN, "r.txt"))
    assert (text.config["matrix_lr"], text.result.val_bpb) == (0.02, 1.3), (
        "it is read like any text log"
    )


def test_a_run_that_was_resumed_is_one_run(tmp_path: Path) -> None:
    """Steps after the checkpoint are dropped, and so is the score of the first part."""
    first = event_lines(seed=7, made_of={"script": "a"})
    again = [{"event": "run"}, {"event": "config", "seed": 7, "matrix_lr": 0.02}]
    again += [{"event": "made_of", "script": "b"}]
    again += [{"event": "checkpoint", "step": 2, "resumed_from": "x.pt"}]
    again += [{"event": "step", "step": 3, "train_loss": 4.0, "train_time_ms": 120}]
    text = first + "".join(json.dumps(event) + "\n" for event in again)
    (tmp_path / "r.jsonl").write_text(text)
    run = only_run(runs.read_log(tmp_path / "r.jsonl"))
    assert [step.step for step in run.steps] == [1, 3] and [v.step for v in run.validations] == [0]
    assert (run.status, run.resumed_at, run.scripts) == ("unfinished", [3], ["a", "b"])
    assert run.config["matrix_lr"] == 0.02 and run.result is None
    end = json.dumps({"event": "end", "status": "failed", "error": "step 4"})
    wrong = json.dumps({"event": "step", "step": 4, "train_loss": "x"})
    (tmp_path / "r.jsonl").write_text(f"{text}{end}\n{{cut\n{wrong}\n[]\n")
    log = runs.read_log(tmp_path / "r.jsonl")
    assert (log.runs[0].status, log.runs[0].error) == ("failed", "step 4")
    assert log.problems == ["3 damaged lines left out"]
    sizes = json.dumps({"event": "artifact", "artifact_bytes": [1], "code_bytes": 2})
    (tmp_path / "r.jsonl").write_text(f"{text}{sizes}\n")
    log = runs.read_log(tmp_path / "r.jsonl")
    assert log.runs[0].total_bytes is None and log.problems == ["1 damaged line left out"]
    text = BASELINE.replace("world_size:8", "world_size:eight").replace("seed:1337", "seed:none")
    log = read_text(tmp_path, text)
    assert (log.runs[0].world_size, log.runs[0].known_seed) == (None, None)
    assert log.problems == ["2 damaged lines left out"]


CUT = "the last line has no line end, so its last number may be cut: it is left out"
SEVERAL = "2 runs are in this file; only the last one is read; write each run to a file of its own"
NO_END = 'no last line says how the run ended (such as "finished"), so the log is cut, or the run '
NO_END += "goes on: no score in it counts"
OURS = OWN.replace("seed:7", "train_io:prefetch:True\nseed:7")
OURS_BEGUN = OURS.split("final")[0] + "final_int8_zlib_roundtrip val_loss:2.0000 val_bpb:1.3000\n"


def test_a_log_that_was_cut_has_no_result(tmp_path: Path) -> None:
    """A number may be cut where the file ends. Our trainer writes as its last line how the run
    ended; without it, the log has no result, even if the score seems to be whole."""
    for text, status, bpb, *problems in (
        (BASELINE[:-6], "finished", 1.1253, CUT),  # the exact score is cut, the rounded one counts
        (BASELINE[:-1], "finished", SCORE),  # only the line end is missing
        (OURS + "finished\n", "finished", 1.3),
        (OURS + "finished: see logs/r.txt", "finished", 1.3),  # from the console
        (OURS + "failed: no room\n", "failed", 1.3),
        (OURS, "unfinished", None, NO_END),
        (OURS[:-5], "unfinished", None, CUT),
        (OURS_BEGUN + OURS[-80:-7], "unfinished", None, CUT, NO_END),
        (OURS + "interrupted: x\n" + OURS.split("final")[0], "unfinished", None, SEVERAL),
        (OURS + "finish", "unfinished", None, NO_END),
    ):
        log = read_text(tmp_path, text)
        [run] = log.runs
        found = run.result and run.result.val_bpb
        assert (run.status, found and round(found, 8), log.problems) == (status, bpb, problems)
    assert read_text(tmp_path, OURS + "failed: no room\n").runs[0].error == "no room"


def test_a_log_of_another_trainer_says_what_it_lacks(tmp_path: Path) -> None:
    """Logs of modded-nanogpt have no bits per byte."""
    text = "step:0/9 val_loss:10.8 train_time:0ms\nstep:9/9 val_loss:3.2773 train_time:900ms\n"
    log = read_text(tmp_path, text)
    [run], [problem] = log.runs, log.problems
    assert (run.status, run.result, run.validations[-1].val_loss) == ("no val_bpb", None, 3.2773)
    assert problem.startswith("its lines have val_loss but no val_bpb, like those of modded-nano")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x1f\x8b\x08\x00rest", "a packed file, not a log; unpack it first"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer, not a log; run git lfs",
        ),
        (b"\n<!DOCTYPE html>\n<html>", "a page of HTML, not a log; download the file itself"),
    ],
)
def test_a_file_in_the_place_of_a_log_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    [problem] = read_text(tmp_path, data).problems
    assert problem.startswith(words)


def test_two_runs_in_one_jsonl_are_told_apart(tmp_path: Path) -> None:
    """By their RUN_ID: a resumed run has the same one."""
    texts = [event_lines(seed=7, run_id="a"), event_lines(seed=8, run_id="b", score=None)]
    texts[1] = texts[1].replace('"run_id": "r"', '"run_id": "b"').split('{"event": "step"')[0]
    log = read_text(tmp_path, "".join(texts), "two.jsonl")
    [run] = log.runs
    assert (run.seed, run.result, run.model_bytes, run.steps) == (8, None, None, [])
    assert log.problems == [SEVERAL]


def test_files_that_are_no_logs_are_problems(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\x00\x8b\x08\x00rest")
    (tmp_path / "b.log").write_text("nothing of the kind\n" * 9)
    (tmp_path / "c.log").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    names = ["a.log", "b.log", "c.log", "pipe", "none.log", "empty"]
    logs = runs.read_logs([tmp_path / name for name in names])
    problems = [problem.removeprefix(f"{tmp_path}/") for problem in logs.problems]
    assert problems == [
        *(f"{name}.log: not a training log: it contains no step and no result" for name in "abc"),
        "pipe: cannot be read: not a regular file",
        "none.log: cannot be read: No such file or directory",
        "empty: the folder contains no .txt, .log or .jsonl files; give logs",
    ]
    assert logs.runs == [] and all("\n" not in problem for problem in logs.problems)
