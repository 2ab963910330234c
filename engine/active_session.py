"""One session as the engine's thread sees it: queued input, the utterance under way, its output.

In: commands in order. Out: jobs for the model runner, and events. A session is a row of utterances;
each has its own audio stream, positions and text, and starts from a fresh prompt. It knows neither
other sessions nor the KV cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.config import BOS_ID, STREAMING_WORD_ID, AudioConfig, SessionOptions, prompt_ids
from voxlite.engine.detokenizer import Detokenizer, WordTimer
from voxlite.engine.drafting import DraftYield
from voxlite.engine.errors import EngineFailure
from voxlite.engine.events import Event, TextDelta, Usage, UtteranceDone, Word
from voxlite.engine.inbox import (
    AppendSamples,
    Discard,
    EngineCommand,
    Flush,
    InboxBudget,
    SetOptions,
)
from voxlite.engine.model.encoder import ConvState
from voxlite.engine.model_runner import DecodeResult, EncodeResult


@dataclass(slots=True, kw_only=True)
class Utterance:
    """All streaming state of one utterance; none of it grows with the utterance's length."""

    audio: AudioStream
    delay_ms: int
    num_prompt_tokens: int
    wants_logprobs: bool
    start_s: float
    conv_state: ConvState
    adapter: Tensor  # (queued, decoder dim), encoded and not yet decoded
    detokenizer: Detokenizer
    word_timer: WordTimer
    position: int = 0  # of the decoder
    last_token_id: int = BOS_ID
    draft_yield: DraftYield = field(default_factory=DraftYield)

    @property
    def num_input_tokens(self) -> int:
        """Positions that the next decoder step must take: the prompt, then one at a time."""
        return self.num_prompt_tokens if self.position == 0 else 1

    @property
    def input_ids(self) -> list[int]:
        if self.position == 0:
            return prompt_ids(self.num_prompt_tokens)
        return [self.last_token_id]

    @property
    def num_draftable_tokens(self) -> int:
        """Positions after the next one whose audio is here and whose token may well be guessed.

        Not the one after `[STREAMING_WORD]`, where there is always a piece of the word.
        """
        if self.position == 0 or self.last_token_id == STREAMING_WORD_ID:
            return 0
        if not self.draft_yield.is_worth_it:
            return 0
        return len(self.adapter) - 1

    @property
    def can_decode(self) -> bool:
        return len(self.adapter) >= self.num_input_tokens

    @property
    def num_encodable_tokens(self) -> int:
        """Tokens whose audio is here and whose adapter output will be read.

        The last token of a finished utterance is not: no token is generated after it.
        """
        is_last_here = self.audio.is_finished and self.audio.num_ready_tokens > 0
        return self.audio.num_ready_tokens - is_last_here

    @property
    def is_complete(self) -> bool:
        return self.audio.is_finished and self.position == self.audio.num_tokens - 1

    @property
    def num_generated_tokens(self) -> int:
        return max(0, self.position - self.num_prompt_tokens + 1)

    @property
    def usage(self) -> Usage:
        """What has been computed so far: the prompt counts from the first decoder step on."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens if self.position else 0,
            completion_tokens=self.num_generated_tokens,
        )


@dataclass(slots=True, kw_only=True)
class ActiveSession:
    """A session from its admission to its end. Owned by the engine thread."""

    session_id: int
    audio_config: AudioConfig
    options: SessionOptions
    default_delay_ms: int
    on_event: Callable[[Event], None]
    budget: InboxBudget
    token_bytes: Callable[[int], bytes]
    new_conv_state: Callable[[], ConvState]
    new_adapter_queue: Callable[[], Tensor]
    commands: deque[EngineCommand] = field(default_factory=deque)
    utterance: Utterance | None = None
    is_finished: bool = False
    _utterance_id: int = 0
    _num_samples: int = 0  # the session's clock
    _last_word_end_s: float = 0.0

    def receive(self, command: EngineCommand) -> None:
        """Queue a command. One that discards takes the place of the audio that it drops."""
        if not isinstance(command, Discard):
            self.commands.append(command)
            return
        changes: list[SetOptions] = []
        num_samples = 0
        while self.commands and isinstance(last := self.commands[-1], AppendSamples | SetOptions):
            self.commands.pop()
            if isinstance(last, AppendSamples):
                self.budget.release(len(last.samples))
                num_samples += len(last.samples)
            else:
                changes.append(last)
        # Changes hold for the next utterance, on either side of this one's end.
        self.commands.extend([Discard(num_samples), *reversed(changes)])

    def feed(self, max_ready_tokens: int) -> bool:
        """Move queued input into the utterance, as far as it can use it now.

        Return whether an utterance was discarded: the KV blocks held by then are of no use.
        """
        has_discarded = False
        while self.commands and self._wants_input(max_ready_tokens):
            match self.commands.popleft():
                case AppendSamples(samples):
                    self.budget.release(len(samples))
                    self.utterance = self.utterance or self._start_utterance()
                    self.utterance.audio.append(samples)
                    self._num_samples += len(samples)
                case Flush(ends_session):
                    self.is_finished = ends_session
                    if not ends_session:
                        self.budget.release(0)
                    if self.utterance is None:
                        self._end_utterance()
                    else:
                        self.utterance.audio.finish()
                case Discard(num_samples):
                    self.budget.release(0)
                    self._end_utterance(num_dropped_samples=num_samples)
                    has_discarded = True
                case SetOptions(options):
                    self.budget.release(0)
                    self.options = options
        return has_discarded

    def store(self, result: EncodeResult) -> None:
        """Take the outcome of an encode job."""
        utterance = self.current
        utterance.conv_state = result.conv_state
        utterance.adapter = (
            torch.cat((utterance.adapter, result.adapter))
            if len(utterance.adapter)
            else result.adapter
        )

    def count_drafts(self, num_drafts: int, num_right: int) -> None:
        """Learn how a decode job's drafts fared. To be told before its results."""
        self.current.draft_yield.count(num_drafts, num_right)

    def advance(self, result: DecodeResult) -> bool:
        """Take the outcome of a decode job, say what it means, and return whether that was all.

        The token generated at position p speaks of the audio of position p - left pad - delay.
        """
        if not math.isfinite(result.logit):
            raise EngineFailure(
                f"the model's output is {result.logit}: the checkpoint holds such numbers, or this "
                f"dtype can't hold the model's (float32 and bfloat16 reach furthest)"
            )
        utterance = self.current
        utterance.adapter = utterance.adapter[utterance.num_input_tokens :]
        utterance.position += utterance.num_input_tokens
        utterance.last_token_id = result.token_id
        is_complete = utterance.is_complete
        text = utterance.detokenizer.push(result.token_id)
        spoken_s = utterance.num_generated_tokens * self.audio_config.token_s
        words = utterance.word_timer.push(
            result.token_id,
            text,
            min(utterance.start_s + spoken_s, self._now_s),
            is_mid_character=utterance.detokenizer.is_mid_character,
        )
        if is_complete:
            words += utterance.word_timer.finish()
        self._say(result, text, words)
        if is_complete:
            self._end_utterance()
        return is_complete

    @property
    def is_done(self) -> bool:
        """Whether the session was finished and has said everything."""
        return self.is_finished and self.utterance is None

    @property
    def current(self) -> Utterance:
        """The utterance under way; to be asked for only where there is one."""
        assert self.utterance is not None
        return self.utterance

    @property
    def _now_s(self) -> float:
        """The end of the audio received so far, on the session's clock."""
        return self._num_samples / self.audio_config.sampling_rate_hz

    def _wants_input(self, max_ready_tokens: int) -> bool:
        if self.utterance is None:
            return not self.is_finished
        audio = self.utterance.audio
        can_use_it = audio.num_ready_tokens < max_ready_tokens
        return not audio.is_finished and (can_use_it or isinstance(self.commands[0], Discard))

    def _start_utterance(self) -> Utterance:
        audio_config = self.audio_config
        delay_ms = self.options.delay_ms or self.default_delay_ms
        num_delay_tokens = audio_config.num_delay_tokens(delay_ms)
        return Utterance(
            audio=AudioStream(audio_config, audio_config.num_right_pad_tokens(num_delay_tokens)),
            delay_ms=delay_ms,
            num_prompt_tokens=audio_config.num_prompt_tokens(num_delay_tokens),
            wants_logprobs=self.options.logprobs,
            start_s=self._now_s,
            conv_state=self.new_conv_state(),
            adapter=self.new_adapter_queue(),
            detokenizer=Detokenizer(self.token_bytes),
            word_timer=WordTimer(audio_config.token_s, max(self._now_s, self._last_word_end_s)),
        )

    def _say(self, result: DecodeResult, text: str, words: list[Word]) -> None:
        self.on_event(
            TextDelta(
                session_id=self.session_id,
                utterance_id=self._utterance_id,
                token_ids=(result.token_id,),
                text=text,
                logprobs=None if result.logprob is None else (result.logprob,),
                words=tuple(words),
            )
        )

    def _end_utterance(self, num_dropped_samples: int = 0) -> None:
        """Say that the utterance is over; without one, that an empty one is.

        Args:
            num_dropped_samples: audio of it that was never taken up, and yet counts as received.
        """
        usage, start_s = Usage(prompt_tokens=0, completion_tokens=0), self._now_s
        if self.utterance is not None:
            usage, start_s = self.utterance.usage, self.utterance.start_s
            self._last_word_end_s = self.utterance.word_timer.last_end_s
            self.utterance = None
        self._num_samples += num_dropped_samples
        self.on_event(
            UtteranceDone(
                session_id=self.session_id,
                utterance_id=self._utterance_id,
                usage=usage,
                start_s=start_s,
                end_s=self._now_s,
            )
        )
        self._utterance_id += 1
