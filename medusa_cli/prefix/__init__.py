"""Prefix pool: keys and values of prompts that were read before, in chunks. Knows no engine and no HTTP."""
