"""Tests of a run as a user sees it.

They check the lines and events of the log, the score and the artifact. The number of ranks and of
micro-steps changes results by rounding only, and the time limit ends all ranks in time.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.live import Live, assert_same_result, edit_each_step
from running import ROOT, SMALL_MODEL, Corpus, Run, make_config, run_trainer, train_gpt

ReferenceRun = Callable[[int], Live]
# The lines of a log in their order. The head of the file explains the placeholders in brackets.
LINES = (ROOT / "tests/log_lines.txt").read_text("utf-8").splitlines()[2:]
PLACEHOLDERS = {"n": r"\d+", "*": r"\S+", "**": ".+", "step": r"data_crc:[0-9a-f]{8} eta:\d+s"}
PLACEHOLDERS |= {f".{digits}f": rf"\d+\.\d{{{digits}}}" for digits in (2, 3, 4, 8)}


def line_pattern(line: str) -> str:
    """Return a regular expression for a line of LINES."""
    parts = re.split("<(.*?)>", line)
    parts[0::2] = map(re.escape, parts[0::2])
    parts[1::2] = [PLACEHOLDERS[name] for name in parts[1::2]]
    return "".join(parts) + "( .*)?"


@pytest.fixture(scope="module")
def reference(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run 60 steps with `python train_gpt.py` and a small model, after two warm-up steps."""
    folder = tmp_path_factory.mktemp("reference")
    settings = {**corpus.env, **SMALL_MODEL, "ITERATIONS": 60, "RUN_ID": "reference"}
    settings |= {"TRAIN_LOG_EVERY": 20, "VAL_LOSS_EVERY": 30, "WARMUP_STEPS": 2}
    settings |= {"WORLD_SIZE": 8, "RANK": "", "LOCAL_RANK": 3}  # a launcher left these behind
    settings |= {"SEEDS": "1,2", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}  # another program's
    done = run_trainer(folder, **settings)
    assert done.code == 0, done.err[-2000:]
    return done


def test_the_log_has_every_line_of_the_challenges_log(reference: Run) -> None:
    lines, position = reference.out.splitlines(), 0
    for line in LINES:
        pattern = line_pattern(line)
        matches = [i for i in range(position, len(lines)) if re.fullmatch(pattern, lines[i])]
        assert matches, f"no `{line}` after line {position}:\n{reference.out}"
        position = matches[0] + 1
    trained = re.findall(r"^step:(\d+)/60 train_loss", reference.text, re.MULTILINE)
    assert [int(step) for step in trained] == [*range(1, 11), 20, 40, 60]


def test_the_file_begins_with_the_script_and_the_console_does_not(reference: Run) -> None:
    script = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    text = reference.log_path.read_text(encoding="utf-8")
    assert text.startswith(script)
    rule = "=" * 100 + "\n"
    before, versions, lines = text[len(script) :].split(rule)
    assert before.strip() == ""
    assert re.match(r"Running Python .*\nRunning PyTorch ", versions)
    assert "import " not in reference.out
    *lines, score, end = lines.splitlines()
    assert score.startswith("final_int8_zlib_roundtrip_exact ") and end == "finished"
    console = iter(reference.out.splitlines())
    assert all(line in console for line in [*lines, score]), (
        "the console has the lines in this order"
    )
    assert list(console) == ["finished: see logs/reference.txt"]
    assert reference.err == "", "a run without trouble prints nothing to stderr"


def test_events_have_the_values_of_the_lines(reference: Run) -> None:
    text = reference.log_path.with_suffix(".jsonl").read_text(encoding="utf-8")
    events = [json.loads(line) for line in text.splitlines()]
    names = [event["event"] for event in events]
    assert names[:4] == ["run", "config", "made_of", "hardware"]
    assert names[-3:] == ["artifact", "score", "end"]
    assert (events[-1]["status"], events[-1]["exit_code"]) == ("finished", 0)
    shown = {"iterations": 60, "model_dim": 32, "tie_embeddings": True}
    assert shown.items() <= events[1].items()
    losses = [f"{event['train_loss']:.4f}" for event in reference.events("step")]
    assert losses == reference.values("train_loss")
    scores = [f"{event['val_bpb']:.4f}" for event in reference.events("validation")]
    assert scores == reference.values("val_bpb")[:-2]
    [score] = reference.events("score")
    assert f"{score['val_bpb']:.8f}" == reference.values("val_bpb")[-1]


