"""A trace of train_gpt.py (TRACE_STEPS=N) as five lines of text, for machines without a browser.

    python3 logs/trace.py logs/<RUN_ID>.trace.json.gz [--width COLUMNS]

Each column is a slice of time, its height the share of the slice in which the track was busy: the reader threads
(disk_read), the copy stream (h2d), and compute (forward to optimizer; by the device's clock where it has one).
With a browser: https://ui.perfetto.dev or chrome://tracing.
"""

import argparse
import gzip
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HEIGHTS = " ▁▂▃▄▅▆▇█"
PLAIN_HEIGHTS = " .:-=+*#@"
COMPUTE = {"forward", "backward", "reduce", "grad_clip", "optimizer"}
Span = tuple[float, float]


class TraceError(Exception):
    """What is wrong with a file, in one line."""


@dataclass
class Trace:
    """The spans of a trace in seconds from its first event: of readers, copy stream, compute; its marks."""

    reader: list[Span]
    copy: list[Span]
    compute: list[Span]
    waits: list[Span]
    marks: list[tuple[float, str]]
    steps: int
    end: float
    gaps: int  # stretches in which nothing was traced, left out: between the steps and the validation, say


def read_trace(path: Path) -> Trace:
    """A file of the Chrome trace-event format, gzipped or not. Raises TraceError for anything else."""
    try:
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)[
            "traceEvents"
        ]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        timed = [event for event in events if event["ph"] in "Xi"]
        first = min(event["ts"] for event in timed)
        spans = [
            (
                event["name"],
                tracks[event["tid"]],
                (event["ts"] - first) / 1e6,
                (event["ts"] - first + event["dur"]) / 1e6,
            )
            for event in timed
            if event["ph"] == "X"
        ]
        marks = [
            ((event["ts"] - first) / 1e6, event["name"]) for event in timed if event["ph"] == "i"
        ]
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror or error}: name a file that TRACE_STEPS wrote"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise TraceError(
            f"{path}: not a trace ({type(error).__name__}: {error}): "
            "name a file that TRACE_STEPS wrote"
        ) from error
    device = "compute stream" if "compute stream" in tracks.values() else "main thread"
    spans, marks, gaps = without_gaps(spans, marks)
    return Trace(
        reader=[s[2:] for s in spans if s[0] == "disk_read"],
        copy=[s[2:] for s in spans if s[0] == "h2d"],
        compute=merged([s[2:] for s in spans if s[0] in COMPUTE and s[1] == device]),
        waits=[s[2:] for s in spans if s[0] == "input_wait"],
        marks=marks,
        steps=sum(s[0] == "optimizer" and s[1] == device for s in spans),
        end=max([s[3] for s in spans], default=0.0),
        gaps=gaps,
    )


def without_gaps(spans: list[tuple], marks: list[tuple]) -> tuple[list[tuple], list[tuple], int]:
    """(spans, marks, number of gaps), as if gaps longer than a tenth of what was traced had never been."""
    pieces = merged([span[2:] for span in spans])
    traced = sum(end - begin for begin, end in pieces)
    gaps = [(a[1], b[0] - a[1]) for a, b in zip(pieces, pieces[1:]) if b[0] - a[1] > traced / 10]

    def moved(when: float) -> float:
        return when - sum(min(length, when - begin) for begin, length in gaps if when > begin)

    return (
        [(name, track, moved(begin), moved(end)) for name, track, begin, end in spans],
        [(moved(when), label) for when, label in marks],
        len(gaps),
    )


def merged(spans: list[Span]) -> list[Span]:
    """The same time without overlap, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def busy(spans: list[Span], begin: float, end: float) -> float:
    """Seconds of [begin, end) that the spans cover."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in merged(spans))


def bar(spans: list[Span], end: float, columns: int, heights: str) -> str:
    """One character a slice of [0, end); a slice with anything in it is never drawn as empty."""
    slices = [[0.0, False] for _ in range(columns)]
    width = end / columns
    for begin, stop in merged(spans):
        for i in range(
            min(columns - 1, int(begin / width)), min(columns - 1, int(stop / width)) + 1
        ):
            slices[i] = [
                slices[i][0] + max(0.0, min(stop, (i + 1) * width) - max(begin, i * width)),
                True,
            ]
    top = len(heights) - 1
    return "".join(
        heights[max(touched, min(top, round(top * time / width)))] for time, touched in slices
    )


def timeline(trace: Trace, name: str, columns: int, heights: str = HEIGHTS) -> list[str]:
    """The five lines."""
    end = trace.end or 1e-9
    hidden = sum(busy(trace.compute, *span) for span in merged(trace.reader))
    reading, computing = busy(trace.reader, 0, end), busy(trace.compute, 0, end)
    share = f"{100 * hidden / reading:.0f} % of it under compute" if reading else "no read"
    copied = f"busy {100 * busy(trace.copy, 0, end) / end:.2f} %" if trace.copy else "none: no CUDA"
    bars = [
        bar(spans, end, columns, heights) for spans in (trace.reader, trace.copy, trace.compute)
    ]
    waited = 1e3 * sum(b - a for a, b in trace.waits)
    marks = ", ".join(
        f"{label} at {1e3 * when:.0f} ms" for when, label in trace.marks if label != "warm_up_end"
    )
    gaps = f", {trace.gaps} untraced gaps left out" if trace.gaps else ""
    return [
        f"{name}: {trace.steps} steps, {1e3 * end:.0f} ms{gaps}; a column is {1e3 * end / columns:.2f} ms",
        f"reader  |{bars[0]}| busy {100 * reading / end:.2f} %, {share}",
        f"copy    |{bars[1]}| {copied}",
        f"compute |{bars[2]}| busy {100 * computing / end:.1f} %",
        f"input_wait {waited:.2f} ms ({100 * waited / 1e3 / end:.2f} %)"
        + (f"; {marks}" if marks else ""),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--width",
        type=int,
        default=0,
        metavar="COLUMNS",
        help="of the bars (default: the terminal's)",
    )
    options = parser.parse_args()
    columns = options.width or max(20, shutil.get_terminal_size((120, 24)).columns - 46)
    if columns < 1:
        parser.error(f"--width {options.width}: must be at least 1")
    try:
        trace = read_trace(options.file)
    except TraceError as error:
        print(f"trace.py: {error}", file=sys.stderr)
        return 1
    wide = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(
        *timeline(trace, options.file.name, columns, HEIGHTS if wide else PLAIN_HEIGHTS), sep="\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
