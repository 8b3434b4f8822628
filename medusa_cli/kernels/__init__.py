"""Linear layers and attention laid out for this machine. Knows no model."""
