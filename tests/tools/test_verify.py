"""tools/verify.py reports no fault for train_gpt.py and correct edits, and reports faults for wrong
edits about which the trainer itself prints nothing."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import verify
from edits import MISTAKES, RIGHT, Edits, parse_edits
from faults.live import write_edited_script
from running import ROOT, Call, start_process, wait_until

WORDS = {  # of texts: the property, and what it says
    "a count in an optimizer's attribute": {"resume": "Trainer.muon.seen ("},
    "a scale of the first batch": {"resume": "model.scale ("},
    "dropout that is always on": {"look-ahead": "two equal calls of logits return different"},
    "levels that are rounded down": {"stored": "are shifted"},
    "each rank scores all sequences": {"ranks": "counts 1312 targets on one rank, and 2624 on two"},
    "an average that begins at zero": {"average": "the shares add up to 0.7176"},
    "an average of the weights before each step, another training loss, a value read in each step, "
    "a graph for each step": {
        "average": "the weights after the last step have no share",
        "reads": "`self.last_loss = float(loss_sum)` (in 12 steps)",
        "compiles": "self.step == ",
        "loss": "of step 12 have the training loss",
    },
}


def at_end(line: str) -> Edits:
    """Return an edit that adds a line at the end of each step."""
    return parse_edits([f"<            {line}", "             self.after_step()"])


def verdicts_on(script: Path, options: dict) -> dict[str, tuple[str, str]]:
    """Return {property: (ok, note or FAULT, text)}."""
    options = {"settings": {}} | options
    rows = list(verify.verdicts(script, options.pop("settings"), **options))
    print("\n".join(map(str, rows)))
    return {name: rest for name, *rest in rows}


def faulty_properties(found: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name, (kind, _) in found.items() if kind == "FAULT"}


BROKEN = parse_edits(["~x = x0 = rms_norm(x) => x = x0 = rms_norm(x"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "EMA_DECAY=0.9"),
        ([], 2, "give the script to check"),
        (["none.py"], 2, "none.py: there is no such file"),
        (["mine.py"], 1, "mine.py, line LINE: Python cannot read this line: '(' was never closed"),
        ([ROOT / "train_gpt.py", "--base", "none.py"], 2, "such file; give the script with which"),
    ],
)
def test_wrong_use_is_answered_without_packages(
    arguments: list, code: int, words: str, tmp_path: Path
) -> None:
    """Importing torch takes seconds, on a busy machine a minute."""
    script = write_edited_script(tmp_path / "mine.py", BROKEN)
    line = script.read_text("utf-8").split("x = x0 = rms_norm(x")[0].count("\n") + 1
    words = words.replace("LINE", str(line))
    command = [sys.executable, "-I", "-S", ROOT / "tools" / "verify.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and words in done.stdout + done.stderr
    assert done.stderr.count("\n") == (code > 0)


@pytest.mark.slow
def test_train_gpt_keeps_all_promises(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERATIONS", "7")  # the user's settings must not reach the tiny runs
    code, out, err = call(verify.main, ROOT / "train_gpt.py")
    assert (code, err) == (0, "")
    begin, *lines, end = out.splitlines()
    assert {"two-ranks", "from-step-5", "from-step-10", "from-step-12"} <= {*begin.split()}
    assert end == "faults: 0"
    verdicts = dict(line.split()[1::-1] for line in lines)
    assert set(verdicts.values()) == {"ok"}
    only_of_mistakes = {"model", "sum", "scorer", "targets", "exported", "whole"}
    with_hint = {name for name, _, _ in verify.read_hints()}
    without = {"steps", "loss", "trains", "reads", "compiles"}  # these have notes, but no faults
    assert verdicts.keys() == (with_hint | without) - only_of_mistakes


@pytest.mark.slow
def test_an_interrupt_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # paths of sockets must be short
    monkeypatch.setenv("TMPDIR", str(temporary))
    script = write_edited_script(
        temporary / "mine.py", at_end("time.sleep(300 * (self.step == 4))")
    )
    command = [sys.executable, ROOT / "tools" / "verify.py", script, "WARMUP_STEPS=0"]
    run = start_process(command)
    saved = "verify-*/full/checkpoints/full/step_00000004.pt"
    try:
        wait_until(lambda: list(temporary.glob(saved)), seconds=120)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it
        out, err = run.communicate(timeout=90)
        assert (run.returncode, out.count("\n"), err) == (130, 0, "")
        time.sleep(1)  # the server of processes ends after verify.py
        listed = subprocess.check_output(["ps", "-e", "-o", "pgid=,stat=,args="], text=True)
        assert re.findall(rf"(?m)^ *{run.pid} +[^Z ].*", listed) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        left = list(temporary.glob("verify-*"))
        shutil.rmtree(temporary)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_edit_has_no_faults(name: str, tmp_path: Path) -> None:
    _, edits, options = RIGHT[name]
    found = verdicts_on(write_edited_script(tmp_path / "mine.py", edits), options)
    assert faulty_properties(found) == set()
    assert found["ranks"][0] == ("note" if name == "experts" else "ok")


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_edit_has_the_expected_faults(name: str, tmp_path: Path) -> None:
    broken, edits, options = MISTAKES[name]
    found = verdicts_on(write_edited_script(tmp_path / "mine.py", edits), options)
    noted = {f"{name}?" for name, (kind, _) in found.items() if kind == "note"}
    assert faulty_properties(found) == {each for each in broken if not each.endswith("?")}
    assert {each for each in broken if each.endswith("?")} <= noted
    for each, words in WORDS.get(name, {}).items():
        assert words in found[each][1]


@pytest.mark.slow
def test_a_deadlock_is_reported_after_a_minute(tmp_path: Path) -> None:
    """It is in step 4, after checkpoints, for which the trainer sets longer timeouts."""
    evaluate = (
        'self.runtime.rank == 0 == self.step - 3 and self.validation.evaluate(self.model, "own")'
    )
    found = verdicts_on(write_edited_script(tmp_path / "mine.py", at_end(evaluate)), {})
    kind, text = found["replicas"]
    assert kind == "FAULT" and "Timed out waiting 60000ms" in text
    assert "rank 0 in all_reduce, line " in text and ", called by evaluate, line " in text
    assert "; rank 1 in gather, line " in text and ", called by log_step, line " in text


NO_EFFECT = 'self.adam.param_groups[0]["lr"] = 0.001'  # the next step sets it again
OTHER_SKIPS = parse_edits(["~skips.pop() => skips.pop(0)"])  # the first output first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "words"),
    [(at_end(NO_EFFECT), "nothing on one rank"), (OTHER_SKIPS, "losses from step 2 on")],
)
def test_base_shows_what_an_edit_changes(edits: Edits, words: str, tmp_path: Path) -> None:
    """The tiny model has enough layers for the order of skip connections to matter."""
    script = write_edited_script(tmp_path / "mine.py", edits)
    found = verdicts_on(script, {"base": ROOT / "train_gpt.py"})
    assert found["effect"][0] == "note"
    assert found["effect"][1].startswith(f"against train_gpt.py the edit changes {words}")


@pytest.mark.slow
def test_an_edit_that_does_not_run_is_an_error_with_the_reason(tmp_path: Path) -> None:
    script = write_edited_script(tmp_path / "mine.py", at_end("raise RunError('no luck')"))
    with pytest.raises(verify.cli.ToolError, match=r"does not run at a tiny size: .*no luck"):
        verdicts_on(script, {})
