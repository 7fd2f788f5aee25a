"""The ops of kernels on XLA tensors: a custom call in the lazy graph, which XLA's CPU client runs through our handler.

Where the handler cannot be registered (see `register`), or OPENNKI_XLA_HOST asks for it, operands go to the host, the kernel runs
there, and results go back: the same numbers, with the graph cut at each kernel.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.core import xla_builder

from opennki import settings
from opennki.bind import failures
from opennki.bind.torch import ops
from opennki.bind.torch_xla.hlo import custom_call_module
from opennki.bind.torch_xla.register import ATTRIBUTE, CannotRegister, register_handler
from opennki.errors import UNKNOWN, NkiValueError, NkiWarning
from opennki.kernels.payload import decode_backend_config

_XLAC = torch_xla._XLAC
_OP = "xla::_op_NkiKernelCallImpl"
_TYPED = 4  # XLA's API_VERSION_TYPED_FFI


@lru_cache(maxsize=512)
def module_of(payload: str, typed: bool) -> bytes:
    """The HLO module, serialized, of a call: `typed` for our handler on the CPU, else as the vendor's compiler reads it."""
    decoded = decode_backend_config(payload)
    return custom_call_module(
        [(p.dtype, p.shape) for p in decoded.kernel.params],
        [(r.dtype, r.shape) for r in decoded.results],
        f'{{{ATTRIBUTE} = "{payload}"}}' if typed else payload,
        aliases=decoded.aliases,
        attributes={"nki.kernel": decoded.func_name, "nki.has_collectives": str(bool(decoded.config["has_collectives"])).lower()},
        api_version=_TYPED if typed else 0,
        side_effect=_prints(payload),
    )


@lru_cache(maxsize=512)
def _prints(payload: str) -> bool:
    from opennki.kernels.framework import prints

    return prints(decode_backend_config(payload).kernel)


@lru_cache(maxsize=512)
def _computation(payload: str, typed: bool) -> Any:
    return xla_builder.computation_from_module_proto("NkiKernelCallImpl", module_of(payload, typed))


def handled() -> bool:
    """Whether XLA's CPU client runs our calls itself; False where they go through the host."""
    if settings.current().xla_host:
        return False
    if not _state:
        try:
            register_handler()
            _state.append(True)
        except CannotRegister as exc:
            _state.append(False)
            warnings.warn(NkiWarning(f"kernels on XLA tensors run through the host, which cuts the graph at each: {exc}"), stacklevel=2)
    return _state[0]


_state: list[bool] = []


def call(operands: Sequence[Any], payload: str) -> list[Any]:
    """All results of a payload as new XLA tensors. Errors: NkiTypeError for operands that it does not name."""
    plan = ops.plan_of(payload)
    plan.check(operands, plan.operands)
    hardware = xm.xla_device_hw(operands[0].device)
    if hardware == "CPU" and not handled():
        results = ops.run([t.cpu() for t in operands], payload)
        return [t.to(operands[0].device) for t in results]
    clear_stale_errors()
    return list(_XLAC._xla_user_computation(_OP, list(operands), _computation(payload, hardware == "CPU")))


def call_into(operands: Sequence[Any], targets: Sequence[Any], payload: str) -> None:
    """The same into `targets`, for programs that were exported on the CPU. Functional: new tensors, which become the values of these."""
    results = ops.run(ops.plan_of(payload).merged(operands, targets), payload)
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)


def one_device(kernel: str, tensors: Sequence[Any]) -> None:
    """Refuse tensors of several devices. Errors: NkiValueError."""
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise NkiValueError(f"{kernel} is called with tensors on {', '.join(sorted(devices))}", loc=UNKNOWN,
                            rule="the tensors of a call are on one device", fix="move them with .to(device)")


# ---- errors ---------------------------------------------------------------------------------------------------------
_seen = 0


def clear_stale_errors() -> None:
    """PyTorch/XLA raises the error of a program that failed again from a later, unrelated step. Where a kernel has failed since the last
    call, wait for what is pending, so that the error is not raised from a program that has nothing to do with it."""
    global _seen
    failed = failures.count_kept()
    if failed == _seen:
        return
    _seen = failed
    for _ in range(8):
        try:
            xm.wait_device_ops()
        except RuntimeError as error:
            if failures.cause_of(error) is None:
                raise
        else:
            return


def _wait_before_run() -> None:
    """Let compiled graphs (torch.compile with the backend openxla) start when nothing is pending: PyTorch/XLA waits for the graph
    before with the GIL held, and a kernel in that graph needs the GIL."""
    run = _XLAC._run_cached_graph
    if getattr(run, "waits", False):
        return

    def run_cached_graph(*args: Any, **kwargs: Any) -> Any:
        xm.wait_device_ops()
        return run(*args, **kwargs)

    run_cached_graph.waits = True  # type: ignore[attr-defined]
    _XLAC._run_cached_graph = run_cached_graph


def _wait_at_exit() -> None:
    """Programs that are still running need Python, so they end before it does. Their errors have no other place left to go."""
    try:
        xm.wait_device_ops()
    except Exception as error:
        print(f"a program with a kernel failed, and nobody has waited for it: {error}", file=sys.stderr)


def _register() -> None:
    for name in ("call", "run", "call_printing"):
        ops.library.impl(name, call, "XLA")
    # lazy tensors have no memory that could be written to, so PyTorch/XLA makes programs functional first
    ops.library.impl("call_into", call_into, "Functionalize")
    _wait_before_run()
    atexit.register(_wait_at_exit)


_register()
