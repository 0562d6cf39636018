"""An agentic load: sessions whose every turn sends the whole context so far, tools' answers appended."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AgenticLoad", "Turn"]

OUTPUT_TOKEN = 1  # what the simulated model says


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    session: int
    number: int

    @property
    def request_id(self) -> str:
        return f"s{self.session}.{self.number}"


@dataclass(frozen=True)
class AgenticLoad:
    """A closed loop: whenever a session has ended, a new one starts. Sessions share no prefix."""

    num_sessions: int = 64  # at a time
    num_turns: int = 13
    first_tokens: int = 74_160  # context of the first turn
    growth_tokens: int = 753  # of the context from turn to turn, the last turn's output included
    output_tokens: int = 220
    pause_s: float = 0.0  # from a turn's end to the next turn of its session: tools at work
    stagger_s: float = 1.0  # between the starts of the first sessions

    def num_prompt_tokens(self, turn: Turn) -> int:
        """Tokens that the turn sends."""
        return self.first_tokens + turn.number * self.growth_tokens

    def num_new_tokens(self, turn: Turn) -> int:
        """Tokens of the prompt that no step has computed, if every prefix is still there.

        The last token of an output is sampled, but only the next turn computes it.
        """
        return self.first_tokens if turn.number == 0 else self.growth_tokens - self.output_tokens + 1

    def prompt(self, turn: Turn) -> list[int]:
        """Token ids: the session's number, and the outputs in between."""
        own = [OUTPUT_TOKEN + 1 + turn.session] * self.first_tokens
        answer = [OUTPUT_TOKEN + 1 + turn.session] * (self.growth_tokens - self.output_tokens)
        return own + ([OUTPUT_TOKEN] * self.output_tokens + answer) * turn.number

    def after(self, turn: Turn, num_started: int) -> Turn:
        """What follows a turn in its place; `num_started`: sessions so far."""
        if turn.number + 1 < self.num_turns:
            return Turn(turn.session, turn.number + 1)
        return Turn(num_started, 0)
