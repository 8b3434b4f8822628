"""Another user of the machine, for what must not be theirs. Only root can give a file away."""

import os

import pytest

STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
