"""Whether the hub can be reached: found out once and soon, since its client tries again for half a minute."""

import os
from functools import cache

SOON_S = 5.0


@cache
def settle_reach() -> None:
    """Go on offline, here and in processes started from here, when the hub gives no answer: what is cached is used."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SOON_S)
    except Exception as error:  # the client changes its library, and with it the classes of what it raises
        if _is_about_reach(error):
            constants.HF_HUB_OFFLINE = True
            os.environ["HF_HUB_OFFLINE"] = "1"


def _is_about_reach(error: Exception) -> bool:
    """Whether there was no answer: a refusal is one."""
    return isinstance(error, OSError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
