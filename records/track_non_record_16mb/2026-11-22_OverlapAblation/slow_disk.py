"""train_gpt.py on a disk on which every read of a training batch takes READ_DELAY_MS longer.

READ_DELAY_MS=60 python3 slow_disk.py      all else as `python3 train_gpt.py`
READ_DELAY_MS=0 is the same script on the disk as it is; TRAIN_PREFETCH=0 is the one that waits.
"""

import os
import sys
import time

import train_gpt

DELAY_S = float(os.environ.get("READ_DELAY_MS", "0")) / 1e3


def open_slowly(path, *arguments, **options):
    """The reader's thread waits here, as it would for a disk: without work, and without the GIL."""
    if "fineweb_train" in str(path):
        time.sleep(DELAY_S)
    return open(path, *arguments, **options)


train_gpt.open = open_slowly
exit_code = train_gpt.main(sys.argv[1:], os.environ)
os._exit(exit_code)
