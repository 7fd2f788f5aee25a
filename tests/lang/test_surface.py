"""The names of nki.language: signatures and defaults are the vendor's, unknown names say so."""

from __future__ import annotations

import builtins
import inspect
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from opennki.dialects.neuronxcc import constants, iterators, typing
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError, NkiNotYet
from opennki.isa import scalar

TABLE = [
    line.split(" ", 2)
    for line in (Path(__file__).parent.parent / "data" / "language_signatures.txt").read_text().splitlines()
]
FUNCTIONS = [(name, text) for kind, name, text in TABLE if kind == "function"]
DTYPES = {name: text.split(" = ")[-1] for kind, name, text in TABLE if kind == "dtype"}


def shown(name):
    signature = inspect.signature(getattr(nl, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = name + str(inspect.Signature(plain))
    for shape, short in (
        ("<class 'bool'>", "bool"),
        ("<class 'numpy.float32'>", "np.float32"),
        ("<class 'numpy.uint8'>", "np.uint8"),
    ):
        text = text.replace(shape, short)
    return text


def test_table_is_complete():
    assert len(TABLE) == 126 and len({name for _, name, _ in TABLE}) == 126


@pytest.mark.parametrize("name,text", FUNCTIONS)
def test_signature(name, text):
    assert shown(name) == text


@pytest.mark.parametrize("name", [name for kind, name, _ in TABLE if kind != "function"])
def test_constant_exists(name):
    assert hasattr(nl, name)


@pytest.mark.parametrize("name,text", FUNCTIONS)
def test_documented(name, text):
    assert len(getattr(nl, name).__doc__) > 20


@pytest.mark.parametrize(
    "name", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "bool_"]
)
def test_numpy_types(name):
    assert getattr(nl, name) is getattr(np, name)


def test_other_types():
    assert nl.bfloat16 == ml_dtypes.bfloat16 and nl.float8_e5m2 == ml_dtypes.float8_e5m2
    assert nl.float8_e4m3 == ml_dtypes.float8_e4m3 and nl.tfloat32 == np.dtype("|V4")


@pytest.mark.parametrize("name", [n for n, _ in FUNCTIONS if n in scalar.SCALAR])
def test_functions_are_operators(name):
    assert scalar.resolve(getattr(nl, name)) == name


@pytest.mark.parametrize(
    "name,op",
    [
        ("max", "maximum"),
        ("min", "minimum"),
        ("sum", "add"),
        ("prod", "multiply"),
        ("all", "logical_and"),
        ("copy", "copy"),
    ],
)
def test_reductions_are_operators(name, op):
    assert scalar.resolve(getattr(nl, name)) == op


def test_unknown_name_is_an_attribute_error_that_names_it():
    assert not hasattr(nl, "no_such_function")
    with pytest.raises(NkiNotYet, match=r"neuronxcc\.nki\.language\.no_such_function"):
        nl.no_such_function
    for module in (typing, iterators, constants):
        assert not hasattr(module, "no_such_name")
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name


def test_python_probes_are_no_vendor_names():
    with pytest.raises(AttributeError) as caught:
        nl.__wrapped__
    assert not isinstance(caught.value, NkiError)


def test_language_does_not_break_builtins():
    assert builtins.max(1, 2) == 2 and nl.bool is bool


def test_facts():
    assert nl.tile_size.pmax == 128 and nl.tile_size.psum_fmax == 512
    assert nl.tile_size.gemm_stationary_fmax == 128 and nl.tile_size.gemm_moving_fmax == 512
    assert nl.tile_size.bn_stats_fmax == 512 and nl.tile_size.total_available_sbuf_size == 180224
    assert nl.fp32.min == np.finfo(np.float32).min and nl.bfp16.min == float(
        ml_dtypes.finfo(ml_dtypes.bfloat16).min
    )
    assert nl.finfo(nl.float16).max == 65504 and nl.par_dim(5) == 5
    assert constants.sizeinbytes(nl.bfloat16) == 2 and constants.sizeinbytes(np.uint8) == 1


def test_tile_size_outside_of_kernels_is_that_of_the_setting(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert nl.tile_size.total_available_sbuf_size > 180224
