"""logs/ablate.py and logs/preflight.py: the plan, runs of a stand-in trainer and of ours, what is
kept, what is concluded, what makes a machine ready."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import ablate
import conftest
import launch
import numpy as np
import preflight
import pytest
from conftest import ROOT, Call, clean_environment, write_split
from significance import paired

TOOL, PREFLIGHT = ROOT / "logs" / "ablate.py", ROOT / "logs" / "preflight.py"
TWO = ("--vary", "KNOB=0,1", "--out", "out")
DRAW = ablate.draw  # slow: only where a test asks for it
# Writes logs as train_gpt.py does; its figures follow from settings. FAKE_*: how to misbehave.
FAKE = r"""
import json, math, os, platform, signal, sys
from pathlib import Path
E = os.environ
DATA = "./data/datasets/fineweb10B_sp1024"
KNOWN = {"knob": 0.0, "mlp_mult": 2, "train_prefetch": True, "seed": 1337, "warmup_steps": 20,
         "iterations": 20, "warmdown_iters": 0, "max_wallclock_seconds": 600.0,
         "train_batch_tokens": 1024,
         "val_batch_size": 2048, "val_tokens": 0, "device": "auto", "data_path": DATA,
         "tokenizer_path": "./data/tokenizers/fineweb_1024_bpe.model"}
def given(name, default):
    if name.upper() not in E: return default
    if isinstance(default, str): return E[name.upper()]
    return type(default)(float(E[name.upper()]))
def number(name, default):
    return float(E.get("FAKE_" + name, default))
config = {name: given(name, default) for name, default in KNOWN.items()}
if sys.argv[1:] == ["--print-config"]:
    if E.get("KNOB") == "99":
        sys.exit("fake: nothing was started, settings are wrong:\n  KNOB=99: set less")
    if E.get("KNOB") == "98": import no_such_package
    print(json.dumps({k: {"value": v, "source": ("default", "environment")[k.upper() in E]}
                      for k, v in config.items()}))
    sys.exit(0)
run, seed, knob, N = E["RUN_ID"], config["seed"], config["knob"], config["iterations"]
with open(E["JOURNAL"], "a") as journal:
    print(json.dumps({**E, "cwd": os.getcwd(), "script": sys.argv[0]}), file=journal)
started = len(open(E["JOURNAL"]).readlines())
Path("logs").mkdir()
text, events = open(f"logs/{run}.txt", "w"), open(f"logs/{run}.jsonl", "w")
def event(name, **fields):
    print(json.dumps({"event": name, "time": 1000.0 + started, **fields}), file=events, flush=True)
def line(words):
    for out in (text, sys.stdout): print(words, file=out, flush=True)
def end(status, code):
    event("end", status=status, exit_code=code, error="")
    sys.exit(code)
event("config", **config, run_id=run)
event("hardware", device=E.get("FAKE_DEVICE", platform.machine()), cpus=1, torch="2.13.0",
      cuda=None, python="3.12.0", world_size=1)
line("val_loader:shards pattern=x tokens:1000")
line(f"model_params:{1000 * config['mlp_mult']}")
line(f"seed:{seed}")
if E.get("FAKE_REFUSE"):
    print("fake: settings are wrong:\n  HEADS=3: set 4", file=sys.stderr)
    sys.exit(2)
if run == E.get("FAKE_FAIL"):
    print("working\nboom: the disk is full", file=sys.stderr)
    end("failed", 1)
if run == E.get("FAKE_WAIT"):
    Path(E["JOURNAL"] + ".waiting").touch()
    try: signal.pause()
    except KeyboardInterrupt: end("interrupted", 130)
