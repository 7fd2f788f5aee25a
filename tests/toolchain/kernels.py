"""Kernels, arrays and compiled files that several tests of the toolchain use."""

from __future__ import annotations

import functools

import numpy as np

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import language as nl
from opennki.ir.locations import locations_text
from opennki.ir.print import to_text
from opennki.toolchain.compile import Source, compile_kernel

A = np.arange(128 * 16, dtype=np.float32).reshape(128, 16)
B = np.linspace(-1, 1, 128 * 16, dtype=np.float32).reshape(128, 16)


def add(a, b, scale=1.0):
    """out = a + b * scale."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b) * scale)
    return out


def into(a, out):
    """The older style: the output is a parameter."""
    nl.store(out, nl.load(a) * 2.0)


def halves(a):
    """Each of two programs doubles its half."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    part = nl.ds(nl.program_id(0) * 8, 8)
    nl.store(out[:, part], nl.load(a[:, part]) * 2.0)
    return out


def traced(func=add, *args, **kwargs):
    """The IR of a kernel."""
    return nki.trace(func).trace(*(args or (A, B)), **kwargs)


@functools.cache
def compiled():
    """`add`, compiled in this process."""
    kernel = traced()
    return compile_kernel(Source(kernel, to_text(kernel), locations_text(kernel)))
