"""The legacy namespace `neuronxcc.nki`: surface only, the meaning is in `opennki.lang` and `opennki.isa`."""
