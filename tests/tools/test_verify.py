"""tools/verify.py: silent about train_gpt.py and right edits, loud about edits that are wrong
without a word from the trainer."""

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
from edits import MISTAKES, RIGHT, Edits, edits_of
from faults.live import edited
from running import ROOT, Call, start_process, wait_until

FORGOTTEN = {  # what `resume` names
    "a count in an optimizer's attribute": "Trainer.muon.seen (",
    "a scale of the first batch": "model.scale (",
}


def at_end(line: str) -> Edits:
    """A line at the end of each step."""
    return edits_of([f"<            {line}", "             self.after_step()"])


def found_in(script: Path, options: dict) -> dict[str, tuple[str, str]]:
    """{property: (ok, note or FAULT, text)}"""
    options = {"settings": {}} | options
    rows = list(verify.verdicts(script, options.pop("settings"), **options))
    print("\n".join(map(str, rows)))
    return {name: rest for name, *rest in rows}


def faults_of(found: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name, (kind, _) in found.items() if kind == "FAULT"}


@pytest.mark.slow
def test_train_gpt_keeps_all_promises(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERATIONS", "7")  # a user's settings are not those of the tiny runs
    code, out, err = call(verify.main, ROOT / "train_gpt.py")
    assert (code, err) == (0, "")
    begin, *lines, end = out.splitlines()
    assert {"two-ranks", "from-step-5", "from-step-10", "from-step-12"} <= {*begin.split()}
    assert end == "faults: 0"
    verdicts = dict(line.split()[1::-1] for line in lines)
    assert set(verdicts.values()) == {"ok"}
    of_mistakes = {"model", "sum", "scorer", "targets", "exported", "whole"}
    assert verdicts.keys() == {*verify.HINTS, "steps"} - of_mistakes


@pytest.mark.slow
def test_interrupt_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # sockets must have short paths
    monkeypatch.setenv("TMPDIR", str(temporary))
    script = edited(temporary / "mine.py", at_end("time.sleep(300 * (self.step == 4))"))
    command = [sys.executable, ROOT / "tools" / "verify.py", script, "WARMUP_STEPS=0"]
    run = start_process(command)
    saved = "verify-*/full/checkpoints/full/step_00000004.pt"
    try:
        wait_until(lambda: list(temporary.glob(saved)), seconds=120)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        out, err = run.communicate(timeout=90)
        assert (run.returncode, out.count("\n"), err) == (130, 0, "")
        time.sleep(1)  # the server of processes ends when verify.py has ended
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
def test_is_silent_about_right_edits(name: str, tmp_path: Path) -> None:
    _, edits, options = RIGHT[name]
    found = found_in(edited(tmp_path / "mine.py", edits), options)
    assert faults_of(found) == set()
    assert found["ranks"][0] == ("note" if name == "experts" else "ok")


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_names_what_an_edit_breaks(name: str, tmp_path: Path) -> None:
    broken, edits, options = MISTAKES[name]
    found = found_in(edited(tmp_path / "mine.py", edits), options)
    noted = {f"{name}?" for name, (kind, _) in found.items() if kind == "note"}
    assert faults_of(found) == {each for each in broken if not each.endswith("?")}
    assert {each for each in broken if each.endswith("?")} <= noted
    assert FORGOTTEN.get(name, "") in found.get("resume", ("", ""))[1]


@pytest.mark.slow
def test_a_hang_is_named_after_a_minute(tmp_path: Path) -> None:
    evaluate = (
        'self.runtime.rank == 0 == self.step % 3 and self.validation.evaluate(self.model, "own")'
    )
    found = found_in(edited(tmp_path / "mine.py", at_end(evaluate)), {})
    kind, text = found["replicas"]
    assert kind == "FAULT" and "Timed out waiting 60000ms" in text
    assert "rank 0 in all_reduce, line " in text and ", called by evaluate, line " in text
    assert "; rank 1 in gather, line " in text and ", called by log_step, line " in text


@pytest.mark.slow
def test_base_shows_an_edit_without_effect(tmp_path: Path) -> None:
    rate = 'self.adam.param_groups[0]["lr"] = 0.001'  # the next step sets it again
    found = found_in(edited(tmp_path / "mine.py", at_end(rate)), {"base": ROOT / "train_gpt.py"})
    assert found["effect"][0] == "note"
    assert found["effect"][1].startswith("against train_gpt.py the edit changes nothing on one")


@pytest.mark.slow
def test_says_why_an_edit_does_not_run(tmp_path: Path) -> None:
    script = edited(tmp_path / "mine.py", at_end("raise RunError('no luck')"))
    with pytest.raises(verify.cli.ToolError, match=r"does not run at a tiny size: .*no luck"):
        found_in(script, {})
