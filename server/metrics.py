"""What the server measures, in Prometheus' words.

In: observations from the event loop and from the engine's thread (prometheus-client locks), and a
snapshot of the engine at each scrape. Out: the text of `/metrics`. No audio, no text, no client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from voxlite.engine.stats import EngineStats, StepStats
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_FLUSH_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CONNECTION_BUCKETS_S = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._step_s = Histogram(
            "voxlite_step_seconds",
            "Time of an engine step.",
            buckets=_STEP_BUCKETS_S,
            registry=self._registry,
        )
        self._batch = Histogram(
            "voxlite_batch_sessions",
            "Sessions decoded in one step.",
            buckets=_BATCH_BUCKETS,
            registry=self._registry,
        )
        self.flush_s = Histogram(
            "voxlite_flush_seconds",
            "From a commit to the whole text of its utterance.",
            buckets=_FLUSH_BUCKETS_S,
            registry=self._registry,
        )
        self.refusals = Counter(
            "voxlite_refusals",
            "Connections, requests and messages that were refused.",
            ["reason"],
            registry=self._registry,
        )
        self.connections = Gauge(
            "voxlite_websocket_connections_active",
            "Open WebSocket connections.",
            registry=self._registry,
        )
        self.connections_total = Counter(
            "voxlite_websocket_connections",
            "WebSocket connections accepted.",
            registry=self._registry,
        )
        self.connection_s = Histogram(
            "voxlite_websocket_connection_duration_seconds",
            "How long WebSocket connections lasted.",
            buckets=_CONNECTION_BUCKETS_S,
            registry=self._registry,
        )
        self.http_requests = Counter(
            "voxlite_http_transcriptions",
            "Files transcribed, by response format.",
            ["response_format"],
            registry=self._registry,
        )

    def observe_step(self, step: StepStats) -> None:
        """Take an engine step; called on the engine's thread."""
        self._step_s.observe(step.duration_s)
        if step.num_decoded_sessions:
            self._batch.observe(step.num_decoded_sessions)

    def watch_engine(
        self, stats: Callable[[], EngineStats | None], lags_s: Callable[[], Iterable[float]]
    ) -> None:
        """Take a snapshot of the engine, and of all sessions' backlogs, at each scrape."""
        self._registry.register(_EngineCollector(stats, lags_s))

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(
        self, stats: Callable[[], EngineStats | None], lags_s: Callable[[], Iterable[float]]
    ) -> None:
        self._stats = stats
        self._lags_s = lags_s

    def collect(self) -> Iterable[Metric]:
        lag_s = max(self._lags_s(), default=0.0)
        yield GaugeMetricFamily(
            "voxlite_lag_seconds", "Most audio that a session has waiting.", value=lag_s
        )
        stats = self._stats()
        if stats is None:
            return
        yield GaugeMetricFamily("voxlite_sessions", "Open sessions.", value=stats.num_sessions)
        yield GaugeMetricFamily("voxlite_sessions_max", "Seats.", value=stats.max_sessions)
        yield CounterMetricFamily(
            "voxlite_audio_seconds",
            "Audio taken in, the few seconds at start among it.",
            value=stats.num_samples_in / SAMPLE_RATE_HZ,
        )
        yield CounterMetricFamily(
            "voxlite_tokens",
            "Tokens written, those at start among them.",
            value=stats.num_tokens_out,
        )
        yield CounterMetricFamily(
            "voxlite_decoder_passes",
            "Passes of a session through the decoder; fewer than tokens where some were drafted.",
            value=stats.num_passes,
        )
        yield CounterMetricFamily(
            "voxlite_drafted_tokens", "Tokens drafted.", value=stats.num_drafted_tokens
        )
        yield CounterMetricFamily("voxlite_steps", "Engine steps.", value=stats.num_steps)
        blocks = GaugeMetricFamily(
            "voxlite_kv_cache_free_blocks", "Free KV-cache blocks.", labels=["stack"]
        )
        blocks.add_metric(["encoder"], stats.num_free_encoder_blocks)
        blocks.add_metric(["decoder"], stats.num_free_decoder_blocks)
        yield blocks
        yield CounterMetricFamily(
            "voxlite_kv_cache_given_up_blocks",
            "Blocks that a session gave up before they left its window, for want of free ones.",
            value=stats.num_given_up_blocks,
        )
