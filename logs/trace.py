"""Show what ran when in a trace of train_gpt.py (TRACE_STEPS=N), as text or as a picture.

    python3 logs/trace.py logs/<RUN_ID>.trace.json.gz [--steps A:B] [--picture FILE.svg]
    python3 logs/trace.py OFF.trace.json.gz ON.trace.json.gz --picture FILE.svg   # a pair, one axis

Lanes: reader (disk_read), copy (uploads of 1 KiB and more), compute (the device's kernels; on the
CPU the main thread's phases), and input wait: compute is idle, and the host asks for a batch or an
upload runs. In the text each column is a slice of time; its height is the share of that time in
which the lane was busy. An arrow shows where the host begins a step (a GPU may begin it later).
ui.perfetto.dev shows the same file in a browser.
"""

import argparse
import gzip
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli


class ToolError(Exception):
    """What is wrong with a file or an option, in one line."""


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
SHORT = 0.002  # of the time drawn: shorter waits are no bar, for a bar would look like a wait
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


@dataclass
class Part:
    """A trace in the picture, with what is written above it."""

    trace: Trace
    title: str

    @property
    def said(self) -> dict[str, str]:
        return verdicts(self.trace)

    @property
    def drawn(self) -> list[tuple[int, str, list[Span]]]:
        """Row, lane and spans of each colour; waits only where they are long enough to matter."""
        trace = self.trace
        rows = [
            (2, name, trace.lanes[name]) for name in COMPUTE if trace.cuda == (name == "kernels")
        ]
        rows += [(i, name, trace.rows[name]) for i, name in enumerate(self.said) if name in COLOURS]
        return [
            (row, name, seen(spans, trace.end) if name == "input wait" else spans)
            for row, name, spans in reversed(rows)
        ]


def seen(waits: list[Span], end: float) -> list[Span]:
    return [span for span in waits if span[1] - span[0] >= SHORT * end]


def draw(parts: Sequence[Part], path: Path) -> None:
    """The timelines, one above the other on one time axis, 800 pixels wide; the same traces give
    the same file each time."""
    import matplotlib.figure  # optional, and slow to import

    end = max(part.trace.end for part in parts)
    pixel, height = end / 560, 3.6 if len(parts) == 1 else 2.9 * len(parts) + 0.5
    figure = matplotlib.figure.Figure(figsize=(8, height), dpi=200, facecolor="white")
    foot = 0.68 / height  # below the axes: their numbers, the legend
    room = (1 - foot) / len(parts)
    for number, part in enumerate(parts):
        top = 1 - number * room
        figure.text(0.02, top - 0.27 / height, part.title, size=13, weight="bold")
        said = f"reader {part.said['reader']}; input wait {part.said['input wait']}"
        figure.text(0.02, top - 0.54 / height, said, size=11)
        box = (0.125, top - room + 0.17 / height, 0.7, room - 1.12 / height)
        axes = figure.add_axes(box, frameon=False)
        draw_lanes(axes, part, end, pixel)
        if number < len(parts) - 1:
            axes.set_xticks([])
        else:
            axes.set_xlabel("milliseconds")
    widths = f"reads: at least {3 * pixel:.2f} ms wide"
    note = f"{widths}\nwaits below {SHORT * end:.2f} ms: not drawn"
    figure.text(0.02, 0.1 / height, note, size=8)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", ncols=5, frameon=False, reverse=True)
    with matplotlib.rc_context({"svg.hashsalt": "trace"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def draw_lanes(axes: Any, part: Part, end: float, pixel: float) -> None:
    trace = part.trace
    axes.barh(range(4), trace.end, 0.7, color="#f0f0f0")
    for row, label, spans in part.drawn:  # a bar that is drawn wider covers what follows it
        least = 3 * pixel if label == "reader" else pixel
        wide = merged((min(a, trace.end - least), max(b, a + least)) for a, b in spans)
        bars = axes.broken_barh([(a, b - a) for a, b in wide], (row - 0.35, 0.7), lw=0)
        bars.set(color=COLOURS[label], label=label if label in COMPUTE else None)
    axes.text(-12 * pixel, -0.6, "step", size=10.5, ha="right")
    for begin, number in trace.steps[:: 1 + len(trace.steps) // 40]:
        axes.axvline(begin, color="#606060", lw=1, ls="--")
        axes.text(begin, -0.6, f"{number}", size=10.5)
    for row, verdict in enumerate(part.said.values()):
        axes.text(end + 10 * pixel, row, verdict.split(",")[0], size=10, va="center")
    axes.set(xlim=(-2 * pixel, end), ylim=(3.5, -0.5), yticks=range(4), yticklabels=part.said)
    axes.tick_params(left=False, labelsize=10.5)


def step_range(given: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+(:\d+)?", given):
        raise argparse.ArgumentTypeError(f"{given}: write A:B, such as 2:4")
    first, _, last = given.partition(":")
    return int(first), int(last or first)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    help_text = "a file that TRACE_STEPS wrote; two of them are drawn one above the other"
    add("files", type=Path, nargs="+", metavar="FILE", help=help_text)
    add("--steps", type=step_range, metavar="A:B", help="only these steps, in each file")
    add("--width", type=cli.number(int, 10), default=0, metavar="COLUMNS", help="width of a bar")
    add("--picture", type=Path, metavar="FILE", help="draw a picture: .svg or .png")
    help_text = "title of a picture (default: its steps); give it once for each file"
    add("--title", action="append", default=[], help=help_text)
    options = parser.parse_args(arguments)
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        parser.exit(2, f"error: --picture {options.picture}: must end in .svg or .png\n")
    if len(options.title) > len(options.files):
        parser.error(f"--title {options.title[-1]}: there is one file less than titles")
    if fault := cli.alone(options, {"picture": ("title",)}):
        parser.error(fault)
    return options


def parts_of(options: argparse.Namespace) -> list[Part]:
    parts = []
    for number, file in enumerate(options.files):
        trace = read_trace(file)
        few = options.picture and trace.steps[1 : 1 + PICTURE_STEPS] or trace.steps
        trace = trace.part(*options.steps or (few[0][1], few[-1][1]))
        device = "GPU" if trace.cuda else "CPU"
        title = f"What ran when, {trace.name} on the {device}"
        if len(options.files) > 1:
            title = f"{file.name.removesuffix('.trace.json.gz')}, {trace.name} on the {device}"
        parts.append(Part(trace, options.title[number] if number < len(options.title) else title))
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    columns = max(1, options.width or shutil.get_terminal_size((120, 24)).columns - 54)
    problem = ""
    try:
        parts = parts_of(options)
        if options.picture:
            draw(parts, options.picture)
    except ToolError as error:
        problem = str(error)
    except ImportError:
        problem = f"--picture: {cli.missing('matplotlib')}"
    except OSError as error:
        reason = f"cannot be written to {options.picture.parent}/: {error.strerror}"
        problem = f"--picture {options.picture}: {reason}: name another folder"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    characters = BLOCKS if "utf" in str(sys.stdout.encoding).lower() else PLAIN
    for number, (part, file) in enumerate(zip(parts, options.files, strict=True)):
        print(*[""] * bool(number), *text(part.trace, file.name, columns, *characters), sep="\n")
    return 0


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
