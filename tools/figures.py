"""Write plots in any environment, for report.py, timeline.py and roofline.py.

This module builds on cli.py (errors of one line). matplotlib is imported only when a plot is drawn.
"""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import cli


def import_matplotlib() -> ModuleType:
    """Import matplotlib without MPLBACKEND. Notebooks set it to a backend that other environments
    do not have, and no window is needed here."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return matplotlib


def write_figure(draw: Callable[[], Any], path: Path) -> bool:
    """Draw a figure and write it to a file. Return False, after printing why, if this fails: the
    program's other results must not be lost with the plot."""
    try:
        missing = try_figure(draw, path, ())
        if missing:
            missing = try_figure(draw, path, find_fonts(missing))
    except OSError as error:
        print(
            f"error: {path}: the plot was not written ({error.strerror or error}); "
            "give a file that can be written",
            file=sys.stderr,
        )
        return False
    except ImportError as error:
        print(f"error: no plot: {cli.missing_package(error.name or 'matplotlib')}", file=sys.stderr)
        return False
    except Exception:
        traceback.print_exc()
        print(f"error: {path}: the plot failed, see the traceback above", file=sys.stderr)
        return False
    if missing:
        characters = cli.join_some(sorted(missing), 12, "")
        print(
            f"note: {path}: no installed font has {characters}, so boxes are drawn in their place; "
            "install a font that has them, such as Noto Sans CJK",
            file=sys.stderr,
        )
    return True


def try_figure(draw: Callable[[], Any], path: Path, fonts: Collection[str]) -> set[str]:
    """Draw and write a figure. Return the characters that no font in use has; `fonts` are used for
    characters that the usual font does not have."""
    matplotlib = import_matplotlib()
    # $ in the name of a log begins no formula.
    settings: dict[str, Any] = {"text.parse_math": False, "text.usetex": False}
    settings["font.family"] = [*matplotlib.rcParams["font.family"], *fonts]
    missing = set()
    with matplotlib.rc_context(settings), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        draw().savefig(path)
    for warning in caught:
        if match := re.match(r"Glyph (\d+) .* missing from", str(warning.message)):
            missing.add(chr(int(match[1])))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return missing


def find_fonts(characters: Collection[str]) -> list[str]:
    """Return the names of installed fonts, as few as needed, that have the characters."""
    from matplotlib import font_manager, ft2font

    found: list[str] = []
    left = {ord(character) for character in characters}
    for font in font_manager.fontManager.ttflist:
        try:
            known = left & ft2font.FT2Font(font.fname).get_charmap().keys()
        except (RuntimeError, OSError):  # a font that matplotlib cannot draw
            continue
        if known:
            found.append(font.name)
            left -= known
        if not left:
            break
    return found
