"""tests/gpu/session.py on a CPU."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from running import ROOT, Call, Corpus, clean_environment


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> ModuleType:
    for name, value in clean_environment(**corpus.env).items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("session", ROOT / "tests/gpu/session.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "run_tests", lambda: "3 passed, 0 failed, 1 skipped")
    return module


def test_uploads_under_kernels_are_a_share_of_their_time(session: ModuleType) -> None:
    """Kernels of two streams at once count once."""
    upload = {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10, "dur": 10}
    back = upload | {"name": "Memcpy DtoH"}
    for starts, share in (([8, 9, 15], 70.0), ([40], 0.0)):
        kernels = [{"cat": "kernel", "name": "k", "ts": ts, "dur": 4} for ts in starts]
        assert session.uploads_under_kernels([upload, back, *kernels]) == share
    assert session.uploads_under_kernels([back, *kernels]) is None


@pytest.mark.slow
def test_the_trainer_is_measured(
    session: ModuleType, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VOCAB_SIZE": 300, "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, str(value))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- gpu -->\nstale\n<!-- /gpu -->\nAfter.\n")
    words = ["--quick", "--against", ROOT / "train_gpt.py", "--into", page]
    words += ["--repeats", 1, "--steps", 4, "--ranks", 1]
    code, _, err = call(session.main, *words)
    assert code == 0, err
    text = page.read_text()
    assert text.startswith("Before.\n<!-- gpu -->\n|") and text.endswith("<!-- /gpu -->\nAfter.\n")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    assert [row[0] for row in table[2:]] == ["challenge", "ours", "ours, no overlap"]
    assert {row[3] for row in table[2:]} == {table[2][3]} and table[2][2] == "1.000"
    assert ", tiny shapes. tests/gpu: 3 passed, 0 failed, 1 skipped.\n" in text
