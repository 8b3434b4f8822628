"""Linear layers over weights laid out for this machine. Knows no model."""
