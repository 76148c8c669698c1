"""Clients on other hosts: the same tables over ZeroMQ.

`protocol` and `wire` say what goes over the line (PROTOCOL.md has it byte by byte), `server` and
what it uses is the side of the store, `client` and what it uses the other one.
"""
