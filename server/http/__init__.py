"""The HTTP side: files, models, client secrets, health."""
