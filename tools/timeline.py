"""Show what ran when in a trace of train_gpt.py (TRACE_STEPS=N): the share of time in which each
lane was busy, and a picture.

    python3 tools/timeline.py logs/<RUN_ID>.trace.json.gz [--picture FILE.svg]
    python3 tools/timeline.py OFF.trace.json.gz ON.trace.json.gz --picture pair.svg  # one time axis

Lanes: reader (disk_read), copy (uploads of 1 KiB and more), compute (the device's kernels; on the
CPU the main thread's phases) with its parts forward, backward and optimizer, all-reduce (NCCL's
kernels, in which a rank also waits for the others), and input wait: neither of the two runs, and
the host asks for a batch or an upload runs. A lane in which nothing ran is not drawn. The picture
shows the three steps after the first one. ui.perfetto.dev shows the same file in a browser.
"""

import argparse
import gzip
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
from cli import ToolError

MAX_BYTES = 1_000_000_000  # of an unpacked trace
PICTURE_STEPS = 3  # so few that single reads are seen
MIN_COPY_BYTES = 1024  # smaller uploads are scalars, not batches
PARTS = ("forward", "backward", "optimizer")  # of compute
LANES = {"disk_read": "reader", "input_wait": "asked", "reduce": "all-reduce"}
LANES |= {name: name for name in PARTS} | {"grad_clip": "optimizer"}
COLOURS = {"reader": "#e69f00", "copy": "#7a5195", "compute": "#0072b2", "input wait": "#d00000"}
COLOURS |= dict.fromkeys(PARTS, "#56b4e9") | {"all-reduce": "#009e73"}
SHORT = 0.002  # of the time drawn: shorter waits have no bar, for a bar would look like a wait
Span = tuple[float, float]


