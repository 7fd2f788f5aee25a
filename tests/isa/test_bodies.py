"""Bodies over the arrays of another module: several threads may ask for the first one at once."""

from __future__ import annotations

import sys
import threading
import types

import numpy as np

from opennki.isa.bodies import Translator
from opennki.isa.declare import ISA


def missing(body, seen=None):
    """Names that a body, or a function that it calls, looks up and does not find."""
    seen = set() if seen is None else seen
    if body in seen:
        return []
    seen.add(body)
    original = sys.modules[body.__module__].__dict__
    out = []
    for name in body.__code__.co_names:
        if name in original:
            value = body.__globals__.get(name)
            if value is None and original[name] is not None:
                out.append(name)
            elif isinstance(value, types.FunctionType) and value.__module__.startswith("opennki.isa."):
                out += missing(value, seen)
    return out


def test_nobody_sees_a_body_that_is_being_made():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            translator = Translator(types.SimpleNamespace(**vars(np)), {})
            begin, found = threading.Barrier(8), []

            def ask(translator=translator, begin=begin, found=found):
                begin.wait()
                for op in ("tensor_scalar", "activation", "tensor_reduce"):
                    body = translator.body(op)
                    found.extend(missing(body))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not found, sorted(set(found))
    finally:
        sys.setswitchinterval(interval)
    assert {"tensor_scalar", "activation", "tensor_reduce"} <= set(ISA)
