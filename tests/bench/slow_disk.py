"""Run train_gpt.py on a disk on which every read takes READ_DELAY_MS (default: 150) longer.

These commands run it without and with overlap, and draw a timeline of both runs:

export TRACE_STEPS=8 ITERATIONS=10 VAL_LOSS_EVERY=0
for on in 0 1; do
    python3 data/quickstart.py --script tests/bench/slow_disk.py RUN_ID=slow$on TRAIN_PREFETCH=$on
done
python3 tools/timeline.py logs/slow0.trace.json.gz logs/slow1.trace.json.gz --picture slow.svg
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt

DELAY_SECONDS = float(os.environ.get("READ_DELAY_MS", "150")) / 1e3
read_at_full_speed = os.preadv


def read_slowly(*arguments):
    """Read as os.preadv does, after a delay.

    The reader's thread sleeps without the GIL and without work, as it would wait for a disk.
    """
    time.sleep(DELAY_SECONDS)
    return read_at_full_speed(*arguments)


os.preadv = read_slowly
sys.exit(train_gpt.main(sys.argv[1:], os.environ))
