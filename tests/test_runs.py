"""The script as users run it: overlap on or off, 1 to 4 ranks, any accumulation and warm-up give the same training."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SMALL_MODEL,
    Corpus,
    Finished,
    clean_environment,
    config_of,
    free_port,
    heed_interrupts,
    run_trainer,
    train_gpt,
)

OVERLAP_OFF = dict(
    TRAIN_PREFETCH=0, TRAIN_COPY_STREAM=0, GPU_PREFETCH=1, VAL_PREFETCH=0, VAL_COPY_STREAM=0
)
EXACT = ("train_loss", "val_loss", "val_bpb", "data_crc")


def small_run(corpus: Corpus, folder: Path, **settings: object) -> Finished:
    done = run_trainer(folder, **{**corpus.env, **SMALL_MODEL, **settings})
    assert done.code == 0, done.err[-2000:]
    return done


@pytest.fixture(scope="module")
def reference(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """60 steps with everything at its default: one rank, one micro-step a step, overlap on."""
    return small_run(
        corpus,
        tmp_path_factory.mktemp("reference"),
        ITERATIONS=60,
        TRAIN_LOG_EVERY=10,
        VAL_LOSS_EVERY=30,
        RUN_ID="reference",
    )


def test_the_log_has_every_line_of_the_contract(reference: Finished) -> None:
    patterns = [
        r"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=\S+",
        r"train_loader:dataset:data train_shards:3",
        r"val_loader:shards pattern=\S+fineweb_val_\*\.bin tokens:\d+",
        r"model_params:\d+",
        r"world_size:1 grad_accum_steps:1",
        r"sdp_backends:.+",
        r"attention_mode:gqa num_heads:2 num_kv_heads:1 .+",
        r"tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04",
        r"train_batch_tokens:2048 train_seq_len:32 iterations:60 warmup_steps:0 max_wallclock_seconds:0\.000",
        r"seed:1337",
        r"train_io:prefetch:True copy_stream:False\(no_cuda\).*",
        r"val_io:overlap:True prefetch:True copy_stream:False\(no_cuda\) prefetch_queue:2 bytecount_device:cpu.*",
        r"step:0/60 val_loss:\d\.\d{4} val_bpb:\d\.\d{4} train_time:0ms step_avg:\d+\.\d\dms",
        r"val_stage_time_ms:\d+ms step:0/60",
        r"step:10/60 train_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms tok_s:\d+ input_wait:\d+\.\d\d% "
        r"data_crc:[0-9a-f]{8} eta:\d+s",
        r"step:60/60 val_loss:.*",
        r"timing_train_loop_ms:\d+ms timing_val_total_ms:\d+ms",
        r"input: .*",
        r"tokens_seen:\d+ epochs:\d+\.\d+",
        r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
        r"Serialized model: \d+ bytes",
        r"Code size: \d+ bytes",
        r"Total submission size: \d+ bytes",
        r"Serialized model int8\+zlib: \d+ bytes \(payload:\d+ raw_torch:\d+ payload_ratio:\d+\.\d\dx\)",
        r"Total submission size int8\+zlib: \d+ bytes",
        r"final_int8_zlib_roundtrip val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms",
        r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}",
    ]
    lines, position = reference.text.splitlines(), 0
    for pattern in patterns:  # in this order
        found = next(
            (i for i in range(position, len(lines)) if re.fullmatch(pattern, lines[i])), None
        )
        assert found is not None, f"no line {pattern} after line {position}"
        position = found + 1
    assert lines[-1].startswith("final_int8_zlib_roundtrip_exact")
    steps = [
        int(match)
        for match in re.findall(r"^step:(\d+)/60 train_loss", reference.text, re.MULTILINE)
    ]
    assert steps == [*range(1, 11), 20, 30, 40, 50, 60]


def test_the_text_log_starts_with_the_script_and_the_console_does_not(reference: Finished) -> None:
    script, text = (
        (ROOT / "train_gpt.py").read_text(encoding="utf-8"),
        reference.log_path.read_text(encoding="utf-8"),
    )
    assert text.startswith(script)
    head = text[len(script) :].split("=" * 100)
    assert re.search(r"Running Python .*\nRunning PyTorch ", head[1])
    assert reference.out.startswith("logs/reference.txt\n") and "import " not in reference.out


def test_losses_fall_and_the_artifact_scores_almost_the_same(reference: Finished) -> None:
    bpb = [float(value) for value in reference.values("val_bpb")]
    assert bpb[2] < 0.75 * bpb[0]  # step 60 against step 0
    assert abs(bpb[-1] - bpb[2]) < 0.05
    artifact = (reference.folder / "final_model.int8.ptz").stat().st_size
    code = len((ROOT / "train_gpt.py").read_bytes())
    assert f"Serialized model int8+zlib: {artifact} bytes" in reference.text
    assert f"Total submission size int8+zlib: {artifact + code} bytes" in reference.text


def test_implied_bytes_are_the_bytes_of_the_text(reference: Finished, corpus: Corpus) -> None:
    """bytes = val_loss / ln 2 * tokens / val_bpb, and only the tokens cut off at the end are missing."""
    tokens = int(re.search(r"val_loader:.* tokens:(\d+)", reference.text).group(1))
    assert tokens == (len(corpus.val) - 1) // 32 * 32
    loss, bpb = (float(reference.values(word)[-1]) for word in ("val_loss", "val_bpb"))
    event = next(e for e in events(reference) if e["event"] == "validation")
    assert round(loss / np.log(2) * tokens / bpb) == event["val_bytes"]
    assert 0 <= corpus.val_text_bytes - event["val_bytes"] < 32 * 20


def events(run: Finished) -> list[dict]:
    return [
        json.loads(line)
        for line in run.log_path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_the_score_is_of_the_weights_in_the_artifact(reference: Finished, corpus: Corpus) -> None:
    """Read from the file and evaluated here: the score to the last digit, which the weights before the export miss."""
    said = events(reference)
    trained = [event for event in said if event["event"] == "validation"][-1]["val_loss"]
    score = next(event for event in said if event["event"] == "score")["val_loss"]
    settings = next(event for event in said if event["event"] == "config")
    config = train_gpt.Config(**{name: settings[name] for name in vars(config_of())})
    model = train_gpt.GPT(config, torch.float32)
    data = (reference.folder / "final_model.int8.ptz").read_bytes()
    model.load_state_dict(train_gpt.unpack(data, model.state_dict()))
    model.cast()
    log = SimpleNamespace(console=print)
    validation = train_gpt.Validation(
        config, train_gpt.Runtime(), log, train_gpt.Verify(False, log)
    )
    loss, _, _ = validation.evaluate(model, "test", False, train_gpt.Spans())
    assert loss == pytest.approx(score, abs=1e-7) and abs(trained - score) > 1e-7


def test_jsonl_tells_the_same_story(reference: Finished) -> None:
    names = [event["event"] for event in events(reference)]
    assert names[:3] == ["run", "config", "hardware"] and names[-1] == "end"
    assert {"step", "validation", "input", "artifact", "score"} <= set(names)
    end = events(reference)[-1]
    assert (end["status"], end["exit_code"]) == ("finished", 0)
    score = next(event for event in events(reference) if event["event"] == "score")
    assert f"{score['val_bpb']:.8f}" == reference.values("val_bpb")[-1]


def test_logs_readme_documents_every_event_and_field(reference: Finished) -> None:
    text = (ROOT / "logs" / "README.md").read_text(encoding="utf-8")
    documented = {
        name: set(re.findall(r"`(\w+)`", fields))
        for name, fields in re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE)
    }
    for event in events(reference):
        fields = set(event) - {"event", "time"}
        if event["event"] == "config":
            fields = set()
        assert fields <= documented[event["event"]], (
            f"{event['event']}: {fields - documented[event['event']]}"
        )
    assert {event["event"] for event in events(reference)} | {"stall", "checkpoint"} == set(
        documented
    )


@pytest.mark.parametrize(
    "settings",
    [
        OVERLAP_OFF,
        dict(TRAIN_PREFETCH=0),
        dict(VAL_PREFETCH=0),
        dict(TRAIN_PREFETCH_QUEUE=7, VAL_PREFETCH_QUEUE=1),
        dict(WARMUP_STEPS=1),
        dict(WARMUP_STEPS=20),
    ],
    ids=str,
)
def test_switches_change_nothing(
    reference: Finished, corpus: Corpus, tmp_path: Path, settings: dict
) -> None:
    run = small_run(
        corpus, tmp_path, ITERATIONS=60, TRAIN_LOG_EVERY=10, VAL_LOSS_EVERY=30, **settings
    )
    for word in EXACT:
        assert run.values(word) == reference.values(word), word


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (0, dict(GRAD_ACCUM_STEPS=8)),
        (0, dict(GRAD_ACCUM_STEPS=16)),
        (0, dict(GRAD_ACCUM_STEPS=64)),
        (1, {}),
        (2, {}),
        (2, dict(GRAD_ACCUM_STEPS=4, **OVERLAP_OFF)),
        (4, {}),
    ],
    ids=str,
)
def test_ranks_and_accumulation_change_only_rounding(
    reference: Finished, corpus: Corpus, tmp_path: Path, ranks: int, settings: dict
) -> None:
    run = small_run(
        corpus,
        tmp_path,
        ranks=ranks,
        ITERATIONS=60,
        TRAIN_LOG_EVERY=10,
        VAL_LOSS_EVERY=30,
        **settings,
    )
    assert run.values("data_crc") == reference.values("data_crc")
    for word in ("train_loss", "val_loss", "val_bpb"):
        mine, theirs = ([float(value) for value in log.values(word)] for log in (run, reference))
        np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=0, err_msg=word)


def test_partial_validation_is_marked_everywhere(corpus: Corpus, tmp_path: Path) -> None:
    run = small_run(corpus, tmp_path, ITERATIONS=2, VAL_TOKENS=5000, VAL_PROGRESS_LOG_EVERY=1)
    lines = [
        line
        for line in run.text.splitlines()
        if "val_loss" in line or line.startswith("val_loader")
    ]
    assert len(lines) == 5 and all(line.endswith(" partial_val:1") for line in lines)
    assert re.search(r"^val_loader:.* tokens:4992 ", run.text, re.MULTILINE)
    progress = r"^val_progress:step_0 batch 1/2 partial_mean_loss:\d\.\d{4} tokens_seen:4096$"
    assert re.search(progress, run.text, re.MULTILINE)


def test_second_epoch_is_announced_once(corpus: Corpus, tmp_path: Path) -> None:
    steps = len(corpus.train) // 2056
    run = small_run(
        corpus, tmp_path, ITERATIONS=2 * steps + 3, VAL_LOSS_EVERY=0, NUM_LAYERS=1, VAL_TOKENS=2000
    )
    assert re.findall(r"WARNING: step (\d+) begins a second epoch", run.text) == [str(steps + 1)]
    seen = (2 * steps + 3) * 2056
    assert f"tokens_seen:{seen} epochs:{seen / len(corpus.train):.3f}" in run.text


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_cap_stops_in_time_and_keeps_replicas_equal(
    corpus: Corpus, tmp_path: Path, ranks: int
) -> None:
    script = tmp_path / "train_gpt.py"
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    marker = "\t\tclock.stop()\n\t\tif capped: "
    assert marker in source
    show = "\t\tPath(f'hash{run.rt.rank}').write_text(str(zlib.crc32(run.optimizers.values.numpy())))\n"
    script.write_text(source.replace(marker, show + marker))
    env = dict(ITERATIONS=100_000, MAX_WALLCLOCK_SECONDS=3, VAL_TOKENS=2000, VAL_LOSS_EVERY=0)
    run = run_trainer(tmp_path, ranks=ranks, script=script, **{**corpus.env, **SMALL_MODEL, **env})
    assert run.code == 0, run.err[-2000:]
    stop = re.search(
        r"^stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/100000$",
        run.text,
        re.MULTILINE,
    )
    assert 0 < int(stop.group(1)) <= 3500 and int(stop.group(2)) > 3
    hashes = [path.read_text() for path in tmp_path.glob("hash?")]
    assert len(hashes) == max(1, ranks) and len(set(hashes)) == 1


def test_an_old_log_of_the_same_name_is_kept(corpus: Corpus, tmp_path: Path) -> None:
    settings = dict(ITERATIONS=1, VAL_TOKENS=500, RUN_ID="same")
    small_run(corpus, tmp_path, **settings)
    first = (tmp_path / "logs" / "same.txt").read_text(encoding="utf-8")
    small_run(corpus, tmp_path, **settings)
    kept = [path for path in (tmp_path / "logs").glob("same.*.txt")]
    assert len(kept) == 1 and kept[0].read_text(encoding="utf-8") == first
    assert len(list((tmp_path / "logs").glob("same.*.jsonl"))) == 1


def start_trainer(folder: Path, *launcher: str, **settings: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train_gpt.py")],
        cwd=folder,
        text=True,
        env=clean_environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


def test_a_damaged_stream_ends_every_rank_with_one_line(corpus: Corpus, tmp_path: Path) -> None:
    """A shard that shrinks after the start: the run ends, names file and byte, and no rank hangs."""
    data = tmp_path / "data"
    data.mkdir()
    for path in corpus.folder.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    env = {
        **corpus.env,
        **SMALL_MODEL,
        "DATA_PATH": data,
        "ITERATIONS": 100_000,
        "VAL_LOSS_EVERY": 0,
        "NUM_LAYERS": 1,
        "TRAIN_LOG_EVERY": 1,
        "RUN_ID": "damaged",
    }
    run = start_trainer(
        tmp_path,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--nnodes=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        **env,
    )
    for line in run.stdout:
        if line.startswith("step:"):
            os.truncate(data / "fineweb_train_000002.bin", 2048)
            break
    _, err = run.communicate(timeout=100)
    assert run.returncode != 0
    assert re.search(
        r"train_gpt.py: rank \d: the train reader failed on \S+fineweb_train_000002.bin at byte \d+",
        err,
    )
    assert (
        err.count("Traceback (most recent call last)") <= 1
    )  # the launcher's own; the ranks print one line
    assert (
        json.loads((tmp_path / "logs" / "damaged.jsonl").read_text().splitlines()[-1])["status"]
        == "failed"
    )


def test_interrupt_ends_with_one_line(corpus: Corpus, tmp_path: Path) -> None:
    env = dict(ITERATIONS=100_000, VAL_LOSS_EVERY=0, TRAIN_LOG_EVERY=1, RUN_ID="stopped")
    run = start_trainer(tmp_path, **{**corpus.env, **SMALL_MODEL, **env})
    for line in run.stdout:
        if line.startswith("step:3/"):
            run.send_signal(signal.SIGINT)
            break
    started = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and time.monotonic() - started < 30
    assert re.fullmatch(r"train_gpt.py: interrupted after step \d+", err.strip().splitlines()[-1])
    assert "Traceback" not in err
    assert (
        json.loads((tmp_path / "logs" / "stopped.jsonl").read_text().splitlines()[-1])["status"]
        == "interrupted"
    )


def test_byte_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = tmp_path / "bytes.json"
    tokenizer.write_text('{"kind": "byte", "offset": 45}')  # 301 ids would not fit 300
    wrong = run_trainer(tmp_path, **{**corpus.env, **SMALL_MODEL, "TOKENIZER_PATH": tokenizer})
    assert wrong.code == 2 and "has 301 tokens: set 301" in wrong.err
    tokenizer.write_text('{"kind": "byte", "offset": 44}')
    run = small_run(corpus, tmp_path, TOKENIZER_PATH=tokenizer, ITERATIONS=1, VAL_TOKENS=500)
    assert "tokenizer_kind=byte" in run.text


def test_torch_compile_falls_back_with_one_warning(corpus: Corpus, tmp_path: Path) -> None:
    env = dict(
        TORCH_COMPILE=1,
        ITERATIONS=2,
        VAL_TOKENS=500,
        VAL_LOSS_EVERY=0,
        CXX="/no/compiler",
        NUM_LAYERS=1,
    )
    run = small_run(corpus, tmp_path, TORCHINDUCTOR_CACHE_DIR=tmp_path / "cache", **env)
    assert run.text.count("warning: torch.compile does not work here") == 1
    eager = small_run(corpus, tmp_path / "eager", **{**env, "TORCH_COMPILE": 0})
    assert run.values("train_loss") == eager.values("train_loss")
