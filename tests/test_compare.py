"""logs/compare.py and its picture: what differs, same data, A against B with its refusals, two
runs alone, and logs of our trainer."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, clean_environment, run_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(ROOT / "logs"))
import compare  # noqa: E402  (the room is no package)
import picture  # noqa: E402
import stats  # noqa: E402

pytestmark = pytest.mark.timeout(200)
TOKENS, BYTES = stats.PUBLISHED["sp1024"]


def bpb_of(nats: float, factor: float = 1.0) -> float:
    return nats / math.log(2) * TOKENS / (BYTES * factor)


FIGURES = {
    "seed": 1,
    "nats": 2.05,
    "steps": 500,
    "code": 48000,
    "crc": "",
    "tokens": TOKENS,
    "factor": 1.0,
    "pace": 43.5,
    "extra": "",
}
HEADER = {
    "train_batch_tokens": 524288,
    "train_seq_len": 1024,
    "iterations": 20000,
    "matrix_lr": 0.04,
}


def write_log(path: Path, **changed: Any) -> Path:
    """A text log as the challenge's script writes it; of `changed`, what is none of FIGURES are
    words of its header."""
    log = SimpleNamespace(**{name: changed.pop(name, value) for name, value in FIGURES.items()})
    words = HEADER | changed
    ms = log.pace + log.seed / 100
    lines = [
        "train_loader:dataset:fineweb10B_sp1024 train_shards:80",
        f"val_loader:shards pattern=x tokens:{log.tokens}",
        "model_params:17059912",
        "world_size:8 grad_accum_steps:1",
        f"seed:{log.seed}",
        " ".join(f"{k}:{v}" for k, v in words.items()),
        log.extra,
    ]
    for step in (1, 10, 100, 200, 300, 400, log.steps):
        tail = f" data_crc:{zip_crc(log.crc, step)}" if log.crc else ""
        train_loss, val_loss = log.nats + 40 / (step + 9), log.nats + 30 / (step + 9)
        lines.append(
            f"step:{step}/20000 train_loss:{train_loss:.4f} train_time:{step * ms:.0f}ms "
            f"step_avg:{ms:.2f}ms{tail}"
        )
        lines.append(
            f"step:{step}/20000 val_loss:{val_loss:.4f} "
            f"val_bpb:{bpb_of(val_loss, log.factor):.4f} train_time:{step * ms:.0f}ms"
        )
    lines += [
        f"Code size: {log.code} bytes",
        "Serialized model int8+zlib: 15702114 bytes",
        f"Total submission size int8+zlib: {15702114 + log.code} bytes",
        f"final_int8_zlib_roundtrip_exact val_loss:{log.nats:.8f} "
        f"val_bpb:{bpb_of(log.nats, log.factor):.8f}",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def zip_crc(name: str, step: int) -> str:
    return f"{sum(map(ord, name)) * 7919 + step:08x}"


def arm(folder: Path, name: str, results: list[float], **changed: Any) -> list[str]:
    return [
        str(write_log(folder / f"{name}_seed{seed}.log", seed=seed, nats=nats, **changed))
        for seed, nats in enumerate(results, 1)
    ]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = compare.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def block(out: str, title: str) -> list[str]:
    """The lines below a title, to the next empty line."""
    return next(part for part in out.split("\n\n") if part.startswith(title)).splitlines()[1:]


def test_what_differs_comes_first_and_counts_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = arm(tmp_path, "a", [2.05, 2.06, 2.07]) + arm(
        tmp_path, "b", [2.04], matrix_lr=0.02, code=48100
    )
    code, out, err = call(capsys, *logs)
    assert (code, err) == (0, "") and out.startswith("What differs in configuration")
    rows = dict(line.strip().split(None, 1) for line in block(out, "What differs"))
    assert rows == {
        "seed": "1: 1, 4 | 2: 2 | 3: 3",
        "matrix_lr": "0.04: 1-3 | 0.02: 4",
        "code_bytes": "48000: 1-3 | 48100: 4",
    }
    assert "Could not be read" not in out


def test_the_tables_hold_the_numbers_of_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(
        tmp_path / "train_seed9.log", seed=3, nats=2.0601, code=300_000, extra="stopping_early"
    )
    code, out, _ = call(capsys, tmp_path)
    head, row = block(out, "Time")
    times = ["43.53", "43.53", "43.53", "44.00", "21.8"]
    assert row.split() == ["1", "train_seed9.log", "500", *times]
    names = ["#", "log", "steps", "ms/step", "p50", "p99", "max", "train s"]
    assert re.split(r"  +", head) == names
    nats, bpb = "2.06010", f"{bpb_of(2.0601):.5f}"
    assert block(out, "Results")[1].split() == [
        *("1", "train_seed9.log", "2.1387", "2.1190", "1.2550", "1.25500", bpb, bpb, nats),
        *("300,000", "15,702,114", "16,002,114", "-2,114"),
    ]
    assert block(out, "Remarks") == [
        "  1: its name says seed 9, its log 3",
        "  1: 2,114 bytes over the cap of 16,000,000",
    ]
    assert code == 0


def test_groups_of_seeds_have_mean_and_deviation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = arm(tmp_path, "a", [2.05, 2.06, 2.07]) + arm(tmp_path, "b", [2.04, 2.08], matrix_lr=0.02)
    _, out, _ = call(capsys, *logs)
    group, (first, second) = stats.summary([2.05, 2.06, 2.07]), block(out, "Groups")
    assert first.startswith(f"  runs 1-3: nats {group.mean:.5f} std {group.std:.5f}, bits a byte ")
    assert second.startswith("  runs 4-5")


def test_same_data_is_judged_at_the_last_common_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_log(tmp_path / "1.log", crc="x", steps=500)
    two = write_log(tmp_path / "2.log", crc="x", steps=600, seed=2)
    other = write_log(tmp_path / "3.log", crc="y", seed=3)
    none = write_log(tmp_path / "4.log", seed=4)
    answer = [
        call(capsys, *logs)[1]
        for logs in ((one, two), (one, two, other, none), (one, none), (none, none))
    ]
    at = zip_crc("x", 400)
    assert f"Same data: yes, data_crc at step 400 (the last common one): {at}: 1-2\n" in answer[0]
    assert (
        f"NO, data_crc at step 400 (the last common one): {at}: 1-2 | {zip_crc('y', 400)}: 3; "
        in answer[1]
    )
    assert "no data_crc: 4" in answer[1]
    assert "Same data: not known (no common step with a data_crc; no data_crc: 2)" in answer[2]
    assert "Same data: not known" in answer[3]


A, B = [2.0600, 2.0612, 2.0607], [2.0801, 2.0790, 2.0812]


def test_a_better_group_is_shown_with_its_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", B, matrix_lr=0.02)
    code, out, _ = call(capsys, "--a", *a, "--b", *b)
    test, words = stats.welch(A, B, margin=0.005), block(out, "A against B")
    assert code == 0 and words[-1].startswith(
        f"  A is better than B by more than 0.005 nats: p = {test.p:.2g} < 0.01; "
        f"A is {test.difference:.5f} nats lower"
    )
    assert (
        words[0] == f"  A: 3 runs, submitted {sum(A) / 3:.5f} nats, std {stats.summary(A).std:.5f}"
    )
    code, out, _ = call(capsys, "--a", *a, "--b", *b, "--margin", "0.019", "--alpha", "0.2")
    assert code == 0 and f"p = {stats.welch(A, B, margin=0.019).p:.2g}, not below 0.2" in out
    assert "A and B differ in matrix_lr: which is better is tested, not why" in out
    code, out, _ = call(capsys, "--a", *b, "--b", *a)
    assert (
        "not shown that A is better" in out
        and "nats higher" in out
        and "no measurable difference" not in out
    )


def test_no_difference_is_called_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", [x + 1e-5 for x in A], matrix_lr=0.02)
    _, out, _ = call(capsys, "--a", *a, "--b", *b)
    assert out.rstrip().endswith("no measurable difference")


def refusals(capsys: pytest.CaptureFixture[str], a: list[str], b: list[str]) -> str:
    code, out, _ = call(capsys, "--a", *a, "--b", *b)
    words = block(out, "A against B")[-1]
    assert code == 1 and "Welch" not in out and words.startswith("  refused: ")
    return words.removeprefix("  refused: ")


def test_groups_that_are_no_samples_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", B)
    mixed = [*a[:2], *arm(tmp_path, "m", [2.0607], matrix_lr=0.02)]
    found = refusals(capsys, mixed, b)
    assert found == "A mixes configurations: matrix_lr differ: name the runs of one"
    assert refusals(capsys, a[:1], b).startswith("A has 1 run: ")
    copy = write_log(tmp_path / "copy.log", nats=A[0])
    found = refusals(capsys, [*a, str(copy)], b)
    assert found == "A: copy.log repeats another run's seed and result: one run counts once"
    found = refusals(capsys, a, [*b, a[0]])
    assert "A and B share a run (equal to the digit): each run belongs to one of them" in found
    whole = Path(a[1]).read_text()
    Path(a[1]).write_text(whole.split("step:400/")[0] + "error: rank 2: no more shards\n")
    assert refusals(capsys, a, b) == (
        "A: a_seed2.log failed: rank 2: no more shards; "
        "a_seed2.log has no result to compare (failed, step 300): leave it out, or let it end"
    )
    gone = tmp_path / "gone.log"
    assert refusals(capsys, [a[0], a[2], str(gone)], b) == f"no run was read from {gone}"
    diverged = arm(tmp_path, "n", [2.08, math.nan, 2.09])
    assert "n_seed2.log has no result to compare (finished, step 500)" in refusals(
        capsys, a[::2], diverged
    )


def with_line(path: str, line: str) -> str:
    """The log with another line at its end."""
    Path(path).write_text(Path(path).read_text() + line + "\n")
    return path


def test_submitted_results_are_compared_whatever_evaluations_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A's decoded artifact is worse than B's, its sliding windows, which B has not, are better."""
    a, b = arm(tmp_path, "a", B), arm(tmp_path, "b", A)
    for path, nats in zip(a, A, strict=True):
        nats -= 0.0252
        line = f"final_int6_sliding_window val_loss:{nats:.8f} val_bpb:{bpb_of(nats):.8f}"
        with_line(path, line)
    code, out, _ = call(capsys, "--a", *a, "--b", *b)
    assert code == 0 and "A is better than B by more than 0.005 nats" in out
    assert "A is 0.02520 nats lower" in out
    assert "come from different evaluations (roundtrip, sliding)" in out


