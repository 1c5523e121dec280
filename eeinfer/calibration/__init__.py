"""How far answers are from the unmodified model's, and thresholds whose distance is certified."""
