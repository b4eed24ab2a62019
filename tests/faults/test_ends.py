"""Tests of every way in which a run ends: exit code, one line, `end` event, and files."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults.live import Live, assert_same_result, edit_each_step
from running import write_split

ReferenceRun = Callable[[int], Live]
slow = pytest.mark.slow


def edit_at_step(step: int, code: str, rank: int = 0) -> dict[str, str]:
    """Return an edit that runs `code` on one rank in the step after `step`, before a restart."""
    first = 'os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"'
    return edit_each_step(
        f"if self.step == {step} and self.runtime.rank == {rank} and {first}:\n    {code}"
    )


def code_to_kill(number: int) -> str:
    """Return code with which a process sends this signal to itself."""
    return f"os.kill(os.getpid(), {int(number)})"


def assert_interrupted(run: Live, number: int, ranks: int) -> int:
    """Assert that a signal ends the run as documented; return the step of its checkpoint."""
    assert run.wait_for_exit() == [128 + number] * max(1, ranks), run.err
    saved = run.checkpoint_steps()[-1]
    line = f"interrupted after step {saved}; to resume: RUN_ID=r RESUME=auto <command>"
    assert run.error_lines == [line]
    [end] = run.events("end")
    assert (end["status"], end["exit_code"], end["error"]) == ("interrupted", 128 + number, line)
    assert run.load_checkpoint(saved)["step"] == saved and not run.events("score")
    return saved


def assert_failed(run: Live, *words: str) -> str:
    """Assert that the run failed with one line that has these words; return the line."""
    codes = run.wait_for_exit()
    assert set(codes) == {1}, f"{codes} {run.out[-500:]} {run.err[-2000:]}"
    line = next(line for line in run.error_lines if words[0] in line)
    assert all(word in line for word in words), run.err[-3000:]
    [end] = run.events("end")
    assert (end["status"], end["exit_code"]) == ("failed", 1)
    assert end["error"] and (len(codes) > 1 or line == f"rank 0: {end['error']}")
    assert run.text.endswith(f"failed: {end['error']}\n")
    assert not list(run.folder.rglob("*.tmp"))
    return line


IN_VALIDATION = "                if runtime.signum:\n"


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_any_rank_ends_all_ranks_at_the_same_step(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, ranks: int, number: int
) -> None:
    edits = edit_at_step(6, code_to_kill(number), rank=max(0, ranks - 1))
    run = Live(tmp_path, ranks, edits, **data)
    assert assert_interrupted(run, number, ranks) == 7
    again = Live(tmp_path, ranks, **data | {"RESUME": "auto"}).finish()
    assert again.resumed_steps() == [7]
    assert_same_result(again, reference_run(ranks))


def test_ranks_end_when_torchrun_was_killed(tmp_path: Path, data: dict) -> None:
    """They end as after SIGTERM: at the same step, with a checkpoint."""
    edits = edit_each_step("time.sleep(0.05)")
    run = Live(tmp_path, 2, edits, restarts=0, **data | {"ITERATIONS": 1000, "RUN_ID": "r"})
    run.wait_for_line("step:5/")
    run.launcher.kill()
    deadline = time.monotonic() + 60
    while not run.events("end"):
        assert time.monotonic() < deadline, run.out[-800:]
        time.sleep(0.1)
    saved = run.checkpoint_steps()[-1]
    assert run.status == ("interrupted", 128 + signal.SIGTERM)
    assert f"interrupted after step {saved}; to resume: " in run.events("end")[-1]["error"]
    assert " ends, because torchrun was killed" in run.err  # it may reach only one rank in time


def test_a_signal_that_is_read_late_ends_all_ranks_at_the_same_step(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """On CUDA, the host reads the messages of other ranks two steps late."""
    edits = edit_at_step(12, code_to_kill(signal.SIGTERM), rank=1)
    edits |= {"self.read_delay_steps = 2 if self.cuda else 0": "self.read_delay_steps = 2"}
    run = Live(tmp_path, 2, edits, **data | {"TRAIN_LOG_EVERY": 0, "CHECKPOINT_EVERY": 0})
    assert assert_interrupted(run, signal.SIGTERM, 2) == 15
    again = Live(tmp_path, 2, **data | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference_run(2))


def edit_in_validation(condition: str, number: int) -> dict[str, str]:
    """Return an edit that sends a signal during validation, if the condition is true."""
    return {
        IN_VALIDATION: f"                if {condition}: {code_to_kill(number)}\n{IN_VALIDATION}"
    }


SIGNALS = {  # the edit, and the possible steps of the checkpoint
    "warm-up": (
        edit_each_step(f"if self.step == 1 and not self.last_logged[0]: {code_to_kill(15)}"),
        {0, 1},
    ),
    "first validation": (edit_in_validation("True", 15), {0}),
    "last validation": (edit_in_validation("scope == 'step_20' and runtime.rank == 0", 2), {20}),
    "score": (edit_in_validation("scope == FINAL_LABEL", 15), {20}),
}


@pytest.mark.parametrize("place", SIGNALS)
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=slow)])
def test_a_signal_outside_of_steps_loses_no_work(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, place: str, ranks: int
) -> None:
    edits, steps = SIGNALS[place]
    run = Live(tmp_path, ranks, edits, **data | {"WARMUP_STEPS": 3})
    number = signal.SIGINT if place == "last validation" else signal.SIGTERM
    assert assert_interrupted(run, number, ranks) in steps
    again = Live(tmp_path, ranks, **data | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference_run(ranks))


@slow
def test_ctrl_c_to_torchrun_and_its_workers(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """As from a terminal. torchrun passes the signal on, so each rank receives it twice."""
    edits = edit_at_step(6, "Path('reached').touch(); time.sleep(2)")
    run = Live(tmp_path, 2, edits, restarts=0, **data).wait_until((tmp_path / "reached").exists)
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.wait_for_exit() == [1]
    assert run.status == ("interrupted", 130)
    saved = run.checkpoint_steps()[-1]
    again = Live(tmp_path, 2, restarts=0, **data | {"RESUME": "auto"}).finish()
    assert again.resumed_steps() == [saved]
    assert_same_result(again, reference_run(2))


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_dead_rank(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, rank: int
) -> None:
    """With RESUME=auto, the same command serves the start and each restart."""
    edits = edit_at_step(10, code_to_kill(signal.SIGKILL), rank)
    run = Live(tmp_path, 2, edits, restarts=3, **data | {"RESUME": "auto"}).finish()
    assert run.resumed_steps() == [8]
    assert_same_result(run, reference_run(2))


@slow
@pytest.mark.parametrize(("name", "step"), [("step_00000008.pt", 4), ("final_model.int8.ptz", 20)])
def test_a_run_killed_while_writing_keeps_its_last_complete_checkpoint(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, name: str, step: int
) -> None:
    line = "            file.flush()\n"
    kill = f"            if path.name == {name!r}: {code_to_kill(signal.SIGKILL)}\n"
    run = Live(tmp_path, 0, {line: line + kill}, **data)
    assert run.wait_for_exit() == [-signal.SIGKILL]
    assert run.checkpoint_steps()[-1] == step and not (tmp_path / "final_model.int8.ptz").exists()
    again = Live(tmp_path, **data | {"RESUME": "auto"}).finish()
    assert again.resumed_steps() == (
        [step] if step < 20 else []
    )  # after step 20, only the export is left
    assert_same_result(again, reference_run(0))


@pytest.mark.parametrize(("ranks", "late"), [(0, 0), (2, 2)])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_ends_all_ranks(
    tmp_path: Path, data: dict, what: str, ranks: int, late: int
) -> None:
    """The line has the step, and for a loss the rank. No later checkpoint is saved."""
    rank = max(0, ranks - 1)
    bad = {
        "loss": "loss * math.nan",
        "gradient": "loss + (0 * self.model.skip_weights.sum()).sqrt()",
    }
    line = '            with phase("backward"):\n'
    condition = f"self.step == 9 and self.runtime.rank == {rank}"
    edits = f"            with torch.enable_grad():\n                if {condition}:\n"
    edits = {line: f"{edits}                    loss = {bad[what]}\n{line}"}
    edits |= {"self.read_delay_steps = 2 if self.cuda else 0": f"self.read_delay_steps = {late}"}
    run = Live(tmp_path, ranks, edits, **data | {"CHECKPOINT_EVERY": 3, "VAL_LOSS_EVERY": 0})
    assert run.wait_for_exit() == [1] * max(1, ranks), run.err
    subject = f"the loss of rank {rank}" if what == "loss" else "the gradient"
    remedy = (
        "lower the learning rates, or, if an edit makes batches without targets, leave at least "
        "one target in each micro-batch"
    )
    line = f"step 10: {subject} is not finite; {remedy}"
    assert run.error_lines[0] == f"rank 0: {line}" and "Traceback" not in run.err
    [end] = run.events("end")
    assert (end["status"], end["error"]) == ("failed", line)
    assert run.checkpoint_steps() == [3, 6, 9]


@pytest.mark.parametrize("value", ["math.inf", "1e30"])
def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path, data: dict, value: str) -> None:
    """The last step makes weights infinite, or too large for float16."""
    line = "            for optimizer in self.optimizers:\n"
    bad = f"            if self.step == 19:\n                self.model.{{}}.fill_({value})\n"
    name = "tok_emb.weight" if value == "math.inf" else "blocks[0].attn.c_q.weight"
    run = Live(tmp_path, 0, {line: bad.format(name) + line}, **data)
    reason = "has numbers too large for the artifact"
    assert_failed(run, "rank 0: the score is nan, ", reason, "lower the learning rates")
    assert ("step:20/20 val_loss:nan" in run.out) == (value == "math.inf")


ROWS = "next(iter(self.muon.state.values()))['rows']"
PLACE = {  # {place of the state that differs between ranks: an edit that makes it}
    "run.noise": "self.noise = torch.zeros(3) + runtime.rank",
    "muon.state.0.rows": f"{ROWS} = torch.zeros(3) + runtime.rank",
}
NAMED = '"over": self.finished_training, '


@pytest.mark.parametrize("place", PLACE)
def test_state_that_differs_between_ranks_is_an_error_before_the_first_step(
    tmp_path: Path, data: dict, place: str
) -> None:
    """RESUME would replace the state of the other ranks by that of rank 0."""
    line = "        self.val_ms = 0.0"
    edits = {line: f"        {PLACE[place]}\n{line}"}
    if place == "run.noise":
        edits[NAMED] = NAMED + '"noise": self.noise, '
    run = Live(tmp_path, 2, edits, **data | {"WARMUP_STEPS": 1})
    rule = "a checkpoint holds rank 0's values for all"
    assert_failed(run, f"{place} has other values on rank 1 than on rank 0", rule)
    assert not run.checkpoint_steps() and not run.events("step")


BUFFERED = (
    "sys.stdout.reconfigure(write_through=False); "  # buffers the output also with PYTHONUNBUFFERED
)
BUGS = {  # errors of an edit, which must be shown as they are
    "a file": ("open('/data/igloo/gloo.npy')", "FileNotFoundError: [Errno 2] No such file"),
    "a runtime error": ("raise RuntimeError('cannot allocate memory for gloo')", "RuntimeError: "),
    "a print": (BUFFERED + "print('before the crash'); {}['x']", "KeyError: 'x'"),
}


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("case", BUGS)
def test_an_error_keeps_its_traceback(tmp_path: Path, data: dict, case: str, ranks: int) -> None:
    """It is on the console, in the .txt and in the event. Other ranks end within seconds."""
    code, words = BUGS[case]
    start = time.monotonic()
    run = Live(tmp_path, ranks, edit_at_step(5, code, max(0, ranks - 1)), **data)
    assert run.wait_for_exit() == [1] * max(1, ranks) and time.monotonic() - start < 60
    assert words in run.err and run.err.count("Traceback") == 1, run.err
    assert run.checkpoint_steps() == [4] and run.status == ("failed", 1)
    assert f"{'rank 1 ' * (ranks > 0)}failed: {words}" in run.text, (
        "the .txt has the cause on any rank"
    )
    assert ("before the crash" in run.out) == (case == "a print")
    [end] = run.events("end")
    if not ranks:
        assert end["traceback"] in run.text and run.text.endswith(f"\nfailed: {end['error']}\n")
        assert words in end["traceback"] and end["traceback"].startswith("Traceback ")


def test_out_of_memory_gives_one_line_with_the_setting_that_helps(
    tmp_path: Path, data: dict
) -> None:
    edits = edit_at_step(5, 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")')
    run = Live(tmp_path, 0, edits, **data)
    line = assert_failed(run, "out of memory: CUDA out of memory", "a larger GRAD_ACCUM_STEPS")
    assert run.error_lines == [line] and "Traceback" not in run.err
    assert "Traceback" in run.text and "Traceback" in run.events("end")[0]["traceback"]
    assert run.checkpoint_steps() == [4]


@pytest.mark.parametrize(("argument", "code"), [("7", 7), ("'a reason'", 1)])
def test_an_exit_keeps_its_code(tmp_path: Path, data: dict, argument: str, code: int) -> None:
    run = Live(tmp_path, 0, edit_at_step(5, f"sys.exit({argument})"), **data)
    assert run.wait_for_exit() == [code] and run.checkpoint_steps() == [4]
    assert run.err == ("a reason\n" if argument == "'a reason'" else "")


def test_a_score_that_uses_a_tensor_that_is_not_stored_is_an_error(
    tmp_path: Path, data: dict
) -> None:
    line = "    if not t.is_floating_point():\n"
    edits = {line: f'    if name == "blocks.0.mlp.fc.weight":\n        return "not stored"\n{line}'}
    run = Live(tmp_path, 0, edits, **data)
    assert_failed(run, "the score is nan", "(blocks.0.mlp.fc.weight is not stored in the artifact")


def test_a_killed_rank_ends_the_other_ranks(tmp_path: Path, data: dict) -> None:
    run = Live(tmp_path, 2, edit_at_step(5, code_to_kill(signal.SIGKILL), rank=1), **data)
    assert run.wait_for_exit() == [1, -signal.SIGKILL] and "Traceback" not in run.err
    assert run.error_lines[0].startswith("rank 0: RuntimeError: [")
    assert "Check the logs of the remote" in run.error_lines[0]


def test_a_second_run_with_a_run_id_in_use_is_refused(tmp_path: Path, data: dict) -> None:
    wait = "while not Path('go').exists(): Path('reached').touch(); time.sleep(0.05)"
    first = Live(tmp_path, 0, edit_at_step(5, wait), **data)
    first.wait_until((tmp_path / "reached").exists)
    second = Live(tmp_path, **data | {"RESUME": "auto"})
    assert second.wait_for_exit() == [1]
    words = "logs/r.txt is being written by another run; wait until that run ends"
    assert words in second.error_lines[0]
    (tmp_path / "go").touch()
    first.finish()


SHARD = "fineweb_train_000001.bin"
TOKENS_260 = b"\4\1" * 7000  # 7,000 tokens 260
DAMAGE = {  # {case: (a change of the file, words of the message)}
    "truncated": (lambda data: data[:3000], "the file ends "),
    "vocabulary": (
        lambda data: data[:1024] + TOKENS_260,
        "has the token 260, but VOCAB_SIZE is 260; ",
    ),
}


@pytest.mark.parametrize(("case", "ranks"), [("vocabulary", 0), ("truncated", 0), ("truncated", 2)])
def test_a_shard_that_changes_during_a_run_is_an_error(
    tmp_path: Path, data: dict, case: str, ranks: int
) -> None:
    """The good batches before the change are used, and earlier checkpoints stay.

    A step reads 2,056 tokens, so the sixth step reads the end of the first shard and the beginning
    of the second, which is changed.
    """
    shutil.copytree(str(data["DATA_PATH"]), tmp_path / "data")
    tokens = torch.randint(1, 260, (20_000,), generator=torch.Generator().manual_seed(5)).numpy()
    write_split(tmp_path / "data", "train", tokens, [11_000, 7000])
    settings = data | {"DATA_PATH": tmp_path / "data", "ITERATIONS": 1000}
    settings |= {"VAL_LOSS_EVERY": 0, "CHECKPOINT_EVERY": 2}
    wait = "Path('reached').touch()\n    while not Path('go').exists(): time.sleep(0.01)"
    run = Live(tmp_path / "run", ranks, edit_at_step(2, wait), **settings)
    run.wait_until((run.folder / "reached").exists)
    damage, words = DAMAGE[case]
    path = tmp_path / "data" / SHARD
    path.write_bytes(damage(path.read_bytes()))
    (run.folder / "go").touch()
    line = assert_failed(run, f"data/{SHARD} at byte ", words)
    assert re.match(r"rank \d: ", line)
    assert run.checkpoint_steps() == [2, 4] and run.events("step")[-1]["step"] == 5


def test_the_score_is_logged_even_if_no_artifact_can_be_written(
    tmp_path: Path, data: dict, reference_run: ReferenceRun
) -> None:
    """There is a warning for each file and a line that says what to do; RESUME=auto writes them."""
    names = "final_model.int8.ptz", "final_model.pt", "logs/r.int8.ptz"
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    data = data | {"CHECKPOINT_EVERY": 0}  # the last state is saved all the same
    run = Live(tmp_path, 0, **data)
    assert_failed(run, "no artifact could be written (the warnings say why)")
    assert "final_int8_zlib_roundtrip_exact" in run.out and run.checkpoint_steps() == [20]
    for name in names:
        assert run.out.count(f"WARNING: {name} could not be written: Is a directory\n") == 1
        (tmp_path / name).rmdir()
    again = Live(tmp_path, **data | {"RESUME": "auto"}).finish()
    assert "training is complete: packing and scoring" in again.text
    assert_same_result(again, reference_run(0))


@pytest.mark.parametrize("name", ["logs", "logs/r.jsonl", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, data: dict, name: str) -> None:
    """The run ends before the first step and leaves no files."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/nowhere/logs")
    run = Live(tmp_path, 2, **data)
    assert run.wait_for_exit() == [1, 1] and run.out == "" and "Traceback" not in run.err
    assert run.error_lines[0].startswith(f"rank 0: {name.split('/')[0]}")
    assert "; start in a folder that can be written" in run.error_lines[0]
    assert not list(tmp_path.rglob("r.txt"))


