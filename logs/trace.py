"""A trace of train_gpt.py (TRACE_STEPS=N) as lines of text or as a picture: what ran when.

    python3 logs/trace.py logs/<RUN_ID>.trace.json.gz [--steps A:B] [--picture FILE.svg]

Lanes: reader (disk_read), copy (uploads of 1 KiB and more), compute (the device's kernels; on the
CPU the main thread's phases), and input wait: compute is idle, and the host asks for a batch or an
upload runs. In text a column is a slice of time, its height the share of it that the lane was busy;
arrows are where the host begins a step (a GPU may be behind). In a browser: ui.perfetto.dev.
"""

import argparse
import gzip
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import launch
from launch import ToolError

BLOCKS, PLAIN = ("↓", " ▁▂▃▄▅▆▇█"), ("v", " .:-=+*#@")  # a step's begin, and heights of bars
MAX_BYTES = 1_000_000_000  # of an unpacked trace
PICTURE_STEPS = 3  # so few that single reads are seen
MIN_COPY_BYTES = 1024  # smaller uploads are scalars, not batches
LANES = {"disk_read": "reader", "input_wait": "asked"}  # the trainer's names, and ours
LANES |= {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
LANES |= {"reduce": "reduce, clip", "grad_clip": "reduce, clip"}
COMPUTE = ("kernels", "forward", "backward", "reduce, clip", "optimizer")
COLOURS = dict(zip(COMPUTE, ("#0072b2", "#8ecae6", "#0072b2", "#cc79a7", "#009e73"), strict=True))
COLOURS |= {"reader": "#e69f00", "copy": "#7a5195", "input wait": "#d00000"}
Span = tuple[float, float]


@dataclass
class Trace:
    """Milliseconds from the first step's begin; a lane's spans are in order, without overlap."""

    steps: list[tuple[float, int]]  # where each begins, and its number
    end: float
    cuda: bool
    lanes: dict[str, list[Span]]

    def __post_init__(self) -> None:
        reader, copy, asked = (self.lanes[label] for label in ("reader", "copy", "asked"))
        compute = merged(span for label in COMPUTE for span in self.lanes[label])
        edges = [(0.0, 0.0), *compute, (self.end, self.end)]
        idle = [(a[1], b[0]) for a, b in zip(edges, edges[1:], strict=False)]
        wait = common(idle, merged(asked + copy))
        self.rows = {"reader": reader, "copy": copy, "compute": compute, "input wait": wait}
        first, last = self.steps[0][1], self.steps[-1][1]
        self.name = f"steps {first} to {last}" if first < last else f"step {first}"

    def part(self, first: float, last: float) -> "Trace":
        """The steps from number `first` to `last` alone."""
        steps = [step for step in self.steps if first <= step[1] <= last]
        if not steps:
            raise ToolError(f"--steps: the trace has {self.name}, and none of these")
        begin = steps[0][0]
        end = min((time for time, _ in self.steps if time > steps[-1][0]), default=self.end)
        cut = {
            label: [(a - begin, b - begin) for a, b in common(spans, [(begin, end)])]
            for label, spans in self.lanes.items()
        }
        marks = [(time - begin, number) for time, number in steps]
        return Trace(marks, max(end - begin, 1e-6), self.cuda, cut)


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


def total(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def keep_drawn(record: dict) -> object:
    """Of each JSON object what is drawn, (lane, span): the rest shall take no memory."""
    lane, name, category = "", str(record.get("name")), record.get("cat")
    if category == "user_annotation":
        lane = name if name.startswith("ProfilerStep#") else LANES.get(name, "")
    elif category == "kernel":
        lane = "kernels"
    elif category == "gpu_memcpy" and "HtoD" in name:
        lane = "copy" if record["args"]["bytes"] >= MIN_COPY_BYTES else ""
    if not lane:
        return record if "traceEvents" in record or "bytes" in record else None
    begin, length = record["ts"] / 1e3, record["dur"] / 1e3
    if length < 0 or not math.isfinite(begin + length):
        raise ValueError("a time that is none")
    return lane, (begin, begin + length)


def read_events(path: Path) -> list[tuple[str, Span]]:
    """What is drawn of a file of torch.profiler's; nothing in it is executed."""
    try:
        with open(path, "rb") as file:
            opener = gzip.open if file.read(2) == b"\x1f\x8b" else open
        with opener(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            events = json.loads(data, object_hook=keep_drawn)["traceEvents"]
            return [event for event in events if isinstance(event, tuple)]
    except Exception as error:  # whatever a damaged or hostile file comes up with
        why = getattr(error, "strerror", None) or f"damaged or no trace ({type(error).__name__})"
        raise ToolError(f"{path}: {why}: name a file that TRACE_STEPS wrote") from error
    raise ToolError(f"{path}: over {MAX_BYTES:,} bytes when unpacked: trace fewer steps")


def read_trace(path: Path) -> Trace:
    steps, lanes = [], {label: [] for label in ("reader", "copy", "asked", *COMPUTE)}
    for label, span in read_events(path):
        if mark := re.fullmatch(r"ProfilerStep#(\d{1,9})", label):
            steps.append((*span, int(mark[1])))
        elif label in lanes:
            lanes[label].append(span)
    if not steps or not any(lanes[label] for label in LANES.values()):
        missing = "phases" if steps else "ProfilerStep marks"
        raise ToolError(f"{path}: no trace of this trainer's: it has no {missing}")
    cuda = bool(lanes["kernels"] or lanes["copy"])
    if cuda:  # the host's phases are when work was issued, not when it was done
        lanes |= {label: [] for label in COMPUTE if label != "kernels"}
    end = max(stop for _, stop, *_ in [*steps, *lanes["kernels"]])
    marks = sorted((begin, number) for begin, _, number in steps)
    lanes = {label: merged(spans) for label, spans in lanes.items()}
    return Trace(marks, end, cuda, lanes).part(-math.inf, math.inf)


def verdicts(trace: Trace) -> dict[str, str]:
    """What is to be said of each row."""
    ms = {name: total(spans) for name, spans in trace.rows.items()}
    share = {name: f"{100 * time / trace.end:.2f} %" for name, time in ms.items()}
    hidden = total(common(trace.rows["reader"], trace.rows["compute"])) / (ms["reader"] or 1.0)
    reader = f"busy {share['reader']}, {100 * hidden:.0f} % of it under compute"
    return {
        "reader": reader if ms["reader"] else "no read",
        "copy": f"busy {share['copy']}" if trace.cuda else "none: no CUDA",
        "compute": f"busy {share['compute']}",
        "input wait": f"{share['input wait']}, {ms['input wait']:.2f} ms",
    }


def bar(spans: list[Span], end: float, columns: int, heights: str) -> str:
    """A character a slice of [0, end); a slice with anything in it is never drawn as empty."""
    slices, width, top = [0.0] * columns, end / columns, len(heights) - 1
    for begin, stop in spans:
        for i in range(int(begin / width), min(columns - 1, int(stop / width)) + 1):
            slices[i] += max(0.0, min(stop, (i + 1) * width) - max(begin, i * width))
    return "".join(heights[max(time > 0, min(top, round(top * time / width)))] for time in slices)


def arrows(trace: Trace, columns: int, arrow: str) -> str:
    """A line with an arrow where each step begins, and its number where there is room for it."""
    line = " " * columns
    for begin, number in reversed(trace.steps):
        place = int(begin / trace.end * columns)
        label = f"{arrow}{number} "
        if line[place : place + len(label)].strip():
            label = arrow
        line = (line[:place] + label + line[place + len(label) :])[:columns]
    return line


def text(trace: Trace, file: str, columns: int, arrow: str, heights: str) -> list[str]:
    lines = [f"{file}: {trace.name}, {trace.end:.0f} ms; a column is {trace.end / columns:.2f} ms"]
    lines.append(f"{'':10}  {arrows(trace, columns, arrow)}".rstrip())
    for name, verdict in verdicts(trace).items():
        lines.append(f"{name:10} |{bar(trace.rows[name], trace.end, columns, heights)}| {verdict}")
    return lines


def draw(trace: Trace, path: Path) -> None:
    """The timeline, 800 pixels wide; a trace gives the same file each time."""
    import matplotlib.figure  # optional, and slow to import

    said, pixel, device = verdicts(trace), trace.end / 560, "GPU" if trace.cuda else "CPU"
    figure = matplotlib.figure.Figure(figsize=(8, 3.6), dpi=200, facecolor="white")
    figure.text(0.02, 0.925, f"What ran when, {trace.name} on the {device}", size=13, weight="bold")
    figure.text(0.02, 0.85, f"reader {said['reader']}; input wait {said['input wait']}", size=11)
    figure.text(0.02, 0.035, f"reads are drawn at least {3 * pixel:.2f} ms wide", size=9)
    axes = figure.add_axes((0.125, 0.235, 0.7, 0.5), frameon=False, xlabel="milliseconds")
    axes.barh(range(4), trace.end, 0.7, color="#f0f0f0")
    rows = [(2, name, trace.lanes[name]) for name in COMPUTE if trace.cuda == (name == "kernels")]
    rows += [(i, name, trace.rows[name]) for i, name in enumerate(said) if name in COLOURS]
    for row, label, spans in reversed(rows):  # a bar that is drawn wider covers what follows it
        least = pixel if label in COMPUTE else 3 * pixel
        wide = merged((min(a, trace.end - least), max(b, a + least)) for a, b in spans)
        bars = axes.broken_barh([(a, b - a) for a, b in wide], (row - 0.35, 0.7), lw=0)
        bars.set(color=COLOURS[label], label=label if label in COMPUTE else None)
    axes.text(-12 * pixel, -0.6, "step", size=10.5, ha="right")
    for begin, number in trace.steps[:: 1 + len(trace.steps) // 40]:
        axes.axvline(begin, color="#606060", lw=1, ls="--")
        axes.text(begin, -0.6, f"{number}", size=10.5)
    for row, verdict in enumerate(said.values()):
        axes.text(trace.end + 10 * pixel, row, verdict.split(",")[0], size=10, va="center")
    axes.set(xlim=(-2 * pixel, trace.end), ylim=(3.5, -0.5), yticks=range(4), yticklabels=said)
    axes.tick_params(left=False, labelsize=10.5)
    figure.legend(loc="lower right", ncols=5, frameon=False, reverse=True)
    with matplotlib.rc_context({"svg.hashsalt": "trace"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def step_range(given: str) -> tuple[int, int]:
    first, _, last = given.partition(":")
    return int(first), int(last or first)


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = launch.Parser(description=__doc__, formatter_class=plain)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=step_range, metavar="A:B", help="of these steps only")
    parser.add_argument("--width", type=int, default=0, metavar="COLUMNS", help="of the bars")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: .svg or .png")
    options = parser.parse_args()
    columns = max(1, options.width or shutil.get_terminal_size((120, 24)).columns - 54)
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        parser.exit(2, f"error: --picture {options.picture}: must end in .svg or .png\n")
    try:
        trace = read_trace(options.file)
        few = options.picture and trace.steps[1 : 1 + PICTURE_STEPS] or trace.steps
        trace = trace.part(*options.steps or (few[0][1], few[-1][1]))
        if options.picture:
            draw(trace, options.picture)
    except ToolError as error:
        parser.exit(1, f"error: {error}\n")
    except ImportError:
        parser.exit(1, f"error: --picture: {launch.missing('matplotlib')}\n")
    except OSError as error:
        words = f"cannot be written to {options.picture.parent}/: {error.strerror}"
        parser.exit(1, f"error: --picture {options.picture}: {words}: name another folder\n")
    characters = BLOCKS if "utf" in str(sys.stdout.encoding).lower() else PLAIN
    print(*text(trace, options.file.name, columns, *characters), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
