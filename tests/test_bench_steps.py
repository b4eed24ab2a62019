"""The step bench: it times whole steps of an idle device, each arm in a process of its own and in
turns. Arms with other tokens end it, other losses fail it, and a variant that cannot run is named.
"""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT, Corpus, clean_environment

pytestmark = pytest.mark.timeout(300)

BENCH = ROOT / "tests" / "bench" / "steps.py"
# A script with the contract's lines and nothing behind them; it notes who ran, where, with what.
SCRIPT = """
from __future__ import annotations
import os, sys
from dataclasses import dataclass

@dataclass
class Settings:
    log_every: int = int(os.environ["TRAIN_LOG_EVERY"])
    val_every: int = int(os.environ["VAL_LOSS_EVERY"])
    iterations: int = int(os.environ["ITERATIONS"])

def loss(step): return 6.9 - step / 100

def main():
    s = Settings()
    with open(os.environ["NOTES"], "a") as notes:
        print(NAME, os.getpid(), s.iterations, os.environ.get("MATRIX_LR", "-"), file=notes)
    import __main__
    assert __main__.main is main and sys.argv == [__file__]
    assert sys.path[0] == os.path.dirname(__file__)
    print("val_loader:shards pattern=* tokens:4096")
    for step in range(s.iterations + 1):
        if step == s.iterations or s.val_every and step % s.val_every == 0:
            print(f"step:{step}/{s.iterations} val_loss:{loss(step):.4f} val_bpb:2.0000")
        if step < 10 or (step + 1) % s.log_every == 0:
            print(f"step:{step + 1}/{s.iterations} train_loss:{loss(step + 1):.4f} data_crc:00ab")

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps_bench", BENCH)
    module = sys.modules["steps_bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_script(folder: Path, name: str, old: str = "", new: str = "") -> Path:
    assert SCRIPT.count(old) == 1 or not old
    path = folder / f"{name}.py"
    path.write_text(SCRIPT.replace("NAME,", f"{name!r},").replace(old or "\0", new))
    return path


def bench(folder: Path, *arguments: object, **settings: object) -> subprocess.CompletedProcess:
    """In a folder that has stand-ins for data."""
    data = {"DATA_PATH": folder, "TOKENIZER_PATH": folder, "NOTES": folder / "notes"}
    return subprocess.run(
        [sys.executable, BENCH, "--quick", "--repeats", "2", *map(str, arguments)],
        text=True,
        capture_output=True,
        timeout=280,
        cwd=folder,
        env=clean_environment(**{**data, "TMPDIR": folder, **settings}),
    )


class Device:
    """Works 5 s a step, asynchronously, while the host takes 1 s to ask for it."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.waits = 0

    def step(self) -> None:
        self.host += 1
        self.done = max(self.done, self.host) + 5

    def synchronize(self) -> None:
        self.host, self.waits = max(self.host, self.done), self.waits + 1


def test_the_window_holds_whole_steps_and_no_wait_inside(steps: ModuleType) -> None:
    device, ended, written = Device(), [], []
    out = SimpleNamespace(write=written.append, flush=lambda: None)
    marks = [steps.Mark("train", 3), steps.Mark("train", 7)]
    recorder = steps.driver.Recorder(
        out, marks, device.synchronize, lambda: device.host, ended.append
    )
    for step in range(1, 9):
        device.step()
        line = f"step:{step}/8 train_loss:{9 - step / 10:.4f} data_crc:{step:04x} eta:1s\n"
        for piece in (line[:11], line[11:]):  # a line may come in pieces
            recorder.write(piece)
        if ended:
            break
    (_, _, begin), (_, _, end) = recorder.seen["times"]
    # The device stands idle for 1 s, until the first step is asked for.
    assert end - begin == 1 + 4 * 5 and device.waits == 2 and step == 7
    assert recorder.seen["losses"]["train"] == {k: pytest.approx(9 - k / 10) for k in range(1, 8)}
    assert recorder.seen["crcs"][7] == "0007" and "".join(written).endswith("eta:1s\n")


def test_milliseconds_are_of_a_step_and_of_a_median_validation(steps: ModuleType) -> None:
    options = SimpleNamespace(validation=False, steps=60, passes=3)
    times = [["train", 10, 5.0], ["train", 70, 17.0]]
    assert steps.measured_ms({"times": times}, options) == pytest.approx(200)
    options.validation, times = True, []
    for k, spent in ((1, 9), (2, 2), (3, 4)):
        times += [["train", k, 100 * k], ["val", k, 100 * k + spent]]
    assert steps.measured_ms({"times": times}, options) == pytest.approx(4000)


