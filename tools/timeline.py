"""Show what ran when in a trace of train_gpt.py (TRACE_STEPS=N): print in which share of the time
each lane (reader, compute, input wait, ...) was busy, and draw a timeline.

    python3 tools/timeline.py logs/<RUN_ID>.trace.json.gz [--picture FILE.svg]
    python3 tools/timeline.py OFF.trace.json.gz ON.trace.json.gz --picture logs/pair.svg \\
        --title "without overlap" --title "with overlap"      # both on one time axis

tools/README.md explains the lanes. A lane in which nothing ran is left out. The timeline shows
three steps, without the first one. For two traces, a line says how much of the difference in step
time is input wait: overlap can save only input wait. You can also open the trace in a browser, at
ui.perfetto.dev.
"""

# This module builds on cli.py (options and errors), runs.py (the settings of the traced run) and
# figures.py (writes the timeline).

import gzip
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from cli import ToolError, one_line
from figures import write_figure
from runs import Run, read_log

MAX_BYTES = 1_000_000_000  # size limit of an unpacked trace
MIN_COPY_BYTES = 1024  # smaller uploads are scalars, not batches
SUFFIX = ".trace.json.gz"
PARTS = ("forward", "backward", "optimizer")  # the parts of compute
# The name that train_gpt.py gives to a phase, and the lane in which the phase is counted.
PHASE_LANES = {
    "disk_read": "reader",
    "input_wait": "host waits",
    "forward": "forward",
    "backward": "backward",
    "grad_clip": "optimizer",
    "optimizer": "optimizer",
    "reduce": "all-reduce",
}
COLOURS = {
    "reader": "#e69f00",
    "copy": "#7a5195",
    "compute": "#0072b2",
    "forward": "#56b4e9",
    "backward": "#56b4e9",
    "optimizer": "#56b4e9",
    "all-reduce": "#009e73",
    "input wait": "#d00000",
}
Span = tuple[float, float]  # begin and end in milliseconds


@dataclass
class Trace:
    """Some consecutive steps of a trace. Times are in milliseconds from the first step's begin."""

    title: str  # the file's name and what is known of the run's overlap, or a given title
    device: str  # GPU or CPU
    ranks: int | None  # of the traced run; None: not known
    steps: list[tuple[float, int]]  # when each step begins, and the step's number
    end: float
    lanes: dict[str, list[Span]]  # the spans of a lane are sorted and do not overlap

    def describe_lanes(self) -> dict[str, str]:
        """Return {lane: how long it was busy, in words}."""
        texts = {}
        for name, spans in self.lanes.items():
            texts[name] = f"busy {format_percent(total_ms(spans) / self.end)}"
        waited = total_ms(self.lanes["input wait"])
        share = format_percent(waited / self.end)
        texts["input wait"] = f"{share} of the time, {format_ms(waited)}"
        if read := total_ms(self.lanes.get("reader", [])):
            hidden = total_ms(intersect_spans(self.lanes["reader"], self.lanes["compute"]))
            texts["reader"] += f", {format_percent(hidden / read)} of it during compute"
        return texts

    def describe_steps(self) -> str:
        """Return the numbers of the steps, the device and the time that the steps take."""
        first, last = self.steps[0][1], self.steps[-1][1]
        if first == last:
            return f"step {first} on the {self.device} takes {self.end:.0f} ms"
        return f"steps {first} to {last} on the {self.device} take {self.end:.0f} ms"

    def lanes_to_draw(self, with_parts: bool) -> dict[str, list[Span]]:
        """Return the lanes of the timeline: the all-reduce of a single rank sends nothing."""
        hidden = set() if with_parts else set(PARTS)
        if self.ranks == 1:
            hidden.add("all-reduce")
        return {name: spans for name, spans in self.lanes.items() if name not in hidden}


def format_percent(share: float) -> str:
    """Return a share as percent without decimals, or with one digit if it is below 1 %."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "less than 0.01 %"
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %"


def format_ms(ms: float) -> str:
    if 0 < ms < 0.01:
        return "less than 0.01 ms"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1g} ms"


def total_ms(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def merge_spans(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return the same time as sorted spans that do not overlap. Spans that are at most `gap`
    milliseconds apart become one span."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersect_spans(left: list[Span], right: list[Span]) -> list[Span]:
    """Return the time that is in both lists. Each list is sorted and has no overlapping spans."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def find_lane(event: dict) -> str:
    """Return the lane in which an event of the trace is counted; empty if in none."""
    name, category = str(event.get("name")), event.get("cat")
    if category == "kernel":
        return "NCCL" if name.startswith("nccl") else "kernels"
    if category == "gpu_user_annotation" and PHASE_LANES.get(name) in PARTS:
        return f"{PHASE_LANES[name]} of the GPU"
    if category == "gpu_memcpy" and "HtoD" in name and event["args"]["bytes"] >= MIN_COPY_BYTES:
        return "copy"
    if category == "user_annotation":
        is_step = re.fullmatch(r"ProfilerStep#\d{1,9}", name)
        return name if is_step else PHASE_LANES.get(name, "")
    return ""


