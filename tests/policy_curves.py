"""What three policies do to a growing load, simulated: `python -m tests.policy_curves > docs/policies.svg`.

Another policy is one more line in `POLICIES`, another load another `request`, another model another `cost`.
"""

import sys
from collections.abc import Callable
from math import log
from typing import NamedTuple
from unittest.mock import patch

from engine.params import SamplingParams
from scheduler.batch import Batch
from scheduler.core import Scheduler
from scheduler.policy import Decode, Prefill, View, next_tick, shares
from scheduler.request import Request
from scheduler.simulate import Arrival, simulate

Policy = Callable[[View], Prefill | Decode | None]

TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#374151"'
RATES = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0)
"""Requests a second."""
NUM_REQUESTS = 200


def prompts_first(view: View) -> Prefill | Decode | None:
    if view.prompts:
        return Prefill(shares(view.prompts, view.prefill_chunk))
    return Decode() if view.num_decoding else None


def streams_first(view: View) -> Prefill | Decode | None:
    if view.num_decoding:
        return Decode()
    return Prefill(shares(view.prompts, view.prefill_chunk)) if view.prompts else None


POLICIES: dict[str, tuple[Policy, str]] = {
    "taking turns (next_tick)": (next_tick, "#2563eb"),
    "prompts first": (prompts_first, "#d97706"),
    "streams first": (streams_first, "#059669"),
}


class Point(NamedTuple):
    """What one policy made of one rate."""

    tokens_per_s: float
    ttft_s: float
    itl_s: float


class Panel(NamedTuple):
    """One number of every `Point`: its title and its axis, which is logarithmic if it does not begin at 0."""

    title: str
    ticks: tuple[float, ...]

    def height(self, value: float) -> float:
        """How high `value` stands, 0 to 1."""
        low, high = self.ticks[0], self.ticks[-1]
        return log(value / low) / log(high / low) if low else value / high


PANELS = (
    Panel("output tokens/s", (0, 100, 200, 300)),
    Panel("seconds to the first token, p99", (0.01, 0.1, 1, 10, 100)),
    Panel("seconds to the next token, p99", (0.01, 0.1, 1, 10, 100)),
)


def cost(batch: Batch) -> float:
    return 0.012 + 0.001 * batch.num_tokens


def request(number: int) -> Request:
    num_prompt = 1000 if number % 8 == 0 else 30
    return Request(id=f"r{number}", prompt_ids=(1,) * num_prompt, params=SamplingParams(seed=number, max_tokens=60))


def point(policy: Policy, rate: float) -> Point:
    scheduler = Scheduler(n_slots=16, max_len=2048, prefill_chunk=256, max_queue=256, eos_ids=frozenset())
    arrivals = [Arrival(number / rate, request(number)) for number in range(NUM_REQUESTS)]
    with patch("scheduler.plan.next_tick", policy):
        outcome = simulate(scheduler, arrivals, cost)
    ttfts_s = sorted(event.timings.ttft_s or 0.0 for event in outcome.finished)
    metrics = scheduler.metrics
    return Point(
        tokens_per_s=metrics.generation_tokens / outcome.t_end,
        ttft_s=ttfts_s[round(0.99 * (NUM_REQUESTS - 1))],
        itl_s=metrics.itl_s.quantile(0.99),
    )


def svg(curves: dict[str, list[Point]]) -> str:
    """The panels side by side."""
    width, height, left, top = 230, 170, 50, 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 290" {TEXT} role="img" aria-labelledby="title">',
        '<title id="title">Throughput and latencies of three policies over requests a second, simulated</title>',
        '<rect width="900" height="290" rx="10" fill="#ffffff"/>',
    ]
    for place, name in enumerate(curves):
        lines.append(f'<path d="M{50 + 200 * place} 22h24" stroke="{POLICIES[name][1]}" stroke-width="3"/>')
        lines.append(f'<text x="{80 + 200 * place}" y="26">{name}</text>')
    for place, panel in enumerate(PANELS):
        x0, y0 = left + place * (width + 60), top + height
        lines.append(f'<text x="{x0}" y="{top - 14}" font-weight="bold">{panel.title}</text>')
        for tick in panel.ticks:
            y = y0 - panel.height(tick) * height
            lines.append(f'<path d="M{x0} {y:.0f}h{width}" stroke="#d1d5db"/>')
            lines.append(f'<text x="{x0 - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>')
        for rate in range(0, int(RATES[-1]) + 1, 2):
            x = x0 + rate / RATES[-1] * width
            lines.append(f'<text x="{x:.0f}" y="{y0 + 18}" text-anchor="middle">{rate}</text>')
        lines.append(f'<text x="{x0 + width / 2:.0f}" y="{y0 + 36}" text-anchor="middle">requests/s</text>')
        for order, (name, points) in enumerate(curves.items()):
            thickness = 2 * (len(curves) - order) - 1  # thinner ones on top: where they meet, all show
            corners = " ".join(
                f"{x0 + rate / RATES[-1] * width:.1f},{y0 - panel.height(point[place]) * height:.1f}"
                for rate, point in zip(RATES, points, strict=True)
            )
            colour = POLICIES[name][1]
            lines.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>')
    return "\n".join([*lines, "</svg>", ""])


def picture() -> str:
    return svg({name: [point(policy, rate) for rate in RATES] for name, (policy, _) in POLICIES.items()})


if __name__ == "__main__":
    sys.stdout.write(picture())
