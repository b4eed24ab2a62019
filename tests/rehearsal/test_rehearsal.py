"""The root and every stack at their own sizes: data, plans, readers, packing, records.

A test of three documents proves mathematics. What has a size fails at that size: a batch of 64 long
documents, the last batch of a split, 16,000,000 bytes.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rehearse
from running import ROOT

STACKS = {path.stem for path in (ROOT / "records" / "stacks").glob("*.json")}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of up to 400 MB, which do not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_every_stack_is_rehearsed() -> None:
    assert {"root", *STACKS} == {*rehearse.CASES}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", rehearse.CASES)
def test_a_run_at_its_own_size(name: str, folder: Path) -> None:
    """Narrow, on two ranks: scores are those of the shards, a record is made, RESUME goes on."""
    assert rehearse.rehearse(name, folder, rehearse.NARROW).faults == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", sorted(STACKS - {"baseline_plus"}))
def test_what_is_submitted_at_full_width_is_within_the_cap(name: str, folder: Path) -> None:
    """Random weights are an upper estimate: trained ones are easier to compress."""
    assert rehearse.rehearse(name, folder, rehearse.FULL_WIDTH).faults == []


def without_last_batch(script: str) -> str:
    whole = "return math.ceil((self.end_row - self.first_row) / self.stride)"
    assert script.count(whole) == 1
    return script.replace(whole, "return (self.end_row - self.first_row) // self.stride")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "settings", "edit", "words"),
    [
        ("caseops", {"DOC_ENDS": 40}, None, "DOC_ENDS=40: rows 0 to 31, which are one"),
        ("root", {"MLP_MULT": 150}, None, "over the cap"),
        ("root", {}, without_last_batch, "validation: nats and bits"),
    ],
)
def test_faults_of_size_are_found(
    name: str, settings: dict, edit: Any, words: str, folder: Path
) -> None:
    faults = rehearse.rehearse(name, folder, rehearse.NARROW | settings, edit).faults
    assert any(words in fault for fault in faults), faults