assert Path(config["data_path"]).is_dir(), config["data_path"]
off = not config["train_prefetch"]
pace = 50 + knob * number("COST", 10) + seed % 7 * 0.3 + started * number("DRIFT", 1e-4)
pace += seed * knob % 3 * 0.01
loss = 2 + seed % 10 / 100 + off * number("GAP", 0)
crc = "%08x" % (1337 + 7 * off * int(E.get("FAKE_OTHER_DATA", 0)))
for step in [s for s in range(1, N + 1) if s <= 10 or s % 10 == 0]:
    now = loss + 10 / step
    line(f"step:{step}/{N} train_loss:{now!r} train_time:{step * pace!r}ms data_crc:{crc}")
line(f"step:{N}/{N} val_loss:{loss!r} val_bpb:{loss / math.log(2) / 2!r} train_time:{N * pace!r}ms")
line(f"timing_train_loop_ms:{N * pace!r}ms timing_val_total_ms:70ms")
wait = (1, 12)[off] + seed % 3 / 10
line(f"input_wait total:{N * wait!r}ms share:{100 * wait / pace:.3f}% slowest:1 epochs:0.1")
line("peak memory allocated: 5 MiB reserved: 6 MiB\nCode size: 900 bytes")
line("Serialized model int8+zlib: 3000 bytes\nTotal submission size int8+zlib: 3900 bytes")
line(f"final_int8_zlib_roundtrip_exact val_loss:{loss!r} val_bpb:{loss / math.log(2) / 2!r}")
Path("final_model.pt").write_text(run)
end("finished", 0)
"""


class Place:
    """A folder in which a user works: a trainer, data; what the trainer was started with."""

    def __init__(self, folder: Path, call: Call) -> None:
        self.folder, self.call, self.journal = folder, call, folder / "journal"
        self.script = folder / "fake.py"
        self.script.write_text(FAKE)
        data = folder / "data" / "datasets" / "fineweb10B_sp1024"
        for split in ("train", "val"):
            write_split(data, split, np.arange(5000) % 1000, [2000])
        (folder / "data" / "tokenizers").mkdir()
        (folder / "data" / "tokenizers" / "fineweb_1024_bpe.model").write_bytes(b"pieces")

    def __call__(self, *words: str, tool: Any = ablate, **variables: str) -> tuple[int, str, str]:
        """The tool on the trainer, with these variables in its environment."""
        with mock.patch.dict(os.environ, variables):
            return self.call(tool.main, *words, "--", "python3", "fake.py")

    def starts(self) -> list[dict[str, Any]]:
        text = self.journal.read_text() if self.journal.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def started(self) -> list[str]:
        return [start["RUN_ID"] for start in self.starts()]

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "out" / "manifest.json").read_text())

    def difference(self, metric: str) -> dict[str, Any]:
        return next(d for d in self.manifest["differences"] if d["metric"].startswith(metric))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Place:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(ablate, "draw", lambda *_: "no picture in tests")
    return Place(tmp_path, call)


def test_the_plan_pairs_seeds_rotates_arms_and_names_runs() -> None:
    arms = [ablate.Arm((("A", value),)) for value in "xyz"]
    order = [f"{run.arm.settings[0][1]}{run.seed}" for run in ablate.plan(arms, [7, 8, 9, 10])]
    assert " ".join(order) == "x7 y7 z7 y8 z8 x8 z9 x9 y9 x10 y10 z10"
    values = ["1", "a/b", "a-b", "a b", "é", "x" * 200, "x" * 201, "-", "0.5"]
    names = [ablate.Planned(ablate.Arm((("DATA_PATH", value),)), 3).run_id for value in values]
    assert len(set(names)) == len(names) and "data_path-0.5_seed3" in names
    assert all(re.fullmatch(r"[a-z0-9._-]{1,119}", name) for name in names)


USAGE = f"""
--vary KNOB                             | write NAME=value,value
--vary KNOB=1                           | nothing varies
--vary KNOB=1,1                         | must differ
--vary KNOB=1,                          | none may be empty, and commas part them; for such values
--vary KNOB=1, 2                        | 2: write values with commas and no spaces between
--vary SEED=1,2                         | use --seeds
--vary RUN_ID=a,b                       | every run has its own RUN_ID
--vary ITERATIONS=5,6 --steps 5         | --steps sets it
--vary KNOB=0,1 --steps 0               | argument --steps: a number above 0, not 0
--vary KNOB=0,1 --steps 5 --seconds 5   | not allowed with
--vary KNOB=0,1 --seeds two             | write how many
--vary KNOB=0,1 --seeds 0               | one at least
--vary KNOB=0,1 --seeds 4,4             | each once
--vary KNOB=0,1 --sed 3                 | --help lists
--out out                               | nothing varies: name --vary
--script fake.py,gone.py                | gone.py: no such script
--script fake.py,torch.py               | torch is the name of a module
--script fake.py                        | or two scripts
--vary TRAIN_PREFTECH=0,1               | did you mean TRAIN_PREFETCH
--vary LEARNING_RATE=1,2                | has no such setting: vary a name that its --help lists
--vary KNOB=0,99                        | KNOB=99: set less
--vary KNOB=0,98                        | no_such_package is missing: run {sys.executable} -m pip
--vary KNOB=0,1 -- no-such-program x.py | no-such-program: no such program
--vary KNOB=0,1 -- "python3 fake.py"    | 'python3 fake.py' is one word: write the command without
--vary KNOB=0,1 --                      | after --
--vary KNOB=0,1 -- A=1 python3          | A=1: settings go in front of the tool, not behind --
--vary KNOB=0,1 python3 fake.py         | error: put -- before the command: -- python3 fake.py
"""


@pytest.mark.parametrize("row", USAGE.strip().splitlines())
def test_wrong_usage_is_told_before_anything_runs(place: Place, row: str) -> None:
    given, reason = row.split("|", 1)
    words = shlex.split(given)
    words += [] if {"--", "python3"} & {*words} else ["--", "python3", "fake.py"]
    code, _, err = place.call(ablate.main, *words)
    assert code == 2 and reason.strip() in err and err.count("\n") == 1 + err.count("\n  ")
    assert not place.journal.exists() and not (place.folder / "logs").exists()


def test_every_run_has_its_variables_folder_and_logs(place: Place) -> None:
    with mock.patch.object(ablate, "draw", DRAW):
        given = {"SEED": "40", "RUN_ID": "mine", "WARMDOWN_ITERS": "120"}
        code, out, err = place(*TWO, "--seeds", "2", "--steps", "30", **given)
    ids = ["knob-0_seed40", "knob-1_seed40", "knob-1_seed41", "knob-0_seed41"]
    assert (code, err) == (0, "") and place.started() == ids
    assert "is more than the 30 steps: learning rates begin at 25.0 % of what is set" in out
    for start in place.starts():
        assert start["cwd"] == str(place.folder / "out" / "runs" / start["RUN_ID"])
        assert start["RUN_ID"].startswith(f"knob-{start['KNOB']}_seed{start['SEED']}")
        assert (start["ITERATIONS"], start["MAX_WALLCLOCK_SECONDS"]) == ("30", "0")
        assert Path(start["cwd"], "final_model.pt").read_text() == start["RUN_ID"]
    assert place.manifest["base"]["command"].endswith("fake.py")
    assert out.index("Verdict: ") < out.index("Differences") < out.index("What differs in conf")
    assert (place.folder / "out" / "report.txt").read_text().strip() in out
    assert (place.folder / "out" / "picture.png").exists()


def test_relative_paths_are_those_of_the_caller(place: Place) -> None:
    """Without the variable, the trainer's own default ./data/... is found from its folder. Fixed
    time sets the cap alone. What is no setting of the trainer may vary, too."""
    (place.folder / "elsewhere").mkdir()
    words, given = (*TWO, "--seeds", "1", "--seconds", "1.5"), {"ITERATIONS": "40"}
    code, out, _ = place(*words, DATA_PATH="elsewhere", **given)
    assert code == 0 and "one seed per pair" in out
    assert "This decides" not in out, "the same command with --seeds 3 does"
    for start in place.starts():
        assert start["DATA_PATH"] == str(place.folder / "elsewhere")
        assert (start["ITERATIONS"], start["MAX_WALLCLOCK_SECONDS"]) == ("40", "1.5")
    assert place("--vary", "OMP_NUM_THREADS=1,2", "--out", "other", "--seeds", "1")[0] == 0
    assert "DATA_PATH" not in place.starts()[-1]


def test_a_failing_run_is_shown_and_the_rest_goes_on(place: Place) -> None:
    """Refused settings end everything."""
    code, out, _ = place(*TWO, "--seeds", "3", FAKE_FAIL="knob-1_seed1338")
    assert code == 1 and len(place.starts()) == 6
    assert "FAILED (exit code 1)" in out and "    boom: the disk is full" in out
    assert "KNOB=1 seed 1338: exit code 1" in out.split("Failed\n")[1]
    assert place.difference("step time")["pairs"] == 2
    code, out, _ = place(*TWO, "--seeds", "3")
    assert code == 0 and place.started()[6:] == ["knob-1_seed1338"]
    assert "5 of 6 runs are finished and kept" in out
    code, out, err = place("--vary", "KNOB=0,1", "--out", "other", FAKE_REFUSE="1")
    assert code == 2 and len(place.starts()) == 8, "the others would be refused, too"
    assert "HEADS=3: set 4" in out and "nothing more was run" in err


def test_only_what_is_missing_runs_again(place: Place) -> None:
    assert place(*TWO, "--seeds", "2")[0] == 0
    begun = len(place.starts())
    assert place(*TWO, "--seeds", "2")[0] == 0 and len(place.starts()) == begun
    run = place.folder / "out" / "runs" / "knob-1_seed1337" / "logs" / "knob-1_seed1337.txt"
    run.with_suffix(".jsonl").unlink()
    run.write_text("seed:1337\nstep:1/20 train_loss:9.0 train_time:5ms step_avg:5ms\n")
    assert place(*TWO, "--seeds", "2")[0] == 0 and place.started()[begun:] == ["knob-1_seed1337"]
    assert place("--vary", "KNOB=0,1,2", "--out", "out", "--seeds", "3")[0] == 0
    new = [f"knob-2_seed{seed}" for seed in (1337, 1338, 1339)]
    new += ["knob-0_seed1339", "knob-1_seed1339"]
    assert sorted(place.started()[begun + 1 :]) == sorted(new)


def test_another_ablation_is_not_mixed_in(place: Place) -> None:
    assert place(*TWO, "--seeds", "1")[0] == 0
    assert "mode was as set, is steps 9" in place(*TWO, "--steps", "9")[2]
    err = place(*TWO, MLP_MULT="4")[2]
    assert "(MLP_MULT was not set, is 4): change that back, or name another --out" in err
    place.script.write_text(FAKE + "# changed\n")
    code, _, err = place(*TWO)
    assert code == 2 and "script was" in err and "name another --out" in err
    assert len(place.starts()) == 2
    (place.folder / "out" / "manifest.json").write_text("{")
    assert "cannot be read" in place(*TWO)[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_child_and_keeps_the_rest(place: Place, number: int) -> None:
    run = "knob-1_seed1338"
    command = [sys.executable, TOOL, *TWO, "--seeds", "2", "--", "python3", "fake.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {"env": {**os.environ, "FAKE_WAIT": run}, "preexec_fn": conftest.heed_interrupts}
    with subprocess.Popen(command, **streams, **started) as process:
        deadline = time.monotonic() + 60
        while not Path(f"{place.journal}.waiting").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out
    assert "2 of 4 runs are finished and kept" in out
    events = (place.folder / "out" / "runs" / run / "logs" / f"{run}.jsonl").read_text()
    assert json.loads(events.splitlines()[-1])["status"] == "interrupted", "it was asked to end"
    assert place(*TWO, "--seeds", "2")[0] == 0
    assert len(place.starts()) == 5 and place.started()[2:4] == [run, run]


def test_differences_are_paired_by_seed(place: Place) -> None:
    seeds = (1337, 1341, 1350)
    words = ("--seeds", ",".join(map(str, seeds)), "--steps", "20")
    code, out, _ = place(*TWO, *words, FAKE_DRIFT="0")
    found, verdict = place.difference("step time"), place.manifest["verdict"]
    expected = paired([0] * 3, [10 + seed % 3 * 0.01 for seed in seeds])
    figures = [found[name] for name in ("mean", "low", "high")]
    assert figures == pytest.approx([expected.difference, expected.low, expected.high])
    assert code == 0 and found["measurable"] and verdict in out and "rates begin" not in out
    assert "KNOB=1 changes step time by +10" in verdict and "against KNOB=0" in out
    assert "no measurable difference between KNOB=1 and KNOB=0: " in verdict


# What varies, the exit code, words of the verdict.
VERDICTS = """
MLP_MULT=2,3 | 0 | no measurable difference between MLP_MULT=3 and MLP_MULT=2: step
MLP_MULT=2,3 | 0 | validation time equal to the digit, loss equal
TRAIN_PREFETCH=1,0 | 0 | Verdict: TRAIN_PREFETCH=0 changes input wait by +11 ms per st
TRAIN_PREFETCH=1,0 | 1 | TRAIN_PREFETCH=0 is no ablation: it trained on other data
"""


@pytest.mark.parametrize("row", VERDICTS.strip().splitlines())
def test_the_verdict_is_one_sentence(place: Place, row: str) -> None:
    """Overlap that changes the data is no ablation; what follows from a setting is no fault."""
    vary, code, words = row.split(" | ")
    found, out, _ = place("--vary", vary, "--out", "out", FAKE_OTHER_DATA=code)
    verdict = place.manifest["verdict"]
    assert found == int(code) and words in verdict and verdict in out


def test_scripts_take_turns_as_settings_do(place: Place) -> None:
    """Each run has a copy of its script; one that has changed since is refused."""
    other = place.folder / "ema.py"
    other.write_text(FAKE.replace("pace = 50", "pace = 70"))
    words = ("--script", "fake.py,ema.py", "--vary", "KNOB=0,1", "--out", "out", "--seeds", "2")
    code, out, err = place(*words)
    ids = ["script-fake_knob-0", "script-fake_knob-1", "script-ema_knob-0", "script-ema_knob-1"]
    assert (code, err) == (0, "") and place.started()[:4] == [f"{name}_seed1337" for name in ids]
    found = place.difference("step time")
    assert found["arm"] == "fake.py KNOB=1" and found["mean"] == pytest.approx(10, abs=0.1)
    found = [d for d in place.manifest["differences"] if d["metric"] == "step time"][1]
    assert found["arm"] == "ema.py KNOB=0" and found["mean"] == pytest.approx(20, abs=0.1)
    work = place.folder / "out" / "runs" / "script-ema_knob-0_seed1337"
    assert (work / "ema.py").read_text() == other.read_text() and not (work / "fake.py").exists()
    assert place.starts()[2]["script"] == str(work / "ema.py"), "the copy runs"
    other.write_text(FAKE)
    code, _, err = place(*words)
    assert code == 2 and "ema.py was" in err and len(place.starts()) == 8


def test_what_two_seeds_could_not_have_shown_is_said(place: Place) -> None:
    code, out, _ = place(*TWO, "--seeds", "2", FAKE_COST="0.02", FAKE_DRIFT="0.1")
    found = place.difference("step time")
    reach = (found["high"] - found["low"]) / 2
    assert code == 0 and not found["measurable"] and found["seen_from"] == pytest.approx(reach)
    assert f"step time (2 seeds can detect a difference of {reach:.3g} ms or more)" in out


def test_preflight_passes_and_says_what_matters(place: Place) -> None:
    more = {"CHECKPOINT_EVERY": "5", "RESUME": "auto"}
    code, out, err = place(tool=preflight, MAX_WALLCLOCK_SECONDS="100", **more)
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith("READY: ")
    names = ("ITERATIONS", "MAX_WALLCLOCK_SECONDS", "VAL_TOKENS", "TRAIN_PREFETCH")
    seen = [" ".join(start[name] for name in names) for start in place.starts()]
    assert seen == ["20 0 8193 1", "20 0 8193 0"]
    assert not [start for start in place.starts() if "CHECKPOINT_EVERY" in start]
    for words in (
        "2 train shards, 5,000 tokens",
        "note  resume    RESUME=auto is not tried here",
        "data_crc 00000539 at step 20",
        "12 losses agree to the last digit",
        "note  time      50.00 ms per step with overlap on, 50.00 off: 10 steps each cannot tell",
        "about 1,999 steps fit MAX_WALLCLOCK_SECONDS=100, ITERATIONS=20 ends it first",
        "note  tokens    20,480 will be trained on: 4.10 passes",
        "5 MiB at the peak",
    ):
        assert words in out
    assert not list(place.folder.glob("logs/preflight/*/final_model*"))
    (place.folder / "on").mkdir()
    (place.folder / "on" / "mine.txt").touch()
    code, out, err = place("--out", ".", tool=preflight)
    assert code == 2 and "on: holds other files than those of a run: name another --out" in err
    assert (place.folder / "on" / "mine.txt").exists()


@pytest.mark.parametrize(
    ("variables", "words", "starts"),
    [
        ({"DATA_PATH": "cut"}, "n_000000.bin: 1,043 bytes, but its header promises 1,042", 0),
        ({"TOKENIZER_PATH": "none"}, "set TOKENIZER_PATH", 0),
        ({"KNOB": "99"}, "KNOB=99: set less", 0),
        ({"FAKE_REFUSE": "1"}, "HEADS=3: set 4", 1),
        ({"FAKE_FAIL": "preflight_overlap_off"}, "boom: the disk is full", 2),
        ({"FAKE_OTHER_DATA": "1"}, "data_crc 00000539 and 00000540 at step 1", 2),
        ({"FAKE_GAP": "1e-9"}, "must agree to the last digit", 2),
        ({"FAKE_DEVICE": "H100", "FAKE_GAP": "5e-3"}, "train_loss at step 1 is", 2),
        ({"FAKE_DEVICE": "H100", "FAKE_GAP": "nan"}, "losses differ", 2),
        ({"FAKE_DEVICE": "H100", "FAKE_GAP": "5e-4"}, "READY: python3 fake.py", 2),
    ],
)
def test_preflight_judges(place: Place, variables: dict[str, str], words: str, starts: int) -> None:
    """Losses on a GPU may differ by what its sums do."""
    for split in ("train", "val"):
        write_split(place.folder / "cut", split, np.arange(9), [])
    shard = place.folder / "cut" / "fineweb_train_000000.bin"
    shard.write_bytes(shard.read_bytes() + b"x")
    code, out, err = place(tool=preflight, **variables)
    assert words in out + err and len(place.starts()) == starts
    last = (out + err).splitlines()[-1]
    assert code == 2 * (last != "READY: python3 fake.py")
    assert code == 0 or "NOT READY" in last or err.startswith("error: ")


def test_preflight_holds_processes_against_devices(place: Place) -> None:
    device = {"name": "H100", "driver": "550", "total_mib": "81559"}
    with mock.patch.object(launch, "gpus", lambda: [device] * 4):
        out = place(tool=preflight)[1]
    assert "4 x H100, driver 550, 1 of them used" in out
    assert "uses 1 of 4: set --nproc_per_node=4" in out
    for words, count in (
        ("torchrun --standalone --nproc_per_node=8 t.py", 8),
        ("torchrun --nproc-per-node 2 t.py", 2),
        ("torchrun --nproc_per_node=gpu t.py", 4),
        ("python t.py", 1),
    ):
        assert preflight.processes(words.split(), 4) == count


def real(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """A tool on train_gpt.py, called in `folder`, with data under a relative path."""
    (folder / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
    data = conftest.byte_data(folder / "d") | {"DATA_PATH": "d", "TOKENIZER_PATH": "d/byte.json"}
    variables = clean_environment(**conftest.SMALL_MODEL | {"TRAIN_BATCH_TOKENS": 512} | data)
    streams = {"capture_output": True, "text": True, "timeout": 110}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=variables, **streams)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_our_trainer_is_ablated(tmp_path: Path) -> None:
    """Overlap changes nothing, and nothing differs between the runs but seed and overlap. The
    script alone is named, as in the command that compare.py says."""
    words = ("--vary", "TRAIN_PREFETCH=1,0", "--seeds", "2", "--steps", "6")
    done = real(tmp_path, TOOL, *words, "--", "train_gpt.py")
    folder = tmp_path / "logs" / "ablate-train_prefetch"
    manifest = json.loads((folder / "manifest.json").read_text())
    loss = next(d for d in manifest["differences"] if d["metric"].startswith("loss"))
    assert loss["mean"] == 0 and "loss equal to the digit" in manifest["verdict"]
    assert re.search(r"Same data: yes, data_crc at step 6 .*: [0-9a-f]{8}: 1-4\n", done.stdout)
    differs = re.search(r"What differs in configuration.*\n((.+\n)+)", done.stdout)[1]
    rows = "seed 1337: 1-2 | 1338: 3-4 train_prefetch True: 1, 4 | False: 2-3"
    assert " ".join(differs.split()) == rows
    assert manifest["base"]["DATA_PATH"] == "d"
    assert (folder / "runs" / "train_prefetch-0_seed1337" / "final_model.int8.ptz").exists()


def test_a_script_that_is_switched_off_computes_the_same_and_is_named(place: Place) -> None:
    """Its setting is told before anything runs, and is a condition of all runs in the folder."""
    text = FAKE.replace('"knob": 0.0', '"knob": 0.0, "ema_decay": 0.0')
    (place.folder / "ema.py").write_text(
        text.replace("loss = 2", "loss = 2 - config['ema_decay'] * seed % 7")
    )
    words = ("--script", "ema.py,fake.py", "--seeds", "2", "--out", "out")
    code, out, _ = place(*words)
    assert code == 0 and "has these settings, at their defaults: EMA_DECAY=0.0\n[1/4]" in out
    verdict = place.manifest["verdict"]
    assert "fake.py computed the same as ema.py: all losses are equal to the digit" in verdict
    assert "--vary EMA_DECAY=0.0,VALUE -- python3 ema.py" in verdict
    assert "EMA_DECAY was not set, is 0.5" in place(*words, EMA_DECAY="0.5")[2]
    assert place(*words[:-1], "on", EMA_DECAY="0.5")[0] == 0
    report = (place.folder / "on" / "report.txt").read_text()
    assert "computed the same" not in report and "at their defaults" not in report


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python3", "torchrun --standalone --nproc_per_node=2"])
def test_our_trainer_passes_preflight(tmp_path: Path, launcher: str) -> None:
    out = real(tmp_path, PREFLIGHT, "--", *launcher.split(), "train_gpt.py").stdout
    assert f"{2 if 'torchrun' in launcher else 1} process" in out
    assert "12 losses agree to the last digit" in out
    assert "the same batches with overlap on and off" in out
    assert "ms per step with overlap on" in out
