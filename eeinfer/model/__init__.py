"""The decoder, its weights and its tokenizer: local store, GGUF import, fingerprint, loader, families."""