CONSOLES = {
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), stream.fileno())",
    "closed": "os.dup2((lambda ends: os.close(ends[0]) or ends[1])(os.pipe()), stream.fileno())",
    "ascii": "stream.reconfigure(encoding='ascii')",
}


@pytest.mark.parametrize("console", CONSOLES)
def test_a_bad_console_loses_only_its_text(
    tmp_path: Path, data: dict, reference_run: ReferenceRun, console: str
) -> None:
    """A path that the console cannot show, or that is not UTF-8, is shown with backslashes."""
    folder = tmp_path / os.fsdecode(b"d\xc3\xa4ta \xe4")
    shutil.copytree(str(data["DATA_PATH"]), folder)
    line = '        stream.reconfigure(errors="backslashreplace")  # a path may contain any bytes\n'
    code = f"        {CONSOLES[console]}\n"
    edit = code + line if console == "ascii" else line + code
    settings = data | {"DATA_PATH": folder, "RUN_ID": "\u4e2d" * 33}
    run = Live(tmp_path / "run", 0, {line: edit}, **settings).finish()
    assert "final_int8_zlib_roundtrip_exact" in run.text and "d\u00e4ta \\udce4" in run.text
    shown = "train_loader:dataset:d\\xe4ta \\udce4 train_shards:1\n"
    assert shown in run.out if console == "ascii" else run.out == ""
    assert run.measurements() == reference_run(0).measurements()