def read_spans(path: Path) -> dict[str, list[Span]]:
    """Return the spans of each lane, in ms, from a file of torch.profiler. Nothing in the file is
    executed. Raises ToolError if the file is damaged or no trace."""
    found: dict[str, list[Span]] = defaultdict(list)
    try:
        document = json.loads(read_unpacked(path))
        records = document["traceEvents"] if isinstance(document, dict) else document
        for event in records:
            if isinstance(event, dict) and (lane := find_lane(event)):
                begin = event["ts"] / 1e3
                found[lane].append((begin, begin + event["dur"] / 1e3))
    except ToolError:
        raise
    except Exception as error:  # a damaged or hostile file can raise anything
        why = getattr(error, "strerror", None) or f"damaged or no trace ({type(error).__name__})"
        raise ToolError(f"{path}: {why}; give a file that a run with TRACE_STEPS wrote") from error
    return found


def read_unpacked(path: Path) -> bytes:
    """Return the bytes of a trace, which may be packed by gzip. Raises ToolError if the file cannot
    be a trace that is read here."""
    with open(path, "rb") as file:
        start = file.peek(200)[:200]
        is_packed = start.startswith(b"\x1f\x8b")
        data = (gzip.GzipFile(fileobj=file) if is_packed else file).read(MAX_BYTES)
    if len(data) == MAX_BYTES:
        words = f"the unpacked trace has more than {MAX_BYTES:,} bytes"
        raise ToolError(f"{path}: {words}; trace fewer steps (TRACE_STEPS)")
    if start.startswith(b'{"event"'):
        beside = path.name.partition(".")[0] + SUFFIX
        raise ToolError(f"{path}: this is a log, not a trace; give {beside}")
    return data


def read_trace(path: Path, title: str = "", few: bool = False) -> Trace:
    """Return the steps of a trace, or, with `few`, only the steps that a timeline shows."""
    found = read_spans(path)
    marks = {name: spans[0] for name, spans in found.items() if name.startswith("ProfilerStep#")}
    # The profiler writes one mark more after the last step of a short run: it has no optimizer.
    steps = sorted(
        (begin, int(name.partition("#")[2]))
        for name, (begin, end) in marks.items()
        if any(begin <= start < end for start, _ in found["optimizer"])
    )
    if not steps:
        raise ToolError(f"{path}: not a trace of this trainer: it has no steps or no phases")
    device = "GPU" if found["kernels"] or found["copy"] else "CPU"
    step_marks = [marks[f"ProfilerStep#{number}"] for _, number in steps]
    end = max(stop for _, stop in [*step_marks, *found["kernels"], *found["NCCL"]])
    lanes = find_lanes(found, device, end)
    shown = steps
    if few and len(steps) > 1:
        shown = steps[1:4]  # of more steps, single reads could not be seen
    first, last = shown[0][0], shown[-1][0]
    end = min((begin for begin, _ in steps if begin > last), default=end)
    for name, spans in lanes.items():
        inside = intersect_spans(spans, [(first, end)])
        lanes[name] = [(begin - first, stop - first) for begin, stop in inside]
    begins = [(begin - first, number) for begin, number in shown]
    run = read_run(path)
    ranks = run.world_size if run else None
    title = one_line(title or default_title(path, run))
    return Trace(title, device, ranks, begins, max(end - first, 1e-6), lanes)


def difference_line(first: Trace, other: Trace) -> str:
    """Return in words how much longer or shorter a mean step of `other` is, and how much of this is
    input wait. Steps of two runs differ by other causes, too, such as a busy machine."""
    per_step = [1 / len(trace.steps) for trace in (first, other)]
    ends = first.end * per_step[0], other.end * per_step[1]
    waits = [
        total_ms(trace.lanes["input wait"]) * share
        for trace, share in zip((first, other), per_step, strict=True)
    ]
    more, waited = ends[1] - ends[0], waits[1] - waits[0]
    return (
        f"{other.title} against {first.title}: a step takes {ends[1]:.0f} ms instead of "
        f"{ends[0]:.0f} ms: {format_change(waited)} of input wait and "
        f"{format_change(more - waited)} of all else (compute, other ranks, a busy machine)"
    )


def format_change(ms: float) -> str:
    """Return a difference of milliseconds with its sign."""
    return f"{ms:+.2f} ms" if abs(ms) < 10 else f"{ms:+.0f} ms"


def read_run(path: Path) -> Run | None:
    """Return the run whose log is beside the trace; None if there is no such log."""
    log = path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")
    runs = read_log(log).runs if path.name.endswith(SUFFIX) and log.is_file() else []
    return runs[0] if runs else None


def default_title(path: Path, run: Run | None) -> str:
    """Return the file's name and, if the run's log is beside it, how the run was overlapped."""
    name = path.name.removesuffix(SUFFIX)
    prefetch = run.config.get("train_prefetch") if run else None
    if prefetch is None:
        return name
    return f"{name}, with overlap" if prefetch else f"{name}, without overlap (TRAIN_PREFETCH=0)"


