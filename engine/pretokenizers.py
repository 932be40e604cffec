"""How a text is cut into words before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`.

Merges never cross a word, so the wrong cut gives valid but wrong tokens: a name that is not here is refused. Every rule
but the default one is held against llama.cpp's vectors in `tests/e2e`; names that share a rule here share it there. The
expressions are those of the models' own tokenizer files; where these ignore case in English contractions, the letters
are spelled out.
"""

import msgspec

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"

# github.com/openai/gpt-2, src/encoder.py
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# github.com/meta-llama/llama3, llama/tokenizer.py; the others differ in the length of numbers and in combining marks
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_DIGIT = r"\p{N}"


class PreTokenizer(msgspec.Struct, frozen=True):
    """Expressions applied one after the other, each cutting the words the former left.

    With `ignore_merges`, a word that is a token is that token, whatever the merges say. `add_bos` is the rule for
    files that do not state one.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

# For files that say "default" or nothing: llama.cpp's guess, which is also how files from before the key were made.
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS = {
    "command-r": _SINGLE_DIGITS,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "default": _DEFAULT,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "falcon3": _LLAMA_BPE,
    "gpt-2": _PLAIN,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "mpt": _PLAIN,
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
}
