"""tools/ablate.py: which runs it plans and keeps, how it runs a stand-in trainer and our trainer,
and what it concludes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import stdev
from typing import Any
from unittest import mock

import ablate
import pytest
from running import (
    ROOT,
    SMALL_MODEL,
    Call,
    byte_data,
    clean_environment,
    start_process,
    train_gpt,
    wait_until,
)
from runs import Result, Run
from samples import detectable_difference, t_test

TOOL = ROOT / "tools" / "ablate.py"
TWO = ("--vary", "KNOB=0,1", "--out", "out")
# A stand-in that writes events like train_gpt.py. Its figures follow from its settings. Variables
# FAKE_* make it fail, wait, refuse its settings or become slower: they stand for causes outside of
# the script, so their names are not in it.
FAKE = r"""
import json, os, re, signal, sys
from pathlib import Path
E = os.environ
KNOWN = {"knob": 0.0, "mlp_mult": 2.0, "train_prefetch": True, "seed": 1337, "iterations": 20,
         "max_wallclock_seconds": 600.0, "names": "a"}
fake = lambda name, default="": E.get("FAKE_" + name, default)
config = {k: type(v)(E[k.upper()] if type(v) is str else float(E[k.upper()]))
          if k.upper() in E else v for k, v in KNOWN.items()}
if "--print-config" in sys.argv:
    sys.exit(print(json.dumps(dict.fromkeys(KNOWN))))
run, seed, knob, N = E["RUN_ID"], config["seed"], config["knob"], config["iterations"]
with open("journal", "a") as journal:
    print(json.dumps({**E, "script": sys.argv[0]}), file=journal)
started = len(open("journal").readlines())
log = open(f"logs/{run}.jsonl", "x")
def event(name, **fields):
    print(json.dumps({"event": name, "time": 1000.0 + started, **fields}), file=log, flush=True)
def end(status, code):
    event("end", status=status, exit_code=code, error="")
    sys.exit(code)
event("run", run_id=run)
event("config", **config, run_id=run, data_path="data")
SHARD = Path("data", "fineweb_train_000000.bin")
made_of = {SHARD.name: f"{SHARD.read_text()} tokens, 0"} if SHARD.exists() else {}
event("made_of", **{"script": "aa", "fineweb_val_000000.bin": "x"}, **made_of)
event("hardware", device="x86_64", cpus=1, torch="2.13.0", python="3.12.0")
if fake("REFUSE"):
    print("fake: settings are wrong:\n  HEADS=3: set 4", file=sys.stderr)
    sys.exit(2)
name = re.sub("-[0-9a-f]{8}-seed", "-seed", run)
if name == fake("FAIL"):
    print("working\nboom: the disk is full", file=sys.stderr)
    end("failed", 1)
if name == fake("WAIT"):
    Path("waiting").touch()
    if fake("BACKGROUND"):  # SIGINT is ignored here, as in what a shell starts in the background
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try: signal.pause()
    except KeyboardInterrupt: end("interrupted", 130)
off = not config["train_prefetch"]
pace = 50 + knob * 10 + seed % 7 * 0.3 + started * float(fake("DRIFT", "1e-4"))
pace += seed * knob % 3 * 0.01 + float(E.get("READ_DELAY_MS", 0))
loss = 2 + seed % 10 / 100 + knob * float(fake("EFFECT", "0")) * (1 + seed % 3 / 20) / N
for step in range(1, N + 1):
    event("step", step=step, train_loss=loss + 10 / step, train_time_ms=step * pace, data_crc="a")
event("validation", step=N, val_loss=loss, val_bpb=loss / 2, train_time_ms=N * pace)
wait = N * ((1, 12)[off] + seed % 3 / 10)
event("input", timing_train_loop_ms=N * pace, timing_val_total_ms=70, total_ms=wait,
      share_percent=1, epochs=0.1)
