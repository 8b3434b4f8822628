"""What is asked when answers are made anew: each turn of a user, with what was said before it. Knows no tokenizer."""

from collections.abc import Iterable

from medusa_cli.data.conversations import Conversation, Message


def asked_turns(conversations: Iterable[Conversation], most: int) -> dict[str, list[Message]]:
    """Up to `most` turns by key, in order: the messages up to a user's.

    Earlier answers stay as the data has them, so each turn can be answered without waiting for another. A later turn
    is asked only if the one before was answered. Plain text asks nothing, nor does a turn whose answer is not to be
    learnt.
    """
    asked: dict[str, list[Message]] = {}
    for conversation in conversations:
        turns = [place for place, message in enumerate(conversation.messages) if message.role == "user"]
        turns = [place for place in turns if all(one.learnt for one in conversation.messages[place + 1 : place + 2])]
        for number, place in enumerate(turns, start=1):
            if len(asked) == most:
                return asked
            key = conversation.place if number == 1 else f"{conversation.place}, turn {number}"
            asked[key] = conversation.messages[: place + 1]
    return asked