def test_arms_take_turns_one_process_each(tmp_path: Path) -> None:
    ours, other = (write_script(tmp_path, name) for name in ("mine", "theirs"))
    result = tmp_path / "result.json"
    arguments = ["--ours", ours, "--against", other, "--vary", "MATRIX_LR=2", "--json", result]
    said = bench(tmp_path, *arguments, "--arm", other, "MATRIX_LR=3")
    assert said.returncode == 0, said.stderr + said.stdout
    ran = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    turn = [("theirs", "-"), ("mine", "-"), ("mine", "2"), ("theirs", "3")]
    assert [(name, rate) for name, _, _, rate in ran] == 3 * turn
    assert len({process for _, process, _, _ in ran}) == len(ran)
    assert [int(iterations) for _, _, iterations, _ in ran] == 4 * [24] + 8 * [14]
    runs = json.loads(result.read_text())["runs"]
    names = ["other", "ours", "MATRIX_LR=2", f"{tmp_path.name.split('_')[-1]} MATRIX_LR=3"]
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys(names, 2)
    table = said.stdout.split("\narm ")[1].splitlines()[1:5]
    assert [line.split("  ")[0] for line in table] == names
    assert "PASS other: the losses of ours" in said.stdout
    assert [path.name for path in tmp_path.iterdir() if "bench" in path.name] == []


def test_a_variant_that_cannot_run_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    eager = "warning: torch.compile does not work here, so eager"  # then it is another arm
    check = "    s = Settings()\n    if 'MATRIX_LR' in os.environ: sys.exit('no such rate')\n"
    check += f"    if 'HEAD_LR' in os.environ: print({eager!r})\n"
    ours = write_script(tmp_path, "mine", "    s = Settings()\n", check)
    said = bench(tmp_path, "--ours", ours, "--vary", "MATRIX_LR=2", "HEAD_LR=2", "SEED=1")
    assert said.returncode == 1, "the command says that something failed"
    assert "arm MATRIX_LR=2: FAILED: ended with code 1: no such rate" in said.stdout
    assert f"arm HEAD_LR=2: FAILED: {eager}" in said.stdout
    assert "SEED=1 against ours" in said.stdout and "_LR=2 against" not in said.stdout


def test_another_script_that_cannot_run_leaves_ours_to_be_measured(tmp_path: Path) -> None:
    start = "    s = Settings()\n"
    theirs = write_script(tmp_path, "theirs", start, "    sys.exit('no such library')\n")
    ours = write_script(tmp_path, "mine")
    said = bench(tmp_path, "--ours", ours, "--against", theirs, "--vary", "SEED=1")
    assert said.returncode == 1
    assert "arm other: FAILED: ended with code 1: no such library" in said.stdout
    assert "SEED=1 against ours" in said.stdout and "other" not in said.stdout.split("\n\n")[1]


@pytest.mark.parametrize(
    ("new", "limit", "words"),
    [
        ("    sys.exit('no such thing')\n", 200, "ended with code 1: no such thing"),
        ("    s = Settings(1 << 30)\n", 200, "the script ended before its lines"),
        ("    __import__('time').sleep(600)\n", 2, "ran for 2 s: raise --limit"),
    ],
)
def test_a_script_that_fails_is_one_line(
    tmp_path: Path, new: str, limit: float, words: str
) -> None:
    ours = write_script(tmp_path, "mine", "    s = Settings()\n", new)
    said = bench(tmp_path, "--ours", ours, "--limit", limit)
    assert said.returncode == 1 and len(said.stderr.splitlines()) == 1
    assert said.stderr.startswith("steps.py: arm ours: ") and words in said.stderr


def test_arms_with_other_tokens_end_it(steps: ModuleType, tmp_path: Path) -> None:
    other = write_script(tmp_path, "theirs", "data_crc:00ab", "data_crc:00ac")
    said = bench(tmp_path, "--ours", write_script(tmp_path, "mine"), "--against", other)
    assert said.returncode == 1 and said.stderr.startswith("steps.py: arm ours: other training")

    def result(crc: str = "00ab", tokens: str = "4096") -> dict:
        return {"crcs": {"1": crc} if crc else {}, "val_tokens": tokens}

    steps.check_work({"other": result(""), "ours": result(), "SEED=1": result()})
    with pytest.raises(steps.BenchError, match="arm SEED=1: other training tokens .* than ours"):
        steps.check_work({"other": result(""), "ours": result(), "SEED=1": result("00ac")})
    with pytest.raises(steps.BenchError, match="arm ours: other validation tokens than other"):
        steps.check_work({"other": result(), "ours": result(tokens="4095")})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({1: 0.0009, 2: 0.3, 10: 0.3, 50: 0.3, 100: 0.0049, 200: -0.0049}, ""),
        ({1: -0.0011}, "step 1: -0.0011 nats, at most 0.0010"),
        ({100: 0.0052}, "step 100: +0.0052 nats, at most 0.0050"),
        ({200: -0.0052}, "step 200: -0.0052 nats, at most 0.0050"),
        ({5: float("nan")}, "step 5: +nan nats"),
        ({200: None}, "step 200: +nan nats"),  # it is not there
    ],
)
def test_the_gate(steps: ModuleType, changes: dict, words: str) -> None:
    ours = {str(step): 7 - step / 100 for step in (*range(1, 11), 50, 100, 200)}
    theirs = dict(ours)
    for step, change in changes.items():
        if change is None:
            del theirs[str(step)]
        else:
            theirs[str(step)] += change
    results = {"other": {"losses": {"train": theirs}}, "ours": {"losses": {"train": ours}}}
    [(passed, said)] = steps.gate(results)
    assert passed == (not words) and words in said