event("artifact", artifact_bytes=3000, code_bytes=900)
event("score", val_loss=loss, val_bpb=loss / 2, eval_time_ms=5)
end("finished", 0)
"""


class Place:
    """A folder in which a user works with the stand-in trainer, and the trainer's starts."""

    def __init__(self, folder: Path, call: Call) -> None:
        self.folder, self.call = folder, call
        self.script = folder / "fake.py"
        self.script.write_text(FAKE)

    def __call__(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """Call ablate.py on the trainer, with these variables in the environment."""
        with mock.patch.dict(os.environ, variables):
            return self.call(ablate.main, *words, "--", "python3", "fake.py")

    def starts(self) -> list[dict[str, Any]]:
        journal = self.folder / "journal"
        text = journal.read_text() if journal.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def run_ids(self) -> list[str]:
        """Return the RUN_IDs of all starts, without their checksums."""
        return [re.sub("-[0-9a-f]{8}-seed", "-seed", start["RUN_ID"]) for start in self.starts()]

    def log(self, run: str) -> Path:
        name, _, seed = run.rpartition("-")
        [path] = (self.folder / "logs").glob(f"{name}-????????-{seed}.jsonl")
        return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Place:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablate, "plot", lambda *_: "no plot in tests")
    return Place(tmp_path, call)


def verdict_of(out: str) -> str:
    return out.split("Verdict")[1].split("\n\n")[0].split("\n", 1)[1].strip()


def row_of(out: str, quantity: str) -> str:
    """Return the line of a quantity in the table of differences."""
    table = out.split("Differences from")[1].split("\n\n")[0]
    return next(line for line in table.splitlines() if quantity in line)


def test_a_setting_that_the_script_does_not_have_is_an_error(place: Place) -> None:
    """Before the first run if the script prints its settings, else after the first run."""
    (place.folder / "run.sh").write_text("exec python3 fake.py\n")
    quick = str(ROOT / "data" / "quickstart.py")
    for number, (vary, command, starts, words) in enumerate(
        (
            (
                "KNBO=0,1",
                ("python3", "fake.py"),
                0,
                "fake.py has no such setting; --help lists them; did you mean KNOB?",
            ),
            ("MATRIX_LRR=0,1", ("python3", quick), 0, "train_gpt.py has no such setting; --h"),
            (
                "knob=0,1",
                ("bash", "run.sh"),
                1,
                "knob=0: the run had None: the trainer has no such",
            ),
        )
    ):
        before, words_before = len(place.starts()), ("--vary", vary, "--out", f"out{number}", "--")
        code, _, err = place.call(ablate.main, *words_before, *command)
        assert code == 2 and words in err and len(place.starts()) == before + starts
    assert place("--vary", "OMP_NUM_THREADS=1,2", "--out", "threads", "--seeds", "1")[0] == 0


def test_runs_take_turns_and_are_paired_by_seed(place: Place) -> None:
    words = ("--vary", "KNOB=0,1,2", "--out", "out", "--seeds", "3")
    code, out, err = place(*words, SEED="40", RUN_ID="mine", ITERATIONS="30")
    order = ["0-40", "1-40", "2-40", "1-41", "2-41", "0-41", "2-42", "0-42", "1-42"]
    ids = [f"out-{pair.replace('-', '-seed')}" for pair in order]
    assert (code, err) == (0, "") and place.run_ids() == ids
    assert re.search(r"\[8/9\] .* finished, about \d+ s left\n", out)
    for start, run in zip(place.starts(), ids, strict=True):
        assert run == f"out-{start['KNOB']}-seed{start['SEED']}" and start["ITERATIONS"] == "30"
        assert place.log(run).stem == start["RUN_ID"], "the log has the usual place"
    assert out.index("Verdict") < out.index("Differences") < out.index("What differs")
    assert (place.folder / "out" / "report.txt").read_text().strip() in out