def test_events_and_fields_are_those_in_logs_readme(reference: Run) -> None:
    text = (ROOT / "logs" / "README.md").read_text(encoding="utf-8")
    text = text.split("## `<RUN_ID>.jsonl`")[1]
    table = re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in table}
    documented["config"] = set(vars(make_config()))  # "every setting"
    written: dict[str, set[str]] = {}
    for event in map(json.loads, reference.log_path.with_suffix(".jsonl").open(encoding="utf-8")):
        written.setdefault(event["event"], set()).update(event.keys() - {"event", "time"})
    assert written.keys() == documented.keys() - {"rank_failed"}  # only a run that fails writes it
    for name in written.keys() - {"made_of"}:
        optional = {"partial_val", "resumed_from", "unknown_targets"}
        assert written[name] == documented[name] - optional, name


def test_losses_fall_and_the_artifact_scores_as_well(reference: Run) -> None:
    first, _, last, _, scored = (float(value) for value in reference.values("val_bpb"))
    assert last < 0.75 * first
    assert abs(scored - last) < 0.05


EQUIVALENT = [(0, 8, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (4, 4, 0)]
EQUIVALENT += [pytest.param(0, 1, 1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@pytest.mark.parametrize(("ranks", "micro_steps", "compiled"), EQUIVALENT)
def test_ranks_micro_steps_and_the_compiler_change_only_rounding(
    reference_run: ReferenceRun,
    data: dict,
    tmp_path: Path,
    ranks: int,
    micro_steps: int,
    compiled: int,
) -> None:
    """Only one rank prints."""
    settings = {"GRAD_ACCUM_STEPS": micro_steps, "TORCH_COMPILE": compiled}
    run = Live(tmp_path, ranks, **data | settings).finish()
    shown = micro_steps or 8 // max(1, ranks)
    assert f"world_size:{max(1, ranks)} grad_accum_steps:{shown}\n" in run.text
    assert run.out.count("seed:1337") == 1
    for found, wanted in zip(run.measurements(), reference_run(0).measurements(), strict=True):
        assert (found[0], found[-1]) == (wanted[0], wanted[-1])  # step, data_crc
        for a, b in zip(found[1:4], wanted[1:4], strict=True):
            assert a == b is None or a == pytest.approx(b, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_optimizer_for_all_parameters_compiles(data: dict, tmp_path: Path) -> None:
    """The edit replaces Adam and Muon by AdamW."""
    made = "        self.adam, self.muon = make_optimizers(self.model, config, runtime)\n"
    own = "        self.adam = torch.optim.AdamW(self.model.parameters(), lr=3e-3)\n"
    edits = {made: own, '"muon": self.muon, ': "", "in self.muon.param_groups:": "in self.groups:"}
    run = Live(tmp_path, 0, edits, **data | {"ITERATIONS": 2, "TORCH_COMPILE": 1}).finish()
    assert len(run.events("score")) == 1


def test_replicas_are_equal_to_the_bit_though_kernels_are_not(data: dict, tmp_path: Path) -> None:
    """Newton-Schulz differs in the last bit on each rank. The run compares weights at its end."""
    line = "                update = self.newton_schulz(nesterov, self.iterations, self.dtype)\n"
    edits = {line: line + "                update = update * (1 + self.runtime.rank * 2.0**-23)\n"}
    Live(tmp_path, 4, edits, **data | {"ITERATIONS": 30}).finish()


def test_a_slow_validation_is_announced(data: dict, tmp_path: Path) -> None:
    """A line says what is computed if a score takes more than three seconds."""
    line = "                self.score(model, batch, sums)\n"
    slow = {line: f"{line}                time.sleep(0.5 if done < 8 else 0)\n"}
    run = Live(tmp_path, 0, slow, **data | {"VAL_BATCH_SIZE": 64, "ITERATIONS": 1}).finish()
    tokens = run.events("run")[0]["val_tokens"]
    words = f"waiting: for the score of {tokens} validation tokens"
    assert run.out.count(words) == len(run.events("validation") + run.events("score"))


def test_partial_validation_is_marked_everywhere(data: dict, tmp_path: Path) -> None:
    settings = {"ITERATIONS": 2, "VAL_TOKENS": 1000, "VAL_PROGRESS_LOG_EVERY": 2}
    run = Live(tmp_path, **{**data, **settings, "VAL_BATCH_SIZE": 256}).finish()
    scores = re.findall(r"^(?:val_loader|.*val_loss).*", run.text, re.MULTILINE)
    assert len(scores) == 5 and all(line.endswith(" partial_val:1") for line in scores)
    assert re.search(r"^val_loader:.* tokens:992 ", run.text, re.MULTILINE)
    for event in run.events("validation") + run.events("score"):
        assert event["partial_val"] == 1
    progress = r"^val_progress:(\w+) batch (\d)/4 partial_mean_loss:\d\.\d{4} tokens_seen:(\d+)$"
    scopes = ("step_0", "step_2", "final_int8_zlib_roundtrip")
    seen = [(scope, *part) for scope in scopes for part in (("2", "512"), ("4", "992"))]
    assert re.findall(progress, run.text, re.MULTILINE) == seen


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_time_limit_ends_all_ranks_in_time(data: dict, tmp_path: Path, ranks: int) -> None:
    """A slow first step, without warm-up steps, does not end the run early."""
    settings = {"ITERATIONS": 100_000, "MAX_WALLCLOCK_SECONDS": 2.5, "VAL_LOSS_EVERY": 0}
    settings["CHECKPOINT_EVERY"] = 0
    slow = edit_each_step("time.sleep(self.step == 0)")
    run = Live(tmp_path, ranks, slow, **data | settings).finish()
    line = r"^stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/100000$"
    milliseconds, steps = map(int, re.search(line, run.text, re.MULTILINE).groups())
    assert 2000 < milliseconds <= 2700 and steps > 10
    assert [event["step"] for event in run.events("validation")] == [steps]
    assert run.events("step")[-1]["step"] == steps, "the last loss is logged"


def test_a_run_that_the_time_limit_ended_stays_ended_after_resume(
    data: dict, tmp_path: Path
) -> None:
    """By the mean time of its steps, of which the first was fast, one more step would fit."""
    settings = data | {"ITERATIONS": 100, "MAX_WALLCLOCK_SECONDS": 1.75, "RESUME": "auto"}
    settings |= {"CHECKPOINT_EVERY": 0, "VAL_LOSS_EVERY": 0}
    slow = edit_each_step("time.sleep(0.6 * (self.step > 0))")
    first = Live(tmp_path, 0, slow, **settings).finish()
    [last] = first.checkpoint_steps()
    artifact, measured = first.artifact(), first.measurements()
    again = Live(tmp_path, 0, slow, **settings).finish()
    assert not again.resumed_steps() and again.measurements() == [*measured, measured[-1]]
    assert again.artifact() == artifact
    longer = Live(tmp_path, 0, slow, **settings | {"MAX_WALLCLOCK_SECONDS": 2.6}).finish()
    assert longer.resumed_steps() == [last] and longer.checkpoint_steps()[-1] > last


def test_a_second_run_in_the_folder_overwrites_no_result(data: dict, tmp_path: Path) -> None:
    first = Live(tmp_path, **data).finish()
    artifact = first.artifact()
    second = Live(tmp_path, **data | {"RUN_ID": "second", "SEED": 2}).finish()
    assert (tmp_path / "logs" / "r.int8.ptz").read_bytes() == artifact != second.artifact()


def test_a_full_disk_loses_lines_of_the_log_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Lines are lost only while the disk is full. The other log, on another disk, has them all."""
    monkeypatch.chdir(tmp_path)
    log = train_gpt.RunLog("r")
    assert log.open(is_new=True) == ""
    log.line("first")
    file = log.files[".txt"].fileno()
    file_copy = os.dup(file)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file)
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    os.dup2(file_copy, file)
    log.line("last")
    log.warn("careful")
    printed = capsys.readouterr()
    assert printed.out == "first\nstep:0\nstep:1\nstep:2\nlast\nWARNING: careful\n"
    assert (
        printed.err.count(
            "WARNING: a line could not be written to logs/r.txt: No space left on device\n"
        )
        == 3
    )
    lines = log.path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    text = log.path.read_text()
    assert text.startswith("first\n") and text.endswith("last\nWARNING: careful\n")


def test_machines_that_share_no_disk_train_as_one(corpus: Corpus, tmp_path: Path) -> None:
    """Each machine has one rank, and its own folder with a copy of the data.

    RESUME takes the newest checkpoint, whichever machine has it. Only rank 0 writes.
    """
    settings = SMALL_MODEL | {"CHECKPOINT_EVERY": 4, "WARMDOWN_ITERS": 0, "VAL_LOSS_EVERY": 0}
    settings |= {"RUN_ID": "r", "RESUME": "auto"}
    one = Live(tmp_path / "one", 2, **settings | corpus.env).finish()
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        shutil.copytree(corpus.folder, folder / "data")
        shutil.copy(corpus.tokenizer, folder / "spm.model")
    settings |= {"DATA_PATH": "data", "TOKENIZER_PATH": "spm.model"}
    for steps in (6, 8, 10):
        settings["ITERATIONS"] = steps
        run = Live(folders[0], 2, other={"folder": folders[1]}, **settings).finish()
        if steps == 6:
            newest = "checkpoints/r/step_00000006.pt"
            (folders[1] / newest).parent.mkdir(parents=True)
            shutil.move(folders[0] / newest, folders[1] / newest)
    assert run.resumed_steps() == [6, 8] and not (folders[1] / "logs").exists()
    assert_same_result(run, one)
