"""Plant faults in copies of the scripts and show that the rehearsal finds each of them.

    python3 tests/rehearsal/planted.py                  all faults, and a clean run of each kind
    python3 tests/rehearsal/planted.py wrap resume      only these

Each fault replaces some text of a script. The exit code is 1 if a fault is not found, if a run
without a fault is not right, or if the text that a fault replaces is no longer in the script.
"""

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pytest
import rehearse

# How a fault is looked for: by a narrow rehearsal, by one at full width, or by the test of eight
# ranks that read all documents.
NARROW, FULL_WIDTH, EIGHT_RANKS = "narrow", "full width", "eight ranks"


class Fault(NamedTuple):
    """A fault: the script, how it is looked for, the text that is replaced, and the new text."""

    script: str
    how: str
    old: str
    new: str


FAULTS = {
    "left out": Fault(  # the last validation batch of rank 1
        "root", NARROW, "end_row=end,", "end_row=end - batch_rows * rank,"
    ),
    "resume": Fault(  # repeats the last step
        "root",
        NARROW,
        "first_batch=step * micro_steps,",
        "first_batch=max(0, step - 1) * micro_steps,",
    ),
    "same rows": Fault(  # for all ranks
        "root", NARROW, "first_row=rank * batch_rows,", "first_row=0,"
    ),
    "no limit": Fault(  # of time
        "root", NARROW, "is_late = next_ms > time_limit_ms(config)", "is_late = False"
    ),
    "early": Fault(  # the run ends after half of its time
        "root", NARROW, "is_late = next_ms > time", "is_late = 2 * next_ms > time"
    ),
    "wrap": Fault(  # one token too late, after the last token of all shards
        "root",
        NARROW,
        "first if self.growing else first % self.ends[-1]",
        "first if first < self.ends[-1] else (first + 1) % self.ends[-1]",
    ),
    "inputs": Fault(  # are the targets
        "root", NARROW, "[:] = by_span[:, :-1]", "[:] = by_span[:, 1:]"
    ),
    "large": Fault(  # artifact, only at full width
        "root",
        FULL_WIDTH,
        "    try_to_write(log, log.path.with_suffix",
        "    data += bytes(9_000_000 if run.config.model_dim >= 512 else 0)\n"
        "    try_to_write(log, log.path.with_suffix",
    ),
    "reserve": Fault(  # for GPTQ is ignored
        "sp8192", NARROW, "return 1e3 * (limit - reserve)", "return 1e3 * limit"
    ),
    "shuffled": Fault(  # spans are those of the first shard
        "sp8192",
        NARROW,
        "start = int(self.order[number]) * self.span_tokens",
        "start = int(self.order[number]) * self.span_tokens % self.ends[1]",
    ),
    "sidecar": Fault(  # read one token late from the second validation shard on
        "caseops",
        NARROW,
        "self.byte_shards.read(first, numbers",
        "self.byte_shards.read(first + (first >= self.ends[1]), numbers",
    ),
    "last document": Fault(  # of the validation set is dropped
        "caseops", EIGHT_RANKS, "count = len(self.documents)", "count = len(self.documents) - 1"
    ),
    "last batch": Fault(  # of rank 7 of 8
        "caseops",
        EIGHT_RANKS,
        "        return shares\n",
        "        shares[7:] = [share[:-1] for share in shares[7:]]\n        return shares\n",
    ),
    "segments": Fault(  # a batch of documents is refused if it has more of them than DOC_ENDS
        "caseops",
        EIGHT_RANKS,
        "if self.shards.segments and isinstance(self.plan, BatchPlan):",
        "segments = self.shards.segments\n"
        "        x = torch.from_numpy(tokens.astype(np.int64))[None]\n"
        "        if segments and int((segments.positions(x) == 0).sum()) > segments.limit:\n"
        "            raise RunError('DOC_ENDS is too small')\n"
        "        if segments and isinstance(self.plan, BatchPlan):",
    ),
}


def find_faults(script: str, how: str, text: str) -> list[str]:
    """Look for faults in the text of a script; return them."""
    if how == EIGHT_RANKS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rehearse, "build_script", lambda name: text)
            test = str(Path(__file__).with_name("test_rehearsal.py"))
            words = [test, "-k", "eight_ranks", "-p", "no:cacheprovider", "-qq", "--tb=line"]
            code = pytest.main(words)
        return [f"the test of eight ranks: {code!r}"] if code else []
    settings = rehearse.NARROW if how == NARROW else rehearse.FULL_WIDTH
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        return rehearse.rehearse(script, Path(folder), settings, text).faults


def main(names: list[str]) -> int:
    chosen = {name: FAULTS[name] for name in names or FAULTS}
    # The clean runs come first: a fault that is always found is no proof.
    clean = {(fault.script, fault.how) for fault in chosen.values()}
    runs = [(f"no fault, {script}", Fault(script, how, "", "")) for script, how in sorted(clean)]
    failed = False
    for name, fault in [*runs, *chosen.items()]:
        text = rehearse.build_script(fault.script)
        if text.count(fault.old) != 1 and fault.old:
            raise SystemExit(f"{name}: the script has {text.count(fault.old)} times: {fault.old}")
        begun = time.monotonic()
        found = find_faults(fault.script, fault.how, text.replace(fault.old, fault.new, 1))
        is_right = bool(found) == bool(fault.old)
        failed = failed or not is_right
        verdict = ("found" if found else "clean") if is_right else "WRONG"
        line = re.sub(r"\s+", " ", "; ".join(found))[:150]
        print(f"{name:20} {fault.how:12} {time.monotonic() - begun:5.0f} s  {verdict}  {line}")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
