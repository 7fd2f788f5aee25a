"""How long a kernel takes on trn1, trn2 or trn3: an event simulation over the engines and DMA queues of a NeuronCore.

`estimate(kernel)` gives a `Timeline`. It is an estimate everywhere it is shown; docs/timing.md says of what and how far off it is.
"""
from opennki.timing.estimate import estimate
from opennki.timing.timeline import COMPUTE, ENGINES, EngineUse, LineCost, Roofline, Row, Timeline, Traffic, Work

__all__ = ["COMPUTE", "ENGINES", "EngineUse", "LineCost", "Roofline", "Row", "Timeline", "Traffic", "Work", "estimate"]
