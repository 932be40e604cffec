"""The engine inside a program of one's own, without a server: `Engine` for asyncio, `BlockingEngine` for the rest."""

from engine.params import SamplingParams
from scheduler.inprocess.blocking import BlockingEngine, BlockingStream
from scheduler.inprocess.completion import Choice, Completion
from scheduler.inprocess.engine import Engine, Stream

__all__ = ["BlockingEngine", "BlockingStream", "Choice", "Completion", "Engine", "SamplingParams", "Stream"]
