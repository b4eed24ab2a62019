"""tools/compare.py and its plot: what differs, the same data, the test of A against B and when it
is refused."""

import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import pytest
import report
import samples
from made_logs import SMI, TOKENS, bpb_of, event_lines, log_text, read_text
from matplotlib.figure import Figure
from running import ROOT, Call
from runs import read_logs
from samples import relevant_differences, seed_groups

RECORD = ROOT / "records/track_non_record_16mb/2026-11-22_OverlapAblation"
A, B = [2.0600, 2.0612, 2.0607], [2.0801, 2.0790, 2.0812]  # nats of three seeds


def write_log(path: Path, **changed: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(log_text(**{"nats": 2.05, "code": 48000} | changed))
    return path


def seed_logs(folder: Path, name: str, results: list[float], **changed: Any) -> list[str]:
    return [
        str(write_log(folder / f"{name}_seed{seed}.log", seed=seed, nats=nats, **changed))
        for seed, nats in enumerate(results, 1)
    ]


def block(out: str, title: str) -> list[str]:
    """Return the lines below a title, up to the next empty line."""
    return next(part for part in out.split("\n\n") if part.startswith(title)).splitlines()[1:]


def edited(path: str | Path, change: Callable[[str], str]) -> str:
    Path(path).write_text(change(Path(path).read_text()))
    return str(path)


def test_what_differs_comes_first_and_counts_runs(tmp_path: Path, call: Call) -> None:
    """Runs that differ only in their seed are a group."""
    values, other = [2.05, 2.06, 2.07], {"matrix_lr": 0.02, "code": 48100}
    logs = seed_logs(tmp_path, "a", values) + seed_logs(tmp_path, "b", [2.04, 2.08], **other)
    code, out, err = call(compare.main, *logs)
    assert (code, err) == (0, "") and out.startswith("What differs")
    rows = [" ".join(line.split()) for line in block(out, "What differs")]
    lrs, sizes = "matrix_lr 0.04: 1, 2, 3 | 0.02: 4, 5", "code_bytes 48000: 1, 2, 3 | 48100: 4, 5"
    assert rows == ["seed 1: 1, 4 | 2: 2, 5 | 3: 3", lrs, sizes]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    line = f"Runs 1, 2, 3 differ only in their seed: mean {mean:.5f} nats, std {std:.5f}"
    assert f"\n{line}\n" in out and "\nRuns 4, 5 differ only in their seed" in out


def test_what_a_recipe_adds_is_shown(tmp_path: Path, call: Call) -> None:
    """Only the log of the recipe has the setting."""
    for name, changed in (("base", {}), ("ema", {"ema_decay": 0.9})):
        (tmp_path / f"{name}.jsonl").write_text(event_lines(ms=len(name), **changed))
    _, out, _ = call(compare.main, tmp_path)
    assert "  only in 2: ema_decay 0.9" in block(out, "What differs")


def test_the_tables_hold_the_numbers_of_the_logs(tmp_path: Path, call: Call) -> None:
    write_log(tmp_path / "train_seed9.log", seed=3, nats=2.0601, code=302_114)
    code, out, _ = call(compare.main, tmp_path)
    head, row = block(out, "Time")
    times = ["43.50", "599.9", "2.1"]
    assert row.split() == ["1", "train_seed9.log", "finished", "3", "13,790", *times]
    names = ["#", "log", "status", "seed", "steps", "ms/step"]
    assert re.split(r"  +", head) == [*names, "train s", "eval s"]
    assert block(out, "Results")[1].split() == [
        *("1", "train_seed9.log", "2.0608", "2.0501", f"{bpb_of(2.0601):.5f}"),
        *("2.06010", "roundtrip", "302,114", "15,700,000", "16,002,114", "-2,114"),
    ]
    assert code == 0 and "Notes" not in out


def test_conditions_that_may_change_a_result(tmp_path: Path) -> None:
    """Not the folder of the data, nor how often lines are printed, nor what only one log has."""
    first = {"data_path": "/a/x", "val_every": 1, "odd": 1, "run_id": "a", "iterations": 9}
    second = {"data_path": "/b/x", "val_every": 2, "run_id": "b", "iterations": 8}
    first["warmdown_iters"], second["warmdown_iters"] = 1, 2
    texts = [log_text(code=9, smi=SMI, **first), log_text(code=9, smi=SMI, world=4, **second)]
    texts[1] = texts[1].replace("PyTorch 2.9.1", "PyTorch 2.8.0")
    runs = [read_text(tmp_path, text).runs[0] for text in texts]
    names = ["iterations", "warmdown_iters", "world_size", "torch"]
    assert relevant_differences(runs) == names
    assert relevant_differences(runs, names) == []
    assert seed_groups(runs) == [[0], [1]] and seed_groups(runs, names) == [[0, 1]]


def test_a_log_without_steps_is_never_finished(tmp_path: Path, call: Call) -> None:
    text = log_text(seed=1, nats=2.0, crc=1)
    (tmp_path / "a.log").write_text(re.sub(r"(?m)^(step|seed|tie).*\n", "", text))
    _, out, _ = call(compare.main, tmp_path)
    assert block(out, "Time")[1].split()[2:4] == ["no", "steps"]


def test_what_ended_a_run_is_a_note(tmp_path: Path, call: Call) -> None:
    lines = event_lines(status="failed", score=None).replace('"error": ""', '"error": "no room"')
    (tmp_path / "a.jsonl").write_text(lines)
    assert "  a.jsonl: failed at step 4: no room" in block(call(compare.main, tmp_path)[1], "Notes")


def test_same_data_is_judged_at_the_last_common_step(tmp_path: Path, call: Call) -> None:
    first = write_log(tmp_path / "1.log", crc=0xA0000000)
    second = write_log(tmp_path / "2.log", crc=0xA0000000, steps=13_800, seed=2)
    other = write_log(tmp_path / "3.log", crc=0xB0000000, seed=3)
    none = write_log(tmp_path / "4.log", seed=4)
    at = "data_crc at step 10000 (the last common one): a0002710: 1, 2"
    for logs, answer in (
        ((first, second), f"Same data: yes, {at}\n"),
        ((first, second, other, none), f"Same data: NO, {at} | b0002710: 3 | not known: 4\n"),
    ):
        assert answer in call(compare.main, *logs)[1]


def test_a_better_group_is_shown_with_its_test(tmp_path: Path, call: Call) -> None:
    """Groups are given by their logs, or by their folders."""
    a, b = seed_logs(tmp_path / "a", "a", A), seed_logs(tmp_path / "b", "b", B, matrix_lr=0.02)
    code, out, _ = call(compare.main, "--a", tmp_path / "a", "--b", tmp_path / "b")
    test, lines = samples.t_test(A, B, margin=0.005), block(out, "A against B")
    assert code == 0 and out.startswith("A against B")
    assert (
        lines[0] == f"  A is better than B by more than 0.005 nats (p = {test.p:.2g}, below 0.01)"
    )
    assert lines[1].startswith(f"  A is {test.difference:.5f} nats lower (95 % interval")
    mean, std = statistics.fmean(A), statistics.stdev(A)
    test = samples.t_test(A, B, by_seed=True)
    reach = f"{test.low:+.5f} to {test.high:+.5f})"
    start = "  paired by seed (3 pairs): A is 0.01947 nats lower (95 % interval of the difference "
    assert lines[2] == start + reach
    assert lines[3] == f"  A: 3 runs, {mean:.5f} nats, std {std:.5f}"
    assert not [line for line in lines if "note" in line]
    out = call(compare.main, "--a", *b, "--b", *a)[1]
    assert "A is not shown to beat B by more than 0.005 nats (p = " in out and "nats higher" in out


def test_groups_that_are_not_samples_are_refused(tmp_path: Path, call: Call) -> None:
    """Each reason is one line."""
    a, b = seed_logs(tmp_path, "a", A), seed_logs(tmp_path, "b", B)
    mixed = [*a[:2], *seed_logs(tmp_path, "m", [2.0607], matrix_lr=0.02)]
    copy, gone = str(write_log(tmp_path / "copy.log", nats=A[0])), str(tmp_path / "gone.log")
    Path(gone).write_text("nothing of the kind\n")
    [cut] = seed_logs(tmp_path, "cut", [2.07])
    edited(cut, lambda log: log.split("step:10000/")[0])
    [diverged] = seed_logs(tmp_path, "n", [math.nan])
    parts = seed_logs(tmp_path, "p", B, partial=" partial_val:1")
    remedy = "give the runs of one configuration, or add --allow matrix_lr if it does not matter"
    for ours, theirs, *reasons in (
        (mixed, b, f"A mixes configurations: matrix_lr differ; {remedy}"),
        (a[:1], b, "A has 1 runs; a test needs at least two, and three are better"),
        ([*a, copy], b, "a_seed1.log and copy.log are the same run, equal to the last digit"),
        (a, [*b, a[0]], "a_seed1.log and a_seed1.log are the same run, equal to the last digit"),
        ([*a, cut], b, "cut_seed1.log (unfinished, step 1000) has no result to compare"),
        ([a[0], a[2], gone], b, f"no run was read from {gone}"),
        (a, [*b, diverged], "n_seed1.log (finished, step 13790) has no result to compare"),
        (a, parts, "some runs scored only a part of the validation split; run them without VAL_"),
        (parts[:2], parts[2:] + a[:1], "B mixes configurations: partial_val", "some runs scored"),
    ):
        code, out, _ = call(compare.main, "--a", *ours, "--b", *theirs)
        lines = [line.removeprefix("  refused: ") for line in block(out, "A against B")]
        assert code == 1 and "Welch" not in out and len(lines) == len(reasons), lines
        assert all(line.startswith(reason) for line, reason in zip(lines, reasons, strict=True))
    more = seed_logs(tmp_path, "q", A, partial=" partial_val:1")
    code, out, _ = call(compare.main, "--a", *more, "--b", *parts, "--allow", "partial_val")
    [note] = block(out, "Notes")
    assert code == 0 and note.startswith("  all runs scored only a part of the validation split")
    code, out, _ = call(compare.main, "--a", *mixed, "--b", *b, "--allow", "MATRIX_LR")
    assert code == 0 and "Welch" in out
    code, out, err = call(compare.main, "--a", *a, "--b", *b, "--allow", "MATRIX_RL")
    remedy = "no run has this condition; compare.py LOG... shows them"
    assert (code, out, err) == (1, "", f"error: --allow matrix_rl: {remedy}\n")
    flat = seed_logs(tmp_path, "f", [2.06, 2.06]), seed_logs(tmp_path, "g", [2.07, 2.07])
    code, out, _ = call(compare.main, "--a", *flat[0], "--b", *flat[1])
    assert code == 1 and "refused: the results in each group are equal, so the spread" in out


def test_runs_of_one_seed_are_one_sample(tmp_path: Path, call: Call) -> None:
    """A run that was made again with its seed has other times, but no other result. Only two logs
    of equal times are one run. With --allow, runs of one seed may differ in what is allowed."""
    a, b = seed_logs(tmp_path / "1", "a", A[:2]), seed_logs(tmp_path / "1", "b", B[:2])
    again = seed_logs(tmp_path / "2", "a", A[:2], ms=43.6)
    code, out, _ = call(compare.main, "--a", *a, *again, "--b", *b, "--margin", "0.005")
    lines = [line for line in out.splitlines() if "refused" in line]
    words = "they are one sample, not 2, so give one of them"
    names = [(seed, f"a_seed{seed}.log and a_seed{seed}.log") for seed in (1, 2)]
    assert lines == [f"  refused: A has 2 runs of seed {n}: {both}; {words}" for n, both in names]
    assert code == 1
    for path in again:  # the folders alone tell the logs apart
        Path(path).rename(tmp_path / "1" / Path(path).name.replace(".log", ".txt"))
    out = call(compare.main, tmp_path / "1")[1]
    assert "Runs 1, 3 differ only in their seed" in out and "Runs 1, 2, " not in out
    assert [len(group) for group in seed_groups(read_logs([tmp_path / "1"]).runs)] == [2, 1, 1, 2]


def test_a_copy_of_a_log_without_times_is_no_second_run(tmp_path: Path, call: Call) -> None:
    a, b = seed_logs(tmp_path, "a", A), seed_logs(tmp_path, "b", B)
    for path in (*a, *b):  # neither log nor name tells the seed
        text = re.sub(
            r"seed:.*\n|stopping.*\n|train_time:\S+ ?|step_avg:\S+", "", Path(path).read_text()
        )
        Path(path.replace("_seed", "_")).write_text(text)
    a, b = ([path.replace("_seed", "_") for path in paths] for paths in (a, b))
    assert call(compare.main, "--a", *a, "--b", *b)[0] == 0
    Path(tmp_path, "copy.log").write_bytes(Path(a[0]).read_bytes())
    code, out, _ = call(compare.main, "--a", *a, tmp_path / "copy.log", "--b", *b)
    assert code == 1 and "refused: a_1.log and copy.log are the same run" in out


def test_only_the_logs_say_that_tokenizers_differ(tmp_path: Path, call: Call) -> None:
    """Not a score that is rounded to a digit. If the logs have checksums, these decide."""
    a, b = seed_logs(tmp_path, "a", A), seed_logs(tmp_path, "b", B)
    edited(a[0], lambda log: re.sub(r"final.*_exact.*\n", "", log))
    edited(a[0], lambda log: re.sub(r"(?m)^(final.* val_bpb:\d\.\d)\d+", r"\1", log))
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)
    assert code == 0 and "tokenizers" not in out and "more than 0.005 nats" in out
    for name, score, more in (("c", 1.2, {}), ("d", 1.25, {}), ("e", 1.2, {"tokenizer": "other"})):
        for n in (1, 2):
            events = event_lines(seed=n, score=score + n / 1e4, ms=n + ord(name), made_of=more)
            (tmp_path / f"{name}{n}.jsonl").write_text(events.replace("2.00000000001", f"2.{n}"))
    c, d, e = ([tmp_path / f"{name}{n}.jsonl" for n in (1, 2)] for name in "cde")
    out = call(compare.main, "--a", *c, "--b", *d, "--allow", "partial_val")[1]
    assert "tokenizers differ" not in out, "the checksums are equal"
    out = call(compare.main, "--a", *c, "--b", *e)[1]
    assert "note: the tokenizers differ" in out and "bits per byte (p = " in out