def test_differences_have_the_interval_of_their_pairs(place: Place) -> None:
    seeds = (1337, 1341, 1350)
    code, out, _ = place(*TWO, "--seeds", ",".join(map(str, seeds)), FAKE_DRIFT="0")
    test = t_test([0] * 3, [10 + seed % 3 * 0.01 for seed in seeds], by_seed=True)
    assert "corrected by Holm for 1 differences of losses, and for 4 others" in out
    figures = f"{test.difference:+.4g} ms ({test.low:+.4g} to {test.high:+.4g})"
    assert code == 0 and re.split(r"  +", row_of(out, "step time"))[-2:] == [figures, "measurable"]
    assert row_of(out, "validation time").endswith("  equal")
    verdict = verdict_of(out)
    assert verdict.startswith(f"KNOB=1 against KNOB=0: step time {figures}")
    assert verdict.endswith("losses are equal to the last digit: the variants compute the same")
    out = place("--vary", "TRAIN_PREFETCH=1,0", "--out", "other")[1]
    assert "input wait +11 ms per step" in verdict_of(out)
    words = (
        r"step time of TRAIN_PREFETCH=0: (\S+) ms, of which \+11 ms is input wait and (\S+) ms is"
    )
    whole, rest = map(float, re.search(words, out).groups())
    assert rest == pytest.approx(whole - 11, abs=1e-3), "overlap cannot have caused the rest"
    out = place(*TWO[:3], "one", "--seeds", "1")[1]
    assert "one seed cannot tell a difference from chance; use --seeds 3" in verdict_of(out)