def test_nats_of_other_tokenizers_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no log tells its tokens: the bytes a token follow from the results."""
    a = arm(tmp_path, "a", A)
    b = arm(tmp_path, "b", [3.39, 3.391, 3.392], factor=1.65)
    for path in (*a, *b):
        Path(path).write_text(Path(path).read_text().replace(f" tokens:{TOKENS}", ""))
    code, out, _ = call(capsys, "--a", *a, "--b", *b)
    assert code == 0 and "note: tokenizers differ: compared in bits a byte" in out
    assert "A is better than B by more than 0.0018 bits a byte" in out
    code, out, _ = call(capsys, "--a", *a, "--b", *b, "--margin", "0.5")
    assert code == 0 and "not shown that A is better than B by more than 0.5 bits a byte" in out


def test_a_part_of_the_split_is_not_compared_with_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, part = arm(tmp_path, "a", A), arm(tmp_path, "p", B)
    for path in map(Path, part):
        path.write_text(path.read_text().replace(f":{TOKENS}", f":{TOKENS} partial_val:1"))
    found = refusals(capsys, a, part)
    assert found.startswith("some runs were validated on a part of the split: run them again")


def test_two_runs_alone_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (
        write_log(
            tmp_path / f"{on}.log", nats=2.05 + 0.01 * on, pace=43 + 2 * on, train_prefetch=on
        )
        for on in (0, 1)
    )
    out = call(capsys, one, two)[1]
    assert "run 2 is 0.00592 bits a byte higher than run 1; it takes 2.00 ms a step more" in out
    assert "not known: no input_wait in these logs; this decides it: python3 logs/ablate.py" in out
    for path, wait in ((one, 1), (two, 4)):
        with_line(path, f"input_wait total:9ms share:{wait}% most:9ms epochs:0.5")
    out = call(capsys, one, two)[1]
    # 4 % of 45.01 ms less 1 % of 43.01 ms
    assert "waiting for input is +1.37 ms of that" in out
    assert "ablate.py --vary TRAIN_PREFETCH=0,1 --seeds 3 -- python3 train_gpt.py" in out
    assert "Two runs" not in call(capsys, one, two, write_log(tmp_path / "c.log"))[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a log"),
        (["--a", "x"], "belong together"),
        (["x", "--plto", "y.png"], "unrecognized arguments: --plto y.png: --help lists"),
        (["x", "--plot", "y.gif"], ".png or .svg"),
        (["--a", "x", "--b", "y", "--alpha", "2"], "between 0 and 1"),
        (["x", "--margin", "nan"], "a number from 0"),
    ],
)
def test_wrong_usage_is_said_and_exits_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == "" and words in err and err.startswith("error: ")
    assert err.count("\n") == 1


def test_nothing_read_is_a_failure_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, tmp_path / "none.log")
    assert code == 1 and err.startswith("error: no run was read (") and err.count("\n") == 1
    assert block(out, "Could not be read") == [
        f"  {tmp_path / 'none.log'}: cannot be read: No such file or directory"
    ]


@pytest.mark.parametrize("package", ["scipy", "matplotlib", "pandas"])
def test_a_missing_package_is_one_line_with_the_command_that_brings_it(
    tmp_path: Path, package: str
) -> None:
    write_log(tmp_path / "a.log")
    (tmp_path / "without.py").write_text(
        f"import sys\nsys.modules[{package!r}] = None\nsys.path.insert(0, {str(ROOT / 'logs')!r})\n"
        "import compare\nsys.exit(compare.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "without.py", "a.log", "--plot", "out.png"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and not (tmp_path / "out.png").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert package in done.stderr and f"run {sys.executable} -m pip install " in done.stderr
    assert done.stdout.startswith("What differs") == (package != "scipy"), "the table stands"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    figures: list[Any] = []
    monkeypatch.setattr(picture, "save", lambda figure, path: figures.append(figure))
    return figures


def three_arms(folder: Path) -> list[str]:
    values = (A, B, [2.07, 2.071, 2.069])
    return [
        log
        for lr, nats in enumerate(values, 1)
        for log in arm(folder, f"lr{lr}", nats, matrix_lr=lr / 100)
    ]


def test_a_picture_has_a_title_a_colour_and_a_legend_line_an_arm(
    tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, *three_arms(tmp_path), "--plot", "x.svg")[0] == 0
    figure = drawn[0]
    curves, bars = figure.axes
    assert figure.get_suptitle() == "matrix_lr: 3 arms, 3 seeds each"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["matrix_lr 0.01", "matrix_lr 0.02", "matrix_lr 0.03"]
    assert len(curves.lines) == 3 == len({line.get_color() for line in curves.lines})
    assert [len(line.get_xdata()) for line in curves.lines] == [7, 7, 7]
    mean = sum(bpb_of(nats + 30 / 509) for nats in A) / 3
    assert curves.lines[0].get_ydata()[-1] == pytest.approx(mean, abs=1e-4), "the seeds' mean"
    assert len(curves.collections) == 3, "a band an arm"
    assert curves.get_xlabel() == "training step" and "bits per byte" in curves.get_ylabel()
    assert "mean of" not in curves.get_ylabel(), "nothing is smoothed"
    heights = [bar.get_height() for bar in bars.patches]
    assert heights[0] == pytest.approx(sum(map(bpb_of, A)) / 3)
    words = ("--plot", "x.png", "--x", "seconds", "--title", "Mine")
    assert call(capsys, *three_arms(tmp_path), *words)[0] == 0
    assert drawn[1].axes[0].get_xlabel() == "training time, seconds"
    assert drawn[1].get_suptitle() == "Mine"
    assert drawn[1].axes[0].lines[0].get_xdata()[-1] == pytest.approx(21.8, abs=0.1)


def test_two_points_are_no_curve_but_bars(
    tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    long_name = "a_name_that_" + "is_much_too_long_" * 8
    logs = [Path(path) for path in arm(tmp_path, long_name, A)]
    for path in logs:
        lines = path.read_text().splitlines(True)
        path.write_text("".join(x for x in lines if not re.match(r"step:(1|10|100|200|300)/", x)))
    assert call(capsys, *logs, "--plot", "x.png")[0] == 0
    (bars,) = drawn[0].axes
    assert len(bars.patches) == 1 and "95 % interval" in bars.get_title()
    assert all(len(text.get_text()) <= 44 for text in drawn[0].legends[0].get_texts())
    for path in logs:
        path.write_text(path.read_text().split("final_")[0])
    code, _, err = call(capsys, *logs, "--plot", "x.png")
    assert code == 1 and "no run has a result, or 3 points of a curve" in err and len(drawn) == 1


def test_arms_whose_logs_have_one_name_stay_apart(
    tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders tell them apart; training losses of two tokenizers are not drawn together."""
    logs = [
        write_log(tmp_path / f"f{n}" / "train.log", a=n, b=n, c=n, d=n, nats=2 + n, factor=1 + n)
        for n in (0, 1)
    ]
    for path in logs:
        text = path.read_text().splitlines(True)
        path.write_text("".join(line for line in text if "val_loss" not in line[:30]))
    assert call(capsys, *logs, "--plot", "x.png")[0] == 0
    (bars,) = drawn[0].axes
    assert len({round(bar.get_height(), 4) for bar in bars.patches}) == 2
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["1: f0/train", "2: f1/train"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_written_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    logs = three_arms(tmp_path)
    code, _, err = call(capsys, *logs, "--plot", tmp_path / f"out{suffix}")
    data = (tmp_path / f"out{suffix}").read_bytes()
    assert (code, err) == (0, "") and data.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(data) > 20_000
    assert [path.name for path in tmp_path.iterdir() if path.suffix == suffix] == [f"out{suffix}"]
    code, _, err = call(capsys, *logs, "--plot", tmp_path / "none" / f"out{suffix}")
    assert code == 1 and err.startswith("error: --plot ") and len(err.splitlines()) == 1


def test_a_thousand_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "0.log")
    for number in range(1, 1000):
        os.link(tmp_path / "0.log", tmp_path / f"{number}.log")
    code, out, _ = call(capsys, tmp_path)
    assert code == 0 and len(block(out, "Runs")) == 1001


