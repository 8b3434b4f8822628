from typing import Literal

SUBJECT: Literal["medusa"] = "medusa"
"""The arm that the others are compared with."""
