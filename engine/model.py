"""A model ready to run: the one face of weights, kernels, tokenizer and chat template."""

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engine.batch import Chunk
from engine.chat import TEMPLATE_KEY, ChatTemplate
from engine.config import ModelConfig
from engine.errors import ModelFileError, ParamError, TemplateError
from engine.gguf import GGUFFile
from engine.kernels import kernel_set
from engine.kernels.protocol import Cache, FloatArray, KernelSet
from engine.quants import BLOCK_FORMATS, Tensor, unpack
from engine.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""


def _unobserved(_stage: str, _fraction: float) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class ModelText:
    """What of a model file is about text; `chat_template` is None if the file has none."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def of(cls, file: GGUFFile) -> Self:
        """The tokenizer and chat template in the open `file`; raises `ModelFileError`."""
        tokenizer = Tokenizer.from_gguf(file)
        try:
            return cls(tokenizer, ChatTemplate.from_gguf(file, tokenizer))
        except TemplateError as error:
            raise ModelFileError(file.path, f"does not compile: {error}", TEMPLATE_KEY) from error


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What `load` made of a model file; `chat_template` is None if the file has none. Nothing of the file stays open.

    One thread at a time may run `forward` on one cache; the rest may be used by any.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    _kernel_set: KernelSet = field(repr=False)
    _weights: Any = field(repr=False)
    _file_digest: bytes = field(repr=False)
    rounds_floats: bool
    """Whether float weights of the file were rounded to 8 bits, because the kernels are faster with these."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        kernels: str = "auto",
        threads: int | None = None,
        weights: str = "auto",
        progress: Progress = _unobserved,
    ) -> Self:
        """The model in the GGUF file at `path`, as `of` makes it."""
        with GGUFFile.open(path) as file:
            config, text = ModelConfig.from_gguf(file), ModelText.of(file)
            return cls.of(file, config, text, kernels=kernels, threads=threads, weights=weights, progress=progress)

    @classmethod
    def of(
        cls,
        file: GGUFFile,
        config: ModelConfig,
        text: ModelText,
        *,
        kernels: str = "auto",
        threads: int | None = None,
        weights: str = "auto",
        progress: Progress = _unobserved,
        digest: Callable[[], bytes] | None = None,
    ) -> Self:
        """The model in the open `file`, of which `config` and `text` are, its weights packed for a set of `kernels`.

        `threads` None is one a physical core; `weights` "f32" keeps float weights, which some kernels round to 8 bits.
        `digest` gives what `file.digest` would, if it has been asked for already.
        Raises `ModelFileError` for a file that cannot be served, a broken chat template included, and `ParamError` for
        a name that is not in `engine.kernels.NAMES`, `weights` not in its `WEIGHTS`, or `threads` below 1.
        """
        chosen = kernel_set(kernels, threads=threads, weights=weights)

        def tensor(name: str) -> Tensor:
            raw = file.data(name)
            info = file.tensors[name]
            return unpack(info.type_id, raw, info.shape)

        has_floats = any(
            len(info.shape) > 1 and BLOCK_FORMATS[info.type_id].block_size == 1 for info in file.tensors.values()
        )
        packed = chosen.pack(config, tensor, lambda fraction: progress("packing weights", fraction))
        progress("hashing the file", 0.0)
        file_digest = (digest or file.digest)()
        progress("hashing the file", 1.0)
        rounds_floats = chosen.rounds_floats and has_floats
        return cls(file.path, config, text.tokenizer, text.chat_template, chosen, packed, file_digest, rounds_floats)

    @property
    def kernels(self) -> str:
        """The name of the kernel set in use, never "auto"."""
        return self._kernel_set.name

    @property
    def cpu_path(self) -> str:
        """What decides the bits beside the file and the kernel set: library versions and CPU features in use."""
        return self._kernel_set.cpu_path

    def with_threads(self, threads: int) -> Self:
        """This model run by `threads` threads, if the kernels have a choice. The two must not run at the same time."""
        return dataclasses.replace(self, _kernel_set=self._kernel_set.with_threads(threads))

    def new_cache(self, n_slots: int, max_len: int, dtype: str = "float16") -> Cache:
        """An empty cache for `forward`; raises `CacheError` for a size below 1 or a dtype but float32 and float16."""
        return self._kernel_set.new_cache(self.config, n_slots, max_len, dtype)

    def forward(self, chunks: Sequence[Chunk], cache: Cache) -> FloatArray:
        """Append `chunks` to their slots of `cache`; float32 logits [rows that want them, V], in row order.

        Raises, having changed nothing, `CacheError` for chunks that do not fit the cache and `ParamError` for a token
        id that is not in the vocabulary.
        """
        for chunk in chunks:
            for token_id in chunk.token_ids:
                if not 0 <= token_id < self.config.vocab_size:
                    raise ParamError(
                        "prompt", f"a token id must be in [0, {self.config.vocab_size - 1}], got {token_id}"
                    )
        return self._kernel_set.forward(self._weights, chunks, cache)

    def fingerprint(self, kv_dtype: str) -> str:
        """The `system_fingerprint`, "fp_" and 16 hex digits: where it is equal, equal requests have equal answers.

        A hash of the file's content, the kernel set, its CPU path and its rounding of weights, the cache's dtype, and
        Lockstep's version.
        """
        parts = (
            self._file_digest.hex(),
            self._kernel_set.name,
            self._kernel_set.cpu_path,
            kv_dtype,
            f"rounds_floats={self.rounds_floats}",
            importlib.metadata.version("lockstep-llm"),
        )
        return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
