"""How far answers are from the unmodified model's: the loss that thresholds are chosen and certified by."""
