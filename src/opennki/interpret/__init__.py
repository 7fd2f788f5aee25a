"""The reference interpreter and its checks."""
