"""Host bookkeeping: requests, sequences, blocks, plans, strategies, the scheduler. No tensors, no torch."""