def test_damaged_logs_never_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_log(tmp_path / "whole.log", crc="x").read_bytes()
    edit = st.tuples(st.integers(0, len(data)), st.binary(max_size=4), st.integers(0, 9))

    @given(edits=st.lists(edit, max_size=15), end=st.integers(0, len(data)))
    @settings(
        max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def survives(edits: list[tuple[int, bytes, int]], end: int) -> None:
        changed = bytearray(data)
        for at, new, removed in edits:
            changed[at : at + removed] = new
        (tmp_path / "damaged.log").write_bytes(changed[:end])
        code, out, err = call(capsys, tmp_path)
        assert code == 0 and err == "" and "whole.log" in out

    survives()


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Runs of our trainer: two seeds with the batches read ahead, two without."""
    folder = tmp_path_factory.mktemp("arms")
    data, found = byte_data(folder / "data"), {}
    for prefetch in (1, 0):
        for seed in (1, 2):
            run = folder / f"prefetch{prefetch}_seed{seed}"
            done = run_trainer(
                run,
                **{**SMALL_MODEL, **data, "ITERATIONS": 4, "SEED": seed},
                TRAIN_PREFETCH=prefetch,
                RUN_ID=run.name,
            )
            assert done.code == 0, done.err
            found.setdefault("on" if prefetch else "off", []).append(run / "logs")
    return found


@pytest.mark.slow
def test_our_overlap_ablation_is_one_and_finds_nothing(
    arms: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "--a", *arms["on"], "--b", *arms["off"])
    assert (code, err) == (0, ""), out
    rows = dict(line.strip().split(None, 1) for line in block(out, "What differs"))
    assert rows == {"seed": "1: 1, 3 | 2: 2, 4", "train_prefetch": "True: 1-2 | False: 3-4"}
    assert re.search(r"Same data: yes, data_crc at step 4 .*: [0-9a-f]{8}: 1-4\n", out)
    assert "0.00000 nats lower" in out and out.rstrip().endswith("no measurable difference")
    assert len(block(out, "Groups")) == 2


def test_the_script_runs_as_a_user_starts_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log")
    command = [sys.executable, str(ROOT / "logs" / "compare.py"), str(log)]
    done, helped = (
        subprocess.run(words, text=True, capture_output=True, env=clean_environment(), timeout=60)
        for words in (command, [*command[:2], "--help"])
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("What differs in configuration")
    assert helped.returncode == 0 and "--plot FILE" in helped.stdout