def test_an_arm_of_recipes_is_ours_with_them_switched_on(steps: ModuleType, tmp_path: Path) -> None:
    names = ["cast_once", "muon_one_bank"]
    path, switches = steps.with_recipes(ROOT / "train_gpt.py", names, tmp_path)
    assert switches == ["CAST_ONCE=1", "FOLD_ONCE=1", "MUON_ONE_BANK=1"]
    for setting in switches:
        assert f"    {setting[:-2].lower()}: bool = False" in path.read_text("utf-8")
    said = bench(tmp_path, "--recipe", "cast_once+no_such")
    assert said.returncode == 1 and len(said.stderr.splitlines()) == 1
    assert "--recipe cast_once+no_such: no_such: no such recipe" in said.stderr


def test_other_losses_fail_the_command(tmp_path: Path) -> None:
    ours = write_script(tmp_path, "mine", "6.9 -", "6.902 -")
    said = bench(tmp_path, "--ours", ours, "--against", write_script(tmp_path, "theirs"))
    assert said.returncode == 1
    assert "FAIL other: step 1: -0.0020 nats, at most 0.0010" in said.stdout


def test_a_difference_within_the_noise_is_none(steps: ModuleType) -> None:
    first = [100.0, 101.0, 102.0]
    assert steps.compared(first, [99.0, 101.5, 102.5]).startswith("no measurable difference")
    assert steps.compared(first, [80.0, 80.9, 81.9]).startswith("19.87 % faster (-20.067 ms, ")


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["--repeats", "1"], {}, "--repeats: set at least 2"),
        (["--against", "no/such.py"], {}, "no/such.py: no such file"),
        ([], {"TOKENIZER_PATH": ""}, "DATA_PATH is set alone"),
        ([], {"DATA_PATH": "/no/such"}, "DATA_PATH=/no/such: not there: run "),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, arguments: list[str], settings: dict, words: str
) -> None:
    said = bench(tmp_path, *arguments, **settings)
    assert said.returncode in (1, 2) and words in said.stderr.splitlines()[-1]
    assert "Traceback" not in said.stderr


@pytest.mark.slow
def test_ranks_are_processes_and_end_with_the_first_one(tmp_path: Path) -> None:
    """The others would wait for it."""
    start = "    s = Settings()\n"
    note = "    with open(os.environ['NOTES'], 'a') as notes:\n"
    note += "        print('rank', os.environ['RANK'], os.getpid(), file=notes)\n"
    wait = "    if os.environ['RANK'] == '1': __import__('time').sleep(600)\n"
    wait += "    read = __import__('pathlib').Path(os.environ['NOTES']).read_text\n"
    wait += "    while read().count('rank 1') < read().count('rank 0'): pass\n"
    ours = write_script(tmp_path, "mine", start, start + note + wait)
    said = bench(tmp_path, "--ours", ours, "--ranks", 2, "--limit", 200)
    assert said.returncode == 0, said.stdout + said.stderr
    ranks = [line for line in (tmp_path / "notes").read_text().splitlines() if "rank" in line]
    assert sorted(line[:6] for line in ranks) == 3 * ["rank 0"] + 3 * ["rank 1"]
    left, deadline = [Path("/proc", line.split()[2]) for line in ranks], time.monotonic() + 30
    while any(path.exists() for path in left) and time.monotonic() < deadline:
        time.sleep(0.1)  # a killed one is there until init has heard of it
    assert not any(path.exists() for path in left)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--validation", "--passes", "1"]])
def test_the_trainer_itself(tmp_path: Path, corpus: Corpus, mode: list[str]) -> None:
    """With a recipe it is the same mathematics, on a CPU to the last digit."""
    settings = {**corpus.env, "VOCAB_SIZE": 300, "DEVICE": "cpu", "GRAD_ACCUM_STEPS": 1}
    against = [] if mode else ["--recipe", "exchange_shards"]
    said = bench(tmp_path, *against, *mode, **settings)
    assert said.returncode == 0, said.stdout + said.stderr
    header, *losses = said.stdout.split("loss at step")[1].splitlines()[: 2 if mode else 3]
    assert len({tuple(line.split()[1:]) for line in losses}) == 1
    assert len(header.split()) == (1 if mode else 12)
    rows = said.stdout.split("\narm ")[1].splitlines()[1 : len(losses) + 1]
    assert all(float(row.split()[i]) > 0 for row in rows for i in (1, 3))
