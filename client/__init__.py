"""Clients of the server, for the command line and for your own code.

They need `websockets`, `numpy`, `soundfile` and `soxr`, and neither the engine nor the server.
"""
