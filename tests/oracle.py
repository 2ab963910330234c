"""A dense, cache-free reference of Voxtral-Realtime in float64 numpy, for tests alone.

In: a Mistral-format checkpoint folder and 16 kHz samples. Out: every intermediate result of the
model, for the whole utterance at once. It knows no streaming, no cache, no blocks and no batches,
and it shares no code with the engine: where the two agree, both are right.

Letters in shapes: T tokens (80 ms), F = 4T encoder frames (20 ms), M = 8T mel frames (10 ms), P any
number of positions, C channels, H heads, D head dim.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[np.float64]

SAMPLE_RATE_HZ = 16_000
HOP_SAMPLES = 160
WINDOW_SAMPLES = 400
CONV_STRIDES = (1, 2)
NUM_LEFT_PAD_TOKENS = 32
NUM_EXTRA_RIGHT_PAD_TOKENS = 1 + 10  # besides the delay itself
BEGIN_ID = 1
PAD_ID = 32

EMBEDDING = "mm_streams_embeddings.embedding_module."
ENCODER = EMBEDDING + "whisper_encoder."

_erf = np.vectorize(math.erf, otypes=[np.float64])


class Generation(NamedTuple):
    """What greedy decoding produced, one entry per generated id."""

    ids: list[int]
    logprobs: list[float]  # natural logarithm
    margins: list[float]  # best logit minus the second best; near 0 is a near tie


class Stack(NamedTuple):
    """The numbers that shape one transformer stack, under their names in params.json."""

    prefix: str  # of its tensors' names
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    sliding_window: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def from_params(cls, prefix: str, params: dict[str, Any]) -> "Stack":
        return cls(prefix, **{name: params[name] for name in cls._fields[1:]})


def attended(position: int, window: int) -> range:
    """Return the positions whose keys a query sees: itself and the `window - 1` before it.

    Window 750: position 749 sees 0..749, position 750 sees 1..750.
    """
    return range(max(0, position - window + 1), position + 1)


def attention_mask(positions: Sequence[int], window: int) -> NDArray[np.bool_]:
    """Return (P, P): may the query of this row see the key of this column?"""
    keys = np.asarray(positions)
    ranges = [attended(position, window) for position in positions]
    return np.array([(keys >= seen.start) & (keys < seen.stop) for seen in ranges])


def gelu(x: Array) -> Array:
    """Apply the exact GELU, with erf and not tanh."""
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def rotate(x: Array, positions: Sequence[int], theta: float) -> Array:
    """Apply RoPE to (H, P, D): pair j, dims 2j and 2j+1, turns by position * theta ** (-2j / D)."""
    head_dim = x.shape[-1]
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)  # (D / 2,)
    angles = np.outer(np.asarray(positions, dtype=np.float64), frequencies)  # (P, D / 2)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


def causal_conv(x: Array, weight: Array, bias: Array, stride: int) -> Array:
    """Convolve (P, C_in) with (C_out, C_in, 3) -> (P / stride, C_out), zeros on the left alone."""
    kernel = weight.shape[-1]
    num_out = len(x) // stride
    padded = np.pad(x, ((kernel - stride, 0), (0, 0)))
    taps = [padded[k::stride][:num_out] @ weight[:, :, k].T for k in range(kernel)]
    return np.sum(taps, axis=0) + bias


def hertz_to_mel(hertz: float) -> float:
    """Convert on Slaney's scale: 200/3 Hz a mel up to 1 kHz, then 27 mels per factor 6.4."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000, 6.4)


def mel_to_hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def mel_filters(num_mel_bins: int) -> Array:
    """Return (201, num_mel_bins): triangles from 0 to 8 kHz, each of unit area over frequency."""
    bins_hz = np.arange(WINDOW_SAMPLES // 2 + 1) * SAMPLE_RATE_HZ / WINDOW_SAMPLES
    top_mel = hertz_to_mel(SAMPLE_RATE_HZ / 2)
    corners_hz = [mel_to_hertz(mel) for mel in np.linspace(0, top_mel, num_mel_bins + 2)]
    filters = np.zeros((len(bins_hz), num_mel_bins))
    for m in range(num_mel_bins):
        low, peak, high = corners_hz[m : m + 3]
        rising, falling = (bins_hz - low) / (peak - low), (high - bins_hz) / (high - peak)
        filters[:, m] = np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)
    return filters