def test_nats_of_other_tokenizers_are_not_compared(tmp_path: Path, call: Call) -> None:
    """Also if no log tells its tokens: the bytes per token follow from the results."""
    a, b = seed_logs(tmp_path, "a", A), seed_logs(tmp_path, "b", [3.39, 3.391, 3.392], factor=1.65)
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)  # as many tokens, so the texts differ
    assert (
        code == 1
        and "texts differ: a_seed2.log 151,080,362 bytes and b_seed1.log 249,282,598" in out
    )
    for path in (*a, *b):
        edited(path, lambda log: log.replace(f" tokens:{TOKENS}", ""))
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)
    assert code == 0 and "note: the tokenizers differ, so bits per byte are compared" in out
    assert "A is not shown to beat B by more than 0.0018 bits per byte (p = " in out


def test_equal_runs_are_called_equal(tmp_path: Path, call: Call) -> None:
    a, b = seed_logs(tmp_path, "a", A), seed_logs(tmp_path, "b", A, ms=43.6)
    lines = block(call(compare.main, "--a", *a, "--b", *b)[1], "A against B")
    assert lines[1] == "  A and B are equal to the last digit for each seed (3 pairs)"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the figures instead of writing them."""
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def legend_of(figure: Any) -> tuple[list[str], str]:
    """Return the names in the legend, and the note above them."""
    legend = figure.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    return names, " ".join(legend.get_title().get_text().split())


def test_a_plot_shows_each_variant(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """Each variant has a colour and a line of the legend, which says what was varied."""
    logs = seed_logs(tmp_path, "lr1", A, matrix_lr=0.01) + seed_logs(
        tmp_path, "lr2", B, matrix_lr=0.02
    )
    logs += seed_logs(tmp_path, "lr3", [2.07, 2.071, 2.069], matrix_lr=0.03)
    assert call(compare.main, *logs, "--plot", "x.svg")[0] == 0
    figure = drawn[0]
    curves, dots = figure.axes
    assert figure.get_suptitle() == "variants: 3, runs: 9"
    assert legend_of(figure)[0] == ["MATRIX_LR=0.01", "MATRIX_LR=0.02", "MATRIX_LR=0.03"]
    assert [len(line.get_xdata()) for line in curves.lines] == [2, 2, 2]
    assert len({line.get_color() for line in curves.lines}) == 3
    mean = sum(bpb_of(nats - 0.01) for nats in A) / 3
    assert curves.lines[0].get_ydata()[-1] == pytest.approx(mean, abs=1e-4), "the mean of the seeds"
    assert len(curves.collections) == 3, "one band for each variant"
    band = [y for x, y in curves.collections[0].get_paths()[0].vertices if x == 13_790]
    std = statistics.stdev(bpb_of(nats) for nats in A)
    assert max(band) - min(band) == pytest.approx(2 * std, abs=1.5e-4)
    [[_, place]] = dots.containers[0].lines[0].get_xydata()
    assert place == pytest.approx(sum(map(bpb_of, A)) / 3) and not dots.patches, "no bar is drawn"
    assert [len(row.get_offsets()) for row in dots.collections[::2]] == [3, 3, 3], (
        "one dot for each seed"
    )


@pytest.mark.parametrize(
    "name", ["cost_$5_$", "a$b$", "_base", "100%", r"a\nb", "数据", "x\x1b[2J"]
)
def test_any_name_of_a_log_can_be_drawn(name: str, tmp_path: Path, call: Call) -> None:
    """Characters that no font has are a note."""
    for log, seed in ((f"{name}.log", 1), ("plain.log", 2)):
        write_log(tmp_path / log, seed=seed, code=seed)
    code, out, err = call(compare.main, tmp_path, "--plot", tmp_path / "x.svg")
    assert code == 0 and "What differs" in out
    assert err == "" or (err.count("\n") == 1 and "no installed font has 据数" in err)
    texts = re.findall(r"<!-- (.*) -->", (tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert any(text.startswith(name.replace("\x1b", "?")) for text in texts), texts


def test_the_plot_does_not_need_the_backend_of_a_notebook(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log")
    command = [sys.executable, ROOT / "tools/compare.py", log, "--plot", tmp_path / "x.png"]
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "x.png").exists()


def test_a_plot_that_fails_costs_no_table(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen error keeps its traceback; a folder that does not exist is one line."""
    log = write_log(tmp_path / "a.log")
    code, out, err = call(compare.main, log, "--plot", tmp_path / "none" / "x.png")
    assert (
        code == 1 and "Results" in out and err.count("\n") == 1 and "x.png: the plot was not" in err
    )
    monkeypatch.setattr(report, "make_figure", lambda *_: 1 / 0)
    code, out, err = call(compare.main, log, "--plot", tmp_path / "x.png")
    assert code == 1 and "Results" in out and "ZeroDivisionError" in err


