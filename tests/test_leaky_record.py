"""Test that the frozen record LeakyReLU^2 + legal TTT + Parallel Muon still trains and scores."""

import math
import re
from pathlib import Path

import pytest
from packed import packed_form, unpack_script
from running import ROOT, Corpus, run_script

FOLDER = ROOT / "records/track_non_record_16mb/2026-11-21_LeakyReLU2_LegalTTT_ParallelMuon_Pipeline"
SCRIPT = FOLDER / "train_gpt.py"
# A small model in which every part of the script is used.
TINY = """
NUM_LAYERS=3 MODEL_DIM=64 NUM_HEADS=4 NUM_KV_HEADS=2 MLP_MULT=17 VOCAB_SIZE=300 VE_LAYERS=1,2
XSA_LAST_N=2 BIGRAM_VOCAB_SIZE=64 BIGRAM_DIM=16 VE_DIM=16 ROPE_DIMS=8 TRAIN_SEQ_LEN=32
EVAL_SEQ_LEN=32 TRAIN_BATCH_TOKENS=1024 VAL_BATCH_SIZE=2048 GRAD_ACCUM_STEPS=1 WARMUP_STEPS=1
ITERATIONS=12 WARMDOWN_ITERS=6 VAL_TOKENS=993 MAX_WALLCLOCK_SECONDS=0 EVAL_STRIDE=16
TTT_CHUNK_TOKENS=256 TTT_ENABLED=1 TTT_EPOCHS=2 EMA_DECAY=0.8 DEVICE=cpu TORCH_COMPILE=0
"""
# The results in their order: averaged weights, artifact, sliding windows, test-time training.
RESULTS = ["DIAGNOSTIC post_ema", "final_int6_roundtrip", "final_int6_sliding_window", "legal_ttt"]


@pytest.mark.slow
def test_the_packed_record_trains_and_scores(corpus: Corpus, tmp_path: Path) -> None:
    """The packed script executes the same source."""
    settings = dict(pair.split("=") for pair in TINY.split())
    source = SCRIPT.read_bytes()
    script = tmp_path / "train_gpt.py"
    script.write_bytes(packed_form(source))
    assert unpack_script(script.read_bytes()) == source
    done = run_script(script, tmp_path / "run", **corpus.env, **settings)
    assert done.code == 0, done.err[-3000:]
    found = re.findall(r"^(.*?) val_loss:(\S+) val_bpb:(\S+) (?:stride|eval_time)", done.text, re.M)
    assert [name for name, _, _ in found] == RESULTS
    assert all(0 < float(value) < math.inf for _, *values in found for value in values)
    losses = [float(loss) for loss in done.values("train_loss")]
    assert len(losses) > 10 and losses[-1] < losses[0] - 0.5
    artifact = (done.folder / "final_model.int6.ptz").stat().st_size
    total = script.stat().st_size + artifact
    assert f"Total submission size int6+lzma: {total} bytes" in done.text
    assert done.log_path.read_bytes().startswith(script.read_bytes())
