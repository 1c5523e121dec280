"""Settings: declared once in `schema`, layered and validated by `load`."""
