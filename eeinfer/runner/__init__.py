"""Where host words meet device words: plans in, verdicts out; the cache, the row pool and the sampler."""
