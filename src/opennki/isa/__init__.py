"""Instruction set of the NeuronCore: data types, scalar functions, reduction order, targets, instructions."""