def test_no_variant_of_a_record_is_left_out(drawn: list[Any], call: Call) -> None:
    """Also if two variants have the same settings: then the legend has the names of the logs. A
    note says that results are equal."""
    assert call(compare.main, RECORD, "--plot", "x.png")[0] == 0
    curves, dots = drawn[0].axes
    names, note = legend_of(drawn[0])
    assert len(dots.containers) == len(curves.lines) == 6
    assert names[0] == "slow_disk_train_prefetch0: TRAIN_PREFETCH=0 VAL_PREFETCH=1"
    assert len(names) == 6 and drawn[0].get_suptitle() == "variants: 6, runs: 18"
    assert note == "Note: the results of 6 variants are equal to the last digit for each seed"
    looks = {(line.get_color(), line.get_marker()) for line in drawn[0].legends[0].get_lines()}
    assert len(looks) == 6


def test_differences_between_equal_seeds_are_drawn_below_the_verdict(
    tmp_path: Path, drawn: list[Any]
) -> None:
    groups = [
        read_logs(seed_logs(tmp_path, name, nats)).runs for name, nats in (("a", A), ("b", B))
    ]
    report.plot(groups, ["one", "two"], tmp_path / "x.png", ["two against one: loss +0.0195 nats"])
    dots = drawn[0].axes[1]
    assert drawn[0].get_suptitle() == "two against one: loss +0.0195 nats"
    assert dots.get_ylabel() == "nats above one with the same seed; lower is better"
    points = [y for _, y in dots.collections[0].get_offsets()]
    assert points == pytest.approx([b - a for a, b in zip(A, B, strict=True)])
    [[low, high]] = [bar[:, 1] for bar in dots.containers[0].lines[2][0].get_segments()]
    test = samples.t_test(A, B, by_seed=True)
    assert (low, high) == pytest.approx((test.low, test.high))


