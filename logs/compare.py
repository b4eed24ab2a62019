"""Compare runs: what differs, how long, how good, on the same data?
Any log of the parameter-golf family is read.

    # tables; a LOG is a file or a folder of logs
    python3 logs/compare.py LOG...
    # curves, too (.png, .svg or .pdf; needs matplotlib)
    python3 logs/compare.py LOG... --plot runs.png
    # is A's loss lower than B's by more than --margin?
    python3 logs/compare.py --a LOG... --b LOG...
    # the same, as an ablation of one setting
    python3 logs/compare.py --a LOG... --b LOG... --varied TRAIN_PREFETCH

A and B are runs of one configuration each, with several seeds. The test is Welch's, one-sided, of
the result named by --score (in nats a token, or with --metric bpb in bits a byte). It is refused,
with the reasons, where a group mixes configurations, where runs are missing, unfinished or the
same, where A and B were scored on different splits; as an ablation also where anything else than
the varied settings differs, and, if they are overlap settings, where the runs did not train on the
same data (data_crc).

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import contextlib
import difflib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import stats
from read_log import KINDS, SCORED, Logs, Run, Score, read_logs

CAP_BYTES = 16_000_000  # script and model, decimal
NOT_CONFIGURATION = {
    "run_id",
    "seed",
    "logfile",
    "log_file",
    "artifact_dir",
    "output_dir",
    "model_path",
    "resume",
    "quantized_model_path",
    "checkpoint_dir",
    "ttt_output_dir",
    "rank",
    "local_rank",
    "distributed",
    "is_main_process",
    "warning",
}
PATHS = {
    "data_path",
    "tokenizer_path",
    "data_dir",
    "datasets_dir",
    "train_files",
    "val_files",
    "val_bytes_files",
}
# Shown where they differ, but no reason why results would:
# periods of lines, surroundings that compute nothing.
HARMLESS = {
    "train_log_every",
    "val_loss_every",
    "val_progress_log_every",
    "training_timing_every",
    "checkpoint_every",
    "checkpoint_keep",
    "trace_steps",
    "python",
    "driver",
    "driver_cuda",
    "nccl",
    "cpus",
    "platform",
    "data_dir",
}
OVERLAP = {
    "train_prefetch",
    "train_prefetch_queue",
    "train_copy_stream",
    "val_prefetch",
    "val_prefetch_queue",
    "val_copy_stream",
    "gpu_prefetch",
    "training_timing_breakdown",
    "val_resident",
}
# What a log states beside a setting, and that cannot stay when the setting changes.
CONSEQUENCES = {
    "grad_accum_steps": ("effective_grad_accum_steps",),
    "train_seq_len": ("val_split_tokens", "val_split_bytes"),
    "data_path": ("dataset", "train_shards", "val_split_tokens", "val_split_bytes"),
    "num_layers": ("model_params",),
    "model_dim": ("model_params",),
    "num_heads": ("model_params",),
    "num_kv_heads": ("model_params",),
    "mlp_mult": ("model_params",),
    "vocab_size": ("model_params",),
    "tie_embeddings": ("model_params",),
    "attention_backend": ("sdp.backends",),
}
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, told apart with any colour vision,
# without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))


@dataclass
class Difference:
    """A condition that is not equal in all runs:
    each value with the numbers (from 0) of its runs.
    """

    name: str
    values: list[tuple[Any, list[int]]]
    unknown: list[int]
    harmless: bool


@dataclass
class Comparison:
    """A against B: refused for `refusals`, or tested."""

    score: str = ""
    metric: str = "nats"
    varied: list[str] = field(default_factory=list)
    a: stats.Group | None = None
    b: stats.Group | None = None
    test: stats.Test | None = None
    alpha: float = 0.01
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def significant(self) -> bool:
        return self.test is not None and self.test.p < self.alpha


def conditions(run: Run) -> dict[str, Any]:
    """All that a run was made with and that a log may tell:
    settings, code, versions, devices, data; not the seed.
    """
    found = {
        k: Path(v).name if k in PATHS and isinstance(v, str) else v
        for k, v in run.config.items()
        if k not in NOT_CONFIGURATION
        and not (k == "grad_accum_steps" and run.grad_accum_steps is not None)
    }
    found |= {
        "code": run.source_sha256 and run.source_sha256[:12],
        "code_bytes": run.sizes.code or run.source_bytes,
        "model_params": run.model_params,
        "codec": run.sizes.codec,
        "world_size": run.world_size,
        "effective_grad_accum_steps": run.grad_accum_steps,
        "dataset": run.dataset,
        "train_shards": run.train_shards,
        "val_split_tokens": run.val_tokens,
        "val_split_bytes": run.val_bytes,
        **run.versions,
        **run.hardware,
    }
    found.pop("datasets_dir", None)
    return {name: value for name, value in found.items() if value is not None}


def differences(runs: Sequence[Run]) -> tuple[list[Difference], int, list[str]]:
    """Conditions that differ, how many are equal in all runs,
    and the names of those that not every log tells.
    """
    told = [conditions(run) for run in runs]
    result, equal, partly = [], 0, []
    for name in dict.fromkeys(name for one in told for name in one):
        values: list[tuple[Any, list[int]]] = []
        for index, one in enumerate(told):
            if name not in one:
                continue
            known = next((numbers for value, numbers in values if value == one[name]), None)
            if known is None:
                values.append((one[name], [index]))
            else:
                known.append(index)
        unknown = [index for index, one in enumerate(told) if name not in one]
        if len(values) > 1:
            result.append(
                Difference(name, values, unknown, name in HARMLESS or _repeats_code(name, told))
            )
        elif unknown:
            partly.append(name)
        else:
            equal += 1
    return sorted(result, key=lambda d: d.harmless), equal, partly


def _repeats_code(name: str, told: Sequence[dict[str, Any]]) -> bool:
    """The number of code bytes says nothing where every log has the code's hash."""
    return name == "code_bytes" and all("code" in one for one in told)


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Numbers of the runs that differ in nothing but seed, harmless settings and surroundings."""
    telling = [d for d in differences(runs)[0] if not d.harmless]
    keys: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(runs)):
        key = tuple(
            next((n for n, (_, numbers) in enumerate(d.values) if index in numbers), -1)
            for d in telling
        )
        keys.setdefault(key, []).append(index)
    return list(keys.values())


def same_data(runs: Sequence[Run]) -> tuple[int, dict[str, list[int]]] | None:
    """The last step of which all runs that have one logged a data_crc,
    and the runs of each crc there.
    """
    told = {index: run.crc_at() for index, run in enumerate(runs) if run.crc_at()}
    common = set.intersection(*map(set, told.values())) if len(told) > 1 else set()
    if not common:
        return None
    step, found = max(common), {}
    for index, crcs in told.items():
        found.setdefault(crcs[step], []).append(index)
    return step, found


def result_of(run: Run, kind: str) -> Score | None:
    """The run's result of a kind of read_log.KINDS, or "val":
    its last validation while training.
    """
    last = run.final_validation
    if kind == "val" and last is not None:
        return Score(
            "val",
            f"step {last.step}",
            last.val_loss,
            last.val_bpb,
            last.val_ms,
            last.digits,
            last.digits,
        )
    return run.score(kind)


def common_kind(runs: Sequence[Run]) -> str | None:
    """What the runs can be compared by: the latest stage that all of them have reached."""
    return next(
        (
            kind
            for kind in (*SCORED, "pre_quant", "val")
            if all(result_of(run, kind) for run in runs)
        ),
        None,
    )


def byte_words(run: Run) -> tuple[str, str] | None:
    """(verdict, words) of the bytes that the run's scores imply; None: no score.

    The result to be submitted is named, or the first one that is wrong.
    """
    scores = [
        s
        for s in (run.headline, *(run.score(kind) for kind in KINDS), result_of(run, "val"))
        if s is not None
        and s.val_loss
        and s.val_bpb
        and 0 < s.val_loss < math.inf
        and 0 < s.val_bpb < math.inf
    ]
    if not scores:
        return None
    if not run.val_tokens:
        return _bytes_without_tokens(scores[0])
    checks = [
        stats.check_bytes(
            s.val_loss,
            s.val_bpb,
            run.val_tokens,
            loss_digits=s.loss_digits,
            bpb_digits=s.digits,
            stated=run.val_bytes,
        )
        for s in scores
    ]
    off = next((n for n, check in enumerate(checks) if check.verdict == "differs"), 0)
    words = checks[off].words + (f" ({scores[off].tag})" if checks[off].verdict != "agrees" else "")
    return checks[off].verdict, words


def _bytes_without_tokens(score: Score) -> tuple[str, str]:
    for name, (tokens, _) in stats.PUBLISHED.items():
        check = stats.check_bytes(
            score.val_loss,
            score.val_bpb,
            tokens,
            loss_digits=score.loss_digits,
            bpb_digits=score.digits,
        )
        if check.verdict == "agrees":
            return "unknown", f"the log does not tell the tokens; {tokens:,} would make it {name}"
    rate = score.val_loss / math.log(2) / score.val_bpb
    return (
        "unknown",
        f"the log does not tell the tokens: {rate:.4f} bytes a token fit no published split",
    )


# --- A against B ---


def compare_groups(a: Sequence[Run], b: Sequence[Run], options: argparse.Namespace) -> Comparison:
    """Welch's test of A's results against B's, or the reasons why there is none."""
    result = Comparison(
        metric=options.metric,
        alpha=options.alpha,
        varied=[name.lower().replace("-", "_") for name in options.varied],
    )
    refuse = result.refusals.append
    for name, group in (("A", a), ("B", b)):
        _check_group(name, group, refuse, result.notes.append)
    if {_trace(run) for run in a} & {_trace(run) for run in b} - {None}:
        refuse("A and B share a run (equal to the digit): each run belongs to one of them")
    if not (a and b):
        return result
    kind = common_kind([*a, *b]) if options.score == "auto" else options.score
    result.score = kind or ""
    values = {
        name: [_value(run, kind, options.metric) for run in group]
        for name, group in (("A", a), ("B", b))
    }
    for name, group in (("A", a), ("B", b)):
        for run, value in zip(group, values[name], strict=True):
            if value is None or not math.isfinite(value):
                refuse(
                    f"{name}: {run.name} has no {kind or 'result'} to compare "
                    f"({run.status}, step {run.last_step})"
                )
    _check_split([*a, *b], options.metric, refuse)
    _check_difference(a, b, result)
    if not result.refusals:
        try:
            result.a, result.b = stats.summary(values["A"]), stats.summary(values["B"])
            result.test = stats.welch(values["A"], values["B"], margin=options.margin)
        except ValueError as error:
            refuse(str(error))
    return result


