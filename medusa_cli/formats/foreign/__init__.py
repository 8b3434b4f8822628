"""Heads of other tools: read into ours, written as those tools read them, and compared with ours."""
