"""A clock for whatever device works: what is queued there has ended when it is read."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, after the work that the device was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