def test_losses_are_corrected_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With p = 0.03, one difference of losses is measurable, but none of two. Other quantities do
    not count for the losses."""
    test = dataclasses.replace(t_test([0.0] * 3, [1.0, 2.0, 4.0], by_seed=True), p_two_sided=0.03)
    monkeypatch.setattr(ablate, "t_test", lambda *_, **__: test)
    result = Result("roundtrip", "score", 2.0, 1.0)
    runs = [Run("x", seed=seed, result=result, val_total_ms=1.0) for seed in (1, 2)]
    for others, measurable in ((1, [True]), (2, [False, False])):
        variants = {ablate.Variant((("KNOB", str(n)),)): runs for n in range(1 + others)}
        found = ablate.find_differences({(): variants})
        assert [one.measurable for one in found if one.metric == "loss"] == measurable
        assert len(found) == 2 * others


def test_variants_of_a_file_are_compared_within_each_value(place: Place) -> None:
    """Two runs at a time share the cores, and each value of --for-each has a first variant."""
    text = "# ideas\nbase:\nup: KNOB=1\ntwice: KNOB=2\n\ndown: KNOB=-1 NAMES='a b'\n"
    (place.folder / "ideas.txt").write_text(text)
    words = ("--variants", "ideas.txt", "--for-each", "ITERATIONS=20,30", "--jobs", "2")
    code, out, _ = place(*words, "--out", "out", FAKE_EFFECT="1")
    starts = place.starts()
    assert code == 0 and len(starts) == 4 * 2 * 3
    assert {start["OMP_NUM_THREADS"] for start in starts} == {
        str(max(1, len(os.sched_getaffinity(0)) // 2))
    }
    assert {start.get("NAMES") for start in starts} == {None, "a b"}
    assert "ideas: 4 variants x 3 seeds x 2 values of --for-each: 24 runs" in out
    assert "for 6 differences of losses, and for 24 others" in out
    effects = out.split("Effect on the loss")[1:]
    for steps, block in zip((20, 30), effects, strict=True):
        assert block.startswith(f", the lowest loss first, with ITERATIONS={steps}\n")
        rows = [line.split() for line in block.splitlines()[2:5]]
        assert [row[0] for row in rows] == ["down", "up", "twice"]
        mean = sum(1 + seed % 3 / 20 for seed in (1337, 1338, 1339)) / 3 / steps
        found = [float(row[1]) for row in rows]
        assert found == pytest.approx([-mean, mean, 2 * mean], rel=1e-3)
    assert "validation texts differ" not in out, "runs of two blocks are not compared"
    # Effects are -e, e and 2 e, with e = (1 + seed % 3 / 20) / steps.
    factors = [1 + seed % 3 / 20 for seed in (1337, 1338, 1339)]
    for steps, part in zip((20, 30), out.split("How large a difference")[1:], strict=True):
        spread = stdev(factors) / steps  # the median of e, e and 2 e
        expected = detectable_difference(spread, 5, 6)
        row = re.search(r"\n5 +(\S+) nats\n", part)
        assert float(row[1]) == pytest.approx(expected, rel=0.01)
        assert "80 of 100 experiments with 6 comparisons" in part
    assert (place.folder / "out" / "effects.png").read_bytes().startswith(b"\x89PNG")
    assert "24 of 24 runs are finished" in place(*words, "--out", "out", FAKE_EFFECT="1")[1]


def test_two_variants_have_a_table_of_seeds(place: Place) -> None:
    code, out, _ = place(*TWO, "--seeds", "3", FAKE_EFFECT="1")
    assert code == 0, out
    rows = re.findall(r"^(\d+) +(\S+) nats$", out.split("How large a difference")[1], re.MULTILINE)
    assert [int(seeds) for seeds, _ in rows] == [3, 5, 10, 20]
    sizes = [float(size) for _, size in rows]
    assert sizes == sorted(sizes, reverse=True) and 0 < sizes[-1] < sizes[0] / 4


def test_a_failing_run_is_shown_and_the_others_continue(place: Place) -> None:
    """If the trainer rejects its settings, no other run is started."""
    code, out, _ = place(*TWO, "--seeds", "3", FAKE_FAIL="out-1-seed1338")
    assert code == 1 and len(place.starts()) == 6
    assert "FAILED (exit code 1)" in out and "    boom: the disk is full" in out
    assert "KNOB=1 seed 1338: exit code 1" in out.split("Failed\n")[1]
    assert re.split(r"  +", row_of(out, "step time"))[2] == "2", "only two pairs are left"
    code, out, _ = place(*TWO, "--seeds", "3")
    assert code == 0 and place.run_ids()[6:] == ["out-1-seed1338"]
    assert "5 of 6 runs are finished and kept" in out
    code, out, err = place("--vary", "KNOB=0,1", "--out", "other", FAKE_REFUSE="1")
    assert code == 2 and len(place.starts()) == 8, "the others would fail, too"
    assert "HEADS=3: set 4" in out and "no other run was started" in err


def test_only_what_is_missing_runs_again(place: Place) -> None:
    assert place(*TWO, "--seeds", "2")[0] == 0
    begun = len(place.starts())
    assert place(*TWO, "--seeds", "2")[0] == 0 and len(place.starts()) == begun
    log = place.log("out-1-seed1337")
    log.write_text(log.read_text().split('{"event": "end"')[0])
    checkpoint = place.folder / "checkpoints" / log.stem / "step_00000002.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert place(*TWO, "--seeds", "2")[0] == 0 and place.run_ids()[begun:] == ["out-1-seed1337"]
    assert not checkpoint.exists(), "the new run would resume from it"
    assert place("--vary", "KNOB=0,1,2", "--out", "out", "--seeds", "3")[0] == 0
    new = [f"out-2-seed{seed}" for seed in (1337, 1338, 1339)]
    new += ["out-0-seed1339", "out-1-seed1339"]
    assert sorted(place.run_ids()[begun + 1 :]) == sorted(new)


def test_runs_of_another_experiment_are_not_mixed_in(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another setting or script makes another experiment, which keeps its own runs. Logs that
    ablate.py did not make are not touched."""
    foreign = place.folder / "logs" / "out-0-seed1337.jsonl"
    foreign.parent.mkdir()
    foreign.write_text("precious")
    for starts, variables, script in (
        (2, {}, FAKE),
        (2, {"ITERATIONS": "9"}, FAKE),
        (2, {"MLP_MULT": "4"}, FAKE),
        (0, {}, FAKE),
        (2, {}, FAKE + "# changed\n"),
        (0, {"ITERATIONS": "9"}, FAKE),
    ):
        place.script.write_text(script)
        begun = len(place.starts())
        code, out, _ = place(*TWO, "--seeds", "1", **variables)
        assert code == 0 and len(place.starts()) == begun + starts
        assert ("2 of 2 runs are finished and kept" in out) == (starts == 0)
    assert foreign.read_text() == "precious"
    quick = place.folder / "quick.py"
    quick.write_text("import runpy\nrunpy.run_path('fake.py')\n")
    monkeypatch.setattr(ablate, "QUICKSTART", quick)
    monkeypatch.setattr(ablate, "TRAINER", place.script)
    for number, script in enumerate((FAKE, FAKE + "# edited\n"), 1):
        place.script.write_text(script)
        begun = len(place.starts())
        words = (*TWO, "--seeds", "1", "--", "python3", str(quick))
        assert place.call(ablate.main, *words)[0] == 0
        assert len(place.starts()) == begun + 2, f"quickstart.py runs this trainer: {number}"


