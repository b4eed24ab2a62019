"""logs/results.py: which result was submitted, by the rule and with submission.json.

corpus/results.jsonl holds the result lines of 235 public logs of the challenge's record folders,
merged and proposed, with the number that was submitted. `not_judgeable` says why no reader of the
log could know it.
"""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, log_text, read_text
from results import headline, passed_over, submitted
from runs import Run

ROWS = (ROOT / "tests/corpus/results.jsonl").read_text(encoding="utf-8").splitlines()
CORPUS = [json.loads(row) for row in ROWS]
TRAINED = "seed:{seed}\nstep:9/9 train_loss:2.0 train_time:99ms\n"


def is_right(value: float | None, given: float) -> bool:
    decimals = len(repr(given).partition(".")[2])
    return value is not None and abs(value - given) <= max(1e-4, 0.51 * 10.0**-decimals)


def test_the_submitted_result_of_public_logs(tmp_path: Path) -> None:
    """By the rule, except for `known_wrong` ones; with submission.json, which finds any line."""
    wrong, lost = [], []
    for row in CORPUS:
        runs = read_text(tmp_path, row["text"] + "\n").runs
        last = next((result for run in reversed(runs) if (result := headline(run))), None)
        if "not_judgeable" not in row and not is_right(last and last.val_bpb, row["submitted"]):
            wrong.append((row["pr"], row["record"], row["submitted"], last))
            assert row.get("known_wrong"), wrong[-1]
        for run in runs:
            run.seed = 1
        entries = submitted(runs, {"seed_results": {"1": row["submitted"]}})
        if len(entries) != 1 or not is_right(entries[0].result.val_bpb, row["submitted"]):
            lost.append((row["pr"], row["record"], row["submitted"], entries))
            continue
        line = row["text"].splitlines()[entries[0].result.line - 1]
        assert str(entries[0].result.val_bpb)[:4] in line, "of that very line"
    judged = sum("not_judgeable" not in row for row in CORPUS)
    assert len(CORPUS) >= 150 and judged >= 0.9 * len(CORPUS)
    assert len(wrong) == sum("known_wrong" in row for row in CORPUS) <= 0.03 * judged, wrong
    assert len(lost) <= 0.01 * len(CORPUS), lost


# Result lines of a log, the result that is submitted, how many behind it are taken for failed.
RULE = """
final_a val_bpb:1.2000; final_b val_bpb:1.1000                                       | 1.1    | 0
final_a val_bpb:1.1000; final_b val_bpb:1.2000                                       | 1.2    | 0
final_a val_bpb:1.1000; final_b val_bpb:1.9000                                       | 1.1    | 1
final_a val_bpb:1.1000; final_b val_bpb:nan                                          | 1.1    | 1
final_a val_bpb:1.1000; legal_ttt val_bpb:1.1100                                     | 1.1    | 1
final_a val_bpb:1.9000; final_b val_bpb:1.1000; final_c val_bpb:nan                  | 1.1    | 1
final_a val_bpb:1.0900; sliding val_bpb:1.0800; quantized_ttt val_bpb:1.0850         | 1.08   | 1
sliding val_bpb:1.0800; mix_bpb=0.9700; quantized_ttt val_bpb:1.0790                 | 1.079  | 0
final_q val_bpb:1.1967; ttt:done val_bpb:1.1301; final_q val_bpb:1.1967              | 1.1301 | 0
mix bpb=1.0049 nn_bpb=1.0805; sliding_window val_bpb:1.0049 eval_time:5ms            | 1.0049 | 0
int6_exact val_bpb:0.71594908; sliding_exact val_bpb:0.84693639; \
final_int8_zlib_roundtrip_exact val_bpb:0.84693639                               | 0.84693639 | 0
int8 bpb:1.09; mix_bpb:0.82019110; a_ttt bpb:1.07094129; mix_ttt bpb:0.82019110   | 0.8201911 | 0
int8 bpb:1.09; mix_bpb:0.8202; a_ttt bpb:1.0709; mix_ttt bpb:0.8202                  | 1.0709 | 0
final_q bpb:1.19671234; quantized_ttt bpb:1.13012345; result bpb:1.19671234      | 1.13012345 | 0
slide val_bpb:1.4155 eval_time:9ms; slide_exact val_bpb:1.41550001; \
final_int8_zlib_roundtrip_exact val_bpb:1.41550001                               | 1.41550001 | 0
ttt:done val_bpb=1.400000 elapsed=410.5s; legal_ttt_exact val_bpb:1.40000012     | 1.40000012 | 0
final_q val_bpb:1.4333; slide val_bpb:1.4155 eval_time:9ms; legal_ttt val_bpb:1.4000; \
slide: val_bpb=1.4155 roundtrip: val_bpb=1.4333                                      | 1.4    | 0
pre_quant val_bpb:1.2000; final_a val_bpb:1.2000                                     | 1.2    | 0
final_a val_bpb:1.2; final_b val_bpb:1.1; final_a val_bpb:1.2                        | 1.1    | 0
final_a val_bpb:1.20; final_c val_bpb:1.1500; final_b val_bpb:1.2040                 | 1.204  | 0
final_a val_bpb:1.2040; final_c val_bpb:1.1500; summary_a val_bpb:1.20               | 1.15   | 0
final_q val_bpb:1.1967; ttt:done val_bpb:1.1301; result_q val_bpb:1.1967             | 1.1301 | 0
raw_bpb: 1.1555; control=eval_only control_bpb=1.43; ema_bpb: 1.2                    | none   | 0
"""