class Oracle:
    """The model of one checkpoint folder; every method is a pure function of its arguments."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        params = json.loads((folder / "params.json").read_text())
        audio_params = params["multimodal"]["whisper_model_args"]
        encoder_params = audio_params["encoder_args"]
        mel_params = encoder_params["audio_encoding_args"]
        tensors = load_file(folder / "consolidated.safetensors")
        self.weights: dict[str, Array] = {k: v.double().numpy() for k, v in tensors.items()}
        self.encoder_stack = Stack.from_params(ENCODER + "transformer.", encoder_params)
        self.decoder_stack = Stack.from_params("", params)
        self.num_mel_bins: int = mel_params["num_mel_bins"]
        self.global_log_mel_max: float = mel_params["global_log_mel_max"]
        self.frames_per_token: int = audio_params["downsample_args"]["downsample_factor"]
        self.samples_per_token = HOP_SAMPLES * math.prod(CONV_STRIDES) * self.frames_per_token
        self.embeddings = self.weights[EMBEDDING + "tok_embeddings.weight"]  # (vocab, dim)

    def pad(self, samples: NDArray[np.floating], delay_tokens: int) -> Array:
        """Return the samples between the silences that the model expects, a multiple of 1280."""
        left = NUM_LEFT_PAD_TOKENS * self.samples_per_token
        to_whole_token = -len(samples) % self.samples_per_token
        right = (delay_tokens + NUM_EXTRA_RIGHT_PAD_TOKENS) * self.samples_per_token
        return np.pad(samples.astype(np.float64), (left, to_whole_token + right))

    def log_mel(self, padded: Array) -> Array:
        """Return (M, 128): mel frame f looks at samples [160f - 200, 160f + 200)."""
        half = WINDOW_SAMPLES // 2
        num_frames = len(padded) // HOP_SAMPLES
        framed = np.pad(padded.astype(np.float64), half)
        starts = HOP_SAMPLES * np.arange(num_frames)
        frames = framed[starts[:, None] + np.arange(WINDOW_SAMPLES)]  # (M, 400)
        turns = np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * turns)
        angles = 2 * np.pi * np.outer(turns, np.arange(half + 1))  # (400, 201)
        windowed = frames * hann
        power = (windowed @ np.cos(angles)) ** 2 + (windowed @ np.sin(angles)) ** 2  # (M, 201)
        log_mel = np.log10(np.maximum(power @ mel_filters(self.num_mel_bins), 1e-10))
        return (np.maximum(log_mel, self.global_log_mel_max - 8) + 4) / 4

    def encoder(self, mel: Array) -> Array:
        """Return (F, encoder dim) after the final norm, for (M, 128) mel frames."""
        x = mel.astype(np.float64)
        for i, stride in enumerate(CONV_STRIDES):
            name = f"{ENCODER}conv_layers.{i}.conv."
            weight, bias = self.weights[name + "weight"], self.weights[name + "bias"]
            x = gelu(causal_conv(x, weight, bias, stride))
        return self._transformer(x, range(len(x)), self.encoder_stack)

    def adapter(self, encoder_out: Array) -> Array:
        """Return (T, dim): the frames of one token side by side, through two linear layers."""
        frame_dim = encoder_out.shape[-1]
        x = encoder_out.reshape(-1, self.frames_per_token * frame_dim)
        name = EMBEDDING + "audio_language_projection."
        return self._linear(gelu(self._linear(x, name + "0")), name + "2")

    def audio_embeddings(self, samples: NDArray[np.floating], n_delay: int) -> Array:
        """Return the adapter's outputs (T, dim) for a whole utterance, padded here."""
        return self.adapter(self.encoder(self.log_mel(self.pad(samples, n_delay))))

    def logits(self, adapter_out: Array, token_ids: Sequence[int], n_delay: int) -> Array:
        """Return (len(token_ids), vocab) for these ids at positions 0, 1, 2, ..."""
        positions = range(len(token_ids))
        return self._decoder(adapter_out, token_ids, positions, n_delay) @ self.embeddings.T

    def prompt(self, n_delay: int) -> list[int]:
        return [BEGIN_ID] + [PAD_ID] * (NUM_LEFT_PAD_TOKENS + n_delay)

    def generate(self, samples: NDArray[np.floating], n_delay: int) -> Generation:
        """Decode the utterance greedily: one id per token of audio that the prompt leaves over.

        Each step computes afresh every position that can influence the newest one. A layer looks
        `window - 1` positions back, so no layer's output reaches further than their sum.
        """
        adapter_out = self.audio_embeddings(samples, n_delay)
        reach = self.decoder_stack.n_layers * (self.decoder_stack.sliding_window - 1)
        ids = self.prompt(n_delay)
        out = Generation([], [], [])
        while len(ids) < len(adapter_out):
            positions = range(len(ids))[-(reach + 1) :]
            hidden = self._decoder(adapter_out, ids, positions, n_delay)[-1]  # (dim,)
            logits = (self.embeddings * hidden).sum(axis=-1)  # (vocab,)
            second, best = np.argsort(logits)[-2:]
            ids.append(int(logits.argmax()))  # of equal logits, the lowest id
            out.ids.append(ids[-1])
            out.logprobs.append(float(log_softmax(logits)[best]))
            out.margins.append(float(logits[best] - logits[second]))
        return out

    def greedy(self, samples: NDArray[np.floating], n_delay: int) -> list[int]:
        return self.generate(samples, n_delay).ids

    def logprobs(self, samples: NDArray[np.floating], n_delay: int) -> list[float]:
        return self.generate(samples, n_delay).logprobs

    def delay_scales(self, n_delay: int) -> list[Array]:
        """Return, for each decoder layer, what `1 +` multiplies its normed FFN input: (dim,)."""
        half = self.embeddings.shape[1] // 2
        angles = n_delay * np.exp(-math.log(10_000) * np.arange(half) / half)
        condition = np.concatenate([np.cos(angles), np.sin(angles)])
        names = [f"layers.{i}.ada_rms_norm_t_cond." for i in range(self.decoder_stack.n_layers)]
        return [self._linear(gelu(self._linear(condition, n + "0")), n + "2") for n in names]

    def _decoder(
        self, adapter_out: Array, token_ids: Sequence[int], positions: range, n_delay: int
    ) -> Array:
        """Return (P, dim) after the final norm, as if nothing came before the first position."""
        audio = adapter_out[positions.start : positions.stop]
        x = audio + self.embeddings[list(token_ids[positions.start : positions.stop])]
        return self._transformer(x, positions, self.decoder_stack, self.delay_scales(n_delay))

    def _transformer(
        self, x: Array, positions: range, stack: Stack, ffn_scales: list[Array] | None = None
    ) -> Array:
        """Run (P, C) through all layers and the final norm."""
        mask = attention_mask(positions, stack.sliding_window)
        for i in range(stack.n_layers):
            layer = f"{stack.prefix}layers.{i}."
            h = self._norm(x, layer + "attention_norm", stack.norm_eps)
            x = x + self._attention(h, positions, mask, layer + "attention.", stack)
            h = self._norm(x, layer + "ffn_norm", stack.norm_eps)
            if ffn_scales is not None:
                h = h * (1 + ffn_scales[i])
            ffn = layer + "feed_forward."
            gated = silu(self._linear(h, ffn + "w1")) * self._linear(h, ffn + "w3")
            x = x + self._linear(gated, ffn + "w2")
        return self._norm(x, stack.prefix + "norm", stack.norm_eps)

    def _attention(
        self, x: Array, positions: range, mask: NDArray[np.bool_], name: str, stack: Stack
    ) -> Array:
        """Mix (P, C) over positions; query head h reads key head h // (heads per key head)."""
        queries = self._heads(x, name + "wq", stack.n_heads)  # (H, P, D)
        keys = self._heads(x, name + "wk", stack.n_kv_heads)  # (H_kv, P, D)
        values = self._heads(x, name + "wv", stack.n_kv_heads)
        queries = rotate(queries, positions, stack.rope_theta)
        keys = rotate(keys, positions, stack.rope_theta)
        group = stack.n_heads // stack.n_kv_heads
        mixed = []
        for h in range(stack.n_heads):
            scores = queries[h] @ keys[h // group].T / math.sqrt(stack.head_dim)  # (P, P)
            weights = np.exp(log_softmax(np.where(mask, scores, -np.inf)))
            mixed.append(weights @ values[h // group])
        return self._linear(np.concatenate(mixed, axis=-1), name + "wo")

    def _heads(self, x: Array, name: str, num_heads: int) -> Array:
        projected = self._linear(x, name)
        return projected.reshape(len(x), num_heads, -1).transpose(1, 0, 2)

    def _linear(self, x: Array, name: str) -> Array:
        """Multiply by the named weight; the file itself says which layers have a bias."""
        out = x @ self.weights[name + ".weight"].T
        return out + self.weights.get(name + ".bias", 0.0)

    def _norm(self, x: Array, name: str, eps: float) -> Array:
        rms = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
        return x / rms * self.weights[name + ".weight"]
