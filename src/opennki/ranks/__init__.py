"""Ranks in several processes: how what they bring to a meeting travels, and how the processes find out together that all is stuck.

`wire` is the form of messages, `mesh` carries them over sockets of one run, `hub` over those of a framework's program, `torch_store` finds
the processes of torch.distributed, `remote` is the protocol of a run.
"""
