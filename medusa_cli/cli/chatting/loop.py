"""The conversation itself: a turn is read, a reply is shown as it is written, and nothing that was said gets lost."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from medusa_cli.cli.chatting.flow import Flow
from medusa_cli.cli.chatting.keyboard import unechoed
from medusa_cli.cli.chatting.reply import BROKEN, STOPPED, Manner, Partner, Reply
from medusa_cli.cli.chatting.talk import Talk
from medusa_cli.cli.chatting.turns_said import Said
from medusa_cli.cli.console import Console
from medusa_cli.cli.drawing import width_of
from medusa_cli.cli.signals import at_ctrl_c, interrupt
from medusa_cli.errors import DataError, MedusaError

HOW_TO_LEAVE = "Ctrl-D or /exit leaves"


class Chat:
    """One conversation.

    typed     whether somebody sits at a terminal: mistakes are told and the conversation goes on, and Ctrl-C stops a
              reply. Else the first mistake ends it, and Ctrl-C too
    replies   all of them, those that were taken back too
    """

    def __init__(self, partner: Partner, manner: Manner, talk: Talk, console: Console, *, typed: bool) -> None:
        self.partner, self.manner, self.talk, self.console, self.typed = partner, manner, talk, console, typed
        self.replies: list[Reply] = []

    def run(self, next_turn: Callable[[], Said | None], obey: Callable[["Chat", str], bool]) -> None:
        """Until there are no more turns, or a command ends it. Raises the first mistake where nobody types.

        obey   does what a command says; False: it was the last
        """
        while True:
            try:
                said = next_turn()
                if said is None:
                    if self.typed:
                        self.console.stream("\n")
                    return
                if said.is_command:
                    if not obey(self, said.text):
                        return
                elif said.text.strip():
                    self.ask(said.text)
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                self.console.stream("\n")
                self.console.aside(HOW_TO_LEAVE)
            except MedusaError as error:
                if not self.typed:
                    raise
                self.console.error(error)

    def ask(self, question: str) -> None:
        """Show the reply as it comes. The part that is there when it is stopped, or breaks off, stays in the talk.

        Raises MedusaError for a reply that broke off, and KeyboardInterrupt where nobody types.
        """
        messages, self.talk.unanswered = self.talk.messages(question), question
        reply = Reply(len(self.replies))
        broken = self._write(messages, reply)
        self.replies.append(reply)
        if reply.text or broken is None and reply.finish_reason != STOPPED:
            self.talk.add(question, reply.text)
        self._tell(reply)
        if broken is not None:
            raise broken

    def ask_again(self) -> None:
        """Ask the last question anew. Raises as `ask`, and DataError where there was none."""
        question = self.talk.take_back()
        if question is None:
            raise DataError("nothing has been asked yet", "ask something first")
        self.ask(question)

    def document(self) -> dict[str, Any]:
        """The conversation as JSON: what was said, and what each reply took."""
        return {
            "messages": [{"role": one.role, "content": one.content} for one in self.talk.messages()],
            "replies": [reply.document() for reply in self.replies],
            **self.partner.facts(),
            "seed": self.manner.seed,
        }

    def _write(self, messages: Any, reply: Reply) -> MedusaError | KeyboardInterrupt | None:
        """Let it be written; what broke it off, unless somebody who types stopped it."""
        broken: MedusaError | KeyboardInterrupt | None = None
        flow = Flow(lambda: width_of(sys.stdout) if sys.stdout.isatty() else None)
        try:
            with ExitStack() as stack:
                if self.typed:
                    stack.enter_context(unechoed())
                    stack.enter_context(at_ctrl_c(self.partner.stop, interrupt))
                for piece in self.partner.write(messages, self.manner, reply):
                    reply.add(piece)
                    if piece:
                        self.console.stream(flow.feed(shown(piece)))
        except KeyboardInterrupt as pressed:
            reply.finish_reason = STOPPED
            broken = None if self.typed else pressed
        except MedusaError as error:
            reply.finish_reason, broken = BROKEN, error
        reply.end()
        self.console.stream(flow.flush())
        if reply.text and not reply.text.endswith("\n"):
            self.console.stream("\n")
        return broken

    def _tell(self, reply: Reply) -> None:
        """What it took, and why it ended where that says something."""
        if reply.finish_reason == BROKEN:
            if reply.text:
                self.console.aside("broken off; the part that is there stays in the conversation")
            return
        self.console.aside(reply.summary + self._ending(reply))

    def _ending(self, reply: Reply) -> str:
        if reply.finish_reason == STOPPED:
            return "; stopped, the part stays" if reply.text else "; stopped, the question is taken back"
        if reply.finish_reason != "length":
            return ""
        tokens = reply.completion_tokens
        if tokens is not None and tokens < self.manner.ending.max_new_tokens:
            full = "the context is full" if self.partner.context else "the server allows no more"
            return f"; cut off, {full}: /reset begins another conversation"
        return "; cut off, /set max-new-tokens N allows more"


def shown(text: str) -> str:
    """Words as a terminal may have them: what could drive it is spelt out. As they are where stdout is none."""
    if not sys.stdout.isatty():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _spelt(each) for each in text)


def _spelt(each: str) -> str:
    """A control character in letters; others that merely aren't letters, such as joiners, stay."""
    return repr(each)[1:-1] if ord(each) < 0x20 or 0x7F <= ord(each) < 0xA0 else each
