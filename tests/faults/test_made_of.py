"""A run knows what it is made of: script, tokenizer, shards and fixed settings. Ranks that differ
end at once, RESUME over other things is refused by name, and the log holds the script that ran."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, SETTINGS, config_of, train_gpt, write_shard

from faults.live import Live, assert_same_result, edited

Whole = Callable[[int], Live]
FIXED = {  # each fixed setting, and another value of it
    "SEED": 7,
    "TRAIN_BATCH_TOKENS": 4096,
    "TRAIN_SEQ_LEN": 16,
    "NUM_LAYERS": 1,
    "MODEL_DIM": 64,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "MLP_MULT": 3,
    "TIE_EMBEDDINGS": 0,
    "ROPE_BASE": 5000.0,
    "LOGIT_SOFTCAP": 20.0,
    "CONTROL_TENSOR_NAME_PATTERNS": "q_gain,resid_mix",
    "VOCAB_SIZE": 270,
}


def another(data: dict, folder: Path) -> Path:
    """A copy of the data in another place."""
    return shutil.copytree(str(data["DATA_PATH"]), folder)


def paths(folder: Path) -> dict[str, object]:
    return {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json"}


def change_last_token(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def rewrite_tokenizer(path: Path) -> None:
    path.write_text('{"offset": 4, "kind": "byte"}')


# Identity


def test_a_shards_identity_changes_with_any_of_its_blocks(tmp_path: Path) -> None:
    """16 blocks of 64 KiB, the header and the end among them."""
    tokens = np.random.default_rng(1).integers(1, 1000, 2_000_000)
    path = write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    count, identity = train_gpt.identify_shard(path)
    assert count == 2_000_000 and re.fullmatch(r"2000000 tokens, [0-9a-f]{8}", identity)
    content = path.read_bytes()
    starts = np.linspace(0, len(content) - 65_536, 16).astype(int)
    places = [100, len(content) - 1, *starts[1:], *(starts + 65_535)]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert train_gpt.identify_shard(path)[1] != identity, place
    path.write_bytes(content)
    assert train_gpt.identify_shard(path) == (count, identity)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["000000", "000001", "000003"], "000003"),
        (["000002"], "000002"),
        (["000001", "000003"], "000003"),
        (["000000", "000000 (copy)", "000001"], "000000 (copy)"),
        (["000000.old", "000000"], "000000.old"),
    ],
)
def test_a_missing_number_or_a_stray_copy_is_refused(
    tmp_path: Path, names: list[str], named: str
) -> None:
    for name in names:
        write_shard(tmp_path / f"fineweb_train_{name}.bin", np.arange(1, 50))
    words = "expected number .* next: get it, or move this"
    with pytest.raises(train_gpt.RunError, match=words) as error:
        train_gpt.Shards(config_of(DATA_PATH=tmp_path), "train")
    assert str(error.value).startswith(f"{tmp_path}/fineweb_train_{named}.bin: ")


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_of_shards_begin_at_0_or_1(tmp_path: Path, first: int) -> None:
    for number in range(first, first + 12):
        write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", np.arange(1, 50))
    assert len(train_gpt.Shards(config_of(DATA_PATH=tmp_path), "train").paths) == 12


def test_the_log_says_what_a_run_is_made_of(data: dict, whole: Whole) -> None:
    [event] = whole(0).events("made_of")
    script = (ROOT / "train_gpt.py").read_bytes()
    tokenizer = Path(data["TOKENIZER_PATH"]).read_bytes()
    assert event["script"] == hashlib.sha256(script).hexdigest()
    assert event["tokenizer"] == hashlib.sha256(tokenizer).hexdigest()
    for split, tokens in (("train", 50_000), ("val", 2000)):
        assert re.fullmatch(f"{tokens} tokens, [0-9a-f]{{8}}", event[f"fineweb_{split}_000000.bin"])
    settings = {name: value for name, value in event.items() if name.isupper()}
    assert FIXED.keys() < settings.keys() < SETTINGS and settings["MODEL_DIM"] == "32"
    assert whole(0).load(20)["made_of"] == {
        name: value for name, value in event.items() if name not in ("event", "time")
    }


def test_a_validation_shard_that_is_a_training_shard_is_said(tmp_path: Path, data: dict) -> None:
    folder = another(data, tmp_path / "data")
    shutil.copy(folder / "fineweb_train_000000.bin", folder / "fineweb_val_000000.bin")
    run = Live(tmp_path / "run", **data | paths(folder) | {"ITERATIONS": 1}).finish()
    assert "WARNING: a validation shard is a training shard, too: 50000 tokens, " in run.log


# RESUME

CHANGES = {
    "fineweb_train_000000.bin": change_last_token,
    "fineweb_val_000000.bin": change_last_token,
    "byte.json": rewrite_tokenizer,
}


@pytest.mark.parametrize("name", CHANGES)
def test_resume_on_other_data_is_refused_by_name(
    tmp_path: Path, data: dict, whole: Whole, name: str
) -> None:
    folder = another(data, tmp_path / "data")
    CHANGES[name](folder / name)
    run = Live(
        shutil.copytree(whole(0).folder, tmp_path / "run"),
        **data | paths(folder) | {"RESUME": "auto", "ITERATIONS": 24},
    )
    assert run.end() == [1] and run.text("logs/r.jsonl") == whole(0).text("logs/r.jsonl")
    called = "tokenizer" if name == "byte.json" else name
    was = whole(0).load(20)["made_of"][called]
    [line] = run.said
    start = "rank 0: RESUME=checkpoints/r/step_00000020.pt is of other things: "
    found = re.fullmatch(rf"{start}{called}: (.+) here, (.+) there: restore that, or .*", line)
    assert found[2] == was != found[1]


def test_resume_with_other_fixed_settings_names_each_with_both_values(
    tmp_path: Path, data: dict, whole: Whole
) -> None:
    (tmp_path / "other.json").write_text('{"kind": "byte", "offset": 14}')
    other = FIXED | {"TOKENIZER_PATH": tmp_path / "other.json"}
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    run = Live(folder, **data | other | {"RESUME": "auto", "ITERATIONS": 24})
    assert run.end() == [1]
    [line] = run.said
    named = {name: pair for name, *pair in re.findall(r"(\w+): (\S+) here, (\S+) there", line)}
    was = whole(0).load(20)["made_of"]
    for name, value in FIXED.items():
        here = str(bool(value)) if name == "TIE_EMBEDDINGS" else str(value)
        assert named[name] == [here, was[name]], name
    assert run.checkpoints() == [4, 8, 12, 16, 20]


def test_resume_with_a_missing_or_another_shard_is_refused(
    tmp_path: Path, data: dict, whole: Whole
) -> None:
    folder = another(data, tmp_path / "data")
    write_shard(folder / "fineweb_train_000001.bin", np.arange(1, 100))
    run = Live(
        shutil.copytree(whole(0).folder, tmp_path / "run"),
        **data | paths(folder) | {"RESUME": "auto", "ITERATIONS": 24},
    )
    assert run.end() == [1] and "fineweb_train_000001.bin: 99 tokens" in run.said[0]
    assert "missing there" in run.said[0]


def test_resume_with_another_script_is_said_and_continues(
    tmp_path: Path, data: dict, whole: Whole
) -> None:
    folder = shutil.copytree(whole(0).folder, tmp_path / "run")
    for step in (12, 16, 20):
        (folder / "checkpoints" / "r" / f"step_{step:08d}.pt").unlink()
    edit = {'"""Train a small GPT': '"""Train the same small GPT'}
    run = Live(folder, 0, edit, **data | {"RESUME": "auto"}).finish()
    hashes = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "edited.py", ROOT / "train_gpt.py")
    ]
    words = "WARNING: RESUME continues with another script: {} here, {} there"
    assert words.format(*hashes) in run.log and run.resumed() == [8]
    assert_same_result(run, whole(0))


def test_data_that_has_moved_is_the_same(tmp_path: Path, data: dict, whole: Whole) -> None:
    folder = another(data, tmp_path / ("long" * 50) / "data")
    run = Live(
        shutil.copytree(whole(0).folder, tmp_path / "run"),
        **data | paths(folder) | {"RESUME": "auto", "ITERATIONS": 24},
    ).finish()
    assert run.resumed() == [20]


# Ranks


def test_ranks_that_differ_end_before_the_first_step(tmp_path: Path, data: dict) -> None:
    """As on two machines of which one was not updated. One line names all that differs."""
    folder = another(data, tmp_path / "data")
    for name, change in CHANGES.items():
        change(folder / name)
    edits = {'"""Train a small GPT': '"""Train another small GPT'}
    other = paths(folder) | {"LOGIT_SOFTCAP": 20, "GRAD_ACCUM_STEPS": 2, "edits": edits}
    run = Live(tmp_path / "run", 2, other=other, **data)
    assert set(run.end()) == {1} and "step:1/" not in run.out
    [line] = [line for line in run.said if line.startswith("rank 1: ")]
    assert line.startswith("rank 1: not the same as rank 0: ") and line.endswith("copy rank 0's")
    named = set(re.findall(r"([\w.]+): [^:]+ here, [^:]+ there", line))
    settings = {"LOGIT_SOFTCAP", "GRAD_ACCUM_STEPS"}
    assert named == {"script", "tokenizer", *settings, *CHANGES} - {"byte.json"}
    assert "LOGIT_SOFTCAP: 20.0 here, 30.0 there" in line


# The script's text


def test_a_script_that_is_edited_while_it_runs_is_logged_as_it_ran(
    tmp_path: Path, data: dict, whole: Whole
) -> None:
    """The log's text, the size of the code and the hash are of what was loaded."""
    edits = {
        "        prime(self)\n": "        Path(sys.argv[0]).write_text('another experiment')\n"
        "        prime(self)\n"
    }
    run = Live(tmp_path, 0, edits, **data).finish()
    text = edited(tmp_path / "again.py", edits).read_bytes()
    assert run.script.read_text() == "another experiment"
    assert run.text("logs/r.txt").startswith(text.decode() + "\n" + "=" * 100)
    assert run.events("made_of")[0]["script"] == hashlib.sha256(text).hexdigest()
    assert run.events("artifact")[0]["code_bytes"] == len(text)
    assert f"Code size: {len(text)} bytes" in run.log
    assert_same_result(run, whole(0))
