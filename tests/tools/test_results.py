"""tools/results.py: which result of a run counts, and what submission.json says of it.

corpus/results.jsonl holds the result lines of 58 public logs of the challenge's record folders,
merged and proposed, with the number that was submitted; `because` says why a log is in it.
"""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from made_logs import read_text
from results import headline, passed_over, submitted
from running import ROOT
from runs import Run

ROWS = (ROOT / "tests/tools/corpus/results.jsonl").read_text(encoding="utf-8").splitlines()
CORPUS = [json.loads(row) for row in ROWS]
TRAINED = "seed:{seed}\nstep:9/9 train_loss:2.0 train_time:99ms\n"


@pytest.mark.parametrize("row", CORPUS, ids=lambda row: f"{row['record']}-{row['log']}"[:60])
def test_the_result_of_a_public_log(tmp_path: Path, row: dict[str, Any]) -> None:
    [run] = read_text(tmp_path, row["text"] + "\n").runs
    value = headline(run).val_bpb
    decimals = len(repr(row["submitted"]).partition(".")[2])
    right = abs(value - row["submitted"]) <= max(1e-4, 0.51 * 10.0**-decimals)
    assert right != row["because"].startswith("wrong: ")


# Result lines of a log, the result that counts, how many after it are taken for failed.
RULE = """
final_a val_bpb:1.2000; final_b val_bpb:1.1000                                       | 1.1    | 0
final_a val_bpb:1.1000; final_b val_bpb:1.2000                                       | 1.2    | 0
final_a val_bpb:1.1000; final_b val_bpb:1.9000                                       | 1.1    | 1
final_a val_bpb:1.1000; final_b val_bpb:nan                                          | 1.1    | 1
final_a val_bpb:1.9000; final_b val_bpb:1.1000; final_c val_bpb:nan                  | 1.1    | 1
slide val_bpb:1.4155 eval_time:9ms; slide_exact val_bpb:1.41550001                | 1.41550001 | 0
ttt:done val_bpb=1.400000 elapsed=410.5s; legal_ttt_exact val_bpb:1.40000012      | 1.40000012 | 0
final_a val_bpb:1.2; al_bpb: 1.0762                                                  | 1.2    | 0
[summary] latest_checkpoint_val_bpb=1.1506                                           | none   | 0
pre_ttt_bpb=1.41 post_ttt_bpb=1.4                                                    | 1.4    | 0
{"val_loss": 2.3, "val_bpb": 1.4, "kind": "last"}                                    | 1.4    | 0
Sliding window BPB (stride=64): 1.4; delta_bpb: -0.0031; the cap is bpb 1.4          | 1.4    | 0
final_a val_bpb:1.2; ttt_chunk [1871/1893] bpb=1.4 time=405.1s;   [500/969088] bpb=1 | 1.2    | 0
raw_bpb: 1.1555; control=eval_only control_bpb=1.43; ema_bpb: 1.2                    | none   | 0
final_a val_bpb:1.2; ttt run_bpb=1.1; sw rank:3 DONE val_bpb=1.1                     | 1.2    | 0
"""


@pytest.mark.parametrize("row", RULE.strip().splitlines())
def test_the_last_result_that_did_not_break_counts(tmp_path: Path, row: str) -> None:
    """A better one before it does not; a fragment of a line, or a checkpoint, is not a result."""
    text, value, failed = row.rsplit("|", 2)
    lines = text.strip().replace("; ", "\n")
    [run] = read_text(tmp_path, f"{TRAINED.format(seed=1)}{lines}\n").runs
    result = headline(run)
    assert (result and result.val_bpb) == (None if "none" in value else float(value))
    assert len(passed_over(run)) == int(failed)


def test_what_is_printed_while_training_is_not_a_result(tmp_path: Path) -> None:
    lines = "step:1/3 train_loss:2.0\nBPB (EMA, stride=64): 0.975\nstep:3/3 train_loss:2.0\n"
    [run] = read_text(tmp_path, f"seed:1\n{lines}").runs
    assert headline(run) is None and len(run.steps) == 2


def seeds(folder: Path, stem: str, values: list[float]) -> list[Run]:
    """Runs with a stage before the last one, which is 0.01 better."""
    runs = []
    for seed, value in enumerate(values, 1):
        results = f"Quantized BPB: {value + 0.01:.6f}\nQuantized BPB: {value:.6f}\n"
        text = TRAINED.format(seed=seed) + results
        runs += read_text(folder, text, f"{stem}_seed{seed}.log").runs
    return runs


@pytest.mark.parametrize(
    "row",
    [
        (None, "aaabbb", [1.1, 1.11, 1.12, 1.2, 1.21, 1.22]),
        ({"val_bpb": 1.11}, "aaa", [1.1, 1.11, 1.12]),
        ({"val_bpb": Decimal("1.21")}, "bbb", [1.2, 1.21, 1.22]),
        ({"seed_results": {"1": {"val_bpb": 1.2}, "2": {"val_bpb": 1.12}}}, "ba", [1.2, 1.12]),
        ({"seeds": [7, {"seed": 3, "bpb": 1.12}], "val_bpb": 1.12}, "a", [1.12]),
        ({"seed_2": {"val_bpb": 1.22}}, "b", [1.22]),  # an earlier line of that run
        ({"val_bpb": 0.5}, "aaa", [1.1, 1.11, 1.12]),  # nowhere: by the rule
        ({"seed_results": {"9": 1.1}, "val_bpb": 1.21}, "bbb", [1.2, 1.21, 1.22]),
    ],
)
def test_the_runs_of_a_submission(tmp_path: Path, row: tuple[Any, str, list[float]]) -> None:
    submission, names, values = row
    runs = [*seeds(tmp_path, "a", [1.1, 1.11, 1.12]), *seeds(tmp_path, "b", [1.2, 1.21, 1.22])]
    entries = submitted(runs, submission)
    assert "".join(Path(entry.run.path).name[0] for entry in entries) == names
    assert [entry.result.val_bpb for entry in entries] == pytest.approx(values)
