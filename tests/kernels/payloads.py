"""Payloads in tests: a kernel, its keys, coding them again, and what a refusal looks like."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

import opennki.dialects.neuronxcc.language as nl
from opennki.errors import NkiParseError
from opennki.kernels.framework import UnifiedKernel
from opennki.kernels.payload import decode_backend_config

F32 = np.float32
SRC = Path(__file__).parents[2] / "src"


def scale(x, table, factor=2.0, name="n"):
    """out = x * factor where it is below the table; x gets its first half doubled."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(table)
    for i in nl.affine_range(x.shape[0] // 128):
        rows = nl.ds(i * 128, 128)
        tile = nl.load(x[rows]) * factor
        if i >= 1:
            tile = nl.add(tile, t)
        nl.store(out[rows], tile)
    return out


def config_of(func=scale, arrays=(np.zeros((256, 8), F32), np.zeros((128, 8), F32)), grid=None, **kwargs):
    """The payload of a kernel, and its keys."""
    raw = UnifiedKernel(func, grid=grid, platform_target="trn2").dump_config(*arrays, **kwargs).backend_config
    return raw, json.loads(base64.b64decode(raw))


def coded(config):
    """A payload of any JSON value, or of JSON text."""
    text = config if isinstance(config, str) else json.dumps(config)
    return base64.b64encode(text.encode("utf-8", "surrogatepass"))


def refused(payload, *texts, kind=NkiParseError):
    """The error of a payload, which has the texts in it."""
    with pytest.raises(NkiParseError) as e:
        decode_backend_config(payload)
    assert type(e.value) is kind and len(str(e.value)) < 2000
    for text in texts:
        assert text in str(e.value)
    assert str(e.value).isascii()
    return e.value
