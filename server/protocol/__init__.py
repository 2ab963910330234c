"""The wire protocols of the socket: text in, commands out; events in, text out. No I/O."""
