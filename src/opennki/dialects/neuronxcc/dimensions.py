"""`neuronxcc.nki.compiler.backends.neuron.dimensions`: dimensions of a launch grid, as host code of the
vendor names them.

Source: imports in public code (neuronx-distributed: CCPipeline, VNC, nc); not documented.
"""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.lang.loops import nc, spmd_dim

__all__ = ["VNC", "CCPipeline", "nc", "spmd_dim"]

# the older name of nl.nc: physical cores of a "virtual" NeuronCore
VNC = nc


class CCPipeline(int):
    """A grid dimension whose programs are the stages of a pipeline with collectives: `kernel[CCPipeline(4) *
    nc(2)]`.

    For the values it is a plain dimension of this size; stages run one after the other.
    """

    def __repr__(self) -> str:
        return f"CCPipeline({int(self)})"


__getattr__ = missing("neuronxcc.nki.compiler.backends.neuron.dimensions")