def find_lanes(found: dict[str, list[Span]], device: str, end: float) -> dict[str, list[Span]]:
    """Return the lanes in which something ran, and always compute and input wait."""
    if device == "GPU":  # the phases of the host are when work was issued, not when it was done
        parts = {name: merge_spans(found[f"{name} of the GPU"]) for name in PARTS}
        compute = merge_spans(found["kernels"])
        reduced = merge_spans(found["NCCL"])
    else:
        parts = {name: merge_spans(found[name]) for name in PARTS}
        compute = merge_spans(span for spans in parts.values() for span in spans)
        reduced = merge_spans(found["all-reduce"])
    # The device is idle between the end of each busy span and the begin of the next one.
    edges = [(-math.inf, -math.inf), *merge_spans(compute + reduced), (end, end)]
    idle = [(a[1], b[0]) for a, b in zip(edges, edges[1:], strict=False)]
    lanes = {
        "reader": merge_spans(found["reader"]),
        "copy": merge_spans(found["copy"]),
        "compute": compute,
    }
    lanes |= {name: intersect_spans(compute, spans) for name, spans in parts.items()}
    lanes["all-reduce"] = reduced
    lanes = {name: spans for name, spans in lanes.items() if spans or name == "compute"}
    lanes["input wait"] = intersect_spans(idle, merge_spans(found["host waits"] + found["copy"]))
    return lanes


def make_figure(traces: Sequence[Trace]) -> Any:
    """Return a figure of the timelines, one above the other on one time axis."""
    from matplotlib.figure import Figure  # slow to import

    end = max(trace.end for trace in traces)
    # Two timelines are compared by their waits: forward, backward, optimizer would repeat compute.
    panels = [trace.lanes_to_draw(with_parts=len(traces) == 1) for trace in traces]
    heights = [len(lanes) + 1.9 for lanes in panels]
    figure = Figure(figsize=(8, 0.33 * sum(heights) + 0.5), dpi=200, layout="constrained")
    grid = figure.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)
    for trace, lanes, axes in zip(traces, panels, grid[:, 0], strict=True):
        draw_lanes(axes, trace, lanes, end)
        count = "1 step takes" if len(trace.steps) == 1 else f"{len(trace.steps)} steps take"
        seconds = trace.end / 1e3
        took = f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
        axes.set_title(f"{trace.title}: {count} {took}", loc="left", weight="bold", size=11, pad=18)
    lines = [line for other in traces[1:] for line in wrap(difference_line(traces[0], other), 95)]
    axes.set_xlabel("\n".join(["time (ms)", *lines]))
    return figure


def draw_lanes(axes: Any, trace: Trace, lanes: dict[str, list[Span]], end: float) -> None:
    texts = trace.describe_lanes()
    axes.barh(range(len(lanes)), trace.end, 0.7, color="#f0f0f0")
    for row, (name, spans) in enumerate(lanes.items()):
        # Gaps that are narrower than a printed line are closed: they only make the file larger.
        spans = merge_spans(spans, gap=end / 2000)
        bars = [(begin, stop - begin) for begin, stop in spans]
        # An edge makes a short read visible. A wait has no edge, so a short wait looks short.
        edge = 0 if name == "input wait" else 0.8
        axes.broken_barh(bars, (row - 0.35, 0.7), color=COLOURS[name], lw=edge)
        axes.text(1.01 * end, row, texts[name].replace(", ", "\n", 1), size=9, va="center")
    for begin, number in trace.steps:
        axes.axvline(begin, color="#606060", lw=1, ls="--")
        axes.text(begin, -0.65, f"step {number}", size=9)
    axes.set(xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    text = "a trace, as TRACE_STEPS writes it, packed (.gz) or unpacked"
    add("files", type=Path, nargs="+", metavar="FILE", help=text)
    add("--picture", type=cli.plot_path, metavar="FILE", help="write a timeline: .svg or .png")
    text = "title of a trace, such as what was slowed; give one for each FILE, in the same order"
    add("--title", action="append", default=[], metavar="TEXT", help=text)
    options = parser.parse_args(arguments)
    parser.require(options.files, "give a trace, which a run with TRACE_STEPS=8 writes to logs/")
    if options.title and len(options.title) != len(options.files):
        counts = f"{len(options.title)} titles for {len(options.files)} files"
        parser.error(f"--title: there are {counts}; give one title for each file")
    titles = options.title or [""] * len(options.files)
    traces = [
        read_trace(path, title, few=bool(options.picture))
        for path, title in zip(options.files, titles, strict=True)
    ]
    drawn = True
    if options.picture:
        drawn = write_figure(lambda: make_figure(traces), options.picture)
    for trace in traces:
        print(f"{trace.title}: {trace.describe_steps()}")
        for name, text in trace.describe_lanes().items():
            print(f"  {name:10}  {text}")
    for other in traces[1:]:
        print(difference_line(traces[0], other))
    return int(not drawn)


if __name__ == "__main__":
    sys.exit(cli.run(main))
