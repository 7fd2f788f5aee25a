"""Ranks in several processes: how what they bring to a meeting travels, and how the processes find out together that all is stuck.

`wire` is the form of messages, `mesh` carries them over sockets, `gloo` over torch.distributed, `remote` is the protocol of a run.
"""
