"""`neuronxcc.nki._private.private_api`: undocumented functions that public kernels call.

Source: calls in public kernels (api_legacy neuronxcc.nki._private.private_api).
"""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing
from opennki.lang.emit import call

_M = "neuronxcc.nki._private.private_api"


def core_barrier(tensor: Any, cores: Any) -> None:
    """Wait until the programs on all listed cores have come here; what they stored to `tensor` before is seen
    by all after it.

    tensor: a shared_hbm tensor that the cores wrote parts of. cores: physical cores of a logical NeuronCore,
    as in (0, 1).
    """
    call("core_barrier", (), {"cores": tuple(cores)})


def sendrecv(send_to_rank: Any, recv_from_rank: Any, src: Any, dst: Any, pipe_id: Any = 0, mask: Any = None) -> None:
    """Send src to one core of the logical NeuronCore and receive dst from another.

    send_to_rank, recv_from_rank: programs of the launch grid, which may be expressions of nl.program_id. dst, src: tensors of one shape
    and dtype. pipe_id: exchanges of different pipes do not meet.
    """
    call("core_sendrecv", (), {"send_to_rank": send_to_rank, "recv_from_rank": recv_from_rank, "src": src, "dst": dst, "pipe_id": pipe_id,
                               "mask": mask})  # fmt: skip


do_while = later(_M, "do_while", "A loop with a condition that is known at run time.")
row_tiled_mm_kernel = later(_M, "row_tiled_mm_kernel", "Matrix multiplication, tiled by rows.")
column_tiled_mm_kernel = later(_M, "column_tiled_mm_kernel", "Matrix multiplication, tiled by columns.")
cc_div = later(_M, "cc_div", "Division of ranks for collectives.")

__all__ = ["cc_div", "column_tiled_mm_kernel", "core_barrier", "do_while", "row_tiled_mm_kernel", "sendrecv"]
__getattr__ = missing(_M)
