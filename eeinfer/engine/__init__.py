"""The loop that drives scheduler and runner, the offline `LLM`, and prompt files."""