@pytest.mark.parametrize("row", RULE.strip().splitlines())
def test_the_last_one_that_has_not_failed(tmp_path: Path, row: str) -> None:
    """Another mixture is no measure of what adaptation did; the challenge's own name says that a
    much worse result is meant; a summary moves nothing, an evaluation under its own name does."""
    text, value, failed = row.rsplit("|", 2)
    lines = text.strip().replace("; ", "\n")
    [run] = read_text(tmp_path, f"{TRAINED.format(seed=1)}{lines}\n").runs
    result = headline(run)
    assert (result and result.val_bpb) == (None if "none" in value else float(value))
    assert len(passed_over(run)) == int(failed)
    assert len(run.results) == lines.count("bpb"), "nothing is dropped"


@pytest.mark.parametrize("line", ["ttt run_bpb=1.1", "sw rank:3 DONE val_bpb=1.1"])
def test_what_one_rank_has_so_far_is_no_result(tmp_path: Path, line: str) -> None:
    text = f"{TRAINED.format(seed=1)}final_a val_bpb:1.2000\n{line}\n"
    [run] = read_text(tmp_path, text).runs
    assert headline(run).val_bpb == 1.2 and len(run.results) == 1


def seeds(folder: Path, stem: str, values: list[float]) -> list[Run]:
    """Runs with two stages before the last one, which is 0.01 and 0.3 better."""
    runs = []
    for seed, value in enumerate(values, 1):
        results = f"pre_quant bpb: {value + 0.3}\nQuantized BPB: {value + 0.01:.6f}\n"
        results += f"Quantized BPB: {value:.6f}\n"
        text = TRAINED.format(seed=seed) + results
        runs += read_text(folder, text, f"{stem}_seed{seed}.log").runs
    return runs


@pytest.mark.parametrize(
    "row",
    [
        (None, "aaabbb", [1.1, 1.11, 1.12, 1.2, 1.21, 1.22]),
        ({"val_bpb": 1.11}, "aaa", [1.1, 1.11, 1.12]),
        ({"val_bpb": Decimal("1.21")}, "bbb", [1.2, 1.21, 1.22]),
        ({"val_bpb": 1.22}, "bbb", [1.21, 1.22, 1.23]),  # the mean of the first results
        ({"seed_results": {"1": {"val_bpb": 1.2}, "2": {"val_bpb": 1.12}}}, "ba", [1.2, 1.12]),
        ({"seeds": [7, {"seed": 3, "bpb": 1.12}], "val_bpb": 1.0}, "a", [1.12]),
        ({"seed_2": {"val_bpb": 1.21}}, "b", [1.21]),
        ({"val_bpb": 0.5}, "aaa", [1.1, 1.11, 1.12]),  # nowhere: by the rule
        ({"val_bpb": Decimal("1.23000")}, "bbb", [1.21, 1.22, 1.23]),  # the first result of one run
        ({"val_bpb": 1.23}, "aaa", [1.1, 1.11, 1.12]),  # of so few digits it may be chance
        ({"seed_results": {"1": 1.5, "2": 1.51}}, "bb", [1.5, 1.51]),  # before quantisation
        ({"seed_results": {"1": "x"}, "val_bpb": 1.21}, "bbb", [1.2, 1.21, 1.22]),
        ({"seed_results": {"9": 1.1}, "val_bpb": 1.21}, "bbb", [1.2, 1.21, 1.22]),
        ({"seed_results": {"1": 1.1, "2": 1.11}, "val_bpb": 1.12}, "aaa", [1.11, 1.12, 1.13]),
    ],
)
def test_the_runs_of_a_submission(tmp_path: Path, row: tuple[Any, str, list[float]]) -> None:
    submission, names, values = row
    runs = [*seeds(tmp_path, "a", [1.1, 1.11, 1.12]), *seeds(tmp_path, "b", [1.2, 1.21, 1.22])]
    entries = submitted(runs, submission)
    assert "".join(Path(entry.run.path).name[0] for entry in entries) == names
    assert [entry.result.val_bpb for entry in entries] == pytest.approx(values)


def test_several_runs_in_one_file_are_seeds(tmp_path: Path) -> None:
    """Of a seed that was run twice the last run counts."""
    text = "".join(log_text(seed=seed, nats=2 + seed / 100) for seed in (1, 2, 3))
    runs = read_text(tmp_path, log_text(seed=1, nats=4) + text).runs
    mean = sum(headline(run).val_bpb for run in runs[1:]) / 3
    entries = submitted(runs, {"val_bpb": round(mean, 8)})
    assert [(entry.run.seed, entry.run.number) for entry in entries] == [(1, 2), (2, 3), (3, 4)]
    assert entries[0].result.eval_ms == 2100 and entries[0].result.line == 23 + 22