@pytest.mark.parametrize(
    ("number", "in_background"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
)
def test_an_interruption_ends_the_child_and_keeps_the_rest(
    place: Place, number: int, in_background: bool
) -> None:
    """A shell without job control ignores SIGINT in what it starts in the background."""
    run = "out-1-seed1338"
    command = [sys.executable, TOOL, *TWO, "--seeds", "2", "--", "python3", "fake.py"]
    environment = {**os.environ, "FAKE_WAIT": run}
    if in_background:
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
        environment["FAKE_BACKGROUND"] = "1"
    with start_process(command, env=environment, stderr=subprocess.STDOUT) as process:
        wait_until((place.folder / "waiting").exists)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out
    assert "interrupted: finished runs are kept; give the same command again" in out
    events = place.log(run).read_text()
    assert json.loads(events.splitlines()[-1])["status"] == "interrupted", (
        "the run received the interruption"
    )
    assert place(*TWO, "--seeds", "2")[0] == 0
    assert len(place.starts()) == 5 and place.run_ids()[2:4] == [run, run]


def test_scripts_take_turns_as_settings_do(place: Place) -> None:
    """Each script replaces {script}, also in the options of a wrapper."""
    (place.folder / "ema.py").write_text(FAKE.replace("pace = 50", "pace = 70"))
    words = ("--script", "fake.py,ema.py", "--vary", "KNOB=0,1", "--out", "out", "--seeds", "2")
    start = "import os, sys\nos.execv(sys.executable, [sys.executable, sys.argv[2]])\n"
    (place.folder / "quick.py").write_text(start)
    command = ("--", sys.executable, "quick.py", "--script", "{script}")
    code, out, err = place.call(ablate.main, *words, *command)
    ids = [f"out-{name}-seed1337" for name in ("fake-0", "fake-1", "ema-0", "ema-1")]
    assert (code, err) == (0, "") and place.run_ids()[:4] == ids
    verdicts = [line.strip() for line in verdict_of(out).splitlines()]
    assert verdicts[1].startswith("ema.py KNOB=0 against fake.py KNOB=0: step time +20 ms")
    assert len(verdicts) == 3


def test_no_two_variants_share_a_run(place: Place) -> None:
    """Even with scripts of one name, and with values that contain commas or join to one text."""
    for name, pace in (("a", "pace = 50"), ("b", "pace = 70")):
        (place.folder / name).mkdir()
        (place.folder / name / "x.py").write_text(FAKE.replace("pace = 50", pace))
    words = ("--script", "a/x.py,b/x.py", "--seeds", "2", "--out", "scripts")
    _, out, _ = place.call(ablate.main, *words, "--", "python3", "{script}")
    assert "b/x.py against a/x.py: step time +20 ms" in verdict_of(out)
    values = ("--vary", "NAMES=1-2,1", "--vary", "PLACE=3,2-3", "--out", "values", "--seeds", "1")
    place.script.write_text(FAKE.replace('"names": "a"', '"names": "a", "place": "a"'))
    assert place(*values)[0] == 0
    assert place("--vary", "NAMES=a,b;c", "--out", "commas", "--seeds", "1")[0] == 0
    assert len({start["RUN_ID"] for start in place.starts()}) == len(place.starts()) == 4 + 4 + 2
    assert [start["NAMES"] for start in place.starts()[-2:]] == ["a,b", "c"]


def test_variables_that_are_no_settings_make_other_runs(place: Place) -> None:
    """Those whose names are in the script, and those that PyTorch reads; but not those of the
    terminal. They can be varied, too."""
    for starts, variables in (
        (2, {}),
        (2, {"READ_DELAY_MS": "50"}),
        (2, {"OMP_NUM_THREADS": "2"}),
        (0, {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "3", "UNKNOWN_TO_ALL": "1"}),
        (0, {"READ_DELAY_MS": "50"}),
    ):
        begun = len(place.starts())
        assert place(*TWO, "--seeds", "1", **variables)[0] == 0
        assert len(place.starts()) == begun + starts, variables
    words = ("--vary", "READ_DELAY_MS=0,50", "--out", "delay", "--seeds", "2")
    code, out, _ = place(*words)
    assert code == 0 and "READ_DELAY_MS=50 against READ_DELAY_MS=0: step time +50" in out
    words = (
        r"step time of READ_DELAY_MS=50: (\S+) ms, of which \+0 ms is input wait and \1 ms is all "
    )
    assert re.search(words + "else", out)


def test_a_copied_log_is_no_run_of_another_seed(place: Place) -> None:
    assert place(*TWO, "--seeds", "2")[0] == 0
    first, second = place.log("out-0-seed1337"), place.log("out-0-seed1338")
    second.write_bytes(first.read_bytes())
    code, _, err = place(*TWO, "--seeds", "2")
    assert code == 2 and len(place.starts()) == 4
    words = f"{second.relative_to(place.folder)} is the log of another run, {first.stem}; move it"
    assert err == f"error: {words} away\n"


def test_a_changed_helper_file_makes_other_runs(place: Place) -> None:
    """It lies beside the script, which imports it; the helper imports another one."""
    place.script.write_text("import helper\n" + FAKE)
    for starts, scale in ((2, "1"), (2, "2"), (0, "1")):
        (place.folder / "helper.py").write_text("from deeper import SCALE\n")
        (place.folder / "deeper.py").write_text(f"import helper\nSCALE = {scale}\n")
        (place.folder / "not_used.py").write_text(str(place.starts()))
        begun = len(place.starts())
        assert place(*TWO, "--seeds", "1")[0] == 0 and len(place.starts()) == begun + starts


def test_data_that_changed_under_finished_runs_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a run is started; with another folder all runs are made again."""
    shard = place.folder / "data" / "fineweb_train_000000.bin"
    shard.parent.mkdir()
    shard.write_text("5")
    monkeypatch.setattr(ablate.cli, "shard_identity", lambda path: f"{path.read_text()} tokens, 0")
    assert place(*TWO, "--seeds", "2")[0] == 0
    assert place(*TWO, "--seeds", "2")[0] == 0 and len(place.starts()) == 4
    shard.write_text("6")
    code, out, err = place(*TWO, "--seeds", "3")
    assert code == 2 and len(place.starts()) == 4 and err.count("\n") == 1
    assert err.startswith("error: data/fineweb_train_000000.bin has changed since logs/out-0-")
    assert err.endswith("; give --out another folder to make all runs again, or restore what has "
                        "changed\n")  # fmt: skip
    assert place("--vary", "KNOB=0,1", "--out", "again", "--seeds", "2")[0] == 0
    assert len(place.starts()) == 8


@pytest.mark.parametrize("tokens", [1, 40_000, 100_000])
def test_a_shard_is_identified_as_the_trainer_does(tmp_path: Path, tokens: int) -> None:
    """Else ablate.py would call each shard changed, or none. Shards may be shorter than the parts
    that are read."""
    path = tmp_path / "fineweb_train_000000.bin"
    ablate.cli.write_shard(path, range(tokens) if tokens < 1 << 16 else [*range(50_000)] * 2)
    assert ablate.cli.shard_identity(path) == train_gpt.open_shard(path).identity


def test_a_command_that_ignores_the_seed_is_no_ablation(place: Place) -> None:
    """All its seeds are one sample: its intervals would have no width."""
    place.script.write_text(FAKE.replace("loss = 2 + seed % 10 / 100", "loss = 2 + knob / 100"))
    code, out, _ = place(*TWO, "--seeds", "3")
    assert code == 1 and "not an ablation: the loss is equal to the last digit for all" in out


def test_scores_of_other_texts_are_no_ablation(place: Place) -> None:
    (place.folder / "other.py").write_text(FAKE.replace('.bin": "x"', '.bin": "y"'))
    words = ("--script", "fake.py,other.py", "--seeds", "2", "--out", "out")
    code, out, _ = place.call(ablate.main, *words, "--", "python3", "{script}")
    assert code == 1 and "not an ablation: the validation shards differ" in verdict_of(out)


@pytest.mark.slow
def test_our_trainer_is_ablated(tmp_path: Path) -> None:
    """Overlap does not change the losses; the runs differ only in seed and overlap. A plot is
    drawn."""
    (tmp_path / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
    data = byte_data(tmp_path / "d") | {"DATA_PATH": "d", "TOKENIZER_PATH": "d/byte.json"}
    data |= {"TRAIN_BATCH_TOKENS": 512, "ITERATIONS": 6}
    variables = clean_environment(**SMALL_MODEL | data)
    words = ("--vary", "TRAIN_PREFETCH=1,0", "--seeds", "2", "--", sys.executable, "train_gpt.py")
    streams = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, TOOL, *words], cwd=tmp_path, env=variables, **streams)
    assert done.returncode == 0, done.stdout + done.stderr
    assert row_of(done.stdout, "loss").endswith("  equal")
    same = r"Same data: yes, data_crc at step 6 .*: [0-9a-f]{8}: 1, 2, 3, 4\n"
    assert re.search(same, done.stdout)
    differs = re.search(r"What differs.*\n((.+\n)+)", done.stdout)[1]
    rows = "seed 1337: 1, 3 | 1338: 2, 4 train_prefetch True: 1, 2 | False: 3, 4"
    assert " ".join(differs.split()) == rows
    folder = tmp_path / "logs" / "ablate-train_prefetch"
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_that_sets_the_variable_itself_is_named(place: Place, call: Call) -> None:
    for number, (own, words) in enumerate(
        (
            ("KNOB=1", "KNOB=2: the run had 1.0: the trainer has no such setting, or the"),
            ("NAMES=c", "NAMES=x: the run had c: the trainer has no such setting, or the"),
            ("SEED=5", "SEED=1337: the run had 5: the trainer has no such setting, or the"),
            ("RUN_ID=x", "was not written; the command must train, and must not set RUN_ID itself"),
        )
    ):
        Path("run.sh").write_text(f"{own} exec {sys.executable} fake.py\n")
        vary = "NAMES=x,y" if "NAMES" in own else "KNOB=1,2"
        words_before = ("--vary", vary, "--out", f"out{number}", "--")
        code, _, err = call(ablate.main, *words_before, "bash", "run.sh")
        assert (code, err.count("\n")) == (2, 1) and words in err
