"""Tests of a run's fingerprint: script, tokenizer, shards and fixed settings.

Ranks with different fingerprints end at once. RESUME with another fingerprint is refused, with the
differences. The log holds the script that ran.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults.live import Live, assert_same_result, write_edited_script
from running import ROOT, write_shard

ReferenceRun = Callable[[int], Live]
# Every fixed setting, with a value that differs from the reference run's.
FIXED = {"SEED": 7, "TRAIN_BATCH_TOKENS": 4096, "TRAIN_SEQ_LEN": 16, "NUM_LAYERS": 1}
FIXED |= {"MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "MLP_MULT": 3, "TIE_EMBEDDINGS": 0}
FIXED |= {"ROPE_BASE": 5000.0, "LOGIT_SOFTCAP": 20.0, "VOCAB_SIZE": 270}
FIXED |= {"CONTROL_TENSOR_NAME_PATTERNS": "q_gain,resid_mix"}


def data_settings(folder: Path) -> dict[str, object]:
    return {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json"}


def change_last_token(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


CHANGES = {
    "fineweb_train_000000.bin": change_last_token,
    "fineweb_val_000000.bin": change_last_token,
    "byte.json": lambda path: path.write_text('{"offset": 4, "kind": "byte"}'),
}
ADDITIONS = {  # with more shards, the batches after the end of the smaller data set differ
    "fineweb_train_000001.bin": lambda path: write_shard(path, np.arange(1, 100)),
    ".producing": lambda path: path.write_text('{"val_complete": true}'),
}


@pytest.mark.parametrize("name", CHANGES | ADDITIONS)
def test_resume_with_other_data_is_refused(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, name: str
) -> None:
    folder = shutil.copytree(data["DATA_PATH"], tmp_path / "data")
    (CHANGES | ADDITIONS)[name](folder / name)
    before = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    run = Live(before, **data | data_settings(folder) | {"RESUME": "auto", "ITERATIONS": 24})
    assert run.wait_for_exit() == [1] and "Traceback" not in run.err and len(run.error_lines) == 1
    assert run.read("logs/r.jsonl") == reference_run(0).read("logs/r.jsonl")
    if name == ".producing":
        assert "was complete, but this one is still being made; use the data" in run.error_lines[0]
        return
    listed_as = {"byte.json": "tokenizer"}.get(name, name)
    was = reference_run(0).load_checkpoint(20)["made_of"].get(listed_as, "missing")
    start = r"rank 0: RESUME=checkpoints/r/step_00000020.pt of \S+ does not match this run: "
    words = rf"{start}{listed_as}: (.+) in this run, (.+) in the checkpoint; use the data and .*"
    found = re.fullmatch(words, run.error_lines[0])
    assert found[2] == was != found[1]


def test_resume_lists_each_fixed_setting_that_differs(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    (tmp_path / "other.json").write_text('{"kind": "byte", "offset": 14}')
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    was = reference_run(0).load_checkpoint(20)["made_of"]
    items = list(FIXED.items())
    for other in map(dict, (items[:5], items[5:10], items[10:])):
        if "VOCAB_SIZE" in other:
            other["TOKENIZER_PATH"] = tmp_path / "other.json"
        run = Live(folder, **data | other | {"RESUME": "auto", "ITERATIONS": 24})
        assert run.wait_for_exit() == [1]
        named = re.findall(r"(\w+): (\S+) in this run, (\S+) in the checkpoint", run.error_lines[0])
        for name, *pair in named:
            here = str(bool(other[name])) if name == "TIE_EMBEDDINGS" else str(other.get(name))
            assert name == "tokenizer" or pair == [here, was[name]]
        assert {name for name, *_ in named} >= other.keys() - {"TOKENIZER_PATH"}
    assert run.checkpoint_steps() == [4, 8, 12, 16, 20]


def test_resume_with_another_script_continues(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """Data that was moved to another folder counts as the same data."""
    moved = shutil.copytree(data["DATA_PATH"], tmp_path / ("long" * 50) / "data")
    folder = shutil.copytree(reference_run(0).folder, tmp_path / "run")
    for step in (12, 16, 20):
        (folder / "checkpoints" / "r" / f"step_{step:08d}.pt").unlink()
    edit = {'"""Train a small GPT': '"""Train the same small GPT'}
    run = Live(folder, 0, edit, **data | data_settings(moved) | {"RESUME": "auto"}).finish()
    scripts = (folder / "edited.py").read_bytes(), (ROOT / "train_gpt.py").read_bytes()
    hashes = [hashlib.sha256(script).hexdigest() for script in scripts]
    words = "WARNING: RESUME continues with another script: {} in this run, {} in the checkpoint"
    assert words.format(*hashes) in run.text and run.resumed_steps() == [8]
    assert_same_result(run, reference_run(0))


def test_ranks_that_differ_end_before_the_first_step(tmp_path: Path, data: dict) -> None:
    """For example, one of two machines was not updated. One line lists all differences."""
    folder = shutil.copytree(data["DATA_PATH"], tmp_path / "data")
    for name, change in CHANGES.items():
        change(folder / name)
    edits = {'"""Train a small GPT': '"""Train another small GPT'}
    other = data_settings(folder) | {"MODEL_DIM": 64, "edits": edits}
    run = Live(tmp_path / "run", 2, other=other, **data)
    assert run.wait_for_exit() == [2, 2] and "Traceback" not in run.err and run.out == ""
    for rank, line in enumerate(sorted(run.error_lines)):
        assert line.startswith(f"rank {rank}: rank 1 differs from rank 0: ")
        assert line.endswith("rank 0's files and settings")
        assert "MODEL_DIM: 64 on rank 1, 32 on rank 0" in line
        named = set(re.findall(r"([\w.]+): [^:]+ on rank 1, [^:]+ on rank 0", line))
        assert named == {"script", "tokenizer", "MODEL_DIM", *CHANGES} - {"byte.json"}
    assert not (run.folder / "logs").exists() and not (run.folder / "checkpoints").exists()


def test_a_changed_script_is_logged_as_it_ran(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """The log's text, the code size and the hash are those of the script that was loaded."""
    line = "        warm_up(self)\n"
    edits = {line: f"        Path(sys.argv[0]).write_text('another experiment')\n{line}"}
    run = Live(tmp_path, 0, edits, **data).finish()
    text = write_edited_script(tmp_path / "again.py", edits.items()).read_bytes()
    assert run.script.read_text() == "another experiment"
    assert run.read("logs/r.txt").startswith(text.decode() + "\n" + "=" * 100)
    assert run.events("made_of")[0]["script"] == hashlib.sha256(text).hexdigest()
    assert run.events("artifact")[0]["code_bytes"] == len(text)
    assert f"Code size: {len(text)} bytes" in run.text
    assert_same_result(run, reference_run(0))