def _value(run: Run, kind: str | None, metric: str) -> float | None:
    score = result_of(run, kind) if kind else None
    return None if score is None else score.val_bpb if metric == "bpb" else score.val_loss


def _check_group(
    name: str, group: Sequence[Run], refuse: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Reasons why some runs are no sample of one configuration."""
    if len(group) < 2:
        refuse(
            f"{name} has {len(group)} run{'s' * (len(group) != 1)}: "
            "a test needs two a group at least, better three"
        )
    found = [d for d in differences(group)[0] if not d.harmless]
    if found:
        refuse(f"{name} mixes configurations: {_listed(found)} differ")
    traces = [_trace(run) for run in group]
    for index, run in enumerate(group):
        if traces[index] is not None and traces[index] in traces[:index]:
            refuse(f"{name}: {run.name} repeats another run's seed and result: one run counts once")
        if run.status in ("failed", "interrupted"):
            refuse(f"{name}: {run.name} {run.status}: {run.error or 'the log does not say why'}")
    seeds = [run.seed for run in group if run.seed is not None]
    if len(set(seeds)) < len(seeds):
        note(
            f"{name} has a seed more than once: "
            "the spread of its repeats is the machine's, not the seed's"
        )


def _trace(run: Run) -> tuple[Any, ...] | None:
    """What two records of one run have in common to the digit, and two runs do not;
    None: too little is known.
    """
    head, times = run.headline, tuple(s.train_time_ms for s in run.steps)
    if run.train_time_ms is None or not run.last_step:
        return None
    return (
        run.seed,
        run.last_step,
        run.train_time_ms,
        times,
        head and head.val_loss,
        head and head.val_bpb,
    )


def _check_split(runs: Sequence[Run], metric: str, refuse: Callable[[str], None]) -> None:
    partial = {run.partial_val for run in runs}
    tokens = {run.val_tokens for run in runs if run.val_tokens}
    if len(partial) > 1:
        refuse("some runs were validated on a part of the split (VAL_TOKENS), others on all of it")
    elif len(tokens) > 1 and (metric == "nats" or partial == {True}):
        counts = ", ".join(f"{n:,}" for n in sorted(tokens))
        refuse(
            f"the runs were scored on different splits ({counts} tokens): "
            "nats a token of different tokenizers are not comparable: "
            "use --metric bpb with a --margin in bits a byte"
        )


def _check_difference(a: Sequence[Run], b: Sequence[Run], result: Comparison) -> None:
    """What A and B differ in; as an ablation, whether that is what was varied and nothing else."""
    found, _, partly = differences([*a, *b])
    told = set().union(*(conditions(run) for run in (*a, *b)))
    obstacles = [d for d in found if not d.harmless and not _follows(d.name, result.varied)]
    if not result.varied:
        if obstacles:
            result.notes.append(
                f"A and B differ in {_listed(obstacles)}: which is better is tested, not why"
            )
        else:
            result.notes.append("the logs show no difference in configuration between A and B")
        return
    for name in result.varied:
        words = {
            room + name.partition("_")[2] for room in ("train_io.", "val_io.") if name in OVERLAP
        }
        if name not in told and not words & told:
            close = difflib.get_close_matches(name, sorted(told), 1)
            result.refusals.append(
                f"not an ablation of {name}: no log names it"
                + (f" (meant: {close[0]}?)" if close else "")
            )
        elif name not in {d.name for d in found} and not words & {d.name for d in found}:
            result.refusals.append(f"not an ablation of {name}: it is the same in A and B")
    if obstacles:
        result.refusals.append(
            f"not an ablation of {', '.join(result.varied)} alone: {_listed(obstacles)} differ, too"
        )
    unknown = [name for name in partly if name not in HARMLESS]
    if unknown:
        result.notes.append(
            f"{len(unknown)} conditions are not in every log, so not compared: {_some(unknown)}"
        )
    if set(result.varied) & OVERLAP:
        _check_data(a, b, result)


def _check_data(a: Sequence[Run], b: Sequence[Run], result: Comparison) -> None:
    """Overlap must not change what is trained on: the data of all runs must be the same."""
    runs, found = [*a, *b], same_data([*a, *b])
    missing = [run.name for run in runs if not run.crc_at()]
    if missing:
        result.notes.append(
            f"no data_crc in {_some(missing)}: that the data was the same is not shown"
        )
    elif found is None:
        result.refusals.append(
            "not an overlap comparison: no step with a data_crc is common to all logs"
        )
    elif len(found[1]) > 1:
        words = "; ".join(
            f"{crc}: {_some([runs[i].name for i in numbers])}" for crc, numbers in found[1].items()
        )
        result.refusals.append(
            "not an overlap comparison: the runs trained on different data "
            f"(data_crc at step {found[0]}: {words})"
        )


def _follows(name: str, varied: Iterable[str]) -> bool:
    """Is a condition one of those varied, or the state that the log prints as its consequence?"""
    for one in varied:
        if name == one or name in CONSEQUENCES.get(one, ()):
            return True
        of_input = one in OVERLAP and name.startswith(("train_io.", "val_io."))
        of_both = one in ("gpu_prefetch", "training_timing_breakdown")
        if of_input and (of_both or name.partition("_")[0] == one.partition("_")[0]):
            return True
    return False


def verdict(result: Comparison) -> str:
    """The outcome in one sentence."""
    if result.refusals:
        return "refused: " + "; ".join(result.refusals)
    test, unit = result.test, "nats" if result.metric == "nats" else "bits a byte"
    measured = (
        f"A is {abs(test.difference):.5f} {unit} {'lower' if test.difference >= 0 else 'higher'} "
        f"(95 % interval of the difference {test.low:+.5f} to {test.high:+.5f})"
    )
    if result.significant:
        return (
            f"A is better than B by more than {test.margin:g} {unit}: "
            f"p = {test.p:.2g} < {result.alpha:g}; {measured}"
        )
    none = "; no measurable difference" if test.low <= 0 <= test.high else ""
    return (
        f"not shown that A is better than B by more than {test.margin:g} {unit}: "
        f"p = {test.p:.2g}, not below {result.alpha:g}; {measured}{none}"
    )


# --- words ---


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the logs; with their folders, shortened, where some are alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        folders = [Path(run.path).resolve().parent.name for run in runs]
        names = [
            f"{folder[:24]}{'…' * (len(folder) > 24)}/{name}"
            for name, folder in zip(names, folders, strict=True)
        ]
    return [
        name if names.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(names, 1)
    ]


def numbers_in_words(indices: Sequence[int]) -> str:
    """Numbers from 1, with ranges: 1-3, 5."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index:
            parts[-1][1] = index + 1
        else:
            parts.append([index + 1, index + 1])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _listed(found: Sequence[Difference]) -> str:
    return _some([d.name for d in found])


def _cell(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Aligned columns, two spaces apart: the first `left` to the left, numbers to the right;
    without empty columns.
    """
    kept = [c for c in range(len(head)) if c < left or any(row[c] != "-" for row in rows)]
    widths = {c: max(len(head[c]), *(len(row[c]) for row in rows)) for c in kept}
    return [
        "  ".join(
            row[c].ljust(widths[c]) if c < left else row[c].rjust(widths[c]) for c in kept
        ).rstrip()
        for row in (head, *rows)
    ]


def difference_lines(runs: Sequence[Run]) -> list[str]:
    found, equal, partly = differences(runs)
    seeds: dict[int | None, list[int]] = {}
    for index, run in enumerate(runs):
        seeds.setdefault(run.seed, []).append(index)
    lines = [
        f"What differs in configuration (numbers: the runs below; {equal} conditions are equal)"
    ]
    rows = [["seed", _values(list(seeds.items()))]]
    for d in found:
        not_told = f" | not told: {numbers_in_words(d.unknown)}" if d.unknown else ""
        rows.append([d.name + " (harmless)" * d.harmless, _values(d.values) + not_told])
    width = max(len(row[0]) for row in rows)
    lines += [f"  {name.ljust(width)}  {words}" for name, words in rows]
    if not found:
        lines.append("  nothing else" if len(runs) > 1 else "  one run: nothing to differ from")
    if partly and len(runs) > 1:
        lines.append(f"  told by some logs only, so not compared: {_some(partly)}")
    return lines


def _values(values: Sequence[tuple[Any, Sequence[int]]], most: int = 8) -> str:
    words = [
        f"{'-' if value is None else str(value)[:60]}: {numbers_in_words(numbers)}"
        for value, numbers in values[:most]
    ]
    if len(values) > most:
        words.append(f"{len(values) - most} more values")
    return " | ".join(words)


def run_lines(runs: Sequence[Run]) -> list[str]:
    rows = []
    for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True), 1):
        seed = _cell(run.seed)
        if run.seed is None and run.seed_in_name is not None:
            seed = f"{run.seed_in_name} (name)"
        gpus = run.hardware.get("gpus") or run.world_size
        device = str(run.hardware.get("device", "-"))
        rows.append(
            [
                str(index),
                label,
                run.status,
                seed,
                _cell(run.versions.get("torch")),
                f"{gpus} x {device}" if gpus and device != "-" else device,
                _cell(run.model_params, ","),
                _cell(run.train_shards),
                _cell(run.epochs_seen(), ".2f"),
            ]
        )
    head = ["#", "log", "status", "seed", "torch", "hardware", "parameters", "shards", "epochs"]
    return ["Runs", *table(head, rows, 3)]


def time_lines(runs: Sequence[Run]) -> list[str]:
    rows, widest = [], 0
    for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True), 1):
        times = run.step_times()
        widest = max(widest, times.widest)
        seconds = [
            None if ms is None else ms / 1e3
            for ms in (run.train_time_ms, run.val_total_ms, run.eval_total_ms)
        ]
        rows.append(
            [
                str(index),
                label,
                f"{run.last_step:,}",
                *(_cell(ms, ".2f") for ms in (times.mean, times.p50, times.p99, times.max)),
                *(_cell(s, ",.1f") for s in seconds),
                "-" if run.input_wait_percent is None else f"{run.input_wait_percent:.2f}%",
                _cell(run.tokens(), ","),
                _cell(run.peak_mib, ","),
            ]
        )
    head = [
        "#",
        "log",
        "steps",
        "ms/step",
        "p50",
        "p99",
        "max",
        "train s",
        "val s",
        "eval s",
        "input wait",
        "tokens",
        "peak MiB",
    ]
    title = "Time"
    if widest > 1:
        title += f" (p50, p99, max: of the means between two lines, at most {widest} steps apart)"
    return [title, *table(head, rows)]


def score_lines(runs: Sequence[Run]) -> list[str]:
    rows = []
    for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True), 1):
        last, head, total = run.final_validation, run.headline, run.sizes.total
        loss = next((s.train_loss for s in reversed(run.steps) if s.train_loss is not None), None)
        bpb = [
            _cell(score and score.val_bpb, ".5f")
            for score in (run.score(kind) for kind in KINDS[:4])
        ]
        rows.append(
            [
                str(index),
                label,
                _cell(loss, ".4f"),
                _cell(last and last.val_loss, ".4f"),
                _cell(last and last.val_bpb, ".4f"),
                *bpb,
                _cell(head and head.val_loss, ".5f"),
                _cell(run.sizes.code or run.source_bytes, ","),
                _cell(run.sizes.artifact, ","),
                _cell(total, ","),
                _cell(None if total is None else CAP_BYTES - total, ","),
            ]
        )
    head = [
        "#",
        "log",
        "train loss",
        "val loss",
        "val bpb",
        "pre-quant bpb",
        "roundtrip bpb",
        "sliding bpb",
        "TTT bpb",
        "final loss",
        "code B",
        "model B",
        "total B",
        "left B",
    ]
    title = (
        "Results (bpb before quantisation, of the decoded artifact, with sliding windows, "
        "with test-time training)"
    )
    return [title, *table(head, rows)]


def group_lines(runs: Sequence[Run]) -> list[str]:
    groups = [numbers for numbers in seed_groups(runs) if len(numbers) > 1]
    lines = []
    for numbers in groups:
        members = [runs[i] for i in numbers]
        kind = common_kind(members)
        words = []
        for metric in ("nats", "bpb"):
            values = [_value(run, kind, metric) for run in members]
            with contextlib.suppress(ValueError):  # values that are no numbers have no mean
                group = stats.summary([math.nan if value is None else value for value in values])
                words.append(f"{metric} {group.mean:.5f} std {group.std:.5f}")
        lines.append(
            f"  runs {numbers_in_words(numbers)} ({kind or 'no common result'}): "
            + ", ".join(words)
        )
    return ["Groups: equal but for the seed", *lines] if lines else []


def data_lines(runs: Sequence[Run]) -> list[str]:
    if len(runs) < 2:
        return []
    found, without = same_data(runs), [i for i, run in enumerate(runs) if not run.crc_at()]
    none_has = len(without) == len(runs)
    missing = ""
    if without and not none_has:
        missing = f"; no data_crc: {numbers_in_words(without)}"
    if found is None:
        reason = "no data_crc in these logs" if none_has else "no common step with a data_crc"
        return [f"Same data: not known ({reason}{missing})"]
    step, crcs = found
    words = " | ".join(f"{crc}: {numbers_in_words(numbers)}" for crc, numbers in crcs.items())
    answer = "yes" if len(crcs) == 1 else "NO"
    return [f"Same data: {answer}, data_crc at step {step} (the last common one): {words}{missing}"]


def byte_lines(runs: Sequence[Run]) -> list[str]:
    said: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        if words := byte_words(run):
            said.setdefault(words, []).append(index)
    lines = [
        f"  {numbers_in_words(numbers)}: {'DIFFERS: ' if kind == 'differs' else ''}{words}"
        for (kind, words), numbers in said.items()
    ]
    return ["Bytes that the scores imply (loss / ln 2 * tokens / bpb)", *lines] if lines else []


def remark_lines(runs: Sequence[Run]) -> list[str]:
    """What a careful reader would notice about single runs."""
    lines, first_of = [], {}
    for index, run in enumerate(runs, 1):
        remarks, trace = [], _trace(run)
        if run.status != "finished":
            remarks.append(
                f"{run.status} at step {run.last_step}" + (f": {run.error}" if run.error else "")
            )
        if run.seed is not None and run.seed_in_name not in (None, run.seed):
            remarks.append(f"its name says seed {run.seed_in_name}, its log {run.seed}")
        if run.partial_val:
            remarks.append("validated on a part of the split: its score may not be submitted")
        if run.resumed_at:
            remarks.append(f"continued at step {_some([str(step) for step in run.resumed_at])}")
        if run.sizes.total is not None and run.sizes.total > CAP_BYTES:
            remarks.append(f"{run.sizes.total - CAP_BYTES:,} bytes over the cap of {CAP_BYTES:,}")
        if run.source_bytes and run.sizes.code not in (None, run.source_bytes):
            remarks.append(
                f"Code size {run.sizes.code:,}, "
                f"but the script in the log has {run.source_bytes:,} bytes"
            )
        if trace is not None and first_of.setdefault(trace, index) != index:
            remarks.append(
                f"to the digit the seed, time and result of run {first_of[trace]}: the same run?"
            )
        if (epochs := run.epochs_seen()) and epochs > 1:
            remarks.append(f"{epochs:.1f} passes over its {run.train_shards or ''} shards")
        lines += [f"  {index}: {remark}" for remark in [*remarks, *run.warnings[:3]]]
    return ["Remarks", *lines] if lines else []


def comparison_lines(result: Comparison) -> list[str]:
    unit = "nats" if result.metric == "nats" else "bits a byte"
    lines = [f"A against B{': ablation of ' + ', '.join(result.varied) if result.varied else ''}"]
    for name, group in (("A", result.a), ("B", result.b)):
        if group:
            lines.append(
                f"  {name}: {group.n} runs, {result.score} {group.mean:.5f} {unit}, "
                f"std {group.std:.5f}"
            )
    if result.test:
        lines.append(
            f"  Welch's test: t = {result.test.t:.3f}, {result.test.df:.2f} degrees of freedom, "
            f"p = {result.test.p:.3g} (one-sided, margin {result.test.margin:g})"
        )
    return [*lines, *(f"  note: {note}" for note in result.notes), f"  {verdict(result)}"]


def report(logs: Logs, comparison: Comparison | None) -> list[str]:
    runs = logs.runs
    parts = (
        difference_lines,
        run_lines,
        time_lines,
        score_lines,
        group_lines,
        data_lines,
        byte_lines,
        remark_lines,
    )
    blocks = [part(runs) for part in parts] if runs else []
    if comparison:
        blocks.append(comparison_lines(comparison))
    if logs.problems:
        blocks.append(["Could not be read", *(f"  {problem}" for problem in logs.problems)])
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


# --- for tools ---


def run_record(run: Run) -> dict[str, Any]:
    """A run without its lines, with what follows from them."""
    lines = ("steps", "validations")
    record = {
        name: getattr(run, name)
        for name in Run.__dataclass_fields__
        if name not in (*lines, "sizes", "scores")
    }
    times, last = run.step_times(), run.final_validation
    return {
        **record,
        "name": run.name,
        "last_step": run.last_step,
        "iterations": run.iterations,
        "sizes": asdict(run.sizes),
        "scores": [asdict(score) for score in run.scores],
        "step_ms": asdict(times),
        "final_validation": last and asdict(last),
        "headline": run.headline and asdict(run.headline),
        "tokens": run.tokens(),
        "epochs": run.epochs_seen(),
        "bytes_check": byte_words(run),
    }


def as_json(logs: Logs, comparison: Comparison | None) -> str:
    runs = logs.runs
    data, found = same_data(runs), differences(runs)
    record = {
        "runs": [run_record(run) for run in runs],
        "problems": logs.problems,
        "differences": [asdict(d) for d in found[0]],
        "groups": seed_groups(runs),
        "same_data": data and {"step": data[0], "crcs": data[1]},
        "comparison": comparison
        and {
            **asdict(comparison),
            "significant": comparison.significant,
            "verdict": verdict(comparison),
        },
    }
    return json.dumps(_plain(record), indent=1)


def _plain(value: Any) -> Any:
    """JSON has no nan and no infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


# --- curves ---


def curves(run: Run) -> dict[str, list[tuple[float, float | None, float]]]:
    """(step, training seconds or None, value) for the panels `bpb` and `loss`.

    Without what is no number, and without the validation before the first step:
    the line from it to the next one shows nothing.
    """

    def points(lines: Iterable[Any], name: str) -> list[tuple[float, float | None, float]]:
        found = ((line.step, line.train_time_ms, getattr(line, name)) for line in lines)
        return [
            (step, None if ms is None else ms / 1e3, value)
            for step, ms, value in found
            if value is not None and math.isfinite(value)
        ]

    return {
        "bpb": points((v for v in run.validations if v.step > 0), "val_bpb"),
        "loss": points(run.steps, "train_loss"),
    }


def smoothed(points: Sequence[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    """Each y as the mean of its neighbours within a window, `share` of the range of x wide;
    x in order.
    """
    if not points:
        return []
    half, sums = 0.5 * share * (points[-1][0] - points[0][0]), [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result, low, high = [], 0, 0
    for x, _ in points:
        while points[low][0] < x - half:
            low += 1
        while high < len(points) and points[high][0] <= x + half:
            high += 1
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def limits(series: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float] | None:
    """A range of y that shows the curves, not the fall of the first steps; None: no points."""
    end = max((x for points in series for x, _ in points), default=0)
    ys = sorted(y for points in series for x, y in points if x >= 0.08 * end)
    if not ys:
        return None
    low, high = ys[0], ys[min(len(ys) - 1, int(0.98 * len(ys)))]
    pad = 0.05 * (high - low) or 0.01 * abs(low) or 0.01
    return low - pad, high + pad


def styles(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """(colour, dashes) a run: a colour a group of seeds where that helps, else a colour a run."""
    groups = seed_groups(runs)
    if not 1 < len(groups) < len(runs) or len(groups) > len(COLOURS):
        groups = [[index] for index in range(len(runs))]
        return [
            (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
            for i in range(len(runs))
        ]
    place = {index: (g, k) for g, numbers in enumerate(groups) for k, index in enumerate(numbers)}
    return [(COLOURS[place[i][0]], DASHES[place[i][1] % len(DASHES)]) for i in range(len(runs))]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes the four panels. Raises OSError where the file cannot be written."""
    from matplotlib.figure import Figure  # optional, and slow to import

    names, looks, drawn = labels(runs), styles(runs), [curves(run) for run in runs]
    columns = max(1, min(4, 186 // (max(map(len, names)) + 8)))
    figure = Figure(figsize=(14, 8.5 + 0.2 * (len(names) // columns)), layout="constrained")
    axes = figure.subplots(2, 2)
    titles = {
        "bpb": "validation, bits per byte",
        "loss": "training loss, nats per token (smoothed)",
    }
    window = {"bpb": 0.0, "loss": 0.05 if len(runs) <= 6 else 0.1}
    for row, (key, title) in enumerate(titles.items()):
        for column, xlabel in enumerate(("step", "training time, seconds")):
            xy = [
                [(point[column], point[2]) for point in one[key] if point[column] is not None]
                for one in drawn
            ]
            _panel(axes[row][column], xy, window[key], list(zip(names, looks, strict=True)))
            axes[row][column].set(xlabel=xlabel, ylabel=title)
    _mark_finals(axes[0], runs, looks)
    handles, words = axes[1][0].get_legend_handles_labels()
    figure.legend(
        handles,
        words,
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
        handlelength=3.5,
    )
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary, dpi=130)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _panel(
    axis: Any,
    drawn: Sequence[Sequence[tuple[float, float]]],
    window: float,
    named: Sequence[tuple[str, tuple[str, Any]]],
) -> None:
    shown = []
    for points, (name, (colour, dashes)) in zip(drawn, named, strict=True):
        smooth = smoothed(points, window) if window else points
        if window and len(points) > 60 and len(named) <= 3:
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.6, alpha=0.25)
        axis.plot(
            [x for x, _ in smooth],
            [y for _, y in smooth],
            color=colour,
            linestyle=dashes,
            linewidth=1.5,
            label=name,
            marker="o" if len(smooth) < 25 else None,
            markersize=3,
        )
        shown.append(smooth)
    if bounds := limits(shown):
        axis.set_ylim(*bounds)
    else:
        axis.text(
            0.5,
            0.5,
            "not in these logs",
            ha="center",
            va="center",
            transform=axis.transAxes,
            color="#555555",
        )
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _mark_finals(
    axes: Sequence[Any], runs: Sequence[Run], looks: Sequence[tuple[str, Any]]
) -> None:
    """A diamond for the final result, where the curve ends;
    the panel's range is widened to hold it.
    """
    for column, axis in enumerate(axes):
        low, high = axis.get_ylim()
        for run, (colour, _) in zip(runs, looks, strict=True):
            value = run.headline and run.headline.val_bpb
            x = run.last_step if column == 0 else run.train_time_ms and run.train_time_ms / 1e3
            if value is None or not math.isfinite(value) or not x:
                continue
            axis.plot(
                [x],
                [value],
                marker="D",
                markersize=6,
                color=colour,
                markerfacecolor="none",
                linestyle="none",
            )
            if run.validations:
                pad = 0.02 * (high - low)
                low, high = min(low, value - pad), max(high, value + pad)
        if any(run.validations for run in runs):
            axis.set_ylim(low, high)
        axis.set_xlim(left=0)
        axis.set_title(
            "diamonds: final result" if any(run.headline for run in runs) else "",
            fontsize=9,
            loc="right",
        )


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, or a folder of logs (.txt, .log, .jsonl)")
    add(
        "--a",
        nargs="+",
        metavar="LOG",
        help="the runs that are held to be better: one configuration, several seeds",
    )
    add("--b", nargs="+", metavar="LOG", help="the runs they are compared with")
    add(
        "--varied",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "A against B is an ablation of this setting "
            "(or of: code, torch, device, world_size ...); may be repeated"
        ),
    )
    add(
        "--margin",
        type=float,
        default=0.005,
        help="by how much A must be better (default: 0.005, in --metric's unit)",
    )
    add(
        "--alpha",
        type=float,
        default=0.01,
        help="the p below which that counts as shown (default: 0.01)",
    )
    add(
        "--metric",
        choices=("nats", "bpb"),
        default="nats",
        help="nats a token or bits a byte (default: nats)",
    )
    add(
        "--score",
        choices=("auto", "ttt", "sliding", "roundtrip", "pre_quant", "val"),
        default="auto",
        help="which result to compare (default: the latest stage that all runs reached)",
    )
    add("--plot", type=Path, metavar="FILE", help="curves of all runs: .png, .svg or .pdf")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if fault := fault_of_options(options):
        parser.error(fault)
    return options


def fault_of_options(options: argparse.Namespace) -> str:
    """What is wrong with the options, in words; nothing: empty."""
    if bool(options.a) != bool(options.b):
        return "--a and --b belong together: name the logs of both groups"
    if not (options.logs or options.a):
        return "name a log: python3 logs/compare.py logs/*.txt"
    if options.varied and not options.a:
        return "--varied needs --a LOG... and --b LOG..."
    if not 0 < options.alpha < 1:
        return f"--alpha {options.alpha:g}: a probability between 0 and 1, such as 0.01"
    if not (math.isfinite(options.margin) and options.margin >= 0):
        return f"--margin {options.margin:g}: a number from 0, such as 0.005"
    if options.plot and options.plot.suffix.lower() not in PLOT_SUFFIXES:
        return f"--plot {options.plot}: name a file that ends in {', '.join(PLOT_SUFFIXES)}"
    return ""


def gather(options: argparse.Namespace) -> tuple[Logs, Comparison | None]:
    """All logs named, each read once; A against B where they are given."""
    groups = {name: read_logs(paths or []) for name, paths in (("A", options.a), ("B", options.b))}
    taken = {
        name: {os.path.realpath(log.path) for log in group.files} for name, group in groups.items()
    }
    others = read_logs(
        path
        for path in options.logs
        if os.path.realpath(path) not in taken["A"] | taken["B"] or Path(path).is_dir()
    )
    logs = Logs()
    for one in (*groups.values(), others):
        logs.files += one.files
        logs.runs += one.runs
        logs.problems += one.problems
    if not options.a:
        return logs, None
    result = compare_groups(groups["A"].runs, groups["B"].runs, options)
    for name, group in groups.items():
        result.refusals += [
            f"{name}: no run was read from {log.path}" for log in group.files if not log.runs
        ]
    if shared := taken["A"] & taken["B"]:
        result.refusals.append(f"A and B share {_some(sorted(map(os.path.basename, shared)))}")
    if result.refusals:
        result.a = result.b = result.test = None
    return logs, result


def draw(options: argparse.Namespace, runs: Sequence[Run]) -> str | None:
    """The plot, or in one line why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: python3 -m pip install matplotlib"
    if not any(run.steps or run.validations for run in runs):
        return f"--plot {options.plot}: no run has a training line or a validation to draw"
    try:
        plot(runs, options.plot)
    except ImportError as error:
        return (
            f"--plot needs matplotlib, which is broken here ({error}): "
            "python3 -m pip install --upgrade matplotlib"
        )
    except OSError as error:
        return (
            f"--plot {options.plot}: cannot be written: {error.strerror or error}: "
            "name a file in a folder of yours"
        )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        logs, comparison = gather(options)
        print(as_json(logs, comparison) if options.json else "\n".join(report(logs, comparison)))
        problem = draw(options, logs.runs) if options.plot and logs.runs else None
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, a pager say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if not logs.runs:
        problem = "no run was read: name a training log"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problem or comparison and comparison.refusals))


if __name__ == "__main__":
    sys.exit(main())
