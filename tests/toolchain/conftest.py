"""Every test of the toolchain works in a folder of its own, with a cache, locks and temporary files of its own."""

from __future__ import annotations

import tempfile
import warnings

import pytest


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("work")
    temporary = tmp_path_factory.mktemp("tmp")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("OPENNKI_EXECUTOR", "interpreter")  # a cache of one's own would have the native code compiled for each test
    monkeypatch.setenv("OPENNKI_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield folder
    monkeypatch.undo()
    tempfile.tempdir = None
