"""Tools that train, evaluate and export a Voxtral-Realtime model (see training/README.md)."""