def test_the_plot_has_a_note(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """It says that runs are left out or scored a part of the split, in lines that fit."""
    a, b = (
        seed_logs(tmp_path, "a", A, partial=" partial_val:1"),
        seed_logs(tmp_path, "b", B, matrix_lr=0.2),
    )
    edited(b[0], lambda log: log.split("step:13790/")[0])
    assert call(compare.main, *a, *b, "--plot", "x.png")[0] == 0
    note = legend_of(drawn[0])[1]
    assert note.startswith("Note: 1 unfinished run left out; some runs scored only a part of the ")
    lines = drawn[0].legends[0].get_title().get_text().split("\n")
    assert max(map(len, lines)) <= 13 * drawn[0].get_figwidth()


def test_variants_that_differ_in_more_than_settings_have_names_of_logs(
    tmp_path: Path, drawn: list[Any], call: Call
) -> None:
    """Losses of two tokenizers are not drawn together."""
    for n in (1, 2):
        path = write_log(tmp_path / f"train_seed{n}.log", code=n, nats=2 + n, factor=1 + n)
        edited(path, lambda log: re.sub(r"(?m)^step:.* val_loss.*\n", "", log))
        edited(path, lambda log: re.sub(r"(?m)(train_loss.*)$", r"\1 mean_loss:2.5", log))
    assert call(compare.main, path, "--plot", "x.png")[0] == 0
    curve = drawn.pop().axes[0]
    assert curve.get_ylabel().startswith(
        "training loss (nats per token), mean since the previous line"
    )
    assert [*curve.lines[0].get_ydata()] == [2.5] * 2, "single batches look like a loss that rises"
    assert call(compare.main, tmp_path, "--plot", "x.png")[0] == 0
    names, note = legend_of(drawn[0])
    assert (
        names == [f"train_seed{n}.log: code_bytes {n}" for n in (1, 2)] and len(drawn[0].axes) == 1
    )
    assert note.endswith("not all runs have 3 validations, or training losses of one tokenizer")


NATS_A, NATS_B = [1.8897, 1.8891, 1.8911], [1.9030, 1.9052, 1.9056]


def test_welch_tests_whether_the_first_mean_is_lower_by_the_margin() -> None:
    better = samples.t_test(NATS_A, NATS_B, margin=0.005)
    assert better.difference == pytest.approx(0.0146333, abs=1e-6)
    # Computed by hand: both variances over 3, Welch's degrees of freedom, Student's t.
    va, vb = (statistics.stdev(values) ** 2 / 3 for values in (NATS_A, NATS_B))
    assert better.t == pytest.approx((better.difference - 0.005) / math.sqrt(va + vb))
    assert better.df == pytest.approx((va + vb) ** 2 / (va**2 / 2 + vb**2 / 2))
    assert better.p < 0.01 and better.low < better.difference < better.high
    assert samples.t_test(NATS_A, NATS_B, margin=0.0146333).p == pytest.approx(0.5, abs=1e-3)
    assert samples.t_test(NATS_A, NATS_B, margin=0.02).p > 0.9
    worse = samples.t_test(NATS_B, NATS_A)
    assert worse.difference == pytest.approx(-better.difference) and worse.p > 0.99
    assert worse.low == pytest.approx(-better.high)


def test_pairs_remove_the_common_spread() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [1.011, 2.009, 3.010, 4.010]
    outcome = samples.t_test(a, b, margin=0.005, by_seed=True)
    assert outcome.p < 0.001 < 0.4 < samples.t_test(a, b, margin=0.005).p
    assert samples.t_test(a, b, margin=0.010, by_seed=True).p == pytest.approx(0.5, abs=1e-3)
    # Of the differences 11, 9, 10, 10: mean 10, std 0.8165, t(0.975, 3) = 3.1824.
    assert outcome.high - 0.010 == pytest.approx(3.182446 * 0.81650e-3 / 2, rel=1e-4)


def test_holm_corrects_p_values_together() -> None:
    """The smallest of n p-values is multiplied by n, the next one by n - 1; the order is kept."""
    assert samples.holm([0.02, 0.01, math.nan, 0.04]) == pytest.approx(
        [0.04, 0.03, math.nan, 0.04], nan_ok=True
    )
    assert samples.holm([0.6, 0.5]) == [1.0, 1.0]
    same = samples.t_test([1.0, 2.0, 3.0], [1.1, 2.0, 3.2], by_seed=True)
    assert same.low < 0 < same.high and 0.05 < same.p_two_sided < 0.5
