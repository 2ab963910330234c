"""voxlite: a realtime transcription server for Voxtral-Mini-4B-Realtime.

The folders of this package lie at the top of the repository and are linked here, so that they are
imported as `voxlite.engine`, `voxlite.server` and so on, in a checkout as in an installed wheel.
"""
