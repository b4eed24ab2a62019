r"""train_gpt.py on a disk on which every read takes READ_DELAY_MS longer: with and without overlap.

export TRACE_STEPS=8 ITERATIONS=10 VAL_LOSS_EVERY=0
for on in 0 1; do
    python3 data/quickstart.py --script tests/bench/slow_disk.py RUN_ID=slow$on TRAIN_PREFETCH=$on
done
python3 tools/timeline.py logs/slow0.trace.json.gz logs/slow1.trace.json.gz --picture slow.svg \
    --title "without overlap (disk slowed to 150 ms per read)" --title "with overlap (same disk)"
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt

DELAY_SECONDS = float(os.environ.get("READ_DELAY_MS", "150")) / 1e3
read = os.preadv


def read_slowly(*arguments):
    """The reader's thread waits here, as it would for a disk: without work, without the GIL."""
    time.sleep(DELAY_SECONDS)
    return read(*arguments)


os.preadv = read_slowly
sys.exit(train_gpt.main(sys.argv[1:], os.environ))