@dataclass
class Trace:
    """Milliseconds from the first step's begin; a row's spans are in order, without overlap."""

    file: str
    steps: list[tuple[float, int]]  # where each begins, and its number
    end: float
    device: str
    rows: dict[str, list[Span]]

    @property
    def name(self) -> str:
        first, last = self.steps[0][1], self.steps[-1][1]
        steps = f"steps {first} to {last}" if first < last else f"step {first}"
        return f"{self.file}, {steps} on the {self.device}"

    def said(self) -> dict[str, str]:
        """What is to be said of each row."""
        ms = {name: sum(b - a for a, b in spans) for name, spans in self.rows.items()}
        text = {name: f"busy {100 * time / self.end:.2f} %" for name, time in ms.items()}
        share = f"{100 * ms['input wait'] / self.end:.2f} %"
        text["input wait"] = f"{share}, {ms['input wait']:.2f} ms"
        if ms.get("reader"):
            hidden = common(self.rows["reader"], self.rows["compute"])
            part = 100 * sum(b - a for a, b in hidden) / ms["reader"]
            text["reader"] += f", {part:.0f} % of it under compute"
        return text


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in order and without overlap."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def common(left: list[Span], right: list[Span]) -> list[Span]:
    """The time that lies in both, each of them in order and without overlap."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            out.append((begin, end))
        i, j = (i + 1, j) if left[i][1] < right[j][1] else (i, j + 1)
    return out


def lane_of(event: dict) -> str:
    """The lane in which an event is drawn; none: empty."""
    name, category = str(event.get("name")), event.get("cat")
    if category == "kernel":
        return "NCCL" if name.startswith("nccl") else "kernels"
    if category == "gpu_user_annotation" and LANES.get(name) in PARTS:
        return f"{LANES[name]} of the GPU"
    if category == "gpu_memcpy" and "HtoD" in name and event["args"]["bytes"] >= MIN_COPY_BYTES:
        return "copy"
    if category == "user_annotation":
        return name if name.startswith("ProfilerStep#") else LANES.get(name, "")
    return ""


def span_of(event: dict) -> Span:
    begin = event["ts"] / 1e3
    return begin, begin + event["dur"] / 1e3


def read_trace(path: Path, few: bool = False) -> Trace:
    """A file of torch.profiler's; `few`: only the steps that a picture shows. Nothing in it is
    executed."""
    try:
        with open(path, "rb") as file:
            opener = gzip.open if file.read(2) == b"\x1f\x8b" else open
        with opener(path, "rb") as file:
            records = json.loads(file.read(MAX_BYTES))["traceEvents"]
        drawn = [event for event in records if isinstance(event, dict) and lane_of(event)]
        events = [(lane_of(event), span_of(event)) for event in drawn]
    except Exception as error:  # whatever a damaged or hostile file comes up with
        why = getattr(error, "strerror", None) or f"damaged or no trace ({type(error).__name__})"
        raise ToolError(f"{path}: {why}: name a file that TRACE_STEPS wrote") from error
    found: dict[str, list[Span]] = defaultdict(list)
    steps = []
    for label, span in events:
        if mark := re.fullmatch(r"ProfilerStep#(\d{1,9})", label):
            steps.append((*span, int(mark[1])))
        else:
            found[label].append(span)
    # After the last step of a shorter run comes a mark without a step.
    steps = [s for s in steps if any(s[0] <= begin < s[1] for begin, _ in found["optimizer"])]
    if not steps:
        raise ToolError(f"{path}: not a trace of this trainer: it has no steps or no phases")
    device = "GPU" if found["kernels"] or found["copy"] else "CPU"
    end = max(stop for _, stop, *_ in [*steps, *found["kernels"], *found["NCCL"]])
    rows = lanes(found, device, end)
    marks = sorted((begin, number) for begin, _, number in steps)
    shown = marks[1 : 1 + PICTURE_STEPS] if few and len(marks) > 1 else marks
    first, last = shown[0][0], shown[-1][0]
    end = min((time for time, _ in marks if time > last), default=end)
    rows = {
        name: [(a - first, b - first) for a, b in common(spans, [(first, end)])]
        for name, spans in rows.items()
    }
    marks = [(time - first, number) for time, number in shown]
    file = path.name.removesuffix(".trace.json.gz")
    return Trace(file, marks, max(end - first, 1e-6), device, rows)


def lanes(found: dict[str, list[Span]], device: str, end: float) -> dict[str, list[Span]]:
    """The rows in which something ran, and input wait."""
    if device == "GPU":  # the host's phases are when work was issued, not when it was done
        parts = {name: merged(found[f"{name} of the GPU"]) for name in PARTS}
        compute, reduced = merged(found["kernels"]), merged(found["NCCL"])
    else:
        parts = {name: merged(found[name]) for name in PARTS}
        compute = merged(span for spans in parts.values() for span in spans)
        reduced = merged(found["all-reduce"])
    edges = [(-math.inf, -math.inf), *merged(compute + reduced), (end, end)]
    idle = [(a[1], b[0]) for a, b in zip(edges, edges[1:], strict=False)]
    rows = {name: merged(found[name]) for name in ("reader", "copy")} | {"compute": compute}
    rows |= {name: common(compute, spans) for name, spans in parts.items()}
    rows["all-reduce"] = reduced
    kept = {name: spans for name, spans in rows.items() if spans or name == "compute"}
    return kept | {"input wait": common(idle, merged(found["asked"] + found["copy"]))}


def draw(traces: Sequence[Trace], path: Path) -> None:
    """The timelines, one above the other on one time axis; the same traces give the same file."""
    import matplotlib  # optional, and slow to import
    from matplotlib.figure import Figure

    end = max(trace.end for trace in traces)
    heights = [len(trace.rows) + 1.6 for trace in traces]
    figure = Figure(figsize=(8, 0.45 * sum(heights) + 0.5), dpi=200, layout="constrained")
    grid = figure.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)
    for trace, axes in zip(traces, grid[:, 0], strict=True):
        draw_rows(axes, trace, end)
        axes.set_title(trace.name, loc="left", weight="bold", pad=18)
    axes.set_xlabel(f"milliseconds (waits below {SHORT * end:.2f} ms are not drawn)")
    with matplotlib.rc_context({"svg.hashsalt": "timeline"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def draw_rows(axes: Any, trace: Trace, end: float) -> None:
    said, pixel = trace.said(), end / 560
    axes.barh(range(len(trace.rows)), trace.end, 0.7, color="#f0f0f0")
    for row, (name, spans) in enumerate(trace.rows.items()):
        if name == "input wait":
            spans = [span for span in spans if span[1] - span[0] >= SHORT * end]
        least = 3 * pixel if name == "reader" else pixel  # a short read is seen, too
        wide = merged((min(a, trace.end - least), max(b, a + least)) for a, b in spans)
        bars = [(a, b - a) for a, b in wide]
        axes.broken_barh(bars, (row - 0.35, 0.7), lw=0, color=COLOURS[name])
        axes.text(1.01 * end, row, said[name].replace(", ", "\n", 1), size=9, va="center")
    for begin, number in trace.steps[:: 1 + len(trace.steps) // 40]:
        axes.axvline(begin, color="#606060", lw=1, ls="--")
        axes.text(begin, -0.6, f"step {number}", size=9)
    axes.set(xlim=(0, end), ylim=(len(trace.rows) - 0.5, -0.5))
    axes.set_yticks(range(len(trace.rows)), list(trace.rows))
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="a file that TRACE_STEPS wrote")
    add("--picture", type=Path, metavar="FILE", help="draw a picture: .svg or .png")
    options = parser.parse_args(arguments)
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        parser.exit(2, f"error: --picture {options.picture}: must end in .svg or .png\n")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    traces = [read_trace(path, few=bool(options.picture)) for path in options.files]
    if options.picture:
        draw(traces, options.picture)
    for trace in traces:
        print(f"{trace.name}: {trace.end:.0f} ms")
        print(*(f"  {name:10}  {words}" for name, words in trace.said().items()), sep="\n")
    return 0


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
