"""Show what ran when in a trace of train_gpt.py (TRACE_STEPS=N): the share of time in which each
lane was busy, and a picture.

    python3 tools/timeline.py logs/<RUN_ID>.trace.json.gz [--picture FILE.svg]
    python3 tools/timeline.py OFF.trace.json.gz ON.trace.json.gz --picture pair.svg  # one time axis

tools/README.md says what each lane shows; one in which nothing ran is not drawn. The picture shows
the three steps after the first one. ui.perfetto.dev shows the same file in a browser.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
from cli import ToolError

MAX_BYTES = 1_000_000_000  # of an unpacked trace
MIN_COPY_BYTES = 1024  # smaller uploads are scalars, not batches
PARTS = ("forward", "backward", "optimizer")  # of compute
LANES = {"disk_read": "reader", "input_wait": "asked", "reduce": "all-reduce"}
LANES |= {name: name for name in PARTS} | {"grad_clip": "optimizer"}
COLOURS = {"reader": "#e69f00", "copy": "#7a5195", "compute": "#0072b2", "input wait": "#d00000"}
COLOURS |= dict.fromkeys(PARTS, "#56b4e9") | {"all-reduce": "#009e73"}
Span = tuple[float, float]


@dataclass
class Trace:
    """Milliseconds from the first step's begin; a row's spans are in order, without overlap."""

    name: str
    steps: list[tuple[float, int]]  # where each begins, and its number
    end: float
    rows: dict[str, list[Span]]

    def said(self) -> dict[str, str]:
        """What is to be said of each row."""
        ms = {name: length(spans) for name, spans in self.rows.items()}
        text = {name: f"busy {100 * time / self.end:.2f} %" for name, time in ms.items()}
        share = f"{100 * ms['input wait'] / self.end:.2f} %"
        text["input wait"] = f"{share}, {ms['input wait']:.2f} ms"
        if ms.get("reader"):
            hidden = length(common(self.rows["reader"], self.rows["compute"]))
            text["reader"] += f", {100 * hidden / ms['reader']:.0f} % of it under compute"
        return text


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


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
        return name if re.fullmatch(r"ProfilerStep#\d{1,9}", name) else LANES.get(name, "")
    return ""


def spans_in(path: Path) -> dict[str, list[Span]]:
    """The spans of each lane, in ms, from a file of torch.profiler's. Nothing in it is executed."""
    found: dict[str, list[Span]] = defaultdict(list)
    try:
        with gzip.open(path, "rb") as file:
            records = json.loads(file.read(MAX_BYTES))["traceEvents"]
        for event in records:
            if isinstance(event, dict) and (lane := lane_of(event)):
                begin = event["ts"] / 1e3
                found[lane].append((begin, begin + event["dur"] / 1e3))
    except Exception as error:  # whatever a damaged or hostile file comes up with
        why = getattr(error, "strerror", None) or f"damaged or no trace ({type(error).__name__})"
        raise ToolError(f"{path}: {why}: name a file that TRACE_STEPS wrote") from error
    return found


def read_trace(path: Path, few: bool = False) -> Trace:
    """`few`: only the steps that a picture shows."""
    found = spans_in(path)
    marks = {name: spans[0] for name, spans in found.items() if name.startswith("ProfilerStep#")}
    # After the last step of a shorter run comes a mark without a step.
    steps = sorted(
        (begin, int(name.partition("#")[2]))
        for name, (begin, end) in marks.items()
        if any(begin <= start < end for start, _ in found["optimizer"])
    )
    if not steps:
        raise ToolError(f"{path}: not a trace of this trainer: it has no steps or no phases")
    device = "GPU" if found["kernels"] or found["copy"] else "CPU"
    ended = [marks[f"ProfilerStep#{number}"] for _, number in steps]
    end = max(stop for _, stop in [*ended, *found["kernels"], *found["NCCL"]])
    rows = lanes(found, device, end)
    shown = steps[1:4] if few and len(steps) > 1 else steps  # so few that single reads are seen
    first, last = shown[0], shown[-1]
    end = min((begin for begin, _ in steps if begin > last[0]), default=end)
    for name, spans in rows.items():
        inside = common(spans, [(first[0], end)])
        rows[name] = [(begin - first[0], stop - first[0]) for begin, stop in inside]
    numbers = f"steps {first[1]} to {last[1]}" if shown[1:] else f"step {first[1]}"
    name = f"{path.name.removesuffix('.trace.json.gz')}, {numbers} on the {device}"
    begins = [(begin - first[0], number) for begin, number in shown]
    return Trace(name, begins, max(end - first[0], 1e-6), rows)


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
    """The timelines, one above the other on one time axis."""
    from matplotlib.figure import Figure  # slow to import

    end = max(trace.end for trace in traces)
    heights = [len(trace.rows) + 1.6 for trace in traces]
    figure = Figure(figsize=(8, 0.45 * sum(heights) + 0.5), dpi=200, layout="constrained")
    grid = figure.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)
    for trace, axes in zip(traces, grid[:, 0], strict=True):
        draw_rows(axes, trace, end)
        axes.set_title(trace.name, loc="left", weight="bold", pad=18)
    axes.set_xlabel("milliseconds")
    figure.savefig(path)


def draw_rows(axes: Any, trace: Trace, end: float) -> None:
    said = trace.said()
    axes.barh(range(len(trace.rows)), trace.end, 0.7, color="#f0f0f0")
    for row, (name, spans) in enumerate(trace.rows.items()):
        bars = [(begin, stop - begin) for begin, stop in spans]
        edge = 0 if name == "input wait" else 0.8  # a short read is seen, a short wait is nothing
        axes.broken_barh(bars, (row - 0.35, 0.7), color=COLOURS[name], lw=edge)
        axes.text(1.01 * end, row, said[name].replace(", ", "\n", 1), size=9, va="center")
    for begin, number in trace.steps:
        axes.axvline(begin, color="#606060", lw=1, ls="--")
        axes.text(begin, -0.6, f"step {number}", size=9)
    axes.set(xlim=(0, end), ylim=(len(trace.rows) - 0.5, -0.5))
    axes.set_yticks(range(len(trace.rows)), list(trace.rows))
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="a file that TRACE_STEPS wrote")
    add("--picture", type=cli.picture, metavar="FILE", help="draw a picture: .svg or .png")
    options = parser.parse_args(arguments)
    traces = [read_trace(path, few=bool(options.picture)) for path in options.files]
    if options.picture:
        draw(traces, options.picture)
    for trace in traces:
        print(f"{trace.name}: {trace.end:.0f} ms")
        print(*(f"  {name:10}  {words}" for name, words in trace.said().items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
