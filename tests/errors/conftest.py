"""Settings of the error tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def trn1(monkeypatch):
    """Calls that name no target are for trn1, without the warning about the fallback."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
