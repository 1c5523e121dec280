"""The subject of the project: confidence, heads and their files, and what becomes of the KV of skipped layers."""
